"""One row of 512 values into memory, by format. A thread owns a few consecutive columns; each writer is a value handed to the kernel.

`write(cache, slot, column, values, lane)` stores into a cache: `slot` lies in the pool, `values` are fp32, threads of 64 consecutive
columns are consecutive lanes of one warp, and all of them call. Writers of full rows also `store(row, column, values)` at any
address.
"""

from dataclasses import dataclass

import cutlass
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, Int64, Uint8, Uint32, cute

from cute_kernels.device import convert, memory
from cute_kernels.kv_format import NOPE_DIM, PACKED_DATA_BYTES, PACKED_FOOTER_BYTES, SCALE_GROUP

# Element type of a cache by the format of its rows.
CACHE_TYPES = {"bf16": BFloat16, "fp8": Float8E4M3FN, "fp8_ds_mla": Uint8}


def locate(cache: cute.Tensor, slot: Uint32):
    """Page and offset of a slot. A slot of any pool that fits a GPU's memory fits 32 bits."""
    page_rows = Uint32(cache.shape[1])
    page = slot // page_rows
    return page, slot - page * page_rows


def row_address(cache: cute.Tensor, slot: Uint32) -> Int64:
    """Byte address of a full row."""
    page, offset = locate(cache, slot)
    return memory.base_address(cache) + Int64(page) * memory.byte_stride(cache, 0) + Int64(offset) * memory.byte_stride(cache, 1)


@dataclass(frozen=True)
class Bf16Row:
    """512 bf16 values."""

    def store(self, row: Int64, column: Int32, values: cute.Tensor) -> None:
        """Round and store fp32 values of a row from `column` on; `row` is its byte address."""
        memory.store_vector(row + Int64(column) * 2, convert.to_bf16(values))

    def write(self, cache, slot, column, values, lane):
        """As `store`, at a slot of the cache; `lane` is of no use here."""
        self.store(row_address(cache, slot), column, values)


@dataclass(frozen=True)
class Fp8Row:
    """512 E4M3 values under one scale: times the inverse scale, rounded to E4M3; `via_bf16`: rounded to bf16 before (the compressor)."""

    inverse_scale: Float32
    via_bf16: bool

    def store(self, row: Int64, column: Int32, values: cute.Tensor) -> None:
        """Scale, round and store fp32 values of a row from `column` on; `row` is its byte address."""
        exact = convert.to_fp32(convert.to_bf16(values)) if self.via_bf16 else values
        memory.store_vector(row + Int64(column), convert.to_e4m3(exact, self.inverse_scale))

    def write(self, cache, slot, column, values, lane):
        """As `store`, at a slot of the cache; `lane` is of no use here."""
        self.store(row_address(cache, slot), column, values)


@dataclass(frozen=True)
class PackedRow:
    """fp8_ds_mla: 448 E4M3 values in groups of 64 and 64 bf16 values in the data part, 7 UE8M0 scales and a zero in the footer.

    Data of row i lie at page + 576 i, its footer at page + 576 page_rows + 8 i; the cache's row stride (584) is nominal.
    `clamp`: which minimum a group's scale has (`convert.scale_byte`).
    """

    clamp: str

    @cute.jit
    def write(self, cache, slot, column, values, lane):
        """Quantise and store fp32 values of a slot from `column` on; the first of the lanes that share a group of 64 writes its scale."""
        lanes = cutlass.const_expr(SCALE_GROUP // cute.size(values))
        rounded = convert.to_bf16(values)
        page, offset = locate(cache, slot)
        base = memory.base_address(cache) + Int64(page) * memory.byte_stride(cache, 0)
        data = base + Int64(offset) * PACKED_DATA_BYTES
        exact = convert.to_fp32(rounded)
        amax = convert.magnitude(exact[0])
        for i in cutlass.range_constexpr(1, cute.size(values)):
            amax = cute.arch.fmax(amax, convert.magnitude(exact[i]))
        amax = cute.arch.warp_reduction_max(amax, threads_in_group=lanes)
        byte = convert.scale_byte(cute.arch.fmax(amax, Float32(0.0)), self.clamp)
        if column < NOPE_DIM:
            memory.store_vector(data + Int64(column), convert.to_e4m3(exact, convert.inverse_scale(byte)))
        else:
            memory.store_vector(data + Int64(NOPE_DIM) + Int64(column - NOPE_DIM) * 2, rounded)
            byte = Int32(0)
        if lane % lanes == 0:
            footer = base + Int64(cache.shape[1]) * PACKED_DATA_BYTES + Int64(offset) * PACKED_FOOTER_BYTES
            memory.at(footer + Int64(column // SCALE_GROUP), Uint8, 1)[0] = Uint8(byte)
