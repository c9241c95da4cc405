"""What is measured: operations, shapes, formats, the bytes each must move, and the time it should take at most on an H200.

"read" saves the state rows that a later step can read (rollback 0, a prefix cache of 256 tokens), "all" every row, "none" has them
saved already. Bars are microseconds at 4.25 TB/s; `scaled` fits them to the bandwidth of a run.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks import serving
from benchmarks.calls import Call
from cute_kernels.save_policy import SavePolicy

READ = SavePolicy(rollback=0, prefix_stride=256)
BAR_LIMIT = 4.25e12  # bytes per second that the bars were set at
HOST_BARS = {"bound": 6.0, "unbound": 12.0}  # µs of one eager call
Requests = tuple[tuple[int, int], ...]
Inputs = tuple[tuple[Any, ...], dict[str, Any]]
# An operation, the maker of its arguments from a step, and the bytes it must move in that step.
Part = tuple[str, Callable[[Requests], Inputs], Callable[[Requests], int]]


@dataclass(frozen=True)
class Case:
    """One line of the table.

    operation  a public call, or "glue": the calls of one layer, back to back
    family     whose source runs
    name       shape, format and variant
    rows       of one launch
    bar        µs at most, at BAR_LIMIT; None: none was set
    parts      what one launch consists of
    step       the requests of the i-th input set
    repeats    the other family's source is the same, and a GPU that runs both measures that one
    """

    operation: str
    family: str
    name: str
    rows: int
    bar: float | None
    parts: tuple[Part, ...]
    step: Callable[[int], Requests]
    repeats: bool = False

    @property
    def label(self) -> str:
        return f"{self.operation} {self.family} {self.name}"

    @property
    def sets(self) -> int:
        """Input sets that the launches rotate through."""
        return 8 if self.rows < 4096 else 4 if self.rows < 16384 else 3

    def make(self, i: int) -> list[Call]:
        """The calls of the i-th input set, on the current CUDA device."""
        torch.manual_seed(i)
        return [Call.of(operation, *arguments(self.step(i))) for operation, arguments, _ in self.parts]

    @property
    def bytes(self) -> int:
        """Bytes that one launch must move, each once: the mean over the input sets."""
        return round(statistics.mean(sum(size(self.step(i)) for _, _, size in self.parts) for i in range(self.sets)))


def scaled(bar: float, limit: float) -> float:
    """A bar in µs at this run's bandwidth limit, in bytes per second."""
    return bar * BAR_LIMIT / limit


def _steps(tokens: int, requests: int) -> Callable[[int], Requests]:
    """Prefill of `requests` requests, or, without any, a decode step of `tokens` requests."""
    return lambda i: serving.prefill(tokens, requests) if requests else serving.decode(tokens, i)


def compress_part(options: dict[str, Any], padding: int = 0) -> Part:
    return (
        "compress_store",
        lambda step: serving.compress_arguments(step, padding=padding, **options),
        lambda step: serving.compress_bytes(step, **options),
    )


def index_part(k: int, family: str) -> Part:
    return (
        "sparse_indices",
        lambda step: serving.index_arguments(step, k=k, family=family),
        lambda step: serving.index_bytes(sum(n for _, n in step), k),
    )


def insert_part(heads: int, kv_format: str, q_dtype: torch.dtype) -> Part:
    return (
        "qkv_insert",
        lambda step: serving.insert_arguments(step, heads=heads, kv_format=kv_format, q_dtype=q_dtype),
        lambda step: serving.insert_bytes(sum(n for _, n in step), heads=heads, kv_format=kv_format, q_bytes=q_dtype.itemsize),
    )


def saving(save: SavePolicy | None) -> str:
    """A case's word for what is saved; None: rows were saved before."""
    return "save none" if save is None else "save all" if save.every_row else "save read"


def family_of(kv_format: str) -> str:
    return "sm120" if kv_format == "fp8_ds_mla" else "sm100"


def compress_cases() -> Iterator[Case]:
    shapes: list[tuple[int, int, SavePolicy | None, int]] = [
        (32, 0, READ, 0),
        (256, 0, READ, 0),
        (256, 0, READ, 8192 - 256),
        *((tokens, requests, READ, 0) for tokens, requests in ((2048, 4), (8192, 4), (32768, 8))),
        (8192, 4, SavePolicy.EVERY_ROW, 0),
        (8192, 4, None, 0),
    ]
    bars: dict[int, tuple[float | None, ...]] = {4: (None, 4, 6, 7, 20, 73, 38, 19), 128: (None, 4.8, 7, 5.5, 11.5, 36, 22, 11.5)}
    for ratio in (4, 128):
        for kv_format in ("bf16", "fp8", "fp8_ds_mla"):
            for (tokens, requests, save, padding), bar in zip(shapes, bars[ratio], strict=True):
                shape = f"{'prefill' if requests else 'decode'} {tokens}{f' of {tokens + padding}' if padding else ''}"
                yield Case(
                    "compress_store",
                    family_of(kv_format),
                    f"ratio {ratio} {kv_format} {shape} {saving(save)}",
                    tokens,
                    bar,
                    (compress_part({"ratio": ratio, "kv_format": kv_format, "save": save}, padding),),
                    _steps(tokens, requests),
                )


def index_cases() -> Iterator[Case]:
    bars = {(8192, 512): 11, (8192, 1024): 19.5, (32768, 1024): 74, (256, 512): 1.9}
    for family in ("sm100", "sm120"):
        for tokens, requests, k in ((32, 0, 512), (256, 0, 512), (256, 0, 1024), (8192, 4, 512), (8192, 4, 1024), (32768, 8, 1024)):
            name = f"{'prefill' if requests else 'decode'} {tokens} k={k}"
            yield Case("sparse_indices", family, name, tokens, bars.get((tokens, k)), (index_part(k, family),), _steps(tokens, requests))


def insert_cases() -> Iterator[Case]:
    e4m3 = torch.float8_e4m3fn
    bars: dict[str, dict[tuple[int, int], float]] = {
        "bf16": {(8192, 64): 268, (8192, 128): 530, (256, 64): 10},
        "fp8": {(8192, 64): 202, (8192, 128): 400, (256, 64): 8.2, (256, 8): 2.4},
        "fp8_ds_mla": {(8192, 16): 72, (8192, 64): 266, (256, 8): 2.6, (256, 64): 10},
    }
    for kv_format, q_dtype in (("bf16", torch.bfloat16), ("fp8", e4m3), ("fp8_ds_mla", torch.bfloat16)):
        for tokens, requests in ((256, 0), (8192, 4)):
            for heads in (8, 16, 64, 128) if requests else (8, 64, 128):
                yield Case(
                    "qkv_insert",
                    family_of(kv_format),
                    f"{kv_format} {tokens} rows, {heads} heads",
                    tokens,
                    bars[kv_format].get((tokens, heads)),
                    (insert_part(heads, kv_format, q_dtype),),
                    _steps(tokens, requests),
                )


def gather_cases() -> Iterator[Case]:
    """Both families gather every format by the same source."""
    bars = {("fp8_inline", 8): 16.5, ("fp8_inline", 64): 60.0}
    for family in ("sm100", "sm120"):
        for kv_format in ("fp8_inline", "fp8_ds_mla", "fp8"):
            for requests, rows in ((8, 4096), (64, 2048)):
                yield Case(
                    "gather_upconvert",
                    family,
                    f"{kv_format} {requests} x {rows} rows",
                    requests * rows,
                    bars.get((kv_format, requests)),
                    (gather_part(kv_format),),
                    _steps(requests * rows, requests),
                    repeats=family == "sm120",
                )


def gather_part(kv_format: str) -> Part:
    return (
        "gather_upconvert",
        lambda step: serving.gather_arguments(step, kv_format=kv_format),
        lambda step: serving.gather_bytes(sum(n for _, n in step), kv_format=kv_format),
    )


def beside(part: Part) -> Part:
    """A part whose launch is independent of the one in front of it."""
    operation, make, size = part

    def independent(step: Requests) -> Inputs:
        args, options = make(step)
        return args, {**options, "independent": True}

    return operation, independent, size


def convert_cases() -> Iterator[Case]:
    for family in ("sm100", "sm120"):
        for tokens, requests, compact in ((256, 0, True), (8192, 4, True), (8192, 4, False)):
            yield Case(
                "convert_indices",
                family,
                f"{'prefill' if requests else 'decode'} {tokens} k=2048 {'compacted' if compact else 'in place'}",
                tokens,
                None,
                (convert_part(compact),),
                _steps(tokens, requests),
                repeats=family == "sm120",
            )


def convert_part(compact: bool) -> Part:
    return (
        "convert_indices",
        lambda step: serving.convert_arguments(step, k=2048, compact=compact),
        lambda step: serving.convert_bytes(sum(n for _, n in step), 2048, compact=compact),
    )


def glue_cases() -> Iterator[Case]:
    """What one ratio-4 layer runs in front of decode, in `SparseMLA`'s order and with its promise: compressor, and beside it index
    table and insert."""
    for kv_format, q_dtype, bar in (("fp8", torch.float8_e4m3fn, 7.0), ("fp8_ds_mla", torch.bfloat16, None)):
        compress = compress_part({"ratio": 4, "kv_format": kv_format, "save": READ})
        family = family_of(kv_format)
        parts = (compress, beside(index_part(512, family)), beside(insert_part(8, kv_format, q_dtype)))
        yield Case("glue", family, f"{kv_format} decode 256, 8 heads, k=512", 256, bar, parts, _steps(256, 0))


def cases() -> Iterator[Case]:
    """Every case; operations in the order of a layer."""
    yield from glue_cases()
    yield from compress_cases()
    yield from index_cases()
    yield from insert_cases()
    yield from gather_cases()
    yield from convert_cases()
