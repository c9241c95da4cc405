"""Cases, oracle and comparison for decode: attention in float64 over the rows a table names, read from the caches byte by byte."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cute_kernels.indices import CombinedIndices, SegmentIndices
from tests.support.bytes import Pool, encode_bf16, encode_e4m3
from tests.support.pools import cache_view, layout, storage_bytes
from tests.support.steps import Request


@dataclass(frozen=True)
class PlainStep:
    """The part of a step's metadata that attention reads, as plain data."""

    num_requests: int
    num_tokens: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    positions: torch.Tensor
    token_to_req: torch.Tensor


def plain_step(requests: Sequence[Request], device: torch.device | str = "cpu") -> PlainStep:
    """Metadata of a step without padding rows."""
    starts = np.cumsum([0, *(q.rows for q in requests)])
    return PlainStep(
        num_requests=len(requests),
        num_tokens=int(starts[-1]),
        query_start_loc=torch.tensor(starts, dtype=torch.int32, device=device),
        seq_lens=torch.tensor([q.seq_len for q in requests], dtype=torch.int32, device=device),
        positions=torch.tensor([q.start + i for q in requests for i in range(q.rows)], dtype=torch.int64, device=device),
        token_to_req=torch.tensor([r for r, q in enumerate(requests) for _ in range(q.rows)], dtype=torch.int32, device=device),
    )


@dataclass
class DecodeCase:
    """Arguments of one decode call, both index forms, and the slots they stand for."""

    step: PlainStep
    q: torch.Tensor
    heads: int
    sinks: torch.Tensor | None
    swa_pool: Pool
    swa_storage: torch.Tensor
    kv_pool: Pool | None
    kv_storage: torch.Tensor | None
    window_slots: list[list[int]]
    compressed_slots: list[list[int]]
    combined: CombinedIndices
    segments: SegmentIndices
    scales: dict[str, float]

    @property
    def swa_cache(self) -> torch.Tensor:
        return cache_view(self.swa_pool, self.swa_storage)

    @property
    def kv_cache(self) -> torch.Tensor | None:
        return None if self.kv_pool is None or self.kv_storage is None else cache_view(self.kv_pool, self.kv_storage)

    def args(self, form: str) -> tuple[Any, ...]:
        """Positional arguments of decode with one of the index forms."""
        return self.q, self.swa_cache, self.kv_cache, self.step, getattr(self, form)

    def kwargs(self) -> dict[str, Any]:
        return {"num_heads": self.heads, "sinks": self.sinks, **self.scales}

    def to(self, device: torch.device | str) -> DecodeCase:
        def move(x: Any) -> Any:
            if isinstance(x, torch.Tensor):
                return x.to(device)
            if isinstance(x, (PlainStep, CombinedIndices, SegmentIndices)):
                return dataclasses.replace(x, **{k: move(v) for k, v in vars(x).items()})
            return x

        return dataclasses.replace(self, **{k: move(v) for k, v in vars(self).items()})


def _random_row(kv_format: str, rng: np.random.Generator) -> np.ndarray:
    """Bytes of one finite row of values around 1."""
    if kv_format == "bf16":
        return encode_bf16(rng.standard_normal(512))
    if kv_format == "fp8":
        return encode_e4m3(rng.standard_normal(512))
    scales = rng.integers(117, 122, 7)
    nope = encode_e4m3(rng.standard_normal(448) * 64)
    return np.concatenate([nope, encode_bf16(rng.standard_normal(64)), scales.astype(np.uint8), np.zeros(1, np.uint8)])


def make_decode_case(
    requests: Sequence[Request],
    *,
    kv_format: str = "bf16",
    heads: int = 8,
    padded_heads: int | None = None,
    ratio: int = 4,
    k: int = 32,
    sinks: Sequence[float] | None = None,
    seed: int = 0,
    empty: float = 0.0,
    window_rows: int = 64,
    compressed_rows: int | None = None,
    q_scale: float = 1.0,
    kv_scale: float = 1.0,
) -> DecodeCase:
    """A case on the CPU: every cache byte outside the rows that some query names is NaN (0xFF), q is NaN in the padded heads.

    ratio   1: a window-only layer, without a compressed pool; else min(k, closed groups) random entries
    empty   share of rows whose tables hold no entry at all
    """
    rng = np.random.default_rng([seed, heads, ratio, k])
    requests = list(requests)
    step = plain_step(requests)
    rows = step.num_tokens
    longest = max([q.seq_len for q in requests] + [1])
    q = torch.from_numpy(rng.standard_normal((rows, padded_heads or heads, 512)).astype(np.float32)) * 0.5
    q[:, heads:] = torch.nan
    q = q.to(torch.float8_e4m3fn if kv_format == "fp8" else torch.bfloat16)
    is_empty = rng.random(rows) < empty

    def pool_of(page_rows: int, entries: int) -> tuple[Pool, np.ndarray]:
        columns = max(1, -(-entries // page_rows))
        order = 1 + rng.permutation(len(requests) * columns).reshape(len(requests), columns)  # page 0 belongs to nobody
        return layout(kv_format, len(requests) * columns + 2, page_rows), order

    def slot(table: np.ndarray, page_rows: int, r: int, entry: int) -> int:
        return int(table[r, entry // page_rows]) * page_rows + entry % page_rows

    def filled(pool: Pool, slots: list[list[int]]) -> torch.Tensor:
        storage = np.full(storage_bytes(pool), 0xFF, dtype=np.uint8)
        for s in sorted({s for row in slots for s in row}):
            raw = _random_row(kv_format, rng)
            for first, count in pool.spans(s):
                storage[first : first + count], raw = raw[:count], raw[count:]
        return torch.from_numpy(storage)

    swa_pool, swa_table = pool_of(window_rows, longest)
    window_slots, compressed_slots = [], []
    compressed_rows = compressed_rows or max(1, 256 // ratio)
    kv_pool, kv_table = pool_of(compressed_rows, longest // ratio + 1) if ratio > 1 else (None, swa_table)
    for t in range(rows):
        r, pos = int(step.token_to_req[t]), int(step.positions[t])
        groups = (pos + 1) // ratio if ratio > 1 else 0
        chosen = [] if is_empty[t] else rng.permutation(groups)[:k].tolist()
        window = [] if is_empty[t] else range(max(0, pos - 127), pos + 1)
        window_slots.append([slot(swa_table, window_rows, r, p) for p in window])
        compressed_slots.append([slot(kv_table, compressed_rows, r, e) for e in chosen])

    width = -(-k // 4) * 4 if ratio > 1 else 0

    def table(slots: list[list[int]], pool: Pool | None, columns: int, storage_rows: bool) -> torch.Tensor:
        out = np.full((rows, columns), -1, dtype=np.int32)
        for t, row in enumerate(slots):
            for j, s in enumerate(row):
                assert pool is not None
                row_bytes = {"bf16": 1024, "fp8": 512}.get(pool.kv_format, 0)
                span = pool.page_stride // row_bytes if storage_rows and row_bytes else pool.page_rows
                out[t, j] = s // pool.page_rows * span + s % pool.page_rows
        return torch.from_numpy(out)

    def count(slots: list[list[int]], more: int = 0) -> torch.Tensor:
        return torch.tensor([more + len(s) for s in slots], dtype=torch.int32)

    combined = CombinedIndices(
        torch.cat([table(window_slots, swa_pool, 128, True), table(compressed_slots, kv_pool, width, True)], dim=1),
        count(compressed_slots, 128),
    )
    parts = (table(compressed_slots, kv_pool, width, False), count(compressed_slots)) if ratio > 1 else (None, None)
    return DecodeCase(
        step=step,
        q=q,
        heads=heads,
        sinks=None if sinks is None else torch.tensor(sinks, dtype=torch.float32),
        swa_pool=swa_pool,
        swa_storage=filled(swa_pool, window_slots),
        kv_pool=kv_pool,
        kv_storage=None if kv_pool is None else filled(kv_pool, compressed_slots),
        window_slots=window_slots,
        compressed_slots=compressed_slots,
        combined=combined,
        segments=SegmentIndices(table(window_slots, swa_pool, 128, False), count(window_slots), *parts),
        scales={"q_scale": q_scale, "kv_scale": kv_scale},
    )


def decode_oracle(case: DecodeCase, dtype: type[np.floating] = np.float64) -> np.ndarray:
    """[rows, heads, 512] from the definition: one softmax per row and head, the sink in the denominator alone."""
    q = case.q[:, : case.heads].float().numpy().astype(dtype)
    swa = case.swa_storage.numpy()
    kv = None if case.kv_storage is None else case.kv_storage.numpy()
    out = np.zeros((len(q), case.heads, 512), dtype=dtype)
    scale = dtype(512**-0.5 * case.scales["q_scale"] * case.scales["kv_scale"])
    for t in range(len(q)):
        keys = [case.swa_pool.values(swa, s) for s in case.window_slots[t]]
        if case.kv_pool is not None and kv is not None:
            keys += [case.kv_pool.values(kv, s) for s in case.compressed_slots[t]]
        if not keys:
            continue
        key = np.stack(keys).astype(dtype)
        for h in range(case.heads):
            logit = key @ q[t, h] * scale
            sink = dtype(-np.inf) if case.sinks is None else dtype(case.sinks[h].item())
            peak = max(logit.max(), sink)
            weight = np.exp(logit - peak)
            out[t, h] = weight @ key / (weight.sum() + np.exp(sink - peak)) * dtype(case.scales["kv_scale"])
    return out


def check_decode(case: DecodeCase, out: torch.Tensor) -> tuple[float, float]:
    """`out` bf16 [rows, heads, 512] errs, against float64, at most twice as much as fp32 arithmetic rounded to bf16 does. Returns both."""
    assert out.dtype == torch.bfloat16 and tuple(out.shape) == (case.step.num_tokens, case.heads, 512), (out.dtype, out.shape)
    want = decode_oracle(case)
    plain = torch.from_numpy(decode_oracle(case, np.float32)).to(torch.bfloat16).double().numpy()
    got = out.cpu().double().numpy()
    bound = 2 * float(np.abs(plain - want).max(initial=0.0))
    wrong = np.argwhere(~(np.abs(got - want) <= bound))
    assert not len(wrong), f"{len(wrong)} values err by more than {bound}, the first at {wrong[0]}: {got[tuple(wrong[0])]}"
    return float(np.abs(got - want).max(initial=0.0)), bound
