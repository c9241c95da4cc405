"""From ids to table entries: loading them, block-table look-up, validity, remap, and the exact division that they need."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from cute_kernels.device.memory import STREAM, base_address, load_vector

WARP = cute.arch.WARP_SIZE
INT32_MAX = 2**31 - 1


class Divisor(NamedTuple):
    """A run-time divisor d >= 1, prepared on the host for `quotient`.

    With l = ceil(log2 d) and magic = ceil(2^(31+l) / d), which lies in [2^31, 2^32), floor(n * magic / 2^(31+l)) equals
    n // d for every n in [0, 2^31): the excess n * (magic * d - 2^(31+l)) / (d * 2^(31+l)) is below n / 2^31 / d < 1 / d.
    `quotient` takes the high half of (2n) * magic, so that the shift left over is l, also for d = 1.
    """

    magic: Uint32
    shift: Uint32

    @staticmethod
    def of(divisor: Int32) -> "Divisor":
        """Prepare a divisor (host code inside a `@cute.jit` function)."""
        shift = Int32(0)
        for bit in range(31):
            shift = shift + Int32(divisor > (1 << bit))
        magic = ((Int64(1) << Int64(31 + shift)) + Int64(divisor) - 1) // Int64(divisor)
        return Divisor(Uint32(magic), Uint32(shift))

    def quotient(self, n: Int32) -> Int32:
        """n // d for 0 <= n < 2^31: shift, high multiply, shift."""
        return Int32(cute.arch.mul_hi(Uint32(n) << Uint32(1), self.magic) >> self.shift)


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

    def entry_of_slot(self, slot: Int32) -> Int32:
        """The table entry of a valid slot of the pool."""
        return slot + self.by_page_rows.quotient(slot) * (self.span + self.minus_page_rows)


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
            elif index == columns >> bits:
                for i in cutlass.range_constexpr(vector - 1):
                    if (index << bits) + i < columns:
                        ids[i, chunk] = gIds[(index << bits) + i]


@cute.jit
def any_below(ids: cute.Tensor, limit: Int32) -> Boolean:
    """True iff 0 <= id < limit for any id of any lane of the warp."""
    least = Uint32(ids[0])
    for i in cutlass.range_constexpr(1, cute.size(ids)):
        least = cutlass.min(least, Uint32(ids[i]))
    return cute.arch.vote_any_sync(least < Uint32(limit))


@cute.jit
def resolve_slots(ids: cute.Tensor, limit: Int32, pool: Pool, entries: cute.Tensor):
    """entries[i] = table entry of pool slot ids[i], or -1 unless 0 <= ids[i] < limit."""
    for i in cutlass.range_constexpr(cute.size(ids)):
        valid = Uint32(ids[i]) < Uint32(limit)
        entries[i] = Int32(cutlass.select_(valid, pool.entry_of_slot(ids[i]), Int32(-1)))


@cute.jit
def resolve_rows(ids: cute.Tensor, limit: Int32, gPages: cute.Tensor, pool: Pool, entries: cute.Tensor):
    """entries[i] = table entry of row ids[i] of a request, whose pages its block-table row `gPages` lists.

    -1 unless 0 <= ids[i] < limit and the block table's entry is a page of the pool. limit <= pool.capacity, so no column
    outside the table is read. All gathers are issued before the first is used.
    """
    count = cute.size(ids)
    offsets = cute.make_rmem_tensor(cute.make_layout(count), Int32)
    pages = cute.make_rmem_tensor(cute.make_layout(count), Int32)
    for i in cutlass.range_constexpr(count):
        column = pool.by_page_rows.quotient(ids[i])
        page = Int32(-1)
        if Uint32(ids[i]) < Uint32(limit):
            page = gPages[column]
        pages[i] = page
        offsets[i] = ids[i] + column * pool.minus_page_rows
    for i in cutlass.range_constexpr(count):
        valid = Uint32(pages[i]) < Uint32(pool.pages)
        entries[i] = Int32(cutlass.select_(valid, pages[i] * pool.span + offsets[i], Int32(-1)))
