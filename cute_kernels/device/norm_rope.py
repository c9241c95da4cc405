"""RMS norm and interleaved rotary embedding of a row whose columns are spread over threads."""

import cutlass
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, cute

from cute_kernels.device import convert, memory
from cute_kernels.kv_format import HEAD_DIM


def load_weight(norm_weight: cute.Tensor, column: Int32, count: int) -> cute.Tensor:
    """This thread's norm weights (bf16) as fp32."""
    weight = cute.make_rmem_tensor(cute.make_layout(count), BFloat16)
    memory.load_vector(memory.base_address(norm_weight) + Int64(column) * 2, weight)
    return convert.to_fp32(weight)


def square_sum(values: cute.Tensor) -> Float32:
    """Sum of squares of a fragment, in order."""
    total = values[0] * values[0]
    for i in range(1, cute.size(values)):
        total = cute.math.fma(values[i], values[i], total)
    return total


def square_sum_bf16(pieces: list[cute.Tensor]) -> Float32:
    """Sum of squares of bf16 fragments, in order, the even and the odd values apart."""
    total = (Float32(0.0), Float32(0.0))
    for piece in pieces:
        values = convert.widen(piece)
        for i in range(0, cute.size(values), 2):
            pair = values[i], values[i + 1]
            total = convert.fma_pair(pair, pair, total)
    return total[0] + total[1]


def rms_factor(total: Float32, eps: Float32) -> Float32:
    """rsqrt(total / 512 + eps), `total` being the sum of squares over the whole row."""
    return cute.math.rsqrt(cute.math.fma(total, Float32(1.0 / HEAD_DIM), eps), fastmath=True)


@cute.jit
def rotate(values: cute.Tensor, rotated: Boolean, rotation: cute.Tensor):
    """(a, b) -> (a c - b s, a s + b c) where `rotated`; each product and each sum is rounded, as in `reference/rope.py`."""
    if rotated:
        pairs = cutlass.const_expr(cute.size(values) // 2)
        for j in cutlass.range_constexpr(pairs):
            a, b, c, s = values[2 * j], values[2 * j + 1], rotation[j], rotation[pairs + j]
            values[2 * j] = convert.product(a, c) - convert.product(b, s)
            values[2 * j + 1] = convert.product(a, s) + convert.product(b, c)


@cute.jit
def normalise_rotate(values: cute.Tensor, total: Float32, eps: Float32, weight: cute.Tensor, rotated: Boolean, rotation: cute.Tensor):
    """values = values * rms_factor * weight, then `rotate`."""
    factor = rms_factor(total, eps)
    for i in cutlass.range_constexpr(cute.size(values)):
        values[i] = values[i] * factor * weight[i]
    rotate(values, rotated, rotation)
