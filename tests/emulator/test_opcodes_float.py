"""Floating-point instructions against hand-derived results: rounding ties, NaN, infinities, subnormals, signed zeros."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ptx_emulator import numerics
from ptx_emulator.instructions.floating import ERRORS
from tests.emulator.one_opcode import check, execute, f32

NAN, QNAN = 0x7FC12345, 0x7FFFFFFF  # an input NaN with a payload; the NaN that instructions give
INF, NINF = 0x7F800000, 0xFF800000
NZERO, ONE, TINY = 0x80000000, 0x3F800000, 0x00000001
MAXF = 0x7F7FFFFF
ULP1 = ONE + 1  # 1 + 2^-23
HALF_ULP = f32(2.0**-24)

TABLE = {
    "add.f32 d32, a32, b32;": [
        (ONE, HALF_ULP, ONE),  # a tie goes to even
        (ULP1, HALF_ULP, ONE + 2),
        (ONE, HALF_ULP + 1, ULP1),
        (NZERO, NZERO, NZERO),
        (NZERO, 0, 0),
        (ONE, ONE | NZERO, 0),
        (INF, NINF, QNAN),
        (NAN, ONE, QNAN),
        (MAXF, MAXF, INF),
        (TINY, TINY, 2),
        (0x00800000, 0x80000001, 0x007FFFFF),
    ],
    "add.rz.f32 d32, a32, b32;": [(ONE, HALF_ULP + 1, ONE), (ONE | NZERO, HALF_ULP | NZERO, ONE | NZERO), (MAXF, MAXF, MAXF)],
    "add.rm.f32 d32, a32, b32;": [
        (ONE | NZERO, HALF_ULP | NZERO, ULP1 | NZERO),
        (ONE, HALF_ULP, ONE),
        (ONE, ONE | NZERO, NZERO),
        (NZERO, 0, NZERO),
        (0, 0, 0),
    ],
    "add.rp.f32 d32, a32, b32;": [(ONE, HALF_ULP, ULP1), (ONE, f32(2.0**-140), ULP1)],
    "add.ftz.f32 d32, a32, b32;": [(TINY, TINY, 0), (0x80000001, NZERO, NZERO), (0x00800000, 0x80000001, 0x00800000)],
    "add.sat.f32 d32, a32, b32;": [(ONE, ONE, ONE), (ONE | NZERO, 0, 0), (NAN, ONE, 0)],
    "sub.f32 d32, a32, b32;": [(ONE, ONE, 0), (INF, INF, QNAN), (NZERO, 0, NZERO)],
    "mul.f32 d32, a32, b32;": [
        (ULP1, ULP1, ONE + 2),
        (f32(1.5), 0x00000001, 2),  # 1.5 * 2^-149: a tie between subnormals, to even
        (f32(0.5), 0x00000001, 0),
        (0, NINF, QNAN),
        (NZERO, ONE, NZERO),
        (MAXF, f32(2), INF),
    ],
    "mul.ftz.f32 d32, a32, b32;": [(0x00800000, f32(0.5), 0), (0x80800000, f32(0.5), NZERO)],
    "mul.rz.f32 d32, a32, b32;": [(MAXF, f32(2), MAXF), (ULP1, ULP1, ONE + 2)],
    "mul.rp.f32 d32, a32, b32;": [(ULP1, ULP1, ONE + 3)],
    "fma.rn.f32 d32, a32, b32, c32;": [
        (ULP1, ULP1, ONE | NZERO, f32(2.0**-22 + 2.0**-46)),  # the product is not rounded
        (f32(2.0**-100), f32(2.0**-100), ONE, ONE),
        (f32(2.0**-13), f32(2.0**-11), ONE, ONE),  # exactly half an ulp: to even
        (f32(2.0**-13), f32(2.0**-11 + 2.0**-34), ONE, ULP1),  # a hair above half an ulp
        (f32(2.0**-24 + 2.0**-47), f32(1 + 2.0**-23), ULP1, ONE + 2),
        (f32(2.0**-75), f32(2.0**-75), 0, 0),
        (f32(2.0**-75), f32(1.5 * 2.0**-75), TINY, 2),  # 2^-149 + 0.75 * 2^-149
        (NZERO, ONE, NZERO, NZERO),
        (NZERO, ONE, 0, 0),
        (INF, 0, ONE, QNAN),
        (INF, ONE, NINF, QNAN),
        (MAXF, f32(2), NINF, NINF),
        (MAXF, f32(2), MAXF | NZERO, MAXF),
        (NAN, ONE, ONE, QNAN),
    ],
    "fma.rz.f32 d32, a32, b32, c32;": [(f32(2.0**-13), f32(2.0**-11 + 2.0**-34), ONE, ONE)],
    "fma.rp.f32 d32, a32, b32, c32;": [(f32(2.0**-100), f32(2.0**-100), ONE, ULP1)],
    "fma.rm.f32 d32, a32, b32, c32;": [(f32(-(2.0**-100)), f32(2.0**-100), ONE, ONE - 1)],
    "add.rn.f32x2 d64, a64, b64;": [(ONE << 32 | HALF_ULP, ONE << 32 | ONE, f32(2) << 32 | ONE)],
    "mul.rn.f32x2 d64, a64, b64;": [(f32(3) << 32 | NAN, f32(5) << 32 | ONE, f32(15) << 32 | QNAN)],
    "fma.rn.f32x2 d64, a64, b64, c64;": [
        (ULP1 << 32 | f32(2), ULP1 << 32 | f32(3), (ONE | NZERO) << 32 | f32(4), f32(2.0**-22 + 2.0**-46) << 32 | f32(10)),
    ],
    "div.rn.f32 d32, a32, b32;": [(ONE, f32(3), 0x3EAAAAAB), (ONE, 0, INF), (ONE, NZERO, NINF), (0, 0, QNAN), (TINY, f32(2), 0)],
    "neg.f32 d32, a32;": [(ONE, ONE | NZERO), (0, NZERO), (INF, NINF), (NAN, QNAN)],
    "abs.f32 d32, a32;": [(ONE | NZERO, ONE), (NZERO, 0), (NINF, INF)],
    "neg.ftz.f32 d32, a32;": [(TINY, NZERO)],
    # min and max: -0 < +0, and a single NaN loses.
    "min.f32 d32, a32, b32;": [(0, NZERO, NZERO), (NZERO, 0, NZERO), (NAN, ONE, ONE), (ONE, NAN, ONE), (NAN, NAN, QNAN), (NINF, ONE, NINF)],
    "max.f32 d32, a32, b32;": [(0, NZERO, 0), (NZERO, 0, 0), (NAN, ONE, ONE), (NAN, NAN, QNAN), (NINF, ONE, ONE), (TINY, 0, TINY)],
    "min.NaN.f32 d32, a32, b32;": [(NAN, ONE, QNAN), (ONE, NAN, QNAN), (ONE, 0, 0)],
    "max.NaN.f32 d32, a32, b32;": [(NAN, ONE, QNAN), (ONE, f32(2), f32(2))],
    # float32 with bf16 or f16 operands, which are exact
    "fma.rn.f32.bf16 d32, a16, b16, c32;": [
        (0x3F81, 0x3F81, ONE | NZERO, f32(2.0**-6 + 2.0**-14)),  # (1 + 2^-7)^2 - 1: the product is not rounded
        (0x0001, ONE >> 16, 0, 0x00010000),  # a bf16 subnormal
        (0x7F80, 0x3F80, NINF, QNAN),
    ],
    "fma.rn.f32.f16 d32, a16, b16, c32;": [(0x3C01, 0x3C01, ONE | NZERO, f32(2.0**-9 + 2.0**-20))],
    "add.f32.bf16 d32, a16, b32;": [(0x3F80, ULP1, f32(2))],  # 2 + 2^-23: a tie, to even
    "sub.f32.bf16 d32, a16, b32;": [(0x3F80, ULP1, f32(-(2.0**-23)))],
    "max.ftz.f32 d32, a32, b32;": [(TINY, NZERO, 0)],
    "max.f32 d32, a32, b32, c32;": [(ONE, f32(3), f32(2), f32(3)), (NAN, NAN, ONE, ONE)],
    "min.xorsign.abs.f32 d32, a32, b32;": [(f32(-3), f32(2), f32(-2)), (f32(-3), f32(-4), f32(3))],
    "copysign.f32 d32, a32, b32;": [(NZERO, ONE, ONE | NZERO), (0, ONE | NZERO, ONE)],
    "testp.subnormal.f32 d1, a32;": [(TINY, 1), (0, 0), (0x00800000, 0)],
    "testp.finite.f32 d1, a32;": [(MAXF, 1), (INF, 0), (NAN, 0)],
    "testp.notanumber.f32 d1, a32;": [(NAN, 1), (INF, 0)],
    "rcp.rn.f32 d32, a32;": [(f32(3), 0x3EAAAAAB), (0, INF), (NZERO, NINF), (INF, 0)],
    "sqrt.rn.f32 d32, a32;": [(f32(2), 0x3FB504F3), (NZERO, NZERO), (ONE | NZERO, QNAN), (TINY, f32(math.sqrt(2.0**-149)))],
    "rcp.approx.f32 d32, a32;": [(f32(4), f32(0.25)), (0, INF), (NZERO, NINF), (NINF, NZERO), (NAN, QNAN)],
    "rcp.approx.ftz.f32 d32, a32;": [(TINY, INF), (0x80000001, NINF), (f32(2.0**127), 0)],
    "rsqrt.approx.f32 d32, a32;": [(f32(4), f32(0.5)), (0, INF), (NZERO, NINF), (ONE | NZERO, QNAN), (INF, 0)],
    "rsqrt.approx.ftz.f32 d32, a32;": [(TINY, INF), (f32(2.0**-126), f32(2.0**63))],
    "sqrt.approx.f32 d32, a32;": [(f32(9), f32(3)), (NZERO, NZERO)],
    "ex2.approx.f32 d32, a32;": [(0, ONE), (f32(-1), f32(0.5)), (NINF, 0), (INF, INF), (f32(128), INF), (f32(-149), TINY), (NAN, QNAN)],
    "ex2.approx.ftz.f32 d32, a32;": [(f32(-149), 0), (f32(-126), f32(2.0**-126)), (TINY, ONE)],
    "lg2.approx.f32 d32, a32;": [(f32(8), f32(3)), (0, NINF), (ONE | NZERO, QNAN), (INF, INF)],
    "div.approx.f32 d32, a32, b32;": [(f32(6), f32(3), f32(2)), (f32(-1), f32(1.5 * 2.0**126), NZERO), (INF, MAXF, QNAN), (ONE, INF, 0)],
    "div.full.f32 d32, a32, b32;": [(f32(6), f32(3), f32(2))],
    # bf16 and f16
    "add.rn.bf16x2 d32, a32, b32;": [(0x3F803F80, 0x3B803F80, 0x3F804000)],  # 1 + 2^-8 ties to even
    "mul.rn.bf16x2 d32, a32, b32;": [(0x40403F80, 0x40004000, 0x40C04000)],
    "fma.rn.bf16x2 d32, a32, b32, c32;": [(0x3F813F80, 0x3F813F80, 0xBF800000, 0x3C803F80)],  # (1 + 2^-7)^2 - 1 lies on a tie
    "add.f16 d16, a16, b16;": [(0x3C00, 0x3C00, 0x4000), (0x7BFF, 0x7BFF, 0x7C00)],
    "max.bf16x2 d32, a32, b32;": [(0x3F80FF80, 0x7FC00000, 0x3F800000)],
    "max.NaN.bf16x2 d32, a32, b32;": [(0x3F803F80, 0x7FC04000, 0x7FFF4000)],
}


@pytest.mark.parametrize("text", TABLE)
def test_results(text: str) -> None:
    check(text, TABLE[text])


def test_comparisons_of_floats() -> None:
    """Ordered comparisons are false with a NaN, unordered ones true; -0 equals +0."""
    holds = {
        (ONE, f32(2)): "ne lt le neu ltu leu num",
        (NZERO, 0): "eq le ge equ leu geu num",
        (NAN, ONE): "equ neu ltu leu gtu geu nan",
        (INF, ONE): "ne gt ge neu gtu geu num",
    }
    for name in ["eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"]:
        check(f"setp.{name}.f32 d1, a32, b32;", [(*pair, int(name in names.split())) for pair, names in holds.items()])
    check("setp.eq.ftz.f32 d1, a32, b32;", [(TINY, 0, 1), (0x00800000, 0, 0)])


@pytest.mark.parametrize("name", ["rcp", "rsqrt", "sqrt", "ex2", "lg2", "tanh"])
def test_ends_of_the_error_interval(name: str) -> None:
    """The two ends bracket the nearest result, differ from it by the documented error, and keep exact special values."""
    values = [f32(v) for v in (0.1, 0.7, 1.3, 3.7, 19.0)]
    nearest, low, high = (
        np.array(execute(f"{name}.approx.f32 d32, a32;", [(v,) for v in values], approximation=end), np.uint32).view(np.float32)
        for end in ("nearest", "low", "high")
    )
    assert (low < nearest).all() and (nearest < high).all()
    error = ERRORS[name] * (np.abs(nearest) if name != "lg2" else 1)
    assert (high - low <= 2 * error + 3 * np.abs(np.spacing(nearest))).all() and (high - low >= 1.5 * error).all()
    if name == "ex2":
        assert execute("ex2.approx.f32 d32, a32;", [(NINF,), (INF,)], approximation="high") == [0, INF]


def test_fused_multiply_add_against_exact_arithmetic() -> None:
    """Random operands, close exponents and cancellation, against integer arithmetic."""
    from fractions import Fraction

    rng = np.random.default_rng(5)
    exponents = rng.integers(90, 165, (3, 1500))
    bits = (rng.integers(0, 2, exponents.shape) << 31 | exponents << 23 | rng.integers(0, 1 << 23, exponents.shape)).astype(np.uint32)
    bits[2, ::3] = (-(bits[0, ::3].view(np.float32) * bits[1, ::3].view(np.float32))).view(np.uint32)
    bits[0, ::7] &= 0xFFFFF000
    bits[1, ::7] &= 0xFFFFF800
    a, b, c = (row.view(np.float32) for row in bits)
    got = numerics.fma(a, b, c)
    for i in range(a.size):
        exact = Fraction(float(a[i])) * Fraction(float(b[i])) + Fraction(float(c[i]))
        here = Fraction(float(got[i]))
        for other in (np.nextafter(got[i], np.float32(-np.inf)), np.nextafter(got[i], np.float32(np.inf))):
            there = abs(Fraction(float(other)) - exact)
            assert abs(here - exact) < there or (abs(here - exact) == there and int(got[i].view(np.uint32)) % 2 == 0)
