"""Runs the library's public calls on the emulated device: CPU tensors, the kernels' PTX, the host code of the product.

The only thing replaced is the device: `ops` would send CPU tensors to the reference, here they go to the compiled kernel, whose
launch the emulator receives. Outputs are declared to it: what a kernel must not write is read-only, tables count as unwritten.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from cute_kernels import ops
from cute_kernels.compile import loader
from cute_kernels.compile.spec import KernelSpec
from cute_kernels.target import Target
from ptx_emulator import UNWRITTEN, Memory, device

LIBRARIES = Path(__file__).resolve().parents[2] / "build" / "emulated"
# What each kernel writes; everything else is read-only. The second set must be written before it is read.
WRITTEN = {
    "compress_store": ({"state", "kv_cache"}, set()),
    "sparse_indices": (
        {"table", "lengths", "window_table", "window_lengths", "compressed_table", "compressed_lengths"},
        {"table", "lengths", "window_table", "window_lengths", "compressed_table", "compressed_lengths"},
    ),
}


def prepare(name: str, memory: Memory, arguments: dict[str, Any]) -> None:
    """Declare outputs before a launch."""
    written, unwritten = WRITTEN[name.partition("[")[0]]
    for buffer in memory.buffers:
        buffer.writable = buffer.name in written
        if buffer.name in unwritten:
            buffer.mark(UNWRITTEN, True)


settings = device.Settings(prepare=prepare)


def executor(compiled: loader.CompiledObject, spec: KernelSpec) -> device.EmulatedKernel:
    """The `compile.loader` executor that loads objects onto the emulated device."""
    return device.load(
        compiled.object,
        compiled.symbol,
        compiled.ptx.read_text(),
        argument_names=spec.argument_names,
        name=str(spec),
        shared_limit=spec.target.shared_bytes,
        settings=settings,
        build_folder=LIBRARIES,
    )


@contextlib.contextmanager
def emulated(target: Target | str, **changes: Any) -> Iterator[device.Settings]:
    """Public calls of a `with` block run on the emulated device of `target`; `changes` are those of `device.Settings`."""
    resolved = Target.named(target) if isinstance(target, str) else target

    def run(operation: Any, a: Any) -> Any:
        chosen = a["target"] or resolved
        return operation.launch({**a, "target": chosen}, chosen, operation.vectors, chosen.vector_bytes, {})

    before = vars(settings).copy()
    vars(settings).update(changes)
    try:
        with loader.use_executor(executor), mock.patch.object(ops._Operation, "run", run):
            yield settings
    finally:
        vars(settings).update(before)


def call(function: Callable[..., Any], target: Target | str, *args: Any, **kwargs: Any) -> Any:
    """One public call on the emulated device."""
    bound = inspect.signature(function).bind(*args, **kwargs)
    with emulated(target):
        return function(*bound.args, **bound.kwargs)
