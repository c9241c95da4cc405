"""Inputs as a serving engine has them, and the bytes that each operation must move on them.

Prefill requests of equal length start at 0, 1026, 515, 2048, repeating; decode positions are uniform in 512..2047; blocks and pages
are handed out in random order; rows of earlier steps lie in the state pool.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from cute_kernels.indices import CombinedIndices, IdSource, SegmentIndices
from cute_kernels.kv_format import FORMATS, PoolGeometry
from cute_kernels.save_policy import SavePolicy, overlap
from cute_kernels.scratch import compress_scratch

DEVICE = "cuda"
STARTS = (0, 1026, 515, 2048)
WINDOW_PAGE = 64
COS_ROWS = 1 << 14  # more than any position here


@dataclass(frozen=True)
class Step:
    """One step's rows on the device. requests: (first position, rows) of each; padding rows follow."""

    requests: tuple[tuple[int, int], ...]
    positions: torch.Tensor
    token_to_req: torch.Tensor
    padding: int = 0

    @property
    def rows(self) -> int:
        return len(self.positions)


def prefill(tokens: int, requests: int) -> tuple[tuple[int, int], ...]:
    return tuple((STARTS[r % 4], tokens // requests) for r in range(requests))


def decode(tokens: int, seed: int) -> tuple[tuple[int, int], ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple((int(p), 1) for p in torch.randint(512, 2048, (tokens,), generator=generator))


def make_step(requests: tuple[tuple[int, int], ...], padding: int = 0) -> Step:
    positions = torch.cat([torch.arange(s, s + n) for s, n in requests] + [torch.zeros(padding, dtype=torch.long)])
    owner = torch.cat([torch.full((n,), r) for r, (_, n) in enumerate(requests)] + [torch.zeros(padding, dtype=torch.long)])
    return Step(requests, positions.to(DEVICE), owner.int().to(DEVICE), padding)


def _tables(step: Step, first: list[int], last: list[int]) -> tuple[torch.Tensor, int]:
    """A block table in which blocks first..last of each request are its own, in random order, and the rest points anywhere."""
    counts = [b - a + 1 for a, b in zip(first, last, strict=True)]
    total = max(sum(counts), 1)
    order = torch.randperm(total)
    table = torch.randint(0, total, (len(step.requests), max(last) + 1))
    at = 0
    for r, (a, n) in enumerate(zip(first, counts, strict=True)):
        table[r, a : a + n] = order[at : at + n]
        at += n
    return table.int().to(DEVICE), total


def _slots(step: Step, table: torch.Tensor, places: torch.Tensor, rows: int) -> torch.Tensor:
    slots = table[step.token_to_req.long(), places // rows].long() * rows + places % rows
    slots[step.rows - step.padding :] = -1
    return slots


def compress_arguments(
    requests: tuple[tuple[int, int], ...], *, ratio: int, kv_format: str, save: SavePolicy | None, padding: int = 0
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) of `compress_store`; save None: the state is saved already (kv_score=None)."""
    step = make_step(requests, padding)
    width = 1024 if ratio == 4 else 512
    state_rows, page_rows = (4 if ratio == 4 else 8), 256 // ratio
    first = [max(0, s - ratio - overlap(ratio)) // state_rows for s, _ in requests]
    state_table, blocks = _tables(step, first, [(s + n - 1) // state_rows for s, n in requests])
    entries = step.positions // ratio
    kv_table, pages = _tables(
        step, [s // ratio // page_rows for s, _ in requests], [(s + n - 1) // ratio // page_rows for s, n in requests]
    )
    closing = (step.positions + 1) % ratio == 0
    kv_slots = torch.where(closing, _slots(step, kv_table, entries, page_rows), -1)
    fmt = FORMATS[kv_format]
    stride = -(-page_rows * fmt.row_bytes // 576) * 576 if fmt.packed else page_rows * fmt.row_elements
    cache = torch.empty(pages * stride, dtype=fmt.dtype, device=DEVICE).as_strided(
        (pages, page_rows, fmt.row_elements), (stride, fmt.row_elements, 1)
    )
    score = None if save is None else torch.randn(step.rows, 2 * width, device=DEVICE)
    args = (
        score,
        None if save is None else torch.randn(ratio, width, device=DEVICE),
        torch.randn(blocks, state_rows, 2 * width, device=DEVICE),
        state_table,
        step.positions,
        step.token_to_req,
        _slots(step, state_table, step.positions, state_rows),
        kv_slots,
        torch.randn(512, device=DEVICE).bfloat16(),
        torch.randn(COS_ROWS, 64, device=DEVICE),
        cache,
    )
    options: dict[str, Any] = {"ratio": ratio, "eps": 1e-6, "scratch": compress_scratch(DEVICE)}
    if save is not None:
        options["save"] = save
        if not save.every_row:
            options["seq_lens"] = torch.tensor([s + n for s, n in requests], dtype=torch.int32, device=DEVICE)
    if fmt.scaled:
        options["kv_scale"] = 0.5
    return args, options


@functools.lru_cache(maxsize=64)
def compress_bytes(requests: tuple[tuple[int, int], ...], *, ratio: int, kv_format: str, save: SavePolicy | None) -> int:
    """Bytes that one call must move: every score row that is pooled or saved read once, state rows, stored rows."""
    from cute_kernels.save_policy import is_saved

    row = 4 * 2 * (1024 if ratio == 4 else 512)
    half = row // 2 if ratio == 4 else row
    total = 0
    for start, count in requests:
        needed: set[tuple[int, int]] = set()
        for closing in range(start, start + count):
            if (closing + 1) % ratio:
                continue
            low = max(0, closing + 1 - ratio - overlap(ratio))
            needed.update((p, 0 if ratio == 4 and p <= closing - 4 else 1) for p in range(low, closing + 1))
            total += FORMATS[kv_format].row_bytes
        saved = {p for p in range(start, start + count) if save is not None and is_saved(p, start + count, ratio, save)}
        total += sum(half for p, _ in needed if p not in saved or save is None) + len(saved) * 2 * row
    return total


def index_arguments(
    requests: tuple[tuple[int, int], ...], *, k: int, family: str, ratio: int = 4
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) of `sparse_indices` with k valid local ids a row in random order, into the caller's tables."""
    step = make_step(requests)
    last = [s + n - 1 for s, n in requests]
    window_table, window_pages = _tables(step, [0] * len(last), [p // WINDOW_PAGE for p in last])
    page_rows = 256 // ratio
    compressed_table, pages = _tables(step, [0] * len(last), [p // ratio // page_rows for p in last])
    visible = (step.positions + 1) // ratio
    ids = torch.full((step.rows, k), -1, dtype=torch.int32, device=DEVICE)
    for begin in range(0, step.rows, 4096):  # a random subset of the visible entries, valid ones first
        part = visible[begin : begin + 4096, None]
        places = torch.rand(len(part), int(visible.max()) or 1, device=DEVICE)
        places[torch.arange(places.shape[1], device=DEVICE)[None] >= part] = 2.0
        values, order = places.topk(min(k, places.shape[1]), largest=False)
        ids[begin : begin + 4096, : order.shape[1]] = torch.where(values < 2, order, -1).int()
    spans = (WINDOW_PAGE * 3, page_rows * 3)

    def table(columns: int) -> torch.Tensor:
        return torch.empty(step.rows, columns, dtype=torch.int32, device=DEVICE)

    def lengths() -> torch.Tensor:
        return torch.empty(step.rows, dtype=torch.int32, device=DEVICE)

    out = CombinedIndices(table(128 + k), lengths()) if family == "sm100" else SegmentIndices(table(128), lengths(), table(k), lengths())
    options = {
        "window": PoolGeometry(window_pages, WINDOW_PAGE, spans[0]),
        "compressed": PoolGeometry(pages, page_rows, spans[1]),
        "source": IdSource.LOCAL,
        "ratio": ratio,
        "out": out,
    }
    return (step.positions, step.token_to_req, window_table, ids, compressed_table), options


def index_bytes(rows: int, k: int) -> int:
    """Ids read, table and length written; block tables stay in cache."""
    return rows * (4 * k + 4 * (128 + k) + 4 + 12)


def insert_arguments(
    requests: tuple[tuple[int, int], ...], *, heads: int, kv_format: str, q_dtype: torch.dtype = torch.bfloat16
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) of `qkv_insert` with as many padded heads as real ones, into the caller's buffer."""
    step = make_step(requests)
    table, pages = _tables(step, [s // WINDOW_PAGE for s, _ in requests], [(s + n - 1) // WINDOW_PAGE for s, n in requests])
    fmt = FORMATS[kv_format]
    stride = -(-WINDOW_PAGE * fmt.row_bytes // 576) * 576 if fmt.packed else WINDOW_PAGE * fmt.row_elements
    cache = torch.empty(pages * stride, dtype=fmt.dtype, device=DEVICE).as_strided(
        (pages, WINDOW_PAGE, fmt.row_elements), (stride, fmt.row_elements, 1)
    )
    args = (
        torch.randn(step.rows, heads, 512, device=DEVICE, dtype=torch.bfloat16),
        torch.randn(step.rows, 512, device=DEVICE, dtype=torch.bfloat16),
        cache,
        _slots(step, table, step.positions, WINDOW_PAGE),
        step.positions,
        torch.randn(COS_ROWS, 64, device=DEVICE),
    )
    scales = {"kv_scale": 0.5} if fmt.scaled else {}
    scales |= {"q_scale": 0.5} if q_dtype is not torch.bfloat16 else {}
    out = torch.empty(step.rows, heads, 512, dtype=q_dtype, device=DEVICE)
    return args, {"eps": 1e-6, "q_dtype": q_dtype, "out": out, **scales}


def insert_bytes(rows: int, *, heads: int, kv_format: str, q_bytes: int = 2) -> int:
    """q and KV rows read, q and cache rows written, slot, position and rotation of each row."""
    return rows * (heads * 512 * (2 + q_bytes) + 1024 + FORMATS[kv_format].row_bytes + 16 + 256)


def gather_arguments(requests: tuple[tuple[int, int], ...], *, kv_format: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) of `gather_upconvert`: each request's rows from its first position on, into the caller's workspace."""
    step = make_step(requests)
    table, pages = _tables(step, [s // WINDOW_PAGE for s, _ in requests], [(s + n - 1) // WINDOW_PAGE for s, n in requests])
    row = 656 if kv_format == "fp8_inline" else FORMATS[kv_format].row_bytes
    cache = torch.randint(0, 120, (pages, WINDOW_PAGE, row), dtype=torch.uint8, device=DEVICE)
    starts = torch.tensor([0, *(n for _, n in requests)], device=DEVICE).cumsum(0)[:-1].int()
    out = torch.empty(step.rows, 576 if kv_format == "fp8_inline" else 512, dtype=torch.bfloat16, device=DEVICE)
    first = torch.tensor([s for s, _ in requests], dtype=torch.int32, device=DEVICE)
    return (cache.view(torch.float8_e4m3fn) if kv_format == "fp8" else cache, out, table, starts), {"seq_starts": first}


def gather_bytes(rows: int, *, kv_format: str) -> int:
    """Cache rows read, workspace rows written."""
    return rows * (656 + 1152 if kv_format == "fp8_inline" else FORMATS[kv_format].row_bytes + 1024)


def convert_arguments(requests: tuple[tuple[int, int], ...], *, k: int, compact: bool = True) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) of `convert_indices` with k local ids a row, one in eight of them absent, into the caller's buffers."""
    step = make_step(requests)
    last = [s + n - 1 for s, n in requests]
    table, pages = _tables(step, [0] * len(last), [p // WINDOW_PAGE for p in last])
    ids = (torch.rand(step.rows, k, device=DEVICE) * (step.positions[:, None] + 1)).int()
    ids[torch.rand(step.rows, k, device=DEVICE) < 0.125] = -1
    options: dict[str, Any] = {"page_rows": WINDOW_PAGE, "pages": pages, "return_counts": compact, "out": torch.empty_like(ids)}
    if compact:
        options["counts"] = torch.empty(step.rows, dtype=torch.int32, device=DEVICE)
    return (ids, step.token_to_req, table), options


def convert_bytes(rows: int, k: int, *, compact: bool = True) -> int:
    """Ids read, slots and counts written, the request map read."""
    return rows * (8 * k + 4 + (4 if compact else 0))
