"""Order-preserving compaction of table entries: the valid ones (>= 0) first, -1 in every lane after.

A warp writes a row of a table chunk by chunk, `vector` consecutive entries a lane. The usual chunk is valid throughout
and goes out in vector stores as it stands; in any other, each valid entry is stored at its rank. The caller ends the row
with `fill`.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from cute_kernels.device.memory import base_address, store_vector

WARP = cute.arch.WARP_SIZE


@cute.jit
def all_valid(entries: cute.Tensor) -> Boolean:
    """True iff every entry of every lane of the warp is >= 0."""
    merged = entries[0]
    for i in cutlass.range_constexpr(1, cute.size(entries)):
        merged = merged | entries[i]
    return cute.arch.vote_all_sync(merged >= 0)


@cute.jit
def ranks(entries: cute.Tensor, lane: Int32, places: cute.Tensor) -> Int32:
    """places[i] = valid entries of the warp's chunk before this lane's entry i; returns the chunk's valid entries."""
    vector = cute.size(entries)
    before_lane = (Int32(1) << lane) - 1
    own, total = Int32(0), Int32(0)
    for i in cutlass.range_constexpr(vector):
        ballot = cute.arch.vote_ballot_sync(entries[i] >= 0)
        own = own + cute.arch.popc(ballot & before_lane)
        total = total + cute.arch.popc(ballot)
    for i in cutlass.range_constexpr(vector):
        places[i] = own
        own = own + Int32(entries[i] >= 0)
    return total


@cute.jit
def count_valid(entries: cute.Tensor) -> Int32:
    """Valid entries of the warp's chunk."""
    total = Int32(cute.size(entries) * WARP)
    if not all_valid(entries):
        total = Int32(0)
        for i in cutlass.range_constexpr(cute.size(entries)):
            total = total + cute.arch.popc(cute.arch.vote_ballot_sync(entries[i] >= 0))
    return total


@cute.jit
def store_chunk(entries: cute.Tensor, gRow: cute.Tensor, begin: Int32, lane: Int32) -> Int32:
    """Store the valid entries of the warp's chunk in order from column `begin` on; returns the column after the last.

    entries  registers: this lane's `vector` consecutive entries of the chunk
    gRow     the table row [width], its start aligned to a whole vector
    """
    vector = cute.size(entries)
    end = begin + vector * WARP
    if all_valid(entries) & (begin % vector == 0):
        gVectors = cute.zipped_divide(gRow, (vector,))
        store_vector(base_address(gVectors[None, begin // vector + lane]), entries)
    else:
        places = cute.make_rmem_tensor(cute.make_layout(vector), Int32)
        end = begin + ranks(entries, lane, places)
        for i in cutlass.range_constexpr(vector):
            if entries[i] >= 0:
                gRow[begin + places[i]] = entries[i]
    return end


@cute.jit
def fill(gRow: cute.Tensor, begin: Int32, thread: Int32, threads: cutlass.Constexpr, vector: cutlass.Constexpr):
    """-1 in columns begin.. of a table row, by `threads` threads; its width is a multiple of `vector`."""
    head = (begin + (vector - 1)) // vector
    if begin + thread < head * vector:
        gRow[begin + thread] = Int32(-1)
    blank = cute.make_rmem_tensor(cute.make_layout(vector), Int32)
    for i in cutlass.range_constexpr(vector):
        blank[i] = Int32(-1)
    gVectors = cute.zipped_divide(gRow, (vector,))
    for index in cutlass.range(head + thread, cute.size(gRow) // vector, threads, unroll=1):
        store_vector(base_address(gVectors[None, index]), blank)
