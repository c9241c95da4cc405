"""Tuning of the SM100 family's kernels: clusters with distributed shared memory, up to 227 KB of shared memory a block."""

from cute_kernels.compile.spec import CompressStoreSpec
from cute_kernels.device.compress import Plan, ratio_4_plan


def compress_plan(spec: CompressStoreSpec) -> Plan:
    """Ratio 4: one block a window. Ratio 128: a cluster of 4 blocks, 32 rows each."""
    vector = spec.vector_bytes // 4
    if spec.ratio == 4:
        return ratio_4_plan(vector, spec.save == "every_row")
    return Plan(
        ratio=128, vector=vector, blocks=4, groups=1, batch=4, slots=3, savers=2, save_rows=2,
        unit=4, deal=64, least=4, resident=3,
    )  # fmt: skip
