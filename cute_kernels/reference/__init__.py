"""The operations in plain PyTorch, on any device: slow, obvious, and the judge of every kernel. CPU tensors take this path by default.

All arithmetic is fp32; values are rounded exactly where docs/spec.md says, nowhere else. Nothing here imports a compiler or a GPU
library, and nothing is imported before it is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cute_kernels.reference.attention import decode as decode
    from cute_kernels.reference.compressor import compress_store as compress_store
    from cute_kernels.reference.gather import convert_indices as convert_indices
    from cute_kernels.reference.gather import gather_upconvert as gather_upconvert
    from cute_kernels.reference.indices import sparse_indices as sparse_indices
    from cute_kernels.reference.insert import qkv_insert as qkv_insert
    from cute_kernels.reference.rope import cos_sin_table as cos_sin_table

_HOME = {
    "compress_store": "compressor",
    "sparse_indices": "indices",
    "qkv_insert": "insert",
    "gather_upconvert": "gather",
    "convert_indices": "gather",
    "decode": "attention",
    "cos_sin_table": "rope",
}
__all__ = ["compress_store", "convert_indices", "cos_sin_table", "decode", "gather_upconvert", "qkv_insert", "sparse_indices"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
