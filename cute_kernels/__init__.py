"""CuTe DSL kernels for DeepSeek-V4 sparse MLA on Blackwell, and the dispatch that puts them in front of FlashInfer's decode.

Public names load on first use: importing this package imports neither `cutlass` nor `flashinfer` and touches no GPU.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cute_kernels.compile.freeze import freeze as freeze
    from cute_kernels.dispatch import Support as Support
    from cute_kernels.dispatch import Workspace as Workspace
    from cute_kernels.dispatch import allocate_workspace as allocate_workspace
    from cute_kernels.dispatch import pad_q_heads as pad_q_heads
    from cute_kernels.dispatch import pad_sinks as pad_sinks
    from cute_kernels.dispatch import supports as supports
    from cute_kernels.errors import CompileError as CompileError
    from cute_kernels.errors import CuteKernelsError as CuteKernelsError
    from cute_kernels.errors import InvalidArgument as InvalidArgument
    from cute_kernels.errors import MissingKernel as MissingKernel
    from cute_kernels.errors import PackError as PackError
    from cute_kernels.errors import UnsupportedRequest as UnsupportedRequest
    from cute_kernels.indices import CombinedIndices as CombinedIndices
    from cute_kernels.indices import IdSource as IdSource
    from cute_kernels.indices import SegmentIndices as SegmentIndices
    from cute_kernels.kv_format import PoolGeometry as PoolGeometry
    from cute_kernels.kv_pool import KVPool as KVPool
    from cute_kernels.kv_pool import PoolPlan as PoolPlan
    from cute_kernels.layer import LayerSpec as LayerSpec
    from cute_kernels.layer import SparseMLA as SparseMLA
    from cute_kernels.layer import StepTables as StepTables
    from cute_kernels.ops import bind as bind
    from cute_kernels.ops import compress_store as compress_store
    from cute_kernels.ops import convert_indices as convert_indices
    from cute_kernels.ops import decode as decode
    from cute_kernels.ops import gather_upconvert as gather_upconvert
    from cute_kernels.ops import qkv_insert as qkv_insert
    from cute_kernels.ops import sparse_indices as sparse_indices
    from cute_kernels.save_policy import SavePolicy as SavePolicy
    from cute_kernels.scales import AttentionScales as AttentionScales
    from cute_kernels.scratch import compress_scratch as compress_scratch
    from cute_kernels.step import CallPolicy as CallPolicy
    from cute_kernels.step import StepMetadata as StepMetadata
    from cute_kernels.step import slot_mapping as slot_mapping
    from cute_kernels.target import Target as Target

__version__ = "0.1.0"

_HOME = {
    "allocate_workspace": "dispatch",
    "AttentionScales": "scales",
    "bind": "ops",
    "CallPolicy": "step",
    "CombinedIndices": "indices",
    "CompileError": "errors",
    "compress_scratch": "scratch",
    "compress_store": "ops",
    "convert_indices": "ops",
    "CuteKernelsError": "errors",
    "decode": "ops",
    "freeze": "compile.freeze",
    "gather_upconvert": "ops",
    "IdSource": "indices",
    "InvalidArgument": "errors",
    "KVPool": "kv_pool",
    "LayerSpec": "layer",
    "MissingKernel": "errors",
    "PackError": "errors",
    "pad_q_heads": "dispatch",
    "pad_sinks": "dispatch",
    "PoolGeometry": "kv_format",
    "PoolPlan": "kv_pool",
    "qkv_insert": "ops",
    "SavePolicy": "save_policy",
    "SegmentIndices": "indices",
    "slot_mapping": "step",
    "sparse_indices": "ops",
    "SparseMLA": "layer",
    "StepMetadata": "step",
    "StepTables": "layer",
    "Support": "dispatch",
    "supports": "dispatch",
    "Target": "target",
    "UnsupportedRequest": "errors",
    "Workspace": "dispatch",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
