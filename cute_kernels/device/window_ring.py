"""Window rows on their way from global memory: a ring in shared memory between the warp that issues copies and those that pool.

A stage is some rows of one window, each 512 values and 512 scores, with a note that says what they are. Stage n of the kernel, counted over
all windows, lies in slot n % slots and completes phase n // slots of the slot's two barriers: `full` when its note is written and its
bytes have arrived, `empty` when every pooling thread has read it.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from cute_kernels.device import WARP, memory
from cute_kernels.kv_format import HEAD_DIM, ROPE_DIM

END = 1  # flags of a note: no window follows; else its window's label, whose bit 0 is clear
NOTE = 2  # words of a note: flags, bit mask of rows before position 0


class Storage(NamedTuple):
    """Shared memory of a ring."""

    rows: cute.Tensor  # [512, 2 (values, scores), rows, slots] fp32
    rotation: cute.Tensor  # [64, turns] of a window, the turn-th of the kernel in turn % turns
    targets: cute.Tensor  # [turns] KV slots of windows, as `rotation`
    notes: cute.Tensor  # [2, slots]
    from_step: cute.Tensor | None  # [rows, slots] fp32: 1 for a row of this step, whose scores lack position embeddings, else 0
    goals: cute.Tensor | None  # [rows, slots] byte addresses to which the pooling threads save a stage's rows, 0: they do not
    full: cute.Tensor  # [slots] barriers
    empty: cute.Tensor  # [slots] barriers


@dataclass(frozen=True)
class WindowRing:
    """Compile-time shape.

    rows     of a stage
    slots    stages in flight
    turns    windows whose angles and KV slot have room. A window's are written with its last stage, when the stage `slots` before is free.
             Ratio 4 reads them before it gives the stage back: one for each slot. Ratio 128 reads them behind the last stage; no window
             has fewer stages than the ring, so all threads are past the window before the last: two
    readers  threads that pool
    whole    values and scores of a row are one piece of memory
    scores   there are rows of this step
    goals    pooling threads save rows
    streaming   rows leave the L2 first
    """

    rows: int
    slots: int
    turns: int
    readers: int
    whole: bool
    scores: bool
    goals: bool
    streaming: bool

    def slot(self, n: Int32) -> Int32:
        """Where stage n lies. Unsigned: of a signed number the rest takes six instructions, in loops that every stage goes through."""
        return Int32(Uint32(n) % self.slots)

    def place(self, turn: Int32) -> Int32:
        """Where the angles and the KV slot of the kernel's turn-th window lie."""
        return Int32(Uint32(turn) % self.turns)

    def phase(self, n: Int32) -> Int32:
        """Parity of the phase that stage n completes."""
        return Int32(Uint32(n) // self.slots % 2)

    def allocate(self, array) -> Storage:
        """Shared memory, made by `array(dtype, *shape)`."""
        return Storage(
            rows=array(Float32, HEAD_DIM, 2, self.rows, self.slots),
            rotation=array(Float32, ROPE_DIM, self.turns),
            targets=array(Int32, self.turns),
            notes=array(Int32, NOTE, self.slots),
            from_step=array(Float32, self.rows, self.slots) if self.scores else None,
            goals=array(Int64, self.rows, self.slots) if self.goals else None,
            full=array(Int64, self.slots),
            empty=array(Int64, self.slots),
        )

    @cute.jit
    def prepare(self, ring: Storage, tid: Int32):
        """Initialise the barriers; a barrier of the block must follow before their first use."""
        if tid < self.slots:
            cute.arch.mbarrier_init(ring.full.iterator + tid, WARP)
            cute.arch.mbarrier_init(ring.empty.iterator + tid, self.readers)
        cute.arch.mbarrier_init_fence()

    @cute.jit
    def wait_empty(self, ring: Storage, n: Int32):
        """Wait until the slot of stage n is free."""
        if n >= self.slots:
            cute.arch.mbarrier_wait(ring.empty.iterator + self.slot(n), self.phase(n) ^ 1)

    @cute.jit
    def end(self, ring: Storage, n: Int32, lane: Int32):
        """Stage n says that no window follows."""
        self.wait_empty(ring, n)
        self.publish(ring, n, (Int32(END), Int32(0)), lane)

    @cute.jit
    def fetch(
        self,
        ring: Storage,
        n: Int32,
        values: Int64,
        scores: Int64,
        from_step: Float32,
        goal: Int64,
        row: Int32,
        joined: Int32,
        lane: Int32,
    ):
        """Issue the copies of a lane's row of stage n, if `row` is one. The whole warp calls; `publish` must follow.

        Copies of several lanes are issued one after another. So rows of one piece each, of which each but the first lies directly behind
        the one before, as bits 1 to rows - 1 of `joined` say, are one copy, of the first one's lane.

        Where their lines leave the L2 first, the tables that say where rows lie stay there instead, and every window waits for two looks
        at them.
        """
        full = ring.full.iterator + self.slot(n)
        target = ring.rows.iterator + cute.crd2idx((0, 0, row, self.slot(n)), ring.rows.layout)
        if cutlass.const_expr(self.whole):
            later = cutlass.const_expr((1 << self.rows) - 2)
            one = (joined & later) == later
            size = cutlass.select_(one, Int32(self.rows * 2 * HEAD_DIM * 4), Int32(2 * HEAD_DIM * 4))
            if memory.in_range(row, cutlass.select_(one, Int32(1), Int32(self.rows))):
                memory.copy_bulk(values, target, size, full, **memory.policy_of(self.streaming))
        if memory.in_range(row, self.rows):
            if cutlass.const_expr(not self.whole):
                for half, address in ((0, values), (HEAD_DIM, scores)):
                    memory.copy_bulk(address, target + half, HEAD_DIM * 4, full, **memory.policy_of(self.streaming))
            if cutlass.const_expr(self.scores):
                ring.from_step[row, self.slot(n)] = from_step
            if cutlass.const_expr(self.goals):
                ring.goals[row, self.slot(n)] = goal
        # Behind the copies, which so start earlier: the phase lasts until this lane, too, has arrived.
        if lane == 0:
            cute.arch.mbarrier_expect_tx(full, self.rows * 2 * HEAD_DIM * 4)

    @cute.jit
    def publish(self, ring: Storage, n: Int32, words: tuple, lane: Int32):
        """Write the note of stage n. The whole warp calls; what its lanes wrote before is published, too."""
        if lane == 0:
            for q in cutlass.range_constexpr(NOTE):
                ring.notes[q, self.slot(n)] = words[q]
        cute.arch.mbarrier_arrive(ring.full.iterator + self.slot(n))

    @cute.jit
    def wait_full(self, ring: Storage, n: Int32):
        """Wait for stage n and its note."""
        cute.arch.mbarrier_wait(ring.full.iterator + self.slot(n), self.phase(n))

    def release(self, ring: Storage, n: Int32) -> None:
        """This thread has read stage n.

        The fence orders its reads before the copies that overwrite the stage, which go through another proxy: without it the arrival
        may overtake loads that are still under way.
        """
        cute.arch.fence_view_async_shared()
        cute.arch.mbarrier_arrive(ring.empty.iterator + self.slot(n))

    @cute.jit
    def read(self, ring: Storage, n: Int32, column: Int32, values: cute.Tensor, logits: cute.Tensor):
        """Columns from `column` on of the rows of stage n: [columns, rows]."""
        columns = cutlass.const_expr(values.shape[0])
        for part, fragment in enumerate((logits, values)):
            for k in range(values.shape[1]):
                place = ring.rows.iterator + cute.crd2idx((column, 1 - part, k, self.slot(n)), ring.rows.layout)
                pointer = cute.make_ptr(Float32, place.toint(), cute.AddressSpace.smem, assumed_align=columns * 4)
                cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(columns)), fragment[None, k])

    def read_from_step(self, ring: Storage, n: Int32) -> cute.Tensor:
        """1 for each row of stage n that is of this step, else 0."""
        found = cute.make_rmem_tensor(cute.make_layout(self.rows), Float32)
        cute.autovec_copy(ring.from_step[None, self.slot(n)], found)
        return found
