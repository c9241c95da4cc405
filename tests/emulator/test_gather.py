"""Every `gather_upconvert` and `convert_indices` kernel of the support matrix, its SM100 and SM120 PTX executed: all bits exact."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from cute_kernels import ops
from cute_kernels.compile.matrix import support_matrix
from cute_kernels.compile.spec import ConvertIndicesSpec, GatherUpconvertSpec
from cute_kernels.target import Target
from tests.emulator.emulated import Coverage, emulated, sparse
from tests.support.gather import (
    ConvertCase,
    GatherCase,
    Guarded,
    check_converted,
    check_gathered,
    make_convert_case,
    make_gather_case,
    require_same_bits,
)

TARGETS = (Target("sm100", "sm_100a"), Target("sm120", "sm_120a"))
GATHERS = [s for t in TARGETS for s in support_matrix(t) if isinstance(s, GatherUpconvertSpec)]
CONVERTS = [s for t in TARGETS for s in support_matrix(t) if isinstance(s, ConvertIndicesSpec)]


def aligned(guarded: Guarded, alignment: int) -> Guarded:
    """The same buffer, poisoned anew, whose matrix starts at a multiple of `alignment`, and at one of 32 only if that is asked for."""
    size = guarded.whole.element_size()
    poison = int(guarded.whole[0]) if guarded.whole.numel() else 0
    storage = torch.full((guarded.whole.numel() + 64,), poison, dtype=guarded.whole.dtype)
    lead = guarded.out.storage_offset()
    lead += (-(storage.data_ptr() + lead * size) % 32 + (16 if alignment == 16 else 0)) // size
    view = storage.view(guarded.out.dtype).as_strided(guarded.out.shape, guarded.out.stride(), lead)
    return Guarded(storage, view)


def gather(case: GatherCase, spec: GatherUpconvertSpec) -> torch.Tensor:
    guarded = aligned(case.guarded_out(), spec.vector_bytes)
    ops.gather_upconvert(*case.args(guarded.out), **case.kwargs(), target=spec.target)
    guarded.check()
    check_gathered(case, guarded.out)
    return guarded.out


@pytest.mark.parametrize("spec", GATHERS, ids=str)
def test_every_gather(spec: GatherUpconvertSpec) -> None:
    coverage = Coverage()
    more = {"kv_format": spec.kv_format, "seq_starts": spec.seq_starts}
    with emulated(spec.target, on_result=coverage.record):
        gather(make_gather_case([5, 0, 0, 70, 1, 0], **more), spec)
        gather(make_gather_case([9, 40, 0, 3], page_rows=3, stale=True, lead=6, one_more_start=True, awkward=True, **more), spec)
        gather(make_gather_case([1], page_rows=2, strided=False, awkward=True, **more), spec)
        gather(make_gather_case([0, 0, 33], page_rows=1, awkward=True, **more), spec)
    coverage.require(str(spec))
    assert list(coverage.lines) == [str(spec)]


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7, 15, 16, 17, 33])
def test_every_number_of_rows(target: Target, rows: int) -> None:
    spec = GatherUpconvertSpec(target, 32, kv_format="fp8_inline")
    with emulated(target):
        for lengths in ([rows], [1] * rows, [0, rows // 2, 0, 0, rows - rows // 2]):
            gather(make_gather_case(lengths, kv_format=spec.kv_format, page_rows=4), spec)


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_starts_of_any_value_are_safe(target: Target) -> None:
    case = make_gather_case([4, 4, 4], kv_format="fp8_inline", page_rows=4)
    wild = [[9, -(2**31), 3], [2**31 - 1] * 3, [-(2**31)] * 3, [0, 2**31 - 1, -1]]
    with emulated(target):
        for starts in wild:
            for seq in (None, torch.tensor([2**31 - 1, -(2**31), 7], dtype=torch.int32)):
                changed = dataclasses.replace(case, workspace_starts=torch.tensor(starts, dtype=torch.int32), seq_starts=seq)
                guarded = changed.guarded_out()
                ops.gather_upconvert(*changed.args(guarded.out), **changed.kwargs(), target=target)
                guarded.check()


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("kv_format", ["fp8_inline", "fp8_ds_mla", "fp8"])
def test_pages_rows_and_tables_beyond_two_gigabytes(target: Target, kv_format: str) -> None:
    """Page stride, pitch of the workspace and pitch of the block table such that bytes lie past 2^31 and 2^32."""
    case = make_gather_case([3, 2, 6], kv_format=kv_format, page_rows=2)
    far = sparse(*case.cache.shape, strides=(2**30 + 1024 * case.cache.shape[2], *case.cache.stride()[1:]), dtype=case.cache.dtype)
    words, flat = far.view(torch.uint8), case.cache.view(torch.uint8)
    for page in range(case.cache.shape[0]):
        words[page].copy_(flat[page])
    table = sparse(*case.block_table.shape, strides=(2**29 + 1, 1), dtype=torch.int32).copy_(case.block_table)
    out = sparse(case.rows, case.columns, strides=(2**28 + 16, 1), dtype=torch.bfloat16)
    near = case.guarded_out().out
    with emulated(target):
        ops.gather_upconvert(*case.args(near), **case.kwargs(), target=target)
        ops.gather_upconvert(far, out, table, case.workspace_starts, **case.kwargs(), target=target)
    check_gathered(case, near)
    require_same_bits(kv_format, out, near)


def convert(case: ConvertCase, spec: ConvertIndicesSpec) -> None:
    out, counts = case.guarded()
    out = aligned(out, spec.vector_bytes)
    kwargs = {**case.kwargs(), "return_counts": spec.compact, "out": out.out, "counts": counts.out if spec.compact else None}
    ids = aligned(Guarded(torch.zeros(case.ids.stride(0) * (case.ids.shape[0] + 1), dtype=torch.int32), case.ids), spec.vector_bytes).out
    changed = dataclasses.replace(case, ids=ids.copy_(case.ids))
    result = ops.convert_indices(*changed.args(), **kwargs, target=spec.target)
    out.check()
    counts.check()
    check_converted(case, *(result if spec.compact else (result,)))


@pytest.mark.parametrize("spec", CONVERTS, ids=str)
def test_every_conversion(spec: ConvertIndicesSpec) -> None:
    coverage = Coverage()
    with emulated(spec.target, on_result=coverage.record):
        for k in (1, 7, 135, 263, 1031, 1159, 2311, 4103):  # the last ids in each of a lane's vectors, in the first batch and in later ones
            for garbage in (0.0, 0.2):
                for pages, span in ((True, None), (False, 100)):
                    options = {"stale": garbage > 0, "pages": pages, "span": span, "prefill": spec.prefill}
                    convert(make_convert_case(7, 3, k, garbage=garbage, **options), spec)
        convert(make_convert_case(40, 5, 24, page_rows=1, prefill=spec.prefill), spec)
    coverage.require(str(spec))
    assert list(coverage.lines) == [str(spec)]


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_ids_slots_and_tables_beyond_two_gigabytes(target: Target) -> None:
    case = make_convert_case(3, 3, 40)
    spec = ConvertIndicesSpec(target, 32)
    far = {n: sparse(*getattr(case, n).shape, strides=(2**29 + 8, 1), dtype=torch.int32) for n in ("ids", "block_table")}
    changed = dataclasses.replace(case, **{n: t.copy_(getattr(case, n)) for n, t in far.items()})
    out = sparse(3, 40, strides=(2**29 + 8, 1), dtype=torch.int32)
    with emulated(target):
        result = ops.convert_indices(*changed.args(), **changed.kwargs(), return_counts=spec.compact, out=out, target=target)
    check_converted(case, *result)


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("compact", [False, True])
def test_rows_without_an_id(target: Target, compact: bool) -> None:
    case = dataclasses.replace(make_convert_case(3, 3, 8), ids=torch.empty((3, 0), dtype=torch.int32))
    for given in (None, torch.empty((3, 0), dtype=torch.int32)):
        with emulated(target):
            result = ops.convert_indices(*case.args(), **case.kwargs(), return_counts=compact, out=given, target=target)
        slots, counts = result if compact else (result, None)
        assert slots.shape == (3, 0) and (counts is None or counts.tolist() == [0, 0, 0])


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_the_largest_ids(target: Target) -> None:
    ids = torch.tensor([[2**31 - 1, 2**31 - 2, 2**30, 0, -1]], dtype=torch.int32)
    arguments = (torch.empty(1, 8, dtype=torch.int32)[:, :5].copy_(ids), torch.zeros(1, dtype=torch.int32), torch.tensor([[1, 0]]).int())
    with emulated(target):
        slots = ops.convert_indices(*arguments, page_rows=2**30)
        compact, counts = ops.convert_indices(*arguments, page_rows=2**30, return_counts=True)
    assert slots.tolist() == ops.convert_indices(*arguments, page_rows=2**30).tolist() == [[-1, 2**30 - 2, 0, 2**30, -1]]
    assert compact.tolist() == [[2**30 - 2, 0, 2**30, -1, -1]] and counts.tolist() == [3]


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_the_largest_pages(target: Target) -> None:
    """What no page holds is left out, however far it would lie from one: entries of absent pages must not wrap round to valid ones."""
    for page_rows, span in ((2**30, 2**31 - 1), (2**30 - 1, 2**31 - 1), (1, 2**31 - 1), (3 << 20, 2**31 - 2)):
        # At -1 - 2**32 % page_rows `Divisor.quotient` may be one too large.
        absent = [-(2**31), -(2**31) + 1, -1, -2, -1 - 2**32 % page_rows, -page_rows, 2**31 - 1]
        ids = torch.tensor([[*absent, 0, page_rows, page_rows - 1, *absent[:5], page_rows // 2, *absent, -1]], dtype=torch.int32)
        sizes = {"page_rows": page_rows, "block_stride_rows": span, "pages": 1, "return_counts": True}
        first = [0, page_rows - 1, page_rows // 2]
        tables = [([0, page], first) for page in (-1, -2, -(2**31), 2**31 - 1)] + [([page, -1], []) for page in (-1, 1, 2**31 - 1)]
        for table, valid in tables:
            arguments = (ids, torch.zeros(1, dtype=torch.int32), torch.tensor([table], dtype=torch.int32))
            with emulated(target):
                slots, counts = ops.convert_indices(*arguments, **sizes)
            assert slots.tolist() == [valid + [-1] * (ids.shape[1] - len(valid))] and counts.tolist() == [len(valid)]
