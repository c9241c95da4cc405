"""Ready launches: the second call of a kind launches what the plain path would, with its own tensors, and nothing unlike it is served."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import cute_kernels as ck
from cute_kernels import forms, ops
from cute_kernels.compile import cache
from cute_kernels.forms import Form
from cute_kernels.indices import CombinedIndices, SegmentIndices
from cute_kernels.launching import Operation
from cute_kernels.scratch import no_scratch
from cute_kernels.target import Target
from tests.cpu.test_ops_launch import aligned_compress_arguments, shifted
from tests.cpu.test_validate import compress_arguments, index_arguments, insert_arguments
from tests.support.gather import make_convert_case, make_gather_case

SM90, SM100 = Target("sm100", "sm_90a"), Target.named("sm_100a")


def gather_arguments() -> dict[str, Any]:
    case = make_gather_case([40, 20], kv_format="fp8")
    args = dict(zip(("cache", "out", "block_table", "workspace_starts"), case.args(case.guarded_out().out), strict=True))
    return {**args, "seq_starts": None, "kv_scale": None, **case.kwargs(), "target": None}


def convert_arguments(**changes: Any) -> dict[str, Any]:
    case = make_convert_case(6, 3, 40)
    args = dict(zip(("ids", "token_to_req", "block_table"), case.args(), strict=True))
    rest = {"block_stride_rows": None, "pages": None, "workspace_starts": None, "prefill_request_id": None}
    return {**args, **rest, **case.kwargs(), "return_counts": True, "out": None, "counts": None, "target": None, **changes}


ALL_GROUPS: dict[str, Any] = {"source": ck.IdSource.ALL_GROUPS, "ids": None}
RATIO_128: dict[str, Any] = {
    "ratio": 128, "kv_score": torch.randn(7, 1024), "ape": torch.randn(128, 512), "state": torch.zeros(6, 4, 1024),
}  # fmt: skip
WINDOW_ONLY: dict[str, Any] = {"source": ck.IdSource.NONE, "ids": None, "compressed": None, "compressed_block_table": None, "width": None}


def window_tables(family: str) -> ck.CombinedIndices | ck.SegmentIndices:
    return ops.new_tables(7, 0, family == "sm100", torch.device("cpu"))


CASES = {
    "compress_store": (ck.compress_store, compress_arguments),
    "compress_store, ratio 128": (ck.compress_store, functools.partial(compress_arguments, **RATIO_128)),
    "compress_store, ratio 128, no scratch": (ck.compress_store, functools.partial(compress_arguments, **RATIO_128, scratch=None)),
    "sparse_indices": (ck.sparse_indices, index_arguments),
    "sparse_indices, new": (ck.sparse_indices, functools.partial(index_arguments, out=None)),
    "sparse_indices, all groups, new": (ck.sparse_indices, functools.partial(index_arguments, **ALL_GROUPS, out=None)),
    "sparse_indices, window": (ck.sparse_indices, functools.partial(index_arguments, **WINDOW_ONLY, out=window_tables("sm100"))),
    "sparse_indices, window, new": (ck.sparse_indices, functools.partial(index_arguments, **WINDOW_ONLY, out=None)),
    "qkv_insert": (ck.qkv_insert, insert_arguments),
    "qkv_insert, new": (ck.qkv_insert, functools.partial(insert_arguments, out=None)),
    "gather_upconvert": (ck.gather_upconvert, gather_arguments),
    "convert_indices, new": (ck.convert_indices, convert_arguments),
    "convert_indices": (
        ck.convert_indices,
        lambda: convert_arguments(out=torch.zeros(6, 40, dtype=torch.int32), counts=torch.zeros(6, dtype=torch.int32)),
    ),
    "convert_indices in place": (ck.convert_indices, functools.partial(convert_arguments, return_counts=False)),
}


class Calls:
    """Calls of an operation for CPU tensors, as on a GPU of `target`; `slow` counts those that nothing was ready for."""

    def __init__(self, call: Any, target: Target) -> None:
        self.operation: Operation = ops._OPERATIONS[call]
        self.target, self.slow = target, 0
        self.form = Form(self.operation, self.operation.form.names, self._slow, anywhere=True)

    def _slow(self, *values: Any) -> Any:
        self.slow += 1
        a = dict(zip(self.form.names, values, strict=True))
        return self.operation.launch(a, self.target, {}, self.form.remembering(values, a, {}))

    def __call__(self, a: dict[str, Any]) -> Any:
        return self.form.call(*(a[name] for name in self.form.names))


@pytest.fixture
def launched(monkeypatch):
    """Specs asked for and arguments handed to their functions, in order."""
    seen: list[tuple[Any, tuple[Any, ...]]] = []
    monkeypatch.setattr(cache, "get", lambda spec: lambda *arguments: seen.append((spec, arguments)))
    return seen


def parts(value: Any) -> list[torch.Tensor]:
    """The tensors of an argument or a result."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, tuple):
        return list(value)
    return [t for t in vars(value).values() if t is not None] if dataclasses.is_dataclass(value) else []


def copied(a: dict[str, Any]) -> dict[str, Any]:
    """The same arguments with tensors of their own."""

    def copy(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
        if isinstance(value, CombinedIndices | SegmentIndices):
            return type(value)(*(None if t is None else torch.empty_like(t) for t in vars(value).values()))
        return value

    return {name: copy(value) for name, value in a.items()}


def test_a_step_of_another_length_compiles_no_source(launched):
    calls = Calls(ck.qkv_insert, Target("sm100", "sm_90a"))
    calls(insert_arguments(out=None))
    before = forms._code.cache_info().misses
    for rows in (2, 3):
        a = insert_arguments(out=None)
        cut = {name: a[name][:rows] for name in ("q", "kv", "slots", "positions")}
        assert calls(a | cut).shape[0] == rows
        assert calls(a | cut).shape[0] == rows
    assert calls.slow == 3 and forms._code.cache_info().misses == before


@pytest.mark.parametrize("family", ["sm100", "sm120"])
@pytest.mark.parametrize("case", CASES)
def test_a_ready_launch_is_the_plain_one(case, family, launched):
    call, make = CASES[case]
    first, target = make(), Target(family, "sm_90a")
    if family == "sm120":
        if call in (ck.compress_store, ck.qkv_insert):
            first |= {"kv_cache": torch.zeros(6, 16, 584, dtype=torch.uint8), "kv_scale": None}
        if call is ck.qkv_insert:
            out = first["out"]
            first |= {"q_scale": None, "q_dtype": torch.bfloat16, "out": None if out is None else out.bfloat16()}
        if case == "sparse_indices":
            first["out"] = ops.new_tables(7, 8, False, torch.device("cpu"))
        if case == "sparse_indices, window":
            first["out"] = window_tables(family)
    calls, second = Calls(call, target), copied(first)
    calls(first)
    result = calls(second)
    assert calls.slow == 1 and len(launched) == 2
    spec, ready = launched.pop()
    wanted = calls.operation.launch(second, target)
    assert launched[-1][0] == spec
    made = {id(t) for t in parts(result)}
    for name, got, want in zip(spec.argument_names, ready, launched[-1][1], strict=True):
        if name == "scratch" and first["scratch"] is None:
            assert got.shape == want.shape == (0,) and want is no_scratch(torch.device("cpu"))
        elif not isinstance(want, torch.Tensor):
            assert got == want and type(got) is type(want), name
        elif id(got) not in made:
            assert got is want, name
        else:
            assert (got.shape, got.stride(), got.dtype) == (want.shape, want.stride(), want.dtype), name
    given = {id(t) for v in second.values() for t in parts(v)}
    assert type(result) is type(wanted) and len(parts(result)) == len(parts(wanted))
    for got, want in zip(parts(result), parts(wanted), strict=True):
        assert (got is want) == (id(want) in given), "an output that is given is returned, a new one is new"
    again = calls(second)
    assert not {id(t) for t in parts(again)} & made - given, "outputs are made on each call"


@pytest.mark.parametrize("call", list(ops._OPERATIONS), ids=lambda call: call.__name__)
def test_a_public_call_hands_on_its_arguments_in_order(call, monkeypatch):
    monkeypatch.setattr(Operation, "serve", lambda operation, *values: seen.append(dict(zip(operation.form.names, values, strict=True))))
    seen: list[dict[str, Any]] = []
    given = {name: object() for name in inspect.signature(call).parameters}
    call(**given)
    assert seen == [given]


DIFFERENT = [
    ("compress_store", {"ratio": 4.0}),
    ("compress_store", {"ratio": 8}),
    ("compress_store", {"kv_scale": 0.0}),
    ("compress_store", {"independent": 0}),
    ("compress_store", {"save": 3}),
    ("compress_store", {"seq_lens": None}),
    ("compress_store", {"kv_score": torch.zeros(5, 2048)}),
    ("compress_store", {"kv_cache": torch.zeros(6, 16, 584, dtype=torch.uint8)}),
    ("compress_store", {"target": "sm120"}),
    ("compress_store", {"target": 3}),
    ("sparse_indices", {"source": "local"}),
    ("sparse_indices", {"ids": None}),
    ("sparse_indices", {"window": None}),
    ("sparse_indices", {"out": CombinedIndices(torch.zeros(7, 140, dtype=torch.int32)[:, :136], torch.zeros(7, dtype=torch.int32))}),
    ("sparse_indices", {"out": CombinedIndices(torch.zeros(7, 136, dtype=torch.int32), torch.zeros(6, dtype=torch.int32))}),
    ("sparse_indices", {"num_rows": True}),
    ("qkv_insert", {"apply_q_norm": 1}),
    ("qkv_insert", {"backend": "none"}),
    ("qkv_insert", {"padded_heads": 4}),
    ("qkv_insert", {"out": torch.zeros(6, 16, 512).to(torch.float8_e4m3fn)[:, :8]}),
    ("qkv_insert", {"q": torch.zeros(6, 9, 512).bfloat16()}),
    ("gather_upconvert", {"workspace_starts": torch.zeros(5, dtype=torch.int32)}),
    ("gather_upconvert", {"kv_scale": -1.0}),
    ("convert_indices", {"return_counts": 1}),
    ("convert_indices", {"page_rows": 0}),
]


@pytest.mark.parametrize(("case", "change"), DIFFERENT, ids=[f"{case}-{next(iter(c))}-{i}" for i, (case, c) in enumerate(DIFFERENT)])
def test_what_is_wrong_is_not_served_by_a_ready_launch(case, change, launched):
    call, make = CASES[case]
    calls, a = Calls(call, SM90), make()
    calls(a)
    calls(a)
    assert calls.slow == 1
    launched.clear()
    if change.get("target"):  # whose device decides what it means: the plain path's business
        assert calls.form.key([{**a, **change}[n] for n in calls.form.names]) not in calls.form.ready
        return
    with pytest.raises((ck.InvalidArgument, ck.UnsupportedRequest)):
        calls({**a, **change})
    assert not launched


def test_addresses_choose_among_ready_launches(launched):
    calls, a = Calls(ck.compress_store, SM100), aligned_compress_arguments()
    for by, slow in ((0, 1), (16, 2), (0, 2), (16, 2)):
        calls({**a, "kv_score": shifted(a["kv_score"], by)})
        assert launched.pop()[0].vector_bytes == (32 if by == 0 else 16) and calls.slow == slow
    tables, given = Calls(ck.sparse_indices, SM100), index_arguments()
    given["ids"] = torch.zeros(7, 8, dtype=torch.int32)
    for by, slow in ((0, 1), (16, 2), (0, 2), (16, 2)):
        table = shifted(torch.zeros(7, 136, dtype=torch.int32), by)
        out = CombinedIndices(table, torch.zeros(7, dtype=torch.int32))
        assert tables({**given, "ids": shifted(given["ids"], 0), "out": out}) is out
        assert launched.pop()[0].vector_bytes == (32 if by == 0 else 16) and tables.slow == slow


def test_a_traced_call_leaves_no_fake_scratch_behind():
    device = torch.device("meta")
    with FakeTensorMode():
        assert isinstance(no_scratch(device), FakeTensor)
    assert type(no_scratch(device)) is torch.Tensor and no_scratch(device) is no_scratch(device)
