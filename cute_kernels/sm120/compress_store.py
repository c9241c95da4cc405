"""`compress_store` for the SM120 family: packed rows (fp8_ds_mla); windows of ratio 128 are split over blocks, by global memory."""

from typing import Any

from cute_kernels.compile.spec import CompressStoreSpec
from cute_kernels.device import splitters
from cute_kernels.device.compress import CompressKernel
from cute_kernels.device.compress_arguments import Arguments, fake_arguments
from cute_kernels.device.compress_plan import plan_of
from cute_kernels.device.row_writers import PackedRow
from cute_kernels.device.scratch_split import RowScratch


def packed_writer(arguments: Arguments) -> PackedRow:
    return PackedRow(clamp="scale")


def splitter_of(spec: CompressStoreSpec) -> Any:
    if spec.ratio == 4:
        return splitters.OneBlock(plan_of(spec).columns)
    return RowScratch(plan_of(spec).columns)


def trace(spec: CompressStoreSpec) -> tuple[CompressKernel, list[Any]]:
    """The host function of `spec` and fake arguments for `cute.compile`."""
    plan = plan_of(spec)
    kernel = CompressKernel(plan=plan, splitter=splitter_of(spec), writer=packed_writer, names=spec.argument_names, pdl=spec.pdl)
    return kernel, fake_arguments(spec, plan.width)
