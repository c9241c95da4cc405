"""How a window of ratio 128 is split over blocks, by rows, and how they merge what they pooled and agree on one sum.

A splitter is a value handed to the kernel. A window falls into chunks; of each a block that pools it makes one partial result, and the
results of all chunks are folded in order, wherever they were made: so the bytes of a cache row do not depend on the split. Windows are
counted by `turn`. Only the threads that pool call, but for `choose` and `launch_options` (host) and `prepare`.
"""

import operator
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, cute

from cute_kernels.device import convert, pooling
from cute_kernels.kv_format import HEAD_DIM

COLUMNS = 4  # of a thread
SUM_THREADS = 16  # threads whose sums of squares are added by shuffles: 64 columns
SUMS = HEAD_DIM // COLUMNS // SUM_THREADS


class Share(NamedTuple):
    """What a block does of a window: it is the `rank`-th of 2^shift that share it."""

    rank: Any
    shift: Any


class Storage(NamedTuple):
    """Shared memory of a splitter."""

    totals: cute.Tensor  # [8, 2] sums of squares of 64 columns each, by parity of the turn
    barriers: cute.Tensor  # [4]: of the sums, then of the parts, by parity of the turn
    parts: Any  # [floats] partial results on their way


@dataclass(frozen=True)
class OneBlock:
    """One block pools whole windows, each group of threads its own rows. No cluster: SM120. threads: those that pool."""

    threads: int
    chunks = 1
    remainder = staticmethod(operator.mod)

    def choose(self, row_count: Int32, deal: int):
        """Blocks that share a window, and teams (host)."""
        return 1, deal

    def launch_options(self, blocks) -> dict:
        return {}

    def share(self) -> Share:
        return Share(0, 0)

    def allocate(self, array) -> Storage:
        parts = array(Float32, 3 * COLUMNS * self.threads) if self.threads * COLUMNS > HEAD_DIM else None
        return Storage(array(Float32, SUMS, 2), None, parts)

    def prepare(self, storage: Storage, tid: Int32) -> None:
        """Nothing to prepare."""

    def owns(self, share: Share, tid: Int32) -> Boolean:
        return tid < HEAD_DIM // COLUMNS

    def hand_over(self, storage: Storage, share: Share, partial, chunk, turn: Int32, tid: Int32) -> None:
        """The only chunk is the window."""

    @cute.jit
    def gather(self, storage: Storage, share: Share, partial: pooling.Partial, total: pooling.Partial, turn: Int32, tid: Int32):
        """Merge the groups of the block; the first group holds the result."""
        groups = cutlass.const_expr(self.threads * COLUMNS // HEAD_DIM)
        for q in cutlass.range_constexpr(3):
            cute.autovec_copy(partial[q], total[q])
        if cutlass.const_expr(groups > 1):
            parts = cute.make_tensor(storage.parts.iterator, cute.make_layout((COLUMNS, HEAD_DIM // COLUMNS, 3, groups)))
            pooling.merge_groups(total, parts, self.threads, tid)

    @cute.jit
    def sum(self, storage: Storage, share: Share, squares: Float32, turn: Int32, tid: Int32) -> Float32:
        slots = storage.totals[None, turn % 2]
        if (tid % SUM_THREADS == 0) & (tid // SUM_THREADS < SUMS):
            slots[tid // SUM_THREADS] = squares
        cute.arch.barrier(barrier_id=1, number_of_threads=self.threads)
        return pooling.total_of(slots)


@dataclass(frozen=True)
class RowCluster:
    """A cluster of blocks, as many as the step's row count asks for, each with its share of a window's rows; afterwards each owns
    512 / blocks columns. One group of 128 threads pools.

    Partial results and sums travel by asynchronous stores into distributed shared memory, counted by transaction barriers in each
    block: unlike a barrier of the whole cluster this orders nothing else, so no block waits for its state rows to reach memory.
    A block leaves when it has the sums of its last window, which is when nobody will write into its memory any more.

    steps: (most rows of the step, blocks, teams), ascending; the last one serves longer steps, too.
    """

    steps: tuple
    chunks = 8

    @staticmethod
    def remainder(n: Int32, teams: Int32) -> Int32:
        return n & (teams - 1)

    def choose(self, row_count: Int32, deal: int):
        blocks, teams = (Int32(n) for n in self.steps[-1][1:])
        for most, some, many in reversed(self.steps[:-1]):
            blocks = cutlass.select_(row_count <= most, Int32(some), blocks)
            teams = cutlass.select_(row_count <= most, Int32(many), teams)
        return blocks, teams

    def launch_options(self, blocks) -> dict:
        return {"cluster": [blocks, 1, 1]}

    def share(self) -> Share:
        blocks = Int32(cute.arch.cluster_size())
        return Share(Int32(cute.arch.block_idx_in_cluster()), Int32(cute.arch.popc(blocks - 1)))

    def allocate(self, array) -> Storage:
        least = min(blocks for _, blocks, _ in self.steps if blocks > 1)
        return Storage(array(Float32, SUMS, 2), array(cutlass.Int64, 4), array(Float32, 3 * HEAD_DIM * self.chunks // least))

    @cute.jit
    def prepare(self, storage: Storage, tid: Int32):
        """Initialise the barriers, and wait until every block of the cluster runs and has done so."""
        if tid < 4:
            cute.arch.mbarrier_init(storage.barriers.iterator + tid, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.cluster_arrive_relaxed()
        cute.arch.cluster_wait()

    def owners(self, share: Share) -> Int32:
        """Threads that finish a window's columns."""
        return Int32(HEAD_DIM // COLUMNS) >> share.shift

    def owns(self, share: Share, tid: Int32) -> Boolean:
        return tid < self.owners(share)

    def place(self, storage: Storage, share: Share, chunk, q: int, thread: Int32) -> cute.Tensor:
        """Where an owner has a chunk's peak, weight or product (q)."""
        place = storage.parts.iterator + ((chunk * 3 + q) * self.owners(share) + thread) * COLUMNS
        pointer = cute.make_ptr(Float32, place.toint(), cute.AddressSpace.smem, assumed_align=4 * COLUMNS)
        return cute.make_tensor(pointer, cute.make_layout(COLUMNS))

    def load(self, storage: Storage, share: Share, chunk: int, tid: Int32, target: pooling.Partial) -> None:
        for q in range(3):
            cute.autovec_copy(self.place(storage, share, chunk, q, tid), target[q])

    @cute.jit
    def hand_over(self, storage: Storage, share: Share, partial: pooling.Partial, chunk: Int32, turn: Int32, tid: Int32):
        """A thread's result of the block's `chunk`-th chunk: folded on the spot, or sent to the block that owns the columns.

        No block sends before it has the sums of the turn before, which an owner sends when it has read its parts.
        """
        if share.shift == 0:
            folded = pooling.Partial.empty(COLUMNS)
            if chunk > 0:
                self.load(storage, share, 0, tid, folded)
                for c in cutlass.range_constexpr(COLUMNS):
                    pooling.merge(folded, c, [(partial.peak[c], partial.weight[c], partial.product[c])])
            else:
                for q in cutlass.range_constexpr(3):
                    cute.autovec_copy(partial[q], folded[q])
            for q in cutlass.range_constexpr(3):
                cute.autovec_copy(folded[q], self.place(storage, share, 0, q, tid))
        else:
            if turn > 0:
                cute.arch.mbarrier_wait(storage.barriers.iterator + (turn - 1) % 2, (turn - 1) // 2 % 2)
            owners = self.owners(share)
            first = share.rank * (Int32(self.chunks) >> share.shift)
            for q in cutlass.range_constexpr(3):
                place = self.place(storage, share, first + chunk, q, tid & (owners - 1))
                bits = tuple(convert.bits_of(partial[q][c]) for c in range(COLUMNS))
                owner = tid >> (7 - share.shift)
                cute.arch.store_async_dsmem(place.iterator, bits, storage.barriers.iterator + (2 + turn % 2), owner)

    @cute.jit
    def gather(self, storage: Storage, share: Share, partial: pooling.Partial, total: pooling.Partial, turn: Int32, tid: Int32):
        """The owners fold what all blocks sent."""
        if share.shift == 0:
            self.load(storage, share, 0, tid, total)
        else:
            barrier = storage.barriers.iterator + (2 + turn % 2)
            owners = self.owners(share)
            if tid == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, owners * (4 * COLUMNS * 3 * self.chunks))
            if tid < owners:
                cute.arch.mbarrier_wait(barrier, turn // 2 % 2)
                loaded = pooling.Partial.empty(COLUMNS)
                self.load(storage, share, 0, tid, total)
                for chunk in cutlass.range_constexpr(1, self.chunks):
                    self.load(storage, share, chunk, tid, loaded)
                    for c in cutlass.range_constexpr(COLUMNS):
                        pooling.merge(total, c, [(loaded.peak[c], loaded.weight[c], loaded.product[c])])

    @cute.jit
    def sum(self, storage: Storage, share: Share, squares: Float32, turn: Int32, tid: Int32) -> Float32:
        """The first of 16 threads with columns send their sum, each to one block; whole warps of owners wait for all sums.

        A barrier is used every second turn. A block two turns ahead cannot be: it needs this block's sums of the turn between.
        """
        barrier, slots = storage.barriers.iterator + turn % 2, storage.totals[None, turn % 2]
        own = Int32(SUMS) >> share.shift
        cute.arch.sync_warp()  # what the warp has read of parts and sums before, others may overwrite once they have its sums
        if tid == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, SUMS * 4)
        if (tid // SUM_THREADS < own) & (tid % SUM_THREADS < (Int32(1) << share.shift)):
            place = slots.iterator + (share.rank * own + tid // SUM_THREADS)
            cute.arch.store_async_dsmem(place, convert.bits_of(squares), barrier, tid % SUM_THREADS)
        if tid < cutlass.max(self.owners(share), Int32(32)):
            cute.arch.mbarrier_wait(barrier, turn // 2 % 2)
        return pooling.total_of(slots)
