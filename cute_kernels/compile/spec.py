"""One frozen dataclass per kernel: its specialisation fields, argument list, cache key, manifest row, log line and test id.

A field is here iff it changes the compiled code. Sizes, strides, scales and SM counts are run-time arguments.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import json
from dataclasses import dataclass
from typing import Any, ClassVar

from cute_kernels.errors import InvalidArgument
from cute_kernels.target import Target

# Row formats that a family's kernels write, by name.
KV_FORMATS = {"sm100": ("bf16", "fp8"), "sm120": ("fp8_ds_mla",)}


@dataclass(frozen=True)
class KernelSpec(abc.ABC):
    """Base of all specs.

    target        family and architecture
    vector_bytes  global access width the tensors' alignment allows: 16 or 32
    pdl           launched with programmatic dependent launch
    """

    target: Target
    vector_bytes: int = 16
    pdl: bool = True

    operation: ClassVar[str]

    def __post_init__(self) -> None:
        self._require("vector_bytes", 16, 32)

    def _require(self, field: str, *allowed: object) -> None:
        value = getattr(self, field)
        if value not in allowed:
            raise InvalidArgument(f"{type(self).__name__}.{field}", repr(value), " or ".join(map(repr, allowed)))

    @property
    def module(self) -> str:
        """The module whose `trace(spec)` returns (host function, fake arguments) for `cute.compile`."""
        return f"cute_kernels.{self.target.family}.{self.operation}"

    @property
    @abc.abstractmethod
    def argument_names(self) -> tuple[str, ...]:
        """Arguments of the compiled function in order; the stream comes from TVM-FFI's environment."""

    def fields(self) -> dict[str, Any]:
        """The specialisation as plain JSON data: what the key hashes and the manifest shows."""
        row = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "target"}
        return {"operation": self.operation, "family": self.target.family, "gpu_arch": self.target.gpu_arch, **row}

    @property
    def takes_scratch(self) -> bool:
        """Whether blocks share out work in memory of the caller's (`cute_kernels.scratch`)."""
        return False

    @functools.cached_property
    def identity(self) -> str:
        """`canonical()`, made once. What is remembered for a spec is found by it: a string keeps its hash."""
        return self.canonical()

    def canonical(self) -> str:
        """`fields()` as canonical JSON, the same in every process."""
        return json.dumps(self.fields(), sort_keys=True, separators=(",", ":"))

    def __str__(self) -> str:
        own = [f"{k}={v}" for k, v in self.fields().items() if k not in ("operation", "family", "gpu_arch")]
        return f"{self.operation}[{self.target} {' '.join(own)}]"


@dataclass(frozen=True)
class CompressStoreSpec(KernelSpec):
    """ratio      4 (overlapping 8-row window) or 128
    kv_format  row written: "bf16", "fp8" (SM100), "fp8_ds_mla" (SM120)
    scores     this step's rows come in `kv_score`; False: every row lies in the state pool already
    save       "none" (only with scores=False), "every_row", or "policy" (rollback and prefix_stride at run time)
    """

    ratio: int = 4
    kv_format: str = "bf16"
    scores: bool = True
    save: str = "every_row"

    operation: ClassVar[str] = "compress_store"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("ratio", 4, 128)
        self._require("kv_format", *KV_FORMATS[self.target.family])
        self._require("save", *(("every_row", "policy") if self.scores else ("none",)))

    @property
    def argument_names(self) -> tuple[str, ...]:
        return (
            *(("kv_score", "ape") if self.scores else ()),
            *("state", "state_block_table", "positions", "token_to_req", "state_slots", "kv_slots"),
            *(("seq_lens",) if self.save == "policy" else ()),
            *("norm_weight", "cos_sin", "kv_cache", "eps"),
            *(("inverse_kv_scale",) if self.kv_format == "fp8" else ()),
            *(("rollback", "prefix_stride") if self.save == "policy" else ()),
            *(("scratch",) if self.takes_scratch else ()),
            "independent",
        )

    @property
    def takes_scratch(self) -> bool:
        return self.ratio == 4 or self.target.family == "sm120"


@dataclass(frozen=True)
class SparseIndicesSpec(KernelSpec):
    """source  where the compressed ids come from: an `IdSource` value
    slots   a slot mapping marks padding rows (negative); False: every row below T is real

    The family decides the form: SM100 writes one combined table of storage rows, SM120 two segments of slots.
    """

    source: str = "local"
    slots: bool = True

    operation: ClassVar[str] = "sparse_indices"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("source", "none", "local", "global", "all_groups")

    @property
    def argument_names(self) -> tuple[str, ...]:
        has_ids, has_part = self.source in ("local", "global"), self.source != "none"
        combined = self.target.family == "sm100"
        window_outputs = ("table", "lengths") if combined else ("window_table", "window_lengths")
        return (
            *("positions", "token_to_req", "window_block_table"),
            *(("slots",) if self.slots else ()),
            *(("ids",) if has_ids else ()),
            *(("compressed_block_table",) if self.source in ("local", "all_groups") else ()),
            *window_outputs,
            *(("compressed_table", "compressed_lengths") if has_part and not combined else ()),
            *("window_pages", "window_page_rows"),
            *(("window_span",) if combined else ()),
            *(("compressed_pages", "compressed_page_rows") if has_part else ()),
            *(("compressed_span",) if has_part and combined else ()),
            *(("ratio",) if self.source in ("local", "all_groups") else ()),
            "independent",
        )


@dataclass(frozen=True)
class QkvInsertSpec(KernelSpec):
    """kv_format     row written: "bf16", "fp8" (SM100), "fp8_ds_mla" (SM120)
    q_dtype       of the q written: "bf16", or "e4m3" (with "fp8" rows)
    apply_q_norm  False: q is normalised already
    """

    kv_format: str = "bf16"
    q_dtype: str = "bf16"
    apply_q_norm: bool = True

    operation: ClassVar[str] = "qkv_insert"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("kv_format", *KV_FORMATS[self.target.family])
        self._require("q_dtype", *(("bf16", "e4m3") if self.kv_format == "fp8" else ("bf16",)))

    @property
    def argument_names(self) -> tuple[str, ...]:
        return (
            *("q", "kv", "kv_cache", "slots", "positions", "cos_sin", "out"),
            *(("eps",) if self.apply_q_norm else ()),
            *(("inverse_q_scale",) if self.q_dtype == "e4m3" else ()),
            *(("inverse_kv_scale",) if self.kv_format == "fp8" else ()),
            "independent",
        )


@dataclass(frozen=True)
class GatherUpconvertSpec(KernelSpec):
    """kv_format   rows read: "fp8_inline" (V3.2, 656 bytes), "fp8_ds_mla" (V4, packed) or "fp8" (one scale per tensor)
    seq_starts  requests begin at a position of their own; False: at 0

    `vector_bytes` is the access width to the workspace; 16-byte alignment of the cache is enough for either.
    """

    kv_format: str = "fp8_inline"
    seq_starts: bool = True

    operation: ClassVar[str] = "gather_upconvert"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("kv_format", "fp8_inline", "fp8_ds_mla", "fp8")

    @property
    def argument_names(self) -> tuple[str, ...]:
        return (
            *("cache", "out", "block_table", "workspace_starts"),
            *(("seq_starts",) if self.seq_starts else ()),
            *(("kv_scale",) if self.kv_format == "fp8" else ()),
        )


@dataclass(frozen=True)
class ConvertIndicesSpec(KernelSpec):
    """prefill   some rows point into a dense workspace
    compact   valid entries first, with counts; False: each stays in its lane
    """

    prefill: bool = False
    compact: bool = True

    operation: ClassVar[str] = "convert_indices"

    @property
    def argument_names(self) -> tuple[str, ...]:
        return (
            *("ids", "token_to_req", "block_table"),
            *(("workspace_starts", "prefill_request_id") if self.prefill else ()),
            "out",
            *(("counts",) if self.compact else ()),
            *("pages", "page_rows", "block_stride_rows"),
        )


SPEC_TYPES: dict[str, type[KernelSpec]] = {
    s.operation: s for s in (CompressStoreSpec, SparseIndicesSpec, QkvInsertSpec, GatherUpconvertSpec, ConvertIndicesSpec)
}


def spec_from_fields(fields: dict[str, Any]) -> KernelSpec:
    """The inverse of `KernelSpec.fields()`, for manifests."""
    rest = dict(fields)
    spec_type = SPEC_TYPES[rest.pop("operation")]
    return spec_type(target=Target(rest.pop("family"), rest.pop("gpu_arch")), **rest)
