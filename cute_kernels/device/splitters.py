"""How a window of ratio 128 is split over blocks, by rows, and how they merge what they pooled and agree on one sum.

A splitter is a value handed to the kernel. A window falls into chunks, whose partial results are folded in pairs, pairs of pairs and so on,
inside a block as between blocks, each of which has a subtree: so the bytes of a cache row do not depend on the split. A team's windows
are counted by `nth`, those of them that a block has a part in by `turn`. `fold`, `late`, `gather`, `sum` and `owns` are for threads that
pool; `choose`, `shift`, `room_bytes`, `launch_options` and `adjust_launch` are host code. `RowCluster` splits over a cluster,
`scratch_split.RowScratch` over global memory.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, cute
from cutlass._mlir import ir
from cutlass._mlir.dialects import arith, cuda, llvm, scf

from cute_kernels.device import WARP, convert, memory, pooling
from cute_kernels.kv_format import HEAD_DIM

SUMS = 8  # of squares, of 64 columns each, that are added after shuffles
# (Most rows of a step, blocks that share a window, teams of them): few windows are spread over many blocks. Chosen by steps of four
# prompts, 900 to 5000 rows, on an H200 (2026-11-30), also such as do not end with a window, which load teams less evenly.
STEPS = ((2048, 8, 16), (2560, 4, 32), (4096, 4, 64), (8192, 2, 64), (16384, 2, 128), (2**31 - 1, 1, 256))
EVENLY_PLACED = 4  # blocks of the clusters that are placed evenly over the SMs: those of two gained nothing, those of eight lost
LEVELS = 3  # of the tree that folds the results of a window's chunks
ROOM = 3 * HEAD_DIM * 4  # bytes of a room for partial results of a window's columns


class Share(NamedTuple):
    """What a block does of a window: it is the `rank`-th of 2^shift that share it. place: where they meet (RowScratch)."""

    rank: Any
    shift: Any
    place: Any = None


class Storage(NamedTuple):
    """Shared memory of a splitter."""

    totals: cute.Tensor  # [8, 2] sums of squares of 64 columns each, by parity of the turn
    barriers: cute.Tensor | None  # [4]: of the sums, then of what is sent, by parity of the turn
    rooms: Any = None  # byte address of the rooms, which lie behind everything else


@cute.jit
def sum_in_block(slots: cute.Tensor, squares: Float32, columns: cutlass.Constexpr, threads: cutlass.Constexpr, tid: Int32) -> Float32:
    """The sum of what the first thread of each 64 columns has, known to all `threads` that pool. slots: [8] in shared memory."""
    together = cutlass.const_expr(HEAD_DIM // SUMS // columns)
    if (tid % together == 0) & (tid // together < SUMS):
        slots[tid // together] = squares
    cute.arch.barrier(barrier_id=1, number_of_threads=threads)
    return pooling.total_of(slots)


class Splitter:
    """What a launch needs where a splitter does not say otherwise: nothing."""

    def room_bytes(self, blocks) -> Any:
        """Of the rooms for partial results that a launch with so many blocks a window has (host)."""
        return 0

    def launch_options(self, blocks) -> dict:
        """Keyword arguments of the launch (host)."""
        return {}

    def late(self, part: Share) -> Share:
        """A part for what comes when its rows are pooled. What that computes of it may take no registers before."""
        return part

    def adjust_launch(self) -> None:
        """Add to the launch just made (host)."""


class Alike(Splitter):
    """Splitters that do with all windows of a team the same: every block has the same part in each, and finishes some columns of it."""

    def shift(self, blocks) -> None:
        """What a launch must be told of how many blocks share a window (host)."""
        return None

    def part(self, share: Share, nth: Int32) -> tuple:
        """This block's part in the team's nth window, and whether it has one."""
        return share, True

    def finishing(self, share: Share) -> Share:
        """The columns that a block finishes, as if it shared them so."""
        return share

    def label(self, nth: Int32) -> Int32:
        """How a stage's note names its window; bit 0 is free."""
        return Int32(0)


@dataclass(frozen=True)
class OneBlock(Alike):
    """One block pools whole windows: ratio 4. columns: of a thread."""

    columns: int
    chunks = 1

    def fixed(self, deal: Int32, planned: int):
        """Teams, as a constant if it is one."""
        return planned

    @staticmethod
    def unit_of(n: Int32, teams: Int32, bits) -> Int32:
        """The unit of 2^bits rows, of as many units as there are teams, that is the nth team's; n may be larger."""
        return n % teams

    def choose(self, row_count: Int32, deal: int, arguments):
        """Blocks that share a window, and teams (host)."""
        return 1, deal

    def share(self, shift) -> Share:
        """This block's share of a window."""
        return Share(0, 0)

    def allocate(self, array) -> Storage:
        """Shared memory, made by `array(dtype, *shape)`."""
        return Storage(array(Float32, SUMS, 2), barriers=None)

    def prepare(self, storage: Storage, tid: Int32) -> None:
        """Nothing to prepare."""

    def owns(self, share: Share, tid: Int32) -> Boolean:
        """Whether a thread finishes columns of the window."""
        return Boolean(True)

    def fold(self, storage: Storage, partial: pooling.Partial, chunk, last, tid: Int32) -> None:
        """The only chunk is the window."""

    def gather(self, storage: Storage, share: Share, partial: pooling.Partial, turn: Int32, tid: Int32, scratch):
        """Whether this block finishes the window, of which it then has the merged result."""
        return True

    def sum(self, storage: Storage, share: Share, squares: Float32, turn: Int32, tid: Int32) -> Float32:
        """The sum of squares of all columns; each thread hands in that of its columns' group of 64."""
        return sum_in_block(storage.totals[None, turn & 1], squares, self.columns, HEAD_DIM // self.columns, tid)


@dataclass(frozen=True)
class Tree(Splitter):
    """A window's chunks folded as a tree, whose subtrees blocks have, as many as the step's row count asks for. One group of threads pools.

    Partial results lie in rooms behind everything else in the block's shared memory, of which a launch has as many as it needs
    (`room_bytes`), so that more blocks fit on an SM where it needs few: first one for what other blocks send, then those for the levels.

    columns  of a thread
    few      as `STEPS`, for steps in which few windows close; those longer than its last take `STEPS`
    """

    columns: int
    few: tuple[tuple[int, int, int], ...]
    chunks = 1 << LEVELS

    @property
    def threads(self) -> int:
        """Threads that pool."""
        return HEAD_DIM // self.columns

    def fixed(self, deal: Int32, planned: int) -> Int32:
        return deal

    @staticmethod
    def unit_of(n: Int32, teams: Int32, bits: Int32) -> Int32:
        return n & (teams - 1)

    def choose(self, row_count: Int32, deal: int, arguments):
        """A step of many requests, with less than a window's rows of each, is one of decoding, or a captured graph that is mostly padding:
        as few windows may close as in a short step."""
        few = row_count < memory.extent(arguments.state_block_table) * 128
        blocks, teams = (Int32(n) for n in STEPS[-1][1:])
        for table, asked in ((STEPS[:-1], Boolean(True)), (self.few, few)):
            for most, some, many in reversed(table):
                wanted = asked & (row_count <= most)
                blocks, teams = cutlass.select_(wanted, Int32(some), blocks), cutlass.select_(wanted, Int32(many), teams)
        return blocks, teams

    @property
    def splits(self) -> list[tuple[int, int]]:
        """Blocks and teams that a launch may have."""
        return [split[1:] for split in (*self.few, *STEPS)]

    def shifts(self) -> list[int]:
        """Of the teams of several blocks."""
        return sorted({blocks.bit_length() - 1 for blocks, _ in self.splits if blocks > 1})

    def late(self, part: Share) -> Share:
        """A shift of which the compiler knows nothing: addresses made of it are not computed in front of all windows' loop."""
        operands = [Int32(part.shift).ir_value()]
        return part._replace(shift=Int32(llvm.inline_asm(Int32.mlir_type, operands, "mov.b32 $0, $1;", "=r,r", has_side_effects=True)))

    def place(self, storage: Storage, room, first, q: int, threads, thread: Int32) -> cute.Tensor:
        """Where a peak, weight or product (q) lies of the first-th of a room's partial results, which `threads` threads have."""
        place = storage.rooms + room * ROOM + q * (ROOM // 3) + (first * threads + thread) * self.columns * 4
        pointer = cute.make_ptr(Float32, place, cute.AddressSpace.smem, assumed_align=4 * self.columns)
        return cute.make_tensor(pointer, cute.make_layout(self.columns))

    def load(self, storage: Storage, room, first, threads, tid: Int32) -> pooling.Partial:
        found = pooling.Partial.empty(self.columns)
        for q in range(3):
            cute.autovec_copy(self.place(storage, room, first, q, threads, tid), found[q])
        return found

    @cute.jit
    def fold(self, storage: Storage, partial: pooling.Partial, chunk: Int32, last: Boolean, tid: Int32):
        """Fold what a thread has of the block's chunks so far, as a binary counter carries: after the last one it has the root.

        The threads' results of the left halves lie in a room for each level, that of the lowest level in the last. The highest level is
        used by single blocks only, and only blocks that share windows are sent anything, to its room.
        """
        room = Int32(LEVELS - 1)
        while ((chunk >> (LEVELS - 1 - room)) & 1) != 0:
            left = self.load(storage, room, 0, self.threads, tid)
            pooling.fold(left, partial)
            for q in cutlass.range_constexpr(3):
                cute.autovec_copy(left[q], partial[q])
            room -= 1
        if not last:
            for q in cutlass.range_constexpr(3):
                cute.autovec_copy(partial[q], self.place(storage, room, 0, q, self.threads, tid))

    def tree(self, load, first: int, count: int) -> pooling.Partial:
        """The roots of `count` blocks from the first-th on, folded in pairs. load: from a block to its root."""
        if count == 1:
            return load(first)
        left = self.tree(load, first, count // 2)
        pooling.fold(left, self.tree(load, first + count // 2, count // 2))
        return left

    def merge(self, partial: pooling.Partial, load, shift: int) -> None:
        """Put what 2^shift blocks pooled into `partial`. load: from a block to its root."""
        root = self.tree(load, 0, 1 << shift)
        for q in range(3):
            cute.autovec_copy(root[q], partial[q])


@dataclass(frozen=True)
class RowCluster(Tree, Alike):
    """A cluster of blocks, each with its share of a window's rows; afterwards each owns 512 / blocks columns.

    Partial results and sums travel by asynchronous stores into distributed shared memory, counted by transaction barriers in each
    block: unlike a barrier of the whole cluster this orders nothing else, so no block waits for its state rows to reach memory.
    A block leaves when it has the sums of its last window, which is when nobody will write into its memory any more.
    """

    @staticmethod
    def unit_of(n: Int32, teams: Int32, bits: Int32) -> Int32:
        """Of units of 64 rows, of which a prompt closes a window in every second one, neighbours have every second one.

        An H200 seems to place clusters on its parts by turns: prefill 2048, 16 of 32 clusters with a window, took 6.7 µs where these were
        every second one and 6.0 where they were neighbours (8696e1e, 2026-11-30).
        """
        n = Tree.unit_of(n, teams, bits)
        apart = cutlass.select_(2 * n >= teams, 2 * n - (teams - 1), 2 * n)
        return cutlass.select_(bits == 6, apart, n)

    def room_bytes(self, blocks: Int32) -> Int32:
        """Blocks of the largest teams have one chunk each, nothing to fold."""
        return cutlass.select_(blocks == self.chunks, Int32(ROOM), Int32(LEVELS * ROOM))

    def launch_options(self, blocks) -> dict:
        return {"cluster": [blocks, 1, 1]}

    def adjust_launch(self) -> None:
        """Have clusters of `EVENLY_PLACED` blocks placed evenly over the SMs.

        By default an H200 puts two clusters on the same SMs while others have none: ratio 128, prefill 2048, 32 clusters of four, half of
        them with a window, took 7.0 µs by default and 5.9 placed evenly (310e0db, 2026-11-30); clusters of eight took up to 0.2 µs longer.
        The DSL's launch has no argument for it: the operation goes behind the one that says how many blocks a cluster has.
        """
        operations = list(ir.InsertionPoint.current.block.operations)
        sizes = [i for i, operation in enumerate(operations) if operation.operation.name == "cuda.launch_cfg.cluster_dim"]
        if not sizes:
            raise RuntimeError("this version of nvidia-cutlass-dsl makes no cuda.launch_cfg.cluster_dim of a launch with clusters")
        at = sizes[-1]
        loc, (config, size, *_) = operations[at].location, operations[at].operation.operands
        with ir.InsertionPoint(operations[at + 1]):
            wanted = arith.constant(size.type, EVENLY_PLACED, loc=loc)
            branch = scf.IfOp(arith.cmpi(arith.CmpIPredicate.eq, size, wanted, loc=loc), loc=loc)
            with ir.InsertionPoint(branch.then_block):
                policy = cuda.CudaClusterSchedulingPolicy.cudaClusterSchedulingPolicyLoadBalancing
                cuda.launch_cfg_cluster_scheduling_policy(config, policy, loc=loc)
                scf.yield_([], loc=loc)

    def share(self, shift) -> Share:
        blocks = Int32(cute.arch.cluster_size())
        return Share(Int32(cute.arch.block_idx_in_cluster()), Int32(cute.arch.popc(blocks - 1)))

    def allocate(self, array) -> Storage:
        return Storage(array(Float32, SUMS, 2), array(cutlass.Int64, 4))

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
        return Int32(self.threads) >> share.shift

    def owns(self, share: Share, tid: Int32) -> Boolean:
        return tid < self.owners(share)

    @cute.jit
    def gather(self, storage: Storage, share: Share, partial: pooling.Partial, turn: Int32, tid: Int32, scratch):
        """Send the block's root to the owners of its columns, who go on folding, by the same tree.

        No block sends before it has the sums of the turn before, which an owner sends when it has read its parts.
        """
        if share.shift > 0:
            if turn > 0:
                cute.arch.mbarrier_wait(storage.barriers.iterator + ((turn - 1) & 1), ((turn - 1) >> 1) & 1)
            barrier, owners = storage.barriers.iterator + (2 + (turn & 1)), self.owners(share)
            if tid == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, HEAD_DIM * 4 * 3)
            for q in cutlass.range_constexpr(3):
                place = self.place(storage, 0, share.rank, q, owners, tid & (owners - 1))
                bits = tuple(convert.bits_of(partial[q][c]) for c in range(self.columns))
                cute.arch.store_async_dsmem(place.iterator, bits, barrier, tid >> (self.threads.bit_length() - 1 - share.shift))
            if tid < owners:
                cute.arch.mbarrier_wait(barrier, (turn >> 1) & 1)
                largest, *others = reversed(self.shifts())
                if share.shift == largest:  # asked first, for short steps
                    self.merge(partial, lambda block: self.load(storage, 0, block, owners, tid), largest)
                else:
                    for shift in others:
                        if share.shift == shift:
                            self.merge(partial, lambda block: self.load(storage, 0, block, owners, tid), shift)
        return True

    @cute.jit
    def sum(self, storage: Storage, share: Share, squares: Float32, turn: Int32, tid: Int32) -> Float32:
        """The first threads of each 64 columns send their sum, each to one block; whole warps of owners wait for all sums.

        A barrier is used every second turn. A block two turns ahead cannot be: it needs this block's sums of the turn between.
        """
        barrier, slots = storage.barriers.iterator + (turn & 1), storage.totals[None, turn & 1]
        own, together = Int32(SUMS) >> share.shift, cutlass.const_expr(self.threads // SUMS)
        cute.arch.sync_warp()  # what the warp has read of parts and sums before, others may overwrite once they have its sums
        if tid == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, SUMS * 4)
        if (tid // together < own) & (tid % together < (Int32(1) << share.shift)):
            place = slots.iterator + (share.rank * own + tid // together)
            cute.arch.store_async_dsmem(place, convert.bits_of(squares), barrier, tid % together)
        if tid < cutlass.max(self.owners(share), Int32(WARP)):
            cute.arch.mbarrier_wait(barrier, (turn >> 1) & 1)
        return pooling.total_of(slots)
