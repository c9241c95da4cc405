"""The insert kernel of both families: q heads normalised, rotated and padded, this step's KV rows rotated and stored in the window cache.

One warp serves a row of 512 values: one access of 16 or 32 bytes per lane and piece. A token's rows are dealt out in units, one
warp each: first its KV row, then its q heads, one each or a few together. What differs between formats is handed in as values:
two row writers.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, Int64, Uint32, cute
from cutlass.cute.runtime import make_fake_tensor

from cute_kernels.compile.spec import QkvInsertSpec
from cute_kernels.device import convert, memory, norm_rope, pdl
from cute_kernels.device.row_writers import CACHE_TYPES
from cute_kernels.device.slots import Divisor
from cute_kernels.kv_format import FORMATS, HEAD_DIM, NOPE_DIM, ROPE_DIM

WARP = 32
WARPS = 4  # of a block
# By the columns of an access: heads whose loads a warp has in flight together, and blocks that should fit on an SM at once, which
# bounds the registers to 56 and 96.
BATCH = {8: 2, 16: 4}
RESIDENT = {8: 9, 16: 5}
# Up to how many heads of a step in all each warp takes one, so that a short step spreads over the GPU.
FEW_HEADS = 4096
# Beyond, up to how many heads q leaves the L2 first. In steps near the L2's size that keeps room for what comes after; larger
# ones lose by it (docs/results/2026-11-29-h200-bench/variants.txt).
NEAR_L2_HEADS = 65536


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
    def pieces(self) -> int:
        """Accesses of a lane to a row; the rotated columns lie in the last."""
        return HEAD_DIM // WARP // self.columns

    @property
    def batch(self) -> int:
        return BATCH[self.columns]

    @cute.jit
    def __call__(self, *args):
        arguments = Arguments(**dict(zip(self.names, args[:-1], strict=True)))
        tokens, heads = memory.extent(arguments.q), Int32(arguments.out.shape[1])
        many = Int32(tokens * heads > FEW_HEADS)
        share = many * (self.batch - 1) + 1
        units = (heads + share - 1) // share + 1
        policy = Int64(memory.EVICT_NORMAL)
        if tokens * heads <= NEAR_L2_HEADS:
            policy = Int64(memory.EVICT_FIRST)
        self.kernel(arguments, share, units, Divisor.of(units), policy).launch(
            grid=[(tokens * units + WARPS - 1) // WARPS, 1, 1],
            block=[WARPS * WARP, 1, 1],
            min_blocks_per_mp=RESIDENT[self.columns],
            preferred_smem_carveout=-1,  # the driver's default; without a value the DSL would ask a device
            stream=args[-1],
            use_pdl=self.pdl,
        )

    @cute.kernel
    def kernel(self, mA: Arguments, share: Int32, units: Int32, by_units: Divisor, policy: Int64):
        """share: heads of a unit. units: of a token, the KV row's included. policy: the L2's for heads of units with several."""
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        unit = Int32(block) * WARPS + cute.arch.make_warp_uniform(tid // WARP)
        token = by_units.quotient(unit)
        part = unit - token * units
        lane = tid % WARP
        pdl.begin(self.pdl, mA.independent)
        if token < memory.extent(mA.q):
            if part == 0:
                self.insert_kv(mA, token, lane)
            else:
                self.insert_q(mA, token, (part - 1) * share, share, policy, lane)
        pdl.end(self.pdl, mA.independent)

    @cute.jit
    def insert_q(self, mA: Arguments, token: Int32, first: Int32, share: Int32, policy: Int64, lane: Int32):
        """Heads first .. first + share - 1 of a token, as far as there are so many, padded ones included."""
        heads, padded = Int32(mA.q.shape[1]), Int32(mA.out.shape[1])
        if (share == self.batch) & (first + self.batch <= heads):
            self.heads(mA, token, first, lane, self.batch, policy)
        else:
            for head in cutlass.range(first, cutlass.min(first + share, padded), unroll=1):
                if head < heads:
                    self.heads(mA, token, head, lane, 1, None)
                else:
                    self.store_zeros(mA, self.head_address(mA.out, token, head), lane, 1)

    @cute.jit
    def heads(self, mA: Arguments, token: Int32, first: Int32, lane: Int32, count: cutlass.Constexpr, policy: Int64 | None):
        """`count` heads; zero where the token's position has no rotation. All loads are issued before the first use."""
        loaded = cute.make_rmem_tensor(cute.make_layout((HEAD_DIM // WARP, count)), BFloat16)
        for b in cutlass.range_constexpr(count):
            self.load_row(self.head_address(mA.q, token, first) + b * memory.byte_stride(mA.q, 1), lane, loaded[None, b])
        in_order()
        position = Int64(mA.positions[token])
        target = self.head_address(mA.out, token, first)
        rotated = memory.in_range(position, memory.extent(mA.cos_sin))
        rotation = self.load_rotation(mA, cutlass.select_(rotated, position, Int64(0)), lane)
        if rotated:
            for b in cutlass.range_constexpr(count):
                values = widen(loaded[None, b])
                if cutlass.const_expr(mA.eps is not None):
                    total = cute.arch.warp_reduction_sum(norm_rope.square_sum(values))
                    factor = norm_rope.rms_factor(total, mA.eps)
                    if cutlass.const_expr(mA.inverse_q_scale is not None):
                        factor = factor * mA.inverse_q_scale  # of a normalised head nothing overflows: scaled along with it
                    scale(values, factor)
                self.rotate_fused(values, rotation, lane)
                if cutlass.const_expr(mA.eps is None and mA.inverse_q_scale is not None):
                    scale(values, mA.inverse_q_scale)
                self.store_head(mA, target + b * memory.byte_stride(mA.out, 1), lane, values, policy)
                in_order()  # heads one after the other, or their values would not fit the registers
        else:
            self.store_zeros(mA, target, lane, count)

    def head_address(self, heads: cute.Tensor, token: Int32, head: Int32) -> Int64:
        """Byte address of a head of a token in q or out."""
        row = memory.base_address(heads) + Int64(token) * memory.byte_stride(heads, 0)
        return row + Int64(head) * memory.byte_stride(heads, 1)

    @cute.jit
    def store_head(self, mA: Arguments, row: Int64, lane: Int32, values: cute.Tensor, policy: Int64 | None):
        """Write one head."""
        for p in cutlass.range_constexpr(self.pieces):
            self.q_writer(mA).store(row, self.column(p, lane), self.piece(values, p), policy)

    @cute.jit
    def store_zeros(self, mA: Arguments, row: Int64, lane: Int32, count: cutlass.Constexpr):
        """Write `count` heads as zeros."""
        values = cute.make_rmem_tensor(cute.make_layout(HEAD_DIM // WARP), Float32)
        values.fill(0.0)
        for b in cutlass.range_constexpr(count):
            self.store_head(mA, row + b * memory.byte_stride(mA.out, 1), lane, values, None)

    @cute.jit
    def insert_kv(self, mA: Arguments, token: Int32, lane: Int32):
        """The KV row of a token; nothing where it has no slot in the pool, or its position no rotation."""
        loaded = cute.make_rmem_tensor(cute.make_layout(HEAD_DIM // WARP), BFloat16)
        self.load_row(memory.base_address(mA.kv) + Int64(token) * memory.byte_stride(mA.kv, 0), lane, loaded)
        in_order()
        position, slot = Int64(mA.positions[token]), Int64(-1)
        if token < memory.extent(mA.slots):
            slot = Int64(mA.slots[token])
        capacity = Int64(mA.kv_cache.shape[0]) * Int64(mA.kv_cache.shape[1])
        rotated = memory.in_range(position, memory.extent(mA.cos_sin))
        rotation = self.load_rotation(mA, cutlass.select_(rotated, position, Int64(0)), lane)
        if rotated & memory.in_range(slot, capacity):
            values = widen(loaded)
            rotated_piece = self.column(self.pieces - 1, lane) >= NOPE_DIM
            norm_rope.rotate(self.piece(values, self.pieces - 1), rotated_piece, rotation)
            for p in cutlass.range_constexpr(self.pieces):
                self.kv_writer(mA).write(mA.kv_cache, Uint32(slot), self.column(p, lane), self.piece(values, p), lane)

    def column(self, p: int, lane: Int32) -> Int32:
        """First column of a lane's piece `p`: lanes lie side by side."""
        return p * (WARP * self.columns) + lane * self.columns

    def piece(self, row: cute.Tensor, p: int) -> cute.Tensor:
        """Piece `p` of a lane's 16 values of a row."""
        return cute.make_tensor(row.iterator, cute.make_layout((self.columns, self.pieces)))[None, p]

    def load_row(self, row: Int64, lane: Int32, loaded: cute.Tensor) -> None:
        """Issue the loads of this lane's values of the row at an address. Each is read once."""
        for p in range(self.pieces):
            memory.load_vector(row + Int64(self.column(p, lane)) * 2, self.piece(loaded, p), memory.STREAM)

    def load_rotation(self, mA: Arguments, position: Int64, lane: Int32) -> cute.Tensor:
        """Cosines and sines of the last piece's pairs at a position inside the table; of some pairs where nothing is rotated."""
        rotation = cute.make_rmem_tensor(cute.make_layout((self.columns // 2, 2)), Float32)
        first = cutlass.max(self.column(self.pieces - 1, lane), NOPE_DIM) - NOPE_DIM
        row = memory.base_address(mA.cos_sin) + position * memory.byte_stride(mA.cos_sin, 0) + Int64(first) * 2
        memory.load_vector(row, rotation[None, 0])
        memory.load_vector(row + ROPE_DIM * 2, rotation[None, 1])
        in_order()
        return rotation

    @cute.jit
    def rotate_fused(self, values: cute.Tensor, rotation: cute.Tensor, lane: Int32):
        """`norm_rope.rotate` of the columns from 448 on with one rounding less: q is judged by its error, not by its bits."""
        pairs = cutlass.const_expr(self.columns // 2)
        if self.column(self.pieces - 1, lane) >= NOPE_DIM:
            last = self.piece(values, self.pieces - 1)
            for j in cutlass.range_constexpr(pairs):
                a, b, c, s = last[2 * j], last[2 * j + 1], rotation[j], rotation[pairs + j]
                last[2 * j] = cute.math.fma(a, c, -(b * s))
                last[2 * j + 1] = cute.math.fma(a, s, b * c)


def widen(values: cute.Tensor) -> cute.Tensor:
    """bf16 -> fp32, exact, in one instruction a value; the conversion takes two for every second one."""
    pairs = cute.recast_tensor(values, Int32)
    wide = convert.like(values, Float32)
    for i in range(cute.size(pairs)):
        wide[2 * i] = convert.float_of(pairs[i] << 16)
        wide[2 * i + 1] = convert.float_of(pairs[i] & -65536)
    return wide


def scale(values: cute.Tensor, factor: Float32) -> None:
    """Multiply a fragment by a factor."""
    for i in range(cute.size(values)):
        values[i] = values[i] * factor


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

    def numbers(length: Any) -> Any:
        return make_fake_tensor(Int64, (length,), stride=(1,), assumed_align=8)

    cache_type = CACHE_TYPES[fmt.name]
    out_type = Float8E4M3FN if spec.q_dtype == "e4m3" else BFloat16
    made = {
        "q": tensor(BFloat16, (rows, cute.sym_int(), HEAD_DIM), (stride(BFloat16), stride(BFloat16), 1)),
        "kv": tensor(BFloat16, (rows, HEAD_DIM), (stride(BFloat16), 1)),
        "kv_cache": tensor(cache_type, (cute.sym_int(), cute.sym_int(), fmt.row_elements), (stride(cache_type), fmt.row_elements, 1)),
        "slots": numbers(cute.sym_int()),
        "positions": numbers(rows),
        "cos_sin": tensor(Float32, (cute.sym_int(), ROPE_DIM), (ROPE_DIM, 1)),
        "out": tensor(out_type, (rows, cute.sym_int(), HEAD_DIM), (stride(out_type), HEAD_DIM, 1)),
        "eps": Float32(0.0),
        "inverse_q_scale": Float32(1.0),
        "inverse_kv_scale": Float32(1.0),
        "independent": Int32(0),
    }
    return [made[name] for name in spec.argument_names]
