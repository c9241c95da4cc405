"""Runs the library's public calls on the emulated device: CPU tensors, the kernels' PTX, the host code of the product.

The only thing replaced is the device: `ops` would send CPU tensors to the reference, here they go to the compiled kernel, whose
launch the emulator receives. Outputs are declared to it: what a kernel must not write is read-only, tables count as unwritten.
"""

from __future__ import annotations

import contextlib
import inspect
import mmap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from cute_kernels import launching
from cute_kernels.compile import loader
from cute_kernels.compile.spec import KernelSpec
from cute_kernels.target import Target
from ptx_emulator import UNWRITTEN, Memory, Result, device

POISON = 0xA5  # of bytes that a kernel has yet to write
LIBRARIES = Path(__file__).resolve().parents[2] / "build" / "emulated"
# What each kernel writes; everything else is read-only. The second set must be written before it is read.
WRITTEN = {
    "compress_store": ({"state", "kv_cache", "scratch"}, set()),
    "gather_upconvert": ({"out"}, set()),
    "convert_indices": ({"out", "counts"}, set()),
    "sparse_indices": (
        {"table", "lengths", "window_table", "window_lengths", "compressed_table", "compressed_lengths"},
        {"table", "lengths", "window_table", "window_lengths", "compressed_table", "compressed_lengths"},
    ),
    "qkv_insert": ({"out", "kv_cache"}, {"out"}),
}


def prepare(name: str, memory: Memory, arguments: dict[str, Any]) -> None:
    """Declare outputs before a launch."""
    written, unwritten = WRITTEN[name.partition("[")[0]]
    for buffer in memory.buffers:
        buffer.writable = buffer.name in written
        if buffer.name in unwritten:
            buffer.mark(UNWRITTEN, True)
            others = (other for other in memory.buffers if other is not buffer)
            if all(other.end <= buffer.address or buffer.end <= other.address for other in others):
                buffer.fill(POISON)  # what a kernel leaves out must not be right by luck


settings = device.Settings(prepare=prepare, independent=lambda arguments: bool(arguments.get("independent", 0)))


loaded: list[device.EmulatedKernel] = []  # by this process


def executor(compiled: loader.CompiledObject, spec: KernelSpec) -> device.EmulatedKernel:
    """The `compile.loader` executor that loads objects onto the emulated device."""
    loaded.append(
        device.load(
            compiled.object,
            compiled.symbol,
            compiled.ptx.read_text(),
            argument_names=spec.argument_names,
            name=str(spec),
            ptx_file=compiled.ptx,
            shared_limit=spec.target.shared_bytes,
            settings=settings,
            build_folder=LIBRARIES,
        )
    )
    return loaded[-1]


@contextlib.contextmanager
def emulated(target: Target | str, **changes: Any) -> Iterator[device.Settings]:
    """Public calls of a `with` block run on the emulated device of `target`; `changes` are those of `device.Settings`."""
    resolved = Target.named(target) if isinstance(target, str) else target

    def serve(operation: Any, *values: Any) -> Any:
        a = dict(zip(operation.form.names, values, strict=True))
        chosen = a["target"] or resolved
        return operation.launch({**a, "target": chosen}, chosen)

    before = vars(settings).copy()
    vars(settings).update(changes)
    try:
        with loader.use_executor(executor), mock.patch.object(launching.Operation, "serve", serve):
            yield settings
    finally:
        vars(settings).update(before)


def call(function: Callable[..., Any], target: Target | str, *args: Any, **kwargs: Any) -> Any:
    """One public call on the emulated device."""
    bound = inspect.signature(function).bind(*args, **kwargs)
    with emulated(target):
        return function(*bound.args, **bound.kwargs)


def at_alignment(x: torch.Tensor, alignment: int) -> torch.Tensor:
    """A copy of `x`, strides kept, whose address is a multiple of `alignment` (16 or 32) and of no larger power of two up to 32."""
    extent = 1 + sum(s * (n - 1) for n, s in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    size = x.element_size()
    storage = torch.zeros(extent + 64 // size, dtype=x.dtype)
    start = (-storage.data_ptr() % 32 + (16 if alignment == 16 else 0)) // size
    flat = storage[start : start + extent]
    view = flat.as_strided(x.shape, x.stride(), flat.storage_offset()) if x.numel() else flat.view(x.shape)
    return view.copy_(x)


def sparse(*shape: int, strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A strided tensor over reserved memory: only the pages touched exist, however far apart its rows lie."""
    extent = 1 + sum(s * (n - 1) for n, s in zip(shape, strides, strict=True))
    size = torch.empty((), dtype=dtype).element_size()
    region = mmap.mmap(-1, extent * size + 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0))
    return torch.frombuffer(region, dtype=torch.uint8)[: extent * size].view(dtype).as_strided(shape, strides)


class Coverage:
    """PTX lines executed by the launches of each kernel; hand `record` to `emulated` as `on_result`."""

    def __init__(self) -> None:
        self.lines: dict[str, dict[int, int]] = {}
        self.texts: dict[int, str] = {}

    def record(self, result: Result) -> None:
        lines = self.lines.setdefault(result.kernel, {})
        for line, (runs, _) in result.lines.items():
            lines[line] = lines.get(line, 0) + runs
        self.texts.update(result.texts)

    def require(self, name: str, allowed: float = 0.02) -> None:
        """`name` alone was launched, and at most this share of its PTX lines was never executed."""
        assert set(self.lines) == {name}, f"launched: {', '.join(self.lines) or 'nothing'}; wanted: {name}"
        lines = self.lines[name]
        never = [line for line, runs in sorted(lines.items()) if not runs]
        listing = "\n".join(f"  {line}: {self.texts[line]}" for line in never[:60])
        assert len(never) <= allowed * len(lines), f"{name}: {len(never)} of {len(lines)} PTX lines never executed\n{listing}"
