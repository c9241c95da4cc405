"""Tuning of the SM120 family's kernels: no clusters, at most 99 KB of shared memory a block."""

from cute_kernels.compile.spec import CompressStoreSpec
from cute_kernels.device.compress import Plan


def compress_plan(spec: CompressStoreSpec) -> Plan:
    """One block a window. Ratio 128: 512 threads, whose row groups each pool a share of the rows by an online softmax."""
    columns = spec.vector_bytes // 4
    if spec.ratio == 4:
        return Plan(
            ratio=4, columns=columns, blocks=1, threads=512 // columns, batch=8, save_rows=8 // columns,
            rows=4, unit=1, deal=256, resident=16 // columns,
        )  # fmt: skip
    return Plan(
        ratio=128, columns=columns, blocks=1, threads=512, batch=8 // columns, save_rows=4,
        rows=128, unit=4, deal=32, resident=0,
    )  # fmt: skip
