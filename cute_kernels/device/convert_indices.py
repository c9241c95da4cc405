"""Request-local ids as slots of a paged cache, for both families; optionally the valid ones first, in order, and their number.

A block serves a row: its warps take consecutive shares of a batch of ids, and each id is looked up as in the index tables.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from cute_kernels.compile.spec import ConvertIndicesSpec
from cute_kernels.device import WARP
from cute_kernels.device.compaction import fill, pack_by_warps, store_as_they_stand
from cute_kernels.device.fakes import fake_table, fake_vector
from cute_kernels.device.memory import extent, in_range
from cute_kernels.device.pdl import begin, fetch_parameters
from cute_kernels.device.slots import INT32_MAX, Pool, load_ids, resolve_rows

BATCH = 2  # vectors of ids that a lane holds at once
BLOCK_IDS = 1024  # that a block holds at once: by as many warps as that takes, as what a warp does once a row does not depend on its ids


class Arguments(NamedTuple):
    """Run-time arguments; None where the kernel has no such argument (`ConvertIndicesSpec.argument_names`)."""

    ids: Any
    token_to_req: Any
    block_table: Any
    out: Any
    workspace_starts: Any = None
    prefill_request_id: Any = None
    counts: Any = None
    pages: Any = None
    page_rows: Any = None
    block_stride_rows: Any = None


class Row(NamedTuple):
    """Where the ids of a row point.

    request   whose pages they lie on
    limit     ids below it can be looked up, 0 for none; as a Uint32
    start     row of the workspace that id 0 is, where `dense`
    """

    request: Int32
    limit: Int32
    start: Int32
    dense: cutlass.Boolean


class ConvertIndices:
    """vector    ids of the widest access: 4 or 8
    compact   valid entries first, with counts
    names     of the compiled function's arguments, in order
    """

    def __init__(self, *, vector: int, compact: bool, names: tuple, pdl: bool) -> None:
        self.vector, self.compact, self.names, self.pdl = vector, compact, names, pdl

    @property
    def warps(self) -> int:
        """Warps of a block, all on one row."""
        return BLOCK_IDS // (BATCH * self.vector * WARP)

    @cute.jit
    def __call__(self, *args):
        mA = Arguments(**dict(zip(self.names, args[:-1], strict=True)))
        pool = Pool.of(mA.pages, mA.page_rows, mA.block_stride_rows, mA.block_table)
        tensors = mA._replace(pages=None, page_rows=None, block_stride_rows=None)
        self.kernel(tensors, pool).launch(grid=[mA.ids.shape[0], 1, 1], block=[self.warps * WARP, 1, 1], stream=args[-1], use_pdl=self.pdl)

    @cute.kernel
    def kernel(self, mA: Arguments, pool: Pool):
        thread, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(thread // WARP)
        lane = thread % WARP
        share = BATCH * self.vector * WARP  # ids of a warp in a batch
        if cutlass.const_expr(self.compact):
            sWords = cute.make_tensor(cute.arch.alloc_smem(Int32, self.warps, alignment=4 * self.warps), cute.make_layout(self.warps))
            room = BLOCK_IDS + self.vector
            sEntries = cute.make_tensor(cute.arch.alloc_smem(Int32, room, alignment=4 * self.vector), cute.make_layout(room))

        fetch_parameters(self.pdl, thread, (mA, pool))
        begin(self.pdl)
        gIds, gOut = mA.ids[row, None], mA.out[row, None]
        columns = Int32(mA.ids.shape[1])
        ids = cute.make_rmem_tensor(cute.make_layout((self.vector, BATCH)), Int32)
        entries = cute.make_rmem_tensor(ids.layout, Int32)
        load_ids(gIds, warp * share, columns, lane, ids)
        state = self.state_of(mA, row, pool)
        count, carried = Int32(0), Int32(-1)
        for first in cutlass.range(0, columns, BLOCK_IDS, unroll=1):
            self.resolve(mA, ids, state, pool, entries)
            if first + BLOCK_IDS < columns:
                load_ids(gIds, first + BLOCK_IDS + warp * share, columns, lane, ids)
            if cutlass.const_expr(self.compact):
                count, carried = pack_by_warps(entries, gOut, count, carried, warp, self.warps, sWords, sEntries, lane)
            else:
                store_as_they_stand(entries, gOut, first + warp * share, lane, "anywhere", False)
        if cutlass.const_expr(self.compact):
            lead = count & (self.vector - 1)
            if thread < lead:
                gOut[count - lead + thread] = carried
            fill(gOut, count, thread, self.warps * WARP, self.vector, False)
            column = cutlass.max(count, columns & -self.vector) + thread
            if column < columns:  # what fills no whole vector
                gOut[column] = Int32(-1)
            if thread == 0:
                mA.counts[row] = count

    @cute.jit
    def state_of(self, mA: Arguments, row: Int32, pool: Pool) -> Row:
        """Where the ids of a row point."""
        request = Int32(mA.token_to_req[row])
        known = in_range(request, extent(mA.block_table))
        limit, start, dense = Int32(cutlass.select_(known, pool.capacity, Int32(0))), Int32(0), cutlass.Boolean(False)
        request = Int32(cutlass.select_(known, request, Int32(0)))
        if cutlass.const_expr(mA.prefill_request_id is not None):
            prefill = Int32(mA.prefill_request_id[row])
            if prefill >= 0:
                dense = cutlass.Boolean(True)
                limit = Int32(0)
                if prefill < extent(mA.workspace_starts):
                    start = Int32(mA.workspace_starts[prefill])
                    # Ids below 2^31 - start keep the sum inside int32; all do where start is negative.
                    limit = Int32(cutlass.min(Int64(INT32_MAX) + 1 - Int64(start), Int64(INT32_MAX) + 1))
        return Row(request, limit, start, dense)

    @cute.jit
    def resolve(self, mA: Arguments, ids: cute.Tensor, row: Row, pool: Pool, entries: cute.Tensor):
        """entries[i] = slot of ids[i]; where there is none -1, or, if they are compacted, any negative number."""
        if cutlass.const_expr(mA.prefill_request_id is None):
            resolve_rows(ids, row.limit, mA.block_table[row.request, None], pool, entries, sign_only=self.compact)
        else:
            if row.dense:
                for i in cutlass.range_constexpr(cute.size(ids)):
                    entry = row.start + ids[i]
                    valid = (Uint32(ids[i]) < Uint32(row.limit)) & (entry >= 0)
                    entries[i] = Int32(cutlass.select_(valid, entry, Int32(-1)))
            else:
                resolve_rows(ids, row.limit, mA.block_table[row.request, None], pool, entries, sign_only=self.compact)


def trace(spec: ConvertIndicesSpec) -> tuple[ConvertIndices, list[Any]]:
    """The host function of `spec` and fake arguments for `cute.compile`: what the compiled function checks on every call.

    token_to_req, prefill_request_id, counts and the rows of ids and out are as many. Row strides are run-time values.
    """
    vector, rows, k = spec.vector_bytes // 4, cute.sym_int(), cute.sym_int()

    made = {
        "ids": fake_table(rows, k, vector),
        "token_to_req": fake_vector(rows),
        "block_table": fake_table(cute.sym_int(), cute.sym_int()),
        "workspace_starts": fake_vector(cute.sym_int()),
        "prefill_request_id": fake_vector(rows),
        "out": fake_table(rows, k, vector),
        "counts": fake_vector(rows),
        **dict.fromkeys(("pages", "page_rows", "block_stride_rows"), Int32(1)),
    }
    kernel = ConvertIndices(vector=vector, compact=spec.compact, names=spec.argument_names, pdl=spec.pdl)
    return kernel, [made[name] for name in spec.argument_names]
