"""What FlashInfer is handed: every capability, head count, format and pool, its own Python in front, a strict double behind."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

import cute_kernels as ck
from cute_kernels import dispatch, flashinfer_backend
from cute_kernels.target import Target
from tests.support.decode_case import FAMILY_FORMATS, DecodeCase, decode_case
from tests.support.flashinfer_double import Launches, Refused, check_sm100, check_sm120, flashinfer_on

CAPABILITIES = [(10, 0), (10, 3), (12, 0), (12, 1)]
HEADS = [4, 5, 8, 12, 16, 32, 64, 96, 128]
FORMATS = [(capability, name) for capability in CAPABILITIES for name in FAMILY_FORMATS["sm100" if capability[0] == 10 else "sm120"]]


def run(case: DecodeCase, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch, **changes: object) -> tuple[torch.Tensor, Launches]:
    with flashinfer_on(capability, monkeypatch) as launches:
        out = case.run(backend="flashinfer", target=Target.from_capability(capability), **changes)
    return out, launches


@functools.cache
def judged(family: str, format_name: str, heads: int, strided: bool) -> tuple[DecodeCase, torch.Tensor]:
    """A case and the reference's answer, for both capabilities of a family."""
    case = decode_case(family, format_name, heads, ratio=(1, 4, 128)[(heads + strided) % 3], strided=strided, seed=heads)
    return case, case.run(backend="reference")


def agree(got: torch.Tensor, want: torch.Tensor) -> None:
    """Both are fp32 attention rounded once to bf16: one ulp apart at most."""
    assert got.shape == want.shape
    torch.testing.assert_close(got.float(), want.float(), rtol=2**-7, atol=2**-12, equal_nan=False)


@pytest.mark.parametrize(("capability", "format_name"), FORMATS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("strided", [True, False], ids=["strided", "tight"])
def test_decode_and_prefill(capability, format_name, heads, strided, monkeypatch):
    case, want = judged("sm100" if capability[0] == 10 else "sm120", format_name, heads, strided)
    out = torch.full((case.arguments["q"].shape[0], ck.pad_q_heads(heads), 512), 7.0, dtype=torch.bfloat16)
    got, launches = run(case, capability, monkeypatch, out=out)
    agree(got, want)
    rows = case.arguments["step"].num_tokens
    assert got.data_ptr() == out.data_ptr() and got.shape == (rows, heads, 512)
    assert (out[rows:] == 7.0).all(), "rows past the step were written"
    decode, prefill = launches.calls
    assert (len(decode["query"]), len(prefill["query"])) == (3, 5)
    sinks = decode["sinks" if capability[0] == 10 else "sink"]
    assert torch.equal(sinks[:heads], case.arguments["sinks"]) and (sinks[heads:] == -torch.inf).all()


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("ratio", [1, 4, 128])
def test_every_layer_kind(capability, ratio, monkeypatch):
    family = "sm100" if capability[0] == 10 else "sm120"
    case = decode_case(family, FAMILY_FORMATS[family][0], 16, ratio=ratio, sinks=False)
    got, launches = run(case, capability, monkeypatch)
    agree(got, case.run(backend="reference"))
    call = launches.calls[0]
    if family == "sm100":
        assert call["storage_offsets"] is True and call["sinks"] is None
        if ratio == 1:
            assert call["compressed_kv_cache"].data_ptr() == case.arguments["swa_cache"].data_ptr()
    else:
        assert (call["extra"] is None) == (ratio == 1)


@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "calls"),
    [((), (), 0), ((0, 0), (5, 6), 0), ((1, 0, 1), (5, 9, 6), 1), ((70,), (75,), 1), ((1, 70, 1), (300, 70, 130), 2), ((3, 1), (3, 9), 1)],
)
@pytest.mark.parametrize("capability", [(10, 0), (12, 0)])
def test_empty_slices_are_no_calls(capability, query_lens, seq_lens, calls, monkeypatch):
    family = "sm100" if capability[0] == 10 else "sm120"
    if not query_lens:
        case = decode_case(family, FAMILY_FORMATS[family][0], 8)
        step = ck.StepMetadata(1, 1, "cpu")
        got, launches = run(case, capability, monkeypatch, step=step)
        assert got.shape == (0, 8, 512) and not launches.calls
        return
    case = decode_case(family, FAMILY_FORMATS[family][0], 8, query_lens=query_lens, seq_lens=seq_lens)
    got, launches = run(case, capability, monkeypatch)
    assert len(launches.calls) == calls
    agree(got, case.run(backend="reference"))


@pytest.mark.parametrize(("capability", "format_name"), FORMATS)
def test_padding_requests_of_a_captured_graph(capability, format_name, monkeypatch):
    """Sequence length 0 with query rows: no key is active, the rows are zero, real rows do not notice."""
    family = "sm100" if capability[0] == 10 else "sm120"
    case = decode_case(family, format_name, 8, query_lens=(1,) * 32, seq_lens=(300, 7, 129) + (0,) * 29)
    with flashinfer_on(capability, monkeypatch, value_checks=False) as launches:
        got = case.run(backend="flashinfer", target=Target.from_capability(capability))
    agree(got, case.run(backend="reference"))
    lengths = launches.calls[0]["lengths"]
    assert not got[3:].any() and got[:3].any() and (lengths[3:] == (128 if family == "sm100" else 0)).all()


def test_scales_are_floats_folded_once(monkeypatch):
    case = decode_case("sm100", "fp8", 8)
    _, launches = run(case, (10, 0), monkeypatch, q_scale=0.25, kv_scale=3.0, sm_scale=0.125)
    assert (launches.calls[0]["bmm1_scale"], launches.calls[0]["bmm2_scale"]) == (0.125 * 0.25 * 3.0, 3.0)
    case = decode_case("sm120", "fp8_ds_mla", 8)
    _, launches = run(case, (12, 0), monkeypatch, sm_scale=0.125)
    assert launches.calls[0]["scale"] == 0.125


@pytest.mark.parametrize("sink", [-torch.inf, -1e4, 1e4, 3e38])
def test_extreme_sinks(sink, monkeypatch):
    for capability, family in (((10, 0), "sm100"), ((12, 0), "sm120")):
        case = decode_case(family, FAMILY_FORMATS[family][0], 5)
        sinks = torch.full((5,), sink)
        got, _ = run(case, capability, monkeypatch, sinks=sinks)
        agree(got, case.run(backend="reference", sinks=sinks))
        assert got.isfinite().all()


# Workspace and counters ------------------------------------------------------------------------------------------------


@pytest.fixture
def no_workspaces(monkeypatch):
    monkeypatch.setattr(dispatch, "_workspaces", {})
    monkeypatch.setattr(dispatch, "_retired", [])


def test_workspace_and_counters_are_shared_by_calls_of_any_head_count(monkeypatch, no_workspaces):
    made = ck.allocate_workspace("cpu", max_requests=4, num_heads=128)
    assert made.workspace.numel() == 128 << 20 and not made.counters.any()
    made.workspace.fill_(0xFF)
    for heads in (8, 128, 12):
        case = decode_case("sm100", "bf16", heads)
        got, launches = run(case, (10, 0), monkeypatch)
        agree(got, case.run(backend="reference"))
        for call in launches.calls:
            assert call["workspace"].data_ptr() == made.workspace.data_ptr()
            assert call["counters"].data_ptr() == made.counters.data_ptr()
    assert not made.counters.any()


def test_callers_workspace_and_counters_are_handed_over(monkeypatch, no_workspaces):
    case = decode_case("sm100", "bf16", 8)
    workspace, counters = torch.full((128 << 20,), 0xFF, dtype=torch.uint8), torch.zeros(4096, dtype=torch.uint8)
    _, launches = run(case, (10, 0), monkeypatch, workspace=workspace, counters=counters)
    assert all(
        c["workspace"].data_ptr() == workspace.data_ptr() and c["counters"].data_ptr() == counters.data_ptr() for c in launches.calls
    )
    assert not dispatch._workspaces
    case = decode_case("sm120", "fp8_ds_mla", 8)
    _, launches = run(case, (12, 0), monkeypatch, workspace=workspace)
    assert launches.calls[0]["workspace"].data_ptr() == workspace.data_ptr() and not dispatch._workspaces


def test_a_workspace_grows_without_freeing_what_a_graph_may_use(no_workspaces):
    small = ck.allocate_workspace("cpu", max_requests=1, num_heads=8)
    assert ck.allocate_workspace("cpu", max_requests=2, num_heads=8) is small
    large = ck.allocate_workspace("cpu", max_requests=4096, num_heads=128)
    assert large.counters.numel() == 4096 * 128 * 4 and dispatch._retired == [small]
    assert ck.allocate_workspace("cpu", max_requests=1, num_heads=8) is large
    wide = ck.allocate_workspace("cpu", num_heads=128, width=8192, max_rows=64, target="sm120")
    assert wide.workspace.numel() > 64 * 128 * 130 * 512 * 2


def test_the_default_workspace_holds_the_partial_sums_of_a_wide_table(monkeypatch, no_workspaces):
    case = decode_case("sm120", "fp8_ds_mla", 128, query_lens=(1,) * 20, seq_lens=(200,) * 20, width=4096, spare_rows=0)
    got, launches = run(case, (12, 0), monkeypatch)
    (call,) = launches.calls
    assert call["workspace"].numel() >= 20 * 128 * (2 + 4096 // 64) * (512 * 2 + 4)
    agree(got, case.run(backend="reference"))


def test_streams_have_workspaces_of_their_own(monkeypatch, no_workspaces):
    stream = 1
    monkeypatch.setattr(dispatch, "_stream_key", lambda device: (device, stream))
    first = ck.allocate_workspace("cpu")
    stream = 2
    second = ck.allocate_workspace("cpu")
    assert first.counters.data_ptr() != second.counters.data_ptr() and first.workspace.data_ptr() != second.workspace.data_ptr()


def test_capture_allocates_nothing(monkeypatch, no_workspaces):
    monkeypatch.setattr(dispatch, "_capturing", lambda device: True)
    case = decode_case("sm100", "bf16", 8)
    with pytest.raises(ck.UnsupportedRequest, match="allocate_workspace"):
        run(case, (10, 0), monkeypatch)
    monkeypatch.setattr(dispatch, "_capturing", lambda device: False)
    ck.allocate_workspace("cpu")
    monkeypatch.setattr(dispatch, "_capturing", lambda device: True)
    got, _ = run(case, (10, 0), monkeypatch)
    agree(got, case.run(backend="reference"))


def test_a_flashinfer_without_a_counter_argument_gets_none_and_cannot_be_captured(monkeypatch, no_workspaces):
    adapter = flashinfer_backend.FlashInfer()
    adapter.capabilities = dataclasses.replace(adapter.capabilities, takes_counters=False)
    monkeypatch.setattr(flashinfer_backend, "load", lambda: adapter)
    case = decode_case("sm100", "bf16", 8)
    _, launches = run(case, (10, 0), monkeypatch)
    shared = next(iter(dispatch._workspaces.values()))
    assert launches.calls[0]["counters"].data_ptr() != shared.counters.data_ptr()
    monkeypatch.setattr(dispatch, "_capturing", lambda device: True)
    with pytest.raises(ck.UnsupportedRequest, match=r"0\.7\.1"):
        run(case, (10, 0), monkeypatch)


# RopeQuant -------------------------------------------------------------------------------------------------------------


def test_rope_quant_arguments_pass_through_with_whole_buffers(monkeypatch):
    case = decode_case("sm100", "fp8", 128)
    table = torch.randn(512, 64)
    (values, scales), launches = run(case, (10, 0), monkeypatch, rope_cos_sin=table)
    assert values.shape == (8, 16, 4096) and values.dtype == torch.float8_e4m3fn and scales.shape == (8, 16, 8)
    decode, prefill = launches.calls
    assert decode["offsets"].tolist() == [0, 1, 2, 3] and prefill["offsets"].tolist() == [3, 6, 8]
    for call in launches.calls:
        assert (
            len(call["query"]) == 8 and call["out"].data_ptr() == values.data_ptr() and call["rope_cos_sin"].data_ptr() == table.data_ptr()
        )
        assert call["output_scale"].data_ptr() == scales.data_ptr()
    for other in (decode_case("sm100", "fp8", 64), decode_case("sm100", "bf16", 128)):
        with pytest.raises(ck.UnsupportedRequest, match="RopeQuant"):
            run(other, (10, 0), monkeypatch, rope_cos_sin=table)
    with pytest.raises(ck.UnsupportedRequest, match="RopeQuant"):
        case.run(backend="reference", rope_cos_sin=table)


# The double itself -----------------------------------------------------------------------------------------------------


def misaligned(value: torch.Tensor) -> torch.Tensor:
    """The same tensor two to eight bytes off a 16-byte address."""
    flat = torch.zeros(value.numel() + 16, dtype=value.dtype)
    shift = 1
    while flat[shift:].data_ptr() % 16 == 0:
        shift += 1
    return flat[shift : shift + value.numel()].view(value.shape).copy_(value)


def restrided(value: torch.Tensor, *strides: int) -> torch.Tensor:
    room = sum((n - 1) * s for n, s in zip(value.shape, strides, strict=True)) + 1
    return torch.zeros(room, dtype=value.dtype).as_strided(value.shape, strides)


def unbacked(value: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    """A tensor larger than this machine's memory."""
    return torch.empty_strided(shape, strides, dtype=value.dtype, device="meta")


SM100_VIOLATIONS = {
    "row pitch": ("swa_kv_cache", lambda t: restrided(t, t.stride(0) * 2, 1024, 1024, 1)),
    "page stride": ("compressed_kv_cache", lambda t: restrided(t, t.shape[2] * 512 + 256, 512, 512, 1)),
    "pool address": ("swa_kv_cache", misaligned),
    "pool dtype": ("compressed_kv_cache", lambda t: t.to(torch.float16)),
    "2^31 rows": ("compressed_kv_cache", lambda t: unbacked(t, (2, *t.shape[1:]), (2**31 * 512, 512, 512, 1))),
    "index rows": ("indices", lambda t: restrided(t, t.shape[1] + 4, 1)),
    "index address": ("indices", misaligned),
    "index width": ("indices", lambda t: t[:, :126].contiguous()),
    "index dtype": ("indices", lambda t: t.long()),
    "second remap": ("storage_offsets", lambda _: False),
    "minus one in a window": ("indices", lambda t: torch.where(torch.arange(t.shape[1]) == 3, -1, t)),
    "entry between pages": ("indices", lambda t: torch.where(torch.arange(t.shape[1]) == 3, 16, t)),
    "lengths": ("lengths", lambda t: t[:-1].contiguous()),
    "sequence lengths": ("seq_lens", lambda t: torch.cat([t, t])),
    "sink length": ("sinks", lambda t: t[:-1].contiguous()),
    "sink stride": ("sinks", lambda t: torch.stack([t, t], 1)[:, 0]),
    "scale tensor": ("bmm1_scale", lambda s: torch.tensor(s)),
    "dirty counters": ("counters", torch.ones_like),
    "few counters": ("counters", lambda t: t[:16].clone()),
    "workspace address": ("workspace", misaligned),
    "workspace size": ("workspace_bytes", lambda n: n // 2),
    "offsets not rebased": ("offsets", lambda t: t + 1),
    "query length": ("max_q_len", lambda n: n + 1),
    "query address": ("query", misaligned),
    "heads": ("query", lambda t: t[:, :5].contiguous()),
    "out rows": ("out", lambda t: t[:-1].contiguous()),
    "out stride": ("out", lambda t: restrided(t, t.stride(0) * 2, 512, 1)),
}
SM120_VIOLATIONS = {
    "row pitch": ("swa_kv_cache", lambda t: restrided(t, t.stride(0) * 2, 592, 592, 1)),
    "page stride": ("extra", lambda t: restrided(t, t.shape[1] * 584 + 8, 584, 584, 1)),
    "page too small": ("extra", lambda t: torch.zeros(2**20, dtype=t.dtype).as_strided(t.shape, (576, 584, 584, 1))),
    "pool address": ("swa_kv_cache", misaligned),
    "pool dtype": ("extra", lambda t: t.view(torch.int8)),
    "2^31 slots": ("extra", lambda t: unbacked(t, (2**31, *t.shape[1:]), t.stride())),
    "query dtype": ("query", lambda t: t.to(torch.float8_e4m3fn)),
    "query address": ("query", misaligned),
    "heads": ("query", lambda t: t[:, :5].contiguous()),
    "index rows": ("indices", lambda t: restrided(t, t.shape[1] + 4, 1)),
    "extra index rows": ("extra_indices", lambda t: restrided(t, t.shape[1] + 4, 1)),
    "index dtype": ("indices", lambda t: t.long()),
    "window width": ("indices", lambda t: t[:, :96].contiguous()),
    "slot past the pool": ("extra_indices", lambda t: t + 10**6),
    "length past the table": ("lengths", lambda t: t + 1000),
    "lengths": ("extra_lengths", lambda t: t[:-1].contiguous()),
    "half a segment": ("extra_lengths", lambda _: None),
    "sink length": ("sink", lambda t: t[:-1].contiguous()),
    "scale tensor": ("scale", lambda s: torch.tensor(s)),
    "base-2 scale": ("lse_scale", lambda s: 0.5),
    "other format": ("kv_scale_format", lambda s: "ue8m0_g32"),
    "workspace address": ("workspace", misaligned),
    "out rows": ("out", lambda t: t[:-1].contiguous()),
}


@pytest.fixture(scope="module")
def good_calls():
    with pytest.MonkeyPatch.context() as patch:
        sm100 = run(decode_case("sm100", "bf16", 8, query_lens=(3, 2), seq_lens=(300, 200)), (10, 0), patch)[1].calls[0]
        sm120 = run(decode_case("sm120", "fp8_ds_mla", 8, query_lens=(70,), seq_lens=(300,)), (12, 0), patch)[1].calls[0]
    return {"sm100": (check_sm100, sm100), "sm120": (check_sm120, sm120)}


@pytest.mark.parametrize(
    ("family", "violation"),
    [("sm100", v) for v in SM100_VIOLATIONS] + [("sm120", v) for v in SM120_VIOLATIONS],
    ids=lambda v: v.replace(" ", "-"),
)
def test_the_double_refuses(family, violation, good_calls):
    check, call = good_calls[family]
    check(call)
    name, change = (SM100_VIOLATIONS if family == "sm100" else SM120_VIOLATIONS)[violation]
    changed = {**call, name: change(call[name])}
    if name == "indices" and "remapped" in call:
        changed["remapped"] = changed["indices"]
    with pytest.raises(Refused):
        check(changed)
