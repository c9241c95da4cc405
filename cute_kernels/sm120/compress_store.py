"""`compress_store` for the SM120 family: packed rows (fp8_ds_mla); windows of ratio 128 are split over blocks, by global memory."""

from typing import Any

from cute_kernels.compile.spec import CompressStoreSpec
from cute_kernels.device import splitters
from cute_kernels.device.compress import CompressKernel
from cute_kernels.device.compress_arguments import Arguments, fake_arguments
from cute_kernels.device.compress_plan import Plan, plan_of
from cute_kernels.device.row_writers import PackedRow
from cute_kernels.device.scratch_split import RowScratch

FEW_WINDOWS = ((8192, 8, 16),)  # as `splitters.STEPS`, where few windows close (H200, 2026-11-30)
RESIDENT = 2  # blocks of ratio 128 for which an SM should have registers; its 100 KB of shared memory have room for one


def plan(spec: CompressStoreSpec) -> Plan:
    return plan_of(spec, RESIDENT)


def packed_writer(arguments: Arguments) -> PackedRow:
    return PackedRow(clamp="scale")


def splitter_of(spec: CompressStoreSpec) -> Any:
    if spec.ratio == 4:
        return splitters.OneBlock(plan(spec).columns)
    return RowScratch(plan(spec).columns, few=FEW_WINDOWS)


def trace(spec: CompressStoreSpec) -> tuple[CompressKernel, list[Any]]:
    """The host function of `spec` and fake arguments for `cute.compile`."""
    kernel = CompressKernel(plan=plan(spec), splitter=splitter_of(spec), writer=packed_writer, names=spec.argument_names, pdl=spec.pdl)
    return kernel, fake_arguments(spec, plan(spec).width)
