"""Per-tensor FP8 scales of attention, from a checkpoint to the calls that take them.

A scale s means: a stored code c stands for the value c * s. `qkv_insert` divides q and window rows by their scales before they
are rounded, `compress_store` compressed rows; attention then multiplies logits by q_scale * kv_scale and values by kv_scale,
which `decode` folds into FlashInfer's `bmm1_scale` and `bmm2_scale`. In MLA one row is key and value at once, so there is one
scale for both. Packed rows carry scales of their own, and BF16 rows need none.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from cute_kernels.errors import InvalidArgument
from cute_kernels.kv_format import KVFormat

# Which of the two scales each call takes.
_TAKEN = {
    "LayerSpec": ("q_scale", "kv_scale"),
    "qkv_insert": ("q_scale", "kv_scale"),
    "decode": ("q_scale", "kv_scale"),
    "compress_store": ("kv_scale",),
}
_MODULE = r"(?:self_attn|attn|attention)(?:\.(?:attn|mla_attn|attn_mqa))*"
_PROJECTION = r"(?:\.(?:q|k|v|kv|qkv)_proj)?"
_SCALE = r"_?(?P<kind>q|k|v|kv)_scale"
_NAME = re.compile(rf"(?:(?:language_model|model|transformer)\.)*layers\.(?P<layer>\d+)\.{_MODULE}{_PROJECTION}\.{_SCALE}")
_LOOKS_LIKE_ONE = re.compile(rf"(?:.*\.)?layers\.\d+\..*\.{_SCALE}")
_NOT_OF_ATTENTION = {"indexer", "compressor", "mtp"}


@dataclass(frozen=True)
class AttentionScales:
    """The scales of one layer; `InvalidArgument` unless both are finite and positive.

    q_scale   of FP8 q
    kv_scale  of FP8 rows in the window and the compressed cache
    """

    q_scale: float = 1.0
    kv_scale: float = 1.0

    def __post_init__(self) -> None:
        for name in ("q_scale", "kv_scale"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
                raise InvalidArgument(name, repr(value), "a finite number > 0")

    def arguments(self, call: str) -> dict[str, float]:
        """The keyword arguments of "LayerSpec", "qkv_insert", "compress_store" or "decode"; `InvalidArgument` for another name."""
        if call not in _TAKEN:
            raise InvalidArgument("call", repr(call), ", ".join(map(repr, _TAKEN)))
        return {name: getattr(self, name) for name in _TAKEN[call]}

    def require(self, kv_format: KVFormat, layer: int | None = None) -> AttentionScales:
        """Itself, or `InvalidArgument` where rows of this format take no scale and one of them is not 1.0."""
        if not kv_format.scaled:
            for name in ("q_scale", "kv_scale"):
                if getattr(self, name) != 1.0:
                    where = name if layer is None else f"{name} of layer {layer}"
                    raise InvalidArgument(
                        where,
                        getattr(self, name),
                        f"1.0 with {kv_format.name} rows",
                        hint='packed and BF16 rows take no per-tensor scale; kv_cache_dtype="fp8" on the SM100 family does',
                    )
        return self


def from_state_dict(state: Mapping[str, torch.Tensor | float], num_layers: int, kv_format: KVFormat) -> list[AttentionScales]:
    """The scales of every layer from a checkpoint's names, checked against the format that its caches will have.

    state       names and values; a value is a number, or a tensor of one element of any float dtype. Other names are ignored.
    num_layers  layers of the model; a scale of a layer past them is refused
    kv_format   row format of the caches (`resolve_format`)

    A name is read as `[model.|language_model.|transformer.]layers.{i}.{module}[.{projection}].{scale}` with

        module      self_attn, attn, attention; then any of .attn, .mla_attn, .attn_mqa
        projection  q_proj, k_proj, v_proj, kv_proj, qkv_proj
        scale       q_scale, k_scale, v_scale, kv_scale, each with or without a leading underscore

    which covers `model.layers.{i}.self_attn.attn.k_scale`, `.self_attn.k_scale`, `.self_attn.k_proj.k_scale`, `.attn.kv_scale`
    and the like. Scales below `indexer`, `compressor` and `mtp` belong to others and are ignored (strip `mtp.` to read those of
    the layers for multi-token prediction); any other name of this kind is refused rather than overlooked.

    A layer without a scale has 1.0. `InvalidArgument`, naming the entries, where k, v and kv scales of a layer differ, where two
    spellings of one scale differ, or where a value is not one finite positive number. Values are rounded to fp32, as kernels
    use them.
    """
    found: dict[tuple[int, str], tuple[str, float]] = {}
    for name, value in state.items():
        match = _NAME.fullmatch(name)
        if match is None:
            if _LOOKS_LIKE_ONE.fullmatch(name) and not _NOT_OF_ATTENTION & set(name.split(".")):
                raise InvalidArgument("state", repr(name), "a spelling that from_state_dict lists", hint="rename it, or leave it out")
            continue
        layer, kind = int(match["layer"]), "q_scale" if match["kind"] == "q" else "kv_scale"
        if layer >= num_layers:
            raise InvalidArgument("state", repr(name), f"a layer below num_layers={num_layers}", hint="leave out layers of other models")
        number = _number(name, value)
        other, known = found.setdefault((layer, kind), (name, number))
        if known != number:
            raise InvalidArgument(
                "state",
                f"{other} = {known}, {name} = {number}",
                "equal values: one row is key and value at once" if kind == "kv_scale" else "equal values",
                hint="take the larger one for both and requantise, or calibrate once for MLA",
            )

    def scale(layer: int, kind: str) -> float:
        return found.get((layer, kind), ("", 1.0))[1]

    return [AttentionScales(scale(i, "q_scale"), scale(i, "kv_scale")).require(kv_format, i) for i in range(num_layers)]


def _number(name: str, value: torch.Tensor | float) -> float:
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or not value.is_floating_point():
            raise InvalidArgument(name, f"{value.dtype} {list(value.shape)}", "one floating-point number: a scale per tensor")
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
        raise InvalidArgument(
            name, repr(value), "a finite number > 0", hint="0 and -1 mark scales that were never calibrated: leave them out"
        )
    number = torch.tensor(value, dtype=torch.float32).item()
    if not (math.isfinite(number) and number > 0):
        raise InvalidArgument(name, repr(value), "a number that fp32 can hold")
    return number
