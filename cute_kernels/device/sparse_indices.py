"""The index-table kernel of both families: window entries and compressed entries of every row, checked and compacted.

The family hands in its form as values: where each part's columns lie, what an entry is (a pool's span), which lengths are
written and from which base they count.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint64

from cute_kernels.device import WARP
from cute_kernels.device.compaction import fill, store_as_they_stand, store_by_warp, store_by_warps
from cute_kernels.device.fakes import fake_table, fake_vector
from cute_kernels.device.memory import extent, in_range
from cute_kernels.device.pdl import begin, end, fetch_parameters
from cute_kernels.device.slots import (
    INT32_MAX,
    Divisor,
    Pool,
    all_below,
    any_below,
    load_ids,
    resolve_rows,
    resolve_slots,
    resolve_valid_rows,
)
from cute_kernels.kv_format import WINDOW

# Entries of the window part per lane: one warp writes it in one chunk.
WINDOW_VECTOR = WINDOW // WARP
# Compressed ids that a lane looks up at once; as many more are on their way meanwhile.
IDS_PER_LANE = 8
# Up to so many rows, a whole block serves one row (short latency): a warp for the window, the others for the ids. Beyond, each
# warp serves a row of its own (fewest instructions per row).
FEW_ROWS = 1024
BLOCK_WARPS = 3
RESIDENT = 12  # blocks that an SM can hold by their registers: more than 56 registers would make it 10


class Inputs(NamedTuple):
    """Tensors that say what each row is; None where the spec has no such argument.

    positions int64 [T]; token_to_req int32 [n]; slots int64 [m]; window_block_table, compressed_block_table int32
    [requests, columns]; ids int32 [rows of ids, k]
    """

    positions: cute.Tensor
    token_to_req: cute.Tensor
    slots: cute.Tensor | None
    window_block_table: cute.Tensor
    ids: cute.Tensor | None
    compressed_block_table: cute.Tensor | None

    @staticmethod
    def of(given: dict) -> "Inputs":
        """The inputs among a host function's arguments by name."""
        return Inputs(*(given.get(name) for name in Inputs._fields))


class Outputs(NamedTuple):
    """window int32 [rows, >= 128]; compressed int32 [rows, width]; lengths int32 [rows] of each part, or None."""

    window: cute.Tensor
    window_lengths: cute.Tensor | None
    compressed: cute.Tensor | None
    lengths: cute.Tensor | None


class Work(NamedTuple):
    """What a launch works on: its tensors, both pools, and the divisor of positions; None where the spec has no compressed part."""

    inputs: Inputs
    outputs: Outputs
    window: Pool
    compressed: Pool | None
    ratio: Divisor | None


class SparseIndices:
    """source       an `IdSource` value
    vector       entries of the widest access: 4 or 8
    length_base  what `Outputs.lengths` counts besides the valid compressed entries
    pdl          launch with programmatic dependent launch
    """

    def __init__(self, *, source: str, vector: int, length_base: int, pdl: bool) -> None:
        self.source, self.vector, self.length_base, self.pdl = source, vector, length_base, pdl

    @cute.jit
    def launch(self, work: Work, independent: Int32, stream):
        """Launch on `stream`: a block per row for few rows, a warp per row for many (host code inside a `@cute.jit` function)."""
        rows = work.outputs.window.shape[0]
        few = Int32(rows <= FEW_ROWS)
        if cutlass.const_expr(self.source == "none"):
            few = Int32(0)
        blocks = few * rows + (1 - few) * cute.ceil_div(rows, BLOCK_WARPS)
        self.kernel(work, few, independent).launch(
            grid=[blocks, 1, 1],
            block=[BLOCK_WARPS * WARP, 1, 1],
            min_blocks_per_mp=RESIDENT,
            preferred_smem_carveout=-1,  # the driver's default; without a value the DSL would ask a device
            stream=stream,
            use_pdl=self.pdl,
        )

    @cute.kernel
    def kernel(self, work: Work, few: Int32, independent: Int32):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(thread // WARP)
        lane = thread % WARP

        fetch_parameters(self.pdl, thread, (work, few, independent))
        begin(self.pdl, independent)
        if few != 0:
            if cutlass.const_expr(self.source != "none"):
                self.row_by_block(work, block, warp, lane)
        else:
            self.row_by_warp(work, block * BLOCK_WARPS + warp, lane)
        end(self.pdl, independent)

    @cute.jit
    def row_by_block(self, work: Work, row: Int32, warp: Int32, lane: Int32):
        """Serve a row by the warps of a block: the last one has the window, the others share the ids."""
        inputs, outputs = work.inputs, work.outputs
        warps = BLOCK_WARPS - 1
        ids = cute.make_rmem_tensor(cute.make_layout((self.vector, IDS_PER_LANE // self.vector)), Int32)
        ahead = cute.make_rmem_tensor(ids.layout, Int32)
        each = cute.size(ids) * WARP
        columns = self.columns_of_ids(work, row)
        self.load_ids(inputs, row, warp * each, columns, lane, ids)
        position, request, slot = self.look(inputs, row)
        if cutlass.const_expr(inputs.ids is None):
            self.load_ids(inputs, row, (warps + warp) * each, columns, lane, ahead)
        elif warps * each < columns:
            self.load_ids(inputs, row, (warps + warp) * each, columns, lane, ahead)
        end, request = self.judge(inputs, position, request, slot)
        if warp == warps:
            self.window_part(work, row, end, request, lane, False)
        else:
            limit, columns = self.reach(work, end, request, columns)
            gRow = outputs.compressed[row, None]
            entries = cute.make_rmem_tensor(ids.layout, Int32)
            words = cute.arch.alloc_smem(Int32, 2 * warps, alignment=4 * warps)
            sWords = cute.make_tensor(words, cute.make_layout((warps, 2)))
            count, filled, buffer = Int32(0), Int32(0), Int32(1)
            if columns > 0:  # the first batch by itself: it is mostly the only one
                self.resolve(work, ids, limit, request, entries)
                count, filled = store_by_warps(entries, gRow, Int32(0), count, filled, warp, warps, sWords[None, 0], lane)
            for first in cutlass.range(warps * each, columns, warps * each, unroll=1):
                self.resolve(work, ahead, limit, request, entries)
                if first + warps * each < columns:
                    self.load_ids(inputs, row, first + (warps + warp) * each, columns, lane, ahead)
                count, filled = store_by_warps(entries, gRow, first, count, filled, warp, warps, sWords[None, buffer], lane)
                buffer = 1 - buffer
            fill(gRow, cutlass.max(count, filled), warp * WARP + lane, warps * WARP, self.vector, False)
            if cutlass.const_expr(outputs.lengths is not None):
                if (warp == 0) & (lane == 0):
                    outputs.lengths[row] = self.length_base + count

    @cute.jit
    def row_by_warp(self, work: Work, row: Int32, lane: Int32):
        """Serve a row by one warp."""
        inputs, outputs = work.inputs, work.outputs
        ids = cute.make_rmem_tensor(cute.make_layout((self.vector, IDS_PER_LANE // self.vector)), Int32)
        each = cute.size(ids) * WARP
        if row < outputs.window.shape[0]:
            columns = self.columns_of_ids(work, row)
            self.load_ids(inputs, row, Int32(0), columns, lane, ids)
            position, request, slot = self.look(inputs, row)
            end, request = self.judge(inputs, position, request, slot)
            self.window_part(work, row, end, request, lane, True)
            count, filled = Int32(0), Int32(0)
            if cutlass.const_expr(outputs.compressed is not None):
                limit, columns = self.reach(work, end, request, columns)
                gRow = outputs.compressed[row, None]
                ahead = cute.make_rmem_tensor(ids.layout, Int32)
                for first in cutlass.range(0, columns, each, unroll=1):
                    if first + each < columns:
                        self.load_ids(inputs, row, first + each, columns, lane, ahead)
                    count, filled = self.enter(work, ids, gRow, limit, request, first, count, filled, lane, True)
                    for i in cutlass.range_constexpr(cute.size(ids)):
                        ids[i] = ahead[i]
                fill(gRow, cutlass.max(count, filled), lane, WARP, self.vector, True)
            if cutlass.const_expr(outputs.lengths is not None):
                if lane == 0:
                    outputs.lengths[row] = self.length_base + count

    @cute.jit
    def enter(
        self,
        work: Work,
        ids: cute.Tensor,
        gRow: cute.Tensor,
        limit: Int32,
        request: Int32,
        first: Int32,
        count: Int32,
        filled: Int32,
        lane: Int32,
        hopeful: cutlass.Constexpr,
    ):
        """Look up the ids of a warp's row from column `first` on and store the valid ones: the new (count, filled).

        hopeful  all of them may be valid
        """
        entries = cute.make_rmem_tensor(ids.layout, Int32)
        valid = Boolean(False)
        if cutlass.const_expr(hopeful):
            if count == first:
                valid = self.resolve_valid(work, ids, limit, request, entries)
        if valid:
            store_as_they_stand(entries, gRow, first, lane, "every", True)
            count = count + cute.size(ids) * WARP
        elif any_below(ids, limit):
            if cutlass.const_expr(ids.shape[1] > 1):  # some are valid: chunk by chunk, in all but one of which all are or none
                for chunk in cutlass.range_constexpr(ids.shape[1]):
                    part = cute.make_rmem_tensor(cute.make_layout((self.vector, 1)), Int32)
                    for i in cutlass.range_constexpr(self.vector):
                        part[i] = ids[i, chunk]
                    begin_at, more = first + chunk * self.vector * WARP, chunk + 1 < ids.shape[1]
                    count, filled = self.enter(work, part, gRow, limit, request, begin_at, count, filled, lane, more)
            else:
                self.resolve(work, ids, limit, request, entries)
                count, filled = store_by_warp(entries, gRow, first, count, filled, lane, True)
        return count, filled

    @cute.jit
    def look(self, inputs: Inputs, row: Int32):
        """(position, request, slot) as the inputs say of a row; (-1, -1, 0) if one of them ends before."""
        position, request, slot = Int64(-1), Int32(-1), Int64(0)
        known = (row < inputs.positions.shape[0]) & (row < inputs.token_to_req.shape[0])
        if cutlass.const_expr(inputs.slots is not None):
            known = known & (row < inputs.slots.shape[0])
        if known:
            position = inputs.positions[row]
            request = inputs.token_to_req[row]
            if cutlass.const_expr(inputs.slots is not None):
                slot = inputs.slots[row]
        return position, request, slot

    @cute.jit
    def judge(self, inputs: Inputs, position: Int64, request: Int32, slot: Int64):
        """(position + 1, at least 0; request) of a row; (0, -1) for a padding row."""
        real = in_range(request, extent(inputs.window_block_table)) & (slot >= 0)
        beyond = Int32(cutlass.select_(position < 0, Int32(0), Int32(INT32_MAX)))
        end = Int32(cutlass.select_(Uint64(position) < INT32_MAX, Int32(position) + 1, beyond))
        return Int32(cutlass.select_(real, end, Int32(0))), Int32(cutlass.select_(real, request, Int32(-1)))

    @cute.jit
    def reach(self, work: Work, end: Int32, request: Int32, columns: Int32):
        """(ids below it are valid, columns of ids to look at) of a row."""
        pool = work.compressed
        if cutlass.const_expr(self.source == "global"):
            limit = Int32(cutlass.select_(request >= 0, pool.capacity, Int32(0)))
        else:
            limit = cutlass.min(work.ratio.quotient(end), pool.capacity)
        if cutlass.const_expr(self.source == "all_groups"):
            limit = cutlass.min(limit, Int32(work.outputs.compressed.shape[1]))
            columns = limit
        return limit, Int32(cutlass.select_(limit == 0, Int32(0), columns))

    @cute.jit
    def window_part(self, work: Work, row: Int32, end: Int32, request: Int32, lane: Int32, streaming: cutlass.Constexpr):
        """Positions end-128 .. end-1 (from 0 on) through the block table, by one warp."""
        outputs, pool = work.outputs, work.window
        ids = cute.make_rmem_tensor(cute.make_layout((WINDOW_VECTOR, 1)), Int32)
        entries = cute.make_rmem_tensor(ids.layout, Int32)
        start = cutlass.max(end - WINDOW, Int32(0))
        for i in cutlass.range_constexpr(WINDOW_VECTOR):
            ids[i] = start + lane * WINDOW_VECTOR + i
        gRow, gPages = outputs.window[row, None], work.inputs.window_block_table[request, None]
        limit = cutlass.min(end, pool.capacity)
        valid = cutlass.Boolean(False)
        if cutlass.const_expr(streaming):
            valid = resolve_valid_rows(ids, limit, gPages, pool, entries)
        count, filled = Int32(WINDOW), Int32(0)
        if valid:
            store_as_they_stand(entries, gRow, Int32(0), lane, "every", streaming)
        else:
            resolve_rows(ids, limit, gPages, pool, entries)
            count, filled = store_by_warp(entries, gRow, Int32(0), Int32(0), Int32(0), lane, streaming)
        fill(gRow, cutlass.max(count, filled), lane, WARP, WINDOW_VECTOR, streaming)
        if cutlass.const_expr(outputs.window_lengths is not None):
            if lane == 0:
                outputs.window_lengths[row] = count

    @cute.jit
    def columns_of_ids(self, work: Work, row: Int32) -> Int32:
        """Ids to read of a row, never more than its table part has columns."""
        columns, given = Int32(0), work.inputs.ids
        if cutlass.const_expr(given is not None):
            if row < given.shape[0]:
                columns = cutlass.min(Int32(given.shape[1]), Int32(work.outputs.compressed.shape[1]))
        return columns

    @cute.jit
    def load_ids(self, inputs: Inputs, row: Int32, begin: Int32, columns: Int32, lane: Int32, ids: cute.Tensor):
        """This lane's ids of the warp's columns begin.., chunk by chunk, `vector` a lane; -1 past the last."""
        if cutlass.const_expr(inputs.ids is not None):
            load_ids(inputs.ids[row, None], begin, columns, lane, ids)
        else:
            for chunk in cutlass.range_constexpr(ids.shape[1]):
                for i in cutlass.range_constexpr(self.vector):
                    ids[i, chunk] = begin + (chunk * WARP + lane) * self.vector + i

    @cute.jit
    def resolve(self, work: Work, ids: cute.Tensor, limit: Int32, request: Int32, entries: cute.Tensor):
        """Compressed entries of ids below `limit`, as `resolve_slots` and `resolve_rows` make them."""
        if cutlass.const_expr(self.source == "global"):
            resolve_slots(ids, limit, work.compressed, entries)
        else:
            resolve_rows(ids, limit, work.inputs.compressed_block_table[request, None], work.compressed, entries)

    @cute.jit
    def resolve_valid(self, work: Work, ids: cute.Tensor, limit: Int32, request: Int32, entries: cute.Tensor) -> Boolean:
        """As `resolve` if all ids of the warp are valid; else False."""
        if cutlass.const_expr(self.source == "global"):
            valid = all_below(ids, limit)
            resolve_slots(ids, limit, work.compressed, entries)
        else:
            valid = resolve_valid_rows(ids, limit, work.inputs.compressed_block_table[request, None], work.compressed, entries)
        return valid


def fake_inputs(vector: int) -> dict[str, object]:
    """Fake arguments common to both families, by argument name; the symbols say which extents must agree."""
    requests = cute.sym_int()
    fakes: dict[str, object] = {
        "positions": fake_vector(cute.sym_int(), Int64),
        "token_to_req": fake_vector(cute.sym_int()),
        "window_block_table": fake_table(requests, cute.sym_int()),
        "slots": fake_vector(cute.sym_int(), Int64),
        "ids": fake_table(cute.sym_int(), cute.sym_int(), vector),
        "compressed_block_table": fake_table(requests, cute.sym_int()),
    }
    numbers = ("window_pages", "window_page_rows", "window_span", "compressed_pages", "compressed_page_rows", "compressed_span", "ratio")
    return {**fakes, **dict.fromkeys((*numbers, "independent"), Int32(1))}
