"""The quantiser and the bytes of a packed row, exhaustively over bf16 where that is possible. The oracle is tests/support/bytes.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cute_kernels.reference.quant import (
    encode_e4m3,
    inverse_scale,
    packed_views,
    quantize_groups,
    read_rows,
    round_bf16,
    scale_bytes,
    write_rows,
)
from tests.support import bytes as definition
from tests.support.pools import cache_view, layout, owned_bytes, storage_bytes

EVERY_BF16 = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
FINITE = EVERY_BF16[EVERY_BF16.isfinite()]


def test_e4m3_codes_of_every_finite_bf16() -> None:
    assert np.array_equal(encode_e4m3(FINITE).view(torch.uint8).numpy(), definition.encode_e4m3(FINITE.double().numpy()))


def test_e4m3_ties_go_to_the_even_code_and_the_top_saturates() -> None:
    grid = definition.E4M3[:127]
    middles = torch.from_numpy((grid[1:] + grid[:-1]) / 2).float()
    for x in (middles, torch.nextafter(middles, torch.tensor(1e9)), torch.nextafter(middles, torch.tensor(0.0))):
        assert np.array_equal(encode_e4m3(x).view(torch.uint8).numpy(), definition.encode_e4m3(x.double().numpy()))
    x = torch.tensor([448.0, 464.0, 465.0, 1e30, torch.inf, -464.0, -465.0, -torch.inf, torch.nan, -torch.nan, 0.0, -0.0])
    assert encode_e4m3(x).view(torch.uint8).tolist() == [0x7E] * 5 + [0xFE] * 3 + [0x7F] * 2 + [0x00, 0x80]


@pytest.mark.parametrize(("clamp", "smallest"), [("scale", 114), ("amax", 105)])
def test_scale_byte_of_every_amax(clamp: str, smallest: int) -> None:
    amax = FINITE[FINITE >= 0]
    got = scale_bytes(amax, clamp).numpy()
    assert np.array_equal(got, definition.scale_byte(amax.double().numpy(), clamp))
    assert got.min() == smallest and got.max() == 247
    assert scale_bytes(torch.tensor([torch.inf]), clamp).item() == 247


@pytest.mark.parametrize("clamp", ["scale", "amax"])
def test_codes_use_their_group_s_exponent(clamp: str) -> None:
    rng = np.random.default_rng(0)
    x = round_bf16(torch.from_numpy(rng.standard_normal((60, 448)) * np.exp2(rng.integers(-30, 110, (60, 448)))).float())
    codes, scales = quantize_groups(x, clamp)
    groups = x.double().numpy().reshape(60, 7, 64)
    want = definition.scale_byte(np.abs(groups).max(-1), clamp)
    assert np.array_equal(scales.numpy(), want)
    assert np.array_equal(
        codes.view(torch.uint8).numpy().reshape(60, 7, 64), definition.encode_e4m3(groups / np.exp2(want - 127.0)[..., None])
    )


@pytest.mark.parametrize(
    ("values", "byte", "codes"),
    [
        ([0.0], 114, [0x00]),  # a zero group takes the smallest scale
        ([-0.0], 114, [0x80]),  # the sign of a zero survives
        ([448.0], 127, [0x7E]),  # exactly a power of two: not rounded up
        ([450.0], 128, [0x76]),  # just above: the next exponent, 225 rounds to 224
        ([464.0, 448.0], 128, [0x76, 0x76]),  # 232 lies half-way between 224 and 240, and the even code is 224
        ([466.0], 128, [0x77]),  # the bf16 after 464: 233 rounds to 240
        ([3.3895313892515355e38], 247, [0x78]),  # the largest bf16: 255 rounds to 256
        ([9.2e-41, -9.2e-41], 114, [0x00, 0x80]),  # subnormals
        ([float("nan"), 448.0], 127, [0x7F, 0x7E]),  # amax ignores NaN
        ([float("inf"), -float("inf"), 1.0], 247, [0x7E, 0xFE, 0x00]),  # an infinity saturates
        ([float("nan")] * 64, 114, [0x7F] * 64),
    ],
)
def test_edges_of_a_group(values: list[float], byte: int, codes: list[int]) -> None:
    x = torch.zeros((1, 448))
    x[0, 64 : 64 + len(values)] = round_bf16(torch.tensor(values))
    got, scales = quantize_groups(x, "scale")
    assert scales.tolist() == [[114, byte, 114, 114, 114, 114, 114]]
    assert got.view(torch.uint8)[0, 64 : 64 + len(values)].tolist() == codes


@pytest.mark.parametrize("page_rows", [1, 2, 3, 64])
@pytest.mark.parametrize("strided", [False, True])
def test_packed_bytes_lie_where_the_layout_says(page_rows: int, strided: bool) -> None:
    pool = layout("fp8_ds_mla", 5, page_rows, strided=strided, alignment=16)
    storage = torch.randint(0, 256, (storage_bytes(pool),), dtype=torch.uint8)
    before = storage.numpy().copy()
    cache = cache_view(pool, storage)
    slots = torch.randperm(5 * page_rows)[: 3 * page_rows]
    rows = torch.randn(len(slots), 512)
    write_rows(cache, slots, rows, clamp="scale", scale=None, via_bf16=True)
    for slot, row in zip(slots.tolist(), rows, strict=True):
        x = definition.round_bf16(row.double().numpy())
        groups = x[:448].reshape(7, 64)
        scales = definition.scale_byte(np.abs(groups).max(1), "scale")
        codes = definition.encode_e4m3(groups / np.exp2(scales - 127.0)[:, None]).reshape(-1)
        want = np.concatenate([codes, definition.encode_bf16(x[448:]), scales, [0]])
        assert np.array_equal(pool.raw(storage.numpy(), slot), want)
        page, offset = divmod(slot, page_rows)
        got = read_rows(cache, torch.tensor([page]), torch.tensor([offset]))[0]
        assert np.array_equal(got.double().numpy(), pool.values(storage.numpy(), slot))
    outside = ~owned_bytes(pool, len(before), slots.tolist())
    assert np.array_equal(storage.numpy()[outside], before[outside])
    data, footers = packed_views(cache)
    assert footers.data_ptr() - data.data_ptr() == page_rows * 576


@pytest.mark.parametrize("scale", [1.0, 0.5, 0.3, 7.0])
def test_full_fp8_rows_with_and_without_the_bf16_step(scale: float) -> None:
    pool = layout("fp8", 3, 4)
    rows = torch.randn(8, 512) * 300
    slots = torch.arange(8)
    inverse = float(np.float32(1) / np.float32(scale))
    assert inverse_scale(scale) == inverse
    seen = []
    for via_bf16 in (True, False):
        storage = torch.zeros(storage_bytes(pool), dtype=torch.uint8)
        write_rows(cache_view(pool, storage), slots, rows, clamp="amax", scale=scale, via_bf16=via_bf16)
        x = definition.round_bf16(rows.double().numpy()).astype(np.float32) if via_bf16 else rows.numpy()
        want = definition.encode_e4m3((x * np.float32(inverse)).astype(np.float64))
        got = np.stack([pool.raw(storage.numpy(), s) for s in range(8)])
        assert np.array_equal(got, want)
        seen.append(got)
    assert not np.array_equal(*seen)  # the two rules differ on these rows
