"""decode, reference: against attention in float64 over rows read byte by byte; heads, sinks, empty rows, poison everywhere else."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

from cute_kernels.errors import InvalidArgument
from cute_kernels.indices import CombinedIndices
from cute_kernels.reference import attention, decode
from tests.support import PlainStep, Request, check_decode, make_decode_case, mix
from tests.support.pools import cache_view

FORMATS = ("bf16", "fp8", "fp8_ds_mla")


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("ratio", [1, 4, 128])
def test_formats_and_ratios(ratio: int, kv_format: str) -> None:
    scales = {"q_scale": 0.5, "kv_scale": 2.0} if kv_format == "fp8" else {}
    requests = [*mix(14, 4, ratio=4, seed=ratio), Request(0, 3), Request(126, 4)]
    case = make_decode_case(
        requests, kv_format=kv_format, ratio=ratio, heads=3, padded_heads=8, sinks=[-1.0, 0.0, 2.5], empty=0.15, **scales
    )
    for form in ("combined", "segments"):
        check_decode(case, decode(*case.args(form), **case.kwargs()))


@pytest.mark.parametrize("page_rows", [(2, 2), (256, 256), (64, 3)])
def test_page_sizes(page_rows: tuple[int, int]) -> None:
    for kv_format in FORMATS:
        case = make_decode_case(
            [Request(200, 2), Request(5, 2)], kv_format=kv_format, heads=2, window_rows=page_rows[0], compressed_rows=page_rows[1]
        )
        for form in ("combined", "segments"):
            check_decode(case, decode(*case.args(form), **case.kwargs()))


@pytest.mark.parametrize("heads", [4, 5, 8, 12, 16, 32, 64, 96, 128])
def test_head_counts_with_nan_in_the_padded_heads(heads: int) -> None:
    padded = next(h for h in (8, 16, 32, 64, 128) if h >= heads)
    sinks = torch.linspace(-3, 3, heads).tolist()
    case = make_decode_case([Request(30, 2)], heads=heads, padded_heads=padded, sinks=sinks, k=4)
    check_decode(case, decode(*case.args("combined"), **case.kwargs()))


def test_sinks_only_enlarge_the_denominator() -> None:
    case = make_decode_case([Request(40, 3)], heads=6, padded_heads=8, sinks=[-torch.inf, -1e4, 0.0, 1e4, 3e38, 1.0])
    out = decode(*case.args("segments"), **case.kwargs())
    check_decode(case, out)
    without = decode(*case.args("segments"), **{**case.kwargs(), "sinks": None})
    assert torch.equal(out[:, :2], without[:, :2])
    assert not out[:, 3:5].any()
    assert torch.isfinite(out).all()


def test_a_row_without_a_key_is_zero_whatever_block_zero_holds() -> None:
    for sinks in (None, [0.0, -torch.inf]):
        case = make_decode_case([Request(300, 4)], heads=2, empty=1.0, sinks=sinks)
        assert case.swa_cache[0].isnan().all()
        for form in ("combined", "segments"):
            out = decode(*case.args(form), **case.kwargs())
            assert tuple(out.shape) == (4, 2, 512) and not out.any()


def test_lanes_of_minus_one_are_masked_anywhere() -> None:
    """Shuffled lanes with -1 among them: the same rows are attended to, so the result is the same up to the order of summation."""
    case = make_decode_case([Request(500, 2)], heads=4, k=16)
    indices = case.segments
    assert indices.compressed is not None and indices.compressed_lengths is not None
    holes = torch.full((2, 32), -1, dtype=torch.int32)
    holes[:, 1::2] = indices.compressed
    spread = dataclasses.replace(indices, compressed=holes, compressed_lengths=torch.full((2,), 32, dtype=torch.int32))
    check_decode(case, decode(*case.args("segments")[:4], spread, **case.kwargs()))


def test_lanes_past_the_active_ranges_are_not_read() -> None:
    """Combined: window lanes past what seq_lens allows, and compressed lanes past the length, name poisoned rows."""
    case = make_decode_case([Request(20, 3)], heads=4, k=16)
    table = case.combined.table.clone()
    for t in range(3):
        table[t, 21 + t : 128] = 0
        table[t, int(case.combined.lengths[t]) :] = 0
    assert case.swa_cache[0].isnan().all()
    check_decode(case, decode(*case.args("combined")[:4], CombinedIndices(table, case.combined.lengths), **case.kwargs()))


def test_padding_rows_of_a_captured_graph() -> None:
    """Requests with seq_len 0 and a query length, and query rows past the metadata, stay zero; real rows do not notice them."""
    real = [Request(100, 2), Request(7, 1)]
    case = make_decode_case(real, heads=4)
    n = case.step.num_tokens
    want = decode(*case.args("combined"), **case.kwargs())
    pad = 5
    step = PlainStep(
        num_requests=4,
        num_tokens=n + 2,
        query_start_loc=torch.tensor([0, 2, 3, 4, 5], dtype=torch.int32),
        seq_lens=torch.tensor([102, 8, 0, 0], dtype=torch.int32),
        positions=torch.zeros(n + 2, dtype=torch.int64),
        token_to_req=torch.zeros(n + 2, dtype=torch.int32),
    )
    q = torch.cat([case.q, torch.full((pad, *case.q.shape[1:]), torch.nan, dtype=case.q.dtype)])
    table = torch.cat([case.combined.table, torch.zeros((pad, case.combined.table.shape[1]), dtype=torch.int32)])
    lengths = torch.cat([case.combined.lengths, torch.full((pad,), 128, dtype=torch.int32)])
    got = decode(q, case.swa_cache, case.kv_cache, step, CombinedIndices(table, lengths), **case.kwargs())
    assert torch.equal(got[:n], want) and not got[n:].any()


def test_results_do_not_depend_on_the_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_decode_case(mix(12, 3, ratio=4), heads=4)
    want = decode(*case.args("segments"), **case.kwargs())
    monkeypatch.setattr(attention, "_CHUNK_BYTES", 1)
    assert torch.equal(decode(*case.args("segments"), **case.kwargs()), want)


def test_the_caller_s_buffer_and_an_empty_step() -> None:
    case = make_decode_case([Request(9, 2)], heads=3, padded_heads=8)
    out = torch.full((2, 8, 512), 7.0, dtype=torch.bfloat16)
    got = decode(*case.args("combined"), **case.kwargs(), out=out)
    assert got.data_ptr() == out.data_ptr() and got.shape == (2, 3, 512)
    check_decode(case, got)
    empty = make_decode_case([Request(9, 0)], heads=3)
    assert decode(*empty.args("combined"), **empty.kwargs()).shape == (0, 3, 512)


def test_a_window_only_layer_takes_none_or_the_window_pool() -> None:
    case = make_decode_case([Request(50, 2)], ratio=1, heads=4)
    for form in ("combined", "segments"):
        q, swa, none, step, indices = case.args(form)
        assert none is None
        assert torch.equal(decode(q, swa, None, step, indices, **case.kwargs()), decode(q, swa, swa, step, indices, **case.kwargs()))


@pytest.mark.parametrize("entry", [10**6, 64])
def test_a_row_outside_the_pool_is_a_typed_error(entry: int) -> None:
    case = make_decode_case([Request(50, 2)], heads=4)
    table = case.combined.table.clone()
    table[1, 3] = entry  # past the pool; or in the gap between two pages
    with pytest.raises(InvalidArgument, match="window indices"):
        decode(*case.args("combined")[:4], CombinedIndices(table, case.combined.lengths), **case.kwargs())


def test_keys_come_from_the_pages_the_view_names() -> None:
    """The same bytes 64 further along, under a view that starts 64 further along, are the same pool."""
    case = make_decode_case([Request(50, 2)], heads=4, ratio=1)
    pool = copy.copy(case.swa_pool)
    pool.base += 64
    moved = decode(case.q, cache_view(pool, case.swa_storage.roll(64)), None, case.step, case.combined, **case.kwargs())
    assert torch.equal(moved, decode(*case.args("combined"), **case.kwargs()))
