"""sparse_indices: index tables of the window and of the selected compressed entries."""

from __future__ import annotations

from typing import Literal

import torch

from cute_kernels.errors import InvalidArgument
from cute_kernels.indices import CombinedIndices, IdSource, SegmentIndices
from cute_kernels.kv_format import WINDOW, PoolGeometry

# Positions past it count as it: entries and lengths are int32, and position + 1 must be one, too.
_LAST_POSITION = 2**31 - 2


def sparse_indices(
    positions: torch.Tensor,
    token_to_req: torch.Tensor,
    window_block_table: torch.Tensor,
    ids: torch.Tensor | None = None,
    compressed_block_table: torch.Tensor | None = None,
    *,
    window: PoolGeometry,
    compressed: PoolGeometry | None = None,
    source: IdSource = IdSource.NONE,
    ratio: int = 1,
    width: int | None = None,
    slots: torch.Tensor | None = None,
    num_rows: int | None = None,
    out: CombinedIndices | SegmentIndices | None = None,
    form: Literal["combined", "segments"] = "combined",
) -> CombinedIndices | SegmentIndices:
    """Which cache rows each query row attends to. T = positions.shape[0].

    positions               int64 [T]
    token_to_req            int32 [<= T]
    window_block_table      int32 [requests, columns], pages of the window pool
    ids                     int32 [T', k]: LOCAL entry numbers or GLOBAL slots; rows past T' have none
    compressed_block_table  int32 [requests, columns], pages of the compressed pool (LOCAL, ALL_GROUPS)
    window, compressed      geometry of the two pools
    ratio                   tokens per compressed entry (LOCAL, ALL_GROUPS)
    width                   columns of the compressed part, rounded up to a multiple of 4; default: k
    slots                   int64 [<= T], negative on padding rows; None: no row is padding for that reason
    num_rows                rows of the tables, >= T (default T); the rows from T on are padding rows
    form                    "combined": storage rows, lengths include the 128 window columns; "segments": slots

    Rows past the end of `token_to_req` or `slots`, and rows of a request outside the table, are padding: all -1, length 128 (combined)
    or 0. What makes an entry valid is in docs/spec.md, "Index tables"; invalid ones are dropped and the rest keep their order.
    `InvalidArgument` where a source lacks an argument, or a size does not fit.
    """
    rows = positions.shape[0] if num_rows is None else num_rows
    if rows < positions.shape[0]:
        raise InvalidArgument("num_rows", rows, f"at least positions.shape[0] = {positions.shape[0]}")
    combined = form == "combined"
    device = positions.device
    requests = window_block_table.shape[0]
    known = min(positions.shape[0], token_to_req.shape[0], *(() if slots is None else (slots.shape[0],)))
    req = token_to_req[:known].long()
    real = (req >= 0) & (req < requests)
    if slots is not None:
        real &= slots[:known] >= 0
    pos, req = positions[:known].clamp(-1, _LAST_POSITION), req.where(real, 0)

    start = (pos - (WINDOW - 1)).clamp(min=0)
    p = start[:, None] + torch.arange(WINDOW, device=device)
    page, valid = _look_up(window_block_table, req, p, (p <= pos[:, None]) & real[:, None], window)
    window_part = _compact(_encode(page, p % window.page_rows, window, combined), valid, rows, WINDOW)

    compressed_part = None
    count = 0 if source is IdSource.NONE else _compressed_width(source, ids, width)
    if count:
        if compressed is None:
            raise InvalidArgument("compressed", None, f"the compressed pool's geometry, needed by {source}")
        if ids is None or source is IdSource.ALL_GROUPS:
            entries = torch.arange(count, device=device).expand(known, count)
        else:
            entries = torch.full((known, ids.shape[1]), -1, dtype=torch.int64, device=device)
            entries[: ids.shape[0]] = ids[:known].long()
        if source is IdSource.GLOBAL:
            valid = (entries >= 0) & (entries < compressed.slots) & real[:, None]
            page, offset = entries // compressed.page_rows, entries % compressed.page_rows
        else:
            if compressed_block_table is None:
                raise InvalidArgument("compressed_block_table", None, f"int32 [requests, columns], needed by {source}")
            closed = (entries >= 0) & (entries < ((pos + 1) // ratio)[:, None]) & real[:, None]
            page, valid = _look_up(compressed_block_table, req, entries, closed, compressed)
            offset = entries % compressed.page_rows
        compressed_part = _compact(_encode(page, offset, compressed, combined), valid, rows, count)

    if combined:
        table, lengths = window_part[0], torch.full((rows,), WINDOW, dtype=torch.int32, device=device)
        if compressed_part is not None:
            table, lengths = torch.cat([table, compressed_part[0]], dim=1), lengths + compressed_part[1]
        result: CombinedIndices | SegmentIndices = CombinedIndices(table, lengths)
    else:
        result = SegmentIndices(*window_part, *(compressed_part or (None, None)))
    return result if out is None else _copy_into(out, result)


def _compressed_width(source: IdSource, ids: torch.Tensor | None, width: int | None) -> int:
    """Columns of the compressed part, a multiple of 4 and at least 4, also where there is no id."""
    if source is not IdSource.ALL_GROUPS and ids is None:
        raise InvalidArgument("ids", None, f"int32 [rows, k], needed by {source}")
    least = 1 if source is IdSource.ALL_GROUPS or ids is None else max(ids.shape[1], 1)
    if width is None and source is not IdSource.ALL_GROUPS:
        width = least
    if width is None or width < least:
        raise InvalidArgument("width", width, f"at least {least} columns", hint="a table has to hold every id it is given")
    return -(-width // 4) * 4


def _look_up(
    block_table: torch.Tensor, req: torch.Tensor, entry: torch.Tensor, wanted: torch.Tensor, pool: PoolGeometry
) -> tuple[torch.Tensor, torch.Tensor]:
    """The page that holds logical `entry` [n, m] of request `req` [n], and which of the `wanted` entries have one."""
    column = entry // pool.page_rows
    wanted = wanted & (column >= 0) & (column < block_table.shape[1])
    if block_table.numel() == 0:
        return torch.zeros_like(entry), torch.zeros_like(wanted)
    page = block_table[req[:, None], column.where(wanted, 0)].long()
    return page, wanted & (page >= 0) & (page < pool.pages)


def _encode(page: torch.Tensor, offset: torch.Tensor, pool: PoolGeometry, storage_rows: bool) -> torch.Tensor:
    return page * (pool.span if storage_rows else pool.page_rows) + offset


def _compact(entries: torch.Tensor, valid: torch.Tensor, rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """int32 table [rows, width] with each row's valid entries first, in order, and -1 after; int32 counts [rows]."""
    table = torch.full((rows, width), -1, dtype=torch.int32, device=entries.device)
    lengths = torch.zeros(rows, dtype=torch.int32, device=entries.device)
    row, lane = valid.nonzero(as_tuple=True)
    table[row, (valid.cumsum(1) - 1)[row, lane]] = entries[row, lane].int()
    lengths[: valid.shape[0]] = valid.sum(1, dtype=torch.int32)
    return table, lengths


def _copy_into(out: CombinedIndices | SegmentIndices, result: CombinedIndices | SegmentIndices) -> CombinedIndices | SegmentIndices:
    if type(out) is not type(result):
        raise InvalidArgument("out", type(out).__name__, type(result).__name__)
    for name, value in vars(result).items():
        buffer = getattr(out, name)
        if (buffer is None) != (value is None) or (value is not None and buffer.shape != value.shape):
            expected = "None" if value is None else list(value.shape)
            raise InvalidArgument(f"out.{name}", None if buffer is None else list(buffer.shape), expected)
        if value is not None:
            buffer.copy_(value)
    return out
