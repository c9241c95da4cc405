"""The example layer: whole prompts, chunks, single tokens and speculative rows give the same attention; its own parts are right."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from cute_kernels import Target, demo
from cute_kernels import demo_judge as judge

example = demo.load_example()
SMALL = example.V4Config(
    hidden_size=256, num_heads=4, q_lora_rank=64, o_groups=2, index_topk=12, o_lora_rank=32, index_heads=4, index_dim=32
)
PROMPTS = (150, 9)  # tokens of requests 0 and 1
DRAFT = 3
FORMATS = {fmt.label.split()[0]: fmt for fmt in demo.formats()}


def whole() -> list[demo.Work]:
    return [demo.Work({0: PROMPTS[0], 1: PROMPTS[1]})]


def chunked() -> list[demo.Work]:
    """Chunks that start anywhere in a group; the second request joins in the middle."""
    chunks = random.Random(5)
    steps, done = [], [0, 0]
    while done != list(PROMPTS):
        counts = {r: min(chunks.choice((1, 2, 5, 6, 17, 40)), PROMPTS[r] - done[r]) for r in (0, 1) if len(steps) >= 3 * r}
        counts = {r: n for r, n in counts.items() if n}
        for r, n in counts.items():
            done[r] += n
        steps.append(demo.Work(counts))
    return steps


def one_by_one() -> list[demo.Work]:
    return [demo.Work({r: 1 for r in (0, 1) if i < PROMPTS[r]}) for i in range(max(PROMPTS))]


def speculative() -> list[demo.Work]:
    """A prompt of two tokens each, then verify steps of four rows of which none to three are rejected."""
    drafts = random.Random(6)
    steps, done = [demo.Work({0: 2, 1: 2})], [2, 2]
    while done != list(PROMPTS):
        counts = {r: min(1 + DRAFT, PROMPTS[r] - done[r]) for r in (0, 1) if PROMPTS[r] > done[r]}
        rejected = {r: drafts.randrange(n) for r, n in counts.items()}
        for r, n in counts.items():
            done[r] += n - rejected[r]
        steps.append(demo.Work(counts, rejected))
    return steps


SCHEDULES = (whole, chunked, one_by_one, speculative)


def rows_of(request: int, begin: int, count: int, accepted: int) -> torch.Tensor:
    """Hidden rows of a request's positions; those past the accepted ones belong to tokens that will be rejected."""
    generator = torch.Generator().manual_seed(100 + request)
    rows = torch.randn(max(PROMPTS) + 8, SMALL.hidden_size, generator=generator)[begin : begin + count].bfloat16()
    rows[accepted:] = -rows[accepted:] + 0.5
    return rows


def run(steps, ratio, fmt, through, config=SMALL):
    """What `through(layer, hidden, batch)` gives for each accepted position: one tensor per request."""
    torch.manual_seed(0)
    layer = example.DeepseekV4Attention(config, ratio, max_positions=192)
    engine = example.Engine(
        [ratio],
        fmt.target,
        max_requests=2,
        max_tokens=192,
        max_batch_tokens=192,
        draft_tokens=DRAFT,
        kv_cache_dtype=fmt.kv_cache_dtype,
        checkpoint=fmt.checkpoint(1),
    )
    engine.attach([layer])
    got = {0: [], 1: []}
    for work in steps:
        begins = dict(enumerate(engine.lengths))
        batch = engine.step(work.query_lens)
        kept = {r: n - work.rejected.get(r, 0) for r, n in work.query_lens.items()}
        hidden = torch.cat([rows_of(r, begins[r], work.query_lens[r], kept[r]) for r in batch.requests])
        result = through(layer, hidden, batch)
        for request, rows in batch.rows():
            got[request].append(result[rows][: kept[request]])
        for request, count in work.rejected.items():
            engine.reject(request, count)
    assert engine.lengths == list(PROMPTS)
    return {r: torch.cat(parts) for r, parts in got.items()}


@pytest.mark.parametrize(
    "ratio, fmt",
    [
        pytest.param(ratio, FORMATS[name], id=f"{ratio}-{name}")
        for ratio, name in ((1, "bf16"), (4, "bf16"), (4, "fp8"), (4, "packed"), (128, "packed"))
    ],
)
def test_every_way_through_a_prompt_gives_the_same_attention(ratio, fmt):
    def attend(layer, hidden, batch):
        # A matrix product's last bit depends on its number of rows: the projections are taken row by row.
        parts = [layer.project(hidden[i : i + 1], one_row(batch, i)) for i in range(len(hidden))]
        fields = [f.name for f in dataclasses.fields(parts[0])]
        joined = {f: None if getattr(parts[0], f) is None else torch.cat([getattr(p, f) for p in parts]) for f in fields}
        return layer.attend(example.Projected(**joined), batch)

    expected = run(SCHEDULES[0](), ratio, fmt, attend)
    assert all(expected[r].shape == (PROMPTS[r], SMALL.num_heads, 512) and expected[r].abs().max() > 0.1 for r in (0, 1))
    for schedule in SCHEDULES[1:]:
        got = run(schedule(), ratio, fmt, attend)
        for request in (0, 1):
            # One bf16 step: sums over keys may be taken in another order.
            torch.testing.assert_close(got[request], expected[request], rtol=2.0**-7, atol=2.0**-9, msg=f"{schedule.__name__}: {request}")


def one_row(batch, row):
    """The batch as the indexer sees row `row` alone."""
    index = int(batch.step.token_to_req[row])
    tables = {}
    for ratio, t in batch.tables.items():
        only = (
            {"compressed_block_table": t.compressed_block_table[index : index + 1], "kv_slots": t.kv_slots[row : row + 1]}
            if ratio == 4
            else {}
        )
        tables[ratio] = dataclasses.replace(t, **only)
    step = type("OneRow", (), {"positions": batch.step.positions[row : row + 1], "query_start_loc_cpu": torch.tensor([0, 1])})()
    return example.Batch([batch.requests[index]], step, tables)


def test_the_whole_layer_runs_chunked_as_in_one_go():
    config = dataclasses.replace(SMALL, index_topk=64)  # every group is chosen, so that no near tie can choose another one

    def forward(layer, hidden, batch):
        return layer(hidden, batch)

    expected, got = (run(schedule(), 4, FORMATS["bf16"], forward, config) for schedule in (whole, chunked))
    for request in (0, 1):
        assert expected[request].shape == (PROMPTS[request], SMALL.hidden_size)
        scale = float(expected[request].float().std())
        torch.testing.assert_close(got[request].float(), expected[request].float(), rtol=0.05, atol=0.05 * scale)


def test_the_indexer_chooses_the_best_closed_groups():
    torch.manual_seed(1)
    layer = example.DeepseekV4Attention(SMALL, 4, max_positions=192)
    engine = example.Engine([4], Target.named("sm100"), max_requests=2, max_tokens=192, max_batch_tokens=192)
    engine.attach([layer])
    hidden = torch.randn(100, SMALL.hidden_size).bfloat16()
    ids = layer.project(hidden, engine.step({0: 100})).ids
    indexer, latent = layer.indexer, layer.q_norm(layer.q_down(hidden))
    queries, weights = indexer.query(latent).view(100, 4, 32), indexer.head_weight(hidden).float()
    keys = indexer.key(hidden[3::4])
    for p in range(100):
        groups = (p + 1) // 4
        chosen = ids[p][ids[p] >= 0].tolist()
        assert len(chosen) == len(set(chosen)) == min(groups, SMALL.index_topk) and all(e < groups for e in chosen)
        assert (ids[p][len(chosen) :] == -1).all()
        if groups > SMALL.index_topk:
            score = (torch.relu((queries[p] @ keys[:groups].T).float()) * weights[p][:, None]).sum(0)
            rest = sorted(set(range(groups)) - set(chosen))
            assert score[chosen].min() >= score[rest].max() - 0.05 * score.abs().max()


@pytest.mark.parametrize("ratio", [1, 4])
def test_output_undoes_the_rotation_before_it_projects(ratio):
    torch.manual_seed(2)
    layer = example.DeepseekV4Attention(SMALL, ratio, max_positions=192)
    engine = example.Engine([ratio], Target.named("sm100"), max_requests=2, max_tokens=192, max_batch_tokens=192)
    batch = engine.step({0: 70, 1: 3})
    x = torch.randn(73, SMALL.num_heads, 512).double()
    layer.o_down, layer.o_up = torch.nn.ModuleList([torch.nn.Identity(), torch.nn.Identity()]), torch.nn.Identity()
    got = layer.output(judge.rotate(x, batch.step.positions, ratio).bfloat16(), batch).view_as(x)
    torch.testing.assert_close(got.double(), x, rtol=2.0**-7, atol=2.0**-6)
    unturned = layer.output(x.bfloat16(), batch).view_as(x)[1:70]
    assert (unturned[..., 448:].double() - x[1:70, :, 448:]).abs().max() > 0.5, "the rotation does something"


@pytest.mark.parametrize("config, hidden, q_lora, heads, groups", [("V4_FLASH", 4096, 1024, 64, 8), ("V4_PRO", 7168, 1536, 128, 16)])
def test_the_projections_have_the_models_sizes(config, hidden, q_lora, heads, groups):
    with torch.device("meta"):
        for ratio, width in ((1, None), (4, 1024), (128, 512)):
            layer = example.DeepseekV4Attention(getattr(example, config), ratio, max_positions=8)
            shapes = {name: tuple(p.shape) for name, p in layer.named_parameters()}
            assert shapes["q_down.weight"] == (q_lora, hidden) and shapes["q_up.weight"] == (heads * 512, q_lora)
            assert shapes["kv_down.weight"] == (512, hidden) and shapes["sinks"] == (heads,)
            assert [shapes[f"o_down.{i}.weight"] for i in range(groups)] == [(1024, 8 * 512)] * groups
            assert f"o_down.{groups}.weight" not in shapes and shapes["o_up.weight"] == (hidden, groups * 1024)
            if width:
                assert shapes["compressor.weight"] == (2 * width, hidden) and shapes["ape"] == (ratio, width)
            assert ("indexer.query.weight" in shapes) == (ratio == 4)


def small_engine(requests: int, max_tokens: int, max_batch_tokens: int = 400):
    return example.Engine(
        [1, 4, 128, 4], Target.named("sm120"), max_requests=requests, max_tokens=max_tokens, max_batch_tokens=max_batch_tokens
    )


def test_blocks_are_handed_out_in_random_order_and_come_back():
    torch.manual_seed(3)
    engine = small_engine(3, 1000)
    blocks, free = engine.tables["ratio_4"], engine.free
    assert sorted(free) == list(range(engine.pool.blocks)) and blocks.table.shape == (3, 4)
    blocks.reserve(0, 1)
    assert (blocks.table[0] >= 0).tolist() == [True, False, False, False]
    blocks.reserve(0, 257)
    blocks.reserve(2, 1000)
    owned = blocks.table[blocks.table >= 0].tolist()
    assert len(owned) == len(set(owned)) == 6 and sorted([*free, *owned]) == list(range(engine.pool.blocks))
    assert owned != sorted(owned)
    before = blocks.table[2].clone()
    blocks.reserve(2, 999)
    assert torch.equal(blocks.table[2], before)
    blocks.release(2)
    assert (blocks.table[2] == -1).all() and sorted([*free, *blocks.table[0][:2].tolist()]) == list(range(engine.pool.blocks))


def test_a_block_has_one_owner_and_may_change_its_group():
    torch.manual_seed(4)
    engine, seen = small_engine(2, 192), {}
    for _ in range(5):
        engine.step({0: 192, 1: 100})
        owners = [(b, name) for name, table in engine.tables.items() for b in table.table[table.table >= 0].tolist()]
        assert len(owners) == len({b for b, _ in owners})
        assert set(engine.tables) == {
            "window",
            "ratio_4",
            "ratio_128",
            "state_4",
            "state_128",
        }
        assert not {b for b, _ in owners} & set(engine.free)
        for block, name in owners:
            seen.setdefault(block, set()).add(name)
        engine.finish(0)
        engine.finish(1)
    assert any(len(names) > 1 for names in seen.values())
    assert engine.lengths == [0, 0] and sorted(engine.free) == list(range(engine.pool.blocks))


def test_all_requests_at_their_longest_fit():
    engine = small_engine(3, 192, 600)
    engine.step({0: 192, 1: 192, 2: 192})
    assert not engine.free
