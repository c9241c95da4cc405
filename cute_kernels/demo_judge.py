"""The demo's judge: DeepSeek-V4's sparse attention in float64, straight from its definition.

A row attends to its window (itself and the 127 rows before it) and to the compressed rows whose ids it was given; a sink per
head joins the denominator. There is no cache here, no page, no index table and no code of this package: the inputs are the
rows that a layer's projections produced, in sequence order, and plain torch does the arithmetic.

Each step is done under a `Rounding`. `EXACT` rounds nothing and is the truth. The others round q, each K row and the output to
what a cache format holds: the error they show against `EXACT` is the price of the format, and twice that is the bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

HEAD_DIM, NOPE, WINDOW, EPS = 512, 448, 128, 1e-6
BLOCK = 16  # query rows judged at a time
E4M3_MAX = 448.0


# ---------------------------------------------------------------- what a format does to a value


@dataclass(frozen=True)
class Rounding:
    """What a format makes of the definition's values; each maps float64 [..., 512] to float64 [..., 512].

    query           q, after norm and rotation
    window_row      a K row of the window, after rotation
    compressed_row  a pooled K row, after norm and rotation
    output          the result
    """

    query: Callable[[Tensor], Tensor]
    window_row: Callable[[Tensor], Tensor]
    compressed_row: Callable[[Tensor], Tensor]
    output: Callable[[Tensor], Tensor]


def _unchanged(x: Tensor) -> Tensor:
    return x


def _bf16(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).double()


def _e4m3(x: Tensor) -> Tensor:
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).double()


def _packed_row(x: Tensor) -> Tensor:
    """BF16; then the first 448 columns E4M3 with a power-of-two scale for each 64 of them (its floor only keeps zeros out of the log)."""
    x = _bf16(x)
    groups = x[..., :NOPE].unflatten(-1, (-1, 64))
    scale = torch.exp2(torch.ceil(torch.log2((groups.abs().amax(-1, keepdim=True) / E4M3_MAX).clamp(min=2.0**-22))))
    return torch.cat([(_e4m3(groups / scale) * scale).flatten(-2), x[..., NOPE:]], -1)


EXACT = Rounding(_unchanged, _unchanged, _unchanged, _unchanged)
BF16 = Rounding(_bf16, _bf16, _bf16, _bf16)


def fp8(q_scale: float, kv_scale: float) -> Rounding:
    """Rows and q of 512 E4M3 values, one scale per tensor. A pooled row passes through BF16; q and window rows do not."""
    return Rounding(
        query=lambda x: _e4m3(x / q_scale) * q_scale,
        window_row=lambda x: _e4m3(x / kv_scale) * kv_scale,
        compressed_row=lambda x: _e4m3(_bf16(x) / kv_scale) * kv_scale,
        output=_bf16,
    )


def packed(*, quantized_query: bool) -> Rounding:
    """Packed rows. `quantized_query`: FlashInfer's SM120 decode rounds the unrotated part of q like a row; the reference keeps BF16."""
    return Rounding(query=_packed_row if quantized_query else _bf16, window_row=_packed_row, compressed_row=_packed_row, output=_bf16)


# ---------------------------------------------------------------- the definition


def frequencies(ratio: int) -> Tensor:
    """The 32 rotation frequencies of a layer: base 10000 where it is window-only, else base 160000 with YaRN (16 x 65536)."""
    base = 10_000.0 if ratio == 1 else 160_000.0
    plain = base ** (-torch.arange(32, dtype=torch.float64) / 32)
    if ratio == 1:
        return plain
    first, last = (64 * math.log(65_536 / (2 * math.pi * turns)) / (2 * math.log(base)) for turns in (32, 1))
    low, high = max(math.floor(first), 0), min(math.ceil(last), 63)
    stretched = ((torch.arange(32, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    return plain / 16 * stretched + plain * (1 - stretched)


def rotate(x: Tensor, positions: Tensor, ratio: int) -> Tensor:
    """Rotates the last 64 columns in pairs (448, 449), (450, 451), ...: x [n, ..., 512], positions [n]."""
    angle = (positions.double()[:, None] * frequencies(ratio)).reshape(len(x), *[1] * (x.dim() - 2), 32)
    a, b = x[..., NOPE::2], x[..., NOPE + 1 :: 2]
    turned = torch.stack([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1).flatten(-2)
    return torch.cat([x[..., :NOPE], turned], -1)


def normalise(x: Tensor) -> Tensor:
    """RMS norm without a weight: x [..., 512]."""
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()


def pool(kv_score: Tensor, ape: Tensor, norm_weight: Tensor, ratio: int) -> Tensor:
    """The compressed rows [n // ratio, 512] of a sequence: per column a softmax over the window; then norm; then rotation.

    kv_score [n, 2W]: values and scores side by side; ape [ratio, W] is added to the scores. For ratio 4 (W = 1024) a window
    holds two groups: of the older one the first 512 columns count, of the row's own the last 512.
    """
    groups, width = len(kv_score) // ratio, kv_score.shape[1] // 2
    rows = kv_score[: groups * ratio].unflatten(0, (groups, ratio))
    values, scores = rows[..., :width], rows[..., width:] + ape
    if ratio == 4:
        none = torch.full_like(scores[:1], -math.inf)
        values = torch.cat([torch.cat([values[:1], values[:-1]])[..., :512], values[..., 512:]], 1)
        scores = torch.cat([torch.cat([none, scores[:-1]])[..., :512], scores[..., 512:]], 1)
    pooled = (torch.softmax(scores, 1) * values).sum(1)
    return rotate(normalise(pooled) * norm_weight, torch.arange(groups) * ratio, ratio)


def attend(q: Tensor, rows: Tensor, visible: Tensor, sinks: Tensor) -> Tensor:
    """Attention of n query rows: q [n, heads, 512], K rows [m, 512], visible bool [n, m], sinks [heads] -> [n, heads, 512].

    Keys are values. A sink is one more logit, whose weight goes nowhere.
    """
    logits = (q @ rows.T * HEAD_DIM**-0.5).masked_fill(~visible[:, None], -math.inf)
    logits = torch.cat([logits, sinks[None, :, None].expand(len(q), -1, 1)], -1)
    return torch.softmax(logits, -1)[..., :-1] @ rows


# ---------------------------------------------------------------- the comparison


@dataclass
class Verdict:
    """Errors of the rows judged so far against `EXACT`, and those of the rounded definition.

    max_error, mean_error  absolute error of the layer's attention output
    max_bound, mean_bound  twice the same figures of the rounded definition
    worst                  largest error / bound of a single row, over both its maximum and its mean: a row fails above 1
    """

    rows: int = 0
    max_error: float = 0.0
    max_bound: float = 0.0
    worst: float = 0.0
    _error_sum: float = 0.0
    _bound_sum: float = 0.0

    @property
    def mean_error(self) -> float:
        """Mean over the rows judged."""
        return self._error_sum / max(self.rows, 1)

    @property
    def mean_bound(self) -> float:
        """Mean over the rows judged."""
        return self._bound_sum / max(self.rows, 1)

    @property
    def passed(self) -> bool:
        """Every row judged, and there were some, keeps its bounds."""
        return self.rows > 0 and self.worst <= 1

    def add(self, error: Tensor, allowed: Tensor) -> None:
        """n rows: errors of the output and of the rounded definition, float64 [n, heads, 512]."""
        error, allowed = error.abs().flatten(1), 2 * allowed.abs().flatten(1)
        highest, highest_bound = error.amax(1), allowed.amax(1)
        mean, mean_bound = error.mean(1), allowed.mean(1)
        self.rows += len(error)
        self.max_error = max(self.max_error, float(highest.max()))
        self.max_bound = max(self.max_bound, float(highest_bound.max()))
        self._error_sum += float(mean.sum())
        self._bound_sum += float(mean_bound.sum())
        share = torch.maximum(highest / highest_bound, mean / mean_bound).nan_to_num(nan=math.inf)  # a NaN fails
        self.worst = max(self.worst, float(share.max()))


@dataclass(frozen=True)
class Weights:
    """What a layer's attention has besides its inputs: sinks [heads], and the compressor's ape [ratio, W] and norm [512]; float64."""

    sinks: Tensor
    ape: Tensor | None
    norm: Tensor | None

    @staticmethod
    def of(layer: Any) -> Weights:
        """A copy of the example layer's."""

        def copy(x: Tensor) -> Tensor:
            return x.detach().cpu().double().clone()

        if layer.ratio == 1:
            return Weights(copy(layer.sinks), None, None)
        return Weights(copy(layer.sinks), copy(layer.ape), copy(layer.compressor_norm.weight))


class LayerJudge:
    """Judges every row that one layer computes in one format. Keeps the rows of each request in sequence order."""

    def __init__(self, ratio: int, rounding: Rounding, weights: Weights, verdict: Verdict) -> None:
        self.ratio, self.rounding, self.weights, self.verdict = ratio, rounding, weights, verdict
        self._kv: dict[int, Tensor] = {}
        self._kv_score: dict[int, Tensor] = {}

    def step(self, request: int, q: Tensor, kv: Tensor, kv_score: Tensor | None, ids: Tensor | None, result: Tensor) -> None:
        """The next n rows of `request`.

        q [n, heads, 512] and kv [n, 512] as projected; kv_score [n, 2W] or None; ids [n, k]: the compressed rows chosen, with -1 where
        there is none, or None for every closed group; result [n, heads, 512]: what the layer computed.
        """
        kv = kv.cpu().double()
        self._kv[request] = kv = torch.cat([self._kv.get(request, kv[:0]), kv])
        position = torch.arange(len(kv) - len(q), len(kv))
        window = rotate(kv, torch.arange(len(kv)), self.ratio)
        compressed = window[:0]
        if kv_score is not None and self.weights.ape is not None and self.weights.norm is not None:
            kv_score = kv_score.cpu().double()
            self._kv_score[request] = kv_score = torch.cat([self._kv_score.get(request, kv_score[:0]), kv_score])
            compressed = pool(kv_score, self.weights.ape, self.weights.norm, self.ratio)

        how = self.rounding
        window_rounded, compressed_rounded = how.window_row(window), how.compressed_row(compressed)
        group = torch.arange(len(compressed))
        for some in torch.arange(len(q)).split(BLOCK):  # a few rows at a time: float64 is large
            p = position[some, None]
            near = torch.arange(max(int(p[0]) - WINDOW + 1, 0), int(p[-1]) + 1)
            visible = (near > p - WINDOW) & (near <= p)
            chosen = group < (p + 1) // self.ratio
            if ids is not None:
                chosen = (ids[some].cpu()[:, :, None] == group).any(1)
            visible = torch.cat([visible, chosen], 1)
            query = rotate(normalise(q[some].cpu().double()), position[some], self.ratio)
            truth = attend(query, torch.cat([window[near], compressed]), visible, self.weights.sinks)
            rows_rounded = torch.cat([window_rounded[near], compressed_rounded])
            rounded = how.output(attend(how.query(query), rows_rounded, visible, self.weights.sinks))
            self.verdict.add(result[some].cpu().double() - truth, rounded - truth)

    def reject(self, request: int, tokens: int) -> None:
        """Forgets the last `tokens` rows of `request`: speculative tokens that were not accepted."""
        for rows in (self._kv, self._kv_score):
            if request in rows:
                rows[request] = rows[request][: len(rows[request]) - tokens]
