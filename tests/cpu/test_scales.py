"""FP8 scales: spellings of checkpoints, refusals, and what a scale does to bytes and to attention."""

from __future__ import annotations

import math

import pytest
import torch

import cute_kernels as ck
from cute_kernels import reference
from cute_kernels.errors import InvalidArgument
from cute_kernels.kv_format import BF16, FP8, PACKED
from cute_kernels.scales import AttentionScales, from_state_dict
from tests.support.decode_case import decode_case
from tests.support.flashinfer_double import flashinfer_on

SPELLINGS = {
    "model.layers.{}.self_attn.attn.q_scale": "q",
    "model.layers.{}.self_attn.attn.k_scale": "kv",
    "model.layers.{}.self_attn.attn.kv_scale": "kv",
    "model.layers.{}.self_attn.q_scale": "q",
    "model.layers.{}.self_attn.v_scale": "kv",
    "model.layers.{}.self_attn.kv_scale": "kv",
    "model.layers.{}.self_attn.k_proj.k_scale": "kv",
    "model.layers.{}.self_attn.v_proj.v_scale": "kv",
    "model.layers.{}.self_attn.q_proj.q_scale": "q",
    "model.layers.{}.self_attn.mla_attn.mla_attn._k_scale": "kv",
    "model.layers.{}.self_attn.attn_mqa.k_scale": "kv",
    "language_model.model.layers.{}.self_attn.attn.v_scale": "kv",
    "layers.{}.attn.q_scale": "q",
    "layers.{}.attn.kv_scale": "kv",
    "layers.{}.attention.k_scale": "kv",
}


@pytest.mark.parametrize("value", [0.5, torch.tensor(0.5), torch.tensor([0.5], dtype=torch.bfloat16), torch.full((1, 1), 0.5).double()])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spellings(spelling: str, value: object) -> None:
    scales = from_state_dict({spelling.format(2): value, spelling.format(11): 3, "model.norm.weight": torch.ones(9)}, 12, FP8)
    kind = f"{SPELLINGS[spelling]}_scale"
    assert len(scales) == 12 and scales[2] == AttentionScales(**{kind: 0.5}) and scales[11] == AttentionScales(**{kind: 3.0})
    assert all(s == AttentionScales() for i, s in enumerate(scales) if i not in (2, 11))


def test_a_checkpoint_in_one_piece() -> None:
    state = {"model.embed_tokens.weight": torch.ones(3, 3), "layers.0.attn.wq.weight_scale": torch.ones(4)}
    for i in range(3):
        state[f"model.layers.{i}.self_attn.q_proj.weight_scale"] = torch.ones(5)
        state[f"model.layers.{i}.self_attn.attn.q_scale"] = torch.tensor(0.5 + i)
        state[f"model.layers.{i}.self_attn.attn.k_scale"] = torch.tensor(2.0 ** (i - 4))
        state[f"model.layers.{i}.self_attn.attn.v_scale"] = torch.tensor(2.0 ** (i - 4))
        state[f"model.layers.{i}.self_attn.k_scale"] = torch.tensor(2.0 ** (i - 4))  # a second spelling that agrees
        state[f"model.layers.{i}.self_attn.indexer.k_scale"] = torch.tensor(9.0)
        state[f"mtp.layers.{i}.self_attn.attn.k_scale"] = torch.tensor(7.0)
    assert from_state_dict(state, 3, FP8) == [AttentionScales(0.5 + i, 2.0 ** (i - 4)) for i in range(3)]
    mtp = {name.removeprefix("mtp."): value for name, value in state.items() if name.startswith("mtp.")}
    assert from_state_dict(mtp, 3, FP8) == [AttentionScales(kv_scale=7.0)] * 3
    assert from_state_dict({"model.layers.0.self_attn.k_scale": 0.1}, 1, FP8)[0].kv_scale == torch.tensor(0.1).item() != 0.1


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (
            {"layers.0.attn.k_scale": 0.5, "layers.0.attn.v_scale": 0.25},
            r"layers.0.attn.k_scale = 0.5, layers.0.attn.v_scale = 0.25.*one row is",
        ),
        ({"layers.0.attn.kv_scale": 0.5, "layers.0.attn.v_scale": 0.25}, "kv_scale = 0.5, .*v_scale = 0.25"),
        ({"layers.1.attn.q_scale": 0.5, "model.layers.1.self_attn.q_scale": 1.0}, "q_scale = 0.5, model.layers.1.self_attn.q_scale = 1.0"),
        ({"layers.0.attn.q_scale": 0.0}, r"layers.0.attn.q_scale: got 0.0(.|\n)*never calibrated"),
        ({"layers.0.attn.k_scale": torch.tensor(-1.0)}, "k_scale: got -1.0"),
        ({"layers.0.attn.k_scale": torch.tensor(math.nan)}, "k_scale: got nan"),
        ({"layers.0.attn.k_scale": math.inf}, "k_scale: got inf"),
        ({"layers.0.attn.k_scale": 1e39}, "k_scale: got 1e[+]39, expected a number that fp32 can hold"),
        ({"layers.0.attn.k_scale": 1e-60}, "k_scale: got 1e-60"),
        ({"layers.0.attn.k_scale": True}, "k_scale: got True"),
        ({"layers.0.attn.k_scale": torch.ones(8)}, r"k_scale: got torch.float32 \[8\], expected one"),
        ({"layers.0.attn.k_scale": torch.ones(1, dtype=torch.int32)}, "k_scale: got torch.int32"),
        ({"layers.3.attn.k_scale": 1.0}, "'layers.3.attn.k_scale', expected a layer below num_layers=2"),
        ({"model.layers.0.cross_attn.k_scale": 1.0}, "'model.layers.0.cross_attn.k_scale', expected a spelling"),
        ({"draft.layers.0.self_attn.k_scale": 1.0}, "'draft.layers.0.self_attn.k_scale', expected a spelling"),
    ],
)
def test_refusals(state: dict, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        from_state_dict(state, 2, FP8)


@pytest.mark.parametrize("fmt", [PACKED, BF16], ids=lambda f: f.name)
def test_rows_without_a_scale(fmt: ck.kv_format.KVFormat) -> None:
    ones = {"layers.0.attn.q_scale": 1.0, "layers.0.attn.k_scale": torch.ones(1)}
    assert from_state_dict(ones, 2, fmt) == [AttentionScales()] * 2
    for name, kind in (("layers.1.attn.q_scale", "q_scale"), ("layers.1.attn.v_scale", "kv_scale")):
        with pytest.raises(InvalidArgument, match=f"{kind} of layer 1: got 0.5, expected 1.0 with {fmt.name} rows"):
            from_state_dict({**ones, name: 0.5}, 2, fmt)


def test_values_of_the_class() -> None:
    for wrong in (0, -1.0, math.nan, math.inf, True, "1", None):
        for name in ("q_scale", "kv_scale"):
            with pytest.raises(InvalidArgument, match=name):
                AttentionScales(**{name: wrong})
    with pytest.raises(InvalidArgument, match="call: got 'attend'"):
        AttentionScales().arguments("attend")
    with pytest.raises(InvalidArgument, match=r"kv_scale: got 2\.0"):
        AttentionScales(1.0, 2.0).require(PACKED)


@pytest.mark.parametrize("capability", [(10, 0), (10, 3)])
def test_scales_are_folded_where_flashinfer_wants_them(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    scales = AttentionScales(0.3, 1.7)
    case = decode_case("sm100", "fp8", 8, ratio=4)
    with flashinfer_on(capability, monkeypatch) as launches:
        case.run(backend="flashinfer", target=ck.Target.from_capability(capability), sm_scale=0.125, **scales.arguments("decode"))
    for call in launches.calls:
        assert call["bmm1_scale"] == pytest.approx(0.125 * 0.3 * 1.7, rel=1e-6) and call["bmm2_scale"] == pytest.approx(1.7, rel=1e-6)


# What a scale does -----------------------------------------------------------------------------------------------------------

TOKENS, HEADS = 72, 8


class Layer:
    """One ratio-4 layer with its caches, fed one prompt and then attended to by all of its rows."""

    def __init__(self, dtype: str, scales: AttentionScales, magnitude: float) -> None:
        gen = torch.Generator().manual_seed(5)
        plan = ck.PoolPlan.of([4], ck.kv_format.resolve_format(dtype, "sm100"))
        self.pool = plan.allocate(24)
        views = self.pool.layer(0)
        spec = ck.LayerSpec(ratio=4, num_heads=HEADS, kv_cache_dtype=dtype, **scales.arguments("LayerSpec"), sm_scale=0.05 / magnitude**2)
        mla = ck.SparseMLA(
            spec,
            swa_cache=views.window,
            kv_cache=views.compressed,
            state=views.state,
            ape=torch.randn(4, 1024, generator=gen),
            norm_weight=(torch.rand(512, generator=gen) * magnitude).bfloat16(),
            cos_sin=reference.cos_sin_table(TOKENS, ratio=4),
            sinks=torch.randn(HEADS, generator=gen),
        )
        q = torch.randn(TOKENS, HEADS, 512, generator=gen).bfloat16()
        kv = (torch.randn(TOKENS, 512, generator=gen) * magnitude).bfloat16()
        kv_score = torch.randn(TOKENS, 2048, generator=gen)
        step = ck.StepMetadata.of([TOKENS], [TOKENS])
        tables = ck.StepTables.of(
            step,
            torch.tensor([[0, 1]], dtype=torch.int32),
            64,
            ratio=4,
            compressed_block_table=torch.tensor([[2]], dtype=torch.int32),
            compressed_page_rows=64,
            state_block_table=torch.arange(3, 21, dtype=torch.int32)[None],
            state_block_rows=4,
        )
        self.out = mla(step, tables, q, kv, kv_score, ck.IdSource.ALL_GROUPS).double()
        self.window = views.window.view(torch.uint8)[:2].flatten(0, 1)[:TOKENS].clone()
        self.compressed = views.compressed.view(torch.uint8)[2, : TOKENS // 4].clone()


@pytest.mark.parametrize("scales", [AttentionScales(0.3, 0.7), AttentionScales(0.5, 2.0), AttentionScales(1.9, 0.06)], ids=str)
def test_a_scale_changes_bytes_and_leaves_attention_within_bound(scales: AttentionScales) -> None:
    """The judge is the same layer on BF16 rows; rounding to FP8 with scale 1.0 says what error FP8 has here."""
    exact, unit, scaled = (Layer("bfloat16", AttentionScales(), 1.0), *(Layer("fp8", s, 1.0) for s in (AttentionScales(), scales)))
    for name in ("window", "compressed"):
        assert (getattr(unit, name) != getattr(scaled, name)).any(1).all(), f"every {name} row has other bytes"
    allowed = (unit.out - exact.out).abs().max()
    error = (scaled.out - exact.out).abs().max()
    assert 0 < error <= 2 * allowed, f"{error} with scales, {allowed} without"
    assert (unit.out - exact.out).norm() < 0.06 * exact.out.norm(), "3 bits of mantissa err by 1/16 at most"


def test_rows_that_only_a_scale_makes_fit() -> None:
    """Values around 2000 saturate at 448 with scale 1.0; with the scale of a calibration they do not."""
    exact, unit = Layer("bfloat16", AttentionScales(), 2000.0), Layer("fp8", AttentionScales(), 2000.0)
    scaled = Layer("fp8", AttentionScales(1.0, 2000.0 * 5 / 448), 2000.0)
    errors = [float((layer.out - exact.out).abs().max() / exact.out.abs().max()) for layer in (unit, scaled)]
    assert errors[0] > 0.5 and errors[1] < 0.05, errors
