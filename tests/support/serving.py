"""One sequence served step by step through compress_store: for tests where only the cutting into steps differs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cute_kernels.save_policy import SavePolicy
from tests.support.compress import nan_canary, window_width
from tests.support.pools import cache_view, layout, storage_bytes

CompressStore = Callable[..., None]


class ServedSequence:
    """Pools of one request, and steps over its rows. Two of the same seed start from equal bytes and have equal rows.

    state rows start as NaN, so a window that reads a row nobody saved ends as NaN.
    """

    def __init__(
        self,
        compress_store: CompressStore,
        tokens: int,
        *,
        ratio: int,
        kv_format: str,
        save: SavePolicy = SavePolicy.EVERY_ROW,
        seed: int = 0,
        device: str = "cpu",
        options: dict[str, Any] | None = None,
    ):
        gen = torch.Generator().manual_seed(seed)
        self.compress_store, self.ratio, self.save, self.device = compress_store, ratio, save, device
        self.width = window_width(ratio)
        self.bs = 4 if ratio == 4 else 8
        self.page_rows = 256 // ratio
        self.options = {"kv_scale": 0.5 if kv_format == "fp8" else None, **(options or {})}
        blocks, pages = tokens // self.bs + 3, tokens // 256 + 3
        self.rows = torch.randn((tokens, 2 * self.width), generator=gen)
        self.ape = torch.randn((ratio, self.width), generator=gen).to(device)
        self.norm_weight = torch.randn(512, generator=gen).to(torch.bfloat16).to(device)
        angles = torch.rand((tokens, 32), generator=gen) * 6.28
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1).to(device)
        self.state_table = torch.randperm(blocks, generator=gen)[None].int()
        self.kv_table = torch.randperm(pages, generator=gen)
        self.state = nan_canary(blocks * self.bs * 2 * self.width).view(blocks, self.bs, 2 * self.width).to(device)
        self.pool = layout(kv_format, pages, self.page_rows)
        self.kv_storage = torch.randint(0, 256, (storage_bytes(self.pool),), dtype=torch.uint8, generator=gen).to(device)

    def step(self, start: int, rows: torch.Tensor | int) -> None:
        """One step from position `start`: so many of the sequence's own rows, or other rows [n, 2W] (rejected drafts)."""
        score = self.rows[start : start + rows] if isinstance(rows, int) else rows
        pos = torch.arange(start, start + len(score))
        entry = pos // self.ratio
        slot = self.kv_table[entry // self.page_rows] * self.page_rows + entry % self.page_rows
        tensors = (
            score,
            self.ape,
            self.state,
            self.state_table,
            pos,
            torch.zeros(len(score), dtype=torch.int32),
            self.state_table[0].long()[pos // self.bs] * self.bs + pos % self.bs,
            slot.where((pos + 1) % self.ratio == 0, -1),
            self.norm_weight,
            self.cos_sin,
            cache_view(self.pool, self.kv_storage),
        )
        seq_lens = None if self.save.every_row else torch.tensor([start + len(score)], dtype=torch.int32, device=self.device)
        self.compress_store(
            *(x.to(self.device) for x in tensors), ratio=self.ratio, eps=1e-6, save=self.save, seq_lens=seq_lens, **self.options
        )

    def state_rows(self, positions: range) -> torch.Tensor:
        """int32 bits [n, 2W] of the state rows at `positions`."""
        p = torch.tensor(list(positions), dtype=torch.int64)
        return self.state.cpu()[self.state_table[0].long()[p // self.bs], p % self.bs].view(torch.int32)
