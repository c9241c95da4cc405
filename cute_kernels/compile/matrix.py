"""The support matrix as specs: what a pack holds, and what a layer can ask for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from cute_kernels.compile.spec import CompressStoreSpec, KernelSpec, SparseIndicesSpec
from cute_kernels.target import Target

_FORMATS = {"sm100": ("bf16", "fp8"), "sm120": ("fp8_ds_mla",)}
_SAVES = ((True, "every_row"), (True, "policy"), (False, "none"))
_SOURCES = ("none", "local", "global", "all_groups")
RATIOS = (4, 128)


def vector_widths(target: Target) -> tuple[int, ...]:
    """The access widths that a target's kernels are built for: each alignment a caller may have gets the widest that fits."""
    return tuple(sorted({16, target.vector_bytes}))


def support_matrix(target: Target, *, pdl: bool = True) -> list[KernelSpec]:
    """Every spec that an operation can ask for on `target`: the contents of its AOT pack."""
    return [
        *compress_store_specs(target, ratios=RATIOS, formats=_FORMATS[target.family], saves=_SAVES, pdl=pdl),
        *sparse_indices_specs(target, sources=_SOURCES, pdl=pdl),
    ]


def layer_specs(target: Target, *, ratio: int, kv_format: str, save: str | None = None, pdl: bool = True) -> list[KernelSpec]:
    """Every spec that a layer of this compression ratio (1: window only, 4, 128) and row format can ask for, for warm-up.

    save  the saving rule in use ("every_row", "policy", "none"), or None for all of them
    """
    if ratio == 1:
        return list(sparse_indices_specs(target, sources=("none",), pdl=pdl))
    saves = [(scores, rule) for scores, rule in _SAVES if save in (None, rule)]
    sources = ("none", "local", "global") if ratio == 4 else ("none", "all_groups")
    return [
        *compress_store_specs(target, ratios=(ratio,), formats=(kv_format,), saves=saves, pdl=pdl),
        *sparse_indices_specs(target, sources=sources, pdl=pdl),
    ]


def compress_store_specs(
    target: Target, *, ratios: Iterable[int], formats: Iterable[str], saves: Iterable[tuple[bool, str]], pdl: bool = True
) -> Iterator[CompressStoreSpec]:
    """All `compress_store` specs of the given ratios, row formats and (scores, save) pairs."""
    rules = list(saves)
    for ratio in ratios:
        for kv_format in formats:
            for scores, save in rules:
                for width in vector_widths(target):
                    yield CompressStoreSpec(target, width, pdl, ratio, kv_format, scores, save)


def sparse_indices_specs(target: Target, *, sources: Iterable[str], pdl: bool = True) -> Iterator[SparseIndicesSpec]:
    """All `sparse_indices` specs of the given id sources."""
    for source in sources:
        for slots in (True, False):
            for width in vector_widths(target):
                yield SparseIndicesSpec(target, width, pdl, source, slots)
