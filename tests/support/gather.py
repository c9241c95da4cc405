"""Cases and brute-force oracles of `gather_upconvert` and `convert_indices`: byte addresses and values from the definition, in numpy."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tests.support.bytes import E4M3, round_bf16

COLUMNS = {"fp8_inline": 576, "fp8_ds_mla": 512, "fp8": 512}
ROW_BYTES = {"fp8_inline": 656, "fp8_ds_mla": 584, "fp8": 512}
FORMATS = tuple(COLUMNS)
STALE = (-1, -(2**31), 2**31 - 1)
POISON = 0x5A5A


def _moved(case: Any, device: str) -> Any:
    """A case with all its tensors on a device, strides and offsets kept."""
    changes = {}
    for name, value in vars(case).items():
        if isinstance(value, torch.Tensor):
            flat = torch.empty(0, dtype=value.dtype, device=value.device).set_(value.untyped_storage())
            changes[name] = flat.to(device).as_strided(value.shape, value.stride(), value.storage_offset())
    return dataclasses.replace(case, **changes)


@dataclass
class GatherCase:
    """Arguments of `gather_upconvert` apart from `out`, and where the cache's bytes lie in its storage."""

    kv_format: str
    cache: torch.Tensor
    base: int
    page_stride: int
    block_table: torch.Tensor
    workspace_starts: torch.Tensor
    seq_starts: torch.Tensor | None
    kv_scale: float | None
    rows: int
    wanted: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def columns(self) -> int:
        return COLUMNS[self.kv_format]

    def to(self, device: str) -> GatherCase:
        return _moved(self, device)

    def args(self, out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.cache, out, self.block_table, self.workspace_starts

    def kwargs(self) -> dict[str, Any]:
        return {"seq_starts": self.seq_starts, "kv_scale": self.kv_scale}

    def guarded_out(self, pitch: int = 16) -> Guarded:
        return Guarded.of(self.rows, self.columns, pitch, torch.bfloat16, self.cache.device)


@dataclass
class Guarded:
    """A poisoned matrix inside a poisoned buffer."""

    whole: torch.Tensor
    out: torch.Tensor

    @staticmethod
    def of(rows: int, columns: int, pitch: int, dtype: torch.dtype, device: Any) -> Guarded:
        """`pitch` elements lie between the rows, 64 bytes and more around them."""
        lead, step = 64, columns + pitch
        whole = torch.full((2 * lead + rows * step,), POISON, dtype=torch.int16 if dtype.itemsize == 2 else torch.int32, device=device)
        return Guarded(whole, whole.view(dtype).as_strided((rows, columns), (step, 1), lead))

    def check(self) -> None:
        """Nothing around the matrix has changed."""
        rest = self.whole.clone()
        words = rest.as_strided(self.out.shape, self.out.stride(), self.out.storage_offset())
        words.fill_(POISON)
        assert bool((rest == POISON).all()), f"written outside: word {int((rest != POISON).nonzero()[0])}"


def make_gather_case(
    lengths: Sequence[int],
    *,
    kv_format: str,
    page_rows: int = 64,
    seq_starts: bool = True,
    stale: bool = False,
    one_more_start: bool = False,
    strided: bool = True,
    awkward: bool = False,
    lead: int = 0,
    seed: int = 0,
) -> GatherCase:
    """Requests of these row counts, each beginning at any position (or, without `seq_starts`, at 0) of a sequence of its own.

    stale           some block-table entries lie outside the cache, and the table lacks its last column
    one_more_start  workspace_starts has a last entry for the end
    strided         pages apart, at an offset
    awkward         codes and scales of any bits, NaN and infinities among them
    lead            rows of the workspace before the first request's
    """
    rng = np.random.default_rng([seed, page_rows, len(lengths), sum(lengths), FORMATS.index(kv_format)])
    first = rng.integers(0, 3 * page_rows + 5, len(lengths)) if seq_starts else np.zeros(len(lengths), dtype=np.int64)
    if stale and seq_starts and len(lengths):
        first[0] = -3
    longest = max([int(f) + n for f, n in zip(first, lengths, strict=True)] + [1])
    columns = -(-longest // page_rows)
    pages = len(lengths) * columns + 2
    row = ROW_BYTES[kv_format]
    base = 48 if strided else 0
    page_stride = -(-page_rows * row // 16) * 16 + (80 if strided else 0)
    if kv_format == "fp8" and strided:
        page_stride, base = page_rows * row + 3 * row, 1024
    storage = rng.integers(0, 256, base + pages * page_stride + 64, dtype=np.uint8)
    if not awkward:
        storage[(storage & 0x7F) == 0x7F] = 0x11
    _set_scales(storage, kv_format, base, page_stride, pages, page_rows, awkward, rng)
    table = rng.permutation(pages)[: len(lengths) * columns].reshape(len(lengths), columns).astype(np.int32)
    if stale:
        bad = rng.random(table.shape) < 0.25
        table[bad] = rng.choice([*STALE, pages], size=int(bad.sum()))
    wide = np.full((len(lengths), columns + 3), 0x7FFFFFFF, dtype=np.int32)
    wide[:, :columns] = table
    starts = lead + np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    dtype = torch.float8_e4m3fn if kv_format == "fp8" else torch.uint8
    cache = torch.tensor(storage).view(dtype).as_strided((pages, page_rows, row), (page_stride, row, 1), base)
    return GatherCase(
        kv_format=kv_format,
        cache=cache,
        base=base,
        page_stride=page_stride,
        block_table=torch.tensor(wide)[:, : columns - 1 if stale and columns > 1 else columns],
        workspace_starts=torch.tensor(starts if one_more_start else starts[:-1]),
        seq_starts=torch.tensor(first.astype(np.int32)) if seq_starts else None,
        kv_scale=0.37 if kv_format == "fp8" else None,
        rows=lead + sum(lengths),
    )


def _set_scales(storage, kv_format, base, page_stride, pages, page_rows, awkward, rng) -> None:
    """Scales that a writer would leave, or (`awkward`) any."""
    for page in range(pages):
        start = base + page * page_stride
        if kv_format == "fp8_inline":
            scales = (rng.random((page_rows, 4)) * 2.0 ** rng.integers(-20, 5, (page_rows, 4))).astype(np.float32)
            if awkward:
                odd = rng.random(scales.shape) < 0.4
                scales[odd] = rng.choice(np.array([np.inf, -np.inf, np.nan, -0.5, 0.0, 1e-42, 3e38, 1e-38], np.float32), int(odd.sum()))
            for i in range(page_rows):
                storage[start + i * 656 + 512 : start + i * 656 + 528] = scales[i].view(np.uint8)
        elif kv_format == "fp8_ds_mla":
            low, high = (1, 255) if awkward else (105, 136)
            storage[start + page_rows * 576 : start + page_rows * 584] = rng.integers(low, high, page_rows * 8)


def row_address(case: GatherCase, position: int, request: int) -> tuple[int, int] | None:
    """(page, offset) of a position of a request, or None where the rule says zeros."""
    page_rows = case.cache.shape[1]
    if position < 0 or position // page_rows >= case.block_table.shape[1]:
        return None
    page = int(case.block_table[request, position // page_rows])
    return (page, position % page_rows) if 0 <= page < case.cache.shape[0] else None


def row_bits(case: GatherCase, storage: np.ndarray, page: int, offset: int) -> np.ndarray:
    """uint16 [columns]: the bf16 row of a cache row. The product is rounded to fp32, then to bf16."""
    start = case.base + page * case.page_stride
    if case.kv_format == "fp8":
        codes, scales, rope = storage[start + offset * 512 :][:512], np.full(512, np.float32(case.kv_scale)), b""
    elif case.kv_format == "fp8_inline":
        raw = storage[start + offset * 656 :][:656]
        codes, scales, rope = raw[:512], np.repeat(raw[512:528].copy().view(np.float32), 128), raw[528:].tobytes()
    else:
        raw = storage[start + offset * 576 :][:576]
        footer = storage[start + case.cache.shape[1] * 576 + offset * 8 :][:7]
        codes, scales, rope = raw[:448], np.repeat(np.exp2(footer.astype(np.float64) - 127), 64), raw[448:].tobytes()
    with np.errstate(over="ignore", invalid="ignore"):
        product = (E4M3[codes] * scales.astype(np.float64)).astype(np.float32)
        rounded = np.where(np.isfinite(product), round_bf16(np.where(np.isfinite(product), product, 0)), product).astype(np.float32)
    return np.concatenate([(rounded.view(np.uint32) >> 16).astype(np.uint16), np.frombuffer(rope, dtype=np.uint16)])


def gathered(case: GatherCase) -> np.ndarray:
    """uint16 [rows, columns] of the workspace; POISON in rows before the first request's."""
    storage = torch.empty(0, dtype=torch.uint8).set_(case.cache.cpu().untyped_storage()).numpy()
    out = np.full((case.rows, case.columns), POISON, dtype=np.uint16)
    requests = case.block_table.shape[0]
    starts = [*case.workspace_starts[:requests].tolist(), case.rows]
    for r in range(requests):
        for row in range(max(starts[r], 0), min(starts[r + 1], case.rows) if r + 1 < requests else case.rows):
            position = row - starts[r] + (0 if case.seq_starts is None else int(case.seq_starts[r]))
            where = row_address(case, position, r)
            out[row] = 0 if where is None else row_bits(case, storage, *where)
    return out


def check_gathered(case: GatherCase, out: torch.Tensor) -> None:
    """`out` holds what the definition says, bit for bit but for the bits of a NaN that a product gives."""
    if "bits" not in case.wanted:
        case.wanted["bits"] = gathered(case.to("cpu"))
    require_same_bits(case.kv_format, out, torch.from_numpy(case.wanted["bits"].view(np.int16)).to(out.device).view(torch.bfloat16))


def require_same_bits(kv_format: str, got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal bits everywhere; a NaN that a product gave equals any other, one that was copied only itself."""
    assert got.shape == want.shape and got.dtype == want.dtype == torch.bfloat16
    same = got.contiguous().view(torch.int16) == want.contiguous().view(torch.int16)
    computed = torch.arange(got.shape[1], device=got.device) < (448 if kv_format == "fp8_ds_mla" else 512)
    same |= got.isnan() & want.isnan() & computed
    if not bool(same.all()):
        at = (~same).nonzero()
        first = tuple(at[0].tolist())
        raise AssertionError(f"{len(at)} of {got.numel()} values differ, first at {first}: {got[first]}, expected {want[first]}")


@dataclass
class ConvertCase:
    """Arguments of `convert_indices`."""

    ids: torch.Tensor
    token_to_req: torch.Tensor
    block_table: torch.Tensor
    page_rows: int
    block_stride_rows: int | None
    pages: int | None
    workspace_starts: torch.Tensor | None
    prefill_request_id: torch.Tensor | None

    def to(self, device: str) -> ConvertCase:
        return _moved(self, device)

    def args(self) -> tuple[torch.Tensor, ...]:
        return self.ids, self.token_to_req, self.block_table

    def kwargs(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in list(vars(self))[3:]}

    def guarded(self, pitch: int = 8) -> tuple[Guarded, Guarded]:
        """Buffers for slots and counts; rows of slots start at multiples of 32 bytes."""
        rows, k = self.ids.shape
        counts = Guarded.of(1, rows, 0, torch.int32, self.ids.device)
        return Guarded.of(rows, k, -k % 8 + pitch, torch.int32, self.ids.device), Guarded(counts.whole, counts.out[0])


def make_convert_case(
    rows: int,
    requests: int,
    k: int,
    *,
    page_rows: int = 64,
    span: int | None = None,
    columns: int = 40,
    pages: bool = True,
    prefill: bool = False,
    garbage: float = 0.2,
    stale: bool = False,
    seed: int = 0,
) -> ConvertCase:
    """Rows of random requests (some impossible), ids in random order, `garbage` of them any bit pattern."""
    rng = np.random.default_rng([seed, rows, requests, k, page_rows])
    count = requests * columns + 3
    table = rng.permutation(count)[: requests * columns].reshape(requests, columns).astype(np.int32)
    if stale:
        bad = rng.random(table.shape) < 0.2
        table[bad] = rng.choice([*STALE, count if pages else -7], size=int(bad.sum()))
    wide = np.full((requests, columns + 5), 0x7FFFFFFF, dtype=np.int32)
    wide[:, :columns] = table
    raw = np.full((rows, k + 8 - k % 8), 0x7FFFFFFF, dtype=np.int32)
    limit = columns * page_rows
    raw[:, :k] = rng.integers(0, limit, (rows, k))
    bad = rng.random((rows, k)) < garbage
    odd = [-1, -2, -(2**31), 2**31 - 1, 0x7FC00000, 0x7F800001, -4194304, limit, limit + 1, limit - 1]
    raw[:, :k][bad] = rng.choice(odd, size=int(bad.sum()))
    req = rng.integers(0, requests, rows).astype(np.int32)
    if garbage:
        req[rng.random(rows) < 0.1] = rng.choice([-1, requests, 2**31 - 1, -(2**31)])
    starts, prefills = None, None
    if prefill:
        starts = torch.tensor(np.array([*rng.integers(0, 5000, requests), 2**31 - 40, -30], dtype=np.int32))
        chosen = rng.integers(-2, len(starts) + (2 if garbage else 0), rows).astype(np.int32)
        prefills = torch.tensor(chosen)
    return ConvertCase(
        ids=torch.tensor(raw)[:, :k],  # a copy: torch aligns it to 64 bytes, NumPy to 16, and the width of accesses follows
        token_to_req=torch.tensor(req),
        block_table=torch.tensor(wide)[:, :columns],
        page_rows=page_rows,
        block_stride_rows=span,
        pages=count if pages else None,
        workspace_starts=starts,
        prefill_request_id=prefills,
    )


def converted(case: ConvertCase) -> list[list[int]]:
    """Every lane's slot, -1 where there is none, from the definition."""
    ids, req, table = case.ids.cpu().tolist(), case.token_to_req.cpu().tolist(), case.block_table.cpu().tolist()
    starts = None if case.workspace_starts is None else case.workspace_starts.cpu().tolist()
    prefills = None if case.prefill_request_id is None else case.prefill_request_id.cpu().tolist()
    span = case.page_rows if case.block_stride_rows is None else case.block_stride_rows
    slots = []
    for t, row in enumerate(ids):
        found = []
        for number in row:
            slot = -1
            if prefills is not None and prefills[t] >= 0:
                if number >= 0 and prefills[t] < len(starts) and 0 <= starts[prefills[t]] + number < 2**31:
                    slot = starts[prefills[t]] + number
            elif number >= 0 and 0 <= req[t] < len(table) and number // case.page_rows < len(table[req[t]]):
                page = table[req[t]][number // case.page_rows]
                if case.pages is None:
                    inside = page >= 0 and page * span + case.page_rows <= 2**31
                else:
                    inside = 0 <= page < case.pages
                slot = page * span + number % case.page_rows if inside else -1
            found.append(slot)
        slots.append(found)
    return slots


def check_converted(case: ConvertCase, out: torch.Tensor, counts: torch.Tensor | None = None) -> None:
    """`out`, and with `counts` its compaction, are what the definition says."""
    want = converted(case)
    if counts is not None:
        valid = [[s for s in row if s >= 0] for row in want]
        assert counts.dtype == torch.int32 and counts.cpu().tolist() == [len(row) for row in valid]
        want = [row + [-1] * (case.ids.shape[1] - len(row)) for row in valid]
    assert out.dtype == torch.int32 and out.shape == case.ids.shape
    have = out.cpu().numpy()
    expected = np.array(want, dtype=np.int64).reshape(have.shape)
    if not np.array_equal(have, expected):
        first = tuple(int(i) for i in np.argwhere(have != expected)[0])
        raise AssertionError(
            f"{(have != expected).sum()} of {have.size} differ, first at {first}: {have[first]}, expected {expected[first]}"
        )
