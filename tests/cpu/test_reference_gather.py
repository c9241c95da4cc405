"""The reference of `gather_upconvert` and `convert_indices` against byte addresses and rules spelled out in numpy."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from cute_kernels import InvalidArgument, reference
from tests.support.bytes import E4M3
from tests.support.gather import FORMATS, GatherCase, check_converted, check_gathered, gathered, make_convert_case, make_gather_case

formats = pytest.mark.parametrize("kv_format", FORMATS)


def gather(case: GatherCase) -> None:
    guarded = case.guarded_out()
    result = reference.gather_upconvert(*case.args(guarded.out), **case.kwargs())
    assert result is guarded.out
    guarded.check()
    check_gathered(case, result)


@formats
@pytest.mark.parametrize("page_rows", [1, 2, 3, 64])
@pytest.mark.parametrize("seq_starts", [True, False])
def test_rows_of_requests(kv_format: str, page_rows: int, seq_starts: bool) -> None:
    gather(make_gather_case([5, 0, 0, 70, 1, 0], kv_format=kv_format, page_rows=page_rows, seq_starts=seq_starts))


@formats
def test_stale_tables_and_rows_of_nobody(kv_format: str) -> None:
    case = make_gather_case([9, 0, 40, 3], kv_format=kv_format, page_rows=4, stale=True, lead=3, one_more_start=True, awkward=True)
    wanted = gathered(case)
    assert (wanted[3:6] == 0).all() and (wanted[:3] == 0x5A5A).all() and (wanted[10:] == 0).all(axis=1).any()
    gather(case)


@formats
def test_only_zero_length_requests_and_none(kv_format: str) -> None:
    for lengths in ([0], [0, 0], []):
        gather(make_gather_case(lengths, kv_format=kv_format))
        gather(
            make_gather_case(lengths, kv_format=kv_format, lead=2) if not lengths else make_gather_case([*lengths, 2], kv_format=kv_format)
        )


@formats
@pytest.mark.parametrize("awkward", [True, False])
def test_values_of_any_bits(kv_format: str, awkward: bool) -> None:
    gather(make_gather_case([300], kv_format=kv_format, awkward=awkward, strided=False))


@formats
def test_float64_error_is_that_of_one_bf16_rounding(kv_format: str) -> None:
    """Against code times scale in float64, written without a fp32 product: half a bf16 step, and the little a double rounding adds."""
    case = make_gather_case([200], kv_format=kv_format)
    out = case.guarded_out().out
    reference.gather_upconvert(*case.args(out), **case.kwargs())
    assert case.kv_format != "fp8" or case.kv_scale == 0.37
    storage = torch.empty(0, dtype=torch.uint8).set_(case.cache.untyped_storage()).numpy()
    position, page_rows = int(case.seq_starts[0]), case.cache.shape[1]
    for row in range(0, 200, 7):
        page, offset = int(case.block_table[0, (position + row) // page_rows]), (position + row) % page_rows
        start = case.base + page * case.page_stride
        if kv_format == "fp8_inline":
            raw = storage[start + 656 * offset :][:656]
            exact = E4M3[raw[:512]] * np.repeat(raw[512:528].copy().view(np.float32).astype(np.float64), 128)
        elif kv_format == "fp8":
            exact = E4M3[storage[start + 512 * offset :][:512]] * 0.37
        else:
            scales = 2.0 ** (storage[start + 576 * page_rows + 8 * offset :][:7].astype(np.float64) - 127)
            exact = E4M3[storage[start + 576 * offset :][:448]] * np.repeat(scales, 64)
        got = out[row, : len(exact)].double().numpy()
        assert (np.abs(got - exact) <= np.abs(exact) * 2.0**-8 * (1 + 2.0**-14)).all()


def test_starts_beyond_the_workspace_are_safe() -> None:
    case = make_gather_case([4, 4, 4], kv_format="fp8_inline", page_rows=4)
    for starts in ([0, 5, 100], [-7, 3, 2**31 - 1], [50, 60, 70]):
        gather(dataclasses.replace(case, workspace_starts=torch.tensor(starts, dtype=torch.int32), wanted={}))
    wild = dataclasses.replace(case, workspace_starts=torch.tensor([9, -(2**31), 3], dtype=torch.int32))
    guarded = wild.guarded_out()
    reference.gather_upconvert(*wild.args(guarded.out), **wild.kwargs())
    guarded.check()


@pytest.mark.parametrize("counts", [True, False])
@pytest.mark.parametrize("prefill", [True, False])
@pytest.mark.parametrize("pages", [True, False])
@pytest.mark.parametrize(("page_rows", "span"), [(64, None), (64, 100), (1, 3), (2, 2)])
def test_convert(page_rows: int, span: int | None, pages: bool, prefill: bool, counts: bool) -> None:
    for rows, k, garbage in ((40, 37, 0.2), (6, 128, 0.0), (1, 1, 0.5)):
        case = make_convert_case(
            rows, 5, k, page_rows=page_rows, span=span, pages=pages, prefill=prefill, garbage=garbage, stale=garbage > 0
        )
        result = reference.convert_indices(*case.args(), **case.kwargs(), return_counts=counts)
        check_converted(case, *(result if counts else (result,)))


def test_convert_into_buffers() -> None:
    case = make_convert_case(20, 3, 50, stale=True)
    out, counts = case.guarded()
    result = reference.convert_indices(*case.args(), **case.kwargs(), return_counts=True, out=out.out, counts=counts.out)
    assert result[0] is out.out and result[1] is counts.out
    out.check()
    counts.check()
    check_converted(case, *result)


def test_slots_end_below_two_to_the_31() -> None:
    table = torch.tensor([[2**31 // 64 - 1, 2**31 // 64]], dtype=torch.int32)
    ids = torch.tensor([[63, 64]], dtype=torch.int32)
    got = reference.convert_indices(ids, torch.zeros(1, dtype=torch.int32), table, page_rows=64)
    assert got.tolist() == [[2**31 - 1, -1]]


@pytest.mark.parametrize("more", [-1, 1])
def test_a_request_map_of_another_length_is_refused(more: int) -> None:
    case = make_convert_case(5, 3, 8)
    with pytest.raises(InvalidArgument, match=rf"token_to_req: got {5 + more} entries, expected 5, one for each row of ids"):
        reference.convert_indices(case.ids, torch.zeros(5 + more, dtype=torch.int32), case.block_table, page_rows=64)
