"""Tuning of the SM120 family's kernels: no clusters, at most 99 KB of shared memory a block."""

from cute_kernels.compile.spec import CompressStoreSpec
from cute_kernels.device.compress import Plan, ratio_4_plan


def compress_plan(spec: CompressStoreSpec) -> Plan:
    """One block a window. Ratio 128: groups of threads pool alternate rows of a stage."""
    vector = spec.vector_bytes // 4
    if spec.ratio == 4:
        return ratio_4_plan(vector, spec.save == "every_row")
    return Plan(
        ratio=128, vector=vector, blocks=1, groups=2, batch=4, slots=2, savers=8 if spec.save == "every_row" else 4, save_rows=2,
        unit=4, deal=128, least=4, resident=1,
    )  # fmt: skip
