"""Every `qkv_insert` kernel of the support matrix, its SM100 and SM120 PTX executed: KV bytes exact, q within its interval."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from cute_kernels import ops, reference
from cute_kernels.compile.matrix import support_matrix
from cute_kernels.compile.spec import QkvInsertSpec
from cute_kernels.device.memory import EVICT_FIRST, EVICT_NORMAL
from cute_kernels.device.qkv_insert import KV_ROWS, PAIRS_FROM, STREAMED
from cute_kernels.target import Target
from ptx_emulator import Result
from tests.emulator.emulated import Coverage, at_alignment, emulated, sparse
from tests.support.insert import InsertCase, check_insert, make_insert_case

TARGETS = (Target("sm100", "sm_100a"), Target("sm120", "sm_120a"))
SPECS = [s for t in TARGETS for s in support_matrix(t) if isinstance(s, QkvInsertSpec)]
E4M3 = torch.float8_e4m3fn


def make(spec: QkvInsertSpec, rows: int, **options: object) -> InsertCase:
    """A case of a spec's formats, all its tensors aligned to the spec's access width."""
    scales = {"kv_scale": 0.7 if spec.kv_format == "fp8" else None, "q_scale": 0.3 if spec.q_dtype == "e4m3" else None}
    q_dtype = E4M3 if spec.q_dtype == "e4m3" else torch.bfloat16
    options = {"apply_q_norm": spec.apply_q_norm, "kv_format": spec.kv_format, "q_dtype": q_dtype, **scales, **options}
    case = make_insert_case(rows, **options)
    moved = {name: at_alignment(getattr(case, name), spec.vector_bytes) for name in ("q", "kv", "cos_sin", "storage")}
    return dataclasses.replace(case, **moved)


def with_gaps(x: torch.Tensor, alignment: int) -> torch.Tensor:
    """The same values, rows (and heads) further apart than they are long."""
    gap = 32 // x.element_size()
    shape = (x.shape[0], *(n + 1 for n in x.shape[1:-1]), x.shape[-1] + gap)
    wide = at_alignment(torch.full(shape, torch.nan, dtype=x.dtype), alignment)
    view = wide[:, : x.shape[1], : x.shape[2]] if x.dim() == 3 else wide[:, : x.shape[1]]
    return view.copy_(x)


def launch(case: InsertCase, spec: QkvInsertSpec) -> torch.Tensor:
    """The public call into a poisoned buffer, aligned so that it picks `spec`."""
    shape, dtype = (len(case.q), case.options["padded_heads"], 512), case.options["q_dtype"]
    out = at_alignment(torch.full(shape, torch.nan).to(dtype), spec.vector_bytes)
    return ops.qkv_insert(*case.args(), **case.kwargs(), out=out, target=spec.target)


def check(spec: QkvInsertSpec, case: InsertCase) -> None:
    before = dataclasses.replace(case, storage=case.storage.clone())
    check_insert(before, case, launch(case, spec))


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_every_spec(spec: QkvInsertSpec) -> None:
    coverage = Coverage()
    with emulated(spec.target, on_result=coverage.record):
        check(spec, make(spec, 9, heads=5, padded_heads=8, page_rows=2, stray_positions=True))
        check(spec, make(spec, 4, heads=61, padded_heads=64, short_slots=1))
        check(spec, make(spec, 2, heads=128, padded_heads=128, stray_positions=True, page_rows=3))
        check(spec, make(spec, 5, heads=1, padded_heads=4, value_scale=1e-5, slotless=0.0))
        case = make(spec, 3, heads=62, padded_heads=62, value_scale=300.0, slotless=0.0)
        check(spec, dataclasses.replace(case, q=with_gaps(case.q, spec.vector_bytes), kv=with_gaps(case.kv, spec.vector_bytes)))
        if KV_ROWS[spec.vector_bytes // 2] > 1:  # an odd number of rows, two a block
            check(spec, make(spec, PAIRS_FROM + 1, heads=1, padded_heads=1, short_slots=2, stray_positions=True))
    coverage.require(str(spec))


@pytest.mark.parametrize("spec", [s for s in SPECS if s.q_dtype == "bf16"], ids=str)
@pytest.mark.parametrize("rows", [1, 5])
def test_in_place(spec: QkvInsertSpec, rows: int) -> None:
    """q itself is the result where it needs no padding."""
    case = make(spec, rows, heads=32, padded_heads=32)
    before = case.clone()
    with emulated(spec.target, prepare=lambda name, memory, arguments: None):
        out = ops.qkv_insert(*case.args(), **case.kwargs(), out=case.q, target=spec.target)
    assert out is case.q
    check_insert(before, case, out)


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 3, 4, 5, 7, 33, 128])
def test_every_token_count(target: Target, tokens: int) -> None:
    spec = next(s for s in SPECS if s.target == target and s.vector_bytes == 32 and s.apply_q_norm)
    with emulated(target):
        for heads, padded in ((1, 2), (3, 4)):
            check(spec, make(spec, tokens, heads=heads, padded_heads=padded, seed=tokens))


@pytest.mark.parametrize("spec", [s for s in SPECS if s.vector_bytes == 32 and s.apply_q_norm], ids=str)
@pytest.mark.parametrize(("tokens", "padded", "first"), [(65, 63, False), (32, 128, True), (128, 128, True), (145, 113, False)])
def test_lines_of_q_leave_the_l2_first_in_steps_of_middle_size(spec: QkvInsertSpec, tokens: int, padded: int, first: bool) -> None:
    """And where BF16 is written: in others they do as usual."""
    assert first == (STREAMED[0] <= tokens * padded <= STREAMED[1])
    seen: list[Result] = []
    with emulated(spec.target, on_result=seen.append, check_races=False):
        launch(make(spec, tokens, heads=1, padded_heads=padded), spec)
    policy = None if spec.q_dtype == "e4m3" else EVICT_FIRST if first else EVICT_NORMAL
    assert [set(result.policies) for result in seen] == [{policy}]


@pytest.mark.parametrize("spec", [s for s in SPECS if s.vector_bytes == 32 and s.apply_q_norm], ids=str)
def test_awkward_kv_rows(spec: QkvInsertSpec) -> None:
    """Zero groups, group maxima at powers of two times 448 and beside them, the smallest and largest values, -0, infinities, NaN."""
    case = make(spec, 24, heads=1, padded_heads=1, slotless=0.0)
    case.slots[2] = int(case.slots[3]) ^ 1 if int(case.slots[3]) ^ 1 not in case.slots.tolist() else -1
    values = [0.0, -0.0, 2.0**-133, 1e-38, 1e-4, 447.0, 448.0, 450.0, 464.0, 466.0, 3.3895e38, float("inf"), float("-inf"), float("nan")]
    for t in range(24):
        row = case.kv[t]
        if t < len(values):
            row[64 * (t % 7) : 64 * (t % 7) + 64] = 0
            row[64 * (t % 7) + 5] = values[t]
            row[450 + t] = values[t]
        else:
            row.mul_(2.0 ** (5 * (t - 18)))
    want = case.clone()
    reference.qkv_insert(*want.args(), **want.kwargs())
    with emulated(spec.target):
        launch(case, spec)
    if spec.kv_format == "bf16":  # NaN has many spellings there
        got, expected = (c.storage.view(torch.bfloat16).float() for c in (case, want))
        assert torch.equal(got.isnan(), expected.isnan())
        assert torch.equal(got.nan_to_num(), expected.nan_to_num())
    else:
        differ = (case.storage != want.storage).nonzero().flatten().tolist()
        nan = want.storage.view(torch.bfloat16).isnan() & case.storage.view(torch.bfloat16).isnan()
        assert all(spec.kv_format == "fp8_ds_mla" and nan[i // 2] for i in differ), f"bytes differ, the first at {differ[:5]}"


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_rows_and_pages_beyond_two_gigabytes(target: Target) -> None:
    """Strides of q, kv and pages that take the last rows past 2^31 bytes and 2^31 elements."""
    spec = next(s for s in SPECS if s.target == target and s.vector_bytes == 16 and s.apply_q_norm)
    case = make(spec, 5, heads=3, padded_heads=4, slotless=0.0, page_rows=2)
    before = case.clone()
    q = sparse(5, 3, 512, strides=(2**30 + 512, 2**28, 1), dtype=torch.bfloat16).copy_(case.q)
    kv = sparse(5, 512, strides=(2**30 + 512, 1), dtype=torch.bfloat16).copy_(case.kv)
    cache = case.kv_cache
    stride = 584 * 2**21 if cache.dtype == torch.uint8 else 2**31
    pages = sparse(*cache.shape, strides=(stride, cache.stride(1), 1), dtype=cache.dtype)
    pages.copy_(cache)
    with emulated(target):
        out = ops.qkv_insert(q, kv, pages, *case.args()[3:], **case.kwargs(), target=target)
    if cache.dtype == torch.uint8:  # a page's bytes, whose last rows are footers
        size = cache.shape[1] * 584
        for page in range(len(cache)):
            at = case.pool.base + page * case.pool.page_stride
            case.storage[at : at + size] = pages.as_strided((size,), (1,), pages.storage_offset() + page * stride)
    else:
        cache.copy_(pages)
    check_insert(before, case, out)
