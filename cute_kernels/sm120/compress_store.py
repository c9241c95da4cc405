"""`compress_store` for the SM120 family: packed rows (fp8_ds_mla); one block pools a whole window."""

from typing import Any

from cute_kernels.compile.spec import CompressStoreSpec
from cute_kernels.device.compress import Arguments, CompressKernel
from cute_kernels.device.compress_arguments import fake_arguments
from cute_kernels.device.row_writers import PackedRow
from cute_kernels.device.splitters import OneBlock
from cute_kernels.sm120.config import compress_plan


def packed_writer(arguments: Arguments) -> PackedRow:
    return PackedRow(clamp="scale")


def trace(spec: CompressStoreSpec) -> tuple[CompressKernel, list[Any]]:
    """The host function of `spec` and fake arguments for `cute.compile`."""
    plan = compress_plan(spec)
    kernel = CompressKernel(plan=plan, splitter=OneBlock(plan.pooling), writer=packed_writer, names=spec.argument_names, pdl=spec.pdl)
    return kernel, fake_arguments(spec, plan.width)
