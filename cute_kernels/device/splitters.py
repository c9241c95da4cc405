"""How a window is split over blocks and groups of threads, and how they merge what they pooled and agree on one sum.

A splitter is a value handed to the kernel. `blocks` blocks work on one window, each on its own rows. They exchange partial softmaxes,
after which each owns 512 / blocks columns, and their sums of squares. Windows are counted by `turn`; `slots` and `barriers` come in
pairs, used in alternation. Only the threads that pool call, but for prepare and leave.

prepare(barriers, tid)                       once, before anything else; every thread calls
gather(partial, parts, barriers, turn, tid)  afterwards the owners hold the merged partial results of their columns
share(partial, slots, barriers, turn, tid)   afterwards `slots` [blocks * warps with columns] holds the partial
                                             sums for the threads that hold columns
leave()                                      once, behind everything else; every thread calls
"""

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, cute

from cute_kernels.device import convert, pooling


@dataclass(frozen=True)
class OneBlock:
    """One block owns all columns. No cluster: SM120. threads: those that pool."""

    threads: int
    blocks = 1

    def launch_options(self) -> dict:
        return {}

    def rank(self) -> Int32:
        return Int32(0)

    def prepare(self, barriers: cute.Tensor, tid: Int32) -> None:
        """Nothing to prepare."""

    def leave(self) -> None:
        """Nobody to wait for."""

    @cute.jit
    def gather(self, partial: pooling.Partial, parts: cute.Tensor, barriers: cute.Tensor, turn: Int32, tid: Int32):
        """Merge the groups of the block through `parts` [columns, column threads, 3, groups]; the first group holds the result."""
        if cutlass.const_expr(parts is not None):
            column_threads = parts.shape[1]
            for q in cutlass.range_constexpr(3):
                cute.autovec_copy(partial[q], parts[None, tid % column_threads, q, tid // column_threads])
            cute.arch.barrier(barrier_id=1, number_of_threads=self.threads)
            if tid < column_threads:
                pooling.merge_parts(partial, parts, tid)

    @cute.jit
    def share(self, partial: Float32, slots: cute.Tensor, barriers: cute.Tensor, turn: Int32, tid: Int32):
        """The first thread of each warp with columns contributes its warp's sum."""
        if (tid % 32 == 0) & (tid // 32 < cute.size(slots)):
            slots[tid // 32] = partial
        cute.arch.barrier(barrier_id=1, number_of_threads=self.threads)


@dataclass(frozen=True)
class RowCluster:
    """A cluster of `blocks` blocks, each with its share of a window's rows; afterwards each owns 512 / blocks columns.

    Partial softmaxes and sums travel by asynchronous stores into distributed shared memory, counted by transaction barriers in each
    block: unlike a barrier of the whole cluster this orders nothing else, so no block waits for its state rows to reach memory.
    All blocks leave together, so nobody writes into the shared memory of a block that left.
    """

    blocks: int
    groups: int

    def launch_options(self) -> dict:
        return {"cluster": [self.blocks, 1, 1]}

    def rank(self) -> Int32:
        return Int32(cute.arch.block_idx_in_cluster())

    @cute.jit
    def prepare(self, barriers: cute.Tensor, tid: Int32):
        """Initialise the barriers, and wait until every block of the cluster runs and has done so."""
        if tid < 4:
            cute.arch.mbarrier_init(barriers.iterator + tid, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.cluster_arrive_relaxed()
        cute.arch.cluster_wait()

    @cute.jit
    def gather(self, partial: pooling.Partial, parts: cute.Tensor, barriers: cute.Tensor, turn: Int32, tid: Int32):
        """Send each thread's partial result to the block that owns its columns; the first threads there merge what all blocks sent.

        parts: [columns, column threads / blocks, 3, blocks * groups]. No block sends before it has the sums of the turn before, which
        the owner sends when it has read its parts.
        """
        columns, owners = parts.shape[0], parts.shape[1]
        barrier = barriers.iterator + (2 + turn % 2)
        if tid == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, cute.size(parts) * 4)
        thread, group = tid % (owners * self.blocks), tid // (owners * self.blocks)
        for q in cutlass.range_constexpr(3):
            place = parts.iterator + cute.crd2idx((0, thread % owners, q, self.rank() * self.groups + group), parts.layout)
            pointer = cute.make_ptr(Float32, place.toint(), cute.AddressSpace.smem, assumed_align=columns * 4)
            bits = tuple(convert.bits_of(partial[q][c]) for c in range(columns))
            cute.arch.store_async_dsmem(pointer, bits, barrier, thread // owners)
        if tid < max(32, owners):
            cute.arch.mbarrier_wait(barrier, turn // 2 % 2)
            pooling.merge_parts(partial, parts, tid % owners)

    @cute.jit
    def share(self, partial: Float32, slots: cute.Tensor, barriers: cute.Tensor, turn: Int32, tid: Int32):
        """The first lanes of each warp with columns send its sum, each to one block; all threads wait for all sums.

        A barrier is used every second turn. A block two turns ahead cannot be: it needs this block's sums of the turn between.
        """
        barrier = barriers.iterator + turn % 2
        warps = cutlass.const_expr(cute.size(slots) // self.blocks)
        if tid == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, cute.size(slots) * 4)
        if (tid // 32 < warps) & (tid % 32 < self.blocks):
            place = slots.iterator + (self.rank() * warps + tid // 32)
            cute.arch.store_async_dsmem(place, convert.bits_of(partial), barrier, tid % 32)
        cute.arch.mbarrier_wait(barrier, turn // 2 % 2)

    def leave(self) -> None:
        """Wait until every thread of every block is here."""
        cute.arch.cluster_arrive_relaxed()
        cute.arch.cluster_wait()


@cute.jit
def total_of(slots: cute.Tensor) -> Float32:
    """The sum of all slots, always in the same order."""
    total = slots[0]
    for i in cutlass.range_constexpr(1, cute.size(slots)):
        total = total + slots[i]
    return total
