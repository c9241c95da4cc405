"""The only quantiser of the package, and the bytes of a cache row: E4M3, UE8M0, full rows and packed 584-byte rows.

Rules for values that are not finite, the same in every kernel:

* E4M3 saturates: anything beyond +-448, infinities included, becomes +-448. NaN becomes 0x7F, E4M3's NaN.
* A group's amax ignores NaN, and an infinity counts as the largest bf16; so a scale byte lies in [105, 247] and is always usable.
* BF16 values (full rows, and the rotated part of packed rows) keep infinities and NaN.

Each rounding is to nearest, ties to even.
"""

from __future__ import annotations

from typing import Literal

import torch

from cute_kernels.kv_format import E4M3_MAX, HEAD_DIM, NOPE_DIM, PACKED_DATA_BYTES, PACKED_FOOTER_BYTES, ROPE_DIM, SCALE_GROUP, format_of

Clamp = Literal["scale", "amax"]

_GROUPS = NOPE_DIM // SCALE_GROUP
_BF16_MAX = torch.finfo(torch.bfloat16).max
_E4M3_NAN = 0x7F
_MINIMUM = 1e-4


def round_bf16(x: torch.Tensor) -> torch.Tensor:
    """fp32 values rounded to bf16, as fp32."""
    return x.to(torch.bfloat16).float()


def encode_e4m3(x: torch.Tensor) -> torch.Tensor:
    """fp32 -> float8_e4m3fn, saturating at +-448; NaN becomes 0x7F."""
    code = x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return code.masked_fill(x.isnan(), _E4M3_NAN).view(torch.float8_e4m3fn)


def inverse_scale(scale: float | None) -> float:
    """fp32(1) / fp32(scale), the factor that per-tensor FP8 values are multiplied by; 1.0 for None."""
    return 1.0 if scale is None else (torch.ones((), dtype=torch.float32) / torch.tensor(float(scale), dtype=torch.float32)).item()


def scale_bytes(amax: torch.Tensor, clamp: Clamp) -> torch.Tensor:
    """UE8M0 bytes (uint8) of groups with absolute maximum `amax` (fp32, no NaN): the exponent of amax / 448 rounded up.

    clamp="scale"  the scale is at least 1e-4 (the compressor's rule; smallest byte 114)
    clamp="amax"   amax is at least 1e-4 (the insert's rule; smallest byte 105)
    """
    amax = amax.clamp(max=_BF16_MAX)
    ratio = (amax / E4M3_MAX).clamp(min=_MINIMUM) if clamp == "scale" else amax.clamp(min=_MINIMUM) / E4M3_MAX
    return ((ratio.view(torch.int32) + 0x7FFFFF) >> 23).to(torch.uint8)


def scale_values(scales: torch.Tensor) -> torch.Tensor:
    """The fp32 value 2^(byte - 127) of each UE8M0 byte in [1, 254]."""
    return (scales.to(torch.int32) << 23).view(torch.float32)


def quantize_groups(x: torch.Tensor, clamp: Clamp) -> tuple[torch.Tensor, torch.Tensor]:
    """Groups of 64 of bf16-valued fp32 `x` [..., 448] -> E4M3 codes [..., 448] and UE8M0 bytes [..., 7] (uint8).

    The exponent is chosen first; then the values are scaled by its exact inverse and rounded once.
    """
    groups = x.unflatten(-1, (_GROUPS, SCALE_GROUP))
    amax = groups.abs().nan_to_num(nan=0.0, posinf=_BF16_MAX).amax(-1)
    scales = scale_bytes(amax, clamp)
    inverse = ((254 - scales.to(torch.int32)) << 23).view(torch.float32)
    return encode_e4m3(groups * inverse.unsqueeze(-1)).flatten(-2), scales


def packed_views(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Data [pages, page_rows, 576] and footers [pages, page_rows, 8] of a packed cache [pages, page_rows, 584] uint8, as byte views.

    A page holds all data rows, then all footers; both are found from the page's row count. The page stride only moves pages.
    """
    pages, rows, _ = cache.shape
    stride, base = cache.stride(0), cache.storage_offset()
    data = cache.as_strided((pages, rows, PACKED_DATA_BYTES), (stride, PACKED_DATA_BYTES, 1), base)
    footers = cache.as_strided((pages, rows, PACKED_FOOTER_BYTES), (stride, PACKED_FOOTER_BYTES, 1), base + rows * PACKED_DATA_BYTES)
    return data, footers


def write_rows(cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor, *, clamp: Clamp, scale: float | None, via_bf16: bool) -> None:
    """Store fp32 `rows` [n, 512] in the format of `cache` at `slots` (int64 [n], each inside the pool).

    clamp     which minimum the UE8M0 scale of packed rows has
    scale     the per-tensor scale of full FP8 rows
    via_bf16  full FP8 rows are rounded to bf16 first (compressor: yes, insert: no)
    """
    fmt = format_of(cache)
    page, offset = slots // cache.shape[1], slots % cache.shape[1]
    if fmt.packed:
        rounded = round_bf16(rows)
        codes, scales = quantize_groups(rounded[:, :NOPE_DIM], clamp)
        rope = rounded[:, NOPE_DIM:].to(torch.bfloat16).contiguous().view(torch.uint8)
        data, footers = packed_views(cache)
        data[page, offset] = torch.cat([codes.view(torch.uint8), rope], dim=-1)
        footers[page, offset] = torch.nn.functional.pad(scales, (0, PACKED_FOOTER_BYTES - _GROUPS))
    elif fmt.scaled:
        values = round_bf16(rows) if via_bf16 else rows
        codes = encode_e4m3(values * inverse_scale(scale))
        cache.view(torch.uint8)[page, offset] = codes.view(torch.uint8)
    else:
        cache[page, offset] = rows.to(torch.bfloat16)


def read_rows(cache: torch.Tensor, page: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """The rows at (`page`, `offset`), int64 of any one shape, as fp32 [..., 512]. Per-tensor scales are not applied."""
    fmt = format_of(cache)
    if not fmt.packed:
        return cache.view(torch.uint8)[page, offset].view(fmt.dtype).float()
    data, footers = packed_views(cache)
    raw, scales = data[page, offset], scale_values(footers[page, offset][..., :_GROUPS])
    nope = raw[..., :NOPE_DIM].contiguous().view(torch.float8_e4m3fn).float()
    rope = raw[..., NOPE_DIM:].contiguous().view(torch.bfloat16).float()
    out = torch.empty((*page.shape, HEAD_DIM), dtype=torch.float32, device=cache.device)
    torch.mul(
        nope.unflatten(-1, (_GROUPS, SCALE_GROUP)), scales.unsqueeze(-1), out=out[..., :NOPE_DIM].unflatten(-1, (_GROUPS, SCALE_GROUP))
    )
    out[..., HEAD_DIM - ROPE_DIM :] = rope
    return out
