"""A window of ratio 128 split over blocks that meet in global memory: for hardware without clusters."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from cute_kernels.device import memory, pooling, splitters
from cute_kernels.device.splitters import LEVELS, ROOM, SUMS, Share, Tree
from cute_kernels.kv_format import HEAD_DIM
from cute_kernels.scratch import COUNTERS, PART, PARTS, TURNS


class Storage(NamedTuple):
    """Shared memory of the splitter."""

    totals: cute.Tensor  # [8, 2] sums of squares of 64 columns each, by parity of the turn
    arrived: cute.Tensor  # [1] blocks that had handed on their results before this one
    rooms: Any = None  # as those of `splitters.Storage`


@dataclass(frozen=True)
class RowScratch(Tree):
    """Blocks that each pool some of a window's rows and hand the result on through `scratch` (`cute_kernels.scratch`); the last one to come
    folds all results, by the same tree whoever it is, and finishes the window.

    Nobody waits for another block, so blocks of a team need not run at the same time, in whatever order they are started. What is not
    waited for must have room: so a team shares its first windows only, of which it has few where a step is split, and its blocks take
    turns at pooling later ones whole. A launch that may run beside another one (`independent`), or has no scratch, shares none.
    """

    def choose(self, row_count: Int32, deal: int, arguments):
        """Without room for sharing, as many teams of one block."""
        for blocks, teams in self.splits:
            if blocks > 1 and (teams * TURNS > COUNTERS or teams * blocks * TURNS > PARTS):
                raise ValueError(f"{teams} teams of {blocks} blocks don't fit the scratch memory")
        blocks, teams = super().choose(row_count, deal, arguments)
        shared = arguments.may_meet()
        return cutlass.select_(shared, blocks, Int32(1)), cutlass.select_(shared, teams, teams * blocks)

    def shift(self, blocks: Int32) -> Int32:
        return sum((cutlass.select_(blocks > (1 << s), Int32(1), Int32(0)) for s in range(LEVELS)), Int32(0))

    def room_bytes(self, blocks) -> int:
        return LEVELS * ROOM

    def share(self, shift: Int32) -> Share:
        block, _, _ = cute.arch.block_idx()
        return Share(Int32(block) & ((Int32(1) << shift) - 1), shift, Int32(block) >> shift)

    def part(self, share: Share, nth: Int32) -> tuple:
        shared, blocks = nth < TURNS, Int32(1) << share.shift
        rank, shift = (cutlass.select_(shared, x, Int32(0)) for x in (share.rank, share.shift))
        return Share(rank, shift, share.place * TURNS + nth), shared | ((nth & (blocks - 1)) == share.rank)

    def finishing(self, share: Share) -> Share:
        return Share(0, 0)

    def label(self, nth: Int32) -> Int32:
        return nth << 1

    def allocate(self, array) -> Storage:
        return Storage(array(Float32, SUMS, 2), array(Int32, 1))

    def prepare(self, storage: Storage, tid: Int32) -> None:
        """Nothing to prepare."""

    def owns(self, share: Share, tid: Int32) -> Boolean:
        return tid < self.threads

    def sum(self, storage: Storage, share: Share, squares: Float32, turn: Int32, tid: Int32) -> Float32:
        return splitters.sum_in_block(storage.totals[None, turn & 1], squares, self.columns, self.threads, tid)

    def root(self, address: Int64) -> pooling.Partial:
        """A block's root, of one thread's columns."""
        found = pooling.Partial.empty(self.columns)
        for q in range(3):
            memory.load_vector(address + q * HEAD_DIM * 4, found[q])
        return found

    @cute.jit
    def gather(self, storage: Storage, share: Share, partial: pooling.Partial, turn: Int32, tid: Int32, scratch) -> Boolean:
        """Hand on the block's root, and, as the last block of the window, fold all.

        A thread's stores come before the block's barrier, that before the atomic addition, which releases what it follows and acquires what
        the additions before it released, and the loads come after the next barrier. The counter is zero again when the grid ends.
        """
        last = Boolean(True)
        if share.shift > 0:
            counter = memory.base_address(scratch) + Int64(share.place) * 4
            place = (COUNTERS + (share.place << share.shift) * PART + tid * self.columns) * 4
            roots = memory.base_address(scratch) + Int64(place)
            for q in cutlass.range_constexpr(3):
                memory.store_vector(roots + Int64((share.rank * PART + q * HEAD_DIM) * 4), partial[q])
            cute.arch.barrier(barrier_id=1, number_of_threads=self.threads)
            if tid == 0:
                pointer = memory.at(counter, Int32, 1).iterator
                storage.arrived[0] = cute.arch.atomic_add(pointer, Int32(1), sem="acq_rel", scope="gpu")
            cute.arch.barrier(barrier_id=1, number_of_threads=self.threads)
            last = storage.arrived[0] == (Int32(1) << share.shift) - 1
            if last:
                for shift in self.shifts():
                    if share.shift == shift:
                        found = [self.root(roots + block * PART * 4) for block in range(1 << shift)]  # all loads come before the first use
                        self.merge(partial, found.__getitem__, shift)
                if tid == 0:
                    memory.at(counter, Int32, 1)[0] = Int32(0)
        return last
