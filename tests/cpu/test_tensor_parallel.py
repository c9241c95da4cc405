"""The layer with its heads split over ranks: rank by rank in one process for every split, and as processes under torchrun."""

from __future__ import annotations

import functools
import importlib.util
import re
import subprocess
import sys
from types import ModuleType

import pytest
import torch

from cute_kernels import InvalidArgument, Target, demo
from cute_kernels.compile.store import Store
from tests import processes

EXAMPLE = processes.ROOT / "examples" / "tensor_parallel.py"
SPLITS = (1, 2, 4, 8, 16, 32)
STEPS = ({0: 21, 1: 5}, {0: 1, 1: 1}, {0: 4, 1: 4})


def load() -> ModuleType:
    """examples/tensor_parallel.py, over the one copy of attention_layer.py that a process may have."""
    spec = importlib.util.spec_from_file_location("cute_kernels_example_tensor_parallel", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    sys.modules.setdefault("attention_layer", demo.load_example())
    spec.loader.exec_module(module)
    return module


tp = load()


def whole_layer(ratio: int) -> torch.nn.Module:
    torch.manual_seed(0)
    return tp.DeepseekV4Attention(tp.SMALL, ratio, max_positions=96)


def ranks_of(whole, ratio: int, ranks: int, target: Target, spoil=lambda rank, weights: weights):
    """All ranks' layers, each with caches of its own, and the engine they step with."""
    layers = []
    for rank in range(ranks):
        shard = tp.Shard(tp.SMALL, rank, ranks)
        layer = tp.TensorParallelAttention(shard, ratio, max_positions=96, reduce=lambda partial: partial)
        layer.load_state_dict(spoil(rank, shard.weights(whole.state_dict())))
        layers.append(layer)
    engine = tp.engine([ratio] * ranks, target, torch.device("cpu"), "auto")
    engine.attach(layers)
    return layers, engine


def rows(lens: dict[int, int], step: int) -> torch.Tensor:
    return torch.randn(sum(lens.values()), tp.SMALL.hidden_size, generator=torch.Generator().manual_seed(step)).bfloat16()


@functools.lru_cache(maxsize=4)
def expected(ratio: int, family: str):
    """Of each step on one rank: attention of all heads, output, the output in float64, and afterwards the engine."""
    whole = whole_layer(ratio)
    engine = tp.engine([ratio], Target.named(family), torch.device("cpu"), "auto")
    engine.attach([whole])
    results = []
    for step, lens in enumerate(STEPS):
        batch = engine.step(lens)
        attention = whole.attend(whole.project(rows(lens, step), batch), batch)
        results.append((attention, whole.output(attention, batch), tp.exact_output(whole, attention, batch)))
    return whole, results, engine


def owned(engine, layer: int) -> dict[str, torch.Tensor]:
    """A layer's caches, by part: the pages that requests own."""
    parts = {page.part: page.group for page in engine.pool.plan.pages if page.layer == layer and page.group in engine.tables}
    blocks = {part: engine.tables[group].table.flatten() for part, group in parts.items()}
    return {part: getattr(engine.caches[layer], part)[b[b >= 0]] for part, b in blocks.items()}


def rms(x: torch.Tensor) -> float:
    return float(x.double().square().mean().sqrt())


def split_error(ratio: int, family: str, layers, engine, judge=lambda attention, want: None, steps: int = len(STEPS)) -> float:
    """Largest error of the sum over ranks against float64, in units of one rank's own error."""
    worst = 0.0
    for step, (lens, (attention, out, exact)) in enumerate(zip(STEPS[:steps], expected(ratio, family)[1], strict=False)):
        batch, hidden, total = engine.step(lens), rows(lens, step), 0.0
        for layer in layers:
            mine = layer.attend(layer.project(hidden, batch), batch)
            first = layer.shard.first_head
            judge(mine, attention[:, first : first + layer.shard.heads])
            total = total + layer.output(mine, batch).float()
        worst = max(worst, rms(total.bfloat16() - exact) / rms(out - exact))
    return worst


def heads_agree(mine: torch.Tensor, want: torch.Tensor) -> None:
    # A matrix product may take its sums in another order with other extents: q, and so the weights, may differ by a rounding.
    assert mine.shape == want.shape and rms(mine - want) <= 2.0**-8 * rms(want)
    torch.testing.assert_close(mine, want, rtol=2.0**-5, atol=2.0**-6)


@pytest.mark.parametrize("ranks", SPLITS)
@pytest.mark.parametrize("ratio, family", [(4, "sm100"), (128, "sm120")])
def test_ranks_together_are_the_whole_layer(ratio, family, ranks):
    whole, _, alone = expected(ratio, family)
    layers, engine = ranks_of(whole, ratio, ranks, Target.named(family))
    heads = 128 // ranks
    assert {(layer.mla.spec.num_heads, layer.mla.spec.padded_heads) for layer in layers} == {(heads, max(heads, 8))}
    assert split_error(ratio, family, layers, engine, heads_agree) <= 2
    want = owned(alone, 0)
    assert set(want) == {"window", "compressed", "state", *(["index_keys"] if ratio == 4 else [])}
    for rank in (0, ranks - 1):  # caches are replicated: the same bytes on the first and the last rank
        mine = owned(engine, rank)
        assert mine.keys() == want.keys()
        for part in want:
            assert torch.equal(mine[part], want[part]), part
        assert bool(mine["window"].any()) and bool(mine["state"].any())


FAULTS = {
    "sinks of rank 0": lambda whole, rank, w: {**w, "sinks": whole["sinks"][: len(w["sinks"])]},
    "first half of a group": lambda whole, rank, w: {**w, "o_down.0.weight": whole[f"o_down.{rank // 2}.weight"][:, : 4 * 512]},
    "latents of rank 0": lambda whole, rank, w: {**w, "o_up.weight": whole["o_up.weight"][:, : w["o_up.weight"].shape[1]]},
    "queries of rank 0": lambda whole, rank, w: {**w, "q_up.weight": whole["q_up.weight"][: len(w["q_up.weight"])]},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_offset_is_seen(fault):
    whole = expected(4, "sm100")[0]
    layers, engine = ranks_of(whole, 4, 32, Target.named("sm100"), lambda rank, w: FAULTS[fault](whole.state_dict(), rank, w))
    assert split_error(4, "sm100", layers, engine, steps=1) > 4


def test_the_ranks_parts_are_the_whole_once():
    state = whole_layer(4).state_dict()
    for ranks in SPLITS:
        shards = [tp.Shard(tp.SMALL, rank, ranks) for rank in range(ranks)]
        parts = [shard.weights(state) for shard in shards]
        assert torch.equal(torch.cat([p["sinks"] for p in parts]), state["sinks"])
        assert torch.equal(torch.cat([p["q_up.weight"] for p in parts]), state["q_up.weight"])
        downs = [p[f"o_down.{g}.weight"] for p, shard in zip(parts, shards, strict=True) for g in range(shard.config.o_groups)]
        assert torch.equal(torch.cat(downs, 1), torch.cat([state[f"o_down.{g}.weight"] for g in range(16)], 1))
        assert torch.equal(torch.cat([p["o_up.weight"] for p in parts[:: max(1, ranks // 16)]], 1), state["o_up.weight"])


@pytest.mark.parametrize("rank, ranks", [(0, 3), (2, 2), (-1, 2), (0, 256)])
def test_a_split_that_does_not_come_out_even_is_refused(rank, ranks):
    with pytest.raises(InvalidArgument, match=r"rank"):
        tp.Shard(tp.SMALL, rank, ranks)


def test_a_split_across_group_boundaries_is_refused():
    config = tp.V4Config(hidden_size=64, num_heads=24, q_lora_rank=32, o_groups=3, index_topk=8)
    with pytest.raises(InvalidArgument, match="whole groups of 8"):
        tp.Shard(config, 0, 2)  # 12 heads: a group and a half


def torchrun(ranks: int, *options: str, **variables: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), str(EXAMPLE), *options]
    done = subprocess.run(command, env=processes.environment(**variables), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_two_processes_share_one_cache(tmp_path):
    said = torchrun(2, "--ratios", "1", "--heads", "16", "--compile", "sm120:sm_90a", CUTE_KERNELS_CACHE_DIR=str(tmp_path / "cache"))
    assert "2 ranks of 8 heads on cpu" in said and said.endswith("tensor parallel: ok\n")
    found = re.search(r"ratio 1: (\d+) kernels for sm120:sm_90a, compiled (\d+) times by 2 ranks", said)
    assert found is not None and int(found[1]) == int(found[2]) == len(list(Store(tmp_path / "cache").objects.iterdir())) > 0


def test_four_processes():
    said = torchrun(4, "--ratios", "4", "--heads", "16")
    assert "4 ranks of 4 heads on cpu" in said and said.endswith("tensor parallel: ok\n")
