"""`qkv_insert` on a GPU, both families' source: KV bytes exact, q within the bound of the data, nothing else written."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from cute_kernels import ops, reference
from cute_kernels.compile import cache
from cute_kernels.compile.spec import QkvInsertSpec
from cute_kernels.reference.quant import inverse_scale
from cute_kernels.target import Target
from tests.support.insert import InsertCase, check_insert, make_insert_case

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="executes both families' source on an SM90 GPU (H100, H200), and there is none",
)

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
FORMS = [("sm100", "bf16", BF16), ("sm100", "fp8", BF16), ("sm100", "fp8", E4M3), ("sm120", "fp8_ds_mla", BF16)]
forms = pytest.mark.parametrize(
    ("family", "kv_format", "q_dtype"), FORMS, ids=["sm100-bf16", "sm100-fp8-bf16", "sm100-fp8", "sm120-packed"]
)


def make(rows: int, kv_format: str, q_dtype: torch.dtype, **options: object) -> InsertCase:
    scales = {"kv_scale": 0.37 if kv_format == "fp8" else None, "q_scale": 1.7 if q_dtype is E4M3 else None}
    return make_insert_case(rows, kv_format=kv_format, q_dtype=q_dtype, **scales, **options)


def run(case: InsertCase, family: str, **more: object) -> torch.Tensor:
    """The public call on a case on the GPU; its storage is written."""
    return ops.qkv_insert(*case.args(), **case.kwargs(), **more, target=Target(family, "sm_90a"))


def poisoned(case: InsertCase) -> torch.Tensor:
    shape = (len(case.q), case.options["padded_heads"], 512)
    return torch.full(shape, torch.nan, device=case.q.device).to(case.options["q_dtype"])


def judge(case: InsertCase, family: str) -> None:
    """One call on a copy of the case, into a poisoned buffer."""
    after = case.to("cuda").clone()
    check_insert(case, after, run(after, family, out=poisoned(after)))


def launch(case: InsertCase, family: str, out: torch.Tensor, **fields: object) -> None:
    """The compiled kernel itself, for spec fields that the public call chooses by itself."""
    o = case.options
    q_dtype = "e4m3" if o["q_dtype"] is E4M3 else "bf16"
    target = Target(family, "sm_90a")
    spec = QkvInsertSpec(target, kv_format=case.pool.kv_format, q_dtype=q_dtype, apply_q_norm=o["apply_q_norm"], **fields)
    given = dict(zip(("q", "kv", "kv_cache", "slots", "positions", "cos_sin"), case.args(), strict=True))
    given |= {"out": out, "eps": o["eps"], "independent": 0}
    given |= {"inverse_q_scale": inverse_scale(o["q_scale"]), "inverse_kv_scale": inverse_scale(o["kv_scale"])}
    cache.get(spec)(*(given[name] for name in spec.argument_names))


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@forms
@pytest.mark.parametrize("heads", [1, 4, 5, 8, 12, 16, 32, 64, 96, 128])
def test_every_head_count(family: str, kv_format: str, q_dtype: torch.dtype, heads: int) -> None:
    padded = next(n for n in (8, 16, 32, 64, 128) if n >= heads)
    for rows, norm in ((7, True), (129, True), (300, False)):
        judge(make(rows, kv_format, q_dtype, heads=heads, padded_heads=padded, apply_q_norm=norm, seed=heads), family)
    judge(make(33, kv_format, q_dtype, heads=heads, padded_heads=heads), family)


@forms
@pytest.mark.parametrize("tokens", [0, 1, 3, 4, 5, 7, 127, 128, 129, 300, 2048])
def test_every_token_count(family: str, kv_format: str, q_dtype: torch.dtype, tokens: int) -> None:
    judge(make(tokens, kv_format, q_dtype, heads=4, padded_heads=8, short_slots=tokens // 7, stray_positions=True, seed=tokens), family)


@forms
def test_a_large_step_equals_the_reference(family: str, kv_format: str, q_dtype: torch.dtype) -> None:
    """Prefill-sized, judged by the reference on the GPU: KV bytes equal, q no further off than neighbouring values."""
    case = make(8192, kv_format, q_dtype, heads=64, padded_heads=64).to("cuda")
    want, got = case.clone(), case.clone()
    expected = reference.qkv_insert(*want.args(), **want.kwargs())
    out = run(got, family, out=poisoned(got))
    assert torch.equal(got.storage, want.storage)
    differ = out.view(torch.uint8) != expected.view(torch.uint8)
    assert differ.float().mean().item() < 2e-3
    step = 2**-7 if q_dtype is BF16 else 2**-2
    for begin in range(0, 8192, 1024):
        one, other = out[begin : begin + 1024].float(), expected[begin : begin + 1024].float()
        assert bool(((one - other).abs() <= step * torch.maximum(one.abs(), other.abs()) + 2**-9).all())


@forms
@pytest.mark.parametrize("page_rows", [1, 2, 5, 64, 256])
def test_page_rows_are_run_time_values(family: str, kv_format: str, q_dtype: torch.dtype, page_rows: int) -> None:
    if kv_format == "fp8_ds_mla" and page_rows * 584 % 16:
        page_rows += 1
    judge(make(150, kv_format, q_dtype, page_rows=page_rows, stray_positions=True), family)


@forms
def test_strided_q_and_kv(family: str, kv_format: str, q_dtype: torch.dtype) -> None:
    """Rows and heads apart from one another, and q as the leading heads of a wider tensor, NaN in between."""
    for rows in (9, 700):
        case = make(rows, kv_format, q_dtype, heads=12, padded_heads=16)
        after = case.to("cuda").clone()
        wide = torch.full((rows, 15, 520), torch.nan, dtype=BF16, device="cuda")
        wide[:, 3:, :512] = after.q
        kv = torch.full((rows, 1024), torch.nan, dtype=BF16, device="cuda")
        kv[:, 512:] = after.kv
        strided = dataclasses.replace(after, q=wide[:, 3:, :512], kv=kv[:, 512:])
        check_insert(case, after, run(strided, family))


@forms
@pytest.mark.parametrize("vector_bytes", [16, 32])
@pytest.mark.parametrize("norm", [True, False])
def test_vector_widths(family: str, kv_format: str, q_dtype: torch.dtype, vector_bytes: int, norm: bool) -> None:
    for rows, heads in ((9, 5), (300, 61)):
        case = make(rows, kv_format, q_dtype, heads=heads, padded_heads=64, apply_q_norm=norm, stray_positions=True)
        after = case.to("cuda").clone()
        out = poisoned(after)
        launch(after, family, out, vector_bytes=vector_bytes)
        check_insert(case, after, out)


@forms
@pytest.mark.parametrize("value_scale", [1e-30, 1e-5, 300.0, 3e4])
def test_awkward_scales(family: str, kv_format: str, q_dtype: torch.dtype, value_scale: float) -> None:
    judge(make(100, kv_format, q_dtype, value_scale=value_scale, eps=1e-12 if value_scale < 1e-9 else 1e-6), family)
    judge(make(100, kv_format, q_dtype, value_scale=value_scale, apply_q_norm=False), family)


@pytest.mark.parametrize(("family", "kv_format"), [("sm100", "bf16"), ("sm100", "fp8"), ("sm120", "fp8_ds_mla")])
@pytest.mark.parametrize("rows", [5, 700])
def test_in_place(family: str, kv_format: str, rows: int) -> None:
    case = make(rows, kv_format, BF16, heads=32, padded_heads=32)
    after = case.to("cuda").clone()
    out = run(after, family, out=after.q)
    assert out is after.q
    check_insert(case, after, out)


@forms
def test_repeated_runs_are_bit_equal(family: str, kv_format: str, q_dtype: torch.dtype) -> None:
    case = make(1500, kv_format, q_dtype, heads=16, padded_heads=16).to("cuda")
    first = case.clone()
    wanted = run(first, family)
    for _ in range(50):
        again = case.clone()
        assert same(run(again, family), wanted) and torch.equal(again.storage, first.storage)


@forms
def test_captured_graph_follows_its_inputs(family: str, kv_format: str, q_dtype: torch.dtype) -> None:
    """Captured for a full batch, replayed with fewer live rows: the rest keep garbage positions and have slot -1."""
    case = make(256, kv_format, q_dtype, heads=8, padded_heads=8, slotless=0.0).to("cuda")
    static, out = case.clone(), poisoned(case)
    run(static, family, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(static, family, out=out)
    for live in (256, 255, 130, 1, 0, 256):
        wanted = case.clone()
        wanted.slots[live:] = -1
        wanted.positions[live:] = 2**62
        for name in ("slots", "positions", "storage"):
            getattr(static, name).copy_(getattr(wanted, name))
        graph.replay()
        check_insert(wanted.to("cpu"), static, out)


@forms
def test_two_streams(family: str, kv_format: str, q_dtype: torch.dtype) -> None:
    cases = [make(n, kv_format, q_dtype, heads=16, padded_heads=16, seed=n).to("cuda") for n in (300, 1024)]
    wanted = [case.clone() for case in cases]
    results = [run(case, family) for case in wanted]
    got, outs = [case.clone() for case in cases], [poisoned(case) for case in cases]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    for _ in range(20):
        for case, out, stream in zip(got, outs, streams, strict=True):
            with torch.cuda.stream(stream):
                run(case, family, out=out)
    torch.cuda.synchronize()
    for case, out, want, result in zip(got, outs, wanted, results, strict=True):
        assert torch.equal(case.storage, want.storage) and same(out, result)


@forms
@pytest.mark.parametrize("pdl", [True, False])
def test_behind_a_slow_producer(family: str, kv_format: str, q_dtype: torch.dtype, pdl: bool) -> None:
    """Inputs arrive late, and the next kernel overwrites them at once: nothing is read early or late."""
    case = make(256, kv_format, q_dtype, heads=8, padded_heads=8).to("cuda")
    want, static = case.clone(), case.clone()
    wanted, out = run(want, family), poisoned(case)
    inputs = ("q", "kv", "slots", "positions", "cos_sin", "storage")
    poison = {name: torch.full_like(getattr(static, name).view(torch.uint8), 255).view(getattr(static, name).dtype) for name in inputs}
    launch(static, family, out, pdl=pdl)
    big = torch.ones(1 << 22, device="cuda")
    for _ in range(40):
        for name in inputs:
            getattr(static, name).copy_(poison[name])
        for _ in range(3):
            big.mul_(1.0)
        for name in inputs:
            getattr(static, name).copy_(getattr(case, name))
        launch(static, family, out, pdl=pdl)
        assert same(out.clone(), wanted) and torch.equal(static.storage.clone(), want.storage)


@forms
def test_beyond_two_gigabytes(family: str, kv_format: str, q_dtype: torch.dtype) -> None:
    """The last rows of q, of the result and of the pool lie more than 2^31 bytes and 2^31 elements away."""
    tokens, heads = 40_000, 128  # 2.6e9 elements
    small = make(6, kv_format, q_dtype, heads=heads, padded_heads=heads, slotless=0.0, page_rows=2)
    q = torch.empty((tokens, heads, 512), dtype=BF16, device="cuda")
    kv = torch.empty((tokens, 512), dtype=BF16, device="cuda")
    positions = torch.full((tokens,), -1, device="cuda")
    slots = torch.full((tokens,), -1, device="cuda")
    pool, stride = small.pool, small.pool.page_stride
    far_pages = 5 * 2**30 // stride
    storage = torch.empty(far_pages * stride + 64, dtype=torch.uint8, device="cuda")
    shift = far_pages - pool.pages
    first, end = shift * stride, shift * stride + len(small.storage) - 64
    storage[first:end] = small.storage[: end - first].cuda()
    after = small.to("cuda").clone()
    view = after.kv_cache
    size = view.element_size()
    far = storage.view(view.dtype).as_strided((far_pages, *view.shape[1:]), view.stride(), pool.base // size)
    q[-6:], kv[-6:], positions[-6:] = after.q, after.kv, after.positions
    slots[-6:] = torch.where(after.slots < pool.pages * pool.page_rows, after.slots + shift * pool.page_rows, far_pages * pool.page_rows)
    out = ops.qkv_insert(q, kv, far, slots, positions, after.cos_sin, **after.kwargs(), target=Target(family, "sm_90a"))
    after.storage[: end - first] = storage[first:end]
    assert not out[:-6].view(torch.uint8).any(), "rows without a position are zero"
    check_insert(small, after, out[-6:])
