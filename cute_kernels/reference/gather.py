"""gather_upconvert and convert_indices: dense prefill from a paged FP8 cache, and request-local ids as slots."""

from __future__ import annotations

import torch

from cute_kernels.errors import InvalidArgument
from cute_kernels.kv_format import INLINE, INLINE_GROUP, INLINE_ROPE, INLINE_SCALES, NOPE_DIM, SCALE_GROUP, KVFormat, gathered_format
from cute_kernels.reference.quant import packed_views, scale_values


def gather_upconvert(
    cache: torch.Tensor,
    out: torch.Tensor,
    block_table: torch.Tensor,
    workspace_starts: torch.Tensor,
    *,
    seq_starts: torch.Tensor | None = None,
    kv_scale: float | None = None,
) -> torch.Tensor:
    """Rows of a paged FP8 cache, request after request, as BF16 rows of a workspace.

    cache             [pages, page rows, 656] uint8 (V3.2), [pages, page rows, 584] uint8 (V4, packed) or [pages, page rows, 512] e4m3
    out               bf16 [total, 576] (V3.2) or [total, 512]; written
    block_table       int32 [requests, columns], pages of the cache
    workspace_starts  int32 [requests] or [requests + 1], ascending: first row of each request in `out`; the last one's rows end with `out`
    seq_starts        int32 [requests], position of each request's first row; default 0
    kv_scale          what the codes of an e4m3 cache are multiplied by

    Rows before the first start are left alone. A row whose position is negative or whose page is not in the table or not in the cache is
    zero. Returns `out`. The rules are in docs/spec.md, "Dense prefill".
    """
    fmt = gathered_format(cache)
    requests, (pages, page_rows) = block_table.shape[0], cache.shape[:2]
    if requests == 0 or out.shape[0] == 0:
        return out
    row = torch.arange(out.shape[0], device=out.device)
    starts = workspace_starts[:requests].long()
    request = torch.searchsorted(starts, row, right=True) - 1
    row, request = row[request >= 0], request[request >= 0]
    position = row - starts[request] + (0 if seq_starts is None else seq_starts.long()[request])
    column = position.div(max(page_rows, 1), rounding_mode="floor")
    found = (position >= 0) & (column < block_table.shape[1]) & torch.tensor(page_rows > 0)
    page = torch.full_like(row, -1)
    page[found] = block_table[request[found], column[found]].long()
    found &= (page >= 0) & (page < pages)
    out[row[~found]] = 0
    page, offset = page[found], position[found] % max(page_rows, 1)
    nope, rope = _read(cache, fmt, page, offset, 1.0 if kv_scale is None else kv_scale)
    out[row[found]] = torch.cat([nope.to(torch.bfloat16), rope], dim=1)
    return out


def _read(
    cache: torch.Tensor, fmt: KVFormat, page: torch.Tensor, offset: torch.Tensor, kv_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scaled values fp32 of the rows at (`page`, `offset`), and the bf16 values that are stored as such (none in an e4m3 cache)."""
    if fmt is INLINE:
        raw = cache[page, offset]
        codes, rope = raw[:, :INLINE_SCALES], raw[:, INLINE_ROPE:]
        scales = raw[:, INLINE_SCALES:INLINE_ROPE].contiguous().view(torch.float32)
        group = INLINE_GROUP
    elif fmt.packed:
        data, footers = packed_views(cache)
        raw = data[page, offset]
        codes, rope = raw[:, :NOPE_DIM], raw[:, NOPE_DIM:]
        group = SCALE_GROUP
        scales = scale_values(footers[page, offset][:, : NOPE_DIM // group])
    else:
        codes = cache.view(torch.uint8)[page, offset]
        rope, group = codes[:, :0], codes.shape[1]
        scales = torch.full((len(page), 1), kv_scale, dtype=torch.float32, device=cache.device)
    values = codes.contiguous().view(torch.float8_e4m3fn).float() * scales.repeat_interleave(group, dim=1)
    return values, rope.contiguous().view(torch.bfloat16)


def convert_indices(
    ids: torch.Tensor,
    token_to_req: torch.Tensor,
    block_table: torch.Tensor,
    *,
    page_rows: int,
    block_stride_rows: int | None = None,
    pages: int | None = None,
    workspace_starts: torch.Tensor | None = None,
    prefill_request_id: torch.Tensor | None = None,
    return_counts: bool = False,
    out: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Positions within a request as slots of a paged cache: block_table[request, id // page_rows] * block_stride_rows + id % page_rows.

    ids                 int32 [N, k]
    token_to_req        int32 [N]; a row of a request outside the table has no valid id
    block_table         int32 [requests, columns]
    page_rows           rows of a page
    block_stride_rows   rows from one page to the next; default page_rows
    pages               pages of the cache; default: as many as slots in int32 allow
    prefill_request_id  int32 [N]: a row where it is >= 0 reads a dense workspace instead: workspace_starts[it] + id
    workspace_starts    int32 [any]; given with prefill_request_id
    return_counts       valid ids first, in their order, -1 after them, and how many there are
    out, counts         int32 [N, k] and [N] to write into

    An id that is negative, 2^31 - 1, past the block table or on a page outside the cache becomes -1; in a workspace row one whose sum
    does not lie in [0, 2^31). Returns the slots int32 [N, k], or (slots, counts). The rules are in docs/spec.md, "Dense prefill".
    `InvalidArgument` where ids and request map differ in length.
    """
    span = page_rows if block_stride_rows is None else block_stride_rows
    if token_to_req.shape[0] != ids.shape[0]:
        raise InvalidArgument("token_to_req", f"{token_to_req.shape[0]} entries", f"{ids.shape[0]}, one for each row of ids")
    limit = most_pages(page_rows, span) if pages is None else pages
    entry, request = ids.long(), token_to_req.long()
    inside = (request >= 0) & (request < block_table.shape[0])
    column = entry.div(page_rows, rounding_mode="floor")
    valid = inside[:, None] & (entry >= 0) & (entry < 2**31 - 1) & (column < block_table.shape[1])
    page = torch.full_like(entry, -1)
    page[valid] = block_table[request[:, None].expand_as(entry)[valid], column[valid]].long()
    valid &= (page >= 0) & (page < limit)
    slots = page * span + entry % page_rows
    if prefill_request_id is not None:
        assert workspace_starts is not None
        prefill = prefill_request_id.long()
        known = (prefill >= 0) & (prefill < workspace_starts.shape[0])
        start = torch.zeros_like(prefill)
        start[known] = workspace_starts.long()[prefill[known]]
        row = start[:, None] + entry
        slots = slots.where(prefill[:, None] < 0, row)
        valid = valid.where(prefill[:, None] < 0, known[:, None] & (entry >= 0) & (row >= 0) & (row < 2**31))
    result = torch.full_like(ids, -1, memory_format=torch.contiguous_format)
    if return_counts:
        at, lane = valid.nonzero(as_tuple=True)
        result[at, (valid.cumsum(1) - 1)[at, lane]] = slots[at, lane].int()
    else:
        result[valid] = slots[valid].int()
    if out is not None:
        result = out.copy_(result)
    if not return_counts:
        return result
    number = valid.sum(1, dtype=torch.int32)
    return result, number if counts is None else counts.copy_(number)


def most_pages(page_rows: int, span: int) -> int:
    """Pages whose slots all fit int32: the largest n with (n - 1) * span + page_rows <= 2^31."""
    return max((2**31 - page_rows) // span + 1, 0)
