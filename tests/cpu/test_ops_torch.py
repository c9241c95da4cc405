"""The calls as torch operators: registration checked by torch's own `opcheck`, and traced whole by `torch.compile`."""

from __future__ import annotations

import pytest
import torch

import cute_kernels as ck
from cute_kernels import layer_op, ops, torch_gather, torch_ops
from tests.cpu.test_layer import Model, Prompt
from tests.cpu.test_validate import compress_arguments, convert_arguments, gather_arguments, index_arguments, insert_arguments
from tests.support.decode_case import decode_case, pool


@pytest.fixture
def operator_calls(monkeypatch):
    """Arguments of each operator as the traced wrappers hand them over."""
    calls = {}

    class Recorder:
        def __getattr__(self, name):
            def record(*arguments):
                calls[name] = arguments
                return getattr(real, name)(*arguments)

            return record

    real = torch.ops.cute_kernels
    monkeypatch.setattr(torch_ops.torch, "ops", type("Ops", (), {"cute_kernels": Recorder()})())
    a = compress_arguments(kv_cache=pool("bf16", 6, 16, strided=True).clone())  # torch's checker cannot compare FP8 tensors
    torch_ops.compress_store(*(a[n] for n in list(a)[:11]), 4, 1e-6, None, a["save"], a["seq_lens"], a["scratch"], None)
    b = index_arguments()
    names = (
        "positions",
        "token_to_req",
        "window_block_table",
        "ids",
        "compressed_block_table",
        "window",
        "compressed",
        "source",
        "ratio",
        "width",
    )
    given = tuple(b[n] for n in names)
    torch_ops.sparse_indices(*given, b["slots"], 7, None, None)
    torch_ops.sparse_indices(*given, b["slots"], 7, b["out"], None)
    c = decode_case("sm120", "fp8_ds_mla", 5).arguments
    first = (c["q"], c["swa_cache"], c["kv_cache"], c["step"], c["indices"], 5, c["sinks"], 0.04, 1.0, 1.0)
    torch_ops.decode(*first, None, None, None, None, "reference", None)
    i = insert_arguments(kv_cache=pool("bf16", 6, 16, strided=True).clone())
    torch_ops.qkv_insert(*(i[n] for n in list(i)[:6]), 1e-6, 8, True, None, None, torch.bfloat16, None, "auto", None)
    model, step = Model(4, "sm100", "fp8"), ck.StepMetadata.of([6, 6], [6, 6])
    objects = (model, step, model.tables(step))  # alive while their handles are used
    layer_op.call(model.layer, *objects[1:], *Prompt(4, 6).rows([(0, 6), (0, 6)]).values(), None, None, None)
    monkeypatch.undo()
    monkeypatch.setattr(torch_gather.torch, "ops", type("Ops", (), {"cute_kernels": Recorder()})())
    g = gather_arguments()
    torch_gather.gather_upconvert(*(g[n] for n in list(g)[:5]), None, None)
    v = convert_arguments()
    tensors = (v[n] for n in ("ids", "token_to_req", "block_table", "workspace_starts", "prefill_request_id"))
    torch_gather.convert_indices(*tensors, 64, 100, None, True, None, None, None)
    monkeypatch.undo()
    yield calls
    del objects


def test_the_compressors_operator_hands_on_every_argument(monkeypatch):
    a, given = compress_arguments(), {}
    monkeypatch.setattr(ops, "compress_store", lambda *tensors, **more: given.update(more, tensors=tensors))
    tensors = [a[n] for n in list(a)[:11]]
    torch_ops.compress_store(*tensors, 4, 1e-6, 0.5, a["save"], a["seq_lens"], a["scratch"], "sm_100a")
    for got, want in zip(
        (*given.pop("tensors"), given.pop("seq_lens"), given.pop("scratch")), (*tensors, a["seq_lens"], a["scratch"]), strict=True
    ):
        assert got.data_ptr() == want.data_ptr()
    assert given == {"ratio": 4, "eps": 1e-6, "kv_scale": 0.5, "save": a["save"], "target": "sm_100a"}


def registered() -> list[str]:
    """Every operator of the library's namespace."""
    return [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("cute_kernels::")]


def test_opcheck(operator_calls):
    assert set(operator_calls) == {name.partition("::")[2] for name in registered()}
    for name, arguments in operator_calls.items():
        operator = getattr(torch.ops.cute_kernels, name).default
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_autograd_registration", "test_faketensor"))


@pytest.mark.parametrize("family", ["sm100", "sm120"])
def test_a_step_is_traced_whole_and_gives_what_eager_gives(family):
    name = "fp8" if family == "sm100" else "fp8_ds_mla"
    case = decode_case(family, "bf16" if family == "sm100" else name, 5)
    given = case.arguments
    a = compress_arguments(target=family)
    if family == "sm120":
        a |= {"kv_cache": given["kv_cache"].clone(), "kv_scale": None}
    b = index_arguments(target=family, out=None)
    i = insert_arguments(target=family, out=None)
    if family == "sm120":
        i |= {"kv_scale": None, "q_scale": None, "q_dtype": torch.bfloat16}

    def step(state, cache, swa_cache, q):
        ck.compress_store(**{**a, "state": state, "kv_cache": cache})
        tables = ck.sparse_indices(**b)
        inserted = ck.qkv_insert(**{**i, "kv_cache": swa_cache})
        own = i["q"].clone()
        in_place = ck.qkv_insert(
            **{**i, "q": own, "kv_cache": swa_cache, "q_dtype": torch.bfloat16, "q_scale": None, "padded_heads": None, "out": own}
        )
        attended = ck.decode(**{**given, "q": q}, backend="reference")
        return tables, inserted, in_place, attended

    results = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        state, cache = a["state"].clone(), a["kv_cache"].clone()
        swa_cache = pool(name, 6, 16, strided=True).clone()
        tables, *results_of_calls = function(state, cache, swa_cache, given["q"])
        results.append([state, cache, swa_cache, *results_of_calls, *vars(tables).values()])
    for eager, traced in zip(*results, strict=True):
        assert torch.equal(eager.float(), traced.float())
