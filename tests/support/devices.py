"""Moving test arguments to a GPU without changing what they are: strides, offsets and alignment stay."""

from __future__ import annotations

from typing import Any

import torch

from cute_kernels.indices import CombinedIndices, SegmentIndices


def on_gpu(value: Any) -> Any:
    """CPU tensors (also those within index tables) moved to the GPU with their whole storage; meta tensors become CPU tensors."""
    if isinstance(value, CombinedIndices | SegmentIndices):
        return type(value)(*(on_gpu(t) for t in vars(value).values()))
    if not isinstance(value, torch.Tensor):
        return value
    if value.device.type != "cpu":
        return torch.zeros(value.shape, dtype=value.dtype)
    storage = torch.empty(0, dtype=torch.uint8).set_(value.untyped_storage())
    whole = storage[: storage.numel() // value.element_size() * value.element_size()].cuda().view(value.dtype)
    return whole.as_strided(value.shape, value.stride(), value.storage_offset())
