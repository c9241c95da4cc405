"""The compressor's kernel: save this step's state rows, pool the windows that close, normalise, rotate, store.

One kernel for both families and both ratios. What differs is handed in as values: `Plan` (ratio, sizes, thread layout), a splitter
(how many blocks share a window) and a row writer (the cache format).

Windows are dealt out by the rows that close them: a team (the blocks that share windows, or one block) looks at some rows of the step
(`Dealt`), and then takes tickets for a long step's last rows. Rows to be saved go to blocks by turns. The warps of a block have roles
that meet in shared memory only, so that no role waits for another one's loads:

- one warp finds the windows that close, locates their rows and has them copied into a ring (`produce`);
- pooling warps prefetch the step's first rows into L2, wait for the ring's stages, pool, normalise, rotate and store (`consume`);
- one warp copies the rows that are to be saved into the state pool (`save`); where a plan says so, only those that are not saved by the
  threads that pool them.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, Uint32, cute
from cutlass.utils import SmemAllocator

from cute_kernels.device import WARP, convert, memory, norm_rope, pdl, pooling, splitters, window_ring
from cute_kernels.device.compress_arguments import Arguments
from cute_kernels.device.compress_plan import TICKET, Dealt, Plan
from cute_kernels.device.slots import Divisor
from cute_kernels.kv_format import HEAD_DIM, NOPE_DIM, ROPE_DIM
from cute_kernels.save_policy import overlap

AHEAD = 2  # rows that are on their way to L2 before the saving warp loads them
NO_ROW = 2**31 - 1
STEP_ROW, EXCLUDED = 1, 2  # flags in the free low bits of a window row's address


class Shared(NamedTuple):
    """Shared memory of a block."""

    ring: window_ring.Storage
    closing: cute.Tensor  # [4, rows looked at together] row, position, request and KV slot of those that close a window, in order
    merging: splitters.Storage
    word: cute.Tensor  # [1] of thread 0


@dataclass(frozen=True)
class CompressKernel:
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
        bits, by_state_rows = Int32(plan.unit_bits(row_count, deal)), Divisor.of(Int32(arguments.state.shape[1]))
        rows = plan.rows_of(evenly, deal, bits)
        self.kernel(arguments, rows, evenly, Int32(deal), bits, by_state_rows, self.splitter.shift(blocks)).launch(
            grid=[plan.teams(evenly, deal, bits) * blocks, 1, 1],
            block=[plan.threads, 1, 1],
            min_blocks_per_mp=plan.resident,
            preferred_smem_carveout=-1,  # the driver's default; without a value the DSL would ask a device
            stream=args[-1],
            use_pdl=self.pdl,
            **self.splitter.launch_options(blocks),
        )
        self.splitter.adjust_launch()

    @cute.kernel
    def kernel(self, mA: Arguments, rows: Int32, evenly: Int32, deal: Int32, bits: Int32, by_state_rows: Divisor, shift: Int32 | None):
        """Each role waits for the grid in front by itself. Before that the warp that fetches settles which rows it looks at first, and a
        thread that pools, which has time until data arrive, fetches the parameters for all."""
        plan = self.plan
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        shared, share = self.allocate(), self.splitter.share(shift)
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

    def allocate(self) -> Shared:
        smem = SmemAllocator()

        def array(dtype, *shape):
            return smem.allocate_tensor(dtype, cute.make_layout(shape), byte_alignment=16)

        return Shared(
            ring=self.plan.ring.allocate(array),
            closing=array(Int32, 4, WARP * self.plan.looks),
            merging=self.splitter.allocate(array),
            word=array(Int32, 1),
        )

    def dealt(self, team: Int32, rows: Int32, evenly: Int32, deal: Int32, bits: Int32) -> Dealt:
        """The rows of a team."""
        plan = self.plan
        deal = self.splitter.fixed(deal, plan.deal)
        bits = bits if plan.fixed_bits is None else plan.fixed_bits
        return Dealt(team, rows, evenly, deal, bits, plan.teams(evenly, deal, bits))

    def row_of(self, dealt: Dealt, i: Int32) -> Int32:
        """The row that a team takes as its i-th of those that are dealt evenly, or `NO_ROW`."""
        t = self.plan.row_of(dealt.team, i, dealt.deal, dealt.bits, self.splitter.remainder)
        return cutlass.select_((i < dealt.rows) & (t < dealt.evenly), t, Int32(NO_ROW))

    def row_limit(self, mA: Arguments) -> Int32:
        """Rows that every per-row tensor has; those behind are padding."""
        limit = cutlass.min(memory.extent(mA.state_slots), memory.extent(mA.positions))
        return cutlass.min(limit, cutlass.min(memory.extent(mA.token_to_req), memory.extent(mA.kv_slots)))

    def is_real(self, mA: Arguments, slot: Int64, position: Int64, request: Int32) -> Boolean:
        """Whether a row of these is none of the padding."""
        return (slot >= 0) & (position >= 0) & memory.in_range(request, memory.extent(mA.state_block_table))

    # Finding windows

    def look(self, mA: Arguments, t: Int32) -> tuple:
        """State slot, position, request and KV slot of a row."""
        return Int64(mA.state_slots[t]), Int64(mA.positions[t]), Int32(mA.token_to_req[t]), Int64(mA.kv_slots[t])

    def closes(self, mA: Arguments, fact: tuple) -> Boolean:
        """Whether a row of these facts closes a window whose result has a place."""
        slot, position, request, kv_slot = fact
        last = (position & (self.plan.ratio - 1)) == self.plan.ratio - 1
        closes = self.is_real(mA, slot, position, request) & last & (position < memory.extent(mA.cos_sin))
        return closes & memory.in_range(kv_slot, Int64(mA.kv_cache.shape[0]) * Int64(mA.kv_cache.shape[1]))

    @cute.jit
    def produce(self, mA: Arguments, shared: Shared, share: splitters.Share, by_state_rows: Divisor, dealt: Dealt, lane: Int32):
        """One warp: find the windows that close among this block's rows, and have their rows copied into the ring."""
        plan, ring = self.plan, self.plan.ring
        span = cutlass.const_expr(min(WARP, plan.window))  # lanes of a window
        together = cutlass.const_expr(WARP // span)  # windows that are located together
        limit, late = self.row_limit(mA), cutlass.const_expr(bool(plan.late))
        tickets = (memory.extent(mA.state_slots) - dealt.evenly + (TICKET - 1)) // TICKET if late else None
        times = cute.make_rmem_tensor(cute.make_layout(plan.looks), Int32)
        for q in cutlass.range_constexpr(plan.looks):
            times[q] = self.row_of(dealt, WARP * q + lane)
            pdl.settle(self.pdl, shared.closing.iterator + 4 * (WARP * q + lane), cutlass.min(times[q], limit - 1))
        cute.arch.sync_warp()
        pdl.begin(self.pdl, mA.independent)
        n, turn, nth, start, going = Int32(0), Int32(0), Int32(0), Int32(0), limit > 0
        while going:
            count = Int32(0)
            # All loads are under way before the first is waited for.
            facts = [self.look(mA, cutlass.min(times[q], limit - 1)) for q in range(plan.looks)]
            for q in cutlass.range_constexpr(plan.looks):
                closes = (times[q] < limit) & self.closes(mA, facts[q])
                mask = Int32(cute.arch.vote_ballot_sync(closes))
                if closes:
                    place = count + cute.arch.popc(mask & ((Int32(1) << lane) - 1))
                    shared.closing[0, place] = times[q]
                    for i in cutlass.range_constexpr(1, 4):
                        shared.closing[i, place] = Int32(facts[q][i])
                count += cute.arch.popc(mask)
            cute.arch.sync_warp()
            for first in cutlass.range(0, count, together, unroll=1):
                part, has_part = self.splitter.part(share, nth)
                own = plan.window >> part.shift  # rows of a window that this block pools
                passes = cutlass.max(own // span, 1) * Int32(has_part)  # rows of a lane
                stages = cutlass.min(own, span) // ring.rows
                which = cutlass.min(first + lane // span, count - 1)
                t_closing, closing, request_closing, kv_slot = (shared.closing[i, which] for i in range(4))
                angles = cute.make_rmem_tensor(cute.make_layout(ROPE_DIM // span), Float32)
                angle_row = memory.base_address(mA.cos_sin) + Int64(closing - (plan.ratio - 1)) * memory.byte_stride(mA.cos_sin, 0)
                for q in cutlass.range_constexpr(ROPE_DIM // span):
                    angles[q] = memory.at(angle_row + Int64(lane % span) * 4, Float32, ROPE_DIM, alignment=4)[q * span]
                for p in cutlass.range(passes, unroll=1):
                    k = part.rank * own + p * span + lane % span
                    address, goal = self.locate(
                        mA, by_state_rows, t_closing, closing, request_closing, cutlass.min(k, Int32(plan.window - 1))
                    )
                    values = (address & -4) + plan.half(lane % span) * 4
                    from_step = cutlass.select_((address & STEP_ROW) != 0, Float32(1.0), Float32(0.0))
                    for w in cutlass.range_constexpr(together):
                        if first + w < count:
                            mine = lane - w * span
                            target_slot = cute.arch.shuffle_sync(kv_slot, w * span)
                            excluded = Int32(cute.arch.vote_ballot_sync((address & EXCLUDED) != 0)) >> (w * span)
                            for s in cutlass.range(stages, unroll=1):
                                ring.wait_empty(shared.ring, n)
                                row = cutlass.select_(memory.in_range(mine, span), mine - s * ring.rows, Int32(-1))
                                ring.fetch(shared.ring, n, values, values + plan.width * 4, from_step, goal, row, lane)
                                if (p == 0) & (s == 0) & memory.in_range(mine, span):
                                    for q in cutlass.range_constexpr(ROPE_DIM // span):
                                        shared.ring.rotation[q * span + mine, turn % ring.slots] = angles[q]
                                words = (self.splitter.label(nth), target_slot, excluded >> (s * ring.rows))
                                ring.publish(shared.ring, n, words, lane)
                                n += 1
                            turn += cutlass.select_(p == passes - 1, Int32(1), Int32(0))
                nth += together
            cute.arch.sync_warp()
            start += WARP * plan.looks
            going = start < dealt.rows
            for q in cutlass.range_constexpr(plan.looks):
                times[q] = self.row_of(dealt, start + WARP * q + lane)
            if cutlass.const_expr(late):
                if (not going) & (tickets > 0):
                    ticket = self.take_ticket(mA, tickets, lane)
                    going = ticket < tickets
                    times[0] = cutlass.select_(lane < TICKET, dealt.evenly + ticket * TICKET + lane, Int32(NO_ROW))
        ring.end(shared.ring, n, lane)

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

    def score_address(self, mA: Arguments, t: Int32) -> Int64:
        """Byte address of row t of `kv_score`."""
        return memory.base_address(mA.kv_score) + Int64(t) * memory.byte_stride(mA.kv_score, 0)

    def state_address(self, mA: Arguments, block: Int64, offset: Int64) -> Int64:
        """Byte address of a state row."""
        return memory.base_address(mA.state) + block * memory.byte_stride(mA.state, 0) + offset * memory.byte_stride(mA.state, 1)

    def state_rows(self, mA: Arguments) -> Int64:
        """Rows of the state pool."""
        return Int64(mA.state.shape[0]) * Int64(mA.state.shape[1])

    def slot_address(self, mA: Arguments, by_state_rows: Divisor, slot: Int64) -> Int64:
        """Byte address of the state row of a slot of the pool. 31 bits hold any slot of a state pool that fits a GPU's memory."""
        block = by_state_rows.quotient(Int32(slot))
        return self.state_address(mA, Int64(block), Int64(Int32(slot) - block * Int32(mA.state.shape[1])))

    @cute.jit
    def locate(self, mA: Arguments, by_state_rows: Divisor, t: Int32, position: Int32, request: Int32, k: Int32) -> tuple:
        """Address of row k of the window that closes on row t, with flags in the low bits; and where it is saved on the way, or 0.

        A row of this step is taken from `kv_score`, an earlier one from the state pool. A row before position 0 gets the address of the
        row one group later, which lies in the window, and is marked as excluded. A column past the table counts as entry 0.
        """
        plan = self.plan
        excluded = position - (plan.window - 1) + k < 0
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
        finishing = self.splitter.finishing(share)
        owned = finishing.rank * (HEAD_DIM >> finishing.shift) + (tid & ((plan.pooling >> finishing.shift) - 1)) * plan.columns
        pdl.begin(self.pdl, mA.independent)
        self.prefetch_rows(mA, share, by_state_rows, dealt, tid)
        early = cutlass.const_expr(self.splitter.chunks == 1)  # else what `finish` needs would take registers from many stages
        weight = norm_rope.load_weight(mA.norm_weight, owned, plan.columns) if early else None
        shape = cute.make_layout((plan.columns, plan.batch))
        bias = cute.make_rmem_tensor(shape, Float32)
        self.load_bias(mA, self.first_row(self.splitter.part(share, Int32(0))[0]), column, bias)
        n, turn = Int32(0), Int32(0)
        ring.wait_full(shared.ring, n)
        flags = shared.ring.notes[0, 0]
        while flags != window_ring.END:
            kv_slot = shared.ring.notes[1, n % ring.slots]
            part, _ = self.splitter.part(share, flags >> 1)
            first, after = (self.first_row(p) for p in (part, self.splitter.part(share, (flags >> 1) + 1)[0]))
            chunks = self.splitter.chunks >> part.shift  # of a window that this block pools
            rotation = self.load_rotation(shared, turn, owned) if early else None
            partial = pooling.Partial.empty(plan.columns)
            for chunk in cutlass.range(chunks, unroll=1):
                partial.clear()
                for stage in cutlass.range(stages, unroll=1):
                    coming = cute.make_rmem_tensor(shape, Float32)
                    if cutlass.const_expr(plan.window > ring.rows):
                        following = chunk * stages + stage + 1
                        row = cutlass.select_(following == chunks * stages, Int32(after), Int32(first + following * ring.rows))
                        self.load_bias(mA, row, column, coming)
                        ring.wait_full(shared.ring, n)
                    values, logits = (cute.make_rmem_tensor(shape, Float32) for _ in range(2))
                    excluded = shared.ring.notes[2, n % ring.slots]
                    ring.read(shared.ring, n, column, values, logits)
                    self.add_bias(shared, n, bias, logits)
                    if cutlass.const_expr(plan.on_the_way):
                        self.save_pooled(shared, n, column, values, logits)
                    self.add_rows(excluded, values, logits, partial, plan.window == ring.rows)
                    ring.release(shared.ring, n)
                    if cutlass.const_expr(plan.window > ring.rows and mA.kv_score is not None):
                        cute.autovec_copy(coming, bias)
                    n += 1
                self.splitter.fold(shared.merging, part, partial, chunk, tid)
            if self.splitter.gather(shared.merging, part, partial, turn, tid, mA.scratch):
                self.finish(mA, shared, finishing, partial, kv_slot, owned, weight, rotation, turn, tid)
            turn += 1
            ring.wait_full(shared.ring, n)
            flags = shared.ring.notes[0, n % ring.slots]

    def first_row(self, part: splitters.Share) -> Int32:
        """The first row of a block's part in a window."""
        return part.rank * (self.plan.window >> part.shift)

    @cute.jit
    def load_rotation(self, shared: Shared, turn: Int32, column: Int32) -> cute.Tensor:
        """Cosines, then sines, of a thread's pairs in the window of this turn."""
        slots, pairs = self.plan.slots, cutlass.const_expr(self.plan.columns // 2)
        rotation = cute.make_rmem_tensor(cute.make_layout(2 * pairs), Float32)
        rotation.fill(0.0)
        if column >= NOPE_DIM:
            for j in cutlass.range_constexpr(pairs):
                rotation[j] = shared.ring.rotation[(column - NOPE_DIM) // 2 + j, turn % slots]
                rotation[pairs + j] = shared.ring.rotation[ROPE_DIM // 2 + (column - NOPE_DIM) // 2 + j, turn % slots]
        return rotation

    @cute.jit
    def save_pooled(self, shared: Shared, n: Int32, column: Int32, values: cute.Tensor, logits: cute.Tensor):
        """Save this thread's columns of the rows of stage n that have a goal: rows of this step all."""
        for k in cutlass.range_constexpr(self.plan.batch):
            goal = shared.ring.goals[k, n % self.plan.slots]
            if goal != 0:
                memory.store_vector(goal + Int64(column) * 4, values[None, k], streaming=self.plan.streaming)
                memory.store_vector(goal + Int64(column + self.plan.width) * 4, logits[None, k], streaming=self.plan.streaming)

    @cute.jit
    def load_bias(self, mA: Arguments, first: Int32, column: Int32, bias: cute.Tensor):
        """Position embeddings of a thread's columns for `batch` rows of the window, from row `first` on."""
        if cutlass.const_expr(mA.kv_score is not None):
            for k in cutlass.range_constexpr(self.plan.batch):
                row = first + k
                memory.load_vector(self.ape_address(mA, row % self.plan.ratio, column + self.plan.half(row)), bias[None, k])

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
        kv_slot: Int32,
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
        pooled = cute.make_rmem_tensor(cute.make_layout(columns), Float32)
        for c in cutlass.range_constexpr(columns):
            pooled[c] = total.product[c] * cute.arch.rcp_approx(total.weight[c])
        squares = cute.arch.warp_reduction_sum(norm_rope.square_sum(pooled), threads_in_group=HEAD_DIM // splitters.SUMS // columns)
        squares = self.splitter.sum(shared.merging, share, squares, turn, tid)
        if self.splitter.owns(share, tid):
            norm_rope.normalise_rotate(pooled, squares, mA.eps, weight, column >= NOPE_DIM, rotation)
            self.writer(mA).write(mA.kv_cache, Uint32(kv_slot), column, pooled, tid % WARP)

    def ape_address(self, mA: Arguments, place: Int32, column: Int32) -> Int64:
        """Byte address of the position embedding of a place in the group."""
        return memory.base_address(mA.ape) + (Int64(place) * self.plan.width + Int64(column)) * 4

    # Saving

    @cute.jit
    def save(self, mA: Arguments, share: splitters.Share, by_state_rows: Divisor, dealt: Dealt, lane: Int32):
        """Copy this block's share of the rows that are to be saved into the state pool, APE added to the scores by a plain addition.

        A warp copies rows one after another, each a trip to memory, and rows to be saved are often neighbours, a request's last ones. So
        each of n blocks takes every n-th row of the step, whoever pools it.
        """
        plan, columns = self.plan, self.plan.vector
        pieces = cutlass.const_expr(plan.width // columns // WARP)
        limit = self.row_limit(mA)
        pdl.begin(self.pdl, mA.independent)
        stretch = plan.saved_row(0, 0, WARP, dealt.teams, share.shift)
        for start in cutlass.range(dealt.team, limit, stretch, unroll=1):
            t = start + plan.saved_row(0, share.rank, lane, dealt.teams, share.shift)
            target, place = Int64(0), Int32(0)
            if t < limit:
                slot, position, request = Int64(mA.state_slots[t]), Int64(mA.positions[t]), Int32(mA.token_to_req[t])
                if self.is_real(mA, slot, position, request) & (slot < self.state_rows(mA)):
                    saved = Boolean(True)
                    if cutlass.const_expr(plan.on_the_way):
                        saved = not self.is_pooled(mA, t, position, request, limit)
                    elif cutlass.const_expr(mA.seq_lens is not None):
                        saved = self.is_saved(mA, Int64(Int32(position)), Int64(mA.seq_lens[request]))
                    if saved:
                        target = self.slot_address(mA, by_state_rows, slot)
                        place = Int32(position) & (plan.ratio - 1)
            source = self.score_address(mA, t)
            mask = Int32(cute.arch.vote_ballot_sync(target != 0))
            nth, done = cute.arch.popc(mask & ((Int32(1) << lane) - 1)), Int32(0)
            if (target != 0) & (nth < AHEAD):
                memory.prefetch(source, 2 * plan.width * 4)
            while mask != 0:
                values, scores, biases = (cute.make_rmem_tensor(cute.make_layout((columns, pieces)), Float32) for _ in range(3))
                owner = cute.arch.popc((mask & -mask) - 1)
                to, row, ape_row = (cute.arch.shuffle_sync(value, owner) for value in (target, source, place))
                for q in cutlass.range_constexpr(pieces):
                    column = (lane + q * WARP) * columns
                    memory.load_vector(row + Int64(column) * 4, values[None, q], memory.STREAM, streaming=self.plan.streaming)
                    memory.load_vector(row + Int64(column + plan.width) * 4, scores[None, q], memory.STREAM, streaming=self.plan.streaming)
                    memory.load_vector(self.ape_address(mA, ape_row, column), biases[None, q])
                if (target != 0) & (nth == AHEAD + done):
                    memory.prefetch(source, 2 * plan.width * 4)
                for q in cutlass.range_constexpr(pieces):
                    column = (lane + q * WARP) * columns
                    for c in cutlass.range_constexpr(columns):
                        scores[c, q] = scores[c, q] + biases[c, q]
                    memory.store_vector(to + Int64(column) * 4, values[None, q], streaming=self.plan.streaming)
                    memory.store_vector(to + Int64(column + plan.width) * 4, scores[None, q], streaming=self.plan.streaming)
                mask, done = mask & (mask - 1), done + 1

    @cute.jit
    def is_pooled(self, mA: Arguments, t: Int32, position: Int64, request: Int32, limit: Int32) -> Boolean:
        """Whether windows of this step pool all columns of row t: its own and, with an overlap, the next one."""
        pooled = Boolean(True)
        last = t + (self.plan.ratio - 1 - (Int32(position) & (self.plan.ratio - 1)))
        for ahead in cutlass.range_constexpr(0, overlap(self.plan.ratio) + 1, self.plan.ratio):
            closing, found = last + ahead, Boolean(False)
            if closing < limit:
                fact = self.look(mA, closing)
                found = (fact[2] == request) & (fact[1] == position + Int64(closing - t)) & self.closes(mA, fact)
            pooled = pooled & found
        return pooled

    def is_saved(self, mA: Arguments, position: Int64, seq: Int64) -> Boolean:
        """`save_policy.is_saved`, without overflow for any position an int32 holds."""
        last = (position + overlap(self.plan.ratio)) | (self.plan.ratio - 1)
        open_window = cutlass.max(position + 1, seq - Int64(mA.rollback)) <= cutlass.min(last, seq)
        stride = Uint32(cutlass.max(mA.prefix_stride, 1))
        prefix = (mA.prefix_stride > 0) & (Int64(Uint32(last) // stride * stride) > position)
        return open_window | prefix
