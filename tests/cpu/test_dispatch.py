"""Targets from devices, head padding, what is refused by name, and the capability query."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

import cute_kernels as ck
from cute_kernels import dispatch, flashinfer_backend
from cute_kernels.flashinfer_backend import ACCEPTED_HEADS
from cute_kernels.kv_format import resolve_format
from cute_kernels.target import Target
from tests.support.decode_case import decode_case

CUDA = torch.device("cuda", 0)


@pytest.fixture
def gpus(monkeypatch):
    """Pretends that torch sees GPUs of the given capabilities; `dispatch` asks nothing else of CUDA."""

    def install(*capabilities: tuple[int, int]) -> None:
        fake = SimpleNamespace(
            is_available=lambda: True,
            current_device=lambda: 0,
            get_device_capability=lambda index: capabilities[index],
            get_device_name=lambda index: f"GPU {index}",
        )
        monkeypatch.setattr(dispatch, "torch", SimpleNamespace(cuda=fake, device=torch.device))
        dispatch._device_target.cache_clear()

    yield install
    dispatch._device_target.cache_clear()


@pytest.mark.parametrize(
    ("capability", "target"), [((10, 0), "sm_100a"), ((10, 3), "sm_103a"), ((12, 0), "sm_120a"), ((12, 1), "sm_121a")], ids=str
)
def test_a_device_decides_its_target(capability, target, gpus):
    gpus(capability)
    assert dispatch.resolve_target(CUDA) == Target.named(target)
    assert dispatch.resolve_target(torch.device("cuda")) == Target.named(target)


def test_two_devices_in_one_process(gpus):
    gpus((10, 0), (12, 0))
    assert dispatch.resolve_target(torch.device("cuda", 0)).gpu_arch == "sm_100a"
    assert dispatch.resolve_target(torch.device("cuda", 1)).gpu_arch == "sm_120a"


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (11, 0)])
def test_other_devices_are_refused_by_name(capability, gpus):
    gpus(capability)
    with pytest.raises(ck.UnsupportedRequest, match=rf"compute capability {capability[0]}.{capability[1]}") as caught:
        dispatch.resolve_target(CUDA)
    assert "cuda:0 (GPU 0)" in str(caught.value) and "10.0, 10.3" in str(caught.value) and caught.value.hint


def test_sm90_runs_only_under_an_explicit_target(gpus):
    gpus((9, 0))
    for family in ("sm100", "sm120"):
        target = Target(family, "sm_90a")
        assert dispatch.resolve_target(CUDA, target) == target
        assert dispatch.resolve_target(CUDA, str(target)) == target
    with pytest.raises(ck.UnsupportedRequest, match=r"target sm100:sm_100a .* capability 9.0"):
        dispatch.resolve_target(CUDA, "sm100")


def test_an_explicit_target_has_to_run_on_the_device(gpus):
    gpus((10, 3))
    assert dispatch.resolve_target(CUDA, "sm_100f") == Target("sm100", "sm_100f")
    with pytest.raises(ck.UnsupportedRequest, match=r"capability 10\.3"):
        dispatch.resolve_target(CUDA, "sm_100a")
    with pytest.raises(ck.UnsupportedRequest, match=r"12\.0, 12\.1"):
        dispatch.resolve_target(CUDA, "sm_120f")


def test_a_machine_without_a_gpu():
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ck.UnsupportedRequest, match="where torch finds a GPU"):
        dispatch.resolve_target(CUDA)
    assert dispatch.resolve_target(torch.device("cpu")) is None
    assert "where torch finds a GPU" in ck.supports("cuda").reason


def test_heads_are_padded_to_the_smallest_count_accepted():
    for heads in range(1, 129):
        padded = ck.pad_q_heads(heads)
        assert padded in ACCEPTED_HEADS and padded >= heads
        assert not [smaller for smaller in ACCEPTED_HEADS if heads <= smaller < padded]
    with pytest.raises(ck.UnsupportedRequest, match="129 query heads"):
        ck.pad_q_heads(129)
    for wrong in (0, -1, 8.0, True, None):
        with pytest.raises(ck.InvalidArgument, match="num_heads"):
            ck.pad_q_heads(wrong)


def test_sinks_are_padded_with_minus_infinity():
    sinks = torch.tensor([1.0, -2.0, 3e38])
    padded = ck.pad_sinks(sinks, 8)
    assert padded.tolist() == [1.0, -2.0, sinks[2].item(), *[-torch.inf] * 5]
    assert ck.pad_sinks(padded, 8) is padded


# What decode refuses ---------------------------------------------------------------------------------------------------


def test_flashinfer_is_never_asked_for_cpu_tensors():
    case = decode_case("sm100", "bf16", 8)
    with pytest.raises(ck.InvalidArgument, match="target"):
        case.run(backend="flashinfer")
    with pytest.raises(ck.UnsupportedRequest, match=r"decode through FlashInfer for sm100:sm_100a .* cpu"):
        case.run(backend="flashinfer", target="sm100")


def test_flashinfer_is_never_asked_for_another_capability(monkeypatch):
    """FlashInfer goes by the device alone: a target of the other family would get the wrong tables silently."""
    from flashinfer import utils

    monkeypatch.setattr(utils, "get_compute_capability", lambda device: (10, 3))
    case = decode_case("sm100", "bf16", 8)
    for target in ("sm_100a", "sm100:sm_90a"):
        with pytest.raises(ck.UnsupportedRequest, match="decode through FlashInfer"):
            case.run(backend="flashinfer", target=target)


def test_wide_windows_of_dspark_are_refused_by_name():
    case = decode_case("sm120", "fp8_ds_mla", 8)
    indices = case.arguments["indices"]
    wide = torch.cat([indices.window, indices.window[:, :64]], dim=1)
    with pytest.raises(ck.UnsupportedRequest, match=r"192 columns \(DSpark\)"):
        case.run(indices=ck.SegmentIndices(wide, indices.window_lengths, indices.compressed, indices.compressed_lengths))


@pytest.mark.parametrize(
    ("request_", "named"),
    [({"head_dim": 128}, "head size 128"), ({"window": 192}, r"192 columns \(DSpark\)"), ({"vision_spans": True}, "vision spans")],
    ids=["head-size", "dspark", "vision"],
)
def test_model_variants_are_refused_by_name(request_, named):
    with pytest.raises(ck.UnsupportedRequest, match=named):
        ck.LayerSpec(4, 8, **request_)
    answer = ck.supports("sm100", **request_)
    assert not answer and answer.path == ""


def test_decode_on_the_reference_takes_any_device_and_target():
    for family, name in (("sm100", "bf16"), ("sm120", "fp8_ds_mla")):
        case = decode_case(family, name, 8)
        plain = case.run()
        assert torch.equal(case.run(backend="reference", target=Target(family, "sm_90a")), plain)


# The installed FlashInfer ----------------------------------------------------------------------------------------------


def test_capabilities_download_nothing_and_build_nothing(monkeypatch):
    from flashinfer.mla import _core

    def refuse(*arguments: object) -> None:
        raise AssertionError("a cubin would be downloaded")

    monkeypatch.setattr(_core, "get_trtllm_gen_fmha_module", refuse)
    monkeypatch.setattr("socket.socket.connect", refuse)
    found = flashinfer_backend.capabilities()
    assert found.version and not found.reason and found.accepted_heads == (8, 16, 32, 64, 128) and found.rope_quant


def test_without_flashinfer_only_decode_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    flashinfer_backend.load.cache_clear()
    assert flashinfer_backend.capabilities().version is None
    answer = ck.supports("sm100")
    assert not answer and "pip install" in answer.reason
    case = decode_case("sm100", "bf16", 8)
    with pytest.raises(ck.UnsupportedRequest, match="pip install"):
        case.run(backend="flashinfer", target="sm100")
    case.run()


def test_a_flashinfer_that_fails_while_it_is_imported_is_an_answer(monkeypatch, tmp_path):
    (tmp_path / "flashinfer").mkdir()
    (tmp_path / "flashinfer" / "__init__.py").write_text("raise AssertionError('Torch not compiled with CUDA enabled')")
    for name in [n for n in sys.modules if n.partition(".")[0] == "flashinfer"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    flashinfer_backend.load.cache_clear()
    found = flashinfer_backend.capabilities()
    assert found.version is None and "AssertionError: Torch not compiled with CUDA enabled" in found.reason


def test_a_flashinfer_that_cannot_read_storage_rows_is_too_old(monkeypatch):
    import flashinfer.mla

    def old(query, swa_kv_cache, workspace_buffer, sparse_indices=None):  # 0.6.18's call has no flag for storage rows
        raise AssertionError("called")

    monkeypatch.setattr(flashinfer.mla, "trtllm_batch_decode_sparse_mla_dsv4", old)
    flashinfer_backend.load.cache_clear()
    assert "older than 0.7.0" in flashinfer_backend.capabilities().reason
    with pytest.raises(ck.UnsupportedRequest, match=r"older than 0\.7\.0"):
        decode_case("sm100", "bf16", 8).run(backend="flashinfer", target="sm100")


@pytest.fixture(autouse=True)
def fresh_adapter():
    yield
    flashinfer_backend.load.cache_clear()


# supports --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "dtype", "heads", "answer"),
    [
        ("sm100", "auto", 5, ("flashinfer trtllm-gen", "bf16", 8, "combined")),
        ("sm_103a", "fp8", 64, ("flashinfer trtllm-gen", "fp8", 64, "combined")),
        ("sm120", "auto", 96, ("flashinfer sparse", "fp8_ds_mla", 128, "segments")),
        ("sm_121a", "fp8_e4m3", 12, ("flashinfer sparse", "fp8_ds_mla", 16, "segments")),
        ("cpu", "auto", 64, ("reference", "bf16", 64, "combined")),
    ],
)
def test_supports_says_how(where, dtype, heads, answer):
    found = ck.supports(where, kv_cache_dtype=dtype, num_heads=heads)
    assert found and (found.path, found.kv_format, found.padded_heads, found.index_form) == answer
    assert ck.supports(torch.device(where) if where == "cpu" else Target.named(where), kv_cache_dtype=dtype, num_heads=heads) == found


@pytest.mark.parametrize(
    ("where", "request_", "reason"),
    [
        ("sm100", {"kv_cache_dtype": "fp8_ds_mla"}, "fp8_ds_mla"),
        ("sm120", {"kv_cache_dtype": "bfloat16"}, "bfloat16"),
        ("sm100", {"num_heads": 129}, "129 query heads"),
        ("sm100:sm_90a", {}, "decode through FlashInfer"),
        ("sm100", {"rope_quant": True}, "RopeQuant"),
        ("sm120", {"rope_quant": True, "num_heads": 128}, "RopeQuant"),
    ],
)
def test_supports_says_why_not(where, request_, reason):
    found = ck.supports(where, **request_)
    assert not found and reason in found.reason and "hint" in found.reason
    assert ck.supports("sm100", kv_cache_dtype="fp8", num_heads=128, rope_quant=True)


def test_supports_refuses_nonsense():
    for wrong in ({"ratio": 8}, {"num_heads": 0}):
        with pytest.raises(ck.InvalidArgument):
            ck.supports("sm100", **wrong)
    with pytest.raises(ck.InvalidArgument):
        ck.supports("sm_80")


@pytest.mark.parametrize("name", ["H200", "sm90", "B200", "sm_100", "cuda"])
def test_a_name_that_is_no_target_is_told_which_one_serves_which_gpu(name):
    with pytest.raises(ck.InvalidArgument, match=r'"sm100" is for B200.*"sm120" for RTX.*"sm100:sm_90a"'):
        Target.named(name)


@pytest.mark.parametrize("family", ["sm_100a", Target("sm100", "sm_100a"), None])
def test_a_format_is_resolved_for_a_family(family):
    with pytest.raises(ck.InvalidArgument, match=r"^family: got .*, expected 'sm100' or 'sm120'"):
        resolve_format("auto", family)


def test_a_format_of_the_other_family_is_said_to_be_its():
    with pytest.raises(ck.UnsupportedRequest, match="the SM120 family's, on CPU tensors with target='sm120'"):
        resolve_format("fp8_ds_mla", "sm100")


def test_flashinfer_is_refused_on_the_cpu_with_the_backend_that_works():
    case = decode_case("sm100", "bf16", 8)
    assert case.run(backend="auto").shape[1] == 8
    with pytest.raises(ck.InvalidArgument, match=r'target: got None(?s:.*)backend="auto" takes the reference'):
        case.run(backend="flashinfer", target=None)
