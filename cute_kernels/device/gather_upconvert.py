"""The gather of dense prefill, for both families: rows of a paged FP8 cache become BF16 rows of a workspace, request after request.

A warp, which is a block of its own, serves four consecutive rows of the workspace. Eight lanes find each row's place in the cache: its
request by a search in ninths, its page in the block table; and load what the row has few of, its scales and its BF16 values. Then the
whole warp loads the codes of all four rows before it uses the first, converts, and stores. What differs between formats is a value, a
`RowReader`.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, Int64, Uint8, cute
from cutlass.cute.runtime import make_fake_tensor

from cute_kernels.compile.spec import GatherUpconvertSpec
from cute_kernels.device import WARP, convert, memory, pdl
from cute_kernels.device.fakes import fake_table, fake_vector
from cute_kernels.device.row_writers import CACHE_TYPES
from cute_kernels.device.slots import INT32_MAX, Divisor
from cute_kernels.kv_format import (
    GATHERED,
    HEAD_DIM,
    INLINE_GROUP,
    INLINE_ROPE,
    INLINE_SCALES,
    NOPE_DIM,
    PACKED_DATA_BYTES,
    PACKED_FOOTER_BYTES,
    ROPE_DIM,
    SCALE_GROUP,
)

WARPS = 1  # of a block: places on an SM are taken again one by one
ROWS = 4  # of a warp
LANES = WARP // ROWS  # that look after one row
ROPE = ROPE_DIM // LANES  # BF16 values of a row's lane, one 16-byte access
# Blocks that should fit on an SM at once, as many as SM90 and SM100 hold (SM120: 24), which bounds the registers.
RESIDENT = 32


@dataclass(frozen=True)
class InlineRow:
    """656 bytes: 512 codes, 4 fp32 scales, 64 BF16 values."""

    row_bytes = INLINE_ROPE + 2 * ROPE_DIM
    codes = HEAD_DIM
    group = INLINE_GROUP
    rope = INLINE_ROPE

    @cute.jit
    def load_scale(self, mA: Any, page: Int64, offset: Int32, part: Int32) -> Float32:
        """The scale of group `part` of a row; lanes past the last group repeat."""
        scales = page + Int64(offset) * self.row_bytes + INLINE_SCALES
        return memory.at(scales + Int64(part % (HEAD_DIM // INLINE_GROUP)) * 4, Float32, 1)[0]


@dataclass(frozen=True)
class PackedRow:
    """576 bytes in the data part, 448 codes and 64 BF16 values; 8 bytes in the footer, 7 of them exponents."""

    row_bytes = PACKED_DATA_BYTES
    codes = NOPE_DIM
    group = SCALE_GROUP
    rope = NOPE_DIM

    @cute.jit
    def load_scale(self, mA: Any, page: Int64, offset: Int32, part: Int32) -> Float32:
        """As for `InlineRow`: 2^(e - 127) of byte e."""
        footer = page + Int64(mA.cache.shape[1]) * PACKED_DATA_BYTES + Int64(offset) * PACKED_FOOTER_BYTES
        return convert.float_of((Int32(memory.at(footer + Int64(part), Uint8, 1)[0]) & 0xFF) << 23)  # the conversion extends the sign


@dataclass(frozen=True)
class FullRow:
    """512 codes under the tensor's scale."""

    row_bytes = HEAD_DIM
    codes = HEAD_DIM
    group = HEAD_DIM
    rope = None

    def load_scale(self, mA: Any, page: Int64, offset: Int32, part: Int32) -> Float32:
        return mA.kv_scale


READERS = {"fp8_inline": InlineRow(), "fp8_ds_mla": PackedRow(), "fp8": FullRow()}


class Arguments(NamedTuple):
    """Run-time arguments; None where the kernel has no such argument (`GatherUpconvertSpec.argument_names`)."""

    cache: Any
    out: Any
    block_table: Any
    workspace_starts: Any
    seq_starts: Any = None
    kv_scale: Any = None


@dataclass(frozen=True)
class GatherKernel:
    """reader   the row format
    columns  BF16 values of one store: 8 or 16
    names    of the compiled function's arguments, in order
    """

    reader: Any
    columns: int
    names: tuple
    pdl: bool

    @property
    def pieces(self) -> int:
        """Stores of a lane to a row's converted columns."""
        return HEAD_DIM // WARP // self.columns

    @cute.jit
    def __call__(self, *args):
        arguments = Arguments(**dict(zip(self.names, args[:-1], strict=True)))
        page_rows = Int32(arguments.cache.shape[1])
        positions = Int64(arguments.block_table.shape[1]) * Int64(page_rows)
        self.kernel(arguments, Divisor.of(cutlass.max(page_rows, 1)), Int32(cutlass.min(positions, Int64(INT32_MAX)))).launch(
            grid=[(memory.extent(arguments.out) + WARPS * ROWS - 1) // (WARPS * ROWS), 1, 1],
            block=[WARPS * WARP, 1, 1],
            min_blocks_per_mp=RESIDENT,
            preferred_smem_carveout=-1,  # the driver's default; without a value the DSL would ask a device
            stream=args[-1],
            use_pdl=self.pdl,
        )

    @cute.kernel
    def kernel(self, mA: Arguments, by_page_rows: Divisor, positions: Int32):
        """positions: a request's that the block table can hold, at most 2^31 - 1."""
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        lane = tid % WARP
        first = (Int32(block) * WARPS + cute.arch.make_warp_uniform(tid // WARP)) * ROWS
        pdl.begin(self.pdl)
        rows = memory.extent(mA.out)
        if first < rows:
            row = first + lane // LANES
            request, start, position = self.request_of(mA, row, lane)
            request = Int32(cutlass.select_(row < rows, request, Int32(-1)))
            page, offset = self.locate(mA, row, request, start, position, by_page_rows, positions)
            self.copy(mA, first, row, request >= 0, page, offset, lane)

    @cute.jit
    def request_of(self, mA: Arguments, row: Int32, lane: Int32):
        """(the last request that starts at `row` or before, its start, the position it begins at); request -1 if there is none.

        The lanes of a row search together: each step narrows the requests in question, low .. high - 1, to a ninth.
        """
        part = lane % LANES
        low, high, start, position = Int32(0), memory.extent(mA.block_table), Int32(0), Int32(0)
        open_rows = cute.arch.vote_any_sync(high > low)
        while open_rows:
            step = (high - low + LANES) // (LANES + 1)
            probe = low + (part + 1) * step - 1
            begins, begins_at = Int32(0), Int32(0)
            before = probe < high
            if before:
                begins = Int32(mA.workspace_starts[probe])
                if cutlass.const_expr(mA.seq_starts is not None):
                    begins_at = Int32(mA.seq_starts[probe])  # on its way at once, though of most requests nobody asks for it
                before = begins <= row
            passed = cute.arch.popc((cute.arch.vote_ballot_sync(before) >> (lane - part)) & ((1 << LANES) - 1))
            last = lane - part + cutlass.max(passed - 1, Int32(0))
            start = Int32(cutlass.select_(passed > 0, cute.arch.shuffle_sync(begins, last), start))
            if cutlass.const_expr(mA.seq_starts is not None):
                position = Int32(cutlass.select_(passed > 0, cute.arch.shuffle_sync(begins_at, last), position))
            low = low + passed * step
            if passed < LANES:
                high = cutlass.max(cutlass.min(high, low + step - 1), low)
            open_rows = cute.arch.vote_any_sync(high > low)
        return low - 1, start, position

    @cute.jit
    def locate(self, mA: Arguments, row: Int32, request: Int32, start: Int32, first: Int32, by_page_rows: Divisor, positions: Int32):
        """(byte address of the row's page, its offset in the page); (0, 0) for a row that is zero or nobody's."""
        page, offset = Int64(0), Int32(0)
        if request >= 0:
            position = Int64(row) - Int64(start) + Int64(first)
            if memory.in_range(position, Int64(positions)):
                column = by_page_rows.quotient(Int32(position))
                entry = Int32(mA.block_table[request, column])
                if memory.in_range(entry, memory.extent(mA.cache)):
                    offset = Int32(position) - column * Int32(mA.cache.shape[1])
                    page = memory.base_address(mA.cache) + Int64(entry) * memory.byte_stride(mA.cache, 0)
        return page, offset

    @cute.jit
    def copy(self, mA: Arguments, first: Int32, row: Int32, owned: cutlass.Boolean, page: Int64, offset: Int32, lane: Int32):
        """The warp's rows; `row`, `page` and `offset` are those of the row that this lane looks after."""
        reader = self.reader
        found = page != 0
        data = page + Int64(offset) * reader.row_bytes
        codes = cute.make_rmem_tensor(cute.make_layout((self.columns, self.pieces, ROWS)), Float8E4M3FN)
        codes_of_row = [codes[None, None, k] for k in range(ROWS)]
        any_found = cute.arch.vote_ballot_sync(found)
        all_owned = cute.arch.vote_ballot_sync(owned)
        for k in cutlass.range_constexpr(ROWS):
            source = cute.arch.shuffle_sync(data, k * LANES)
            self.load_codes(source, (any_found & (1 << (k * LANES))) != 0, codes_of_row[k], lane)
        scale = Float32(0.0)
        rope = cute.make_rmem_tensor(cute.make_layout(ROPE), BFloat16)
        if cutlass.const_expr(reader.rope is not None):
            rope.fill(0.0)
        if found:
            scale = reader.load_scale(mA, page, offset, lane % LANES)
            if cutlass.const_expr(reader.rope is not None):
                memory.load_vector(data + reader.rope + Int64(lane % LANES) * 16, rope)
        for k in cutlass.range_constexpr(ROWS):
            target = memory.base_address(mA.out) + Int64(first + k) * memory.byte_stride(mA.out, 0)
            for p in cutlass.range_constexpr(self.pieces):
                column = self.column(p, lane)
                own = cute.arch.shuffle_sync(scale, k * LANES + column // reader.group)
                if ((all_owned & (1 << (k * LANES))) != 0) & (column < reader.codes):
                    values = convert.to_fp32(codes_of_row[k][None, p])
                    for i in cutlass.range_constexpr(self.columns):
                        values[i] = values[i] * own
                    memory.store_vector(target + Int64(column) * 2, convert.to_bf16(values), streaming=True)
        if cutlass.const_expr(reader.rope is not None):
            if owned:
                target = memory.base_address(mA.out) + Int64(row) * memory.byte_stride(mA.out, 0)
                memory.store_vector(target + (reader.codes * 2) + Int64(lane % LANES) * 16, rope, streaming=True)

    @cute.jit
    def load_codes(self, source: Int64, found: cutlass.Boolean, codes: cute.Tensor, lane: Int32):
        """Issue the loads of this lane's codes of the row at an address; zeros where none was found."""
        words = cute.recast_tensor(codes, Int32)
        words.fill(0)
        if found:
            for p in cutlass.range_constexpr(self.pieces):
                column = self.column(p, lane)
                if column < self.reader.codes:
                    memory.load_vector(source + Int64(column), codes[None, p], memory.STREAM)

    def column(self, p: int, lane: Int32) -> Int32:
        """First column of a lane's piece `p`: lanes lie side by side."""
        return p * (WARP * self.columns) + lane * self.columns


def trace(spec: GatherUpconvertSpec) -> tuple[GatherKernel, list[Any]]:
    """The host function of `spec` and fake arguments for `cute.compile`: what the compiled function checks on every call.

    Requests of block_table and seq_starts are as many; workspace_starts may have one entry more. Page strides of the cache and row
    strides of `out` and of block_table are run-time values.
    """
    reader, fmt = READERS[spec.kv_format], GATHERED[spec.kv_format]
    requests, cache_type = cute.sym_int(), CACHE_TYPES.get(spec.kv_format, Uint8)
    columns = reader.codes + (ROPE_DIM if reader.rope is not None else 0)

    page_stride = cute.sym_int64(divisibility=16)
    made = {
        "cache": make_fake_tensor(
            cache_type, (cute.sym_int(), cute.sym_int(), fmt.row_elements), stride=(page_stride, fmt.row_elements, 1), assumed_align=16
        ),
        "out": make_fake_tensor(
            BFloat16,
            (cute.sym_int(), columns),
            stride=(cute.sym_int64(divisibility=spec.vector_bytes // 2), 1),
            assumed_align=spec.vector_bytes,
        ),
        "block_table": fake_table(requests, cute.sym_int()),
        "workspace_starts": fake_vector(cute.sym_int()),
        "seq_starts": fake_vector(requests),
        "kv_scale": Float32(1.0),
    }
    kernel = GatherKernel(reader=reader, columns=spec.vector_bytes // 2, names=spec.argument_names, pdl=spec.pdl)
    return kernel, [made[name] for name in spec.argument_names]
