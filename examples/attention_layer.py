"""One attention layer of DeepSeek-V4 as a model would write it on top of `cute_kernels`.

`DeepseekV4Attention` holds the layer's own projections (random weights, the sizes of V4-Flash and V4-Pro) and a `SparseMLA`,
which does what lies between them: norm and rotation of q, the caches, the compressor, the index tables, the attention.
`Engine` is the least an inference engine brings along: one pool of blocks for all layers, handed out in random order, block
tables, and the batch of a step, whose requests may prefill, prefill a chunk, decode, or verify speculative tokens.

    engine = Engine([1, 4, 128], Target.named("sm100"), max_requests=2, max_tokens=4096, max_batch_tokens=2048)
    layers = [DeepseekV4Attention(V4_FLASH, ratio, max_positions=4096) for ratio in (1, 4, 128)]
    engine.attach(layers)
    batch = engine.step({0: 1, 1: 512})  # request 0 appends one token, request 1 prefills 512
    for layer in layers:
        hidden = hidden + layer(hidden, batch)

The indexer is simplified, since it only supplies ids: the real one pools each group's tokens with a compressor of its own,
rotates and quantises; here the index key of a group is projected from the token that closes it, and kept as BF16.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cute_kernels import AttentionScales, LayerSpec, PoolPlan, SavePolicy, SparseMLA, StepMetadata, StepTables, Target
from cute_kernels.handles import Held, handle_of, held
from cute_kernels.kv_format import resolve_format
from cute_kernels.kv_pool import Group, LayerViews
from cute_kernels.reference import cos_sin_table
from cute_kernels.scales import from_state_dict

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


class BlockTable:
    """The blocks of one group of layers: a row per request, filled from the free list that all groups share."""

    def __init__(self, group: Group, requests: int, max_tokens: int, free: list[int]) -> None:
        self.group, self.free = group, free
        self.table = torch.full((requests, group.blocks(max_tokens)), -1, dtype=torch.int32)

    def reserve(self, request: int, tokens: int) -> None:
        """Gives `request` the blocks of its first `tokens` tokens."""
        row = self.table[request]
        for column in range(self.group.blocks(tokens)):
            if row[column] < 0:
                row[column] = self.free.pop()

    def release(self, request: int) -> None:
        """Takes back all blocks of `request`."""
        row = self.table[request]
        self.free += row[row >= 0].tolist()
        row.fill_(-1)


@dataclass
class Batch:
    """One step: its requests in row order, its rows, and by ratio what the layers' pools know of them."""

    requests: list[int]
    step: StepMetadata
    tables: dict[int, StepTables]

    def rows(self) -> Iterator[tuple[int, slice]]:
        """Each request with its rows."""
        bounds = self.step.query_start_loc_cpu.tolist()
        return zip(self.requests, map(slice, bounds[:-1], bounds[1:]), strict=True)


class Engine:
    """Requests with their blocks, and the steps they take together. All lengths are in tokens.

    All layers live in one pool. A block belongs to one group of layers at a time (window rows, compressed rows of one ratio with
    index keys, open windows of one ratio) and holds a page of each of them; it returns to the free list when its request ends. (Window
    and state blocks that no later step reads could return before: docs/kv_layout.md.)

    max_requests      requests at a time, numbered from 0
    max_tokens        longest request
    max_batch_tokens  most rows of a step
    draft_tokens      speculative tokens of a verify step; a request that appends up to 1 + draft_tokens tokens decodes
    kv_cache_dtype    as for `LayerSpec`; decode_backend as for `SparseMLA`
    checkpoint        state dict with the layers' FP8 scales (`from_state_dict`); without them they are 1.0
    """

    def __init__(
        self,
        ratios: Sequence[int],
        target: Target,
        *,
        max_requests: int,
        max_tokens: int,
        max_batch_tokens: int,
        draft_tokens: int = 0,
        kv_cache_dtype: str = "auto",
        checkpoint: Mapping[str, Tensor] | None = None,
        decode_backend: str = "auto",
        device: torch.device | str = "cpu",
    ) -> None:
        self.target, self.device, self.draft_tokens = target, device, draft_tokens
        self.kv_cache_dtype, self.decode_backend = kv_cache_dtype, decode_backend
        self.lengths = [0] * max_requests
        self.metadata = StepMetadata(max_requests, max_batch_tokens, device, decode_query_len=1 + draft_tokens)
        self.ratios = sorted(set(ratios))
        kv_format = resolve_format(kv_cache_dtype, target.family)
        self.scales = from_state_dict(checkpoint or {}, len(ratios), kv_format)
        plan = PoolPlan.of(ratios, kv_format, index_keys="bf16")
        # The simplified indexer keeps no open windows of its own, so nobody asks for blocks of that group.
        groups = [group for name, group in plan.groups.items() if name != "index_state"]
        self.pool = plan.allocate(max_requests * sum(group.blocks(max_tokens) for group in groups), device)
        self.free = torch.randperm(self.pool.blocks).tolist()
        self.tables = {group.name: BlockTable(group, max_requests, max_tokens, self.free) for group in groups}
        self.caches = [self.pool.layer(number) for number in range(len(ratios))]

    def attach(self, layers: Sequence[DeepseekV4Attention]) -> None:
        """Gives each layer its caches and scales, and loads or compiles the kernels it can need."""
        for layer, cache, scales in zip(layers, self.caches, self.scales, strict=True):
            layer.attach(cache, scales, self)

    def step(self, query_lens: dict[int, int]) -> Batch:
        """The batch in which each request r appends `query_lens[r]` tokens. Those that decode go first."""
        requests = sorted(query_lens, key=lambda r: query_lens[r] > 1 + self.draft_tokens)
        for request in requests:
            self.lengths[request] += query_lens[request]
            for table in self.tables.values():
                table.reserve(request, self.lengths[request])
        step = self.metadata.update([query_lens[r] for r in requests], [self.lengths[r] for r in requests])

        blocks = {name: table.table[requests].to(self.device) for name, table in self.tables.items()}
        tokens = {name: table.group.tokens_per_block for name, table in self.tables.items()}
        tables = {
            ratio: StepTables.of(
                step,
                blocks["window"],
                tokens["window"],
                ratio=ratio,
                compressed_block_table=blocks.get(f"ratio_{ratio}"),
                compressed_page_rows=tokens.get(f"ratio_{ratio}", 0) // ratio,
                state_block_table=blocks.get(f"state_{ratio}"),
                state_block_rows=tokens.get(f"state_{ratio}", 0),
            )
            for ratio in self.ratios
        }
        return Batch(requests, step, tables)

    def reject(self, request: int, tokens: int) -> None:
        """Forgets the last `tokens` (speculative) tokens of `request`; later steps overwrite what they stored."""
        self.lengths[request] -= tokens

    def finish(self, request: int) -> None:
        """Ends `request` and takes back its blocks."""
        self.lengths[request] = 0
        for table in self.tables.values():
            table.release(request)


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


def state_width(ratio: int) -> int:
    """W: columns of the compressor's values, and of its scores."""
    return {1: 0, 4: 1024, 128: 512}[ratio]


@dataclass
class IndexKeys(Held):
    """The index keys of one layer: rows bf16 [blocks, rows, index dim], the cache."""

    rows: Tensor


def choose_groups(
    queries: Tensor,
    weights: Tensor,
    new_keys: Tensor,
    keys: Tensor,
    kv_slots: Tensor,
    compressed_block_table: Tensor,
    positions: Tensor,
    query_start_loc_cpu: Tensor,
    ids: Tensor,
) -> None:
    """Stores the index keys of the groups that this step closes, and chooses groups for each row. T rows, R requests.

    queries bf16 [T, index heads, index dim]; weights fp32 [T, index heads]; new_keys bf16 [T, index dim];
    keys, the handle of `IndexKeys`;
    kv_slots int64 [T], negative where a row closes no group; compressed_block_table int32 [R, columns]; positions int64 [T]

    Writes ids int32 [T, topk]: numbers of compressed rows within the request, best first, then -1.
    """
    cache = held("keys", keys, IndexKeys).rows
    page_rows, topk = cache.shape[1], ids.shape[1]
    closing = kv_slots >= 0
    slots = kv_slots[closing]
    cache[slots // page_rows, slots % page_rows] = new_keys[closing]
    ids.fill_(-1)
    bounds = query_start_loc_cpu.tolist()
    for request, rows in enumerate(map(slice, bounds[:-1], bounds[1:])):
        visible = (positions[rows] + 1) // 4  # closed groups, per row
        count = int(visible.max()) if len(visible) else 0
        if count == 0:
            continue
        group = torch.arange(count, device=queries.device)
        blocks = compressed_block_table[request, group // page_rows]
        affinity = torch.einsum("thd,nd->thn", queries[rows], cache[blocks, group % page_rows])
        score = torch.einsum("thn,th->tn", F.relu(affinity).float(), weights[rows])
        best = score.masked_fill(group >= visible[:, None], -math.inf).topk(min(topk, count))
        ids[rows, : best.indices.shape[1]] = best.indices.int().masked_fill(best.values == -math.inf, -1)


# An operator of its own, as an engine's indexer is: torch.compile sees one call, though what is chosen depends on data. Like the
# library's own it finds its cache by handle: AOTAutograd refuses graph inputs that are written to and lie in one pool.
OPERATORS = torch.library.Library("cute_kernels_example", "DEF")
OPERATORS.define(
    "choose_groups(Tensor queries, Tensor weights, Tensor new_keys, Tensor keys, Tensor kv_slots, Tensor compressed_block_table, "
    "Tensor positions, Tensor query_start_loc_cpu, Tensor(a!) ids) -> ()"
)
for _key in ("CPU", "CUDA"):
    OPERATORS.impl("choose_groups", choose_groups, _key)


@torch.library.register_fake("cute_kernels_example::choose_groups", lib=OPERATORS)
def _(*arguments: Tensor) -> None:
    """Nothing is made: the operator writes into `ids`."""


class Indexer(nn.Module):
    """Chooses up to `index_topk` of the closed groups for each row (ratio 4). Plain PyTorch, simplified: see the top."""

    def __init__(self, config: V4Config) -> None:
        super().__init__()
        self.topk, self.heads = config.index_topk, config.index_heads
        self.query = linear(config.q_lora_rank, config.index_heads * config.index_dim)
        self.key = linear(config.hidden_size, config.index_dim)
        self.head_weight = linear(config.hidden_size, config.index_heads)

    def forward(self, hidden: Tensor, q_latent: Tensor, batch: Batch, keys: IndexKeys) -> Tensor:
        """ids int32 [T, topk]: see `choose_groups`."""
        step, tables = batch.step, batch.tables[4]
        queries = self.query(q_latent).unflatten(-1, (self.heads, -1))
        where = (tables.kv_slots, tables.compressed_block_table, step.positions, step.query_start_loc_cpu)
        ids = torch.empty(len(hidden), self.topk, dtype=torch.int32, device=hidden.device)
        choose = torch.ops.cute_kernels_example.choose_groups
        choose(queries, self.head_weight(hidden).float(), self.key(hidden), handle_of("keys", keys), *where, ids)
        return ids


class DeepseekV4Attention(nn.Module):
    """One attention layer: ratio 1 (window only), 4 (window and the indexer's choice) or 128 (window and every group)."""

    cos_sin: Tensor

    def __init__(self, config: V4Config, ratio: int, *, max_positions: int) -> None:
        super().__init__()
        self.config, self.ratio, self.max_positions = config, ratio, max_positions
        self.q_down = linear(config.hidden_size, config.q_lora_rank)
        self.q_norm = RMSNorm(config.q_lora_rank, config.eps)
        self.q_up = linear(config.q_lora_rank, config.num_heads * HEAD_DIM)
        self.kv_down = linear(config.hidden_size, HEAD_DIM)
        self.kv_norm = RMSNorm(HEAD_DIM, config.eps)
        # A sink is a logit that only enlarges the denominator; these take a noticeable share of it.
        self.sinks = nn.Parameter(torch.empty(config.num_heads).uniform_(4.0, 7.0))
        if ratio != 1:
            self.compressor = linear(config.hidden_size, 2 * state_width(ratio))
            self.ape = nn.Parameter(torch.randn(ratio, state_width(ratio)) * 0.5)
            self.compressor_norm = RMSNorm(HEAD_DIM, config.eps)
        self.indexer = Indexer(config) if ratio == 4 else None
        group_inputs = config.num_heads // config.o_groups * HEAD_DIM
        self.o_down = nn.ModuleList(linear(group_inputs, config.o_lora_rank) for _ in range(config.o_groups))
        self.o_up = linear(config.o_groups * config.o_lora_rank, config.hidden_size)
        self.register_buffer("cos_sin", cos_sin_table(max_positions, ratio=ratio))
        self.requires_grad_(False)

    def attach(self, cache: LayerViews, scales: AttentionScales, engine: Engine) -> None:
        """Binds the layer's caches and weights; from here on its tensors stay where they are."""
        self.index_keys = None if cache.index_keys is None else IndexKeys(cache.index_keys[..., : self.config.index_dim])
        spec = LayerSpec(
            ratio=self.ratio,
            num_heads=self.config.num_heads,
            kv_cache_dtype=engine.kv_cache_dtype,
            eps=self.config.eps,
            max_seq_len=self.max_positions,
            index_topk=self.config.index_topk,
            save=SavePolicy(rollback=engine.draft_tokens),
            q_scale=scales.q_scale,
            kv_scale=scales.kv_scale,
        )
        compressor: dict[str, Any] = {} if self.ratio == 1 else {"ape": self.ape, "norm_weight": self.compressor_norm.weight}
        self.mla = SparseMLA(
            spec,
            swa_cache=cache.window,
            kv_cache=cache.compressed,
            state=cache.state,
            cos_sin=self.cos_sin,
            sinks=self.sinks,
            target=engine.target,
            decode_backend=engine.decode_backend,
            **compressor,
        )
        if cache.window.is_cuda:
            self.mla.warm_up()

    def forward(self, hidden: Tensor, batch: Batch) -> Tensor:
        """hidden bf16 [T, hidden_size] of the step's rows -> bf16 [T, hidden_size]."""
        return self.output(self.attend(self.project(hidden, batch), batch), batch)

    def project(self, hidden: Tensor, batch: Batch) -> Projected:
        q_latent = self.q_norm(self.q_down(hidden))
        return Projected(
            q=self.q_up(q_latent).unflatten(-1, (-1, HEAD_DIM)),
            kv=self.kv_norm(self.kv_down(hidden)),
            # BF16 inputs, FP32 output: the compressor's softmax wants more than BF16's 8 bits.
            kv_score=F.linear(hidden.float(), self.compressor.weight.float()) if self.ratio != 1 else None,
            ids=self.indexer(hidden, q_latent, batch, self.index_keys) if self.indexer else None,
        )

    def attend(self, x: Projected, batch: Batch) -> Tensor:
        """The library's part: bf16 [T, heads, 512]."""
        return self.mla(batch.step, batch.tables[self.ratio], x.q, x.kv, x.kv_score, x.ids)

    def output(self, attention: Tensor, batch: Batch) -> Tensor:
        """Undoes the rotation of the values' last 64 columns, projects group by group, then back to the hidden size."""
        cos, sin = self.cos_sin[batch.step.positions][:, None].chunk(2, -1)
        a, b = attention[..., -ROPE_DIM:].float().unflatten(-1, (-1, 2)).unbind(-1)
        turned_back = torch.stack([a * cos + b * sin, b * cos - a * sin], -1).flatten(-2).to(attention.dtype)
        x = torch.cat([attention[..., :-ROPE_DIM], turned_back], -1).flatten(1)
        return self.o_up(torch.cat([down(part) for down, part in zip(self.o_down, x.chunk(len(self.o_down), -1), strict=True)], -1))
