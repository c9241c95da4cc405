"""The public calls on CUDA tensors: refusals, typed errors behind real compiled functions, bind, streams, graphs, layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cute_kernels as ck
from cute_kernels.compile import cache, packs
from cute_kernels.compile.freeze import frozen
from cute_kernels.target import Target
from tests.cpu.test_layer import COS_SIN, HEADS, KINDS, Model, Prompt
from tests.cpu.test_torch_compile import DECODE, PROMPTS, VERIFY, run, whole
from tests.cpu.test_validate import (
    CALLS,
    behind_a_compiled_function,
    compress_arguments,
    index_arguments,
    insert_arguments,
    sweep,
    taken_by,
)
from tests.support.decode_case import decode_case
from tests.support.devices import on_gpu

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="executes both families' source on an SM90 GPU (H100, H200), and there is none",
)
SM100, SM120 = Target("sm100", "sm_90a"), Target("sm120", "sm_90a")


def arguments(make: Any, **changes: Any) -> dict[str, Any]:
    return {name: on_gpu(value) for name, value in make(**changes).items()}


def bits(value: torch.Tensor) -> torch.Tensor:
    return value.cpu().float()


# Refusals --------------------------------------------------------------------------------------------------------------


def test_nothing_runs_on_sm90_without_an_explicit_target():
    for name, (call, make, _) in CALLS.items():
        if name == "decode":
            continue
        with pytest.raises(ck.UnsupportedRequest, match=r"compute capability 9\.0"):
            call(**arguments(make))
    case = {name: on_gpu(value) for name, value in decode_case("sm100", "bf16", 8).arguments.items() if name != "step"}
    step = ck.StepMetadata.of([1, 1, 1, 3, 2], [300, 7, 129, 140, 3], "cuda")
    for target in (None, SM100):
        with pytest.raises(ck.UnsupportedRequest):
            ck.decode(**case, step=step, target=target)
    with pytest.raises(ck.UnsupportedRequest, match=r"capability 9\.0"):
        ck.compress_store(**arguments(compress_arguments, target="sm_100a"))


def test_qkv_insert_takes_the_reference_when_asked():
    b = insert_arguments()
    a = {name: on_gpu(value) for name, value in b.items()} | {"backend": "reference"}
    assert torch.equal(bits(ck.qkv_insert(**a)), ck.qkv_insert(**b).float())
    assert torch.equal(bits(a["kv_cache"]), b["kv_cache"].float())


@pytest.mark.parametrize(("family", "name"), [("sm100", "bf16"), ("sm100", "fp8"), ("sm120", "fp8_ds_mla")])
def test_decode_on_the_reference_equals_the_cpu(family, name):
    case = decode_case(family, name, 12)
    a = {key: on_gpu(value) for key, value in case.arguments.items() if key != "step"}
    step = ck.StepMetadata.of([1, 1, 1, 3, 2], [300, 7, 129, 140, 3], "cuda")
    got = ck.decode(**a, step=step, backend="reference")
    torch.testing.assert_close(got.cpu().float(), case.run().float(), rtol=2**-7, atol=2**-12)


@pytest.mark.parametrize(("name", "change", "blamed"), [c for c in sweep() if behind_a_compiled_function(*c.values)])
def test_wrong_arguments(name, change, blamed):
    """The real compiled function refuses, or what it cannot see is checked before: named, with both values, nothing written."""
    call, make, _ = CALLS[name]
    target, needed = taken_by(blamed)
    a = arguments(make, **{**needed, **change, "target": Target(target.family, "sm_90a")})
    before = {key: value.clone() for key, value in a.items() if isinstance(value, torch.Tensor)}
    with pytest.raises((ck.InvalidArgument, ck.UnsupportedRequest)) as caught:
        call(**a)
    if isinstance(caught.value, ck.InvalidArgument):
        assert caught.value.argument == blamed
    for key, value in before.items():
        torch.testing.assert_close(bits(a[key]), bits(value), rtol=0, atol=0, equal_nan=True)


# bind, streams, graphs, torch.compile ----------------------------------------------------------------------------------


def kept_and_varying(a: dict[str, Any], *varying: str) -> tuple[dict[str, Any], dict[str, Any]]:
    return {n: v for n, v in a.items() if n not in varying}, {n: a[n] for n in varying}


def test_bound_calls_follow_the_current_stream():
    """All arguments but one are prepared: the launch still lands on torch's current stream, behind a slow producer there."""
    expected = compress_arguments()
    ck.compress_store(**expected)
    a = arguments(compress_arguments)
    for name in ("kv_score", "ape", "cos_sin"):
        a[name] = on_gpu(expected[name])
    a["target"] = SM100
    real = a["kv_score"].clone()
    a["kv_score"].fill_(float("nan"))
    bound = ck.bind(ck.compress_store, **a)
    bound_but_one = ck.bind(ck.compress_store, **kept_and_varying(a, "kv_score")[0])
    torch.cuda.synchronize()
    for call, varying in ((bound, {}), (bound_but_one, {"kv_score": a["kv_score"]})):
        call(**varying)  # elsewhere and before: from now on the launch is a remembered one
        a["state"].zero_()
        a["kv_score"].fill_(float("nan"))
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000_000)
            a["kv_score"].copy_(real)
            call(**varying)
        torch.cuda.synchronize()
        assert torch.equal(a["state"].cpu(), expected["state"])


@pytest.mark.parametrize("target", [SM100, SM120], ids=str)
def test_index_tables_equal_the_reference(target):
    a = index_arguments(out=None, target=target.family)
    want = ck.sparse_indices(**a)
    got = ck.sparse_indices(**{n: on_gpu(v) for n, v in a.items()} | {"target": target})
    for one, other in zip(vars(got).values(), vars(want).values(), strict=True):
        assert torch.equal(one.cpu(), other)


@pytest.mark.parametrize(("family", "dtype"), KINDS)
@pytest.mark.parametrize("ratio", [4, 128])
@pytest.mark.parametrize("scratch", ["kept", "graph"])
def test_a_layer_in_a_graph_equals_the_cpu(family, dtype, ratio, scratch):
    """compress_store and index tables of a layer, captured once and replayed over updated steps, padding requests included. The scratch
    where blocks meet is the step's, or made in the capture. Rows are those of the same layer without a graph."""
    tokens = 256 if ratio == 128 else 60  # the last rows close a window
    prompt = Prompt(ratio, tokens)
    on_cpu, model = Model(ratio, family, dtype), Model(ratio, family, dtype)
    target = Target(family, "sm_90a")
    tensors = {name: on_gpu(value) for name, value in model.tensors.items()}
    sinks = torch.zeros(HEADS, device="cuda")
    layer = ck.SparseMLA(model.spec, cos_sin=on_gpu(COS_SIN), sinks=sinks, target=target, **tensors)
    eager = {name: on_gpu(value) for name, value in model.tensors.items()}
    without = ck.SparseMLA(model.spec, cos_sin=on_gpu(COS_SIN), sinks=sinks, target=target, **eager)
    assert layer.warm_up() == len(list(model.spec.specs(target)))
    step = ck.StepMetadata(2, 2 * tokens, "cuda")
    if scratch == "kept":
        step.scratch()
    fields = ("window_block_table", "window_slots", "compressed_block_table", "kv_slots", "state_block_table", "state_slots")
    static: dict[str, torch.Tensor] = {}
    graph = None
    for begin, rows in ((0, 4), (4, 4), (8, 4), (12, 4), (tokens - 4, 4)):
        spans = [(begin, begin + rows), (begin, begin + rows)]
        cpu_step = ck.StepMetadata.of([rows, rows], [begin + rows, begin + rows])
        cpu_tables, given = on_cpu.tables(cpu_step), prompt.rows(spans)
        on_cpu.layer.compress(cpu_step, cpu_tables, given["kv_score"])
        want = on_cpu.layer.indices(cpu_step, cpu_tables, given["ids"])
        step.update([rows, rows], [begin + rows, begin + rows])
        new = {name: getattr(cpu_tables, name) for name in fields} | {n: given[n] for n in ("kv_score", "ids") if given[n] is not None}
        if graph is None:
            static = {name: value.cuda() for name, value in new.items()}
            tables = ck.StepTables(*(static[name] for name in fields))
            graph = torch.cuda.CUDAGraph()
            with frozen(), torch.cuda.graph(graph):
                layer.compress(step, tables, static["kv_score"])
                got = layer.indices(step, tables, static.get("ids"))
        for name, value in new.items():
            static[name].copy_(value)
        graph.replay()
        torch.cuda.synchronize()
        for one, other in zip(vars(got).values(), vars(want).values(), strict=True):
            assert torch.equal(one.cpu(), other)
        without.compress(ck.StepMetadata.of([rows, rows], [begin + rows, begin + rows], device="cuda"), tables, static["kv_score"])
    assert torch.equal(tensors["state"].cpu(), on_cpu.tensors["state"])
    assert bits(tensors["kv_cache"]).any()
    torch.testing.assert_close(bits(tensors["kv_cache"]), bits(eager["kv_cache"]), rtol=0, atol=0)


def test_a_cold_kernel_is_refused_while_capturing(tmp_path, monkeypatch):
    monkeypatch.setenv("CUTE_KERNELS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cache, "_memory", {})
    monkeypatch.setattr(packs, "folders", list)  # build/packs may hold it
    # Unlike any call before, for which a launch would be ready.
    a = {n: on_gpu(v) for n, v in compress_arguments(eps=3e-7).items()} | {"target": SM100}
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(ck.MissingKernel, match="graph is being captured"), torch.cuda.graph(graph):
        ck.compress_store(**a)


def test_torch_compile_traces_whole():
    a = {n: on_gpu(v) for n, v in compress_arguments().items()} | {"target": SM100}
    b = {n: on_gpu(v) for n, v in index_arguments(out=None).items()} | {"target": SM100}

    def step(state, cache):
        ck.compress_store(**{**a, "state": state, "kv_cache": cache})
        return ck.sparse_indices(**b).table

    eager = [a["state"].clone(), a["kv_cache"].clone()]
    traced = [a["state"].clone(), a["kv_cache"].clone()]
    one, other = step(*eager), torch.compile(step, fullgraph=True, backend="aot_eager")(*traced)
    assert torch.equal(one, other) and all(torch.equal(bits(x), bits(y)) for x, y in zip(eager, traced, strict=True))


@pytest.mark.parametrize(("target", "dtype"), [(SM100, "fp8"), (SM120, "auto")], ids=str)
def test_torch_compile_traces_layers_of_one_pool(target, dtype):
    steps = (PROMPTS, VERIFY, DECODE)
    (eager, before), (traced, after) = (run([1, 4, 128], str(target), dtype, steps, c, "cuda") for c in (None, whole("aot_eager")))
    assert all(torch.equal(got, want) for got, want in zip([*traced, after], [*eager, before], strict=True)) and bool(after.any())
