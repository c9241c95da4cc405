"""The compressor's kernel: save this step's state rows, pool the windows that close, normalise, rotate, store.

One kernel for both families and both ratios. What differs is handed in as values: `Plan` (ratio, sizes, thread layout), a
splitter (how many blocks share a window) and a row writer (the cache format).

Work is dealt out by rows. The blocks of a cluster (or one block) examine up to `Plan.rows` rows of the step, one per thread, pool
each window that closes on one of them, and save those rows' state. `Plan.row_of` deals rows so that consecutive positions of a
request put one closing row into every cluster, and so that the leading rows of a long, mostly padded step spread over all clusters.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, Uint32, cute
from cutlass.utils import SmemAllocator

from cute_kernels.device import memory, norm_rope, pdl, pooling, splitters
from cute_kernels.kv_format import HEAD_DIM, NOPE_DIM
from cute_kernels.save_policy import overlap

STEP_ROW, EXCLUDED = 1, 2  # flags in the free low bits of a window row's address


class Arguments(NamedTuple):
    """Run-time arguments; None where the kernel has no such argument (`CompressStoreSpec.argument_names`)."""

    state: Any
    state_block_table: Any
    positions: Any
    token_to_req: Any
    state_slots: Any
    kv_slots: Any
    norm_weight: Any
    cos_sin: Any
    kv_cache: Any
    eps: Any
    kv_score: Any = None
    ape: Any = None
    seq_lens: Any = None
    inverse_kv_scale: Any = None
    rollback: Any = None
    prefix_stride: Any = None


class WindowRows(NamedTuple):
    """Where a window's rows are, as the lanes of a warp know it.

    address     of one row of this lane's group; lane first_lane + k has row k
    from_step   bit mask of lanes whose row lies in `kv_score`
    excluded    bit mask of lanes whose row lies before position 0
    first_lane  of this lane's group
    first_row   the window's row that is row 0 of the group
    """

    address: Any
    from_step: Any
    excluded: Any
    first_lane: Any
    first_row: Any


@dataclass(frozen=True)
class Plan:
    """Compile-time shape of the work. All numbers are powers of two.

    ratio          4 or 128
    columns        fp32 columns of one thread's access: 4 or 8
    blocks         blocks that share a window, by columns
    threads        threads of a block
    batch          window rows whose loads a thread has in flight together
    save_rows      state rows whose loads a thread has in flight together
    rows           rows of the step that a cluster examines
    unit           consecutive rows that are dealt together
    deal           clusters over which neighbouring units are dealt
    resident       blocks that should fit on an SM at once: bounds the registers
    """

    ratio: int
    columns: int
    blocks: int
    threads: int
    batch: int
    save_rows: int
    rows: int
    unit: int
    deal: int
    resident: int

    @property
    def width(self) -> int:
        """Columns of the values, or of the scores, of a state row."""
        return 2 * HEAD_DIM if self.ratio == 4 else HEAD_DIM

    @property
    def window(self) -> int:
        return self.ratio + overlap(self.ratio)

    @property
    def groups(self) -> pooling.RowGroups:
        column_threads = HEAD_DIM // self.blocks // self.columns
        return pooling.RowGroups(column_threads, self.threads // column_threads, self.columns)

    @property
    def group_rows(self) -> int:
        return self.window // self.groups.groups

    def half(self, row: int) -> int:
        """First column that a window row contributes. Ratio 4: the older group its first 512 columns, the closing group its second."""
        return row // 4 * HEAD_DIM if self.ratio == 4 else 0

    @property
    def summing_warps(self) -> int:
        """Warps of a block that hold pooled columns."""
        return max(1, self.groups.column_threads // 32)

    def row_of(self, cluster: Int32, i: Int32) -> Int32:
        """The row that a cluster examines as its i-th.

        Rows come in stretches of rows * deal. Of each stretch, cluster j takes unit (j + shift) mod deal of every `deal` units; the
        shift grows so that its units fall on different places modulo `ratio`.
        """
        stretch, j = cluster // self.deal, cluster % self.deal
        turn = i // self.unit
        shift = turn // max(1, self.ratio // self.unit // self.deal)
        return stretch * (self.rows * self.deal) + (turn * self.deal + (j + shift) % self.deal) * self.unit + i % self.unit

    def clusters(self, row_count: Int32) -> Int32:
        """Clusters for a step of `row_count` rows (host)."""
        stretch = self.rows * self.deal
        rest = row_count % stretch
        return row_count // stretch * self.deal + cutlass.min((rest + self.unit - 1) // self.unit, self.deal)


class Shared(NamedTuple):
    """Shared memory: what one thread found out about a row, for all threads; partial sums; partial softmaxes."""

    counts: cute.Tensor  # [ceil(rows / 32)] closing rows among 32
    order: cute.Tensor  # [rows] the closing ones among each 32 rows, in order
    row: cute.Tensor  # [rows] row of the step
    position: cute.Tensor  # [rows]
    request: cute.Tensor  # [rows]
    slot: cute.Tensor  # [rows] of the KV cache, 32 unsigned bits
    state: cute.Tensor  # [rows] address of the state row to write, 0: not saved
    totals: cute.Tensor  # [blocks * summing warps, 2], by parity of the turn
    barriers: cute.Tensor  # [2], of the splitter
    scratch: Any  # [columns, column threads, 3, parts, buffers], see RowGroups.merge_block; None where one group pools the whole window


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
        arguments = Arguments(**dict(zip(self.names, args[:-1], strict=True)))
        self.kernel(arguments).launch(
            grid=[self.plan.clusters(memory.extent(arguments.state_slots)) * self.plan.blocks, 1, 1],
            block=[self.plan.threads, 1, 1],
            min_blocks_per_mp=self.plan.resident,
            preferred_smem_carveout=-1,  # the driver's default; without a value the DSL would ask a device
            stream=args[-1],
            use_pdl=self.pdl,
            **self.splitter.launch_options(),
        )

    @cute.kernel
    def kernel(self, mA: Arguments):
        plan, groups = self.plan, self.plan.groups
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        rank = self.splitter.rank()
        shared = self.allocate()
        self.splitter.prepare(shared.barriers, tid)
        pdl.begin(self.pdl)

        self.examine(mA, shared, Int32(block) // plan.blocks, tid)
        cute.arch.sync_threads()

        closing = shared.counts[0]
        for w in cutlass.range_constexpr(1, cute.size(shared.counts)):
            closing = closing + shared.counts[w]
        column = rank * cutlass.const_expr(HEAD_DIM // plan.blocks) + tid % groups.column_threads * plan.columns
        # The first turn also saves, so that the loads of state rows and of block tables overlap; it runs without a window, too.
        for turn in cutlass.range(cutlass.max(closing, 1), unroll=1):
            i, address, entry = Int32(0), Int64(0), Int32(0)
            seq_len = Int32(0)
            if cutlass.const_expr(mA.seq_lens is not None):
                if turn == 0:
                    seq_len = self.sequence_length(mA, shared, tid)
            if turn < closing:
                i = self.closing_row(shared, turn)
                address, entry = self.locate(mA, shared.row[i], shared.position[i], shared.request[i], tid)
            if cutlass.const_expr(mA.kv_score is not None):
                if turn == 0:
                    if cutlass.const_expr(mA.seq_lens is not None):
                        self.drop_unsaved(mA, shared, seq_len, tid)
                        cute.arch.sync_threads()
                    self.save(mA, shared, rank, tid)
            if turn < closing:
                page = cutlass.select_(memory.in_range(entry, memory.extent(mA.state)), entry, Int32(0))
                address = address + Int64(page) * memory.byte_stride(mA.state, 0)
                self.close_window(mA, shared, address, i, column, turn, tid)

    @cute.jit
    def close_window(self, mA: Arguments, shared: Shared, address: Int64, i: Int32, column: Int32, turn: Int32, tid: Int32):
        """Pool the window that closes on examined row `i`, whose rows' addresses the lanes hold, and write its compressed row."""
        plan, groups = self.plan, self.plan.groups
        partial = pooling.Partial.empty(plan.columns)
        self.pool(mA, address, column, tid, partial)
        # Loaded here, where the pooled rows have left their registers: the latency passes behind the reductions.
        weight = norm_rope.load_weight(mA.norm_weight, column, plan.columns)
        rotation = cute.make_rmem_tensor(cute.make_layout(plan.columns), Float32)
        rotation.fill(0.0)
        norm_rope.load_rotation(mA.cos_sin, shared.position[i] - (plan.ratio - 1), column, rotation)
        if cutlass.const_expr(groups.groups > 1):
            groups.merge_block(partial, shared.scratch[None, None, None, None, turn % self.splitter.buffers], tid)
        pooled = cute.make_rmem_tensor(cute.make_layout(plan.columns), Float32)
        for c in cutlass.range_constexpr(plan.columns):
            pooled[c] = partial.product[c] * cute.arch.rcp_approx(partial.weight[c])
        squares = norm_rope.square_sum(pooled)
        squares = cute.arch.warp_reduction_sum(squares, threads_in_group=cutlass.const_expr(min(32, groups.column_threads)))
        slots = shared.totals[None, turn % 2]
        self.splitter.share(squares, slots, shared.barriers, turn, tid)
        if tid < groups.column_threads:
            norm_rope.normalise_rotate(pooled, splitters.total_of(slots), mA.eps, weight, column >= NOPE_DIM, rotation)
            self.writer(mA).write(mA.kv_cache, Uint32(shared.slot[i]), column, pooled, tid % 32)

    def allocate(self) -> Shared:
        """Shared memory of one block."""
        plan, groups, smem = self.plan, self.plan.groups, SmemAllocator()
        merged = (plan.columns, groups.column_threads, 3, groups.parts, self.splitter.buffers)

        def array(dtype, *shape):
            return smem.allocate_tensor(dtype, cute.make_layout(shape), byte_alignment=16)

        return Shared(
            counts=array(Int32, max(1, plan.rows // 32)),
            order=array(Int32, plan.rows),
            row=array(Int32, plan.rows),
            position=array(Int32, plan.rows),
            request=array(Int32, plan.rows),
            slot=array(Int32, plan.rows),
            state=array(Int64, plan.rows),
            totals=array(Float32, plan.blocks * plan.summing_warps, 2),
            barriers=array(Int64, 2),
            scratch=array(Float32, *merged) if groups.groups > 1 else None,
        )

    @cute.jit
    def examine(self, mA: Arguments, shared: Shared, cluster: Int32, tid: Int32):
        """One row per thread: does it close a window, and where would its state go?"""
        plan = self.plan
        if tid < cutlass.const_expr(max(32, plan.rows)):
            t = plan.row_of(cluster, tid)
            limit = cutlass.min(memory.extent(mA.state_slots), memory.extent(mA.positions))
            limit = cutlass.min(limit, cutlass.min(memory.extent(mA.token_to_req), memory.extent(mA.kv_slots)))
            closes, state_row = Boolean(False), Int64(0)
            if (t < limit) & (tid < plan.rows):
                slot, position = Int64(mA.state_slots[t]), Int64(mA.positions[t])
                request, target = Int32(mA.token_to_req[t]), Int64(mA.kv_slots[t])
                real = (slot >= 0) & (position >= 0) & memory.in_range(request, memory.extent(mA.state_block_table))
                capacity = Int64(mA.kv_cache.shape[0]) * Int64(mA.kv_cache.shape[1])
                last = (position & (plan.ratio - 1)) == plan.ratio - 1
                closes = real & last & (position < memory.extent(mA.cos_sin)) & memory.in_range(target, capacity)
                shared.row[tid] = t
                shared.position[tid] = Int32(position)
                shared.request[tid] = request
                shared.slot[tid] = Int32(target)
                if cutlass.const_expr(mA.kv_score is not None):
                    rows = Int64(mA.state.shape[1])
                    if real & (slot < Int64(mA.state.shape[0]) * rows):
                        # 32 bits hold any slot of a state pool that fits a GPU's memory.
                        page = Uint32(slot) // Uint32(rows)
                        offset = Uint32(slot) - page * Uint32(rows)
                        state_row = self.state_address(mA, Int64(page), Int64(offset))
            if tid < plan.rows:
                shared.state[tid] = state_row
            mask = Int32(cute.arch.vote_ballot_sync(closes))
            if closes:
                lower = (Int32(1) << tid % 32) - 1
                shared.order[tid // 32 * 32 + cute.arch.popc(mask & lower)] = tid
            if tid % 32 == 0:
                shared.counts[tid // 32] = cute.arch.popc(mask)

    def state_address(self, mA: Arguments, block: Int64, offset: Int64) -> Int64:
        """Byte address of a state row."""
        return memory.base_address(mA.state) + block * memory.byte_stride(mA.state, 0) + offset * memory.byte_stride(mA.state, 1)

    @cute.jit
    def closing_row(self, shared: Shared, turn: Int32) -> Int32:
        """The examined row that is the `turn`-th to close a window; there is one."""
        word, place = Int32(0), turn
        for w in cutlass.range_constexpr(cute.size(shared.counts) - 1):
            beyond = (word == w) & (place >= shared.counts[w])
            place = place - cutlass.select_(beyond, shared.counts[w], Int32(0))
            word = word + Int32(beyond)
        return shared.order[word * 32 + place]

    @cute.jit
    def locate(self, mA: Arguments, t: Int32, position: Int32, request: Int32, tid: Int32):
        """One window row per lane: lane k of a group (modulo its row count) finds the group's row k.

        Returns its address but for the state block, with flags in the low bits, and the block-table entry, which the caller adds:
        so nothing waits for the block table before the address is needed. A row of this step is taken from `kv_score` (entry 0), an
        earlier one from the state pool. A row before position 0 gets the address of the row one group later, which lies in the window,
        and is marked as excluded. A column past the table counts as entry 0.
        """
        plan = self.plan
        k = tid // plan.groups.column_threads * plan.group_rows + tid % cutlass.const_expr(min(plan.group_rows, plan.groups.column_threads))
        excluded = position - (plan.window - 1) + k < 0
        k = k + cutlass.select_(excluded, Int32(overlap(plan.ratio)), Int32(0))
        back = plan.window - 1 - k
        p = position - back
        from_step = Boolean(False)
        address, entry = Int64(0), Int32(0)
        if cutlass.const_expr(mA.kv_score is not None):
            source = t - back
            if source >= 0:
                owner, there = Int32(mA.token_to_req[source]), Int64(mA.positions[source])
                from_step = (owner == request) & (there == Int64(p)) & (Int64(mA.state_slots[source]) >= 0)
            if from_step:
                address = memory.base_address(mA.kv_score) + Int64(source) * memory.byte_stride(mA.kv_score, 0) + STEP_ROW
        if not from_step:
            rows = Uint32(mA.state.shape[1])
            column = Uint32(p) // rows
            address = self.state_address(mA, Int64(0), Int64(Uint32(p) - column * rows))
            if Int32(column) < mA.state_block_table.shape[1]:
                place = Int64(request) * memory.byte_stride(mA.state_block_table, 0) + Int64(column) * 4
                entry = memory.at(memory.base_address(mA.state_block_table) + place, Int32, 1)[0]
        return address + cutlass.select_(excluded, Int64(EXCLUDED), Int64(0)), entry

    @cute.jit
    def pool(self, mA: Arguments, address: Int64, column: Int32, tid: Int32, partial: pooling.Partial):
        """Pool this thread's rows of the window, batch by batch. All loads of a batch are issued before the first use."""
        plan = self.plan
        lanes = cutlass.const_expr(min(32, plan.groups.column_threads))
        from_step = Int32(cute.arch.vote_ballot_sync((address & STEP_ROW) != 0))
        excluded = Int32(cute.arch.vote_ballot_sync((address & EXCLUDED) != 0))
        group = tid // plan.groups.column_threads
        window = WindowRows(address & -4, from_step, excluded, tid % 32 // lanes * lanes, group * plan.group_rows)
        shape = cute.make_layout((plan.columns, plan.batch))
        one = tuple(cute.make_rmem_tensor(shape, Float32) for _ in range(2))
        self.load_batch(window, column, 0, one)
        if cutlass.const_expr(plan.batch == plan.group_rows):
            cute.arch.sync_warp()  # keeps ptxas from moving loads behind the first use, which starts below
            self.add_batch(mA, window, column, 0, one, partial, empty=True)
        else:
            other = tuple(cute.make_rmem_tensor(shape, Float32) for _ in range(2))
            for fragment, value in zip(partial, (pooling.NEG_INF, 0.0, 0.0), strict=True):
                fragment.fill(value)
            for start in cutlass.range(0, plan.group_rows, 2 * plan.batch, unroll=1):
                self.load_batch(window, column, start + plan.batch, other)
                cute.arch.sync_warp()
                self.add_batch(mA, window, column, start, one, partial, empty=False)
                if start + 2 * plan.batch < plan.group_rows:
                    self.load_batch(window, column, start + 2 * plan.batch, one)
                cute.arch.sync_warp()
                self.add_batch(mA, window, column, start + plan.batch, other, partial, empty=False)

    def load_batch(self, window: WindowRows, column: Int32, start: Int32, rows: tuple) -> None:
        """Issue the loads of `batch` rows of this thread's group, from its row `start` on, into (values, logits)."""
        values, logits = rows
        for k in range(self.plan.batch):
            row = cute.arch.shuffle_sync(window.address, window.first_lane + start + k) + Int64(column + self.plan.half(k)) * 4
            memory.load_vector(row, values[None, k], memory.STREAM)
            memory.load_vector(row + self.plan.width * 4, logits[None, k], memory.STREAM)

    def add_batch(self, mA: Arguments, window: WindowRows, column: Int32, start: Int32, rows: tuple, partial: pooling.Partial, empty: bool):
        """Pool rows that `load_batch` loaded: position embeddings added to this step's scores, rows before position 0 left out."""
        plan = self.plan
        values, logits = rows
        bias = cute.make_rmem_tensor(cute.make_layout(plan.columns), Float32)
        from_step, excluded = window.from_step >> (window.first_lane + start), window.excluded >> (window.first_lane + start)
        for k in range(plan.batch):
            if mA.kv_score is not None:
                place = window.first_row + start + k % plan.ratio
                memory.load_vector(self.ape_address(mA, place, column + plan.half(k)), bias)
            for c in range(plan.columns):
                if mA.kv_score is not None:
                    logits[c, k] = cutlass.select_((from_step & (1 << k)) != 0, logits[c, k] + bias[c], logits[c, k])
                if k < overlap(plan.ratio):
                    outside = (excluded & (1 << k)) != 0
                    logits[c, k] = cutlass.select_(outside, Float32(pooling.NEG_INF), logits[c, k])
                    values[c, k] = cutlass.select_(outside, Float32(0.0), values[c, k])
        pooling.add_rows(partial, values, logits, first=empty)

    def ape_address(self, mA: Arguments, place: Int32, column: Int32) -> Int64:
        """Byte address of the position embedding of a place in the group."""
        return memory.base_address(mA.ape) + (Int64(place) * plan_width(mA.ape) + Int64(column)) * 4

    @cute.jit
    def sequence_length(self, mA: Arguments, shared: Shared, tid: Int32) -> Int32:
        """Length of the sequence of this thread's row; 0 where it is not to be saved anyway."""
        seq_len = Int32(0)
        if tid < self.plan.rows:
            if shared.state[tid] != 0:
                seq_len = Int32(mA.seq_lens[shared.request[tid]])
        return seq_len

    @cute.jit
    def drop_unsaved(self, mA: Arguments, shared: Shared, seq_len: Int32, tid: Int32):
        """Unmark this thread's row unless the policy keeps it: `save_policy.is_saved`, without overflow for any position an int32 holds."""
        plan = self.plan
        if tid < plan.rows:
            if shared.state[tid] != 0:
                position, seq = Int64(shared.position[tid]), Int64(seq_len)
                last = (position + overlap(plan.ratio)) | (plan.ratio - 1)
                open_window = cutlass.max(position + 1, seq - Int64(mA.rollback)) <= cutlass.min(last, seq)
                stride = Uint32(cutlass.max(mA.prefix_stride, 1))
                prefix = (mA.prefix_stride > 0) & (Int64(Uint32(last) // stride * stride) > position)
                if not (open_window | prefix):
                    shared.state[tid] = Int64(0)

    @cute.jit
    def save(self, mA: Arguments, shared: Shared, rank: Int32, tid: Int32):
        """Copy this block's share of the marked rows into the state pool, APE added to the scores by a plain addition."""
        plan = self.plan
        columns = plan.columns
        row_threads = cutlass.const_expr(min(plan.threads, plan.width // columns))
        side_by_side = cutlass.const_expr(plan.threads // row_threads)
        pieces = cutlass.const_expr(plan.width // columns // row_threads)
        share = cutlass.const_expr(plan.rows // plan.blocks)
        batch = cutlass.const_expr(min(plan.save_rows, max(1, share // side_by_side)))
        shape = cute.make_layout((columns, pieces, batch))
        for start in cutlass.range(0, share, batch * side_by_side, unroll=1):
            values, scores, biases = (cute.make_rmem_tensor(shape, Float32) for _ in range(3))
            for fragment in (values, scores, biases):
                fragment.fill(0.0)  # else the registers of the last turn would stay alive
            target = cute.make_rmem_tensor(cute.make_layout(batch), Int64)
            for k in cutlass.range_constexpr(batch):
                mine = start + k * side_by_side + tid // row_threads
                target[k] = Int64(0)
                if mine < share:
                    target[k] = shared.state[mine * plan.blocks + rank]
                if target[k] != 0:
                    i = mine * plan.blocks + rank
                    row = memory.base_address(mA.kv_score) + Int64(shared.row[i]) * memory.byte_stride(mA.kv_score, 0)
                    place = shared.position[i] & (plan.ratio - 1)
                    for q in cutlass.range_constexpr(pieces):
                        column = (tid % row_threads + q * row_threads) * columns
                        memory.load_vector(row + Int64(column) * 4, values[None, q, k])
                        memory.load_vector(row + Int64(column + plan.width) * 4, scores[None, q, k])
                        memory.load_vector(self.ape_address(mA, place, column), biases[None, q, k])
            for k in cutlass.range_constexpr(batch):
                if target[k] != 0:
                    for q in cutlass.range_constexpr(pieces):
                        column = (tid % row_threads + q * row_threads) * columns
                        for c in cutlass.range_constexpr(columns):
                            scores[c, q, k] = scores[c, q, k] + biases[c, q, k]
                        memory.store_vector(target[k] + Int64(column) * 4, values[None, q, k])
                        memory.store_vector(target[k] + Int64(column + plan.width) * 4, scores[None, q, k])


def plan_width(ape: cute.Tensor) -> int:
    """Columns of the position embedding, a compile-time number."""
    return ape.shape[1]
