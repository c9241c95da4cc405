"""`qkv_insert` for the SM120 family: q in BF16, packed KV rows (fp8_ds_mla) whose group maxima are at least 1e-4."""

from typing import Any

from cute_kernels.compile.spec import QkvInsertSpec
from cute_kernels.device.qkv_insert import Arguments, InsertKernel, fake_arguments
from cute_kernels.device.row_writers import Bf16Row, PackedRow


def bf16_writer(arguments: Arguments) -> Bf16Row:
    return Bf16Row()


def packed_writer(arguments: Arguments) -> PackedRow:
    return PackedRow(clamp="amax")


def trace(spec: QkvInsertSpec) -> tuple[InsertKernel, list[Any]]:
    """The host function of `spec` and fake arguments for `cute.compile`."""
    kernel = InsertKernel(
        columns=spec.vector_bytes // 2, q_writer=bf16_writer, kv_writer=packed_writer, names=spec.argument_names, pdl=spec.pdl
    )
    return kernel, fake_arguments(spec)
