"""The smallest real kernel, for tests of the compile layer: y = factor * x + add, `factor` baked into the code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cute_kernels.compile.spec import KernelSpec


@dataclass(frozen=True)
class ScaleSpec(KernelSpec):
    factor: int = 2

    operation: ClassVar[str] = "test_scale"

    @property
    def module(self) -> str:
        return "tests.scale.kernel"

    @property
    def argument_names(self) -> tuple[str, ...]:
        return ("x", "y", "add")
