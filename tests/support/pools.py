"""KV pools for tests: one flat storage of bytes, a strided cache view into it, and addresses computed apart from the library."""

from __future__ import annotations

import numpy as np
import torch

from tests.support.bytes import ROW_BYTES, Pool

DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "fp8_ds_mla": torch.uint8}


def layout(kv_format: str, pages: int, page_rows: int, *, strided: bool = True, alignment: int = 32) -> Pool:
    """A pool with (or without) gaps between pages and a storage offset; strides are multiples of `alignment`, full rows' of whole rows."""
    row = ROW_BYTES[kv_format]
    gap = alignment if strided else 0
    stride = -(-page_rows * row // 16) * 16
    if strided:
        stride = -(-stride // alignment) * alignment + alignment if kv_format == "fp8_ds_mla" else stride + 3 * row
    return Pool(kv_format, gap, pages, page_rows, stride)


def storage_bytes(pool: Pool) -> int:
    """Bytes of a storage that holds the pool and 64 more, a multiple of 64."""
    return -(-(pool.base + pool.pages * pool.page_stride + 64) // 64) * 64


def cache_view(pool: Pool, storage: torch.Tensor) -> torch.Tensor:
    """The cache tensor [pages, page rows, 512 or 584] of a pool inside its uint8 storage."""
    dtype = DTYPES[pool.kv_format]
    size, width = dtype.itemsize, ROW_BYTES[pool.kv_format] // dtype.itemsize
    flat = storage.view(dtype)
    first = flat.storage_offset() + pool.base // size
    return flat.as_strided((pool.pages, pool.page_rows, width), (pool.page_stride // size, width, 1), first)


def owned_bytes(pool: Pool, size: int, slots: list[int]) -> np.ndarray:
    """bool [size]: the storage bytes of the rows at `slots`."""
    owned = np.zeros(size, dtype=bool)
    for slot in slots:
        for first, count in pool.spans(slot):
            owned[first : first + count] = True
    return owned
