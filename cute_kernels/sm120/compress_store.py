"""`compress_store` for the SM120 family: packed rows (fp8_ds_mla); a window is one block's work."""

from typing import Any

from cute_kernels.compile.spec import CompressStoreSpec
from cute_kernels.device import compress_plan, splitters
from cute_kernels.device.compress import CompressKernel
from cute_kernels.device.compress_arguments import Arguments, fake_arguments
from cute_kernels.device.compress_plan import Plan
from cute_kernels.device.row_writers import PackedRow


def packed_writer(arguments: Arguments) -> PackedRow:
    return PackedRow(clamp="scale")


def plan_of(spec: CompressStoreSpec) -> Plan:
    return compress_plan.plan_of(spec)


def splitter_of(spec: CompressStoreSpec) -> Any:
    return splitters.OneBlock(plan_of(spec).pooling)


def trace(spec: CompressStoreSpec) -> tuple[CompressKernel, list[Any]]:
    """The host function of `spec` and fake arguments for `cute.compile`."""
    plan = plan_of(spec)
    kernel = CompressKernel(plan=plan, splitter=splitter_of(spec), writer=packed_writer, names=spec.argument_names, pdl=spec.pdl)
    return kernel, fake_arguments(spec, plan.width)
