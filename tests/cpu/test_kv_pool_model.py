"""A whole model served from one pool: blocks wander between groups of layers, and every layer answers as with caches of its own."""

from __future__ import annotations

import pytest
import torch

from cute_kernels import Target, demo
from cute_kernels.kv_pool import LayerViews

example = demo.load_example()
SMALL = example.V4Config(
    hidden_size=256, num_heads=4, q_lora_rank=64, o_groups=2, index_topk=12, o_lora_rank=32, index_heads=4, index_dim=32
)
RATIOS = [1, 4, 128, 4]
# Tokens that each request appends, or the request that ends.
STEPS = [{0: 150, 1: 9}, {0: 1, 1: 2}, {1: 1}, 0, {1: 130}, {0: 140, 1: 1}, {0: 2, 1: 1}, {0: 1, 1: 1}]


def owners_of(engine) -> dict[int, str]:
    """The group that each block in use belongs to; no block has two."""
    found: dict[int, str] = {}
    for name, blocks in engine.tables.items():
        for block in blocks.table[blocks.table >= 0].tolist():
            assert block not in found, f"block {block} belongs to {found[block]} and {name}"
            found[block] = name
    return found


def apart(views: LayerViews) -> LayerViews:
    """Zeroed caches like these, each in memory of its own."""
    return LayerViews(**{part: torch.zeros(view.shape, dtype=view.dtype) for part, view in vars(views).items() if view is not None})


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
        owners.append(owners_of(engine))
    return answers, owners


@pytest.mark.parametrize(("family", "dtype"), [("sm100", "bfloat16"), ("sm100", "fp8"), ("sm120", "fp8_ds_mla")])
def test_a_model_from_one_pool(family: str, dtype: str) -> None:
    scales = {"q": 0.5, "k": 0.3} if dtype == "fp8" else {}
    checkpoint = {f"model.layers.{i}.self_attn.attn.{name}_scale": s * (1 + i / 7) for i in range(4) for name, s in scales.items()}
    options = {"max_requests": 2, "max_tokens": 192, "max_batch_tokens": 192, "kv_cache_dtype": dtype, "checkpoint": checkpoint}
    torch.manual_seed(0)
    layers = [example.DeepseekV4Attention(SMALL, ratio, max_positions=192) for ratio in RATIOS]
    alone, engine = (example.Engine(RATIOS, Target.named(family), **options) for _ in range(2))
    alone.caches = [apart(views) for views in alone.caches]
    engine.pool.storage.fill_(0xFF)
    want, _ = serve(alone, layers)
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
