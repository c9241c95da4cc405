"""Tuning of the SM100 family's kernels: clusters with distributed shared memory, up to 227 KB of shared memory a block."""

from cute_kernels.compile.spec import CompressStoreSpec
from cute_kernels.device.compress import Plan


def compress_plan(spec: CompressStoreSpec) -> Plan:
    """Ratio 4: one block a window. Ratio 128: a cluster of 8 blocks, 64 columns each."""
    columns = spec.vector_bytes // 4
    if spec.ratio == 4:
        return Plan(
            ratio=4, columns=columns, blocks=1, threads=512 // columns, batch=8, save_rows=8 // columns,
            rows=4, unit=1, deal=256, resident=16 // columns,
        )  # fmt: skip
    return Plan(
        ratio=128, columns=columns, blocks=8, threads=128, batch=16 // columns, save_rows=4,
        rows=128, unit=4, deal=16, resident=3,
    )  # fmt: skip
