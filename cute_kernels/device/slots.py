"""From ids to table entries: loading them, block-table look-up, validity, remap, and the exact division that they need."""

import functools
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32, Uint64

from cute_kernels.device import WARP
from cute_kernels.device.memory import STREAM, at, base_address, load_below, load_vector

INT32_MAX = 2**31 - 1


class Divisor(NamedTuple):
    """A run-time divisor d >= 1, prepared on the host for `quotient`.

    With l = ceil(log2 d), at least 1, and magic = ceil(2^(31+l) / d), which lies in [2^31, 2^32), floor(n * magic / 2^(31+l)) equals
    n // d for every n in [0, 2^31): the excess n * (magic * d - 2^(31+l)) / (d * 2^(31+l)) is below n / 2^31 / d < 1 / d. The high
    half of n * magic leaves a shift of l - 1. For d = 1 the magic number would be 2^32: there (n + 1) * (2^32 - 1) has n as its high
    half, so magic and addend are 2^32 - 1. A wide multiply-add and a shift either way. An n below 2^32 has an excess below 2 / d: its
    quotient is one too large at most, and that only where the remainder is d - 1.
    """

    magic: Uint32
    addend: Uint32
    shift: Uint32

    @staticmethod
    def of(divisor: Int32) -> "Divisor":
        """Prepare a divisor (host code inside a `@cute.jit` function)."""
        bits = Int32(1)
        for bit in range(1, 31):
            bits = bits + Int32(divisor > (1 << bit))
        magic = ((Int64(1) << Int64(31 + bits)) + Int64(divisor) - 1) // Int64(divisor)
        one = divisor == 1
        addend = Int64(cutlass.select_(one, Int64(2**32 - 1), Int64(0)))
        return Divisor(Uint32(cutlass.select_(one, addend, magic)), Uint32(addend), Uint32(bits - 1))

    def quotient(self, n: Int32) -> Int32:
        """n // d for 0 <= n < 2^31; for a negative n (n + 2^32) // d, or one more where d divides n + 2^32 + 1."""
        product = Uint64(Uint32(n)) * Uint64(self.magic) + Uint64(self.addend)
        return Int32(Uint32(product >> Uint64(32)) >> self.shift)


class Pool(NamedTuple):
    """A paged pool as the kernels see it: slot = page * page_rows + offset, entry = page * span + offset.

    pages, span             as in `kv_format.PoolGeometry`; span is page_rows where a table holds slots
    minus_page_rows         -page_rows, so that offsets take one multiply-add
    by_page_rows            divisor for page_rows
    capacity                ids below it can be looked up: columns * page_rows of the block table, at most 2^31 - 1; or
                            pages * page_rows where ids are slots of the pool (up to 2^31: the bits of a Uint32)
    """

    pages: Int32
    minus_page_rows: Int32
    span: Int32
    by_page_rows: Divisor
    capacity: Int32

    @staticmethod
    def of(pages: Int32, page_rows: Int32, span: Int32, block_table: cute.Tensor | None) -> "Pool":
        """Prepare a pool whose pages `block_table` [requests, columns] lists (host code inside a `@cute.jit` function)."""
        if block_table is None:
            capacity = Int64(pages) * Int64(page_rows)
        else:
            capacity = cutlass.min(Int64(block_table.shape[1]) * Int64(page_rows), Int64(INT32_MAX))
        return Pool(pages, -page_rows, span, Divisor.of(page_rows), Int32(capacity))


@cute.jit
def load_ids(gIds: cute.Tensor, begin: Int32, columns: Int32, lane: Int32, ids: cute.Tensor):
    """A lane's ids of a row's columns begin.., `begin` being a multiple of the vector; -1 from `columns` on.

    ids  registers (vector, chunks): consecutive ids of this lane, chunk by chunk of the warp
    """
    vector, chunks = ids.shape
    bits = vector.bit_length() - 1  # shifts and masks: columns are never negative, which a signed division would provide for
    gVectors = cute.zipped_divide(gIds, (vector,))
    first = (begin >> bits) + lane
    if begin + cute.size(ids) * WARP <= columns:
        for chunk in cutlass.range_constexpr(chunks):
            load_vector(base_address(gVectors[None, first + chunk * WARP]), ids[None, chunk], STREAM)
    else:
        ids.fill(-1)
        for chunk in cutlass.range_constexpr(chunks):
            index = first + chunk * WARP
            if index < columns >> bits:
                load_vector(base_address(gVectors[None, index]), ids[None, chunk], STREAM)
        if columns & (vector - 1) != 0:
            for chunk in cutlass.range_constexpr(chunks):
                index = first + chunk * WARP
                if index == columns >> bits:
                    for i in cutlass.range_constexpr(vector - 1):
                        if (index << bits) + i < columns:
                            ids[i, chunk] = gIds[(index << bits) + i]


def least(ids: cute.Tensor) -> Uint32:
    """Smallest of a lane's ids as unsigned numbers: negative ones are larger than any other."""
    return functools.reduce(cutlass.min, [Uint32(ids[i]) for i in range(cute.size(ids))])


def largest(ids: cute.Tensor) -> Uint32:
    """Largest of a lane's ids as unsigned numbers: a negative one, if there is one."""
    return functools.reduce(cutlass.max, [Uint32(ids[i]) for i in range(cute.size(ids))])


def any_below(ids: cute.Tensor, limit: Int32) -> Boolean:
    """True iff 0 <= id < limit for any id of any lane of the warp."""
    return cute.arch.vote_any_sync(least(ids) < Uint32(limit))


def all_below(ids: cute.Tensor, limit: Int32) -> Boolean:
    """True iff 0 <= id < limit for every id of every lane of the warp."""
    return cute.arch.vote_all_sync(largest(ids) < Uint32(limit))


@cute.jit
def resolve_slots(ids: cute.Tensor, limit: Int32, pool: Pool, entries: cute.Tensor):
    """entries[i] = table entry of pool slot ids[i], or -1 unless 0 <= ids[i] < limit."""
    for i in cutlass.range_constexpr(cute.size(ids)):
        entry = ids[i] + pool.by_page_rows.quotient(ids[i]) * (pool.span + pool.minus_page_rows)
        entries[i] = Int32(cutlass.select_(Uint32(ids[i]) < Uint32(limit), entry, Int32(-1)))


@cute.jit
def resolve_rows(
    ids: cute.Tensor, limit: Int32, gPages: cute.Tensor, pool: Pool, entries: cute.Tensor, sign_only: cutlass.Constexpr = False
):
    """entries[i] = table entry of row ids[i] of a request, whose pages its block-table row `gPages` lists.

    -1 unless 0 <= ids[i] < limit and the block table's entry is a page of the pool; with `sign_only`, any negative number instead of -1.
    limit <= pool.capacity, so no column outside the table is read. All gathers are issued before the first is used.
    """
    count, base = cute.size(ids), base_address(gPages)
    offsets = cute.make_rmem_tensor(cute.make_layout(count), Int32)
    pages = cute.make_rmem_tensor(cute.make_layout(count), Int32)
    for i in cutlass.range_constexpr(count):
        column = pool.by_page_rows.quotient(ids[i])
        pages[i] = load_below(base, column, ids[i], limit)
        offsets[i] = ids[i] + column * pool.minus_page_rows
    if cutlass.const_expr(sign_only):
        mask_pages(pages, pool)
    for i in cutlass.range_constexpr(count):
        entry = pages[i] * pool.span + offsets[i]
        if cutlass.const_expr(not sign_only):
            entry = Int32(cutlass.select_(Uint32(pages[i]) < Uint32(pool.pages), entry, Int32(-1)))
        entries[i] = entry


@cute.jit
def mask_pages(pages: cute.Tensor, pool: Pool):
    """Replace pages outside the pool by -1.

    Usually there are none but -1 itself, which the largest and the smallest page tell: each takes one instruction for two pages where the
    GPU has three-input minima. An entry computed with page -1 is negative for any id: its offset (`Divisor.quotient`) lies in
    -1 .. page_rows - 1, so the entry lies in -span - 1 .. page_rows - 1 - span, and page_rows <= span < 2^31.
    """
    some = [pages[i] for i in range(cute.size(pages))]
    odd = (functools.reduce(cutlass.max, some) >= pool.pages) | (functools.reduce(cutlass.min, some) < -1)
    if cute.arch.vote_any_sync(odd):
        for i in cutlass.range_constexpr(cute.size(pages)):
            pages[i] = Int32(cutlass.select_(Uint32(pages[i]) < Uint32(pool.pages), pages[i], Int32(-1)))


@cute.jit
def resolve_valid_rows(ids: cute.Tensor, limit: Int32, gPages: cute.Tensor, pool: Pool, entries: cute.Tensor) -> Boolean:
    """As `resolve_rows` if all ids of the warp are valid, none of them guarded or judged by itself; else False, and no entries."""
    count, base = cute.size(ids), base_address(gPages)
    columns = cute.make_rmem_tensor(cute.make_layout(count), Int32)
    pages = cute.make_rmem_tensor(cute.make_layout(count), Int32)
    valid = all_below(ids, limit)
    if valid:
        for i in cutlass.range_constexpr(count):
            columns[i] = pool.by_page_rows.quotient(ids[i])
            pages[i] = at(base + Int64(Uint32(columns[i])) * 4, Int32, 1)[0]
        valid = all_below(pages, pool.pages)
        for i in cutlass.range_constexpr(count):
            entries[i] = pages[i] * pool.span + (ids[i] + columns[i] * pool.minus_page_rows)
    return valid
