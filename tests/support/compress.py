"""Cases for compress_store: any mix of rows, strided pools full of canaries, NaN wherever nothing may be read."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from cute_kernels.save_policy import SavePolicy
from tests.support.bytes import Pool
from tests.support.pools import cache_view, layout, storage_bytes
from tests.support.steps import Request

_FAR = 1 << 40  # a state slot that faults if anyone dereferences it


def window_width(ratio: int) -> int:
    return 1024 if ratio == 4 else 512


def window_rows(ratio: int) -> int:
    return 8 if ratio == 4 else 128


def saved_positions(request: Request, ratio: int, policy: SavePolicy) -> set[int]:
    """Positions of this step's rows that the policy keeps, from its definition: the union of lo(b) .. b-1 over every possible start b."""
    rows = set(range(request.start, request.seq_len))
    if policy.every_row:
        return rows
    starts = set(range(max(0, request.seq_len - policy.rollback), request.seq_len + 1))
    if policy.prefix_stride:
        starts |= set(range(0, request.seq_len + 2 * ratio + 8, policy.prefix_stride))
    kept: set[int] = set()
    for b in starts:
        kept |= set(range(max(0, ratio * (b // ratio) - (4 if ratio == 4 else 0)), b))
    return rows & kept


@dataclass
class CompressCase:
    """Arguments of one compress_store call. The two pools are views into flat storages whose every other byte is a canary."""

    requests: list[Request]
    ratio: int
    kv_format: str
    save: SavePolicy
    kv_scale: float | None
    eps: float
    pool: Pool
    state_layout: tuple[tuple[int, int, int], tuple[int, int, int], int]
    state_storage: torch.Tensor
    kv_storage: torch.Tensor
    kv_score: torch.Tensor | None
    ape: torch.Tensor | None
    state_block_table: torch.Tensor
    positions: torch.Tensor
    token_to_req: torch.Tensor
    state_slots: torch.Tensor
    kv_slots: torch.Tensor
    seq_lens: torch.Tensor
    norm_weight: torch.Tensor
    cos_sin: torch.Tensor
    scratch: torch.Tensor | None = None
    cache: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def state(self) -> torch.Tensor:
        """fp32 [blocks, block rows, 2W], a strided view of `state_storage`."""
        return self.state_storage.as_strided(*self.state_layout)

    @property
    def kv_cache(self) -> torch.Tensor:
        """The compressed pool, a strided view of `kv_storage`."""
        return cache_view(self.pool, self.kv_storage)

    def args(self) -> tuple[torch.Tensor | None, ...]:
        """Positional arguments of compress_store, in order."""
        return (
            self.kv_score,
            self.ape,
            self.state,
            self.state_block_table,
            self.positions,
            self.token_to_req,
            self.state_slots,
            self.kv_slots,
            self.norm_weight,
            self.cos_sin,
            self.kv_cache,
        )

    def kwargs(self) -> dict[str, Any]:
        """Keyword arguments of compress_store."""
        seq_lens = None if self.save.every_row else self.seq_lens
        given = {"ratio": self.ratio, "eps": self.eps, "kv_scale": self.kv_scale, "save": self.save, "seq_lens": seq_lens}
        return given if self.scratch is None else {**given, "scratch": self.scratch}

    def _map(self, f: Any) -> CompressCase:
        changes = {k: f(v) for k, v in vars(self).items() if isinstance(v, torch.Tensor)}
        return dataclasses.replace(self, **changes, cache=self.cache)

    def clone(self) -> CompressCase:
        """A copy with tensors of its own; oracle results are shared."""
        return self._map(clone_with_strides)

    def to(self, device: torch.device | str) -> CompressCase:
        """The same case on another device, every stride kept."""
        return self._map(lambda x: move_with_strides(x, device))


# With so many requests a step of 4097 rows is one of which few windows close.
MANY_REQUESTS = [Request(0, 130), Request(250, 7), *[Request(5, 1)] * 31]


def cancelling(case: CompressCase) -> CompressCase:
    """A case of ratio 128 whose first rows make a window, of which all now weigh the same and nearly cancel: any other order of the sums
    gives other bytes."""
    case, width = case.clone(), case.kv_score.shape[1] // 2
    case.kv_score[:, width:], case.ape[:] = 0.0, 0.0
    case.kv_score[64:128, :width] = -(1 + 1e-6) * case.kv_score[:64, :width]
    return case


def lengthened(case: CompressCase, count: int) -> CompressCase:
    """The same rows in a step of `count` rows, all others padding: slots that say so, and beyond the end of all other per-row tensors."""
    slots = case.state_slots.new_full((count,), -1)
    slots[: len(case.state_slots)] = case.state_slots
    scores = None if case.kv_score is None else case.kv_score.new_full((count, case.kv_score.shape[1]), float("nan"))
    if scores is not None:
        scores[: len(case.kv_score)] = case.kv_score
    return dataclasses.replace(case, state_slots=slots, kv_score=scores, cache=case.cache)


def move_with_strides(x: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """`x` on `device` with its strides: what lies between its rows travels along."""
    if x.is_contiguous():
        return x.to(device)
    flat = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
    return flat.to(device).as_strided(x.shape, x.stride(), x.storage_offset())


def clone_with_strides(x: torch.Tensor) -> torch.Tensor:
    """A copy of `x` with its strides and its place in the storage, on which its alignment depends."""
    flat = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
    return flat.clone().as_strided(x.shape, x.stride(), x.storage_offset())


def nan_canary(n: int) -> torch.Tensor:
    """fp32 [n] of NaNs, neighbours with different payloads."""
    return ((torch.arange(n, dtype=torch.int32) & 0x3FFFFF) | 0x7FC00000).view(torch.float32)


def pitched(x: torch.Tensor, gap: int, poison: Any) -> torch.Tensor:
    """A copy of `x` [rows, columns] whose rows lie columns + gap elements apart, `poison` between them."""
    wide = torch.full((x.shape[0], x.shape[1] + gap), poison, dtype=x.dtype)
    wide[:, : x.shape[1]] = x
    return wide[:, : x.shape[1]]


def make_compress_case(
    requests: Sequence[Request],
    *,
    ratio: int,
    kv_format: str = "bf16",
    save: SavePolicy = SavePolicy.EVERY_ROW,
    scored: bool = True,
    seed: int = 0,
    padding: int = 0,
    short: str | None = None,
    skipped: float = 0.0,
    unstored: float = 0.0,
    stale_blocks: bool = False,
    state_block: int | None = None,
    page_rows: int | None = None,
    strided: bool = True,
    alignment: int = 32,
    cos_rows: int | None = None,
    value_scale: float = 1.0,
    score_scale: float = 1.0,
    zero_group: bool = False,
    kv_scale: float | None = None,
    eps: float = 1e-6,
) -> CompressCase:
    """A case on the CPU.

    scored        this step's rows come in kv_score; False: they lie in the state pool already
    padding       padding rows of several kinds at the end, some with slots that must not be written
    short         "positions", "token_to_req" or "kv_slots": that tensor ends before the padding rows, whose other fields look real
    skipped       share of rows whose state slot is -1 (their state rows are older ones)
    unstored      share of closing rows without a KV slot
    stale_blocks  some block-table entries and columns a window needs are missing: block 0 is read there, and holds finite rows
    strided       pools and kv_score with gaps and a storage offset; False: tight
    alignment     16 or 32: what strides and offsets are multiples of, and of no more
    cos_rows      length of the rotation table (default: every position fits)
    """
    rng = np.random.default_rng([seed, ratio, len(requests), sum(r.rows for r in requests), padding])
    requests = list(requests)
    gen = torch.Generator().manual_seed(int(rng.integers(2**31)))
    width, window = window_width(ratio), window_rows(ratio)
    bs = state_block or (4 if ratio == 4 else 8)
    page_rows = page_rows or 256 // ratio
    gap = alignment if strided else 0

    # --- rows
    req = [r for r, q in enumerate(requests) for _ in range(q.rows)]
    pos = [q.start + i for q in requests for i in range(q.rows)]
    real = np.array([rng.random() >= skipped for _ in pos], dtype=bool)
    closing = [t for t, p in enumerate(pos) if (p + 1) % ratio == 0]

    # --- state pool: blocks for what the windows and rows of this step touch, in random order; block 0 belongs to nobody
    columns: dict[tuple[int, int], int] = {}
    for r, q in enumerate(requests):
        if q.rows:
            first = max(0, ratio * (q.start // ratio) - (window - ratio))
            for column in range(first // bs, (q.seq_len - 1) // bs + 1):
                columns[r, column] = 0
    blocks = len(columns) + 3
    for key, block in zip(columns, rng.permutation(np.arange(1, len(columns) + 1)), strict=True):
        columns[key] = int(block)
    row_stride = 2 * width + gap // 4
    block_stride = bs * row_stride + gap // 4
    state_base = gap // 4
    state_storage = nan_canary(state_base + blocks * block_stride)
    state = state_storage.as_strided((blocks, bs, 2 * width), (block_stride, row_stride, 1), state_base)

    table_columns = max([c for _, c in columns] + [0]) + 1
    stale = torch.tensor(rng.choice([-1, 0, 2**30, -(2**31), blocks], size=(len(requests), table_columns + 3)), dtype=torch.int32)
    for (r, c), block in columns.items():
        stale[r, c] = block
    if stale_blocks:
        table_columns = max(1, table_columns - 1)
        for r, c in list(columns):
            if rng.random() < 0.3:
                stale[r, c] = int(rng.choice([-1, 2**30, blocks]))
        state[0] = torch.randn((bs, 2 * width), generator=gen)
    block_table = stale[:, :table_columns]

    # --- rows of earlier steps that a window of this one reads, and nothing else, are finite
    in_step = {(r, p): t for t, (r, p) in enumerate(zip(req, pos, strict=True)) if real[t]}
    for t in closing:
        for k in range(window):
            p = pos[t] - window + 1 + k
            if p < 0 or (scored and (req[t], p) in in_step):
                continue
            row = state[columns[req[t], p // bs], p % bs]
            halves = [slice(0, 512)] if ratio == 128 else [slice(k // 4 * 512, k // 4 * 512 + 512)]
            for part in halves:
                row[part] = torch.randn(512, generator=gen) * value_scale
                row[width:][part] = torch.randn(512, generator=gen) * score_scale

    # --- KV pool
    entries = sorted({(req[t], pos[t] // ratio) for t in closing})
    page_of: dict[tuple[int, int], int] = {}
    for r, e in entries:
        page_of.setdefault((r, e // page_rows), 0)
    pages = len(page_of) + 2
    for key, page in zip(page_of, rng.permutation(len(page_of)), strict=True):
        page_of[key] = int(page)
    pool = layout(kv_format, pages, page_rows, strided=strided, alignment=alignment)
    kv_storage = torch.randint(0, 256, (storage_bytes(pool),), dtype=torch.uint8, generator=gen)
    canary_slot = (pages - 1) * page_rows
    canary_state = (blocks - 1) * bs

    # --- per-row tensors
    keep = [saved_positions(q, ratio, save) for q in requests]
    state_slots, kv_slots = [], []
    for t, (r, p) in enumerate(zip(req, pos, strict=True)):
        slot = columns[r, p // bs] * bs + p % bs
        if not real[t]:
            slot = -1
        elif p not in keep[r] and rng.random() < 0.5:
            slot = _FAR + t
        state_slots.append(slot)
        if (p + 1) % ratio:
            kv_slots.append(int(rng.choice([-1, canary_slot])))
        elif rng.random() < unstored:
            kv_slots.append(-1)
        else:
            e = p // ratio
            kv_slots.append(page_of[r, e // page_rows] * page_rows + e % page_rows)
    for i in range(padding):
        kinds = [
            (-1, 0, 0, -1),
            (-1, 0, ratio - 1, canary_slot),
            (canary_state, (-1, len(requests), 2**31 - 1)[i % 3], 2 * ratio - 1, canary_slot),
            (-1, -(2**31), (-7, 1 << 45)[i % 2], canary_slot),
        ]
        slot, r, p, kv = (canary_state, 0, 2 * ratio - 1, canary_slot) if short else kinds[i % 4]
        state_slots.append(slot)
        req.append(r)
        pos.append(p)
        kv_slots.append(kv)
    tensors = {
        "positions": torch.tensor(pos, dtype=torch.int64),
        "token_to_req": torch.tensor(req, dtype=torch.int32),
        "state_slots": torch.tensor(state_slots, dtype=torch.int64),
        "kv_slots": torch.tensor(kv_slots, dtype=torch.int64),
    }
    if short and padding:
        tensors[short] = tensors[short][:-padding].clone()

    # --- inputs
    kv_score = ape = None
    if scored:
        raw = torch.randn((len(pos), 2 * width), generator=gen)
        raw[:, :width] *= value_scale
        raw[:, width:] *= score_scale
        raw[len(real) :] = torch.nan
        raw[: len(real)][torch.from_numpy(~real)] = torch.nan
        kv_score = pitched(raw, gap // 4, torch.nan)
        ape = torch.randn((ratio, width), generator=gen) * 0.5 * score_scale
    norm_weight = (1 + 0.3 * torch.randn(512, generator=gen)).to(torch.bfloat16)
    if zero_group:
        norm_weight[128:192] = 0
    cos_rows = cos_rows if cos_rows is not None else max([q.seq_len for q in requests] + [1])
    angles = torch.rand((cos_rows, 32), generator=gen, dtype=torch.float64) * 6.283185307179586
    return CompressCase(
        requests=requests,
        ratio=ratio,
        kv_format=kv_format,
        save=save,
        kv_scale=kv_scale,
        eps=eps,
        pool=pool,
        state_layout=((blocks, bs, 2 * width), (block_stride, row_stride, 1), state_base),
        state_storage=state_storage,
        kv_storage=kv_storage,
        kv_score=kv_score,
        ape=ape,
        state_block_table=block_table,
        seq_lens=torch.tensor([q.seq_len for q in requests], dtype=torch.int32),
        norm_weight=norm_weight,
        cos_sin=torch.cat([angles.cos(), angles.sin()], dim=1).float(),
        **tensors,
    )
