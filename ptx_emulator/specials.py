"""Special registers: their widths and their values for the lanes of a chunk."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ptx_emulator.machine import Machine

_VECTORS = ("tid", "ntid", "ctaid", "nctaid", "clusterid", "nclusterid", "cluster_ctaid", "cluster_nctaid")
_SCALARS = {
    **dict.fromkeys(("laneid", "warpid", "nwarpid", "smid", "nsmid", "cluster_ctarank", "cluster_nctarank"), 32),
    **dict.fromkeys(("lanemask_eq", "lanemask_le", "lanemask_lt", "lanemask_ge", "lanemask_gt"), 32),
    **dict.fromkeys(("dynamic_smem_size", "total_smem_size", "clock"), 32),
    **{"clock64": 64, "globaltimer": 64, "gridid": 64, "is_explicit_cluster": 1},
}


def special_bits(name: str) -> int | None:
    """Width of a special register, or None if it is not known here."""
    stem, _, axis = name.lstrip("%").partition(".")
    if stem in _VECTORS and axis in ("x", "y", "z"):
        return 32
    return _SCALARS.get(stem) if not axis else None


def special_value(name: str, m: Machine) -> np.ndarray:
    """Value of a special register: one per lane, or an array of one where all lanes agree."""
    stem, _, axis = name.lstrip("%").partition(".")
    launch = m.launch
    k = "xyz".find(axis) if axis else 0
    u32 = np.uint32
    thread = m.lane_thread
    if stem == "tid":
        x, y, _ = launch.block
        return (thread % x, thread // x % y, thread // (x * y))[k].astype(u32)
    if stem in ("ntid", "nctaid"):
        return np.array([(launch.block if stem == "ntid" else launch.grid)[k]], u32)
    if stem == "ctaid":
        return _agree(m.block_coordinates[m.lane_block, k].astype(u32))
    if stem == "clusterid":
        return _agree((m.block_coordinates[m.lane_block, k] // launch.cluster[k]).astype(u32))
    if stem == "nclusterid":
        return np.array([launch.grid[k] // launch.cluster[k]], u32)
    if stem == "cluster_ctaid":
        return _agree((m.block_coordinates[m.lane_block, k] % launch.cluster[k]).astype(u32))
    if stem == "cluster_nctaid":
        return np.array([launch.cluster[k]], u32)
    if stem == "cluster_ctarank":
        return _agree((m.lane_block % launch.cluster_size).astype(u32))
    if stem == "cluster_nctarank":
        return np.array([launch.cluster_size], u32)
    if stem == "is_explicit_cluster":
        return np.array([launch.cluster_size > 1])
    lane = thread % 32
    if stem == "laneid":
        return lane.astype(u32)
    if stem == "warpid":
        return (thread // 32).astype(u32)
    if stem == "nwarpid":
        return np.array([-(-launch.threads // 32)], u32)
    if stem == "smid":
        return (m.lane_block % 132).astype(u32)
    if stem == "nsmid":
        return np.array([132], u32)
    if stem.startswith("lanemask_"):
        one = np.uint64(1)
        bit = one << lane.astype(np.uint64)
        full = np.uint64(0xFFFFFFFF)
        masks = {"eq": bit, "lt": bit - one, "le": bit | (bit - one), "ge": full & ~(bit - one), "gt": full & ~(bit | (bit - one))}
        return masks[stem[9:]].astype(u32)
    if stem == "dynamic_smem_size":
        return np.array([launch.dynamic_shared], u32)
    if stem == "total_smem_size":
        return np.array([m.shared.size], u32)
    if stem in ("clock", "clock64", "globaltimer", "gridid"):
        return np.array([0], u32 if stem == "clock" else np.uint64)
    raise KeyError(name)


def _agree(values: np.ndarray) -> np.ndarray:
    return values[:1] if values.size and (values == values[0]).all() else values
