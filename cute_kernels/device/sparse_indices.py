"""The index-table kernel of both families: window entries and compressed entries of every row, checked and compacted.

The family hands in its form as values: where each part's columns lie, what an entry is (a pool's span), which lengths are
written and from which base they count.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.runtime import make_fake_tensor

from cute_kernels.device.compaction import WARP, fill, store_by_warp, store_by_warps
from cute_kernels.device.pdl import begin, end
from cute_kernels.device.slots import INT32_MAX, Divisor, Pool, any_below, load_ids, resolve_rows, resolve_slots
from cute_kernels.kv_format import WINDOW

# Entries of the window part per lane: one warp writes it in one chunk.
WINDOW_VECTOR = WINDOW // WARP
# Compressed ids that a lane looks up at once where one warp serves a row; as many more are on their way meanwhile.
IDS_PER_LANE = 8
# Up to so many rows, a whole block serves one row (short latency): a warp for the window, the others for the ids. Beyond, each
# warp serves a row of its own (fewest instructions per row).
FEW_ROWS = 1024
BLOCK_WARPS = 5


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


class SparseIndices:
    """source       an `IdSource` value
    vector       entries of the widest access: 4 or 8
    length_base  what `Outputs.lengths` counts besides the valid compressed entries
    pdl          launch with programmatic dependent launch
    """

    def __init__(self, *, source: str, vector: int, length_base: int, pdl: bool) -> None:
        self.source, self.vector, self.length_base, self.pdl = source, vector, length_base, pdl

    @cute.jit
    def launch(
        self, inputs: Inputs, outputs: Outputs, window: Pool, compressed: Pool | None, ratio: Divisor | None, independent: Int32, stream
    ):
        """Launch on `stream`: a block per row for few rows, a warp per row for many (host code inside a `@cute.jit` function)."""
        rows = outputs.window.shape[0]
        few = Int32(rows <= FEW_ROWS)
        if cutlass.const_expr(self.source == "none"):
            few = Int32(0)
        blocks = few * rows + (1 - few) * cute.ceil_div(rows, BLOCK_WARPS)
        self.kernel(inputs, outputs, window, compressed, ratio, few, independent).launch(
            grid=[blocks, 1, 1], block=[BLOCK_WARPS * WARP, 1, 1], stream=stream, use_pdl=self.pdl
        )

    @cute.kernel
    def kernel(
        self,
        inputs: Inputs,
        outputs: Outputs,
        window: Pool,
        compressed: Pool | None,
        ratio: Divisor | None,
        few: Int32,
        independent: Int32,
    ):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(thread // WARP)
        lane = thread % WARP

        begin(self.pdl, independent)
        if few != 0:
            if cutlass.const_expr(self.source != "none"):
                self.row_part(inputs, outputs, window, compressed, ratio, block, warp, lane, BLOCK_WARPS - 1)
        else:
            row = block * BLOCK_WARPS + warp
            self.row_part(inputs, outputs, window, compressed, ratio, row, Int32(0), lane, 1)
        end(self.pdl, independent)

    @cute.jit
    def row_part(
        self,
        inputs: Inputs,
        outputs: Outputs,
        window: Pool,
        compressed: Pool | None,
        ratio: Divisor | None,
        row: Int32,
        share: Int32,
        lane: Int32,
        warps: cutlass.Constexpr,
    ):
        """Serve a row by one warp (warps = 1); or this warp's share of it: `warps` warps share the ids, one more has the window."""
        chunks = IDS_PER_LANE // self.vector if warps == 1 else 1
        ids = cute.make_rmem_tensor(cute.make_layout((self.vector, chunks)), Int32)
        if row < outputs.window.shape[0]:
            columns = self.columns_of_ids(inputs, outputs, row)
            self.load_ids(inputs, row, share * ids_per_warp(ids), columns, lane, ids)
            end, request = self.state_of(inputs, row)
            if cutlass.const_expr(warps == 1):
                self.window_part(inputs, outputs, window, row, end, request, lane, warps == 1)
                self.compressed_part(inputs, outputs, compressed, ratio, row, end, request, columns, ids, share, lane, warps)
            elif share == warps:
                self.window_part(inputs, outputs, window, row, end, request, lane, warps == 1)
            else:
                self.compressed_part(inputs, outputs, compressed, ratio, row, end, request, columns, ids, share, lane, warps)

    @cute.jit
    def state_of(self, inputs: Inputs, row: Int32):
        """(position + 1, at least 0; request) of a row; (0, -1) for a padding row."""
        position, request, slot = Int64(-1), Int32(-1), Int64(0)
        known = (row < inputs.positions.shape[0]) & (row < inputs.token_to_req.shape[0])
        if cutlass.const_expr(inputs.slots is not None):
            known = known & (row < inputs.slots.shape[0])
        if known:
            position = inputs.positions[row]
            request = inputs.token_to_req[row]
            if cutlass.const_expr(inputs.slots is not None):
                slot = inputs.slots[row]
        real = (request >= 0) & (request < inputs.window_block_table.shape[0]) & (slot >= 0)
        end = Int32(cutlass.min(cutlass.max(position, Int64(-1)), Int64(INT32_MAX - 1))) + 1
        return Int32(cutlass.select_(real, end, Int32(0))), Int32(cutlass.select_(real, request, Int32(-1)))

    @cute.jit
    def window_part(
        self,
        inputs: Inputs,
        outputs: Outputs,
        pool: Pool,
        row: Int32,
        end: Int32,
        request: Int32,
        lane: Int32,
        streaming: cutlass.Constexpr,
    ):
        """Positions end-128 .. end-1 (from 0 on) through the block table, by one warp."""
        ids = cute.make_rmem_tensor(cute.make_layout((WINDOW_VECTOR, 1)), Int32)
        entries = cute.make_rmem_tensor(ids.layout, Int32)
        start = cutlass.max(end - WINDOW, Int32(0))
        for i in cutlass.range_constexpr(WINDOW_VECTOR):
            ids[i] = start + lane * WINDOW_VECTOR + i
        resolve_rows(ids, cutlass.min(end, pool.capacity), inputs.window_block_table[request, None], pool, entries)
        gRow = outputs.window[row, None]
        count, filled = store_by_warp(entries, gRow, Int32(0), Int32(0), Int32(0), lane, streaming)
        fill(gRow, cutlass.max(count, filled), lane, WARP, WINDOW_VECTOR, streaming)
        if cutlass.const_expr(outputs.window_lengths is not None):
            if lane == 0:
                outputs.window_lengths[row] = count

    @cute.jit
    def columns_of_ids(self, inputs: Inputs, outputs: Outputs, row: Int32) -> Int32:
        """Ids to read of a row, never more than its table part has columns."""
        columns = Int32(0)
        if cutlass.const_expr(inputs.ids is not None):
            if row < inputs.ids.shape[0]:
                columns = cutlass.min(Int32(inputs.ids.shape[1]), Int32(outputs.compressed.shape[1]))
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
    def resolve(self, inputs: Inputs, ids: cute.Tensor, limit: Int32, request: Int32, pool: Pool, entries: cute.Tensor):
        if cutlass.const_expr(self.source == "global"):
            resolve_slots(ids, limit, pool, entries)
        else:
            resolve_rows(ids, limit, inputs.compressed_block_table[request, None], pool, entries)

    @cute.jit
    def compressed_part(
        self,
        inputs: Inputs,
        outputs: Outputs,
        pool: Pool | None,
        ratio: Divisor | None,
        row: Int32,
        end: Int32,
        request: Int32,
        columns: Int32,
        ids: cute.Tensor,
        share: Int32,
        lane: Int32,
        warps: cutlass.Constexpr,
    ):
        """The row's compressed entries, by `warps` warps of which this is number `share`; `ids` holds its first ids."""
        count = Int32(0)
        if cutlass.const_expr(outputs.compressed is not None):
            gRow = outputs.compressed[row, None]
            if cutlass.const_expr(self.source == "global"):
                limit = Int32(cutlass.select_(request >= 0, pool.capacity, Int32(0)))
            else:
                limit = cutlass.min(ratio.quotient(end), pool.capacity)
            if cutlass.const_expr(self.source == "all_groups"):
                limit = cutlass.min(limit, Int32(gRow.shape[0]))
                columns = limit
            columns = Int32(cutlass.select_(limit == 0, Int32(0), columns))
            entries = cute.make_rmem_tensor(ids.layout, Int32)
            share_of_batch = ids_per_warp(ids)
            batch = share_of_batch * warps
            filled, buffer = Int32(0), Int32(0)
            if cutlass.const_expr(warps > 1):
                words = cute.arch.alloc_smem(Int32, 2 * warps, alignment=4 * warps)
                sWords = cute.make_tensor(words, cute.make_layout((warps, 2)))
            ahead = cute.make_rmem_tensor(ids.layout, Int32)
            for first in cutlass.range(0, columns, batch, unroll=1):
                if first + batch < columns:
                    self.load_ids(inputs, row, first + batch + share * share_of_batch, columns, lane, ahead)
                if cutlass.const_expr(warps > 1):
                    self.resolve(inputs, ids, limit, request, pool, entries)
                    count, filled = store_by_warps(entries, gRow, first, count, filled, share, warps, sWords[None, buffer], lane, "vectors")
                    buffer = 1 - buffer
                else:
                    some = cutlass.Boolean(True)
                    if count < first:  # after one that was not valid often none is
                        some = any_below(ids, limit)
                    if some:
                        self.resolve(inputs, ids, limit, request, pool, entries)
                        count, filled = store_by_warp(entries, gRow, first, count, filled, lane, True)
                for i in cutlass.range_constexpr(cute.size(ids)):
                    ids[i] = ahead[i]
            fill(gRow, cutlass.max(count, filled), share * WARP + lane, warps * WARP, self.vector, warps == 1)
        if cutlass.const_expr(outputs.lengths is not None):
            if (share == 0) & (lane == 0):
                outputs.lengths[row] = self.length_base + count


def ids_per_warp(ids: cute.Tensor) -> int:
    """Ids that the lanes of a warp hold in `ids` together."""
    return cute.size(ids) * WARP


def fake_inputs(vector: int) -> dict[str, object]:
    """Fake arguments common to both families, by argument name; the symbols say which extents must agree."""
    requests = cute.sym_int()

    def vector_of(dtype: type[cutlass.Numeric]) -> cute.Tensor:
        return make_fake_tensor(dtype, (cute.sym_int(),), (1,), assumed_align=dtype.width // 8)

    def block_table() -> cute.Tensor:
        return make_fake_tensor(Int32, (requests, cute.sym_int()), (cute.sym_int64(), 1), assumed_align=4)

    fakes: dict[str, object] = {
        "positions": vector_of(Int64),
        "token_to_req": vector_of(Int32),
        "window_block_table": block_table(),
        "slots": vector_of(Int64),
        "ids": fake_table(cute.sym_int(), cute.sym_int(), vector),
        "compressed_block_table": block_table(),
    }
    numbers = ("window_pages", "window_page_rows", "window_span", "compressed_pages", "compressed_page_rows", "compressed_span", "ratio")
    return {**fakes, **dict.fromkeys((*numbers, "independent"), Int32(1))}


def fake_table(rows: object, columns: object, vector: int) -> cute.Tensor:
    """A fake int32 [rows, columns] whose rows all start aligned to `vector` entries."""
    return make_fake_tensor(Int32, (rows, columns), (cute.sym_int64(divisibility=vector), 1), assumed_align=4 * vector)


def fake_lengths(rows: object) -> cute.Tensor:
    """A fake int32 [rows]."""
    return make_fake_tensor(Int32, (rows,), (1,), assumed_align=4)
