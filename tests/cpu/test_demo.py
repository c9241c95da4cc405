"""The demo passes, its judge is independent and right, and every planted fault makes it fail."""

from __future__ import annotations

import ast
import math
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from cute_kernels import demo
from cute_kernels import demo_judge as judge

SMALL = {"tokens": 72, "heads": 2, "layers": 3}


# ---------------------------------------------------------------- the demo


def test_every_row_of_every_layer_and_format_is_judged_and_passes():
    lines = demo.run(**SMALL)
    rows = sum(sum(work.query_lens.values()) for work in demo.schedule(SMALL["tokens"]))
    assert [(line.ratio, line.format.label) for line in lines] == [
        (ratio, label) for ratio in (1, 4, 128) for label in ("bf16 (SM100)", "fp8 (SM100)", "packed (SM120)")
    ]
    for line in lines:
        assert line.verdict.passed, line
        assert line.verdict.rows == rows
        assert line.format.path == "reference (CPU)"
        # The library rounds where the definition does, so its error is about half of the bound: the bound is not slack.
        assert line.verdict.worst > 0.4 and 0.4 < line.verdict.mean_error / line.verdict.mean_bound < 0.6
        assert line.seconds > 0


# Where a fault changes anything: only these layers have compressed rows and a compressor, only these rows have a scale.
TOUCHED = {
    "wrong-compressed-page": lambda line: line.ratio > 1,
    "wrong-state-block": lambda line: line.ratio > 1,
    "wrong-scale": lambda line: line.format.label == "fp8 (SM100)",
}


@pytest.mark.parametrize("fault", demo.FAULTS)
def test_a_planted_fault_is_found_in_every_layer_and_format_that_it_touches(fault):
    lines = demo.run(**SMALL, plant=fault)
    assert len(lines) == 9
    for line in lines:
        if TOUCHED.get(fault, lambda line: True)(line):
            assert not line.verdict.passed, line
            assert line.verdict.worst > 2, "found, but barely"
        else:
            assert line.verdict.passed, line


def test_the_pool_starts_as_nan_and_every_layer_has_scales_of_its_own():
    fmt = demo.formats()[1]
    assert fmt.scales(3) == list(demo.SCALES) and len({*demo.SCALES}) == 3 and fmt.scales(4)[3] == demo.SCALES[0]
    example = demo.load_example()
    config = example.V4Config(hidden_size=64, num_heads=2, q_lora_rank=32, o_groups=1, index_topk=4, o_lora_rank=32)
    layers = [example.DeepseekV4Attention(config, ratio, max_positions=200) for ratio in demo.RATIOS]
    run = demo.Run(fmt, layers, [judge.Weights.of(layer) for layer in layers], 32)
    for layer, (q_scale, kv_scale) in zip(layers, demo.SCALES, strict=True):
        assert (layer.mla.spec.q_scale, layer.mla.spec.kv_scale) == pytest.approx((q_scale, kv_scale), rel=1e-7)
    storage = run.engine.pool.storage
    for views in run.engine.caches:
        for view in vars(views).values():
            if view is not None:
                assert view.untyped_storage().data_ptr() == storage.data_ptr() and bool(view.float().isnan().all())


def test_the_command_fails_where_some_lines_do():
    result = CliRunner().invoke(demo.main, ["--tokens", "72", "--heads", "1", "--plant", "wrong-scale"])
    assert result.exit_code == 1, result.output
    assert result.output.rstrip().endswith("demo: FAILED, 3 of 9 lines exceed their bound")


@pytest.mark.parametrize("fault", [None, "wrong-page"])
def test_the_command_prints_one_table_and_ends_with_its_verdict(fault):
    options = ["--tokens", "72", "--heads", "1", "--layers", "1", *(["--plant", fault] if fault else [])]
    result = CliRunner().invoke(demo.main, options)
    assert result.exit_code == (1 if fault else 0), result.output
    last = result.output.rstrip().splitlines()[-1]
    assert last == ("demo: FAILED, 3 of 3 lines exceed their bound" if fault else "demo: ok")
    assert len([line for line in result.output.splitlines() if "window only" in line and "reference (CPU)" in line]) == 3


def test_the_fault_flag_is_hidden_and_options_are_checked():
    assert "--plant" not in CliRunner().invoke(demo.main, ["--help"]).output
    for options in (["--plant", "nothing"], ["--heads", "129"], ["--tokens", "1"], ["--layers", "0"], ["--heads", "17"], ["--sm90"]):
        assert CliRunner().invoke(demo.main, options).exit_code == 2, options


@pytest.mark.parametrize("tokens", [32, 72, 300, 1100, 2600])
def test_the_schedule_holds_chunks_decode_steps_and_a_speculative_step(tokens):
    steps = demo.schedule(tokens)
    lengths, closed_by_draft = {0: 0, 1: 0}, False
    for work in steps:
        for request, count in work.query_lens.items():
            drafts = range(lengths[request] + 1, lengths[request] + count)
            closed_by_draft |= count == 1 + demo.DRAFT_TOKENS and any((p + 1) % 128 == 0 for p in drafts)
            lengths[request] += count - work.rejected.get(request, 0)
    chunks = [work.query_lens[0] for work in steps if work.query_lens[0] > 1 + demo.DRAFT_TOKENS]
    assert sum(chunks) == tokens and len(chunks) == 3
    assert sum(1 for work in steps if work.query_lens == {0: 1, 1: 1}) == 2 * demo.DECODE_STEPS
    assert [work for work in steps if work.rejected] and closed_by_draft
    assert min(work.query_lens[1] for work in steps) == 1


def test_at_full_size_the_indexer_has_a_choice():
    assert demo.FULL_TOPK < demo.FULL_TOKENS // 4
    assert demo.load_example().V4_FLASH.index_topk == demo.FULL_TOPK


# ---------------------------------------------------------------- the judge


def test_the_judge_uses_torch_and_the_standard_library_alone():
    imported = set()
    for node in ast.walk(ast.parse(Path(judge.__file__).read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add(str(node.module).split(".")[0])
    assert imported - set(sys.stdlib_module_names) == {"torch"}


def brute_force(q, window, compressed, sinks):
    """One row, one head, one key at a time."""
    out = torch.zeros_like(q)
    rows = [*window, *compressed]
    for head in range(len(q)):
        weights = [math.exp(float(q[head] @ row) / math.sqrt(512)) for row in rows]
        total = sum(weights) + math.exp(float(sinks[head]))
        for weight, row in zip(weights, rows, strict=True):
            out[head] += weight / total * row
    return out


def test_attend_is_the_sum_over_visible_keys_with_a_sink_in_the_denominator():
    torch.manual_seed(1)
    q, rows, sinks = (torch.randn(*shape, dtype=torch.float64) for shape in ((3, 2, 512), (7, 512), (2,)))
    visible = torch.tensor([[1, 1, 0, 0, 0, 0, 1], [0, 0, 0, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1]], dtype=torch.bool)
    got = judge.attend(q, rows, visible, sinks)
    for i in range(3):
        torch.testing.assert_close(got[i], brute_force(q[i], rows[visible[i]], [], sinks), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("ratio", [4, 128])
def test_pool_is_a_softmax_per_column_over_the_window(ratio):
    torch.manual_seed(2)
    n, width = ratio * 3 + 2, 1024 if ratio == 4 else 512
    kv_score, ape, weight = (torch.randn(*shape, dtype=torch.float64) for shape in ((n, 2 * width), (ratio, width), (512,)))
    got = judge.pool(kv_score, ape, weight, ratio)
    assert got.shape == (3, 512)
    for group in range(3):
        terms = []  # (values, scores) of each row of the window
        for p in range(max(0, ratio * group - (4 if ratio == 4 else 0)), ratio * (group + 1)):
            columns = slice(512, 1024) if ratio == 4 and p >= ratio * group else slice(0, 512)
            terms.append((kv_score[p, :width][columns], (kv_score[p, width:] + ape[p % ratio])[columns]))
        total = sum(score.exp() for _, score in terms)
        pooled = sum(value * score.exp() / total for value, score in terms)
        row = pooled / (pooled.square().mean() + 1e-6).sqrt() * weight
        torch.testing.assert_close(got[group, :448], row[:448], rtol=1e-10, atol=1e-12)
        pairs = torch.view_as_complex(row[448:].view(-1, 2).contiguous()) * torch.exp(1j * (ratio * group) * judge.frequencies(ratio))
        torch.testing.assert_close(got[group, 448:], torch.view_as_real(pairs).flatten(), rtol=1e-10, atol=1e-12)


def test_rotation_frequencies_at_both_ends():
    plain, stretched = judge.frequencies(1), judge.frequencies(4)
    assert plain[0] == 1 and plain[31] == pytest.approx(10_000 ** (-31 / 32))
    # The fastest pairs are kept, the slowest stretched by 16.
    assert stretched[0] == 1 and stretched[1] == pytest.approx(160_000 ** (-1 / 32))
    assert stretched[31] == pytest.approx(160_000 ** (-31 / 32) / 16)


@pytest.mark.parametrize(
    "name, step", [("bf16", 2.0**-8), ("fp8", 2.0**-4), ("packed", 2.0**-4)]
)  # half a unit in the last place, relative
def test_roundings_are_idempotent_and_as_coarse_as_the_format(name, step):
    rounding = {"bf16": judge.BF16, "fp8": judge.fp8(0.05, 0.037), "packed": judge.packed(quantized_query=True)}[name]
    torch.manual_seed(3)
    x = torch.randn(50, 512, dtype=torch.float64)
    for part in (rounding.query, rounding.window_row, rounding.compressed_row):
        once = part(x)
        assert torch.equal(part(once), once)
        error = (once - x).abs()
        large = x.abs() > 0.1
        assert step / 2 < float((error / x.abs())[large].max()) <= step * (1 + 2.0**-7)
    assert torch.equal(judge.EXACT.query(x), x)


def test_packed_rows_scale_each_64_columns_and_keep_the_rotated_part_in_bf16():
    x = torch.zeros(1, 512, dtype=torch.float64)
    x[0, 0], x[0, 1], x[0, 64], x[0, 500] = 449.0, 1.0, 2.0**-7, 1 + 2.0**-7
    row = judge.packed(quantized_query=False).window_row(x)
    assert row[0, 0] == 448.0  # BF16 448, scale 1: 448
    assert row[0, 1] == 1.0 and row[0, 64] == 2.0**-7 and row[0, 500] == 1 + 2.0**-7
    x[0, 0] = 450.0  # one BF16 step above 448 the scale doubles
    assert judge.packed(quantized_query=False).window_row(x)[0, 0] == 448.0
    x[0, 1] = 1 / 16 + 1 / 128  # 9/8 of 2^-4: exact with scale 1 and with scale 2
    assert judge.packed(quantized_query=False).window_row(x)[0, 1] == 1 / 16 + 1 / 128


def test_a_verdict_fails_on_one_bad_row_on_nan_and_without_rows():
    assert not judge.Verdict().passed
    allowed = torch.full((4, 2, 512), 1.0, dtype=torch.float64)
    good = judge.Verdict()
    good.add(1.9 * allowed, allowed)
    assert good.passed and good.rows == 4
    one_bad_row = allowed.clone()
    one_bad_row[2] *= 2.1
    bad = judge.Verdict()
    bad.add(one_bad_row, allowed)
    assert not bad.passed and bad.mean_error < bad.mean_bound
    broken = judge.Verdict()
    one_bad_row[2, 0, 0] = math.nan
    broken.add(one_bad_row, allowed)
    assert not broken.passed


def test_the_judge_forgets_rejected_rows():
    torch.manual_seed(4)
    weights = judge.Weights(torch.zeros(1, dtype=torch.float64), None, None)
    kv, q = torch.randn(6, 512).bfloat16(), torch.randn(6, 1, 512).bfloat16()

    def result(keys, positions):
        rows = judge.rotate(keys.double(), torch.arange(len(keys)), 1)
        queries = judge.rotate(judge.normalise(q[positions].double()), positions, 1)
        visible = torch.arange(len(keys)) <= positions[:, None]
        return judge.attend(queries, rows, visible, weights.sinks)

    layer = judge.LayerJudge(1, judge.BF16, weights, judge.Verdict())
    layer.step(0, q[:4], kv[:4], None, None, result(kv[:4], torch.arange(4)))
    layer.reject(0, 2)
    kept = torch.cat([kv[:2], kv[4:]])
    layer.step(0, q[2:4], kv[4:], None, None, result(kept, torch.tensor([2, 3])))
    assert layer.verdict.passed and layer.verdict.rows == 6
    stale = judge.LayerJudge(1, judge.BF16, weights, judge.Verdict())
    stale.step(0, q[:4], kv[:4], None, None, result(kv[:4], torch.arange(4)))
    stale.reject(0, 2)
    stale.step(0, q[2:4], kv[4:], None, None, result(kv[:4], torch.tensor([2, 3])))
    assert not stale.verdict.passed
