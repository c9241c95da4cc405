"""compress_store: save state rows, pool closed windows, normalise, rotate, store."""

from __future__ import annotations

import torch

from cute_kernels.errors import InvalidArgument
from cute_kernels.kv_format import HEAD_DIM
from cute_kernels.reference.quant import write_rows
from cute_kernels.reference.rope import rotate
from cute_kernels.save_policy import SavePolicy, overlap

# Windows are pooled in chunks of about this many gathered bytes.
_CHUNK_BYTES = 32 << 20


def saved_mask(positions: torch.Tensor, seq_lens: torch.Tensor, ratio: int, policy: SavePolicy) -> torch.Tensor:
    """`save_policy.is_saved` for int64 tensors of one shape: bool of the same shape. Source: docs/spec.md, "Compressor"."""
    if policy.every_row:
        return torch.ones_like(positions, dtype=torch.bool)
    last = ratio * ((positions + overlap(ratio)) // ratio) + ratio - 1
    mask = torch.maximum(positions + 1, seq_lens - policy.rollback) <= torch.minimum(last, seq_lens)
    if policy.prefix_stride:
        mask |= last // policy.prefix_stride * policy.prefix_stride > positions
    return mask


def compress_store(
    kv_score: torch.Tensor | None,
    ape: torch.Tensor | None,
    state: torch.Tensor,
    state_block_table: torch.Tensor,
    positions: torch.Tensor,
    token_to_req: torch.Tensor,
    state_slots: torch.Tensor,
    kv_slots: torch.Tensor,
    norm_weight: torch.Tensor,
    cos_sin: torch.Tensor,
    kv_cache: torch.Tensor,
    *,
    ratio: int,
    eps: float,
    kv_scale: float | None = None,
    save: SavePolicy = SavePolicy.EVERY_ROW,
    seq_lens: torch.Tensor | None = None,
) -> None:
    """One step of a layer's compressor, in place on `state` and `kv_cache`.

    kv_score           fp32 [>= T, 2W], values then scores, W = 1024 (ratio 4) or 512 (128); None: every row lies in the state pool
    ape                fp32 [ratio, W], added to scores; None with kv_score=None
    state              fp32 [blocks, block rows, 2W], scores with ape added
    state_block_table  int32 [requests, columns]
    positions          int64 [<= T]
    token_to_req       int32 [<= T]
    state_slots        int64 [T], negative on padding rows
    kv_slots           int64 [<= T], negative where no compressed row is wanted
    norm_weight        bf16 [512]
    cos_sin            fp32 [positions, 64]
    kv_cache           [pages, page rows, 512] bf16 or e4m3, or [pages, page rows, 584] uint8 (packed)
    seq_lens           int32 [requests], this step's rows included; needed unless every row is saved

    The mathematics, rounding steps and padding rules are in docs/spec.md, "Compressor". `InvalidArgument` where one argument needs another.
    """
    if not save.every_row and seq_lens is None:
        raise InvalidArgument("seq_lens", None, f"int32 [requests], needed by {save}")
    if (kv_score is None) != (ape is None):
        raise InvalidArgument("ape", "None" if ape is None else "a tensor", "a tensor together with kv_score, None without it")
    scored = None if kv_score is None or ape is None else (kv_score, ape)
    requests = state_block_table.shape[0]
    t = torch.arange(
        min(state_slots.shape[0], positions.shape[0], token_to_req.shape[0], kv_slots.shape[0]), device=positions.device, dtype=torch.int64
    )
    pos, req, slot = positions[: len(t)], token_to_req[: len(t)].long(), state_slots[: len(t)]
    real = (slot >= 0) & (req >= 0) & (req < requests) & (pos >= 0)

    target = kv_slots[: len(t)]
    closes = real & ((pos + 1) % ratio == 0) & (pos < cos_sin.shape[0]) & (target >= 0) & (target < kv_cache.shape[0] * kv_cache.shape[1])
    window_bytes = (ratio + overlap(ratio)) * state.shape[2] * 4 * 3
    for chunk in t[closes].split(max(1, _CHUNK_BYTES // window_bytes)):
        pooled = _pool(chunk, scored, state, state_block_table, pos, req, real, ratio)
        normed = pooled * torch.rsqrt(pooled.square().mean(-1, keepdim=True) + eps) * norm_weight.float()
        rows = rotate(normed, cos_sin[pos[chunk] - (ratio - 1)])
        write_rows(kv_cache, target[chunk], rows, clamp="scale", scale=kv_scale, via_bf16=True)

    if scored is None:
        return
    kept = real & (slot < state.shape[0] * state.shape[1])
    if seq_lens is not None and requests:
        kept &= saved_mask(pos, seq_lens.long()[req.clamp(0, requests - 1)], ratio, save)
    for rows in t[kept].split(max(1, _CHUNK_BYTES // (state.shape[2] * 4))):
        state[slot[rows] // state.shape[1], slot[rows] % state.shape[1]] = _post_ape(*scored, rows, pos[rows], ratio)


def _post_ape(kv_score: torch.Tensor, ape: torch.Tensor, rows: torch.Tensor, pos: torch.Tensor, ratio: int) -> torch.Tensor:
    """State rows [..., 2W] of this step's `rows`: values, then scores with ape added."""
    values, scores = kv_score[rows].chunk(2, dim=-1)
    return torch.cat([values, scores + ape[pos % ratio]], dim=-1)


def _pool(
    chunk: torch.Tensor,
    scored: tuple[torch.Tensor, torch.Tensor] | None,
    state: torch.Tensor,
    block_table: torch.Tensor,
    pos: torch.Tensor,
    req: torch.Tensor,
    real: torch.Tensor,
    ratio: int,
) -> torch.Tensor:
    """The weighted sums [n, 512] of the windows that end at rows `chunk`; each column has a softmax of its own."""
    rows = ratio + overlap(ratio)
    back = torch.arange(rows - 1, -1, -1, device=pos.device)  # distance from the closing row, oldest first
    p = pos[chunk, None] - back
    window = state.new_zeros((len(chunk), rows, state.shape[2]))

    step = torch.zeros_like(p, dtype=torch.bool)
    if scored is not None:
        source = chunk[:, None] - back
        at = source.clamp(min=0)
        step = (source >= 0) & (p >= 0) & (req[at] == req[chunk, None]) & (pos[at] == p) & real[at]
        window[step] = _post_ape(*scored, source[step], p[step], ratio)

    earlier = ~step & (p >= 0)
    column = p[earlier] // state.shape[1]
    owner = req[chunk, None].expand_as(p)[earlier]
    block = block_table[owner, column.clamp(max=block_table.shape[1] - 1)].long()
    usable = (column < block_table.shape[1]) & (block >= 0) & (block < state.shape[0])
    window[earlier] = state[block.where(usable, 0), p[earlier] % state.shape[1]]

    values, logits = window.chunk(2, dim=-1)
    if ratio == 4:  # the older group contributes its first 512 columns, the group that closes its second
        half = HEAD_DIM
        values = torch.cat([values[:, :4, :half], values[:, 4:, half:]], dim=1)
        logits = torch.cat([logits[:, :4, :half], logits[:, 4:, half:]], dim=1)
    weights = torch.softmax(logits.masked_fill((p < 0).unsqueeze(-1), -torch.inf), dim=1)
    return (weights * values).sum(1)
