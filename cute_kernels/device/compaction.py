"""Order-preserving compaction of table entries: the valid ones (>= 0) first, -1 in every lane after.

A warp holds entries of a row chunk by chunk, `vector` consecutive ones a lane. Usually all it holds are valid and go out in
vector stores as they stand; else they are gathered in shared memory at their ranks, and go out in vector stores from there.
The caller ends the row with `fill`.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from cute_kernels.device.memory import base_address, store_vector

WARP = cute.arch.WARP_SIZE


def stage_words(entries_per_warp: int, vector: int) -> int:
    """int32 words of shared memory that `store_compacted` needs for each warp."""
    return entries_per_warp + vector


@cute.jit
def all_valid(entries: cute.Tensor) -> Boolean:
    """True iff every entry of every lane of the warp is >= 0."""
    merged = entries[0]
    for i in cutlass.range_constexpr(1, cute.size(entries)):
        merged = merged | entries[i]
    return cute.arch.vote_all_sync(merged >= 0)


@cute.jit
def valid_before(entries: cute.Tensor, lane: Int32):
    """Of each chunk, the valid entries in the lanes before this one and in all lanes, `32 // chunks` bits for each chunk.

    One scan serves all chunks: a chunk has at most 32 * vector valid entries, which fit its bits.
    """
    vector, chunks = entries.shape
    own = Int32(0)
    for chunk in cutlass.range_constexpr(chunks):
        valid = Int32(0)
        for i in cutlass.range_constexpr(vector):
            valid = valid + Int32(entries[i, chunk] >= 0)
        own = own | (valid << (32 // chunks * chunk))
    through = own
    for distance in (1, 2, 4, 8, 16):
        other = cute.arch.shuffle_sync_up(through, distance, mask_and_clamp=0)
        through = through + Int32(cutlass.select_(lane >= distance, other, Int32(0)))
    return through - own, cute.arch.shuffle_sync(through, WARP - 1)


@cute.jit
def of_chunk(packed: Int32, chunk: cutlass.Constexpr, chunks: cutlass.Constexpr) -> Int32:
    """The count of one chunk out of `valid_before`'s."""
    count = packed
    if cutlass.const_expr(chunks > 1):
        count = (packed >> (32 // chunks * chunk)) & ((1 << 32 // chunks) - 1)
    return count


@cute.jit
def count_valid(entries: cute.Tensor, lane: Int32) -> Int32:
    """Valid entries of the warp."""
    count = Int32(cute.size(entries) * WARP)
    if not all_valid(entries):
        _, total = valid_before(entries, lane)
        count = Int32(0)
        for chunk in cutlass.range_constexpr(entries.shape[1]):
            count = count + of_chunk(total, chunk, entries.shape[1])
    return count


@cute.jit
def store_compacted(entries: cute.Tensor, gRow: cute.Tensor, begin: Int32, lane: Int32, sStage: cute.Tensor) -> Int32:
    """Store the warp's valid entries in order from column `begin` on; returns the column after the last.

    entries  registers (vector, chunks): consecutive entries of this lane, chunk by chunk of the warp
    gRow     the table row [width], its start aligned to a whole vector
    sStage   shared memory of this warp alone, `stage_words` words, aligned to a whole vector
    """
    vector, chunks = entries.shape
    gVectors = cute.zipped_divide(gRow, (vector,))
    bits = vector.bit_length() - 1  # shifts and masks: columns are never negative, which a signed division would provide for
    ahead = begin & (vector - 1)
    first = begin >> bits
    end = begin + cute.size(entries) * WARP
    if all_valid(entries) & (ahead == 0):
        for chunk in cutlass.range_constexpr(chunks):
            store_vector(base_address(gVectors[None, first + chunk * WARP + lane]), entries[None, chunk])
    else:
        before, total = valid_before(entries, lane)
        staged = ahead
        for chunk in cutlass.range_constexpr(chunks):
            place = staged + of_chunk(before, chunk, chunks)
            for i in cutlass.range_constexpr(vector):
                if entries[i, chunk] >= 0:
                    sStage[place] = entries[i, chunk]
                place = place + Int32(entries[i, chunk] >= 0)
            staged = staged + of_chunk(total, chunk, chunks)
        end = begin + staged - ahead
        cute.arch.sync_warp()
        # Whole vectors from the stage, then the entries before the first and after the last of them.
        sVectors = cute.zipped_divide(sStage, (vector,))
        whole = staged >> bits
        for chunk in cutlass.range_constexpr(chunks):
            index = chunk * WARP + lane
            if (index < whole) & ((index > 0) | (ahead == 0)):
                copied = cute.make_rmem_tensor(cute.make_layout(vector), Int32)
                cute.autovec_copy(sVectors[None, index], copied)
                store_vector(base_address(gVectors[None, first + index]), copied)
        column = (first << bits) + lane
        if (lane >= ahead) & (lane < cutlass.min(staged, Int32(vector))) & (ahead > 0):
            gRow[column] = sStage[lane]
        last = (whole << bits) + lane
        if (last < staged) & ((whole > 0) | (ahead == 0)):
            gRow[column + (whole << bits)] = sStage[last]
        cute.arch.sync_warp()
    return end


@cute.jit
def store_ranked(entry: Int32, gRow: cute.Tensor, begin: Int32, lane: Int32, stores: Boolean) -> Int32:
    """Store one entry of each lane, if valid, in order from column `begin` on, in the warp that `stores`; returns the column after."""
    valid = cute.arch.vote_ballot_sync(entry >= 0)
    if stores & (entry >= 0):
        gRow[begin + cute.arch.popc(valid & ((1 << lane) - 1))] = entry
    return begin + cute.arch.popc(valid)


@cute.jit
def fill(gRow: cute.Tensor, begin: Int32, thread: Int32, threads: cutlass.Constexpr, vector: cutlass.Constexpr):
    """-1 in columns begin.. of a table row, by `threads` threads; its width is a multiple of `vector`."""
    bits = vector.bit_length() - 1
    if begin < cute.size(gRow):
        head = (begin + (vector - 1)) >> bits
        if begin + thread < (head << bits):
            gRow[begin + thread] = Int32(-1)
        blank = cute.make_rmem_tensor(cute.make_layout(vector), Int32)
        for i in cutlass.range_constexpr(vector):
            blank[i] = Int32(-1)
        gVectors = cute.zipped_divide(gRow, (vector,))
        for index in cutlass.range(head + thread, cute.size(gRow) >> bits, threads, unroll=1):
            store_vector(base_address(gVectors[None, index]), blank)
