"""The support matrix as specs: every kernel that an operation can ask for, which is what a pack holds.

What one layer can ask for is `LayerSpec.specs`.
"""

from __future__ import annotations

from cute_kernels.compile.spec import (
    KV_FORMATS,
    CompressStoreSpec,
    ConvertIndicesSpec,
    GatherUpconvertSpec,
    KernelSpec,
    QkvInsertSpec,
    SparseIndicesSpec,
)
from cute_kernels.target import Target

_RATIOS = (4, 128)
_SAVES = ((True, "every_row"), (True, "policy"), (False, "none"))
# (KV format, dtype of q): FP8 q goes with full FP8 rows.
_INSERTS = {"sm100": (("bf16", "bf16"), ("fp8", "bf16"), ("fp8", "e4m3")), "sm120": (("fp8_ds_mla", "bf16"),)}
_SOURCES = ("none", "local", "global", "all_groups")
_GATHERED = ("fp8_inline", "fp8_ds_mla", "fp8")


def vector_widths(target: Target) -> tuple[int, ...]:
    """The access widths that a target's kernels are built for: arguments get the widest that their alignment allows."""
    return tuple(sorted({16, target.vector_bytes}))


def support_matrix(target: Target, *, pdl: bool = True) -> list[KernelSpec]:
    """Every spec that an operation can ask for on `target`: the contents of its AOT pack."""
    widths = vector_widths(target)
    return [
        *(
            CompressStoreSpec(target, width, pdl, ratio, kv_format, scores, save)
            for ratio in _RATIOS
            for kv_format in KV_FORMATS[target.family]
            for scores, save in _SAVES
            for width in widths
        ),
        *(SparseIndicesSpec(target, width, pdl, source, slots) for source in _SOURCES for slots in (True, False) for width in widths),
        *(
            GatherUpconvertSpec(target, width, pdl, kv_format, seq_starts)
            for kv_format in _GATHERED
            for seq_starts in (True, False)
            for width in widths
        ),
        *(
            ConvertIndicesSpec(target, width, pdl, prefill, compact)
            for prefill in (False, True)
            for compact in (True, False)
            for width in widths
        ),
        *(
            QkvInsertSpec(target, width, pdl, kv_format, q_dtype, apply_q_norm)
            for kv_format, q_dtype in _INSERTS[target.family]
            for apply_q_norm in (True, False)
            for width in widths
        ),
    ]
