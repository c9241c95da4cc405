"""Rotary position embedding: tables of cosines and sines, and the interleaved rotation of the last 64 values of a row."""

from __future__ import annotations

import math

import torch

from cute_kernels.kv_format import ROPE_DIM

_YARN_FACTOR = 16.0
_YARN_ORIGINAL = 65536
_YARN_FAST, _YARN_SLOW = 32.0, 1.0


def frequencies(theta: float, yarn: bool) -> torch.Tensor:
    """The 32 angular frequencies (float64, radians per position) of base `theta`; `yarn` blends in those of a 16 times longer context.

    Source: docs/spec.md, "Rotation".
    """
    plain = theta ** (-torch.arange(0, ROPE_DIM, 2, dtype=torch.float64) / ROPE_DIM)
    if not yarn:
        return plain

    def corner(rotations: float) -> float:
        return ROPE_DIM * math.log(_YARN_ORIGINAL / (2 * math.pi * rotations)) / (2 * math.log(theta))

    low, high = max(math.floor(corner(_YARN_FAST)), 0), min(math.ceil(corner(_YARN_SLOW)), ROPE_DIM - 1)
    blend = ((torch.arange(ROPE_DIM // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    return plain / _YARN_FACTOR * blend + plain * (1 - blend)


def cos_sin_table(rows: int, *, ratio: int = 1, device: torch.device | str | None = None) -> torch.Tensor:
    """cos_sin fp32 [rows, 64] of a layer: row p is cos(p f_0) .. cos(p f_31), sin(p f_0) .. sin(p f_31).

    A window-only layer (`ratio=1`) uses base 10000. A compressed layer (4, 128) uses base 160000 with YaRN, for its queries and
    uncompressed rows as well. Angles are computed in float64 and rounded once. Source: docs/spec.md, "Rotation".
    """
    f = frequencies(10000.0, yarn=False) if ratio == 1 else frequencies(160000.0, yarn=True)
    angles = torch.arange(rows, dtype=torch.float64)[:, None] * f
    return torch.cat([angles.cos(), angles.sin()], dim=-1).float().to(device)


def rotate(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """`x` fp32 [..., 512] with its last 64 values rotated in interleaved pairs by `cos_sin` fp32 [..., 64] (broadcast over heads)."""
    a, b = x[..., -ROPE_DIM::2], x[..., -ROPE_DIM + 1 :: 2]
    cos, sin = cos_sin.chunk(2, dim=-1)
    turned = torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)
    return torch.cat([x[..., :-ROPE_DIM], turned], dim=-1)
