"""One launch of an operation as data: its arguments by name, copies of it, and what it writes."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from cute_kernels import ops
from cute_kernels.indices import CombinedIndices, SegmentIndices
from cute_kernels.target import Target

# What each operation writes; everything else stays as it is.
WRITTEN = {
    "compress_store": ("state", "kv_cache"),
    "sparse_indices": ("out",),
    "qkv_insert": ("out", "kv_cache"),
    "gather_upconvert": ("out",),
    "convert_indices": ("out", "counts"),
}


@dataclass(frozen=True)
class Call:
    """A public call with its arguments by name, the target left out."""

    operation: str
    arguments: dict[str, Any]

    @staticmethod
    def of(operation: str, args: tuple[Any, ...], options: dict[str, Any]) -> Call:
        bound = inspect.signature(getattr(ops, operation)).bind(*args, **options)
        return Call(operation, dict(bound.arguments))

    def launch(self, target: Target | None) -> Callable[[], object]:
        """The call as a function of nothing."""
        call = getattr(ops, self.operation)
        return lambda: call(**self.arguments, target=target)

    def outputs(self) -> dict[str, torch.Tensor]:
        """The tensors it writes, by name."""
        found: dict[str, torch.Tensor] = {}
        for name in WRITTEN[self.operation]:
            value = self.arguments.get(name)
            if isinstance(value, CombinedIndices | SegmentIndices):
                found |= {f"{name}.{field}": tensor for field, tensor in vars(value).items() if tensor is not None}
            elif value is not None:
                found[name] = value
        return found

    def clone(self, *names: str) -> Call:
        """A call whose tensors (those of the arguments named; default all) lie in memory of their own."""
        copied = {n: _copied(v) if n in names or not names else v for n, v in self.arguments.items()}
        return Call(self.operation, copied)

    def tensors(self) -> Iterator[torch.Tensor]:
        for value in self.arguments.values():
            if isinstance(value, torch.Tensor):
                yield value
            elif isinstance(value, CombinedIndices | SegmentIndices):
                yield from (t for t in vars(value).values() if t is not None)


def storage(x: torch.Tensor) -> torch.Tensor:
    """All bytes behind a tensor, those between its rows included, as uint8."""
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())


def _copied(value: Any) -> Any:
    if isinstance(value, CombinedIndices | SegmentIndices):
        return dataclasses.replace(value, **{n: _copied(t) for n, t in vars(value).items()})
    if not isinstance(value, torch.Tensor):
        return value
    bytes_ = storage(value).clone()
    return torch.empty(0, dtype=value.dtype, device=value.device).set_(
        bytes_.untyped_storage(), value.storage_offset(), value.shape, value.stride()
    )
