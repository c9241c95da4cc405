"""Roundings to storage formats, on register fragments. The rules for NaN and infinity are those of `reference/quant.py`."""

from typing import Any

from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, cute
from cutlass._mlir import ir
from cutlass._mlir.dialects import arith, llvm, vector

from cute_kernels.kv_format import E4M3_MAX

BF16_MAX = 3.3895313892515355e38
MINIMUM = 1e-4


def like(fragment: cute.Tensor, dtype) -> cute.Tensor:
    """A register fragment of another type and the same length."""
    return cute.make_rmem_tensor(cute.make_layout(cute.size(fragment)), dtype)


def to_bf16(values: cute.Tensor) -> cute.Tensor:
    """fp32 -> bf16, to nearest even."""
    rounded = like(values, BFloat16)
    rounded.store(values.load().to(BFloat16))
    return rounded


def to_fp32(values: cute.Tensor) -> cute.Tensor:
    """bf16 -> fp32, exact."""
    wide = like(values, Float32)
    wide.store(values.load().to(Float32))
    return wide


def to_e4m3(values: cute.Tensor, factor: Float32) -> cute.Tensor:
    """fp32 times `factor` -> E4M3, to nearest even; the instruction saturates at +-448 and turns NaN into 0x7F."""
    scaled = like(values, Float32)
    for i in range(cute.size(values)):
        scaled[i] = values[i] * factor
    codes = like(values, Float8E4M3FN)
    codes.store(scaled.load().to(Float8E4M3FN))
    return codes


def widen(values: cute.Tensor) -> cute.Tensor:
    """bf16 -> fp32, exact, in one instruction a value; the conversion of `to_fp32` takes two for every second one."""
    words = cute.recast_tensor(values, Int32)
    wide = like(values, Float32)
    for i in range(cute.size(words)):
        wide[2 * i] = float_of(words[i] << 16)
        wide[2 * i + 1] = float_of(words[i] & -65536)
    return wide


def fma_pair(a: tuple, b: tuple, c: tuple) -> tuple[Float32, Float32]:
    """a * b + c of two fp32 values each, rounded once: one instruction where the GPU has packed fp32 arithmetic, else two."""
    return _of_pairs(llvm.intr_fma, a, b, c)  # the DSL's own fma takes vectors apart


def add_pair(a: tuple, b: tuple) -> tuple[Float32, Float32]:
    """a + b of two fp32 values each, likewise."""
    return _of_pairs(arith.addf, a, b)


def _of_pairs(operation: Any, *pairs: tuple) -> tuple[Float32, Float32]:
    """An operation on vectors of two fp32 values."""
    kind = ir.VectorType.get([2], Float32.mlir_type)
    result = operation(*(vector.from_elements(kind, [x.ir_value() for x in pair]) for pair in pairs))
    return tuple(Float32(vector.extract(result, dynamic_position=[], static_position=[i])) for i in range(2))


def product(a: Float32, b: Float32) -> Float32:
    """a * b, rounded by itself: the compiler fuses a `*` whose result is added to something into one multiply-add, this never."""
    return Float32(llvm.inline_asm(Float32.mlir_type, [a.ir_value(), b.ir_value()], "mul.rn.f32 $0, $1, $2;", "=f,f,f"))


def bits_of(value: Float32) -> Int32:
    """The bit pattern of an fp32 value."""
    return Int32(arith.bitcast(Int32.mlir_type, value.ir_value()))


def float_of(bits: Int32) -> Float32:
    """The fp32 value of a bit pattern."""
    return Float32(arith.bitcast(Float32.mlir_type, bits.ir_value()))


def magnitude(value: Float32) -> Float32:
    """|value|; NaN stays NaN, which `fmax` then ignores."""
    return float_of(bits_of(value) & 0x7FFFFFFF)


def scale_byte(amax: Float32, clamp: str) -> Int32:
    """UE8M0 byte of a group: the exponent of its scale rounded up, plus 127.

    clamp="scale"  the scale is max(amax / 448, 1e-4), the compressor's rule; the byte lies in [114, 247]
    clamp="amax"   the scale is max(amax, 1e-4) / 448, the insert's rule; the byte lies in [105, 247]

    An infinite amax counts as the largest bf16, so the inverse scale is always a normal number. For a bf16 amax the product with
    fp32(1 / 448) has the same byte as the quotient: at 7 * 2^k both are exact, and any other bf16 is 2^-8 away from these; so is 1e-4.
    """
    bounded = cute.arch.fmin(amax, Float32(BF16_MAX))
    if clamp == "amax":
        scale = cute.arch.fmax(bounded, Float32(MINIMUM)) * Float32(1.0 / E4M3_MAX)
    else:
        scale = cute.arch.fmax(bounded * Float32(1.0 / E4M3_MAX), Float32(MINIMUM))
    return (bits_of(scale) + 0x7FFFFF) >> 23


def inverse_scale(byte: Int32) -> Float32:
    """2^(127 - byte), exact."""
    return float_of((254 - byte) << 23)
