"""qkv_insert: q norm, rotation and head padding; rotation and storage of the uncompressed KV row."""

from __future__ import annotations

import torch

from cute_kernels.reference.quant import encode_e4m3, inverse_scale, write_rows
from cute_kernels.reference.rope import rotate


def qkv_insert(
    q: torch.Tensor,
    kv: torch.Tensor,
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    *,
    eps: float,
    padded_heads: int | None = None,
    apply_q_norm: bool = True,
    q_scale: float | None = None,
    kv_scale: float | None = None,
    q_dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Queries ready for decode, and this step's KV rows in the window cache.

    q          bf16 [N, H, 512]; each head is normalised without a weight (unless apply_q_norm=False) and rotated at its row's position
    kv         bf16 [N, 512], normalised already; rotated, then stored at `slots`
    kv_cache   [pages, page rows, 512] bf16 or e4m3, or [pages, page rows, 584] uint8 (packed; scales by the amax rule)
    slots      int64 [<= N]; rows that are negative, past the pool or past the end of `slots` store nothing but still produce q
    positions  int64 [N]; a row whose position lies outside `cos_sin` has q zero and stores nothing
    cos_sin    fp32 [positions, 64]
    q_scale    q is divided by it where q_dtype is e4m3; kv_scale likewise for full FP8 rows

    Returns q_out [N, padded_heads, 512] of `q_dtype` (bf16 or e4m3), zero in the heads past H. FP8 values of q and of full KV rows are
    rounded once, from fp32, without a bf16 step. The mathematics is in docs/spec.md, "Insert".
    """
    n, heads, dim = q.shape
    padded_heads = heads if padded_heads is None else padded_heads
    if out is None:
        out = torch.empty((n, padded_heads, dim), dtype=q_dtype, device=q.device)
    pos = positions[:n]
    inside = (pos >= 0) & (pos < cos_sin.shape[0])
    table = cos_sin[pos.where(inside, 0)]

    x = q.float()
    if apply_q_norm:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    x = rotate(x, table.unsqueeze(1)).masked_fill(~inside[:, None, None], 0.0)
    if out.dtype == torch.float8_e4m3fn:
        out.view(torch.uint8)[:, :heads] = encode_e4m3(x * inverse_scale(q_scale)).view(torch.uint8)
        out.view(torch.uint8)[:, heads:] = 0
    else:
        out[:, :heads] = x.to(out.dtype)
        out[:, heads:] = 0

    stored = min(n, slots.shape[0])
    target = slots[:stored]
    written = inside[:stored] & (target >= 0) & (target < kv_cache.shape[0] * kv_cache.shape[1])
    rows = rotate(kv[:stored].float(), table[:stored])[written]
    write_rows(kv_cache, target[written], rows, clamp="amax", scale=kv_scale, via_bf16=False)
    return out
