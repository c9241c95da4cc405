"""The float64 oracle of compress_store and the comparison of a run with it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.support.bytes import E4M3, GROUP, NOPE, bf16_values, round_bf16, round_e4m3, scale_byte
from tests.support.compress import CompressCase, saved_positions, window_rows, window_width
from tests.support.pools import owned_bytes

# The least relative error granted to fp32 arithmetic before rounding: sixteen times fp32's unit roundoff, for approximate exponentials
# and another order of summation.
_FLOOR = 2.0**-20


@dataclass(frozen=True)
class Expected:
    """saved: (block, row) -> fp32 [2W]; rows: KV slot -> [512] before any rounding."""

    saved: dict[tuple[int, int], np.ndarray]
    rows: dict[int, np.ndarray]


@dataclass(frozen=True)
class CompressReport:
    """Largest error of the rows written, the bound on it (twice the plain fp32 path's), and how much was compared."""

    rows: int
    saved: int
    max_error: float
    bound: float


def oracle(case: CompressCase, dtype: type[np.floating]) -> Expected:
    """What a call has to write, in `dtype` arithmetic, row by row from the definition."""
    ratio, width, window = case.ratio, window_width(case.ratio), window_rows(case.ratio)
    state = case.state.cpu().numpy()
    blocks, bs = state.shape[:2]
    table = case.state_block_table.cpu().numpy()
    pos, req = case.positions.cpu().tolist(), case.token_to_req.cpu().tolist()
    state_slots, kv_slots = case.state_slots.cpu().tolist(), case.kv_slots.cpu().tolist()
    weight = case.norm_weight.float().cpu().numpy().astype(dtype)
    cos_sin = case.cos_sin.cpu().numpy().astype(dtype)
    score = None if case.kv_score is None else case.kv_score.cpu().numpy()
    ape = None if case.ape is None else case.ape.cpu().numpy()
    keep = [saved_positions(q, ratio, case.save) for q in case.requests]
    last = min(len(pos), len(req), len(kv_slots))

    def is_real(t: int) -> bool:
        return t < last and state_slots[t] >= 0 and 0 <= req[t] < len(case.requests)

    saved: dict[tuple[int, int], np.ndarray] = {}
    rows: dict[int, np.ndarray] = {}
    for t in range(len(state_slots)):
        if not is_real(t):
            continue
        r, p0, s = req[t], pos[t], kv_slots[t]
        if score is not None and ape is not None and p0 in keep[r] and state_slots[t] < blocks * bs:
            saved[divmod(state_slots[t], bs)] = np.concatenate([score[t, :width], score[t, width:] + ape[p0 % ratio]])
        if (p0 + 1) % ratio or p0 >= len(cos_sin) or not 0 <= s < case.pool.pages * case.pool.page_rows:
            continue
        values, logits = [], []
        for k in range(window):
            p = p0 - window + 1 + k
            if p < 0:
                continue
            column = 512 * (k // 4) if ratio == 4 else 0
            u = t - (p0 - p)
            if score is not None and ape is not None and u >= 0 and is_real(u) and req[u] == r and pos[u] == p:
                value = score[u, column : column + 512].astype(dtype)
                logit = score[u, width + column : width + column + 512].astype(dtype) + ape[p % ratio, column : column + 512].astype(dtype)
            else:
                block = int(table[r, p // bs]) if p // bs < table.shape[1] else 0
                row = state[block if 0 <= block < blocks else 0, p % bs]
                value = row[column : column + 512].astype(dtype)
                logit = row[width + column : width + column + 512].astype(dtype)
            values.append(value)
            logits.append(logit)
        v, x = np.stack(values), np.stack(logits)
        e = np.exp(x - x.max(0))
        pooled = (e * v).sum(0) / e.sum(0)
        normed = pooled / np.sqrt((pooled * pooled).mean() + dtype(case.eps)) * weight
        cos, sin = np.split(cos_sin[p0 - (ratio - 1)], 2)
        even, odd = normed[NOPE::2].copy(), normed[NOPE + 1 :: 2].copy()
        normed[NOPE::2] = even * cos - odd * sin
        normed[NOPE + 1 :: 2] = even * sin + odd * cos
        assert s not in rows and normed.dtype == dtype
        rows[s] = normed
    return Expected(saved, rows)


def expected(case: CompressCase) -> tuple[Expected, Expected]:
    """The oracle in float64 and the same arithmetic in fp32, computed once per case and shared by its clones."""
    if "expected" not in case.cache:
        case.cache["expected"] = (oracle(case, np.float64), oracle(case, np.float32))
    return case.cache["expected"]


def _stored(x: np.ndarray, case: CompressCase, scales: np.ndarray | None = None) -> np.ndarray:
    """The real values a cache holds after storing rows `x` [n, 512]; packed rows with the scale bytes [n, 7] given, or their own."""
    rounded = round_bf16(x)
    if case.kv_format == "bf16":
        return rounded
    if case.kv_format == "fp8":
        inverse = float(np.float32(1) / np.float32(case.kv_scale or 1.0))
        return round_e4m3((rounded.astype(np.float32) * np.float32(inverse)).astype(np.float64)) * float(np.float32(case.kv_scale or 1.0))
    groups = rounded[:, :NOPE].reshape(len(x), -1, GROUP)
    if scales is None:
        scales = scale_byte(np.abs(groups).max(-1), "scale")
    factor = np.exp2(scales.astype(np.float64) - 127)[..., None]
    return np.concatenate([(round_e4m3(groups / factor) * factor).reshape(len(x), NOPE), rounded[:, NOPE:]], axis=1)


def check_compress(before: CompressCase, after: CompressCase) -> CompressReport:
    """`after` (any device) is what a call made of `before`: bytes it does not own unchanged, state rows exact, KV rows admissible.

    Admissible: a stored value lies between the roundings of both ends of [x - d, x + d], x in float64 and d twice the largest relative
    error of the same arithmetic in fp32 (at least 2^-20) times the row's largest value. A scale byte lies between those of the group's
    amax at either end; codes are judged with the byte that was written.
    """
    want, plain = expected(before)

    state = before.state_storage.cpu().clone()
    view = state.as_strided(*before.state_layout).numpy()
    for (block, row), value in want.saved.items():
        view[block, row] = value
    got_state = after.state_storage.cpu().numpy().view(np.int32)
    _same(got_state, state.numpy().view(np.int32), "state pool", _state_position(before))

    got = after.kv_storage.cpu().numpy()
    old = before.kv_storage.cpu().numpy()
    owned = owned_bytes(before.pool, len(old), list(want.rows))
    _same(np.where(owned, 0, got), np.where(owned, 0, old), "KV bytes outside the rows written", str)
    if not want.rows:
        return CompressReport(0, len(want.saved), 0.0, 0.0)

    slots = list(want.rows)
    x = np.stack([want.rows[s] for s in slots])
    x32 = np.stack([plain.rows[s] for s in slots]).astype(np.float64)
    peak = np.abs(x).max(1, keepdims=True)
    relative = float((np.abs(x32 - x) / np.maximum(peak, 1e-300)).max())
    delta = max(2 * relative, _FLOOR) * peak
    raw = np.stack([before.pool.raw(got, s) for s in slots])
    scales = None
    scale = float(np.float32(before.kv_scale or 1.0))
    if before.kv_format == "bf16":
        value = bf16_values(raw)
    elif before.kv_format == "fp8":
        value = E4M3[raw] * scale
    else:
        scales = raw[:, 576:583].astype(np.int64)
        zero = raw[:, 583]
        assert not zero.any(), f"footer byte 7 of slot {slots[int(zero.nonzero()[0][0])]} is {zero[zero.nonzero()[0][0]]}, not 0"
        groups = np.abs(x[:, :NOPE]).reshape(len(x), -1, GROUP).max(-1)
        low = scale_byte(round_bf16(np.maximum(groups - delta, 0)), "scale")
        high = scale_byte(round_bf16(groups + delta), "scale")
        bad = np.argwhere((scales < low) | (scales > high))
        assert not len(bad), _message("scale byte", slots, bad, scales, low, high)
        factor = np.repeat(np.exp2(scales.astype(np.float64) - 127), GROUP, axis=1)
        value = np.concatenate([E4M3[raw[:, :NOPE]] * factor, bf16_values(raw[:, NOPE:576])], axis=1)
    low, high = _stored(x - delta, before, scales), _stored(x + delta, before, scales)
    bad = np.argwhere(~((low <= value) & (value <= high)))  # NaN fails too
    assert not len(bad), _message("value", slots, bad, value, low, high)

    error = float(np.abs(value - x).max())
    bound = 2 * float(np.abs(_stored(x32, before) - x).max())
    assert error <= bound, f"largest error {error} is above twice that of the plain fp32 path, {bound}"
    return CompressReport(len(slots), len(want.saved), error, bound)


def _same(got: np.ndarray, want: np.ndarray, what: str, where: object) -> None:
    if not np.array_equal(got, want):
        wrong = np.flatnonzero(got != want)
        at = int(wrong[0])
        place = where(at) if callable(where) else where
        raise AssertionError(f"{what}: {len(wrong)} of {len(got)} differ, the first at {place}: {got[at]:#x}, expected {want[at]:#x}")


def _state_position(case: CompressCase) -> object:
    (_, _, width), (block_stride, row_stride, _), base = case.state_layout

    def describe(at: int) -> str:
        block, rest = divmod(at - base, block_stride)
        return f"element {at} (block {block}, row {rest // row_stride}, column {rest % row_stride} of {width})"

    return describe


def _message(what: str, slots: list[int], bad: np.ndarray, got: np.ndarray, low: np.ndarray, high: np.ndarray) -> str:
    i, j = (int(n) for n in bad[0])
    return f"{what}: {len(bad)} wrong, the first at slot {slots[i]} column {j}: {got[i, j]} outside [{low[i, j]}, {high[i, j]}]"
