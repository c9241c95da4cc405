"""`qkv_insert` for the SM100 family: q in BF16 or FP8, full KV rows in BF16 or FP8, both FP8 forms rounded once from fp32."""

from typing import Any

from cutlass import Float32

from cute_kernels.compile.spec import QkvInsertSpec
from cute_kernels.device.qkv_insert import Arguments, InsertKernel, fake_arguments
from cute_kernels.device.row_writers import Bf16Row, Fp8Row


def bf16_writer(arguments: Arguments) -> Bf16Row:
    return Bf16Row()


def fp8_q_writer(arguments: Arguments) -> Fp8Row:
    """Values come scaled."""
    return Fp8Row(Float32(1.0), via_bf16=False)


def fp8_kv_writer(arguments: Arguments) -> Fp8Row:
    return Fp8Row(arguments.inverse_kv_scale, via_bf16=False)


def trace(spec: QkvInsertSpec) -> tuple[InsertKernel, list[Any]]:
    """The host function of `spec` and fake arguments for `cute.compile`."""
    kernel = InsertKernel(
        columns=spec.vector_bytes // 2,
        q_writer=fp8_q_writer if spec.q_dtype == "e4m3" else bf16_writer,
        kv_writer=fp8_kv_writer if spec.kv_format == "fp8" else bf16_writer,
        names=spec.argument_names,
        pdl=spec.pdl,
    )
    return kernel, fake_arguments(spec)
