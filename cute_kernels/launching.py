"""What stands behind every public call that has a kernel: the path by device, checks, plan, launch.

A call's plan depends on a few facts (scalars, formats, which extents agree), never on how many rows a step has; so it is made once
for each combination of them and remembered. All else that could be wrong the compiled function refuses, on every call.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from cute_kernels import dispatch, env, validate
from cute_kernels.compile import cache
from cute_kernels.compile.spec import KernelSpec
from cute_kernels.target import Target

_NONE_PREPARED: Mapping[str, Any] = {}


class Refused(Exception):
    """Facts that no kernel serves: `Operation.check` says which argument is at fault."""


@dataclass(frozen=True)
class Plan:
    """What all calls of the same facts launch.

    target     what it is for
    specs      the kernel by access width: 16 bytes and, where the target has it, 32; empty: there is nothing to launch
    constants  scalar arguments of the compiled function by name
    size       of the outputs, where the operation makes them: compressed columns, padded heads
    ordered    picks the compiled function's arguments, in order, from arguments by name
    """

    target: Target
    specs: tuple[KernelSpec, ...]
    constants: Mapping[str, Any]
    size: int
    ordered: Callable[[Mapping[str, Any]], tuple[Any, ...]]

    @staticmethod
    def of(spec: KernelSpec, constants: Mapping[str, Any], *, rows: bool, size: int = 0) -> Plan:
        """The plan around `spec`, whose access width is a call's to choose; rows False: nothing to launch."""
        specs = tuple(replace(spec, vector_bytes=width) for width in (16, 32) if width <= spec.target.vector_bytes)
        return Plan(spec.target, specs if rows else (), constants, size, operator.itemgetter(*spec.argument_names))

    def spec(self, vectors: tuple[str, ...], arguments: Mapping[str, Any]) -> KernelSpec:
        """The kernel for the arguments' alignment. Where there is but one the compiled function checks it."""
        if len(self.specs) == 1:
            return self.specs[0]
        return self.specs[validate.vector_bytes([arguments[name] for name in vectors if name in arguments]) // 32]


# Told of a launch: the compiled function, its plan, the outputs by the compiled function's names, and what the call returns.
Launched = Callable[[Callable[..., Any], Plan, Mapping[str, Any], Any], None]


@dataclass(frozen=True)
class Operation:
    """One kernel behind a public call.

    public     the call itself, whose signature names the arguments
    anchor     argument whose device decides, and through which TVM-FFI learns torch's current stream
    tensors    what each tensor argument must be
    vectors    arguments of the compiled function whose alignment chooses the access width
    check      all checks; value_check: those that read tensors
    facts      all that planning looks at, as the arguments of `plan` after the target; the same for steps of any size
    shapes     tensors of which `facts` sees the shape at most; layouts: those of which it sees dtype and strides too. Of other
               tensors it sees whether they are None
    plan       (target, *facts) -> Plan, remembered; makes the checks that the compiled function cannot
    made       arguments that the call returns, or makes where they are None
    outputs    (arguments, plan) -> those of them that the compiled function takes, by its names, and what the call returns
    reference  the same call in plain PyTorch
    """

    public: Callable[..., Any]
    anchor: str
    tensors: tuple[validate.Arg, ...]
    vectors: tuple[str, ...]
    check: Callable[[Mapping[str, Any], Target | None], None]
    value_check: Callable[[Mapping[str, Any]], None]
    facts: Callable[[Mapping[str, Any]], tuple[Any, ...]]
    shapes: tuple[str, ...]
    layouts: tuple[str, ...]
    plan: Callable[..., Plan]
    made: tuple[str, ...]
    outputs: Callable[[Mapping[str, Any], Plan], tuple[Mapping[str, Any], Any]]
    reference: Callable[[Mapping[str, Any], Target | None], Any]

    def run(self, a: Mapping[str, Any]) -> Any:
        """Checks, then runs on the device of the anchor; with backend="reference" plain PyTorch there."""
        anchor, plain = a[self.anchor], a.get("backend") == "reference"
        if isinstance(anchor, torch.Tensor) and anchor.is_cuda and not plain:
            return self.launch(a, dispatch.cuda_target(anchor, a["target"]))
        validate.on_cpu_or_cuda(self.anchor, anchor)
        target = dispatch.named_target(a["target"]) if plain else dispatch.resolve_target(anchor.device, a["target"])
        self.check(a, target)
        if env.VALIDATE.flag():
            self.value_check(a)
        return self.reference(a, target)

    def launch(
        self, a: Mapping[str, Any], target: Target, prepared: Mapping[str, Any] = _NONE_PREPARED, launched: Launched | None = None
    ) -> Any:
        """Runs the kernel; `prepared` overrides arguments by their TVM-FFI tensors, `launched` is told what was launched."""
        if env.VALIDATE.flag():
            self.check(a, target)
            self.value_check(a)
        try:
            plan = self.plan(target, *self.facts(a))
            outputs, result = self.outputs(a, plan)
            arguments = {**a, **plan.constants, **outputs}
            spec = plan.spec(self.vectors, arguments) if plan.specs else None
        except Exception:
            if (regular := self._regular(a, target)) is None:
                raise
            return self.launch(regular, target, prepared)
        if spec is None:
            self.check(a, target)
            return result
        kernel = cache.get(spec)
        try:
            kernel(*plan.ordered({**arguments, **prepared} if prepared else arguments))
        except (TypeError, ValueError, RuntimeError):
            if (regular := self._regular(a, target)) is None:
                raise
            return self.launch(regular, target, prepared)
        if launched is not None:
            launched(kernel, plan, outputs, result)
        return result

    def _regular(self, a: Mapping[str, Any], target: Target) -> Mapping[str, Any] | None:
        """After a refusal: the typed error of the argument at fault, else `a` with regular strides for empty tables, if it has others."""
        self.check(a, target)
        regular = validate.with_regular_empties(self.tensors, a)
        return None if regular is a else regular


def reference_call(name: str, a: Mapping[str, Any], **more: Any) -> Any:
    """The reference's function `name` with a public call's arguments."""
    from cute_kernels import reference

    function = getattr(reference, name)
    given = {key: value for key, value in a.items() if key not in ("target", "backend")}
    return function(**given, **more)
