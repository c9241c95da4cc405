"""Cases, oracle and comparison for sparse_indices: everything here is exact."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from cute_kernels.indices import CombinedIndices, IdSource, SegmentIndices
from cute_kernels.kv_format import PoolGeometry
from tests.support.compress import clone_with_strides, move_with_strides
from tests.support.steps import Request

Form = Literal["combined", "segments"]
_GUARD = 0x5A5A5A5A
_GARBAGE = (-1, -2, 2**31 - 1, -(2**31), 0x7FC00000, -0x400000, 0x3F800000)


@dataclass
class IndexCase:
    """Arguments of one sparse_indices call."""

    requests: list[Request]
    positions: torch.Tensor
    token_to_req: torch.Tensor
    window_block_table: torch.Tensor
    ids: torch.Tensor | None
    compressed_block_table: torch.Tensor | None
    window: PoolGeometry
    compressed: PoolGeometry | None
    source: IdSource
    ratio: int
    width: int | None
    slots: torch.Tensor | None
    num_rows: int | None
    cache: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def rows(self) -> int:
        return len(self.positions) if self.num_rows is None else self.num_rows

    @property
    def compressed_width(self) -> int:
        """Columns of the compressed part of the result."""
        if self.source is IdSource.NONE:
            return 0
        width = self.width
        if width is None:
            assert self.ids is not None
            width = self.ids.shape[1]
        return (width + 3) // 4 * 4

    def args(self) -> tuple[torch.Tensor | None, ...]:
        """Positional arguments of sparse_indices, in order."""
        return self.positions, self.token_to_req, self.window_block_table, self.ids, self.compressed_block_table

    def kwargs(self) -> dict[str, Any]:
        """Keyword arguments of sparse_indices but `out` and the form."""
        names = ("window", "compressed", "source", "ratio", "width", "slots", "num_rows")
        return {name: getattr(self, name) for name in names}

    def clone(self) -> IndexCase:
        return self._map(clone_with_strides)

    def to(self, device: torch.device | str) -> IndexCase:
        return self._map(lambda x: move_with_strides(x, device))

    def _map(self, f: Any) -> IndexCase:
        changes = {k: f(v) for k, v in vars(self).items() if isinstance(v, torch.Tensor)}
        return dataclasses.replace(self, **changes, cache=self.cache)

    def guarded_out(self, form: Form) -> GuardedOut:
        """Result buffers on this case's device, full of garbage, with guard words before and after each."""
        return GuardedOut(self, form)


class GuardedOut:
    """Caller's buffers for one call; `check()` after it proves that nothing around them was written."""

    def __init__(self, case: IndexCase, form: Form):
        self._storages: list[torch.Tensor] = []
        self._device = case.positions.device
        rows, width = case.rows, case.compressed_width
        self.out: CombinedIndices | SegmentIndices
        if form == "combined":
            self.out = CombinedIndices(self._buffer(rows, 128 + width), self._buffer(rows))
        elif case.source is IdSource.NONE:
            self.out = SegmentIndices(self._buffer(rows, 128), self._buffer(rows))
        else:
            self.out = SegmentIndices(self._buffer(rows, 128), self._buffer(rows), self._buffer(rows, width), self._buffer(rows))

    def _buffer(self, *shape: int) -> torch.Tensor:
        size = int(np.prod(shape))
        storage = torch.full((size + 64,), _GUARD, dtype=torch.int32, device=self._device)
        self._storages.append(storage)
        return storage[32 : 32 + size].view(shape)

    def check(self) -> None:
        for storage in self._storages:
            flat = storage.cpu()
            assert (flat[:32] == _GUARD).all() and (flat[-32:] == _GUARD).all(), "a word outside a result buffer was written"


def make_index_case(
    requests: Sequence[Request],
    *,
    source: IdSource,
    ratio: int = 4,
    k: int = 512,
    width: int | None = None,
    seed: int = 0,
    padding: int = 0,
    extra_rows: int = 0,
    short: str | None = None,
    with_slots: bool = True,
    garbage: float = 0.1,
    stale_blocks: bool = False,
    window_rows: int = 64,
    compressed_rows: int | None = None,
    span_factor: float = 1.75,
    id_pitch: int = 0,
) -> IndexCase:
    """A case on the CPU.

    k            ids per row (LOCAL, GLOBAL): valid ones in random order, with `garbage` of the lanes replaced by out-of-range bit patterns
    padding      rows with a negative slot or an impossible request; without `with_slots` only the latter
    extra_rows   rows of the tables beyond the row tensors
    short        "token_to_req" or "slots": that tensor ends before the padding rows, whose other fields look real; "ids" likewise
    stale_blocks some block-table entries are negative or past the pool, and both tables lack their last column
    span_factor  span / page rows of both pools, rounded up
    id_pitch     elements between rows of `ids` beyond k
    """
    rng = np.random.default_rng([seed, ratio, k, padding, len(requests), sum(r.rows for r in requests)])
    requests = list(requests)
    compressed_rows = compressed_rows or max(1, 256 // ratio)
    req = [r for r, q in enumerate(requests) for _ in range(q.rows)]
    pos = [q.start + i for q in requests for i in range(q.rows)]
    slot = [int(rng.integers(0, 1 << 20)) for _ in pos]
    for i in range(padding):
        if short in ("token_to_req", "slots"):
            kind = (0, 300, 7)
        elif with_slots and i % 3:
            kind = (0, (0, 777)[i % 2], -1)
        else:
            kind = ((-1, len(requests), 2**31 - 1)[i % 3], 300, 7)
        req.append(kind[0])
        pos.append(kind[1])
        slot.append(kind[2])
    longest = max([q.seq_len for q in requests] + [301])

    def table(page_rows: int, entries: int) -> tuple[torch.Tensor, int]:
        columns = max(1, -(-entries // page_rows))
        pages = len(requests) * columns + 2
        t = rng.permutation(pages)[: len(requests) * columns].reshape(len(requests), columns).astype(np.int32)
        if stale_blocks:
            bad = rng.random(t.shape) < 0.2
            t[bad] = rng.choice([-1, -(2**31), 2**31 - 1, pages], size=int(bad.sum()))
        wide = np.full((len(requests), columns + 5), 0x7FFFFFFF, dtype=np.int32)
        wide[:, :columns] = t
        return torch.tensor(wide)[:, : columns - 1 if stale_blocks and columns > 1 else columns], pages

    window_table, window_pages = table(window_rows, longest)
    window = PoolGeometry(window_pages, window_rows, int(np.ceil(window_rows * span_factor)))
    compressed, compressed_table, ids = None, None, None
    if source is not IdSource.NONE:
        compressed_table, pages = table(compressed_rows, longest // ratio + 1)
        compressed = PoolGeometry(pages, compressed_rows, int(np.ceil(compressed_rows * span_factor)))
    if source in (IdSource.LOCAL, IdSource.GLOBAL):
        assert compressed is not None
        count = len(pos) - (padding if short == "ids" else 0)
        raw = np.full((count, k + id_pitch), 0x7FFFFFFF, dtype=np.int32)
        for t in range(count):
            limit = compressed.slots if source is IdSource.GLOBAL else (max(pos[t], 0) + 1) // ratio
            some = rng.permutation(limit)[:k] if limit < 1 << 16 else rng.integers(0, limit, k)
            row = np.full(k, -1, dtype=np.int64)
            row[: len(some)] = some
            bad = rng.random(k) < garbage
            row[bad] = rng.choice(np.array([*_GARBAGE, limit, limit + 1]), size=int(bad.sum()))
            raw[t, :k] = row
        ids = torch.tensor(raw)[:, :k]  # a copy: torch aligns it to 64 bytes, NumPy to 16, and the width of accesses follows
    elif source is IdSource.ALL_GROUPS and width is None:
        width = longest // ratio
    tensors = {
        "positions": torch.tensor(pos, dtype=torch.int64),
        "token_to_req": torch.tensor(req, dtype=torch.int32),
        "slots": torch.tensor(slot, dtype=torch.int64) if with_slots else None,
    }
    if short in ("token_to_req", "slots") and padding:
        cut = tensors[short]
        assert cut is not None
        tensors[short] = cut[:-padding].clone()
    positions, token_to_req = tensors["positions"], tensors["token_to_req"]
    assert positions is not None and token_to_req is not None
    return IndexCase(
        requests=requests,
        positions=positions,
        token_to_req=token_to_req,
        slots=tensors["slots"],
        window_block_table=window_table,
        ids=ids,
        compressed_block_table=None if source is IdSource.GLOBAL else compressed_table,
        window=window,
        compressed=compressed,
        source=source,
        ratio=ratio if source in (IdSource.LOCAL, IdSource.ALL_GROUPS) else 1,
        width=width,
        num_rows=len(pos) + extra_rows if extra_rows else None,
    )


def oracle(case: IndexCase) -> tuple[list[list[tuple[int, int]]], list[list[tuple[int, int]]]]:
    """Per row the valid (page, offset) pairs of the window and of the compressed part, in order, from the definition."""
    pos, req = case.positions.cpu().tolist(), case.token_to_req.cpu().tolist()
    slots = None if case.slots is None else case.slots.cpu().tolist()
    tables = {False: case.window_block_table.cpu().tolist()}
    if case.compressed_block_table is not None:
        tables[True] = case.compressed_block_table.cpu().tolist()
    ids = None if case.ids is None else case.ids.cpu().tolist()
    windows, parts = [], []
    for t in range(case.rows):
        window: list[tuple[int, int]] = []
        part: list[tuple[int, int]] = []
        windows.append(window)
        parts.append(part)
        if t >= len(pos) or t >= len(req) or (slots is not None and (t >= len(slots) or slots[t] < 0)):
            continue
        if not 0 <= req[t] < len(tables[False]):
            continue

        def find(compressed: bool, entry: int, r: int = req[t]) -> tuple[int, int] | None:
            pool = case.compressed if compressed else case.window
            assert pool is not None
            column, offset = divmod(entry, pool.page_rows)
            row = tables[compressed][r]
            if column >= len(row) or not 0 <= row[column] < pool.pages:
                return None
            return row[column], offset

        for p in range(max(pos[t] - 127, 0), pos[t] + 1):
            found = find(False, p)
            if found:
                window.append(found)
        groups = (pos[t] + 1) // case.ratio
        if case.source is IdSource.ALL_GROUPS:
            chosen = list(range(min(groups, case.compressed_width)))
        else:
            chosen = ids[t] if ids is not None and t < len(ids) else []
        for e in chosen:
            if case.source is IdSource.GLOBAL:
                assert case.compressed is not None
                if 0 <= e < case.compressed.pages * case.compressed.page_rows:
                    part.append(divmod(e, case.compressed.page_rows))
            elif 0 <= e < groups:
                found = find(True, e)
                if found:
                    part.append(found)
    return windows, parts


def check_indices(case: IndexCase, result: CombinedIndices | SegmentIndices) -> None:
    """`result` (any device) equals the definition in every lane and every length."""
    if "oracle" not in case.cache:
        case.cache["oracle"] = oracle(case)
    windows, parts = case.cache["oracle"]
    combined = isinstance(result, CombinedIndices)

    def table(rows: list[list[tuple[int, int]]], pool: PoolGeometry | None, width: int) -> np.ndarray:
        out = np.full((case.rows, width), -1, dtype=np.int64)
        for t, row in enumerate(rows):
            if row and pool is not None:
                out[t, : len(row)] = [page * (pool.span if combined else pool.page_rows) + offset for page, offset in row]
        return out

    window = table(windows, case.window, 128)
    part = table(parts, case.compressed, case.compressed_width)
    window_lengths, part_lengths = np.array([len(w) for w in windows]), np.array([len(p) for p in parts])
    if isinstance(result, CombinedIndices):
        _equal("table", result.table, np.concatenate([window, part], axis=1))
        _equal("lengths", result.lengths, 128 + part_lengths)
        return
    _equal("window", result.window, window)
    _equal("window_lengths", result.window_lengths, window_lengths)
    if case.source is IdSource.NONE:
        assert result.compressed is None and result.compressed_lengths is None
    else:
        assert result.compressed is not None and result.compressed_lengths is not None
        _equal("compressed", result.compressed, part)
        _equal("compressed_lengths", result.compressed_lengths, part_lengths)


def _equal(name: str, got: torch.Tensor, want: np.ndarray) -> None:
    assert got.dtype == torch.int32, f"{name} is {got.dtype}, not int32"
    have = got.cpu().numpy()
    assert have.shape == want.shape, f"{name} has shape {have.shape}, expected {want.shape}"
    if not np.array_equal(have, want):
        at = np.argwhere(have != want)
        first = tuple(int(i) for i in at[0])
        raise AssertionError(f"{name}: {len(at)} of {want.size} differ, the first at {first}: {have[first]}, expected {want[first]}")
