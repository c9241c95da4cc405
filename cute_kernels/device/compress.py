"""The compressor's kernel: save this step's state rows, pool the windows that close, normalise, rotate, store.

One kernel for both families and both ratios. What differs is handed in as values: `Plan` (ratio, sizes, thread layout), a splitter
(how many blocks share a window) and a row writer (the cache format).

Windows are dealt out by the rows that close them: a team (the blocks that share windows, or one block) looks at some rows of the step
(`Dealt`), and then takes tickets for a long step's last rows. Rows to be saved go to blocks by turns. The warps of a block have roles
that meet in shared memory only, so that no role waits for another one's loads:

- one warp finds the windows that close, locates their rows and has them copied into a ring (`produce`);
- pooling warps prefetch position embeddings and the step's first rows into L2, wait for the ring's stages, pool, normalise, rotate and
  store (`consume`);
- one warp copies the rows that are to be saved into the state pool (`save`); where a plan says so, only those that are not saved by the
  threads that pool them.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, Uint32, cute
from cutlass.memory import SmemAllocator

from cute_kernels.device import WARP, convert, memory, norm_rope, pdl, pooling, splitters, window_ring
from cute_kernels.device.compress_arguments import Arguments
from cute_kernels.device.compress_plan import TICKET, Dealt, Plan
from cute_kernels.device.compress_rows import StepRows
from cute_kernels.device.slots import Divisor
from cute_kernels.kv_format import HEAD_DIM, NOPE_DIM, ROPE_DIM
from cute_kernels.save_policy import overlap

NO_ROW = 2**31 - 1
ALIGNMENT = 16  # bytes, of each array in shared memory
STEP_ROW, EXCLUDED = 1, 2  # flags in the free low bits of a window row's address
NOTED = 2  # number of the barrier behind which `noted` is written; the splitters use number 1


class Shared(NamedTuple):
    """Shared memory of a block."""

    ring: window_ring.Storage
    closing: cute.Tensor  # [4, rows looked at together] row, position, request and KV slot of those that close a window, in order
    noted: cute.Tensor | None  # [2 or 3, pooling threads] position, request and, if saved on the way, slot of rows from `first_noted` on
    merging: splitters.Storage
    word: cute.Tensor  # [1] of thread 0


@dataclass(frozen=True)
class CompressKernel(StepRows):
    """names: of the compiled function's arguments, in order. writer: from `Arguments` to a row writer."""

    plan: Plan
    splitter: Any
    writer: Any
    names: tuple
    pdl: bool

    @cute.jit
    def __call__(self, *args):
        plan = self.plan
        arguments = Arguments(**dict(zip(self.names, args[:-1], strict=True)))
        row_count = memory.extent(arguments.state_slots)
        blocks, deal = self.splitter.choose(row_count, plan.deal, arguments)
        evenly = row_count
        if cutlass.const_expr(plan.late):
            evenly = row_count - cutlass.select_(arguments.may_meet(), plan.late_rows(row_count), Int32(0))
        bits = plan.unit_bits(row_count, deal, memory.extent(arguments.state_block_table))
        rows, bits, by_state_rows = plan.rows_of(evenly, deal, bits), Int32(bits), Divisor.of(Int32(arguments.state.shape[1]))
        self.kernel(arguments, rows, evenly, Int32(deal), bits, by_state_rows, self.splitter.shift(blocks)).launch(
            grid=[plan.teams(evenly, deal) * blocks, 1, 1],
            block=[plan.threads, 1, 1],
            smem=self.allocated + self.splitter.room_bytes(blocks),
            min_blocks_per_mp=plan.resident,
            preferred_smem_carveout=-1,  # the driver's default; without a value the DSL would ask a device
            stream=args[-1],
            use_pdl=self.pdl,
            **self.splitter.launch_options(blocks),
        )
        self.splitter.adjust_launch()

    @cute.kernel
    def kernel(self, mA: Arguments, rows: Int32, evenly: Int32, deal: Int32, bits: Int32, by_state_rows: Divisor, shift: Int32 | None):
        """Each role waits for the grid in front by itself. Before that the warp that fetches settles which rows it looks at first, and
        those that pool, which have time until data arrive, fetch the parameters for all and prefetch position embeddings."""
        plan = self.plan
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        smem = SmemAllocator()
        shared = self.allocate(lambda dtype, *shape: smem.allocate_tensor(dtype, cute.make_layout(shape), byte_alignment=ALIGNMENT))
        # Behind the arrays, which lie one behind another: an address from another base would take a register.
        shared = shared._replace(merging=shared.merging._replace(rooms=shared.ring.rows.iterator.toint() + self.allocated))
        share = self.splitter.share(shift)
        plan.ring.prepare(shared.ring, tid)
        self.splitter.prepare(shared.merging, tid)
        dealt = self.dealt(Int32(block) >> share.shift, rows, evenly, deal, bits)
        cute.arch.sync_threads()
        if tid < plan.pooling:
            pdl.fetch_parameters(self.pdl, tid, (mA, by_state_rows), shared.word.iterator)
            self.consume(mA, shared, share, by_state_rows, dealt, tid)
        else:
            if cutlass.const_expr(plan.saver):
                if tid < plan.pooling + WARP:
                    self.produce(mA, shared, share, by_state_rows, dealt, tid % WARP)
                else:
                    self.save(mA, share, by_state_rows, dealt, tid % WARP)
            else:
                self.produce(mA, shared, share, by_state_rows, dealt, tid % WARP)
        pdl.end(self.pdl, mA.independent)

    @property
    def notes(self) -> bool:
        """Whether rows of this step may be noted."""
        return bool(self.plan.widest) and "kv_score" in self.names

    def allocate(self, array) -> Shared:
        """Shared memory, made by `array(dtype, *shape)`."""
        return Shared(
            ring=self.plan.ring.allocate(array),
            closing=array(Int32, 4, WARP * self.plan.looks),
            noted=array(Int32, 2 + self.plan.on_the_way, self.plan.pooling) if self.notes else None,
            merging=self.splitter.allocate(array),
            word=array(Int32, 1),
        )

    @property
    def allocated(self) -> int:
        """Bytes of what `allocate` makes."""
        sizes: list[int] = []
        self.allocate(lambda dtype, *shape: sizes.append(dtype.width // 8 * math.prod(shape)))
        return sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)

    def dealt(self, team: Int32, rows: Int32, evenly: Int32, deal: Int32, bits: Int32) -> Dealt:
        """The rows of a team."""
        plan = self.plan
        deal = self.splitter.fixed(deal, plan.deal)
        bits = bits if plan.fixed_bits is None else plan.fixed_bits
        return Dealt(team, rows, evenly, deal, bits, plan.teams(evenly, deal))

    def row_of(self, dealt: Dealt, i: Int32) -> Int32:
        """The row that a team takes as its i-th, or `NO_ROW` where that is none of those dealt evenly."""
        t = self.plan.row_of(dealt.team, i, dealt.deal, dealt.bits, self.splitter.unit_of)
        return cutlass.select_((i < dealt.rows) & (t < dealt.evenly), t, Int32(NO_ROW))

    # Finding windows

    @cute.jit
    def produce(self, mA: Arguments, shared: Shared, share: splitters.Share, by_state_rows: Divisor, dealt: Dealt, lane: Int32):
        """One warp: find the windows that close among this block's rows, and have their rows copied into the ring."""
        plan, ring = self.plan, self.plan.ring
        limit = self.row_limit(mA)
        times = cute.make_rmem_tensor(cute.make_layout(plan.looks), Int32)
        for q in cutlass.range_constexpr(plan.looks):
            times[q] = self.row_of(dealt, WARP * q + lane)
            pdl.settle(self.pdl, shared.closing.iterator + 4 * (WARP * q + lane), cutlass.min(times[q], limit - 1))
        cute.arch.sync_warp()
        pdl.begin(self.pdl, mA.independent)
        n, turn, nth = Int32(0), Int32(0), Int32(0)
        common = (mA, shared, share, by_state_rows, dealt)
        if cutlass.const_expr(plan.late):
            tickets = (memory.extent(mA.state_slots) - dealt.evenly + (TICKET - 1)) // TICKET
            start, going = Int32(0), limit > 0
            while going:
                count = self.find_closing(mA, shared, times, limit, lane)
                n, turn, nth = self.fetch_windows(*common, count, n, turn, nth, lane)
                start += WARP
                going = start < dealt.rows
                times[0] = self.row_of(dealt, start + lane)
                if (not going) & (tickets > 0):
                    ticket = self.take_ticket(mA, tickets, lane)
                    going = ticket < tickets
                    times[0] = cutlass.select_(lane < TICKET, dealt.evenly + ticket * TICKET + lane, Int32(NO_ROW))
        else:
            for start in cutlass.range(0, cutlass.select_(limit > 0, dealt.rows, Int32(0)), WARP * plan.looks, unroll=1):
                count = self.find_closing(mA, shared, times, limit, lane)
                if cutlass.const_expr(self.notes):
                    if (start == 0) & self.is_wide(dealt):
                        cute.arch.barrier(barrier_id=NOTED, number_of_threads=plan.pooling + WARP)
                n, turn, nth = self.fetch_windows(*common, count, n, turn, nth, lane)
                if start + WARP * plan.looks < dealt.rows:
                    for q in cutlass.range_constexpr(plan.looks):
                        times[q] = self.row_of(dealt, start + WARP * (plan.looks + q) + lane)
        ring.end(shared.ring, n, lane)

    @cute.jit
    def find_closing(self, mA: Arguments, shared: Shared, times: cute.Tensor, limit: Int32, lane: Int32) -> Int32:
        """Write down which of these rows close a window: how many."""
        count = Int32(0)
        # All loads are under way before the first is waited for.
        facts = [self.look(mA, cutlass.min(times[q], limit - 1)) for q in range(cute.size(times))]
        for q in cutlass.range_constexpr(cute.size(times)):
            closes = (times[q] < limit) & self.closes(mA, facts[q])
            mask = Int32(cute.arch.vote_ballot_sync(closes))
            if closes:
                place = count + cute.arch.popc(mask & ((Int32(1) << lane) - 1))
                shared.closing[0, place] = times[q]
                for i in cutlass.range_constexpr(1, 4):
                    shared.closing[i, place] = Int32(facts[q][i])
            count += cute.arch.popc(mask)
        cute.arch.sync_warp()
        return count

    @cute.jit
    def fetch_windows(
        self,
        mA: Arguments,
        shared: Shared,
        share: splitters.Share,
        by_state_rows: Divisor,
        dealt: Dealt,
        count: Int32,
        n: Int32,
        turn: Int32,
        nth: Int32,
        lane: Int32,
    ) -> tuple:
        """Have this block's rows of the windows written down copied into the ring, from stage n on: the new (n, turn, nth)."""
        plan, ring = self.plan, self.plan.ring
        span = cutlass.const_expr(min(WARP, plan.window))  # lanes of a window
        together = cutlass.const_expr(WARP // span)  # windows that are located together
        noted = self.first_noted(share, dealt) if self.notes else None
        for first in cutlass.range(0, count, together, unroll=1):
            part, has_part = self.splitter.part(share, nth)
            own = plan.window >> part.shift  # rows of a window that this block pools
            passes = cutlass.max(own // span, 1) * Int32(has_part)  # rows of a lane
            stages = cutlass.min(own, span) // ring.rows
            which = cutlass.min(first + lane // span, count - 1)
            t_closing, closing, request_closing, kv_slot = (shared.closing[i, which] for i in range(4))
            for p in cutlass.range(passes, unroll=1):
                k = cutlass.min(part.rank * own + p * span + lane % span, Int32(plan.window - 1))
                if cutlass.const_expr(self.notes):
                    address, goal = Int64(0), Int64(0)
                    if self.is_wide(dealt):
                        address, goal = self.find_noted(mA, shared, by_state_rows, t_closing, closing, request_closing, k, noted)
                    if not cute.arch.vote_all_sync(address != 0):
                        address, goal = self.locate(mA, by_state_rows, t_closing, closing, request_closing, k)
                    angles = self.load_angles(mA, closing, lane % span, span)
                else:  # before the loads that `locate` waits for
                    angles = self.load_angles(mA, closing, lane % span, span)
                    address, goal = self.locate(mA, by_state_rows, t_closing, closing, request_closing, k)
                values = (address & -4) + plan.half(lane % span) * 4
                behind = Int32(0)  # bit of each lane whose row lies directly behind that of the lane before
                if cutlass.const_expr(ring.whole):
                    behind = Int32(cute.arch.vote_ballot_sync(values - cute.arch.shuffle_sync_up(values, 1) == 2 * plan.width * 4))
                from_step = cutlass.select_((address & STEP_ROW) != 0, Float32(1.0), Float32(0.0))
                for w in cutlass.range_constexpr(together):
                    if first + w < count:
                        mine = lane - w * span
                        excluded = Int32(0)
                        if cutlass.const_expr(overlap(plan.ratio) > 0):
                            excluded = Int32(cute.arch.vote_ballot_sync((address & EXCLUDED) != 0)) >> (w * span)
                        for s in cutlass.range(stages, unroll=1):
                            ring.wait_empty(shared.ring, n)
                            row = cutlass.select_(memory.in_range(mine, span), mine - s * ring.rows, Int32(-1))
                            joined = behind >> (s * ring.rows)
                            ring.fetch(shared.ring, n, values, values + plan.width * 4, from_step, goal, row, joined, lane)
                            # With the last stage: `finish` reads them behind it, and the first ones do not wait for the load.
                            if (p == passes - 1) & (s == stages - 1) & memory.in_range(mine, span):
                                for q in cutlass.range_constexpr(ROPE_DIM // span):
                                    shared.ring.rotation[q * span + mine, ring.place(turn)] = angles[q]
                                if mine == 0:
                                    shared.ring.targets[ring.place(turn)] = kv_slot
                            words = (self.splitter.label(nth), excluded >> (s * ring.rows))
                            ring.publish(shared.ring, n, words, lane)
                            n += 1
                        turn += cutlass.select_(p == passes - 1, Int32(1), Int32(0))
            nth += together
        cute.arch.sync_warp()
        return n, turn, nth

    @cute.jit
    def take_ticket(self, mA: Arguments, tickets: Int32, lane: Int32) -> Int32:
        """The next ticket of the launch, known to the whole warp.

        It is taken when its rows are wanted, not ahead: a block that waits for its memory shall leave them to others. Each block takes
        tickets until there are none, so `tickets` and one a block are taken, after which the counter is zero again.
        """
        ticket = Int32(0)
        if lane == 0:
            ticket = memory.take_number(memory.base_address(mA.scratch), tickets + Int32(cute.arch.grid_dim()[0]) - 1)
        return cute.arch.shuffle_sync(ticket, 0)

    @cute.jit
    def load_angles(self, mA: Arguments, closing: Int32, lane: Int32, lanes: cutlass.Constexpr) -> cute.Tensor:
        """A lane's angles of the window that closes at this position, those of `lanes` lanes in turn."""
        angles = cute.make_rmem_tensor(cute.make_layout(ROPE_DIM // lanes), Float32)
        row = memory.base_address(mA.cos_sin) + Int64(closing - (self.plan.ratio - 1)) * memory.byte_stride(mA.cos_sin, 0)
        for q in cutlass.range_constexpr(ROPE_DIM // lanes):
            angles[q] = memory.at(row + Int64(lane) * 4, Float32, ROPE_DIM, alignment=4)[q * lanes]
        return angles

    def is_wide(self, dealt: Dealt) -> Boolean:
        """Whether a team's rows lie together, so that those of this step which its windows take are worth noting."""
        return dealt.bits >= self.plan.unit.bit_length()

    def first_noted(self, share: splitters.Share, dealt: Dealt) -> Int32:
        """The first row that windows which close in the team's first unit may take in this block, where the unit is wide."""
        return self.row_of(dealt, Int32(0)) - (self.plan.window - 1) + self.first_row(self.splitter.part(share, Int32(0))[0])

    @cute.jit
    def note_rows(self, mA: Arguments, shared: Shared, share: splitters.Share, dealt: Dealt, tid: Int32):
        """Pooling threads: note a row each, so that no window of the team's first unit waits for a second look. Ones that no window can
        take from this step get position -1, ones that have no place in the state pool slot -1."""
        if self.is_wide(dealt):
            t, position, request, slot = self.first_noted(share, dealt) + tid, Int32(-1), Int32(0), Int32(-1)
            wanted = (Int32(1) << dealt.bits) + (self.plan.window >> share.shift) - 1  # rows in which its part of a window may lie
            if (tid < wanted) & memory.in_range(t, self.row_limit(mA)):
                state_slot, there, request = Int64(mA.state_slots[t]), Int64(mA.positions[t]), Int32(mA.token_to_req[t])
                position = cutlass.select_((state_slot >= 0) & ((there >> 31) == 0), Int32(there), Int32(-1))
                slot = cutlass.select_(state_slot < self.state_rows(mA), Int32(state_slot), Int32(-1))
            shared.noted[0, tid], shared.noted[1, tid] = position, request
            if cutlass.const_expr(self.plan.on_the_way):
                shared.noted[2, tid] = slot
            cute.arch.barrier_arrive(barrier_id=NOTED, number_of_threads=self.plan.pooling + WARP)

    @cute.jit
    def find_noted(
        self,
        mA: Arguments,
        shared: Shared,
        by_state_rows: Divisor,
        t: Int32,
        position: Int32,
        request: Int32,
        k: Int32,
        noted: Int32,
    ) -> tuple:
        """What `locate` finds, where that is a row of this step that is noted; else 0."""
        plan, back = self.plan, self.plan.window - 1 - k
        i = t - back - noted
        address, goal = Int64(0), Int64(0)
        if memory.in_range(i, plan.pooling):
            if (shared.noted[0, i] == position - back) & (shared.noted[1, i] == request):
                address = self.score_address(mA, t - back) + STEP_ROW
                if cutlass.const_expr(plan.on_the_way):
                    slot = shared.noted[2, i]
                    if slot >= 0:
                        goal = self.slot_address(mA, by_state_rows, Int64(slot))
        return address, goal

    @cute.jit
    def locate(self, mA: Arguments, by_state_rows: Divisor, t: Int32, position: Int32, request: Int32, k: Int32) -> tuple:
        """Address of row k of the window that closes on row t, with flags in the low bits; and where it is saved on the way, or 0.

        A row of this step is taken from `kv_score`, an earlier one from the state pool. A row before position 0 gets the address of the
        row one group later, which lies in the window, and is marked as excluded. A column past the table counts as entry 0.
        """
        plan = self.plan
        excluded = (position - (plan.window - 1) + k < 0) & (overlap(plan.ratio) > 0)
        k = k + cutlass.select_(excluded, Int32(overlap(plan.ratio)), Int32(0))
        back = plan.window - 1 - k
        p = position - back
        from_step = Boolean(False)
        entry = Int32(0)
        table_column = by_state_rows.quotient(p)
        if table_column < mA.state_block_table.shape[1]:
            place = Int64(request) * memory.byte_stride(mA.state_block_table, 0) + Int64(table_column) * 4
            entry = memory.at(memory.base_address(mA.state_block_table) + place, Int32, 1)[0]
        address, goal = Int64(0), Int64(0)
        if cutlass.const_expr(mA.kv_score is not None):
            source, slot = t - back, Int64(-1)
            if source >= 0:
                owner, there, slot = Int32(mA.token_to_req[source]), Int64(mA.positions[source]), Int64(mA.state_slots[source])
                from_step = (owner == request) & (there == Int64(p)) & (slot >= 0)
            if cutlass.const_expr(plan.on_the_way):
                if from_step & (slot < self.state_rows(mA)) & (not excluded):
                    goal = self.slot_address(mA, by_state_rows, slot) + plan.half(k) * 4
            if from_step:
                address = self.score_address(mA, source) + STEP_ROW
        if not from_step:
            page = cutlass.select_(memory.in_range(entry, memory.extent(mA.state)), entry, Int32(0))
            address = self.state_address(mA, Int64(page), Int64(p - table_column * Int32(mA.state.shape[1])))
        return address + cutlass.select_(excluded, Int64(EXCLUDED), Int64(0)), goal

    # Pooling

    @cute.jit
    def prefetch_embeddings(self, mA: Arguments, tid: Int32):
        """All blocks together (fewer than eight: a part of it): prefetch the position embeddings into L2, before the step's rows are there.
        A model's layers have different ones, so that they come from memory, and every stage waits for those of its rows."""
        line = Int32(cute.arch.block_idx()[0]) + tid * Int32(cute.arch.grid_dim()[0])
        if line < self.plan.ratio * self.plan.width * 4 // memory.LINE:
            memory.prefetch_line(memory.base_address(mA.ape) + Int64(line * memory.LINE))

    @cute.jit
    def prefetch_rows(self, mA: Arguments, share: splitters.Share, by_state_rows: Divisor, dealt: Dealt, tid: Int32):
        """Prefetch rows of this step into L2 while windows are looked up, padding left out; a line for each thread.

        Ratio 4: blocks begin at the step's start, so each takes one or two of the rows there. Ratio 128: all windows are begun at
        once, so each block takes the first of its own share of the step.
        """
        plan, block = self.plan, Int32(cute.arch.block_idx()[0])
        lines = cutlass.const_expr(2 * plan.width * 4 // memory.LINE)  # of a row
        own = (dealt.rows + ((1 << share.shift) - 1)) >> share.shift  # a block's share of a team's rows
        count = cutlass.min(own, Int32(plan.pooling // lines))
        row = tid // lines
        t = block * (own if plan.ratio == 128 else count) + row
        if (row < count) & (t < self.row_limit(mA)):
            slot = Int64(mA.state_slots[t])
            if memory.in_range(slot, self.state_rows(mA)):
                if cutlass.const_expr(mA.kv_score is not None):
                    address = self.score_address(mA, t)
                else:
                    address = self.slot_address(mA, by_state_rows, slot)
                memory.prefetch_line(address + Int64(tid % lines * memory.LINE))

    @cute.jit
    def consume(self, mA: Arguments, shared: Shared, share: splitters.Share, by_state_rows: Divisor, dealt: Dealt, tid: Int32):
        """Pooling threads: take stages from the ring, pool them, and finish each window."""
        plan, ring = self.plan, self.plan.ring
        stages = cutlass.const_expr(plan.window // ring.rows // self.splitter.chunks)  # of a chunk
        column = tid * plan.columns
        if cutlass.const_expr(mA.ape is not None):
            self.prefetch_embeddings(mA, tid)
        pdl.begin(self.pdl, mA.independent)
        if cutlass.const_expr(self.notes):
            self.note_rows(mA, shared, share, dealt, tid)
        self.prefetch_rows(mA, share, by_state_rows, dealt, tid)
        early = cutlass.const_expr(self.splitter.chunks == 1)  # else what `finish` needs would take registers from many stages
        _, owned = self.finishing(share, tid)
        weight = norm_rope.load_weight(mA.norm_weight, owned, plan.columns) if early else None
        shape = cute.make_layout((plan.columns, plan.batch))
        bias = cute.make_rmem_tensor(shape, Float32)
        embeddings = self.first_embeddings(mA, self.splitter.part(share, Int32(0))[0], column)
        self.load_bias(mA, embeddings, bias)
        n, turn = Int32(0), Int32(0)
        ring.wait_full(shared.ring, n)
        flags = shared.ring.notes[0, 0]
        while flags != window_ring.END:
            part, _ = self.splitter.part(share, flags >> 1)
            after, _ = self.splitter.part(share, (flags >> 1) + 1)
            rotation = self.load_rotation(shared, turn, owned) if early else None
            kv_slot = shared.ring.targets[ring.place(turn)] if early else None
            partial = pooling.Partial.empty(plan.columns)
            chunk, last = Int32(0), Boolean(False)
            while not last:
                last = ((chunk + 1) << part.shift) == self.splitter.chunks  # of this block's chunks of the window
                partial.clear()
                more = Boolean(True)
                while more:
                    more = ((n + 1) & (stages - 1)) != 0  # stages of the chunk: all chunks before had as many
                    if cutlass.const_expr(plan.window > ring.rows):
                        ring.wait_full(shared.ring, n)
                    values, logits = (cute.make_rmem_tensor(shape, Float32) for _ in range(2))
                    excluded = shared.ring.notes[1, ring.slot(n)]
                    ring.read(shared.ring, n, column, values, logits)
                    self.add_bias(shared, n, bias, logits)
                    if cutlass.const_expr(plan.on_the_way):
                        self.save_pooled(shared, n, column, values, logits)
                    self.add_rows(excluded, values, logits, partial, plan.window == ring.rows)
                    ring.release(shared.ring, n)
                    if cutlass.const_expr(plan.window > ring.rows):
                        following = embeddings + ring.rows * plan.width * 4
                        embeddings = cutlass.select_(more | (not last), following, self.first_embeddings(mA, after, column))
                        self.load_bias(mA, embeddings, bias)  # behind the fence of `release`, which waits for loads under way
                    n += 1
                if (chunk > 0) | (not last):  # else nothing to fold, which short steps need not find out by themselves
                    self.splitter.fold(shared.merging, partial, chunk, last, tid)
                chunk += 1
            part = self.splitter.late(part)
            if self.splitter.gather(shared.merging, part, partial, turn, tid, mA.scratch):
                finishing, owned = self.finishing(part, tid)
                self.finish(mA, shared, finishing, partial, kv_slot, owned, weight, rotation, turn, tid)
            turn += 1
            ring.wait_full(shared.ring, n)
            flags = shared.ring.notes[0, ring.slot(n)]

    def finishing(self, part: splitters.Share, tid: Int32) -> tuple:
        """Which columns of a window this block finishes, as its share of them, and the first one of this thread."""
        share = self.splitter.finishing(part)
        threads = self.plan.pooling >> share.shift
        return share, share.rank * (HEAD_DIM >> share.shift) + (tid & (threads - 1)) * self.plan.columns

    def first_row(self, part: splitters.Share) -> Int32:
        """The first row of a block's part in a window."""
        return part.rank * (self.plan.window >> part.shift)

    def first_embeddings(self, mA: Arguments, part: splitters.Share, column: Int32) -> Int64:
        """Byte address of a thread's position embeddings for the first row of a block's part in a window; 0 if there are none."""
        if mA.ape is None:
            return Int64(0)
        return self.ape_address(mA, Int32(self.first_row(part)), column)

    @cute.jit
    def load_rotation(self, shared: Shared, turn: Int32, column: Int32) -> cute.Tensor:
        """Cosines, then sines, of a thread's pairs in the window of this turn."""
        place, pairs = self.plan.ring.place(turn), cutlass.const_expr(self.plan.columns // 2)
        rotation = cute.make_rmem_tensor(cute.make_layout(2 * pairs), Float32)
        rotation.fill(0.0)
        if column >= NOPE_DIM:
            for j in cutlass.range_constexpr(pairs):
                rotation[j] = shared.ring.rotation[(column - NOPE_DIM) // 2 + j, place]
                rotation[pairs + j] = shared.ring.rotation[ROPE_DIM // 2 + (column - NOPE_DIM) // 2 + j, place]
        return rotation

    @cute.jit
    def save_pooled(self, shared: Shared, n: Int32, column: Int32, values: cute.Tensor, logits: cute.Tensor):
        """Save this thread's columns of the rows of stage n that have a goal: rows of this step all."""
        for k in cutlass.range_constexpr(self.plan.batch):
            goal = shared.ring.goals[k, self.plan.ring.slot(n)]
            if goal != 0:
                memory.store_vector(goal + Int64(column) * 4, values[None, k], streaming=self.plan.streaming)
                memory.store_vector(goal + Int64(column + self.plan.width) * 4, logits[None, k], streaming=self.plan.streaming)

    @cute.jit
    def load_bias(self, mA: Arguments, address: Int64, bias: cute.Tensor):
        """Position embeddings of a thread's columns for `batch` rows of the window. address: those of the first, whose number is a multiple
        of `batch`: so their places in the group follow one on another, or, at ratio 4, where a batch is all rows, do so twice."""
        plan = self.plan
        if cutlass.const_expr(mA.kv_score is not None):
            for k in cutlass.range_constexpr(plan.batch):
                memory.load_vector(address + 4 * (k % plan.ratio * plan.width + plan.half(k)), bias[None, k])

    def add_bias(self, shared: Shared, n: Int32, bias: cute.Tensor, logits: cute.Tensor) -> None:
        """Add position embeddings to the scores of this step's rows in stage n: a row's factor is 1 or 0, and a finite embedding times 0
        adds nothing (a score of -0 may become +0)."""
        if "kv_score" in self.names:
            from_step = self.plan.ring.read_from_step(shared.ring, n)
            for k in range(self.plan.batch):
                factor = (from_step[k], from_step[k])
                for c in range(0, self.plan.columns, 2):
                    biases, scores = (bias[c, k], bias[c + 1, k]), (logits[c, k], logits[c + 1, k])
                    logits[c, k], logits[c + 1, k] = convert.fma_pair(biases, factor, scores)

    def add_rows(self, excluded: Int32, values: cute.Tensor, logits: cute.Tensor, partial, first: bool) -> None:
        """Pool rows, those before position 0 left out: bit k of the mask is row k."""
        for k in range(overlap(self.plan.ratio)):
            for c in range(self.plan.columns):
                outside = (excluded & (1 << k)) != 0
                logits[c, k] = cutlass.select_(outside, Float32(pooling.NEG_INF), logits[c, k])
                values[c, k] = cutlass.select_(outside, Float32(0.0), values[c, k])
        pooling.add_rows(partial, values, logits, first=first)

    @cute.jit
    def finish(
        self,
        mA: Arguments,
        shared: Shared,
        share: splitters.Share,
        total: pooling.Partial,
        kv_slot: Any,
        column: Int32,
        weight: Any,
        rotation: Any,
        turn: Int32,
        tid: Int32,
    ):
        """Normalise and rotate the pooled row, and write it into the cache."""
        columns = cutlass.const_expr(self.plan.columns)
        if cutlass.const_expr(weight is None):
            weight, rotation = norm_rope.load_weight(mA.norm_weight, column, columns), self.load_rotation(shared, turn, column)
            kv_slot = shared.ring.targets[self.plan.ring.place(turn)]
        pooled = cute.make_rmem_tensor(cute.make_layout(columns), Float32)
        for c in cutlass.range_constexpr(columns):
            pooled[c] = total.product[c] * cute.arch.rcp_approx(total.weight[c])
        squares = cute.arch.warp_reduction_sum(norm_rope.square_sum(pooled), threads_in_group=HEAD_DIM // splitters.SUMS // columns)
        squares = self.splitter.sum(shared.merging, share, squares, turn, tid)
        if self.splitter.owns(share, tid):
            norm_rope.normalise_rotate(pooled, squares, mA.eps, weight, column >= NOPE_DIM, rotation)
            self.writer(mA).write(mA.kv_cache, Uint32(kv_slot), column, pooled, tid % WARP)
