"""`compress_store` for the SM120 family: packed rows (fp8_ds_mla)."""

from typing import Any

from cute_kernels.compile.spec import CompressStoreSpec
from cute_kernels.device.compress import Arguments, CompressKernel, plan_of
from cute_kernels.device.compress_arguments import fake_arguments
from cute_kernels.device.row_writers import PackedRow


def packed_writer(arguments: Arguments) -> PackedRow:
    return PackedRow(clamp="scale")


def trace(spec: CompressStoreSpec) -> tuple[CompressKernel, list[Any]]:
    """The host function of `spec` and fake arguments for `cute.compile`."""
    plan = plan_of(spec)
    kernel = CompressKernel(plan=plan, writer=packed_writer, names=spec.argument_names, pdl=spec.pdl)
    return kernel, fake_arguments(spec, plan.width)
