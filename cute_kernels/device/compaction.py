"""Order-preserving compaction of table entries: the valid ones (>= 0) first, -1 in every lane after.

A warp holds entries of a row chunk by chunk, `vector` consecutive ones a lane. A row's valid entries usually come first already: then a
batch goes out in vector stores as it stands, the -1s after its last valid entry included. Else each valid entry goes to its rank.
The caller ends the row with `fill`. Where entries that are not valid stand anywhere, a block packs its own in shared memory instead.
"""

import itertools

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint32
from cutlass._mlir.dialects import llvm

from cute_kernels.device import WARP
from cute_kernels.device.memory import base_address, store_vector

# A warp that several serve a row with says how many of its entries are valid and, in the upper half of the word, which column the
# last of them has if they come first in its share, else RAGGED.
HALF = 16
RAGGED = 0xFFFF


def at_shared(address: Int32) -> cute.Tensor:
    """The word of shared memory at a byte address."""
    return cute.make_tensor(cute.make_ptr(Int32, address, cute.AddressSpace.smem, assumed_align=4), cute.make_layout(1))


def add_below(value: Int32, lanes: int) -> Int32:
    """`value` plus that of the lane so many below, if there is one: a shuffle says so itself."""
    text = f"{{\n.reg .pred p;\n.reg .b32 r;\nmov.b32 $0, $1;\nshfl.sync.up.b32 r|p, $1, {lanes}, 0, -1;\n@p add.s32 $0, r, $1;\n}}"
    return Int32(llvm.inline_asm(Int32.mlir_type, [value.ir_value()], text, "=&r,r", has_side_effects=True))


def append(place: Int32, entry: Int32) -> Int32:
    """Store an entry that is valid at an address of shared memory; where the next one goes.

    Written as PTX: of a branch around a store ptxas makes one instruction more than a predicate takes.
    """
    text = "{\n.reg .pred p;\nsetp.ge.s32 p, $1, 0;\n@p st.shared.b32 [$0], $1;\n@p add.s32 $0, $0, 4;\n}"
    return Int32(llvm.inline_asm(Int32.mlir_type, [entry.ir_value(), place.ir_value()], text, "=r,r,0", has_side_effects=True))


def valid_lanes(entries: cute.Tensor, chunk: int) -> list[Int32]:
    """Of a chunk, the lanes whose entry is valid: a mask for each entry of a lane."""
    return [cute.arch.vote_ballot_sync(entries[i, chunk] >= 0) for i in range(entries.shape[0])]


def number(valid: list[Int32]) -> Int32:
    """Valid entries of a chunk."""
    return sum((cute.arch.popc(lanes) for lanes in valid), Int32(0))


def count_valid(entries: cute.Tensor) -> tuple[Int32, Boolean]:
    """(valid entries of the warp, none of them comes after one that is not)."""
    count, late, full = Int32(0), Int32(0), Int32(-1)
    for chunk in range(entries.shape[1]):
        valid = valid_lanes(entries, chunk)
        count = count + number(valid)
        for before, after in itertools.pairwise(valid):
            late = late | (after & ~before)
        # The first entry of each lane, against the last of the lane before.
        late = late | (valid[0] & ~((valid[-1] << 1) | ((full >> 31) & 1)))
        full = valid[-1]
    return count, late == 0


@cute.jit
def store_as_they_stand(
    entries: cute.Tensor, gRow: cute.Tensor, begin: Int32, lane: Int32, reach: cutlass.Constexpr, streaming: cutlass.Constexpr
):
    """Store entries, valid or not, at columns begin.. of a row, `begin` being a multiple of the vector.

    reach  the row has a column for "every" entry; or ends somewhere, after a number of whole "vectors" or "anywhere"
    """
    vector, chunks = entries.shape
    bits = vector.bit_length() - 1
    gVectors = cute.zipped_divide(gRow, (vector,))
    for chunk in cutlass.range_constexpr(chunks):
        index = (begin >> bits) + lane + chunk * WARP
        if cutlass.const_expr(reach == "every"):
            store_vector(base_address(gVectors[None, index]), entries[None, chunk], streaming)
        elif index < cute.size(gRow) >> bits:
            store_vector(base_address(gVectors[None, index]), entries[None, chunk], streaming)
        elif cutlass.const_expr(reach == "anywhere"):
            for i in cutlass.range_constexpr(vector - 1):
                if (index << bits) + i < cute.size(gRow):
                    gRow[(index << bits) + i] = entries[i, chunk]


@cute.jit
def store_ranked(entries: cute.Tensor, gRow: cute.Tensor, begin: Int32, lane: Int32):
    """Store the valid entries in order from column `begin` on."""
    vector, chunks = entries.shape
    lower = (1 << lane) - 1
    cute.arch.sync_warp()  # some columns may hold a -1 that another lane stored
    for chunk in cutlass.range_constexpr(chunks):
        valid = valid_lanes(entries, chunk)
        place = begin
        for i in cutlass.range_constexpr(vector):
            place = place + cute.arch.popc(valid[i] & lower)
        for i in cutlass.range_constexpr(vector):
            if entries[i, chunk] >= 0:
                gRow[place] = entries[i, chunk]
            place = place + Int32(entries[i, chunk] >= 0)
        begin = begin + number(valid)


@cute.jit
def store_by_warp(
    entries: cute.Tensor,
    gRow: cute.Tensor,
    first: Int32,
    count: Int32,
    filled: Int32,
    lane: Int32,
    streaming: cutlass.Constexpr,
):
    """Store the valid ones of a warp's entries in order from column `count` on. One warp has the row.

    entries  registers (vector, chunks): consecutive entries of this lane, chunk by chunk of the warp
    gRow     the table row [width], its start aligned to a whole vector, width a multiple of it
    first    number of entries that came before
    count    valid ones among them
    filled   columns from `count` to here hold -1 already

    Returns the new (count, filled).
    """
    own, in_order = count_valid(entries)
    if in_order & (count == first):
        store_as_they_stand(entries, gRow, first, lane, "vectors", streaming)
        filled = cutlass.min(first + cute.size(entries) * WARP, Int32(cute.size(gRow)))
    else:
        store_ranked(entries, gRow, count, lane)
    return count + own, filled


@cute.jit
def store_by_warps(
    entries: cute.Tensor,
    gRow: cute.Tensor,
    first: Int32,
    count: Int32,
    filled: Int32,
    share: Int32,
    warps: cutlass.Constexpr,
    sWords: cute.Tensor,
    lane: Int32,
):
    """As `store_by_warp`, where `warps` warps hold consecutive shares of the entries; this one has number `share`.

    sWords   shared memory, a word for each warp, aligned to all of them; not the same one for two calls in a row
    """
    each = cute.size(entries) * WARP
    own, in_order = count_valid(entries)
    if lane == 0:
        last = Int32(cutlass.select_(own > 0, share * each + own, Int32(0)))
        sWords[share] = own | (Int32(cutlass.select_(in_order, last, Int32(RAGGED))) << HALF)
    cute.arch.barrier(barrier_id=1, number_of_threads=warps * WARP)
    words = cute.make_rmem_tensor(cute.make_layout(warps), Int32)
    cute.autovec_copy(sWords, words)
    total, last = words[0], Uint32(words[0])
    for other in cutlass.range_constexpr(1, warps):
        total = total + words[other]
        last = cutlass.max(last, Uint32(words[other]))
    total = total & RAGGED
    if (count == first) & (Int32(last >> HALF) == total):
        store_as_they_stand(entries, gRow, first + share * each, lane, "vectors", False)
        filled = cutlass.min(first + warps * each, Int32(cute.size(gRow)))
    else:
        begin = count
        for other in cutlass.range_constexpr(warps - 1):
            begin = begin + Int32(cutlass.select_(share > other, words[other] & RAGGED, Int32(0)))
        store_ranked(entries, gRow, begin, lane)
    return count + total, filled


@cute.jit
def pack_by_warps(
    entries: cute.Tensor,
    gRow: cute.Tensor,
    count: Int32,
    carried: Int32,
    share: Int32,
    warps: cutlass.Constexpr,
    sWords: cute.Tensor,
    sEntries: cute.Tensor,
    lane: Int32,
):
    """Store the valid ones of a block's entries in order from column `count` on, as whole vectors by way of shared memory.

    entries    registers (vector, chunks): consecutive entries of this lane, chunk by chunk of the warp, warp by warp; at most 16
    gRow       the table row, its start aligned to a whole vector
    count      valid entries that came before
    carried    one of the last count % vector of them, which filled no whole vector: number `thread` of them in that thread
    sWords     shared memory, a word for each warp
    sEntries   shared memory for the block's entries and a vector more

    Returns the new (count, carried).
    """
    vector, chunks = entries.shape
    bits = vector.bit_length() - 1
    thread = share * WARP + lane
    field = 32 // chunks  # a chunk's number of valid entries takes so many bits
    low = (1 << field) - 1
    counts = Int32(0)  # of all chunks, each in a part of the word
    for chunk in cutlass.range_constexpr(chunks):
        valid = Int32(vector)
        for i in cutlass.range_constexpr(vector):
            valid = valid + (entries[i, chunk] >> 31)
        counts = counts + (valid << (field * chunk))
    upto = counts
    for bit in cutlass.range_constexpr(WARP.bit_length() - 1):
        upto = add_below(upto, 1 << bit)
    of_warp = cute.arch.shuffle_sync(upto, WARP - 1)
    before = upto - counts
    of_chunks = [Int32(Uint32(of_warp) >> (field * chunk)) & low for chunk in range(chunks)]
    if lane == 0:
        sWords[share] = sum(of_chunks, Int32(0))
    cute.arch.sync_threads()  # nobody reads older entries any more, either
    lead = count & (vector - 1)
    if thread < lead:
        sEntries[thread] = carried
    words = cute.make_rmem_tensor(cute.make_layout(warps), Int32)
    cute.autovec_copy(sWords, words)
    begin, total = lead, Int32(0)
    for other in cutlass.range_constexpr(warps):
        begin = begin + Int32(cutlass.select_(share > other, words[other], Int32(0)))
        total = total + words[other]
    base = Int32(sEntries.iterator.toint())
    for chunk in cutlass.range_constexpr(chunks):
        place = base + 4 * (begin + (Int32(Uint32(before) >> (field * chunk)) & low))  # in bytes
        for i in cutlass.range_constexpr(vector):
            place = append(place, entries[i, chunk])
        begin = begin + of_chunks[chunk]
    cute.arch.sync_threads()
    whole = (lead + total) >> bits
    sVectors, gVectors = cute.zipped_divide(sEntries, (vector,)), cute.zipped_divide(gRow, (vector,))
    packed = cute.make_rmem_tensor(cute.make_layout(vector), Int32)
    for chunk in cutlass.range_constexpr(chunks):
        index = thread + chunk * warps * WARP
        if index < whole:
            cute.autovec_copy(sVectors[None, index], packed)
            store_vector(base_address(gVectors[None, (count >> bits) + index]), packed)
    if thread < (lead + total) & (vector - 1):
        carried = sEntries[(whole << bits) + thread]
    return count + total, carried


@cute.jit
def fill(
    gRow: cute.Tensor, begin: Int32, thread: Int32, threads: cutlass.Constexpr, vector: cutlass.Constexpr, streaming: cutlass.Constexpr
):
    """-1 in columns begin.. of a table row, by `threads` threads, as far as whole vectors of it reach."""
    bits = vector.bit_length() - 1
    whole = cute.size(gRow) >> bits
    if begin < whole << bits:
        head = (begin + (vector - 1)) >> bits
        if begin + thread < (head << bits):
            gRow[begin + thread] = Int32(-1)
        blank = cute.make_rmem_tensor(cute.make_layout(vector), Int32)
        for i in cutlass.range_constexpr(vector):
            blank[i] = Int32(-1)
        gVectors = cute.zipped_divide(gRow, (vector,))
        for index in cutlass.range(head + thread, whole, threads, unroll=1):
            store_vector(base_address(gVectors[None, index]), blank, streaming)
