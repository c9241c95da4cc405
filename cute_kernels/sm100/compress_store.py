"""`compress_store` for the SM100 family: full rows, BF16 or FP8; windows of ratio 128 are split over clusters."""

from typing import Any

from cute_kernels.compile.spec import CompressStoreSpec
from cute_kernels.device import splitters
from cute_kernels.device.compress import CompressKernel
from cute_kernels.device.compress_arguments import Arguments, fake_arguments
from cute_kernels.device.compress_plan import Plan, plan_of
from cute_kernels.device.row_writers import Bf16Row, Fp8Row

# As `splitters.STEPS`, where few windows close. Decode steps of 1024 and 2048 rows have many rows to save, and some teams two windows or
# three; longer steps are mostly padding (H200, 2026-11-30).
FEW_WINDOWS = ((512, 8, 16), (2048, 8, 32), (8192, 8, 16))
RESIDENT = 3  # blocks of ratio 128 that should fit on an SM, which has 228 KB of shared memory


def plan(spec: CompressStoreSpec) -> Plan:
    return plan_of(spec, RESIDENT)


def bf16_writer(arguments: Arguments) -> Bf16Row:
    return Bf16Row()


def fp8_writer(arguments: Arguments) -> Fp8Row:
    return Fp8Row(arguments.inverse_kv_scale, via_bf16=True)


def splitter_of(spec: CompressStoreSpec) -> Any:
    if spec.ratio == 4:
        return splitters.OneBlock(plan(spec).columns)
    return splitters.RowCluster(plan(spec).columns, few=FEW_WINDOWS)


def trace(spec: CompressStoreSpec) -> tuple[CompressKernel, list[Any]]:
    """The host function of `spec` and fake arguments for `cute.compile`."""
    kernel = CompressKernel(
        plan=plan(spec),
        splitter=splitter_of(spec),
        writer=fp8_writer if spec.kv_format == "fp8" else bf16_writer,
        names=spec.argument_names,
        pdl=spec.pdl,
    )
    return kernel, fake_arguments(spec, plan(spec).width)
