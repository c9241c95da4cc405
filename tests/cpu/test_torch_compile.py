"""`torch.compile(fullgraph=True)` over the example layer: traced whole, the results those of eager, few graphs for many steps."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch._dynamo.utils import counters

from cute_kernels import Target, demo

example = demo.load_example()
SMALL = example.V4Config(
    hidden_size=128, num_heads=4, q_lora_rank=64, o_groups=2, index_topk=12, o_lora_rank=32, index_heads=4, index_dim=32
)
PROMPTS, VERIFY, MIXED, DECODE = {0: 130, 1: 9}, {0: 4, 1: 4}, {0: 1, 1: 3}, {0: 1, 1: 1}


class Model(torch.nn.Module):
    """Layers with their residual stream."""

    def __init__(self, ratios: list[int]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(example.DeepseekV4Attention(SMALL, ratio, max_positions=192) for ratio in ratios)

    def forward(self, hidden, batch):
        for layer in self.layers:
            hidden = hidden + layer(hidden, batch)
        return hidden


def run(ratios, target, kv_cache_dtype, steps, compiled, device="cpu"):
    """The outputs of each step, and the bytes of the pool after the last."""
    torch.manual_seed(0)
    model = Model(ratios).to(device)
    scales = {"layers.0.attn.q_scale": 0.05, "layers.0.attn.kv_scale": 0.037} if kv_cache_dtype == "fp8" else {}
    sizes = {"max_requests": 2, "max_tokens": 192, "max_batch_tokens": 192, "draft_tokens": 3}
    more = {"kv_cache_dtype": kv_cache_dtype, "checkpoint": scales, "decode_backend": "reference", "device": device}
    engine = example.Engine(ratios, Target.named(target), **sizes, **more)
    engine.attach(model.layers)
    forward = compiled(model) if compiled else model
    outputs = []
    for seed, lens in enumerate(steps):
        rows = torch.randn(sum(lens.values()), SMALL.hidden_size, generator=torch.Generator().manual_seed(seed)).bfloat16()
        outputs.append(forward(rows.to(device), engine.step(lens)))
    return outputs, engine.pool.storage


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def whole(backend):
    return lambda model: torch.compile(model, fullgraph=True, backend=backend)


@pytest.mark.parametrize("ratio, family, kv_cache_dtype", [(1, "sm100", "fp8"), (4, "sm100", "bfloat16"), (128, "sm120", "auto")])
def test_a_layer_is_traced_whole_and_gives_what_eager_gives(ratio, family, kv_cache_dtype):
    steps = (PROMPTS,)
    (eager, before), (traced, after) = (run([ratio], family, kv_cache_dtype, steps, c) for c in (None, whole("aot_eager")))
    assert eager[0].isfinite().all() and torch.equal(traced[0], eager[0])
    assert torch.equal(after, before) and bool(after.any())
    assert not counters["graph_break"] and counters["stats"]["unique_graphs"] == 1


def test_steps_of_any_size_share_a_graph():
    """Prompts make one graph, then one more serves every later size; block tables and slots are new tensors in each step."""
    ratios, steps = [1, 4, 128, 4], (PROMPTS, VERIFY, MIXED, DECODE, DECODE, MIXED)
    (eager, before), (traced, after) = (run(ratios, "sm100", "fp8", steps, c) for c in (None, whole("aot_eager")))
    for want, got in zip([*eager, before], [*traced, after], strict=True):
        assert torch.equal(got, want)
    assert not counters["graph_break"] and counters["stats"]["unique_graphs"] == 2


def layer_by_layer(model):
    for layer in model.layers:
        layer.compile(fullgraph=True, backend="aot_eager")
    return model


def test_layers_compiled_one_by_one_share_a_graph():
    ratios, steps = [128] * 10, (VERIFY, MIXED, DECODE)
    (eager, before), (traced, after) = (run(ratios, "sm100", "bfloat16", steps, c) for c in (None, layer_by_layer))
    for want, got in zip([*eager, before], [*traced, after], strict=True):
        assert torch.equal(got, want)
    assert not counters["graph_break"] and counters["stats"]["unique_graphs"] == 2


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles C++ for CPUs, and there is no g++ on this machine")
def test_inductor_compiles_the_layer(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    steps = ({0: 21, 1: 5},) * 2
    (eager, before), (traced, after) = (run([4], "sm120", "auto", steps, c) for c in (None, whole("inductor")))
    assert not counters["graph_break"] and counters["inductor"]
    # Fused operations keep fp32 where eager rounds to BF16 in between; the indexer's choice stays, as every group is chosen.
    for want, got in zip(eager, traced, strict=True):
        scale = float(want.float().square().mean().sqrt())
        torch.testing.assert_close(got.float(), want.float(), rtol=0.02, atol=0.05 * scale)
    assert torch.equal(after.any(1), before.any(1)) and bool(after.any())


def test_the_indexers_operator_is_registered_right():
    torch.manual_seed(1)
    keys = example.IndexKeys(torch.zeros(2, 80, 32, dtype=torch.bfloat16)[:, :64])
    given = {
        "queries": torch.randn(7, 4, 32).bfloat16(),
        "weights": torch.randn(7, 4),
        "new_keys": torch.randn(7, 32).bfloat16(),
        "keys": keys.handle,
        "kv_slots": torch.tensor([-1, 64, -1, -1, -1, 65, 3]),
        "compressed_block_table": torch.tensor([[1], [0]], dtype=torch.int32),
        "positions": torch.tensor([2, 3, 4, 5, 6, 7, 15]),
        "query_start_loc_cpu": torch.tensor([0, 6, 7], dtype=torch.int32),
        "ids": torch.zeros(7, 3, dtype=torch.int32),
    }
    operator = torch.ops.cute_kernels_example.choose_groups.default
    torch.library.opcheck(operator, (), given, test_utils=("test_schema", "test_autograd_registration", "test_faketensor"))
    operator(**given)
    assert (given["ids"] >= 0).sum(1).tolist() == [0, 1, 1, 1, 1, 2, 3]
    assert torch.equal(keys.rows[[1, 1, 0], [0, 1, 3]], given["new_keys"][[1, 5, 6]])
