"""Cases, oracle and comparison for qkv_insert. KV bytes are exact; q lies between the roundings of both ends of its error interval."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tests.support.bytes import E4M3, NOPE, Pool, encode_bf16, encode_e4m3, round_bf16, round_e4m3, scale_byte
from tests.support.pools import cache_view, layout, owned_bytes, storage_bytes


@dataclass
class InsertCase:
    """Arguments of one qkv_insert call."""

    q: torch.Tensor
    kv: torch.Tensor
    pool: Pool
    storage: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    cos_sin: torch.Tensor
    options: dict[str, Any]

    @property
    def kv_cache(self) -> torch.Tensor:
        return cache_view(self.pool, self.storage)

    def args(self) -> tuple[torch.Tensor, ...]:
        return self.q, self.kv, self.kv_cache, self.slots, self.positions, self.cos_sin

    def kwargs(self) -> dict[str, Any]:
        return dict(self.options)

    def clone(self) -> InsertCase:
        return dataclasses.replace(self, **{k: v.clone() for k, v in vars(self).items() if isinstance(v, torch.Tensor)})

    def to(self, device: torch.device | str) -> InsertCase:
        return dataclasses.replace(self, **{k: v.to(device) for k, v in vars(self).items() if isinstance(v, torch.Tensor)})


def make_insert_case(
    rows: int,
    *,
    heads: int = 8,
    padded_heads: int = 8,
    kv_format: str = "bf16",
    q_dtype: torch.dtype = torch.bfloat16,
    q_scale: float | None = None,
    kv_scale: float | None = None,
    apply_q_norm: bool = True,
    eps: float = 1e-6,
    slotless: float = 0.2,
    short_slots: int = 0,
    page_rows: int = 64,
    value_scale: float = 1.0,
    stray_positions: bool = False,
    seed: int = 0,
) -> InsertCase:
    """A case on the CPU. `slotless` of the rows, and the last `short_slots`, have no KV slot; a few slots lie past the pool.

    stray_positions  every fifth row's position lies outside the rotation table
    """
    rng = np.random.default_rng([seed, rows, heads])
    pool = layout(kv_format, rows // page_rows + 2, page_rows)
    slots = rng.permutation(pool.pages * page_rows)[:rows].astype(np.int64)
    slots[rng.random(rows) < slotless] = -1
    if rows > 3:
        slots[2] = pool.pages * page_rows
    table = 500
    angles = rng.random((table, 32)) * 6.283185307179586
    kv = rng.standard_normal((rows, 512)) * value_scale
    if rows > 1:
        kv[1, 64:128] = 0  # a group without a value
    positions = rng.integers(0, table, rows)
    if stray_positions:
        positions[::5] = np.resize([-1, table, 2**40, -(2**63), 2**63 - 1], len(positions[::5]))
    return InsertCase(
        q=torch.from_numpy(rng.standard_normal((rows, heads, 512)) * value_scale).to(torch.bfloat16),
        kv=torch.from_numpy(kv).to(torch.bfloat16),
        pool=pool,
        storage=torch.from_numpy(rng.integers(0, 256, storage_bytes(pool), dtype=np.uint8)),
        slots=torch.from_numpy(slots[: rows - short_slots].copy()),
        positions=torch.from_numpy(positions),
        cos_sin=torch.from_numpy(np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)),
        options={
            "eps": eps,
            "padded_heads": padded_heads,
            "apply_q_norm": apply_q_norm,
            "q_scale": q_scale,
            "kv_scale": kv_scale,
            "q_dtype": q_dtype,
        },
    )


def _rotated(x: np.ndarray, cos_sin: np.ndarray) -> np.ndarray:
    """The last 64 of x [..., 512] rotated in pairs, each product and sum rounded in x's own dtype."""
    out = x.copy()
    cos, sin = cos_sin[..., :32], cos_sin[..., 32:]
    out[..., NOPE::2] = x[..., NOPE::2] * cos - x[..., NOPE + 1 :: 2] * sin
    out[..., NOPE + 1 :: 2] = x[..., NOPE::2] * sin + x[..., NOPE + 1 :: 2] * cos
    return out


def kv_row_bytes(row: np.ndarray, kv_format: str, scale: float | None) -> np.ndarray:
    """The bytes of one rotated fp32 row [512]: every rounding step is exact arithmetic."""
    x = row.astype(np.float64)
    if kv_format == "bf16":
        return encode_bf16(x)
    if kv_format == "fp8":
        inverse = np.float32(1) / np.float32(scale or 1.0)
        return encode_e4m3((row * inverse).astype(np.float64))
    rounded = round_bf16(x)
    groups = rounded[:NOPE].reshape(7, 64)
    scales = scale_byte(np.abs(groups).max(1), "amax")
    codes = encode_e4m3(groups / np.exp2(scales - 127.0)[:, None]).reshape(-1)
    return np.concatenate([codes, encode_bf16(rounded[NOPE:]), scales.astype(np.uint8), np.zeros(1, np.uint8)])


def check_insert(before: InsertCase, after: InsertCase, q_out: torch.Tensor) -> None:
    """`after` and `q_out` (any device) are what one call made of `before`."""
    options, pool = before.options, before.pool
    positions = before.positions.numpy()
    inside = (positions >= 0) & (positions < len(before.cos_sin))
    cos_sin = before.cos_sin.numpy()[np.where(inside, positions, 0)]

    old, got = before.storage.numpy(), after.storage.cpu().numpy()
    rotated = _rotated(before.kv.float().numpy(), cos_sin)
    want = old.copy()
    written = {int(s): t for t, s in enumerate(before.slots.tolist()) if 0 <= s < pool.pages * pool.page_rows and inside[t]}
    for slot, t in written.items():
        raw = kv_row_bytes(rotated[t], pool.kv_format, options["kv_scale"])
        for first, count in pool.spans(slot):
            want[first : first + count], raw = raw[:count], raw[count:]
    outside = ~owned_bytes(pool, len(old), list(written))
    assert np.array_equal(got[outside], old[outside]), "a KV byte outside the rows written changed"
    wrong = np.flatnonzero(got != want)
    assert not len(wrong), f"{len(wrong)} bytes of KV rows differ, the first at byte {wrong[0]}: {got[wrong[0]]}, expected {want[wrong[0]]}"

    n, heads, _ = before.q.shape
    assert q_out.dtype == options["q_dtype"] and tuple(q_out.shape) == (n, options["padded_heads"], 512), (q_out.dtype, q_out.shape)
    fp8 = q_out.dtype == torch.float8_e4m3fn
    raw = q_out.cpu().view(torch.uint8).numpy()
    assert not raw[:, heads:].any(), "a padded head is not zero"
    value = E4M3[raw[:, :heads]] if fp8 else q_out.cpu()[:, :heads].double().numpy()

    def computed(dtype: type[np.floating]) -> np.ndarray:
        x = before.q.float().numpy().astype(dtype)
        if options["apply_q_norm"]:
            x = x / np.sqrt((x * x).mean(-1, keepdims=True) + dtype(options["eps"]))
        return np.where(inside[:, None, None], _rotated(x, cos_sin.astype(dtype)[:, None]), 0)

    exact = computed(np.float64)
    peak = np.abs(exact).max(-1, keepdims=True, initial=1e-300)
    relative = float((np.abs(computed(np.float32) - exact) / peak).max(initial=0.0))
    delta = max(2 * relative, 2.0**-20) * peak
    factor = float(np.float32(1) / np.float32(options["q_scale"] or 1.0))

    def stored(x: np.ndarray) -> np.ndarray:
        return round_e4m3(x * factor) if fp8 else round_bf16(x)

    bad = np.argwhere(~((stored(exact - delta) <= value) & (value <= stored(exact + delta))))
    assert not len(bad), f"{len(bad)} values of q are wrong, the first at {bad[0]}: {value[tuple(bad[0])]}, exactly {exact[tuple(bad[0])]}"
