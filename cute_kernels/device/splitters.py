"""How the 512 columns of a window are split over blocks, and how the blocks agree on one sum.

A splitter is a value handed to the kernel. `blocks` blocks work on one window, each on its own columns; the only thing they
exchange is the sum of squares. Windows are counted by `turn`; `slots` and `barriers` come in pairs, used in alternation.

prepare(barriers, tid)                       once, before anything else; every thread calls
share(partial, slots, barriers, turn, tid)   every thread calls; afterwards `slots` [blocks * warps with columns] holds the partial
                                             sums for the threads that hold columns
buffers                                      1 if `share` is a barrier of the whole block, 2 if threads may be one turn apart after it
"""

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, cute

from cute_kernels.device import convert


@dataclass(frozen=True)
class OneBlock:
    """One block owns all columns. No cluster: SM120."""

    blocks = 1
    buffers = 1

    def launch_options(self) -> dict:
        return {}

    def rank(self) -> Int32:
        return Int32(0)

    def prepare(self, barriers: cute.Tensor, tid: Int32) -> None:
        """Nothing to prepare."""

    @cute.jit
    def share(self, partial: Float32, slots: cute.Tensor, barriers: cute.Tensor, turn: Int32, tid: Int32):
        """The first thread of each warp with columns contributes its warp's sum."""
        if (tid % 32 == 0) & (tid // 32 < cute.size(slots)):
            slots[tid // 32] = partial
        cute.arch.sync_threads()


@dataclass(frozen=True)
class ColumnCluster:
    """A cluster of `blocks` blocks, each with 512 / blocks columns, which one warp holds.

    Sums travel by asynchronous stores into distributed shared memory, counted by a transaction barrier in each block: unlike a
    barrier of the whole cluster this orders nothing else, so no block waits for its state rows to reach memory, or drops its L1.
    A block leaves when the sums of all blocks have arrived, so nobody writes into the shared memory of a block that left.
    """

    blocks: int
    buffers = 2

    def launch_options(self) -> dict:
        return {"cluster": [self.blocks, 1, 1]}

    def rank(self) -> Int32:
        return Int32(cute.arch.block_idx_in_cluster())

    @cute.jit
    def prepare(self, barriers: cute.Tensor, tid: Int32):
        """Initialise both barriers, and wait until every block of the cluster runs and has done so."""
        if tid < 2:
            cute.arch.mbarrier_init(barriers.iterator + tid, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.cluster_arrive_relaxed()
        cute.arch.cluster_wait()

    @cute.jit
    def share(self, partial: Float32, slots: cute.Tensor, barriers: cute.Tensor, turn: Int32, tid: Int32):
        """Threads 0 .. blocks-1 each send this block's sum to one block; the first warp waits for all sums.

        A barrier is used every second turn. A block two turns ahead cannot be: it needs this block's sum of the turn between.
        """
        if tid < 32:
            barrier = barriers.iterator + turn % 2
            if tid == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.blocks * 4)
            if tid < self.blocks:
                cute.arch.store_async_dsmem(slots.iterator + self.rank(), convert.bits_of(partial), barrier, tid)
            cute.arch.mbarrier_wait(barrier, turn // 2 % 2)


@cute.jit
def total_of(slots: cute.Tensor) -> Float32:
    """The sum of all slots, always in the same order."""
    total = slots[0]
    for i in cutlass.range_constexpr(1, cute.size(slots)):
        total = total + slots[i]
    return total
