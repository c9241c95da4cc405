"""One attention layer of DeepSeek-V4 as a model would write it on top of `cute_kernels`.

`DeepseekV4Attention` holds the layer's own projections (random weights, the sizes of V4-Flash and V4-Pro) and hands what lies
between them to the library: norm and rotation of q, the caches, the compressor, the index tables, the attention.
`Engine` is the least an inference engine brings along: pages in random order, block tables, slot mappings, and the batch
of a step, whose requests may prefill, prefill a chunk, decode, or verify speculative tokens.

    engine = Engine(V4_FLASH, [1, 4, 128], max_requests=2, max_tokens=4096, target=Target.named("sm100"), kv_cache_dtype="bfloat16")
    layers = [DeepseekV4Attention(V4_FLASH, ratio, engine.target, max_positions=4096) for ratio in engine.ratios]
    batch = engine.step({0: 1, 1: 512})  # request 0 decodes one token, request 1 prefills 512
    for layer, cache in zip(layers, engine.caches):
        hidden = hidden + layer(hidden, batch, cache)

The indexer is simplified, since it only supplies ids: the real one pools each group's tokens with a compressor of its own,
rotates and quantises; here the index key of a group is projected from the token that closes it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cute_kernels import reference
from cute_kernels.indices import IdSource
from cute_kernels.kv_format import PoolGeometry, resolve_format
from cute_kernels.reference.rope import cos_sin_table
from cute_kernels.save_policy import SavePolicy
from cute_kernels.step import StepMetadata, slot_mapping
from cute_kernels.target import Target

HEAD_DIM, ROPE_DIM = 512, 64


@dataclass(frozen=True)
class V4Config:
    """The sizes of a DeepSeek-V4 model that its attention layers need."""

    hidden_size: int
    num_heads: int
    q_lora_rank: int
    o_groups: int
    index_topk: int
    o_lora_rank: int = 1024
    index_heads: int = 64
    index_dim: int = 128
    eps: float = 1e-6


V4_FLASH = V4Config(hidden_size=4096, num_heads=64, q_lora_rank=1024, o_groups=8, index_topk=512)
V4_PRO = V4Config(hidden_size=7168, num_heads=128, q_lora_rank=1536, o_groups=16, index_topk=1024)


# ---------------------------------------------------------------- the engine's part


class PagePool:
    """The pages of one kind of cache: a block table per request, filled from a free list in random order.

    page_rows  rows of a page; `ratio` tokens share a row
    """

    def __init__(self, requests: int, max_tokens: int, page_rows: int, ratio: int = 1) -> None:
        self.page_rows, self.ratio = page_rows, ratio
        columns = math.ceil(max_tokens / (page_rows * ratio))
        self.pages = requests * columns
        self.free = torch.randperm(self.pages).tolist()
        self.table = torch.full((requests, columns), -1, dtype=torch.int32)

    def reserve(self, request: int, tokens: int) -> None:
        """Gives `request` the pages of its first `tokens` tokens."""
        row = self.table[request]
        for column in range(math.ceil(tokens / (self.page_rows * self.ratio))):
            if row[column] < 0:
                row[column] = self.free.pop()

    def release(self, request: int) -> None:
        """Takes back all pages of `request`."""
        row = self.table[request]
        self.free += row[row >= 0].tolist()
        row.fill_(-1)


@dataclass
class Paged:
    """What a step knows of one pool: int32 block table [R, n] of the step's requests, int64 slot [T] of each row (-1: none)."""

    block_table: Tensor
    slots: Tensor


@dataclass
class Batch:
    """One step: its rows, and what each pool knows of them. Shared by all layers."""

    requests: list[int]  # the engine's request numbers, in row order
    step: StepMetadata
    window: Paged
    compressed: dict[int, Paged]  # by ratio
    state: dict[int, Paged]  # by ratio
    save: SavePolicy

    def rows(self) -> Iterator[tuple[int, slice]]:
        """Each request with its rows."""
        bounds = self.step.query_start_loc_cpu.tolist()
        return zip(self.requests, map(slice, bounds[:-1], bounds[1:]), strict=True)


@dataclass
class LayerCache:
    """What one layer keeps between steps.

    window      [pages, 64, row] uncompressed KV rows
    compressed  [pages, 256 / ratio, row] compressed KV rows, or None
    state       fp32 [blocks, 4 or 8, 2W] the compressor's open windows, or None
    index_keys  bf16 [compressed slots, 128] the indexer's keys (ratio 4), or None
    """

    window: Tensor
    compressed: Tensor | None = None
    state: Tensor | None = None
    index_keys: Tensor | None = None


class Engine:
    """Requests, their pages and their steps. All lengths are in tokens."""

    def __init__(
        self,
        config: V4Config,
        ratios: list[int],
        target: Target,
        *,
        kv_cache_dtype: str = "auto",
        max_requests: int,
        max_tokens: int,
        draft_tokens: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.ratios, self.target, self.device, self.draft_tokens = ratios, target, device, draft_tokens
        self.lengths = [0] * max_requests
        self.window_pool = PagePool(max_requests, max_tokens, 64)
        compressing = sorted(set(ratios) - {1})
        self.compressed_pools = {r: PagePool(max_requests, max_tokens, 256 // r, r) for r in compressing}
        self.state_pools = {r: PagePool(max_requests, max_tokens, 4 if r == 4 else 8) for r in compressing}

        kv_format = resolve_format(kv_cache_dtype, target.family)

        def rows(pool: PagePool) -> Tensor:
            return torch.zeros(pool.pages, pool.page_rows, kv_format.row_elements, dtype=kv_format.dtype, device=device)

        self.caches = []
        for ratio in ratios:
            cache = LayerCache(window=rows(self.window_pool))
            if ratio != 1:
                state, width = self.state_pools[ratio], 2048 if ratio == 4 else 1024
                cache.compressed = rows(self.compressed_pools[ratio])
                cache.state = torch.zeros(state.pages, state.page_rows, width, device=device)
            if ratio == 4:
                slots = self.compressed_pools[4].pages * 64
                cache.index_keys = torch.zeros(slots, config.index_dim, dtype=torch.bfloat16, device=device)
            self.caches.append(cache)

    @property
    def pools(self) -> list[PagePool]:
        return [self.window_pool, *self.compressed_pools.values(), *self.state_pools.values()]

    def step(self, query_lens: dict[int, int]) -> Batch:
        """The batch in which each request r appends `query_lens[r]` tokens. Requests with few tokens go first: they decode."""
        requests = sorted(query_lens, key=lambda r: query_lens[r] > 1 + self.draft_tokens)
        for request in requests:
            self.lengths[request] += query_lens[request]
            for pool in self.pools:
                pool.reserve(request, self.lengths[request])
        step = StepMetadata.of(
            [query_lens[r] for r in requests],
            [self.lengths[r] for r in requests],
            self.device,
            decode_query_len=1 + self.draft_tokens,
        )

        def paged(pool: PagePool) -> Paged:
            table = pool.table[requests].to(self.device)
            return Paged(table, slot_mapping(step, table, pool.page_rows, ratio=pool.ratio))

        return Batch(
            requests,
            step,
            window=paged(self.window_pool),
            compressed={r: paged(pool) for r, pool in self.compressed_pools.items()},
            state={r: paged(pool) for r, pool in self.state_pools.items()},
            save=SavePolicy(rollback=self.draft_tokens),
        )

    def reject(self, request: int, tokens: int) -> None:
        """Forgets the last `tokens` speculative tokens of `request`; what they wrote is overwritten by later steps."""
        self.lengths[request] -= tokens

    def finish(self, request: int) -> None:
        """Ends `request` and takes back its pages."""
        self.lengths[request] = 0
        for pool in self.pools:
            pool.release(request)


# ---------------------------------------------------------------- the model's part


@dataclass
class Projected:
    """What the layer's projections produce for the T rows of a step.

    q         bf16 [T, heads, 512], before norm and rotation
    kv        bf16 [T, 512], normalised, before rotation
    kv_score  fp32 [T, 2W], the compressor's input (W = 1024 for ratio 4, 512 for ratio 128), or None
    ids       int32 [T, index_topk], the compressed rows that the indexer chose, -1 after the last, or None
    """

    q: Tensor
    kv: Tensor
    kv_score: Tensor | None = None
    ids: Tensor | None = None


def linear(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False, dtype=torch.bfloat16)
    nn.init.normal_(layer.weight, std=inputs**-0.5)
    return layer


class RMSNorm(nn.RMSNorm):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__(size, eps, dtype=torch.bfloat16)
        nn.init.normal_(self.weight, mean=1.0, std=0.1)


class Indexer(nn.Module):
    """Chooses up to `index_topk` of the closed groups for each row (ratio 4). Plain PyTorch, simplified: see the top."""

    def __init__(self, config: V4Config) -> None:
        super().__init__()
        self.topk, self.heads = config.index_topk, config.index_heads
        self.query = linear(config.q_lora_rank, config.index_heads * config.index_dim)
        self.key = linear(config.hidden_size, config.index_dim)
        self.head_weight = linear(config.hidden_size, config.index_heads)

    def forward(self, hidden: Tensor, q_latent: Tensor, batch: Batch, cache: LayerCache) -> Tensor:
        groups, step, keys = batch.compressed[4], batch.step, cache.index_keys
        closing = groups.slots >= 0
        keys[groups.slots[closing]] = self.key(hidden[closing])
        queries = self.query(q_latent).unflatten(-1, (self.heads, -1))
        weights = self.head_weight(hidden).float()
        ids = torch.full((len(hidden), self.topk), -1, dtype=torch.int32, device=hidden.device)
        for request, (_, rows) in enumerate(batch.rows()):
            visible = (step.positions[rows] + 1) // 4  # closed groups, per row
            count = int(visible.max())
            if count == 0:
                continue
            group = torch.arange(count, device=hidden.device)
            slots = groups.block_table[request, group // 64].long() * 64 + group % 64
            affinity = torch.einsum("thd,nd->thn", queries[rows], keys[slots])
            score = torch.einsum("thn,th->tn", F.relu(affinity).float(), weights[rows])
            best = score.masked_fill(group >= visible[:, None], -math.inf).topk(min(self.topk, count))
            ids[rows, : best.indices.shape[1]] = best.indices.int().masked_fill(best.values == -math.inf, -1)
        return ids


class DeepseekV4Attention(nn.Module):
    """One attention layer: ratio 1 (window only), 4 (window and the indexer's choice) or 128 (window and every group)."""

    def __init__(
        self, config: V4Config, ratio: int, target: Target, *, max_positions: int, q_scale: float = 1.0, kv_scale: float = 1.0
    ) -> None:
        super().__init__()
        self.config, self.ratio, self.target = config, ratio, target
        self.q_scale, self.kv_scale = q_scale, kv_scale
        width = {1: 0, 4: 1024, 128: 512}[ratio]
        self.q_down = linear(config.hidden_size, config.q_lora_rank)
        self.q_norm = RMSNorm(config.q_lora_rank, config.eps)
        self.q_up = linear(config.q_lora_rank, config.num_heads * HEAD_DIM)
        self.kv_down = linear(config.hidden_size, HEAD_DIM)
        self.kv_norm = RMSNorm(HEAD_DIM, config.eps)
        # A sink is a logit that only enlarges the denominator: here it takes a noticeable share of it.
        self.sinks = nn.Parameter(torch.empty(config.num_heads).uniform_(4.0, 7.0))
        if ratio != 1:
            self.compressor = linear(config.hidden_size, 2 * width)
            self.ape = nn.Parameter(torch.randn(ratio, width) * 0.5)
            self.compressor_norm = RMSNorm(HEAD_DIM, config.eps)
        self.indexer = Indexer(config) if ratio == 4 else None
        group_inputs = config.num_heads // config.o_groups * HEAD_DIM
        self.o_down = nn.ModuleList(linear(group_inputs, config.o_lora_rank) for _ in range(config.o_groups))
        self.o_up = linear(config.o_groups * config.o_lora_rank, config.hidden_size)
        self.register_buffer("cos_sin", cos_sin_table(max_positions, ratio=ratio))
        self.requires_grad_(False)

    def forward(self, hidden: Tensor, batch: Batch, cache: LayerCache) -> Tensor:
        """hidden bf16 [T, hidden_size] of the step's rows -> bf16 [T, hidden_size]."""
        projected = self.project(hidden, batch, cache)
        return self.output(self.attend(projected, batch, cache), batch)

    def project(self, hidden: Tensor, batch: Batch, cache: LayerCache) -> Projected:
        q_latent = self.q_norm(self.q_down(hidden))
        return Projected(
            q=self.q_up(q_latent).unflatten(-1, (-1, HEAD_DIM)),
            kv=self.kv_norm(self.kv_down(hidden)),
            # bf16 inputs, fp32 output: the compressor's softmax wants more than bf16's 8 bits.
            kv_score=F.linear(hidden.float(), self.compressor.weight.float()) if self.ratio != 1 else None,
            ids=self.indexer(hidden, q_latent, batch, cache) if self.indexer else None,
        )

    def attend(self, x: Projected, batch: Batch, cache: LayerCache) -> Tensor:
        """The library's part: queries ready, rows cached, windows compressed, indices built, attention. bf16 [T, heads, 512]."""
        step, form = batch.step, "combined" if self.target.family == "sm100" else "segments"
        fp8 = cache.window.dtype == torch.float8_e4m3fn
        q = reference.qkv_insert(
            x.q,
            x.kv,
            cache.window,
            batch.window.slots,
            step.positions,
            self.cos_sin,
            eps=self.config.eps,
            q_scale=self.q_scale if fp8 else None,
            kv_scale=self.kv_scale if fp8 else None,
            q_dtype=torch.float8_e4m3fn if fp8 else torch.bfloat16,
        )
        source = {1: IdSource.NONE, 4: IdSource.LOCAL, 128: IdSource.ALL_GROUPS}[self.ratio]
        compressed = None
        if self.ratio != 1:
            compressed, state = batch.compressed[self.ratio], batch.state[self.ratio]
            reference.compress_store(
                x.kv_score,
                self.ape,
                cache.state,
                state.block_table,
                step.positions,
                step.token_to_req,
                state.slots,
                compressed.slots,
                self.compressor_norm.weight,
                self.cos_sin,
                cache.compressed,
                ratio=self.ratio,
                eps=self.config.eps,
                kv_scale=self.kv_scale if fp8 else None,
                save=batch.save,
                seq_lens=step.seq_lens,
            )
        indices = reference.sparse_indices(
            step.positions,
            step.token_to_req,
            batch.window.block_table,
            x.ids,
            compressed.block_table if compressed else None,
            window=PoolGeometry.of(cache.window),
            compressed=PoolGeometry.of(cache.compressed) if compressed else None,
            source=source,
            ratio=self.ratio,
            slots=batch.window.slots,
            form=form,
            width=compressed.block_table.shape[1] * 2 if self.ratio == 128 else None,
        )
        return reference.decode(
            q,
            cache.window,
            cache.compressed,
            step,
            indices,
            num_heads=self.config.num_heads,
            sinks=self.sinks,
            q_scale=self.q_scale if fp8 else 1.0,
            kv_scale=self.kv_scale if fp8 else 1.0,
        )

    def output(self, attention: Tensor, batch: Batch) -> Tensor:
        """Undoes the rotation of the values' last 64 columns, then projects group by group, then back to the hidden size."""
        cos, sin = self.cos_sin[batch.step.positions][:, None].chunk(2, -1)
        a, b = attention[..., -ROPE_DIM:].float().unflatten(-1, (-1, 2)).unbind(-1)
        turned_back = torch.stack([a * cos + b * sin, b * cos - a * sin], -1).flatten(-2).to(attention.dtype)
        x = torch.cat([attention[..., :-ROPE_DIM], turned_back], -1).flatten(1)
        return self.o_up(torch.cat([down(part) for down, part in zip(self.o_down, x.chunk(len(self.o_down), -1), strict=True)], -1))
