"""qkv_insert, reference: KV bytes exact, q within its error interval, nothing written that is not owned."""

from __future__ import annotations

import pytest
import torch

from cute_kernels.reference import qkv_insert
from tests.support import check_insert, make_insert_case

E4M3 = torch.float8_e4m3fn


@pytest.mark.parametrize("kv_format", ["bf16", "fp8", "fp8_ds_mla"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"heads": 5, "padded_heads": 8},
        {"heads": 128, "padded_heads": 128},
        {"apply_q_norm": False},
        {"short_slots": 11},
        {"page_rows": 2},
        {"slotless": 1.0},
        {"value_scale": 1e-4},
        {"value_scale": 3e4, "apply_q_norm": False},
        {"q_dtype": E4M3, "q_scale": 0.3},
        {"q_dtype": E4M3, "heads": 5, "padded_heads": 16, "apply_q_norm": False, "value_scale": 300.0},
    ],
    ids=lambda o: ",".join(f"{k}={v}" for k, v in o.items()),
)
def test_rows(kv_format: str, options: dict[str, object]) -> None:
    for rows in (0, 1, 7, 70):
        if options.get("short_slots", 0) > rows:
            continue
        case = make_insert_case(rows, kv_format=kv_format, kv_scale=0.7 if kv_format == "fp8" else None, seed=rows, **options)
        before = case.clone()
        q_out = qkv_insert(*case.args(), **case.kwargs())
        check_insert(before, case, q_out)


def test_the_caller_s_buffer_is_filled_pad_included() -> None:
    case = make_insert_case(9, heads=5, padded_heads=8, q_dtype=E4M3)
    before = case.clone()
    out = torch.full((9, 8, 512), 0x7F, dtype=torch.uint8).view(E4M3)
    assert qkv_insert(*case.args(), **case.kwargs(), out=out) is out
    check_insert(before, case, out)


def test_a_position_outside_the_table_stores_nothing() -> None:
    case = make_insert_case(4, slotless=0.0)
    case.slots[2] = int(case.slots[3]) ^ 1
    case.positions[:] = torch.tensor([3, -1, len(case.cos_sin), 2**40])
    before = case.storage.clone()
    q_out = qkv_insert(*case.args(), **case.kwargs())
    assert q_out[0].float().abs().max() > 0 and not q_out[1:].float().any()
    changed = (case.storage != before).nonzero().flatten()
    first, count = case.pool.spans(int(case.slots[0]))[0]
    assert len(changed) and first <= int(changed[0]) and int(changed[-1]) < first + count


def test_nan_stays_in_its_row_and_is_spelled_7f() -> None:
    case = make_insert_case(3, kv_format="fp8_ds_mla", slotless=0.0)
    case.kv[1, 200] = torch.nan
    qkv_insert(*case.args(), **case.kwargs())
    raw = case.pool.raw(case.storage.numpy(), int(case.slots[1]))
    assert raw[200] == 0x7F and (raw[:448] == 0x7F).sum() == 1
    for t in (0, 2):
        raw = case.pool.raw(case.storage.numpy(), int(case.slots[t]))
        assert not ((raw[:448] & 0x7F) == 0x7F).any()
