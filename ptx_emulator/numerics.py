"""Bit-exact arithmetic on NumPy arrays: fused multiply-add, directed rounding, small float formats, NaN rules.

Every function takes and returns arrays. Registers hold raw bits as unsigned integers; callers `.view()` them as floats.
Results that are NaN become the canonical NaN of PTX (0x7fffffff for f32, 0x7fff for f16 and bf16, 0x7f for e4m3).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

F32, F64, U16, U32, U64 = np.float32, np.float64, np.uint16, np.uint32, np.uint64
_F32_NAN = np.array(0x7FFFFFFF, U32)
_MANTISSA = U64(0x1FFFFFFF)
_HALF = U64(0x10000000)
_TINY = 2.0**-126


@dataclass(frozen=True)
class Format:
    """A binary float format. `maximum` is its largest finite value; `nan` its canonical NaN code; `has_inf` whether it has infinities."""

    exponent_bits: int
    mantissa_bits: int
    bias: int
    maximum: float
    nan: int
    has_inf: bool

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 1 + self.exponent_bits + self.mantissa_bits


BF16 = Format(8, 7, 127, float.fromhex("0x1.fep127"), 0x7FFF, True)
F16 = Format(5, 10, 15, 65504.0, 0x7FFF, True)
E4M3 = Format(4, 3, 7, 448.0, 0x7F, False)
E5M2 = Format(5, 2, 15, 57344.0, 0x7F, True)


def canonical(bits: np.ndarray) -> np.ndarray:
    """f32 bits with every NaN made canonical."""
    nan = np.isnan(bits.view(F32))
    if nan.any():
        bits = np.where(nan, _F32_NAN, bits)
    return bits


def flush(bits: np.ndarray) -> np.ndarray:
    """f32 bits with subnormals made zeros of the same sign (`.ftz`)."""
    small = (bits & U32(0x7F800000)) == 0
    return np.where(small, bits & U32(0x80000000), bits)


def saturate(bits: np.ndarray) -> np.ndarray:
    """`.sat`: clamp to [0.0, 1.0]; NaN becomes +0.0."""
    value = bits.view(F32)
    return np.where(value > 0, np.minimum(value, F32(1)), F32(0)).view(U32)


def round_to_odd(value: np.ndarray, error: np.ndarray) -> np.ndarray:
    """Turn `value` = RN(value + error), float64 with its exact error, into the sum rounded to odd.

    A sum rounded to odd in float64 can be rounded once more, to any format of at most 51 mantissa bits, without double rounding.
    """
    bits = value.view(U64)
    inexact = ((error > 0) | (error < 0)) & ((bits & U64(1)) == 0) & np.isfinite(value)
    outward = (error > 0) == (value > 0)
    step = np.where(outward, U64(1), U64(0xFFFFFFFFFFFFFFFF))
    return np.where(inexact, bits + step, bits).view(F64)


def _two_sum_error(a: np.ndarray, b: np.ndarray, total: np.ndarray) -> np.ndarray:
    part = total - a
    return (a - (total - part)) + (b - part)


def exact_sum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """float64 a + b, rounded to odd."""
    total = a + b
    return round_to_odd(total, _two_sum_error(a, b, total))


def signed_sum(a: np.ndarray, b: np.ndarray, mode: str) -> np.ndarray:
    """`exact_sum` with the sign of a zero that rounding `mode` gives: operands of opposite signs cancel to -0 when rounding down."""
    total = exact_sum(a, b)
    if mode != "rm":
        return total
    return np.where((total == 0) & (np.signbit(a) != np.signbit(b)), -0.0, total)


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """IEEE fused multiply-add of float32 arrays, round to nearest even: one rounding of a*b + c."""
    product = a.astype(F64) * b.astype(F64)  # exact: 24 + 24 bits
    addend = c.astype(F64)
    total = product + addend
    bits = total.view(U64)
    # Rounding total to float32 differs from rounding the exact sum only if total lies on a midpoint between two float32
    # numbers; below 2^-126 midpoints lie elsewhere, so all those count as doubtful.
    doubtful = ((bits & _MANTISSA) == _HALF) | (np.abs(total) < _TINY)
    if doubtful.any():
        total = round_to_odd(total, _two_sum_error(product, addend, total))
    return total.astype(F32)


def to_f32(exact: np.ndarray, mode: str) -> np.ndarray:
    """float64 (exact or rounded to odd) → float32 with rounding `rn`, `rz`, `rm` (down) or `rp` (up)."""
    nearest = exact.astype(F32)
    if mode == "rn":
        return nearest
    back = nearest.astype(F64)
    down, up = np.nextafter(nearest, F32(-np.inf)), np.nextafter(nearest, F32(np.inf))
    floor = np.where(back > exact, down, nearest)
    ceil = np.where(back < exact, up, nearest)
    if mode == "rm":
        return floor
    if mode == "rp":
        return ceil
    if mode == "rz":
        return np.where(exact > 0, floor, ceil)
    raise ValueError(mode)


def encode(value: np.ndarray, fmt: Format, *, mode: str = "rn", saturate_finite: bool = False, relu: bool = False) -> np.ndarray:
    """float values → codes of `fmt` (uint32 array), correctly rounded (`rn` to even, `rz` toward zero)."""
    value = np.asarray(value).astype(F64)
    nan = np.isnan(value)
    magnitude = np.where(nan, 0.0, np.abs(value))
    sign = np.signbit(value) & ~nan
    finite = np.minimum(magnitude, 2.0 * fmt.maximum)
    lowest = 1 - fmt.bias
    exponent = np.maximum(np.frexp(finite)[1] - 1, lowest)
    quantum = np.ldexp(1.0, exponent - fmt.mantissa_bits)
    steps = finite / quantum
    steps = np.rint(steps) if mode == "rn" else np.floor(steps)
    rounded = steps * quantum
    over = rounded > fmt.maximum
    exponent = np.maximum(np.frexp(rounded)[1] - 1, lowest)
    significand = (rounded / np.ldexp(1.0, exponent - fmt.mantissa_bits)).astype(np.int64)
    biased = np.where(significand >> fmt.mantissa_bits > 0, exponent + fmt.bias, 0)
    code = (biased << fmt.mantissa_bits) | (significand & ((1 << fmt.mantissa_bits) - 1))
    largest = _positive_code(fmt.maximum, fmt)
    infinite = np.isinf(magnitude)
    if saturate_finite:
        code = np.where(over, largest, code)
    elif fmt.has_inf:
        infinity = ((1 << fmt.exponent_bits) - 1) << fmt.mantissa_bits
        overflow = infinity if mode == "rn" else largest
        code = np.where(infinite, infinity, np.where(over, overflow, code))
    else:
        code = np.where(over, fmt.nan, code)
    code = np.where(sign, code | (1 << (fmt.bits - 1)), code)
    if relu:
        code = np.where(sign, 0, code)
    return np.where(nan, fmt.nan, code).astype(U32)


def _positive_code(value: float, fmt: Format) -> int:
    mantissa, exponent = np.frexp(value)
    significand = int(mantissa * 2 * (1 << fmt.mantissa_bits))
    return ((int(exponent) - 1 + fmt.bias) << fmt.mantissa_bits) | (significand & ((1 << fmt.mantissa_bits) - 1))


def decode(code: np.ndarray, fmt: Format) -> np.ndarray:
    """Codes of `fmt` → float64 values."""
    code = code.astype(np.int64)
    mantissa = code & ((1 << fmt.mantissa_bits) - 1)
    exponent = (code >> fmt.mantissa_bits) & ((1 << fmt.exponent_bits) - 1)
    top = (1 << fmt.exponent_bits) - 1
    normal = np.ldexp((mantissa | (1 << fmt.mantissa_bits)).astype(F64), exponent - fmt.bias - fmt.mantissa_bits)
    subnormal = np.ldexp(mantissa.astype(F64), 1 - fmt.bias - fmt.mantissa_bits)
    value = np.where(exponent == 0, subnormal, normal)
    if fmt.has_inf:
        value = np.where(exponent == top, np.where(mantissa == 0, np.inf, np.nan), value)
    else:
        value = np.where((exponent == top) & (mantissa == (1 << fmt.mantissa_bits) - 1), np.nan, value)
    return np.where(code >> (fmt.bits - 1) & 1 == 1, -value, value)


def f32_to_bf16(bits: np.ndarray) -> np.ndarray:
    """f32 bits → bf16 bits (in uint32), nearest even, NaN canonical; the fast path of `encode(..., BF16)`."""
    rounded = (bits + (U32(0x7FFF) + ((bits >> U32(16)) & U32(1)))) >> U32(16)
    nan = (bits & U32(0x7FFFFFFF)) > U32(0x7F800000)
    return np.where(nan, U32(0x7FFF), rounded)


def encode_ue8m0(value: np.ndarray, mode: str) -> np.ndarray:
    """Non-negative float32 values → power-of-two scale codes 2^(code-127): `rz` down, `rp` up; the largest finite code is 254."""
    value = np.abs(value.astype(F64))
    finite = np.where(np.isfinite(value), value, 1.0)
    mantissa, exponent = np.frexp(finite)
    floor = exponent.astype(np.int64) - 1 + 127
    code = np.where((mantissa != 0.5) & (mode == "rp"), floor + 1, floor)
    code = np.where(finite == 0, 0, np.clip(code, 0, 254))
    code = np.where(np.isinf(value), 254, code)
    return np.where(np.isnan(value), 255, code).astype(U32)


def decode_ue8m0(code: np.ndarray) -> np.ndarray:
    """Scale codes → float64."""
    code = code.astype(np.int64)
    return np.where(code == 255, np.nan, np.ldexp(1.0, code - 127))


def float_to_int(value: np.ndarray, mode: str, bits: int, signed: bool, double: bool = False) -> np.ndarray:
    """float64 values → integers of `bits` bits in two's complement, rounded by `rni`, `rzi`, `rmi` or `rpi`, clamped to the range.

    NaN gives 0, but the top bit alone for results of 64 bits and sources of .f64, `double` (PTX ISA, `cvt`).
    """
    rounded = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[mode](value)
    low, high = (-(2.0 ** (bits - 1)), 2.0 ** (bits - 1)) if signed else (0.0, 2.0**bits)
    unsigned = np.dtype(f"uint{max(bits, 16)}")
    nan = np.isnan(value)
    inside = (rounded >= low) & (rounded < high)
    safe = np.where(inside, rounded, 0.0)
    as_int = safe.astype(np.int64).astype(U64) if signed else safe.astype(U64)
    top = (1 << (bits - 1)) - 1 if signed else (1 << bits) - 1
    bottom = (1 << (bits - 1)) if signed else 0
    result = np.where(inside, as_int, np.where(rounded < low, U64(bottom), U64(top)))
    mask = (1 << bits) - 1
    result = np.where(nan, U64(1 << (bits - 1) if double or bits == 64 else 0), result & U64(mask))
    return result.astype(unsigned)
