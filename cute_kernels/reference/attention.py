"""decode: sparse attention over the rows that an index table names."""

from __future__ import annotations

from typing import Protocol

import torch

from cute_kernels.errors import InvalidArgument
from cute_kernels.indices import CombinedIndices, SegmentIndices
from cute_kernels.kv_format import HEAD_DIM, WINDOW, PoolGeometry
from cute_kernels.reference.quant import read_rows

# Query rows are processed in chunks that gather about this many bytes of fp32 keys.
_CHUNK_BYTES = 48 << 20


class Step(Protocol):
    """What attention reads of a step's metadata."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def query_start_loc(self) -> torch.Tensor: ...

    @property
    def seq_lens(self) -> torch.Tensor: ...


def decode(
    q: torch.Tensor,
    swa_cache: torch.Tensor,
    kv_cache: torch.Tensor | None,
    step: Step,
    indices: CombinedIndices | SegmentIndices,
    *,
    num_heads: int | None = None,
    sinks: torch.Tensor | None = None,
    sm_scale: float = HEAD_DIM**-0.5,
    q_scale: float = 1.0,
    kv_scale: float = 1.0,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    counters: torch.Tensor | None = None,
    backend: str = "reference",
) -> torch.Tensor:
    """Attention of decode and prefill rows alike; keys are values.

    q           [T, padded heads, 512] bf16 or e4m3; heads from `num_heads` on are not read
    swa_cache   window rows, in any row format
    kv_cache    compressed rows, or None (or the window pool) for a window-only layer
    step        rows and lengths: num_tokens, query_start_loc int32 [R + 1], seq_lens int32 [R] (this step's rows included)
    indices     a combined table of storage rows, whose active window columns follow from `step`, or two segments of slots with lengths
    sinks       fp32 [heads], natural-log logits that only enlarge the denominator
    out         bf16 [T, >= num_heads, 512]

    Returns out[:, :num_heads]. A row without a valid key, and a row past step.num_tokens in a fresh `out`, is zero; lanes of -1 are masked
    anywhere. `workspace`, `counters` and `backend` are accepted for the sake of one signature and ignored. The mathematics is in
    docs/spec.md, "Attention". `InvalidArgument` for an entry that names no row of its pool.
    """
    heads = q.shape[1] if num_heads is None else num_heads
    if out is None:
        out = torch.zeros((q.shape[0], heads, HEAD_DIM), dtype=torch.bfloat16, device=q.device)
    compressed_cache = swa_cache if kv_cache is None else kv_cache
    rows = step.num_tokens
    if rows == 0:
        return out[:, :heads]
    window, compressed = _active_entries(indices, step, rows)
    keys = window.shape[1] + (0 if compressed is None else compressed.shape[1])
    storage = isinstance(indices, CombinedIndices)
    sink = None if sinks is None else sinks[:heads].float()
    for begin in range(0, rows, max(1, _CHUNK_BYTES // (keys * HEAD_DIM * 4))):
        part = slice(begin, begin + max(1, _CHUNK_BYTES // (keys * HEAD_DIM * 4)))
        gathered = [_gather(swa_cache, window[part], storage, "window indices")]
        if compressed is not None and compressed.shape[1]:
            gathered.append(_gather(compressed_cache, compressed[part], storage, "compressed indices"))
        key, valid = (torch.cat(x, dim=1) for x in zip(*gathered, strict=True))
        out[:rows][part, :heads] = _attend(q[:rows][part, :heads].float(), key, valid, sink, sm_scale * q_scale * kv_scale, kv_scale).to(
            out.dtype
        )
    return out[:, :heads]


def _active_entries(indices: CombinedIndices | SegmentIndices, step: Step, rows: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """int64 tables [rows, 128] and [rows, width] with -1 in every lane that is not active."""
    if isinstance(indices, CombinedIndices):
        table, lengths = indices.table[:rows].long(), indices.lengths[:rows].long()
        lanes = torch.arange(table.shape[1], device=table.device)
        row = torch.arange(rows, device=table.device)
        starts, seq_lens = step.query_start_loc.long(), step.seq_lens.long()
        request = (torch.searchsorted(starts, row, right=True) - 1).clamp(0, seq_lens.shape[0] - 1)
        ends = starts[request + 1]
        window_count = (seq_lens[request] - (ends - row) + 1).clamp(0, WINDOW)
        window_count = window_count.where(row < ends, 0)
        active = torch.where(lanes < WINDOW, lanes < window_count[:, None], lanes < lengths[:, None])
        table = table.where(active, -1)
        return table[:, :WINDOW], table[:, WINDOW:]

    def masked(table: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        lanes = torch.arange(table.shape[1], device=table.device)
        return table[:rows].long().where(lanes < lengths[:rows, None], -1)

    compressed = None
    if indices.compressed is not None and indices.compressed_lengths is not None:
        compressed = masked(indices.compressed, indices.compressed_lengths)
    return masked(indices.window, indices.window_lengths), compressed


def _gather(cache: torch.Tensor, entries: torch.Tensor, storage: bool, argument: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys fp32 [n, m, 512], zero where `entries` is -1, and the mask of the others."""
    pool = PoolGeometry.of(cache)
    pitch = pool.span if storage else pool.page_rows
    valid = entries >= 0
    page, offset = entries // pitch, entries % pitch
    wrong = valid & ((page >= pool.pages) | (offset >= pool.page_rows))
    if wrong.any():
        raise InvalidArgument(argument, int(entries[wrong][0]), f"-1 or a row of {pool.pages} pages x {pool.page_rows} rows, {pitch} apart")
    if not pool.pages:
        return torch.zeros((*entries.shape, HEAD_DIM), device=cache.device), valid
    distinct, lane = torch.unique(entries, return_inverse=True)  # neighbouring query rows share most of their keys
    keys = read_rows(cache, distinct.clamp(min=0) // pitch, distinct.clamp(min=0) % pitch)
    return keys.masked_fill_((distinct < 0).unsqueeze(-1), 0.0)[lane], valid


def _attend(
    q: torch.Tensor, key: torch.Tensor, valid: torch.Tensor, sink: torch.Tensor | None, scale: float, value_scale: float
) -> torch.Tensor:
    """q fp32 [n, H, 512], key fp32 [n, m, 512], valid bool [n, m], sink fp32 [H] -> fp32 [n, H, 512]."""
    logits = (torch.bmm(q, key.transpose(1, 2)) * scale).masked_fill(~valid[:, None], -torch.inf)
    peak = logits.amax(-1, keepdim=True)
    if sink is not None:
        peak = torch.maximum(peak, sink[:, None])
    peak = peak.where(valid.any(-1)[:, None, None], 0.0)  # a row without a key: every weight is exp(-inf) = 0
    weights = torch.exp(logits - peak)
    total = weights.sum(-1, keepdim=True)
    if sink is not None:
        total = total + torch.exp(sink[:, None] - peak)
    result = torch.bmm(weights, key) / total * value_scale
    return result.masked_fill(~valid.any(-1)[:, None, None], 0.0)
