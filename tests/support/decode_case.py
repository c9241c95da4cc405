"""Inputs of a whole decode call: pools with any spans, block tables, index tables, padded q, sinks."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

import cute_kernels as ck
from cute_kernels.kv_format import FORMATS
from cute_kernels.reference.quant import write_rows

FAMILY_FORMATS = {"sm100": ("bf16", "fp8"), "sm120": ("fp8_ds_mla",)}


@functools.cache
def pool(format_name: str, pages: int, page_rows: int, *, strided: bool, seed: int = 0) -> torch.Tensor:
    """A pool of random rows, made once and only read; `strided`: pages lie further apart than their size and begin inside the storage."""
    fmt = FORMATS[format_name]
    size = fmt.dtype.itemsize
    page_bytes = page_rows * fmt.row_bytes
    page_stride = page_bytes
    offset = 0
    if strided:
        unit = 16 if fmt.packed else fmt.row_bytes
        page_stride = -(-page_bytes // unit) * unit + 3 * unit
        offset = 5 * unit
    if fmt.packed:
        page_stride = -(-page_stride // 16) * 16
    storage = torch.full((offset + pages * page_stride,), 0xA5, dtype=torch.uint8)
    shape, strides = (pages, page_rows, fmt.row_elements), (page_stride // size, fmt.row_elements, 1)
    cache = storage.view(fmt.dtype).as_strided(shape, strides, offset // size)
    rows = torch.randn(pages * page_rows, 512, generator=torch.Generator().manual_seed(seed)) * 0.5
    write_rows(cache, torch.arange(pages * page_rows), rows, clamp="scale", scale=None, via_bf16=True)
    return cache


@dataclass
class DecodeCase:
    """Arguments of `decode` by name."""

    arguments: dict[str, Any]

    def run(self, **changes: Any) -> torch.Tensor:
        return ck.decode(**{**self.arguments, **changes})


def decode_case(
    family: str,
    format_name: str,
    num_heads: int,
    *,
    query_lens: tuple[int, ...] = (1, 1, 1, 3, 2),
    seq_lens: tuple[int, ...] = (300, 7, 129, 140, 3),
    ratio: int = 4,
    strided: bool = True,
    sinks: bool = True,
    width: int = 32,
    seed: int = 0,
    spare_rows: int = 2,
) -> DecodeCase:
    """A step of decode and prefill rows (a sequence length of 0 is a padding request), with NaN wherever nothing may be read."""
    gen = torch.Generator().manual_seed(seed)
    step = ck.StepMetadata.of(query_lens, seq_lens)
    requests, longest = len(query_lens), max(seq_lens)
    padded = ck.pad_q_heads(num_heads)
    page_rows = {1: 64, 4: 64, 128: 2}[ratio]

    def table(entries: int, rows: int) -> tuple[torch.Tensor, int]:
        columns = max(1, -(-entries // rows))
        return torch.randperm(requests * columns, generator=gen).int().view(requests, columns), requests * columns

    window_table, pages = table(longest, 16)
    swa = pool(format_name, pages, 16, strided=strided)
    slots = ck.slot_mapping(step, window_table, 16)
    more: dict[str, Any] = {}
    kv = None
    if ratio > 1:
        compressed_table, compressed_pages = table(longest // ratio, page_rows)
        kv = pool(format_name, compressed_pages, page_rows, strided=strided, seed=1)
        more = {"compressed": ck.PoolGeometry.of(kv), "compressed_block_table": compressed_table, "ratio": ratio}
        if ratio == 4:
            ids = torch.rand(step.num_tokens, longest // 4 + 8 + width, generator=gen).argsort(dim=1)[:, :width].int().contiguous()
            more |= {"ids": ids, "source": ck.IdSource.LOCAL}
        else:
            more |= {"source": ck.IdSource.ALL_GROUPS, "width": max(longest // ratio, 1)}
    indices = ck.sparse_indices(
        step.positions, step.token_to_req, window_table, window=ck.PoolGeometry.of(swa, "swa_cache"), slots=slots, target=family, **more
    )
    q = torch.randn(step.num_tokens + spare_rows, padded, 512, generator=gen)
    q[:, num_heads:] = torch.nan
    q[step.num_tokens :] = torch.nan
    q = q.to(torch.float8_e4m3fn if format_name == "fp8" else torch.bfloat16)
    scales = {"q_scale": 0.5, "kv_scale": 2.0} if format_name == "fp8" else {}
    sink = torch.linspace(-2, 3, num_heads) if sinks else None
    return DecodeCase(
        {"q": q, "swa_cache": swa, "kv_cache": kv, "step": step, "indices": indices, "num_heads": num_heads, "sinks": sink, **scales}
    )
