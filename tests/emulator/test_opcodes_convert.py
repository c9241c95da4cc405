"""Conversions, bit for bit: integers and floats of every size, bf16, e4m3, e5m2 and ue8m0."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.emulator.one_opcode import check, execute, f32

INF, NINF, NAN = 0x7F800000, 0xFF800000, 0x7FC00000
M1 = 0xFFFFFFFF
M64 = 0xFFFFFFFFFFFFFFFF

TABLE = {
    "cvt.u64.u32 d64, a32;": [(M1, M1)],
    "cvt.s64.s32 d64, a32;": [(M1, M64), (5, 5)],
    "cvt.u32.u64 d32, a64;": [(0x123456789, 0x23456789)],
    "cvt.s32.s8 d32, a32;": [(0x80, 0xFFFFFF80), (0x17F, 0x7F)],
    "cvt.u32.u8 d32, a32;": [(0x1FF, 0xFF)],
    "cvt.u16.u32 d16, a32;": [(0x12345, 0x2345)],
    "cvt.s32.s16 d32, a16;": [(0x8000, 0xFFFF8000)],
    "cvt.u32.s16 d32, a16;": [(0x8000, 0xFFFF8000)],
    "cvt.sat.s8.s32 d32, a32;": [(300, 127), (-300, 0xFFFFFF80), (-5, M1 - 4)],
    "cvt.sat.u8.s32 d32, a32;": [(-1, 0), (256, 255)],
    # float to integer: rounding, clamping, NaN
    "cvt.rni.s32.f32 d32, a32;": [(f32(2.5), 2), (f32(3.5), 4), (f32(-2.5), -2 & M1), (f32(3e9), 0x7FFFFFFF), (NINF, 0x80000000), (NAN, 0)],
    "cvt.rzi.s32.f32 d32, a32;": [(f32(-2.9), -2 & M1), (f32(2.9), 2)],
    "cvt.rmi.s32.f32 d32, a32;": [(f32(-2.1), -3 & M1)],
    "cvt.rpi.s32.f32 d32, a32;": [(f32(2.1), 3), (f32(-2.9), -2 & M1)],
    "cvt.rzi.u32.f32 d32, a32;": [(f32(-5.0), 0), (f32(4294967040.0), 4294967040), (f32(1e20), M1), (f32(-0.5), 0)],
    "cvt.rzi.s64.f32 d64, a32;": [(f32(-(2.0**40)), -(2**40) & M64), (f32(1e30), (1 << 63) - 1), (NAN, 1 << 63)],
    "cvt.rzi.u64.f32 d64, a32;": [(f32(2.0**63), 1 << 63), (f32(1e30), M64)],
    "cvt.rni.f32.f32 d32, a32;": [(f32(2.5), f32(2)), (f32(-0.4), 0x80000000)],
    "cvt.rzi.ftz.u32.f32 d32, a32;": [(1, 0)],
    # integer to float: ties to even
    "cvt.rn.f32.s32 d32, a32;": [(16777217, f32(16777216)), (16777219, f32(16777220)), (-1, f32(-1))],
    "cvt.rn.f32.u32 d32, a32;": [(M1, f32(2.0**32))],
    "cvt.rn.f32.s64 d32, a64;": [((1 << 62) + (1 << 38), f32(2.0**62)), ((1 << 62) + (1 << 38) + 1, 0x5E800001), (M64, f32(-1))],
    "cvt.rn.f32.u64 d32, a64;": [(M64, f32(2.0**64))],
    "cvt.rn.bf16.s32 d16, a32;": [(257, 0x4380), (259, 0x4382)],
    # between floats
    "cvt.rn.bf16.f32 d16, a32;": [
        (0x3F808000, 0x3F80),  # ties to even
        (0x3F818000, 0x3F82),
        (0x3F808001, 0x3F81),
        (0x7F7FFFFF, 0x7F80),
        (0xFF800000, 0xFF80),
        (0x7F800001, 0x7FFF),
        (0x00008000, 0x0000),
        (0x00018000, 0x0002),  # subnormals too
        (0x80000000, 0x8000),
    ],
    "cvt.rz.bf16.f32 d16, a32;": [(0x3F80FFFF, 0x3F80), (0x7F7FFFFF, 0x7F7F), (0xBF80FFFF, 0xBF80)],
    "cvt.rn.relu.bf16.f32 d16, a32;": [(f32(-1), 0), (f32(1), 0x3F80), (NAN, 0x7FFF)],
    "cvt.f32.bf16 d32, a16;": [(0x3F81, 0x3F810000), (0x7FC1, 0x7FC10000), (0x8001, 0x80010000)],
    "cvt.rn.f16.f32 d16, a32;": [
        (f32(65504), 0x7BFF),
        (f32(65520), 0x7C00),
        (f32(2.0**-25), 0),
        (f32(1.5 * 2.0**-24), 2),
        (f32(2.0**-24), 1),
    ],
    "cvt.f32.f16 d32, a16;": [(0x0001, f32(2.0**-24)), (0x7C00, INF), (0x3555, 0x3EAAA000)],
    "cvt.f64.f32 d64, a32;": [(f32(1.5), 0x3FF8000000000000)],
    "cvt.rn.f32.f64 d32, a64;": [(0x3FF0000010000000, 0x3F800000), (0x3FF0000030000000, 0x3F800002)],
    "cvt.rn.bf16x2.f32 d32, a32, b32;": [(f32(1), f32(2), 0x3F804000), (0x3F808001, 0x80000000, 0x3F818000)],
    "cvt.rn.f16x2.f32 d32, a32, b32;": [(f32(1), f32(-2), 0x3C00C000)],
    # e4m3: saturating, to even; first source in the high byte
    "cvt.rn.satfinite.e4m3x2.f32 d16, a32, b32;": [
        (f32(1), f32(-2), 0x38C0),
        (f32(448), f32(449), 0x7E7E),
        (f32(464), f32(465), 0x7E7E),
        (INF, NINF, 0x7EFE),
        (NAN, 0x80000000, 0x7F80),
        (f32(17), f32(19), 0x585A),  # steps of 2 here: 17 ties to 16, 19 to 20
        (f32(2.0**-10), f32(3 * 2.0**-10), 0x0002),  # ties at the smallest subnormals
        (f32(2.0**-6), f32(2.0**-6 - 2.0**-9), 0x0807),
        (f32(1e-30), f32(-1e-30), 0x0080),
    ],
    "cvt.rn.satfinite.relu.e4m3x2.f32 d16, a32, b32;": [(f32(-1), f32(1), 0x0038)],
    "cvt.rn.satfinite.e5m2x2.f32 d16, a32, b32;": [(f32(57344), f32(1e6), 0x7B7B), (f32(1), f32(2.0**-17), 0x3C00)],
    "cvt.rn.f16x2.e4m3x2 d32, a16;": [(0x38C0, 0x3C00C000), (0x7F7E, 0x7FFF5F00), (0x0180, 0x18008000)],
    "cvt.rn.satfinite.e4m3x2.f16x2 d16, a32;": [(0x3C00C000, 0x38C0)],
    # scales: powers of two, up or down
    "cvt.rp.satfinite.ue8m0x2.f32 d16, a32, b32;": [
        (f32(1), f32(1.01), 0x7F80),
        (f32(0.75), f32(0.5), 0x7F7E),
        (INF, NAN, 0xFEFF),
        (0, 1, 0x0000),
    ],
    "cvt.rz.satfinite.ue8m0x2.f32 d16, a32, b32;": [(f32(1.99), f32(4), 0x7F81)],
    "cvt.rn.bf16x2.ue8m0x2 d32, a16;": [(0x7F80, 0x3F804000), (0xFF01, 0x7FFF0080)],
}


@pytest.mark.parametrize("text", TABLE)
def test_results(text: str) -> None:
    check(text, TABLE[text])


def test_every_e4m3_code_and_both_sides_of_every_midpoint() -> None:
    """Against torch's float8_e4m3fn for all finite values up to the largest."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    finite = torch.sort(codes[codes.isfinite()]).values.unique()
    middle = (finite[1:] + finite[:-1]) / 2
    around = torch.cat(
        [finite, middle, torch.nextafter(middle, torch.tensor(torch.inf)), torch.nextafter(middle, torch.tensor(-torch.inf))]
    )
    bits = around.numpy().view(np.uint32).tolist()
    got = execute("cvt.rn.satfinite.e4m3x2.f32 d16, a32, b32;", [(0, v) for v in bits])
    want = around.to(torch.float8_e4m3fn).view(torch.uint8).tolist()
    assert [g & 0xFF for g in got] == want


def test_every_bf16_boundary_against_torch() -> None:
    rng = np.random.default_rng(3)
    upper = rng.integers(0, 1 << 16, 4000).astype(np.uint32) << 16
    bits = np.concatenate([upper | low for low in (0, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
    bits = bits[~np.isnan(bits.view(np.float32))]
    got = []
    for start in range(0, bits.size, 1024):
        got += execute("cvt.rn.bf16.f32 d16, a32;", [(int(v),) for v in bits[start : start + 1024]])
    want = torch.from_numpy(bits.view(np.float32).copy()).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16).tolist()
    assert got == want
