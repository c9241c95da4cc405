"""Softmax pooling of a window: per column, over rows, in fp32; in registers, then across lanes, then across warps.

A partial result is a column's largest logit times log2(e) (`peak`), the sum of its weights relative to that peak, and the weighted
sum of values. An all -inf part has weight zero; an all -inf column becomes NaN, as 0 / 0.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
from cutlass import Float32, Int32, cute

LOG2_E = 1.4426950408889634
NEG_INF = float("-inf")


class Partial(NamedTuple):
    """Register fragments of one length: `peak`, `weight` and `product` of a thread's columns."""

    peak: cute.Tensor
    weight: cute.Tensor
    product: cute.Tensor

    @staticmethod
    def empty(count: int) -> "Partial":
        peak, weight, product = (cute.make_rmem_tensor(cute.make_layout(count), Float32) for _ in range(3))
        peak.fill(NEG_INF)
        weight.fill(0.0)
        product.fill(0.0)
        return Partial(peak, weight, product)


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
    """Add rows to a partial result: `values` and `logits` [columns, rows]. `first`: the partial result is still empty."""
    columns, rows = values.shape
    for c in range(columns):
        peak = largest([logits[c, k] for k in range(rows)]) * LOG2_E
        if not first:
            peak = cute.arch.fmax(peak, partial.peak[c])
        origin = reference_point(peak)
        weight, product = Float32(0.0), Float32(0.0)
        if not first:
            decay = power(partial.peak[c] - origin)
            weight, product = partial.weight[c] * decay, partial.product[c] * decay
        for k in range(rows):
            w = power(cute.math.fma(logits[c, k], Float32(LOG2_E), -origin))
            weight = w if first and k == 0 else weight + w
            product = w * values[c, k] if first and k == 0 else cute.math.fma(w, values[c, k], product)
        partial.peak[c], partial.weight[c], partial.product[c] = peak, weight, product


def merge(partial: Partial, c: int, others: list) -> None:
    """Fold other (peak, weight, product) triples of column `c` into it, in order."""
    peak = largest([partial.peak[c], *(o[0] for o in others)])
    origin = reference_point(peak)
    decay = power(partial.peak[c] - origin)
    weight, product = partial.weight[c] * decay, partial.product[c] * decay
    for other_peak, other_weight, other_product in others:
        decay = power(other_peak - origin)
        weight = cute.math.fma(other_weight, decay, weight)
        product = cute.math.fma(other_product, decay, product)
    partial.peak[c], partial.weight[c], partial.product[c] = peak, weight, product


@dataclass(frozen=True)
class RowGroups:
    """Threads in groups, each pooling its own rows of one window over the same columns.

    column_threads  threads side by side, each with `columns` consecutive columns: one group
    groups          groups in a block; those that share a warp merge by shuffles, the rest through shared memory
    """

    column_threads: int
    groups: int
    columns: int

    @property
    def parts(self) -> int:
        """Partial results per column that go through shared memory."""
        return self.groups * self.column_threads // max(32, self.column_threads)

    @property
    def scratch_elements(self) -> int:
        return 3 * self.parts * self.column_threads * self.columns if self.groups > 1 else 0

    def merge_lanes(self, partial: Partial) -> None:
        """Merge the groups of one warp; afterwards the lanes of its first group hold the result."""
        distance = self.column_threads
        while distance < min(32, self.column_threads * self.groups):
            for c in range(self.columns):
                merge(partial, c, [tuple(cute.arch.shuffle_sync_bfly(x[c], offset=distance) for x in partial)])
            distance *= 2

    @cute.jit
    def merge_block(self, partial: Partial, scratch: cute.Tensor, tid: Int32):
        """Merge all groups; afterwards threads 0 .. column_threads-1 hold the result. `scratch`: [columns, column_threads, 3, parts]."""
        self.merge_lanes(partial)
        thread = tid % self.column_threads
        part = tid // cutlass.const_expr(max(32, self.column_threads))
        if tid % cutlass.const_expr(max(32, self.column_threads)) < self.column_threads:
            for q in cutlass.range_constexpr(3):
                cute.autovec_copy(partial[q], scratch[None, thread, q, part])
        cute.arch.sync_threads()
        if tid < self.column_threads:
            parts = cute.make_rmem_tensor(cute.make_layout((self.columns, 3, self.parts)), Float32)
            for g in cutlass.range_constexpr(self.parts):
                for q in cutlass.range_constexpr(3):
                    cute.autovec_copy(scratch[None, thread, q, g], parts[None, q, g])
            for c in cutlass.range_constexpr(self.columns):
                for q in cutlass.range_constexpr(3):
                    partial[q][c] = parts[c, q, 0]
                merge(partial, c, [(parts[c, 0, g], parts[c, 1, g], parts[c, 2, g]) for g in range(1, self.parts)])
