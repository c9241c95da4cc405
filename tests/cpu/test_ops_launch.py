"""The GPU path up to the compiled function: which spec, which arguments in which order, what is skipped, what `bind` keeps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import cute_kernels as ck
from cute_kernels import forms, ops
from cute_kernels.binding import Bound
from cute_kernels.compile import cache
from cute_kernels.compile.spec import CompressStoreSpec, QkvInsertSpec, SparseIndicesSpec
from cute_kernels.target import Target, all_targets
from tests.cpu.test_validate import compress_arguments, index_arguments, insert_arguments
from tests.support.decode_case import pool


@pytest.fixture
def launched(monkeypatch):
    """Specs asked for and arguments handed to their functions, in order."""
    seen: list[tuple[Any, tuple[Any, ...]]] = []
    monkeypatch.setattr(cache, "get", lambda spec: lambda *arguments: seen.append((spec, arguments)))
    return seen


def launch(call: Any, a: dict[str, Any], target: Target) -> Any:
    operation = ops._OPERATIONS[call]
    return operation.launch({**a, "target": target}, target)


def prepared(call: Any, **kept: Any) -> Bound:
    """A bound call that launches for CPU tensors too."""
    bound = Bound(call, ops._OPERATIONS[call], kept)
    bound._prepare(ops._OPERATIONS[call], {n: v for n, v in kept.items() if isinstance(v, torch.Tensor)})
    return bound


def shifted(value: torch.Tensor, by: int) -> torch.Tensor:
    """The same tensor `by` bytes past a 64-byte address."""
    storage = torch.zeros(value.numel() * value.element_size() + 192, dtype=torch.uint8)
    start = -storage.data_ptr() % 64 + by
    return storage[start : start + value.numel() * value.element_size()].view(value.dtype).view(value.shape).copy_(value)


def aligned_compress_arguments(**changes: Any) -> dict[str, Any]:
    a = compress_arguments(kv_cache=shifted(pool("fp8", 6, 16, strided=False), 0))
    for name in ("kv_score", "ape", "state", "norm_weight"):
        a[name] = shifted(a[name], 0)
    return {**a, **changes}


@pytest.mark.parametrize("target", all_targets(), ids=str)
@pytest.mark.parametrize("ratio", [4, 128])
@pytest.mark.parametrize("save", [ck.SavePolicy.EVERY_ROW, ck.SavePolicy(2, 256), None], ids=["every-row", "policy", "no-scores"])
def test_compress_store_arguments(target, ratio, save, launched):
    width = 1024 if ratio == 4 else 512
    formats = {"bf16": 1.0, "fp8": 0.25} if target.family == "sm100" else {"fp8_ds_mla": None}
    for name, scale in formats.items():
        a = compress_arguments(ratio=ratio, kv_cache=pool(name, 6, 16, strided=True), kv_scale=scale, state=torch.zeros(6, 4, 2 * width))
        a["independent"] = save is None
        scored = {"kv_score": torch.randn(7, 2 * width), "ape": torch.randn(ratio, width), "save": save}
        a |= scored if save is not None else {"kv_score": None, "ape": None, "save": ck.SavePolicy.EVERY_ROW}
        launch(ck.compress_store, a, target)
        spec, arguments = launched.pop()
        kind = "none" if save is None else "every_row" if save.every_row else "policy"
        assert spec == CompressStoreSpec(target, spec.vector_bytes, ratio=ratio, kv_format=name, scores=save is not None, save=kind)
        scalars = {"eps": 1e-6, "inverse_kv_scale": 4.0, "rollback": 2, "prefix_stride": 256, "independent": save is None}
        for argument, value in zip(spec.argument_names, arguments, strict=True):
            assert value == scalars[argument] if argument in scalars else value is a[argument], argument


@pytest.mark.parametrize("target", all_targets(), ids=str)
@pytest.mark.parametrize("source", list(ck.IdSource), ids=lambda s: s.value)
@pytest.mark.parametrize("slots", [True, False], ids=["slots", "no-slots"])
def test_sparse_indices_arguments(target, source, slots, launched):
    a = index_arguments(source=source, out=None, independent=slots)
    if source not in (ck.IdSource.LOCAL, ck.IdSource.GLOBAL):
        a["ids"] = None
    if source not in (ck.IdSource.LOCAL, ck.IdSource.ALL_GROUPS):
        a["compressed_block_table"] = None
    if source is ck.IdSource.NONE:
        a |= {"compressed": None, "width": None}
    if not slots:
        a["slots"] = None
    result = launch(ck.sparse_indices, a, target)
    spec, arguments = launched.pop()
    assert spec == SparseIndicesSpec(target, spec.vector_bytes, source=source.value, slots=slots)
    if target.family == "sm100":
        tables = {"table": result.table, "lengths": result.lengths}
        assert result.table.shape == (7, 128 if source is ck.IdSource.NONE else 136) and result.lengths.shape == (7,)
    else:
        tables = {"window_table": result.window, "window_lengths": result.window_lengths}
        tables |= {"compressed_table": result.compressed, "compressed_lengths": result.compressed_lengths}
        assert result.window.shape == (7, 128) and (result.compressed is None) == (source is ck.IdSource.NONE)
    pages = {f"{p}_{n}": v for p in ("window", "compressed") for n, v in (("pages", 10), ("page_rows", 16), ("span", 19))}
    for argument, value in zip(spec.argument_names, arguments, strict=True):
        expected = {**a, **tables, **pages}[argument]
        assert value is expected or value == expected, argument


@pytest.mark.parametrize("target", all_targets(), ids=str)
@pytest.mark.parametrize("norm", [True, False])
def test_qkv_insert_arguments(target, norm, launched):
    forms = [("bf16", torch.bfloat16), ("fp8", torch.bfloat16), ("fp8", torch.float8_e4m3fn)]
    for name, dtype in forms if target.family == "sm100" else [("fp8_ds_mla", torch.bfloat16)]:
        fp8_q = dtype is torch.float8_e4m3fn
        scales = {"kv_scale": 0.25 if name == "fp8" else None, "q_scale": 0.5 if fp8_q else None}
        for out in (None, torch.zeros(6, 8, 512).to(dtype)):
            a = insert_arguments(
                kv_cache=pool(name, 6, 16, strided=True), q_dtype=dtype, apply_q_norm=norm, out=out, independent=norm, **scales
            )
            result = launch(ck.qkv_insert, a, target)
            spec, arguments = launched.pop()
            kind = "e4m3" if fp8_q else "bf16"
            assert spec == QkvInsertSpec(target, spec.vector_bytes, kv_format=name, q_dtype=kind, apply_q_norm=norm)
            assert result.shape == (6, 8, 512) and result.dtype is dtype and (out is None or result is out)
            scalars = {"eps": 1e-6, "inverse_q_scale": 2.0, "inverse_kv_scale": 4.0, "independent": norm}
            for argument, value in zip(spec.argument_names, arguments, strict=True):
                assert value is {**a, "out": result}[argument] if argument not in scalars else value == scalars[argument], argument


def test_qkv_insert_where_no_symbol_ties_extents(launched):
    target = Target.named("sm100")
    wide = torch.zeros(6, 16, 512, dtype=torch.float8_e4m3fn)
    for change, name in (
        ({"out": wide}, "out"),
        ({"out": wide[:, :8]}, "out"),
        ({"padded_heads": 4, "out": wide[:, :4].clone()}, "padded_heads"),
        ({"padded_heads": 129}, "padded_heads"),
        ({"cos_sin": torch.zeros(0, 64)}, "cos_sin"),
    ):
        with pytest.raises(ck.InvalidArgument, match=f"{name}: got"):
            launch(ck.qkv_insert, insert_arguments(**change), target)
    assert not launched
    empty = {name: insert_arguments()[name][:0] for name in ("q", "kv", "positions", "out")}
    assert launch(ck.qkv_insert, insert_arguments(**empty), target) is empty["out"] and not launched


def test_the_width_follows_the_worst_argument_on_every_call(launched):
    """An aligned first call promises nothing about the next one."""
    target = Target.named("sm_100a")
    good = aligned_compress_arguments()
    for name in ("kv_score", "ape", "state", "norm_weight", "kv_cache"):
        launch(ck.compress_store, good, target)
        assert launched.pop()[0].vector_bytes == 32
        launch(ck.compress_store, {**good, name: shifted(good[name], 16)}, target)
        assert launched.pop()[0].vector_bytes == 16
        with pytest.raises(ck.InvalidArgument, match=f"{name}: got address .* multiples of 16 bytes"):
            launch(ck.compress_store, {**good, name: shifted(good[name], 8)}, target)
    launch(ck.compress_store, {**good, "cos_sin": shifted(good["cos_sin"], 4)}, target)
    assert launched.pop()[0].vector_bytes == 32
    launch(ck.compress_store, good, Target("sm100", "sm_90a"))
    assert launched.pop()[0].vector_bytes == 16


def test_strides_decide_the_width_too(launched):
    target = Target.named("sm_120a")
    a = index_arguments(out=None, width=8, ids=shifted(torch.zeros(6, 8, dtype=torch.int32), 0))
    launch(ck.sparse_indices, a, target)
    assert launched.pop()[0].vector_bytes == 32
    launch(ck.sparse_indices, {**a, "ids": shifted(torch.zeros(6, 12, dtype=torch.int32), 0)[:, :8]}, target)
    assert launched.pop()[0].vector_bytes == 16
    launch(ck.sparse_indices, {**a, "width": 12}, target)
    assert launched.pop()[0].vector_bytes == 16
    with pytest.raises(ck.InvalidArgument, match="ids"):
        launch(ck.sparse_indices, {**a, "ids": torch.zeros(6, 7, dtype=torch.int32)}, target)


def test_the_row_stride_of_a_packed_pool_is_nominal(launched):
    a = aligned_compress_arguments(kv_cache=shifted(torch.zeros(6, 64, 584, dtype=torch.uint8), 0), kv_scale=None)
    launch(ck.compress_store, a, Target.named("sm_120a"))
    assert launched.pop()[0].vector_bytes == 32


def test_empty_inputs_launch_nothing(launched):
    target = Target.named("sm100")
    a = compress_arguments()
    launch(ck.compress_store, {**a, "state_slots": a["state_slots"][:0]}, target)
    empty = {name: index_arguments()[name][:0] for name in ("positions", "token_to_req", "slots")}
    result = launch(ck.sparse_indices, index_arguments(**empty, num_rows=None, out=None), target)
    assert result.table.shape == (0, 136) and not launched
    launch(ck.sparse_indices, index_arguments(**empty, num_rows=3, out=None), target)
    assert len(launched) == 1, "padding rows beyond T have to be written"


def test_empty_inputs_are_checked_all_the_same(launched):
    a = compress_arguments()
    with pytest.raises(ck.InvalidArgument, match="norm_weight"):
        launch(ck.compress_store, {**a, "state_slots": a["state_slots"][:0], "norm_weight": torch.ones(512)}, Target.named("sm100"))
    assert not launched


@pytest.mark.parametrize("error", [RuntimeError("cudaErrorLaunchFailure"), TypeError("odd"), ck.MissingKernel("not compiled")])
def test_failures_with_right_arguments_pass_through(error, monkeypatch):
    def failing(*arguments: Any) -> None:
        raise error

    monkeypatch.setattr(cache, "get", lambda spec: failing)
    with pytest.raises(type(error)) as caught:
        launch(ck.compress_store, compress_arguments(), Target.named("sm100"))
    assert caught.value is error


# bind ------------------------------------------------------------------------------------------------------------------


def test_bound_calls_give_what_plain_calls_give():
    a, b = compress_arguments(), compress_arguments()
    for name, value in a.items():
        if isinstance(value, torch.Tensor):
            b[name] = value.clone() if name != "kv_cache" else pool("fp8", 6, 16, strided=True).clone()
    kept = {n: b[n] for n in ("ape", "state", "norm_weight", "cos_sin", "kv_cache", "ratio", "eps", "kv_scale", "save")}
    varying = {n: v for n, v in b.items() if n not in kept}
    ck.compress_store(**a)
    ck.bind(ck.compress_store, **kept)(**varying)
    assert torch.equal(a["state"], b["state"]) and torch.equal(a["kv_cache"].float(), b["kv_cache"].float())
    c = index_arguments(out=None)
    bound = ck.bind(ck.sparse_indices, **{n: c.pop(n) for n in ("window", "compressed", "source", "ratio", "window_block_table")})
    assert torch.equal(bound(**c).table, ck.sparse_indices(**index_arguments(out=None)).table)


def test_prepared_arguments_reach_the_compiled_function(launched, monkeypatch):
    """Kept tensors arrive converted, once; the anchor stays a torch tensor so that torch's stream is known."""
    import tvm_ffi

    target = Target.named("sm_100a")
    a = aligned_compress_arguments(target=target)
    kept = {n: v for n, v in a.items() if n not in ("kv_score", "target")}
    bound = prepared(ck.compress_store, **kept, target=target).call
    for by, width in ((0, 32), (16, 16)):
        kv_score = shifted(a["kv_score"], by)
        bound(kv_score=kv_score)
        spec, arguments = launched.pop()
        assert spec.vector_bytes == width
        given = dict(zip(spec.argument_names, arguments, strict=True))
        assert given["kv_score"] is kv_score and given["state_slots"] is a["state_slots"]
        for name, value in given.items():
            if name in kept and isinstance(kept[name], torch.Tensor) and name != "state_slots":
                assert isinstance(value, tvm_ffi.Tensor) and torch.from_dlpack(value).data_ptr() == kept[name].data_ptr()


def test_a_bound_insert_keeps_cache_and_table(launched):
    import tvm_ffi

    target = Target.named("sm_100a")
    a = insert_arguments(target=target)
    kept = {n: a.pop(n) for n in ("kv_cache", "cos_sin", "out", "eps", "padded_heads", "q_scale", "kv_scale", "q_dtype", "target")}
    bound = prepared(ck.qkv_insert, **kept).call
    assert bound(**a) is kept["out"]
    spec, arguments = launched.pop()
    given = dict(zip(spec.argument_names, arguments, strict=True))
    for name in ("kv_cache", "cos_sin", "out"):
        assert isinstance(given[name], tvm_ffi.Tensor) and given[name].shape == tuple(kept[name].shape)
    assert given["q"] is a["q"]
    plain = bound(**{**a, "backend": "reference"})
    assert plain is kept["out"] and not launched, 'backend="reference" runs no kernel'
    del a["backend"]
    assert ck.bind(ck.qkv_insert, **kept, backend="reference")(**a) is kept["out"] and not launched


def test_bind_refuses():
    with pytest.raises(ck.InvalidArgument, match="weight: got a value to bind"):
        ck.bind(ck.compress_store, weight=1)
    with pytest.raises(ck.InvalidArgument, match="call: got"):
        ck.bind(print, ratio=4)
    bound = ck.bind(ck.compress_store, ratio=4, eps=1e-6)
    a = {n: v for n, v in compress_arguments().items() if n not in ("ratio", "eps")}
    with pytest.raises(ck.InvalidArgument, match="state: got nothing"):
        bound(**{n: v for n, v in a.items() if n != "state"})
    with pytest.raises(ck.InvalidArgument, match="ratio: got a value, expected nothing"):
        bound(**a, ratio=128)
    with pytest.raises(ck.InvalidArgument, match="colour"):
        bound(**a, colour=3)
    with pytest.raises(ck.InvalidArgument, match="devices"):
        ck.bind(ck.compress_store, ape=a["ape"], state=a["state"].to("meta"))


def test_a_bound_call_finds_the_width_of_what_varies(monkeypatch):
    """Addresses choose among the kernels remembered; strides that one of them refuses make room for the narrower one."""
    refused, seen = [], []

    def get(spec: Any) -> Any:
        def kernel(*arguments: Any) -> None:
            score = arguments[spec.argument_names.index("kv_score")]
            if score.data_ptr() % spec.vector_bytes or score.stride(0) * 4 % spec.vector_bytes:
                refused.append(spec.vector_bytes)
                raise ValueError("Misaligned")
            seen.append(spec.vector_bytes)

        return kernel

    monkeypatch.setattr(cache, "get", get)
    target = Target.named("sm_100a")
    a = aligned_compress_arguments(target=target)
    kept = {n: v for n, v in a.items() if n != "kv_score"}
    bound = prepared(ck.compress_store, **kept).call
    padded = shifted(torch.zeros(7, 2052), 0)[:, :2048]
    for by, width in ((0, 32), (16, 16), (0, 32), (16, 16)):
        bound(kv_score=shifted(a["kv_score"], by))
        assert seen.pop() == width and not refused
    for refusals in ([32], [], []):
        bound(kv_score=padded)
        assert seen.pop() == 16 and refused == refusals
        refused.clear()
    with pytest.raises(ck.InvalidArgument, match="kv_score: got address"):
        bound(kv_score=shifted(a["kv_score"], 8))
    assert not seen


def test_what_a_bound_call_remembers_is_bounded(launched, monkeypatch):
    monkeypatch.setattr(forms, "MOST_READY", 3)
    a = aligned_compress_arguments(target=Target.named("sm_100a"))
    kept = {n: a.pop(n) for n in ("ape", "state", "norm_weight", "cos_sin", "kv_cache", "ratio", "eps", "kv_scale", "save", "target")}
    bound = prepared(ck.compress_store, **kept)
    for rows in (6, 5, 4, 3, 2, 1):
        given = {**a, "state_slots": a["state_slots"][:rows]}
        for order in (list(given), list(reversed(given)), sorted(given)):
            bound.call(**{name: given[name] for name in order})
            assert dict(zip(launched[-1][0].argument_names, launched[-1][1], strict=True))["state_slots"].shape == (rows,)
        assert bound._form is not None and len(bound._form.ready) <= 3
    assert len(launched) == 18


def test_a_deep_copy_of_a_bound_call_keeps_copies(launched):
    import tvm_ffi

    a = insert_arguments(target=Target.named("sm_100a"))
    kept = {n: a.pop(n) for n in ("kv_cache", "cos_sin", "out", "eps", "padded_heads", "q_scale", "kv_scale", "q_dtype", "target")}
    bound = prepared(ck.qkv_insert, **kept)
    bound.call(**a)
    memo: dict[int, Any] = {}
    cache_copy = copy.deepcopy(kept["kv_cache"], memo)
    other = copy.deepcopy(bound, memo)
    other._prepare(ops._OPERATIONS[ck.qkv_insert], {n: v for n, v in other._kept.items() if isinstance(v, torch.Tensor)})
    result = other.call(**a)
    spec, arguments = launched.pop()
    given = dict(zip(spec.argument_names, arguments, strict=True))
    assert isinstance(given["kv_cache"], tvm_ffi.Tensor) and torch.from_dlpack(given["kv_cache"]).data_ptr() == cache_copy.data_ptr()
    assert result is other._kept["out"] and result is not kept["out"]
