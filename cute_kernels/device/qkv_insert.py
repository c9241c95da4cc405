"""The insert kernel of both families: q heads normalised, rotated and padded, this step's KV rows rotated and stored in the window cache.

A block is one warp. It serves four q heads, 4 KB, or one or two KV rows. Heads come by bulk copies into shared memory, so that what is
under way from memory takes no registers. They are read twice, for the sum of squares, and to be scaled, rotated and stored; once where 16
lanes share a head and store it as FP8, which leaves registers for it. 8 or 16 lanes that share a head leave few instructions that serve
one head only; where 16 do, a warp serves two heads and then the other two. KV rows come first in the grid: theirs is the longest way.
What differs between formats is handed in as values: two row writers.
"""

import functools
import operator
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import BFloat16, Boolean, Float8E4M3FN, Float32, Int32, Int64, Uint32, cute
from cutlass.cute.runtime import make_fake_tensor
from cutlass.memory import SmemAllocator

from cute_kernels.compile.spec import QkvInsertSpec
from cute_kernels.device import WARP, convert, memory, norm_rope, pdl
from cute_kernels.device.fakes import fake_vector
from cute_kernels.device.row_writers import CACHE_TYPES
from cute_kernels.device.slots import Divisor
from cute_kernels.kv_format import FORMATS, HEAD_DIM, NOPE_DIM, ROPE_DIM

HEADS = 4  # of a block. A copy by blocks of 4 KB was the fastest on an H200 (2026-11-29, 1 GB); by 8 KB it took 3% more.
# By the columns of an access: lanes that share a head, and KV rows that a block may have; with wider accesses two would spill registers.
LANES = {8: 16, 16: 8}
KV_ROWS = {8: 2, 16: 1}
PAIRS_FROM = 2048  # tokens: a block has as many KV rows as it may from here on, and one below, where the slowest block decides
# Heads of a step, from and up to, whose lines of q leave the L2 first where BF16 is written: q is dead then, `out` is read next, and both
# fit. On an H200 (2026-11-30) steps of 256 tokens took 1% (16 heads) to 3% (64) less by it, one of 1024 tokens with 16 heads 1% more; of
# more heads steps took 1 to 4% more, of fewer 6 to 15%, and FP8 1 to 7%; with nothing left in the L2 of the round before, fewer took
# between 4% less and 2% more.
STREAMED = (4096, 16384)
RESIDENT = 32  # blocks that should fit on an SM at once: bounds the registers


class Arguments(NamedTuple):
    """Run-time arguments; None where the kernel has no such argument (`QkvInsertSpec.argument_names`)."""

    q: Any
    kv: Any
    kv_cache: Any
    slots: Any
    positions: Any
    cos_sin: Any
    out: Any
    eps: Any = None
    inverse_q_scale: Any = None
    inverse_kv_scale: Any = None
    independent: Any = None


class Stage(NamedTuple):
    """Shared memory: heads as they arrive, the barrier that counts their bytes, and a word of each lane."""

    heads: cute.Tensor  # [512, HEADS] bf16
    full: cute.Pointer
    words: cute.Tensor  # [32]


@dataclass(frozen=True)
class Lanes:
    """How `lanes` lanes share a row: pieces of `columns` values, lane beside lane, piece after piece."""

    lanes: int
    columns: int

    @property
    def pieces(self) -> int:
        """Accesses of a lane to a row; the rotated columns lie in the last."""
        return HEAD_DIM // self.lanes // self.columns

    def column(self, p: int, lane: Int32) -> Int32:
        """First column of a lane's piece `p`."""
        return p * (self.lanes * self.columns) + lane * self.columns

    def rotated(self, lane: Int32):
        """Whether a lane's last piece is rotated."""
        return self.lanes * self.columns == ROPE_DIM or self.column(self.pieces - 1, lane) >= NOPE_DIM

    def load(self, row: Int64, lane: Int32) -> cute.Tensor:
        """Issue a lane's loads of the row of bf16 values at an address: [columns, pieces]. Each is read once."""
        loaded = cute.make_rmem_tensor(cute.make_layout((self.columns, self.pieces)), BFloat16)
        for p in range(self.pieces):
            memory.load_vector(row + Int64(self.column(p, lane)) * 2, loaded[None, p], memory.STREAM)
        return loaded

    def read(self, row: cute.Tensor, p: int, lane: Int32) -> cute.Tensor:
        """A lane's piece `p` of a row of bf16 values in shared memory."""
        piece = cute.make_rmem_tensor(cute.make_layout(self.columns), BFloat16)
        address = row.iterator.toint() + self.column(p, lane) * 2
        place = cute.make_ptr(BFloat16, address, cute.AddressSpace.smem, assumed_align=self.columns * 2)
        cute.autovec_copy(cute.make_tensor(place, piece.layout), piece)
        return piece

    def load_rotation(self, cos_sin: cute.Tensor, position: Int64, lane: Int32) -> cute.Tensor:
        """Cosines and sines of a lane's last piece at a position inside the table; of some pairs where nothing is rotated."""
        rotation = cute.make_rmem_tensor(cute.make_layout((self.columns // 2, 2)), Float32)
        first = cutlass.max(self.column(self.pieces - 1, lane), NOPE_DIM) - NOPE_DIM
        row = memory.base_address(cos_sin) + position * memory.byte_stride(cos_sin, 0) + Int64(first) * 2
        memory.load_vector(row, rotation[None, 0])
        memory.load_vector(row + ROPE_DIM * 2, rotation[None, 1])
        in_order()
        return rotation


@dataclass(frozen=True)
class InsertKernel:
    """columns    bf16 values of one access: 8 or 16
    q_writer, kv_writer   from `Arguments` to the row writer of `out` and of the cache
    names      of the compiled function's arguments, in order
    """

    columns: int
    q_writer: Any
    kv_writer: Any
    names: tuple
    pdl: bool

    @property
    def lanes(self) -> int:
        """Lanes that share a head."""
        return LANES[self.columns]

    @property
    def kv_rows(self) -> int:
        """KV rows of a block in a long step."""
        return KV_ROWS[self.columns]

    @property
    def at_once(self) -> int:
        """Heads that a warp serves side by side."""
        return WARP // self.lanes

    @cute.jit
    def __call__(self, *args):
        arguments = Arguments(**dict(zip(self.names, args[:-1], strict=True)))
        tokens, padded = memory.extent(arguments.q), Int32(arguments.out.shape[1])
        heads = tokens * padded
        kv_blocks = Int32(cutlass.select_(tokens < PAIRS_FROM, tokens, cute.ceil_div(tokens, self.kv_rows)))
        policy = None
        if cutlass.const_expr(arguments.out.element_type is BFloat16):
            policy = memory.policy_where((heads >= STREAMED[0]) & (heads <= STREAMED[1]))
        self.kernel(arguments, heads, Divisor.of(cutlass.max(padded, 1)), kv_blocks, policy).launch(
            grid=[kv_blocks + cute.ceil_div(heads, HEADS), 1, 1],
            block=[WARP, 1, 1],
            min_blocks_per_mp=RESIDENT,
            preferred_smem_carveout=100,  # percent: room for the heads of as many blocks as there are places for
            stream=args[-1],
            use_pdl=self.pdl,
        )

    @cute.kernel
    def kernel(self, mA: Arguments, heads: Int32, by_padded: Divisor, kv_blocks: Int32, policy: Int64 | None):
        """heads: of all tokens, padded ones included; kv_blocks: as many as tokens, or each with `kv_rows` of their rows; policy: of q's
        lines in L2; None: the usual."""
        lane, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        smem = SmemAllocator()
        arriving = smem.allocate_tensor(BFloat16, cute.make_layout((HEAD_DIM, HEADS)), byte_alignment=128)
        full = smem.allocate_tensor(Int64, cute.make_layout(1), byte_alignment=8)
        words = smem.allocate_tensor(Int32, cute.make_layout(WARP), byte_alignment=8)
        stage = Stage(arriving, full.iterator, words)
        if lane == 0:
            cute.arch.mbarrier_init(full.iterator, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_warp()
        if block >= kv_blocks:
            self.insert_q(mA, (block - kv_blocks) * HEADS, heads, by_padded, policy, stage, lane)
        else:
            if cutlass.const_expr(self.kv_rows == 1):
                self.insert_kv(mA, block, 1, stage, lane)
            else:
                if kv_blocks == memory.extent(mA.q):
                    self.insert_kv(mA, block, 1, stage, lane)
                else:
                    self.insert_kv(mA, block * self.kv_rows, self.kv_rows, stage, lane)
        pdl.end(self.pdl, mA.independent)

    def begin(self, mA: Arguments, stage: Stage, known: list, lane: Int32) -> None:
        """Wait for the grid in front. known: a lane's addresses, and what else it needs of the parameters; they are read before it."""
        total = functools.reduce(operator.add, [*known, memory.base_address(mA.positions), memory.base_address(mA.cos_sin)])
        pdl.settle(self.pdl, stage.words.iterator + lane, Int32(total))
        pdl.begin(self.pdl, mA.independent)

    @cute.jit
    def insert_q(self, mA: Arguments, first: Int32, heads: Int32, by_padded: Divisor, policy: Int64 | None, stage: Stage, lane: Int32):
        """Heads `first` to `first` + 3 of all: zero where one pads its token's, or where the token's position has no rotation."""
        padded, available = Int32(mA.out.shape[1]), Int32(mA.q.shape[1])
        part, turns = Lanes(self.lanes, self.columns), range(HEADS // self.at_once)
        indices = [first + turn * self.at_once + lane // part.lanes for turn in turns]
        tokens = [by_padded.quotient(cutlass.min(index, heads - 1)) for index in indices]
        own = [index - token * padded for index, token in zip(indices, tokens, strict=True)]  # of its token's heads
        sources = [head_address(mA.q, tokens[turn], cutlass.min(own[turn], available - 1)) for turn in turns]
        targets = [head_address(mA.out, tokens[turn], own[turn]) for turn in turns]
        self.begin(mA, stage, [*sources, *targets, *([] if policy is None else [policy])], lane)
        part_lane = lane % part.lanes
        rotated = cute.make_rmem_tensor(cute.make_layout(len(turns)), Int32)
        rotated.fill(0)
        if cute.arch.vote_any_sync(functools.reduce(operator.or_, [head < available for head in own])):
            fetch(sources, stage, part.lanes, policy)
            positions = [Int64(mA.positions[token]) for token in tokens]
            inside = [memory.in_range(position, memory.extent(mA.cos_sin)) for position in positions]
            places = [cutlass.select_(inside[turn], positions[turn], Int64(0)) for turn in turns]
            rotations = [part.load_rotation(mA.cos_sin, place, part_lane) for place in places]
            cute.arch.mbarrier_wait(stage.full, 0)
            for turn in cutlass.range_constexpr(len(turns)):
                rotated[turn] = Int32(inside[turn] & (own[turn] < available))
                row = stage.heads[None, turn * self.at_once + lane // part.lanes]
                self.store_head(mA, row, targets[turn], rotated[turn] != 0, rotations[turn], part, part_lane)
        for turn in cutlass.range_constexpr(len(turns)):
            if (indices[turn] < heads) & (rotated[turn] == 0):
                zeros = cute.make_rmem_tensor(cute.make_layout(self.columns), Float32)
                zeros.fill(0.0)
                for p in cutlass.range_constexpr(part.pieces):
                    self.q_writer(mA).store(targets[turn], part.column(p, part_lane), zeros)

    @cute.jit
    def store_head(self, mA: Arguments, row: cute.Tensor, target: Int64, rotated: Boolean, rotation: cute.Tensor, part: Lanes, lane: Int32):
        """A lane's part of a head that has arrived, where it is to be rotated. The whole warp calls."""
        once = cutlass.const_expr(mA.out.element_type is Float8E4M3FN and part.lanes == 16)  # others would spill registers
        factor, pieces = None, [part.read(row, p, lane) for p in range(part.pieces)]
        if cutlass.const_expr(mA.eps is not None):
            total = norm_rope.square_sum_bf16(pieces)
            factor = norm_rope.rms_factor(cute.arch.warp_reduction_sum(total, threads_in_group=part.lanes), mA.eps)
            if cutlass.const_expr(mA.inverse_q_scale is not None):
                factor = factor * mA.inverse_q_scale  # of a normalised head nothing overflows: scaled along with it
            in_order()  # what is read behind this is not taken from the registers
        if rotated:
            for p in cutlass.range_constexpr(part.pieces):
                if cutlass.const_expr(once):
                    values = convert.widen(pieces[p])
                else:
                    values = convert.widen(part.read(row, p, lane))
                if cutlass.const_expr(factor is not None):
                    scale(values, factor)
                if cutlass.const_expr(p == part.pieces - 1):
                    rotate_fused(values, part.rotated(lane), rotation)
                if cutlass.const_expr(factor is None and mA.inverse_q_scale is not None):
                    scale(values, mA.inverse_q_scale)
                self.q_writer(mA).store(target, part.column(p, lane), values)

    @cute.jit
    def insert_kv(self, mA: Arguments, first: Int32, count: cutlass.Constexpr, stage: Stage, lane: Int32):
        """The KV rows of `count` tokens from `first` on; nothing where one has no slot in the pool, or its position no rotation."""
        part = Lanes(WARP, self.columns)
        tokens = [cutlass.min(first + r, memory.extent(mA.q) - 1) for r in range(count)]
        rows = [memory.base_address(mA.kv) + Int64(token) * memory.byte_stride(mA.kv, 0) for token in tokens]
        self.begin(mA, stage, rows, lane)
        loaded = [part.load(row, lane) for row in rows]
        in_order()
        positions = [Int64(mA.positions[token]) for token in tokens]
        slots = cute.make_rmem_tensor(cute.make_layout(count), Int64)
        slots.fill(-1)
        for r in cutlass.range_constexpr(count):
            if first + r < cutlass.min(memory.extent(mA.q), memory.extent(mA.slots)):
                slots[r] = Int64(mA.slots[tokens[r]])
        capacity = Int64(mA.kv_cache.shape[0]) * Int64(mA.kv_cache.shape[1])
        rotated = [memory.in_range(position, memory.extent(mA.cos_sin)) for position in positions]
        places = [cutlass.select_(rotated[r], positions[r], Int64(0)) for r in range(count)]
        rotations = [part.load_rotation(mA.cos_sin, place, lane) for place in places]
        for r in cutlass.range_constexpr(count):
            if rotated[r] & memory.in_range(slots[r], capacity):
                for p in cutlass.range_constexpr(part.pieces):
                    values = convert.widen(loaded[r][None, p])
                    if cutlass.const_expr(p == part.pieces - 1):
                        norm_rope.rotate(values, part.rotated(lane), rotations[r])
                    self.kv_writer(mA).write(mA.kv_cache, Uint32(slots[r]), part.column(p, lane), values, lane)


def head_address(heads: cute.Tensor, token: Int32, head: Int32) -> Int64:
    """Byte address of a head of a token in q or out."""
    row = memory.base_address(heads) + Int64(token) * memory.byte_stride(heads, 0)
    return row + Int64(head) * memory.byte_stride(heads, 1)


@cute.jit
def fetch(addresses: list, stage: Stage, lanes: cutlass.Constexpr, policy: Int64 | None):
    """Have the heads of a warp copied into its stage, turn by turn; each of a head's `lanes` lanes knows its address. The whole warp calls.

    One thread issues all copies: the machine takes their addresses from uniform registers, and goes through lanes one by one.
    """
    sources = [cute.arch.shuffle_sync(address, k * lanes) for address in addresses for k in range(WARP // lanes)]
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(stage.full, HEADS * HEAD_DIM * 2)
        for k in cutlass.range_constexpr(HEADS):
            memory.copy_bulk(sources[k], stage.heads.iterator + k * HEAD_DIM, HEAD_DIM * 2, stage.full, policy)
    in_order()


@cute.jit
def rotate_fused(values: cute.Tensor, rotated: cutlass.Boolean, rotation: cute.Tensor):
    """`norm_rope.rotate` with one rounding less: q is judged by its error, not by its bits."""
    if rotated:
        pairs = cutlass.const_expr(cute.size(values) // 2)
        for j in cutlass.range_constexpr(pairs):
            a, b, c, s = values[2 * j], values[2 * j + 1], rotation[j], rotation[pairs + j]
            values[2 * j] = cute.math.fma(a, c, -(b * s))
            values[2 * j + 1] = cute.math.fma(a, s, b * c)


def scale(values: cute.Tensor, factor: Float32) -> None:
    """Multiply a fragment by a factor, in pairs where the GPU has packed fp32 arithmetic."""
    values.store(values.load() * factor)


def in_order() -> None:
    """Keeps loads and stores above and below in this order.

    A row's values come before the position: ptxas would give the registers of a load issued earlier to one of theirs, which then waits.
    """
    cute.arch.sync_warp()


def fake_arguments(spec: QkvInsertSpec) -> list[Any]:
    """Fake arguments in the order of `spec.argument_names`: what the compiled function promises to accept, checked on every call.

    Rows of q, kv, positions and out are as many; slots may be fewer or more. Strides of q, kv and the cache's pages are run-time
    values. `spec.vector_bytes` is the alignment of everything but slots and positions.
    """
    align, fmt = spec.vector_bytes, FORMATS[spec.kv_format]
    rows = cute.sym_int()

    def tensor(dtype: Any, shape: tuple, strides: tuple) -> Any:
        return make_fake_tensor(dtype, shape, stride=strides, assumed_align=align)

    def stride(dtype: Any) -> Any:
        return cute.sym_int64(divisibility=align * 8 // dtype.width)

    cache_type = CACHE_TYPES[fmt.name]
    out_type = Float8E4M3FN if spec.q_dtype == "e4m3" else BFloat16
    made = {
        "q": tensor(BFloat16, (rows, cute.sym_int(), HEAD_DIM), (stride(BFloat16), stride(BFloat16), 1)),
        "kv": tensor(BFloat16, (rows, HEAD_DIM), (stride(BFloat16), 1)),
        "kv_cache": tensor(cache_type, (cute.sym_int(), cute.sym_int(), fmt.row_elements), (stride(cache_type), fmt.row_elements, 1)),
        "slots": fake_vector(cute.sym_int(), Int64),
        "positions": fake_vector(rows, Int64),
        "cos_sin": tensor(Float32, (cute.sym_int(), ROPE_DIM), (ROPE_DIM, 1)),
        "out": tensor(out_type, (rows, cute.sym_int(), HEAD_DIM), (stride(out_type), HEAD_DIM, 1)),
        "eps": Float32(0.0),
        "inverse_q_scale": Float32(1.0),
        "inverse_kv_scale": Float32(1.0),
        "independent": Int32(0),
    }
    return [made[name] for name in spec.argument_names]
