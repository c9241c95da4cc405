"""Every public call with every argument wrong in turn: a typed error that names it, with both values, and nothing written.

The sweep runs twice: on the CPU path, and on the GPU path behind a compiled function that refuses whatever it gets.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import cute_kernels as ck
from cute_kernels import gather_ops, ops, validate
from cute_kernels.compile import cache
from cute_kernels.target import Target
from tests.support.decode_case import decode_case, pool
from tests.support.gather import make_convert_case, make_gather_case

Arguments = dict[str, Any]


def compress_arguments(**changes: Any) -> Arguments:
    step = ck.StepMetadata.of([1, 5], [8, 5])
    table = torch.tensor([[0, 1, 2], [3, 4, 5]], dtype=torch.int32)
    return {
        "kv_score": torch.randn(7, 2048),
        "ape": torch.randn(4, 1024),
        "state": torch.zeros(6, 4, 2048),
        "state_block_table": table,
        "positions": step.positions,
        "token_to_req": step.token_to_req,
        "state_slots": ck.slot_mapping(step, table, 4),
        "kv_slots": ck.slot_mapping(step, table, 16, ratio=4),
        "norm_weight": torch.ones(512, dtype=torch.bfloat16),
        "cos_sin": torch.randn(64, 64),
        "kv_cache": pool("fp8", 6, 16, strided=True).clone(),
        "seq_lens": step.seq_lens,
        "ratio": 4,
        "eps": 1e-6,
        "kv_scale": 0.5,
        "save": ck.SavePolicy(rollback=1),
        "scratch": ck.compress_scratch("cpu"),
        "independent": False,
        "target": None,
        **changes,
    }


def index_arguments(**changes: Any) -> Arguments:
    step = ck.StepMetadata.of([1, 5], [80, 5])
    table = torch.tensor([[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]], dtype=torch.int32)
    geometry = ck.PoolGeometry(10, 16, 19)
    return {
        "positions": step.positions,
        "token_to_req": step.token_to_req,
        "window_block_table": table,
        "ids": torch.tensor([[0, 5, 3, -1]] + [[-1] * 4] * 3 + [[0, -1, -1, -1]] * 2, dtype=torch.int32),
        "compressed_block_table": table.clone(),
        "window": geometry,
        "compressed": geometry,
        "source": ck.IdSource.LOCAL,
        "ratio": 4,
        "width": 8,
        "slots": ck.slot_mapping(step, table, 16),
        "num_rows": 7,
        "out": ck.CombinedIndices(torch.zeros(7, 136, dtype=torch.int32), torch.zeros(7, dtype=torch.int32)),
        "independent": False,
        "target": None,
        **changes,
    }


def insert_arguments(**changes: Any) -> Arguments:
    return {
        "q": torch.randn(6, 5, 512).bfloat16(),
        "kv": torch.randn(6, 512).bfloat16(),
        "kv_cache": pool("fp8", 6, 16, strided=True).clone(),
        "slots": torch.arange(6),
        "positions": torch.arange(6),
        "cos_sin": torch.randn(64, 64),
        "eps": 1e-6,
        "padded_heads": 8,
        "apply_q_norm": True,
        "q_scale": 0.5,
        "kv_scale": 0.5,
        "q_dtype": torch.float8_e4m3fn,
        "out": torch.zeros(6, 8, 512, dtype=torch.float8_e4m3fn),
        "independent": False,
        "backend": "auto",
        "target": None,
        **changes,
    }


def gather_arguments(**changes: Any) -> Arguments:
    case = make_gather_case([5, 0, 7], kv_format="fp8_inline", page_rows=4)
    out = torch.zeros(16, 576, dtype=torch.bfloat16)[:12]
    given = dict(zip(("cache", "out", "block_table", "workspace_starts"), case.args(out), strict=True)) | case.kwargs()
    return {**given, "target": None, **changes}


def convert_arguments(**changes: Any) -> Arguments:
    case = make_convert_case(6, 3, 16, garbage=0.0, prefill=True)
    case.workspace_starts = torch.arange(4, dtype=torch.int32)
    case.prefill_request_id = torch.tensor([-1, 3, 0, -1, -1, 2], dtype=torch.int32)
    given = dict(zip(("ids", "token_to_req", "block_table"), case.args(), strict=True)) | case.kwargs()
    out = {"out": torch.zeros(6, 16, dtype=torch.int32), "counts": torch.zeros(6, dtype=torch.int32), "return_counts": True}
    return {**given, **out, "block_stride_rows": 100, "target": None, **changes}


def decode_arguments(**changes: Any) -> Arguments:
    case = decode_case("sm100", "fp8", 5)
    out = torch.zeros(10, 8, 512, dtype=torch.bfloat16)
    more = {"out": out, "workspace": torch.zeros(64, dtype=torch.uint8), "counters": torch.zeros(64, dtype=torch.uint8)}
    return {**case.arguments, "sm_scale": 0.1, "backend": "auto", "target": None, **more, **changes}


CALLS = {
    "compress_store": (ck.compress_store, compress_arguments, validate.COMPRESS_STORE),
    "sparse_indices": (ck.sparse_indices, index_arguments, validate.SPARSE_INDICES),
    "qkv_insert": (ck.qkv_insert, insert_arguments, validate.QKV_INSERT),
    "gather_upconvert": (ck.gather_upconvert, gather_arguments, gather_ops.GATHER_TENSORS),
    "convert_indices": (ck.convert_indices, convert_arguments, gather_ops.CONVERT_TENSORS),
    "decode": (ck.decode, decode_arguments, validate.DECODE),
}
BAD_NUMBERS = (float("nan"), float("inf"), -1.0, 0.0, 1e39, 1e-39, True, "1")  # fp32 holds neither 1e39, nor the inverse of 1e-39


def wrong_tensors(arg: validate.Arg, value: torch.Tensor) -> Iterator[tuple[str, Any]]:
    """Ways in which one tensor argument can be wrong, by what its rule promises."""
    yield "list", value.tolist()
    if not arg.optional:
        yield "none", None
    yield "dtype", value.to(torch.float64)
    yield "rank", value[None]
    yield "device", value.to("meta")
    size = value.element_size()
    fixed = [i for i, want in enumerate(arg.shape) if isinstance(want, int) or (want in ("W", "2W", "ratio"))]
    for dim in fixed:
        yield f"extent-{dim}", value.narrow(dim, 0, value.shape[dim] - 1).contiguous()
    doubled = torch.zeros(2 * value.numel() + 64, dtype=value.dtype)
    if arg.layout is validate.Layout.DENSE:
        strides = [2 * s for s in value.contiguous().stride()]
        yield "stride", doubled.as_strided(value.shape, strides)
    elif arg.layout is validate.Layout.ROWS:
        yield "column-stride", doubled.as_strided(value.shape, (*(2 * s for s in value.contiguous().stride()[:-1]), 2))
        if arg.written:
            yield "overlap", doubled.as_strided(value.shape, (value.shape[-1] // 2, *value.stride()[1:]))
    else:
        pages, rows, width = value.shape
        roomy = torch.zeros(pages * rows * width * 4, dtype=value.dtype)
        yield "row-pitch", roomy.as_strided(value.shape, (rows * width * 2, width + 16, 1))
        yield "page-stride", roomy.as_strided(value.shape, (rows * width + width // 2, width, 1))
        yield "page-overlap", roomy.as_strided(value.shape, ((rows - 1) * width, width, 1))
        yield "width", roomy.as_strided((pages, rows, width - 1), (rows * width, width, 1))
    if arg.vector:
        shifted = torch.zeros(value.numel() * 2 + 64, dtype=value.dtype)
        yield "address", shifted.as_strided(value.shape, value.contiguous().stride(), 8 // size)


def sweep() -> list[Any]:
    cases = []
    for name, (_, make, table) in CALLS.items():
        good = make()
        for arg in table:
            cases += [
                pytest.param(name, {arg.name: bad}, arg.name, id=f"{name}-{arg.name}-{how}")
                for how, bad in wrong_tensors(arg, good[arg.name])
            ]

    def more(name: str, argument: str, *values: Any, blamed: str | None = None) -> None:
        for i, value in enumerate(values):
            cases.append(pytest.param(name, {argument: value}, blamed or argument, id=f"{name}-{argument}-{i}"))

    int32 = {"dtype": torch.int32}
    for name in ("compress_store", "sparse_indices", "qkv_insert"):
        more(name, "independent", None, 1)
    more("compress_store", "ratio", 8, 0, 4.0, "4", None, True)
    more("compress_store", "eps", *BAD_NUMBERS)
    more("compress_store", "kv_scale", *BAD_NUMBERS, 1e-37, 1e31)
    more("compress_store", "save", None, "every_row", 3)
    more("compress_store", "seq_lens", None, torch.zeros(3, **int32))
    more("compress_store", "kv_score", torch.randn(5, 2048), torch.randn(7, 1024))
    more("compress_store", "kv_score", None, blamed="kv_score")
    more("compress_store", "ape", None)
    more("compress_store", "state", torch.zeros(0, 4, 2048), torch.zeros(6, 0, 2048))
    more("compress_store", "state_block_table", torch.zeros(2, 0, **int32))
    more("compress_store", "target", 3, "sm_80", "sm_90a")
    scratch = ck.compress_scratch("cpu")
    more("compress_store", "scratch", scratch[:-1], scratch.long(), scratch.repeat(2)[::2], scratch.to("meta"), scratch.repeat(2)[1:], 3)
    more("sparse_indices", "window", None, (1, 2, 3))
    more("sparse_indices", "compressed", None, 5)
    more("sparse_indices", "source", None, "local")
    more("sparse_indices", "source", ck.IdSource.GLOBAL, blamed="compressed_block_table")
    more("sparse_indices", "source", ck.IdSource.ALL_GROUPS, blamed="ids")
    more("sparse_indices", "source", ck.IdSource.NONE, blamed="compressed")
    more("sparse_indices", "ids", None)
    more("sparse_indices", "compressed_block_table", None, torch.zeros(3, 5, **int32))
    more("sparse_indices", "ratio", 0, 2.0, None, True)
    more("sparse_indices", "width", 3, -4, "8", 2.0, 2**31)
    more("sparse_indices", "width", 12, blamed="out.table")
    more("sparse_indices", "num_rows", 5, -1, 6.5)
    more("sparse_indices", "num_rows", 8, blamed="out.table")
    tables = index_arguments()["out"]
    more("sparse_indices", "out", (tables.table, tables.lengths), ck.SegmentIndices(tables.table, tables.lengths))
    for bad in (tables.table[:6], tables.table.long(), tables.table.to("meta"), torch.zeros(7, 140, **int32)[:, :136], None):
        more("sparse_indices", "out", ck.CombinedIndices(bad, tables.lengths), blamed="out.table")  # type: ignore[arg-type]
    for bad in (tables.lengths[:6], tables.lengths.float(), torch.zeros(14, **int32)[::2]):
        more("sparse_indices", "out", ck.CombinedIndices(tables.table, bad), blamed="out.lengths")
    more("qkv_insert", "eps", *BAD_NUMBERS)
    more("qkv_insert", "kv_scale", *BAD_NUMBERS, 1e-37, 1e31)
    more("qkv_insert", "q_scale", *BAD_NUMBERS, 1e-37, 1e31)
    more("qkv_insert", "padded_heads", 4, 129, 8.0)
    more("qkv_insert", "apply_q_norm", None, 1)
    more("qkv_insert", "q_dtype", torch.float16, None)
    for heads in (0, 129):
        more("qkv_insert", "q", torch.zeros(6, heads, 512, dtype=torch.bfloat16))
    more("qkv_insert", "kv", torch.randn(5, 512).bfloat16())
    more("qkv_insert", "positions", torch.arange(5))
    out = insert_arguments()["out"]
    more("qkv_insert", "out", out[:5], out[:, :5], out.bfloat16(), out.to("meta"), [1])
    more("qkv_insert", "backend", None, "triton")
    more("gather_upconvert", "kv_scale", *BAD_NUMBERS, 2.0)
    more("gather_upconvert", "out", torch.zeros(12, 512, dtype=torch.bfloat16), torch.zeros(12, 584, dtype=torch.bfloat16)[:, :577])
    more("gather_upconvert", "workspace_starts", torch.zeros(2, **int32), torch.zeros(5, **int32))
    more("gather_upconvert", "seq_starts", torch.zeros(2, **int32), torch.zeros(4, **int32))
    more("gather_upconvert", "target", 3, "sm_80", "sm_90a")
    more("convert_indices", "token_to_req", torch.zeros(5, **int32), torch.zeros(7, **int32))
    more("convert_indices", "prefill_request_id", torch.zeros(5, **int32), torch.zeros(7, **int32), None)
    more("convert_indices", "workspace_starts", None)
    more("convert_indices", "page_rows", 0, -1, 64.0, None, True)
    more("convert_indices", "block_stride_rows", 63, 0, "64", True)
    more("convert_indices", "pages", -1, 2.0, 2**31 // 100 + 1)
    more("convert_indices", "return_counts", None, 1)
    more("convert_indices", "return_counts", False, blamed="counts")
    more("convert_indices", "out", torch.zeros(5, 16, **int32), torch.zeros(6, 12, **int32))
    more("convert_indices", "counts", torch.zeros(5, **int32))
    more("decode", "step", None, 5)
    more("decode", "indices", None, 5)
    more("decode", "num_heads", 0, 9, 5.0, True)
    more("decode", "sinks", torch.zeros(6), torch.zeros(4))
    for scale in ("sm_scale", "q_scale", "kv_scale"):
        more("decode", scale, *BAD_NUMBERS)
    good = decode_arguments()
    more("decode", "q", good["q"][:5], torch.zeros(10, 5, 512).to(torch.float8_e4m3fn), good["q"].bfloat16())
    more("decode", "kv_cache", None, pool("bf16", 6, 16, strided=False))
    more("decode", "out", good["out"][:7], good["out"].float(), good["out"][:, :5], good["out"].to("meta"), 3)
    more("decode", "backend", None, "vllm")
    table, lengths = good["indices"].table, good["indices"].lengths
    for bad in (table[:7], table.long(), table[:, :130].contiguous(), torch.zeros(8, 200, **int32)[:, :160], None):
        more("decode", "indices", ck.CombinedIndices(bad, lengths), blamed="indices.table")  # type: ignore[arg-type]
    more("decode", "indices", ck.CombinedIndices(table, lengths[:5]), blamed="indices.lengths")
    return cases


def snapshot(a: Arguments) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Every CPU tensor among the arguments, index tables included, with a copy of its bytes."""
    values = [*a.values(), *(t for v in a.values() if hasattr(v, "lengths") for t in vars(v).values())]
    return [(v, v.clone()) for v in values if isinstance(v, torch.Tensor) and v.device.type == "cpu"]


def refuses(run: Any, a: Arguments, blamed: str) -> None:
    before = snapshot(a)
    with pytest.raises((ck.InvalidArgument, ck.UnsupportedRequest)) as caught:
        run()
    for tensor, copy in before:
        torch.testing.assert_close(tensor.float(), copy.float(), rtol=0, atol=0, equal_nan=True, msg="an argument was written")
    error = caught.value
    if isinstance(error, ck.InvalidArgument):
        assert error.argument == blamed
        assert str(error.got) in str(error) and str(error.expected) in str(error)
        assert str(error.got) != str(error.expected)


@pytest.mark.parametrize(("name", "change", "blamed"), sweep())
def test_wrong_arguments_on_the_cpu(name, change, blamed):
    call, make, _ = CALLS[name]
    a = make(**change)
    if change == {"kv_score": None}:
        a["ape"] = torch.randn(4, 1024)  # one of the pair without the other
    refuses(lambda: call(**a), a, blamed)


def behind_a_compiled_function(name: str, change: Arguments, blamed: str) -> bool:
    """Cases that get as far as the compiled function: target and device of the anchor choose the path before."""
    operation = ops._OPERATIONS.get(CALLS[name][0])
    anchored = operation and getattr(change.get(operation.anchor), "device", None)
    return operation is not None and blamed != "target" and str(anchored) != "meta"


def taken_by(blamed: str) -> tuple[Target, Arguments]:
    """A target whose compiled function takes the argument, and what else the call needs for that."""
    if blamed != "scratch":
        return Target.named("sm_100a"), {}
    rows = {"kv_score": torch.randn(7, 1024), "ape": torch.randn(128, 512), "state": torch.zeros(6, 4, 1024)}
    return Target.named("sm_120a"), {"ratio": 128, **rows, "kv_cache": pool("fp8_ds_mla", 6, 16, strided=True).clone(), "kv_scale": None}


@pytest.mark.parametrize(("name", "change", "blamed"), [c for c in sweep() if behind_a_compiled_function(*c.values)])
def test_wrong_arguments_behind_a_compiled_function(name, change, blamed, monkeypatch):
    """The compiled function's own refusal, whatever its wording, becomes the same typed error."""
    call, make, _ = CALLS[name]
    target, needed = taken_by(blamed)
    a = make(**{**needed, **change})

    def refusing(*arguments: Any) -> None:
        raise ValueError("Mismatched type on argument #0")

    monkeypatch.setattr(cache, "get", lambda spec: refusing)
    operation = ops._OPERATIONS[call]
    refuses(lambda: operation.launch(a, target), a, blamed)


@pytest.mark.parametrize("name", list(CALLS))
def test_the_unchanged_arguments_are_right(name):
    call, make, _ = CALLS[name]
    call(**make())


def test_per_tensor_scales_belong_to_full_fp8_rows():
    for name in ("bf16", "fp8_ds_mla"):
        a = compress_arguments(kv_cache=pool(name, 6, 16, strided=True).clone())
        with pytest.raises(ck.InvalidArgument, match="kv_scale"):
            ck.compress_store(**a)
        ck.compress_store(**{**a, "kv_scale": 1.0})
    case = decode_case("sm120", "fp8_ds_mla", 8)
    for scale in ("q_scale", "kv_scale"):
        with pytest.raises(ck.InvalidArgument, match=scale):
            case.run(**{scale: 2.0})


def test_the_product_of_the_scales_is_a_number_too():
    case = decode_case("sm100", "fp8", 8)
    with pytest.raises(ck.InvalidArgument, match=r"sm_scale \* q_scale \* kv_scale"):
        case.run(q_scale=1e30, kv_scale=1e30)


def test_formats_belong_to_families():
    with pytest.raises(ck.UnsupportedRequest, match="fp8_ds_mla"):
        ck.compress_store(**compress_arguments(target="sm120"))
    with pytest.raises(ck.UnsupportedRequest, match="KV format fp8"):
        ck.qkv_insert(**insert_arguments(target="sm120"))
    case = decode_case("sm100", "bf16", 8)
    with pytest.raises(ck.InvalidArgument, match="SegmentIndices"):
        case.run(target="sm120")
    packed = pool("fp8_ds_mla", 6, 16, strided=False)
    with pytest.raises(ck.InvalidArgument, match="swa_cache"):
        case.run(swa_cache=packed, kv_cache=packed)


# Value checks ----------------------------------------------------------------------------------------------------------


def put(value: torch.Tensor, at: Any, new: int) -> torch.Tensor:
    changed = value.clone()
    changed[at] = new
    return changed


VALUES = [
    ("compress_store", "state_slots", lambda v: put(v, 0, 1 << 40)),
    ("compress_store", "positions", lambda v: put(v, 0, -1)),
    ("compress_store", "positions", lambda v: put(v, 0, 64)),
    ("compress_store", "token_to_req", lambda v: put(v, 0, 2)),
    ("compress_store", "token_to_req", lambda v: put(v, 0, -1)),
    ("compress_store", "kv_slots", lambda v: put(v, 0, 96)),
    ("compress_store", "kv_slots", lambda v: put(v, 0, -2)),
    ("compress_store", "seq_lens", lambda v: put(v, 0, -1)),
    ("compress_store", "scratch", lambda v: put(v, 0, 1)),
    ("compress_store", "ape", lambda v: put(v, (3, 17), float("-inf"))),
    ("compress_store", "ape", lambda v: put(v, (0, 0), float("nan"))),
    ("sparse_indices", "positions", lambda v: put(v, 0, -1)),
    ("sparse_indices", "token_to_req", lambda v: put(v, 0, 2)),
    ("sparse_indices", "ids", lambda v: put(v, (0, 1), 20)),
    ("sparse_indices", "ids", lambda v: put(v, (0, 1), -2)),
    ("sparse_indices", "ids", lambda v: put(v, (1, 0), 1)),
    ("gather_upconvert", "workspace_starts", lambda v: put(v, 1, 13)),
    ("gather_upconvert", "workspace_starts", lambda v: put(v, 0, -1)),
    ("gather_upconvert", "workspace_starts", lambda v: put(v, 2, 4)),
    ("gather_upconvert", "seq_starts", lambda v: put(v, 0, -1)),
    ("convert_indices", "token_to_req", lambda v: put(v, 0, 3)),
    ("convert_indices", "token_to_req", lambda v: put(v, 0, -1)),
    ("convert_indices", "ids", lambda v: put(v, (0, 1), -2)),
    ("convert_indices", "ids", lambda v: put(v, (0, 1), 64 * 40)),
    ("convert_indices", "prefill_request_id", lambda v: put(v, 1, 4)),
    ("qkv_insert", "slots", lambda v: put(v, 0, 96)),
    ("qkv_insert", "positions", lambda v: put(v, 0, 64)),
    ("qkv_insert", "positions", lambda v: put(v, 0, -1)),
]


@pytest.mark.parametrize(("name", "argument", "change"), VALUES, ids=[f"{n}-{a}-{i}" for i, (n, a, _) in enumerate(VALUES)])
def test_values_are_checked_on_request(name, argument, change, monkeypatch):
    call, make, _ = CALLS[name]
    needed = {"save": ck.SavePolicy.EVERY_ROW} if argument == "state_slots" else taken_by(argument)[1]
    a = make(**needed)
    a[argument] = change(a[argument])
    monkeypatch.setenv("CUTE_KERNELS_VALIDATE", "1")
    call(**make(**needed))
    refuses(lambda: call(**a), a, argument)
    monkeypatch.delenv("CUTE_KERNELS_VALIDATE")
    call(**a)  # without the checks such rows are padding, or clipped: defined, never out of bounds


@pytest.mark.parametrize("family", ["sm100", "sm120"])
def test_decode_values_are_checked_on_request(family, monkeypatch):
    case = decode_case(family, "bf16" if family == "sm100" else "fp8_ds_mla", 8)
    monkeypatch.setenv("CUTE_KERNELS_VALIDATE", "1")
    case.run()
    indices = case.arguments["indices"]
    names = [("table", "lengths", 128)] if family == "sm100" else [("window", "window_lengths", 0), ("compressed", "compressed_lengths", 0)]
    for table, lengths, least in names:
        for bad in (least - 1, getattr(indices, table).shape[1] + 1):
            changed = {**vars(indices), lengths: put(getattr(indices, lengths), 0, bad)}
            with pytest.raises(ck.InvalidArgument, match=f"indices.{lengths}: got {bad}"):
                case.run(indices=type(indices)(**changed))
        changed = {**vars(indices), table: put(getattr(indices, table), (0, least), -1)}
        with pytest.raises(ck.InvalidArgument, match=f"indices.{table}: got -1"):
            case.run(indices=type(indices)(**changed))
    step = ck.StepMetadata.of([1, 1, 1, 3, 2], [300, 7, 129, 140, 3])
    step.seq_lens[4] = 1
    with pytest.raises(ck.InvalidArgument, match=r"step\.seq_lens: got 1 for request 4"):
        case.run(step=step)


def test_a_checked_decode_promises_nothing_about_the_next_one():
    """Checks are remembered by what they looked at, so anything that differs is looked at again."""
    a = decode_arguments()
    ck.decode(**a)
    ck.decode(**a)
    shifted = torch.zeros(a["q"].numel() + 64, dtype=a["q"].dtype)[8 : 8 + a["q"].numel()].view(a["q"].shape)
    for name, wrong in (("q", shifted), ("num_heads", 5.0), ("sm_scale", float("nan")), ("sinks", torch.zeros(4))):
        with pytest.raises(ck.InvalidArgument, match=name):
            ck.decode(**{**a, name: wrong})
    ck.decode(**a)
