"""Rows of a step for the compressor's kernel: what they are, where they and their state lie, and how those to be saved are copied."""

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, Uint32, cute

from cute_kernels.device import WARP, memory, pdl, splitters
from cute_kernels.device.compress_arguments import Arguments
from cute_kernels.device.compress_plan import Dealt, Plan
from cute_kernels.device.slots import Divisor
from cute_kernels.save_policy import overlap

AHEAD = 2  # rows that are on their way to L2 before the saving warp loads them


class StepRows:
    """What a kernel does with single rows: `CompressKernel` has the rest."""

    plan: Plan
    pdl: bool

    def row_limit(self, mA: Arguments) -> Int32:
        """Rows that every per-row tensor has; those behind are padding."""
        limit = cutlass.min(memory.extent(mA.state_slots), memory.extent(mA.positions))
        return cutlass.min(limit, cutlass.min(memory.extent(mA.token_to_req), memory.extent(mA.kv_slots)))

    def is_real(self, mA: Arguments, slot: Int64, position: Int64, request: Int32) -> Boolean:
        """Whether a row of these is none of the padding."""
        return (slot >= 0) & (position >= 0) & memory.in_range(request, memory.extent(mA.state_block_table))

    def look(self, mA: Arguments, t: Int32) -> tuple:
        """State slot, position, request and KV slot of a row."""
        return Int64(mA.state_slots[t]), Int64(mA.positions[t]), Int32(mA.token_to_req[t]), Int64(mA.kv_slots[t])

    def closes(self, mA: Arguments, fact: tuple) -> Boolean:
        """Whether a row of these facts closes a window whose result has a place."""
        slot, position, request, kv_slot = fact
        last = (position & (self.plan.ratio - 1)) == self.plan.ratio - 1
        closes = self.is_real(mA, slot, position, request) & last & (position < memory.extent(mA.cos_sin))
        return closes & memory.in_range(kv_slot, Int64(mA.kv_cache.shape[0]) * Int64(mA.kv_cache.shape[1]))

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

    def ape_address(self, mA: Arguments, place: Int32, column: Int32) -> Int64:
        """Byte address of the position embedding of a place in the group."""
        return memory.base_address(mA.ape) + (Int64(place) * self.plan.width + Int64(column)) * 4

    @cute.jit
    def save(self, mA: Arguments, share: splitters.Share, by_state_rows: Divisor, dealt: Dealt, lane: Int32):
        """Copy this block's share of the rows that are to be saved into the state pool, APE added to the scores by a plain addition.

        A warp copies rows one after another, each a trip to memory, and rows to be saved are often neighbours, a request's last ones. So
        each of n blocks takes every n-th row of the step, whoever pools it. Where a row is copied in halves and rows are at most n / 2, two
        blocks of a team take a half each.
        """
        plan, columns = self.plan, self.plan.vector
        pieces = cutlass.const_expr(plan.width // columns // WARP)
        together = cutlass.const_expr(pieces // (1 + plan.halves))  # under way at once
        limit = self.row_limit(mA)
        pdl.begin(self.pdl, mA.independent)
        apart = Int32(0)
        if cutlass.const_expr(plan.halves):
            apart = cutlass.select_((share.shift > 0) & (2 * limit <= dealt.teams << share.shift), Int32(1), apart)
        begin = (share.rank & apart) * together
        stretch = plan.saved_row(0, 0, WARP, dealt.teams, share.shift)
        for start in cutlass.range(dealt.team, limit, stretch, unroll=1):
            t = start + plan.saved_row(0, share.rank >> apart, lane, dealt.teams, share.shift)
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
                owner = cute.arch.popc((mask & -mask) - 1)
                to, row, ape_row = (cute.arch.shuffle_sync(value, owner) for value in (target, source, place))
                for first in cutlass.range(begin, begin + (pieces >> apart), together, unroll=1):
                    values, scores, biases = (cute.make_rmem_tensor(cute.make_layout((columns, together)), Float32) for _ in range(3))
                    for q in cutlass.range_constexpr(together):
                        column = (lane + (first + q) * WARP) * columns
                        memory.load_vector(row + Int64(column) * 4, values[None, q], memory.STREAM, streaming=plan.streaming)
                        memory.load_vector(row + Int64(column + plan.width) * 4, scores[None, q], memory.STREAM, streaming=plan.streaming)
                        memory.load_vector(self.ape_address(mA, ape_row, column), biases[None, q])
                    if (first == begin) & (target != 0) & (nth == AHEAD + done):
                        memory.prefetch(source, 2 * plan.width * 4)
                    for q in cutlass.range_constexpr(together):
                        column = (lane + (first + q) * WARP) * columns
                        for c in cutlass.range_constexpr(columns):
                            scores[c, q] = scores[c, q] + biases[c, q]
                        memory.store_vector(to + Int64(column) * 4, values[None, q], streaming=plan.streaming)
                        memory.store_vector(to + Int64(column + plan.width) * 4, scores[None, q], streaming=plan.streaming)
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
