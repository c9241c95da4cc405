"""A whole model served from one pool: blocks wander between groups of layers, and every layer answers as with caches of its own."""

from __future__ import annotations

import pytest
import torch

from cute_kernels import Target, demo
from cute_kernels.kv_pool import LayerViews
from cute_kernels.save_policy import overlap

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


def let_go(engine, batch) -> set[str]:
    """Overwrites blocks that no row of this step or a later one reads with NaN, and their entries with -1; of which groups."""
    gone = set()
    for i, (request, rows) in enumerate(batch.rows()):
        begin = int(batch.step.positions[rows][0])
        for ratio, tables in batch.tables.items():
            groups = [("window", tables.window_block_table, max(begin - 127, 0))]
            if ratio > 1:
                low = ratio * (begin // ratio) - overlap(ratio)
                groups.append((f"state_{ratio}", tables.state_block_table, max(low, 0)))
            for name, table, first in groups:
                columns = first // engine.tables[name].group.tokens_per_block
                engine.pool.storage[engine.tables[name].table[request, :columns].long()] = 0xFF
                table[i, :columns] = -1
                gone |= {name} if columns else set()
    return gone


def serve(engine, layers, steps=STEPS) -> tuple[list[torch.Tensor], list[dict[int, str]]]:
    engine.attach(layers)
    answers, owners = [], []
    hidden = torch.Generator().manual_seed(4)
    for step in steps:
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


@pytest.mark.parametrize(("family", "dtype"), [("sm100", "bfloat16"), ("sm120", "fp8_ds_mla")])
def test_blocks_before_what_a_step_reads_can_be_let_go(family: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As docs/kv_layout.md has it: window rows from b - 127 on and state rows from lo(b) on are read, nothing before."""
    options = {"max_requests": 2, "max_tokens": 320, "max_batch_tokens": 320, "kv_cache_dtype": dtype}
    steps = [{0: 250, 1: 9}, {0: 1, 1: 2}, {0: 5, 1: 133}, {0: 1, 1: 1}, {0: 1, 1: 70}, {0: 1, 1: 1}]
    torch.manual_seed(0)
    layers = [example.DeepseekV4Attention(SMALL, ratio, max_positions=320) for ratio in RATIOS]
    want, _ = serve(example.Engine(RATIOS, Target.named(family), **options), layers, steps)
    engine = example.Engine(RATIOS, Target.named(family), **options)
    plain, gone = engine.step, set()

    def step(query_lens: dict[int, int]):
        batch = plain(query_lens)
        gone.update(let_go(engine, batch))
        return batch

    monkeypatch.setattr(engine, "step", step)
    got, _ = serve(engine, layers, steps)
    assert gone == {"window", "state_4", "state_128"}
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other) and one.isfinite().all()
