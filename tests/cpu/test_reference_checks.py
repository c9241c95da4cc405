"""The comparisons themselves: each small fault, planted in a correct result, is found."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from cute_kernels.indices import IdSource
from cute_kernels.reference import compress_store, decode, qkv_insert, sparse_indices
from cute_kernels.save_policy import SavePolicy
from tests.support import (
    CompressCase,
    Request,
    check_compress,
    check_decode,
    check_indices,
    check_insert,
    make_compress_case,
    make_decode_case,
    make_index_case,
    make_insert_case,
)

# A whole prompt, a decode row that closes a window, speculative rows; the last request ends in mid-group.
ROWS = {4: [Request(0, 9), Request(11, 1), Request(22, 3)], 128: [Request(0, 129), Request(255, 1), Request(380, 7)]}


def compressed(ratio: int, kv_format: str, **changes: object) -> tuple[CompressCase, CompressCase]:
    """A case and what a call makes of it with some of its tensors or arguments replaced."""
    case = make_compress_case(ROWS[ratio], ratio=ratio, kv_format=kv_format, save=SavePolicy(rollback=1), padding=2)
    before = case.clone()
    wrong = dataclasses.replace(case, **{k: v(getattr(case, k)) if callable(v) else v for k, v in changes.items()})
    compress_store(*wrong.args(), **wrong.kwargs())
    return before, dataclasses.replace(before, state_storage=wrong.state_storage, kv_storage=wrong.kv_storage)


def closing_slot(case: CompressCase) -> int:
    return next(int(s) for p, s in zip(case.positions, case.kv_slots, strict=False) if s >= 0 and (p + 1) % case.ratio == 0)


def flip(byte: int, by: int) -> Callable[[CompressCase], None]:
    """Change byte number `byte` of a row that is owned."""

    def change(case: CompressCase) -> None:
        spans = case.pool.spans(closing_slot(case))
        addresses = [a + i for a, n in spans for i in range(n)]
        case.kv_storage[addresses[byte]] += by

    return change


def swap_two(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[[0, 1]] = x[[1, 0]]
    return x


@pytest.mark.parametrize("kv_format", ["bf16", "fp8", "fp8_ds_mla"])
@pytest.mark.parametrize("ratio", [4, 128])
def test_wrong_arithmetic_is_found(ratio: int, kv_format: str) -> None:
    check_compress(*compressed(ratio, kv_format))
    for changes in (
        {"cos_sin": lambda x: x.roll(1, 0)},
        {"ape": lambda x: x.roll(1, 0)},
        {"norm_weight": lambda x: x.roll(64)},
        {"eps": 0.3},
        {"kv_score": lambda x: x.roll(1, 0)},
        {"save": SavePolicy(rollback=2)},
        {"save": SavePolicy.EVERY_ROW},
        {"save": SavePolicy(rollback=1, prefix_stride=4)},
        *([{"kv_scale": 1.5}] if kv_format == "fp8" else []),
    ):
        with pytest.raises(AssertionError):
            check_compress(*compressed(ratio, kv_format, **changes))


@pytest.mark.parametrize(
    ("kv_format", "byte", "by"),
    [("bf16", 0, 2), ("bf16", 1023, 1), ("fp8", 511, 2), ("fp8_ds_mla", 0, 2), ("fp8_ds_mla", 576, 1), ("fp8_ds_mla", 583, 1)],
)
def test_a_changed_byte_is_found(kv_format: str, byte: int, by: int) -> None:
    before, after = compressed(4, kv_format)
    flip(byte, by)(after)
    with pytest.raises(AssertionError):
        check_compress(before, after)


def test_a_byte_outside_the_rows_and_a_nan_are_found() -> None:
    before, after = compressed(4, "fp8_ds_mla")
    footer = before.pool.spans(before.pool.pages * before.pool.page_rows - 1)[1][0]  # of a row in a page nobody owns
    for at in (0, len(after.kv_storage) - 1, footer):
        changed = after.clone()
        changed.kv_storage[at] += 1
        with pytest.raises(AssertionError, match="outside the rows written"):
            check_compress(before, changed)
    changed = after.clone()
    changed.state_storage[-1] = 0.0
    with pytest.raises(AssertionError, match="state pool"):
        check_compress(before, changed)
    before, after = compressed(4, "bf16")
    slot = closing_slot(before)
    after.kv_cache[slot // before.pool.page_rows, slot % before.pool.page_rows, 7] = torch.nan
    with pytest.raises(AssertionError):
        check_compress(before, after)


@pytest.mark.parametrize("form", ["combined", "segments"])
def test_wrong_indices_are_found(form: str) -> None:
    case = make_index_case([Request(600, 3)], source=IdSource.LOCAL, k=16, padding=2)
    for field in vars(sparse_indices(*case.args(), **case.kwargs(), form=form)):
        result = sparse_indices(*case.args(), **case.kwargs(), form=form)
        check_indices(case, result)
        getattr(result, field).view(-1)[-1] += 1  # a padding row
        with pytest.raises(AssertionError):
            check_indices(case, result)
    guarded = case.guarded_out(form)
    next(iter(vars(guarded.out).values())).view(-1).as_strided((1,), (1,), 31)[0] = 0
    with pytest.raises(AssertionError):
        guarded.check()


def test_wrong_attention_is_found() -> None:
    case = make_decode_case([Request(300, 3)], heads=4, sinks=[0.0, 1.0, 2.0, 3.0], k=8)
    check_decode(case, decode(*case.args("segments"), **case.kwargs()))
    sinks = case.sinks
    assert sinks is not None and case.segments.compressed is not None
    wrong = torch.where(
        case.segments.compressed == case.segments.compressed[0, 0], case.segments.compressed[0, 1], case.segments.compressed
    )
    for change in ({"sinks": None}, {"sinks": sinks.roll(1)}, {"sm_scale": 0.05}, {"kv_scale": 1.02}):
        with pytest.raises(AssertionError):
            check_decode(case, decode(*case.args("segments"), **{**case.kwargs(), **change}))
    with pytest.raises(AssertionError):
        check_decode(case, decode(*case.args("segments")[:4], dataclasses.replace(case.segments, compressed=wrong), **case.kwargs()))


def test_wrong_inserts_are_found() -> None:
    for change in ({"eps": 0.1}, {"apply_q_norm": False}, {"kv_scale": 1.01}):
        case = make_insert_case(5, kv_format="fp8")
        before = case.clone()
        with pytest.raises(AssertionError):
            check_insert(before, case, qkv_insert(*case.args(), **{**case.kwargs(), **change}))
    case = make_insert_case(5, kv_format="fp8_ds_mla")
    before = case.clone()
    q_out = qkv_insert(*case.args(), **case.kwargs())
    check_insert(before, case, q_out)
    wrong = dataclasses.replace(before.clone(), cos_sin=swap_two(before.cos_sin), positions=before.positions * 0)
    wrong_out = qkv_insert(*wrong.args(), **wrong.kwargs())
    with pytest.raises(AssertionError):
        check_insert(before, case, wrong_out)
    with pytest.raises(AssertionError):
        check_insert(before, wrong, q_out)
    case.storage[0] += 1
    with pytest.raises(AssertionError):
        check_insert(before, case, q_out)
