"""A whole model served from one pool: blocks wander between groups of layers, and every layer answers as with caches of its own."""

from __future__ import annotations

import pytest
import torch

from cute_kernels import KVPool, PoolPlan, Target, demo
from cute_kernels.kv_format import resolve_format
from cute_kernels.scales import from_state_dict

example = demo.load_example()
SMALL = example.V4Config(
    hidden_size=256, num_heads=4, q_lora_rank=64, o_groups=2, index_topk=12, o_lora_rank=32, index_heads=4, index_dim=32
)
RATIOS = [1, 4, 128, 4]
# Tokens that each request appends, or the request that ends.
STEPS = [{0: 150, 1: 9}, {0: 1, 1: 2}, {1: 1}, 0, {1: 130}, {0: 140, 1: 1}, {0: 2, 1: 1}, {0: 1, 1: 1}]


class PooledEngine(example.Engine):
    """The example's engine with every page, of every kind, from one pool and one list of free blocks; memory starts as NaN."""

    def __init__(self, *arguments, **options) -> None:
        super().__init__(*arguments, **options)
        self.plan = PoolPlan.of(RATIOS, resolve_format(self.kv_cache_dtype, self.target.family), index_keys=None)
        blocks = sum(pool.pages for pool in self._pools())
        self.pool = KVPool(self.plan, torch.full((blocks, self.plan.block_bytes), 0xFF, dtype=torch.uint8))
        free = torch.randperm(blocks, generator=torch.Generator().manual_seed(1)).tolist()
        for pool in self._pools():
            pool.free, pool.pages = free, blocks
        for number, (ratio, cache) in enumerate(zip(RATIOS, self.caches, strict=True)):
            views = self.pool.layer(number)
            cache.window, cache.compressed, cache.state = views.window, views.compressed, views.state
            if ratio == 4:
                cache.index_keys = torch.zeros(blocks * 64, SMALL.index_dim, dtype=torch.bfloat16)

    def owners(self) -> dict[int, str]:
        """The group that each block in use belongs to; no block has two."""
        found: dict[int, str] = {}
        for name, pool in zip(("window", "ratio_4", "ratio_128", "state_4", "state_128"), self._pools(), strict=True):
            for block in pool.table[pool.table >= 0].tolist():
                assert block not in found, f"block {block} belongs to {found[block]} and {name}"
                found[block] = name
        return found


def serve(engine, layers) -> tuple[list[torch.Tensor], list[dict[int, str]]]:
    engine.attach(layers)
    answers, owners = [], []
    hidden = torch.Generator().manual_seed(4)
    for step in STEPS:
        if isinstance(step, int):
            engine.finish(step)
            continue
        batch = engine.step(step)
        rows = torch.randn(batch.step.num_tokens, SMALL.hidden_size, generator=hidden).bfloat16()
        for layer in layers:
            rows = rows + layer(rows, batch)
        answers.append(rows)
        if isinstance(engine, PooledEngine):
            owners.append(engine.owners())
    return answers, owners


@pytest.mark.parametrize(("family", "dtype"), [("sm100", "bfloat16"), ("sm100", "fp8"), ("sm120", "fp8_ds_mla")])
def test_a_model_from_one_pool(family: str, dtype: str) -> None:
    checkpoint = {"model.layers.0.self_attn.attn.q_scale": 0.5, "model.layers.0.self_attn.attn.k_scale": 0.3} if dtype == "fp8" else {}
    scales = from_state_dict(checkpoint, 1, resolve_format(dtype, family))[0]
    options = {"max_requests": 2, "max_tokens": 192, "max_batch_tokens": 192, "kv_cache_dtype": dtype, **scales.arguments("decode")}
    torch.manual_seed(0)
    layers = [example.DeepseekV4Attention(SMALL, ratio, max_positions=192) for ratio in RATIOS]
    want, _ = serve(example.Engine(SMALL, RATIOS, Target.named(family), **options), layers)
    engine = PooledEngine(SMALL, RATIOS, Target.named(family), **options)
    got, owners = serve(engine, layers)
    for step, (one, other) in enumerate(zip(got, want, strict=True)):
        assert torch.equal(one, other) and one.isfinite().all(), step
    first, last = owners[0], owners[-1]
    assert set(last.values()) == {"window", "ratio_4", "ratio_128", "state_4", "state_128"}
    assert any(first[block] != last[block] for block in first.keys() & last.keys()), "some block changed its group"

    # Memory that no group owned in any step is untouched.
    used = set().union(*owners)
    idle = [b for b in range(engine.pool.blocks) if b not in used]
    assert idle and (engine.pool.storage[idle] == 0xFF).all()
