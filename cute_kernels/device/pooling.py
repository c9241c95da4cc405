"""Softmax pooling of a window: per column, over rows, in fp32, in registers.

A partial result is a column's largest logit times log2(e) (`peak`), the sum of its weights relative to that peak, and the weighted
sum of values. An all -inf part has weight zero; an all -inf column becomes NaN, as 0 / 0.
"""

from typing import NamedTuple

import cutlass
from cutlass import Float32, cute

from cute_kernels.device import convert

LOG2_E = 1.4426950408889634
NEG_INF = float("-inf")


class Partial(NamedTuple):
    """Register fragments of one length: `peak`, `weight` and `product` of a thread's columns."""

    peak: cute.Tensor
    weight: cute.Tensor
    product: cute.Tensor

    @staticmethod
    def empty(count: int) -> "Partial":
        """That of no rows."""
        partial = Partial(*(cute.make_rmem_tensor(cute.make_layout(count), Float32) for _ in range(3)))
        partial.clear()
        return partial

    def clear(self) -> None:
        """Make it that of no row."""
        self.peak.fill(NEG_INF)
        self.weight.fill(0.0)
        self.product.fill(0.0)


def reference_point(peak: Float32) -> Float32:
    """The peak that weights are relative to: 0 for an empty part, so that -inf minus it stays -inf."""
    return cutlass.select_(peak == NEG_INF, Float32(0.0), peak)


def power(x: Float32) -> Float32:
    """2^x, by the hardware's approximation (relative error about 2^-22)."""
    return cute.math.exp2(x, fastmath=True)


def largest(values: list) -> Float32:
    """The largest of a list, as a tree."""
    while len(values) > 1:
        values = [cute.arch.fmax(*values[i : i + 2]) if i + 1 < len(values) else values[i] for i in range(0, len(values), 2)]
    return values[0]


def add_rows(partial: Partial, values: cute.Tensor, logits: cute.Tensor, first: bool) -> None:
    """Add rows to a partial result: `values` and `logits` [columns, rows]. `first`: the partial result is still empty.

    Columns go in pairs: GPUs with packed fp32 arithmetic take one instruction for both.
    """
    columns, rows = values.shape
    scale = (Float32(LOG2_E),) * 2
    for c in range(0, columns, 2):
        peaks = [largest([logits[i, k] for k in range(rows)]) * LOG2_E for i in (c, c + 1)]
        if not first:
            peaks = [cute.arch.fmax(peaks[i], partial.peak[c + i]) for i in range(2)]
        minus = tuple(-reference_point(peak) for peak in peaks)
        weight = product = None
        if not first:
            decay = [power(partial.peak[c + i] + minus[i]) for i in range(2)]
            weight = tuple(partial.weight[c + i] * decay[i] for i in range(2))
            product = tuple(partial.product[c + i] * decay[i] for i in range(2))
        for k in range(rows):
            row = values[c, k], values[c + 1, k]
            w = tuple(power(x) for x in convert.fma_pair((logits[c, k], logits[c + 1, k]), scale, minus))
            if first and k == 0:
                weight, product = w, (w[0] * row[0], w[1] * row[1])
            else:
                weight, product = convert.add_pair(w, weight), convert.fma_pair(w, row, product)
        for i in range(2):
            partial.peak[c + i], partial.weight[c + i], partial.product[c + i] = peaks[i], weight[i], product[i]


def fold(left: Partial, right: Partial) -> None:
    """Fold `right` into `left`."""
    for c in range(cute.size(left.peak)):
        peak = cute.arch.fmax(left.peak[c], right.peak[c])
        origin = reference_point(peak)
        decay = power(left.peak[c] - origin)
        weight, product = left.weight[c] * decay, left.product[c] * decay
        decay = power(right.peak[c] - origin)
        left.weight[c] = cute.math.fma(right.weight[c], decay, weight)
        left.product[c] = cute.math.fma(right.product[c], decay, product)
        left.peak[c] = peak


@cute.jit
def total_of(slots: cute.Tensor) -> Float32:
    """The sum of all slots, always in the same order."""
    total = slots[0]
    for i in cutlass.range_constexpr(1, cute.size(slots)):
        total = total + slots[i]
    return total
