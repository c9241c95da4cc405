"""What every kernel costs on an SM90 GPU, in the shapes that engines have: time, bytes, and percent of this run's bandwidth limit.

    python -m benchmarks.kernels [--out results.csv] [--only compress_store]

By the method of `harness`; the inputs are those of `serving`. "read" saves the rows that a later step can read (rollback 0, a prefix
cache of 256 tokens), "all" every row, "none" has them saved already. Bytes are what the operation must move, each byte once.
"""

from __future__ import annotations

import argparse
import csv
import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import harness, serving
from cute_kernels import ops
from cute_kernels.save_policy import SavePolicy
from cute_kernels.target import Target

READ = SavePolicy(rollback=0, prefix_stride=256)
Requests = tuple[tuple[int, int], ...]
Inputs = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """One line of the table. make(i): the i-th input set."""

    operation: str
    name: str
    family: str
    rows: int
    bytes: int
    make: Callable[[int], Inputs]

    @property
    def sets(self) -> int:
        return 8 if self.rows < 4096 else 4 if self.rows < 16384 else 3


def steps(tokens: int, requests: int = 0) -> Callable[[int], Requests]:
    """Prefill of `requests` requests, or, without any, a decode step of `tokens` requests."""
    return lambda i: serving.prefill(tokens, requests) if requests else serving.decode(tokens, i)


def inputs(arguments: Callable[..., Inputs], step: Callable[[int], Requests], **options: Any) -> Callable[[int], Inputs]:
    """The maker of a case's input sets: `arguments` of the i-th step."""
    return lambda i: arguments(step(i), **options)


def compress_cases() -> Iterator[Case]:
    shapes: list[tuple[int, int, SavePolicy | None, int]] = [
        (32, 0, READ, 0),
        (256, 0, READ, 0),
        (256, 0, READ, 8192 - 256),
        *((tokens, requests, READ, 0) for tokens, requests in ((2048, 4), (8192, 4), (32768, 8))),
        (8192, 4, SavePolicy.EVERY_ROW, 0),
        (8192, 4, None, 0),
    ]
    for ratio in (4, 128):
        for kv_format in ("bf16", "fp8", "fp8_ds_mla"):
            for tokens, requests, save, padding in shapes:
                options: dict[str, Any] = {"ratio": ratio, "kv_format": kv_format, "save": save}
                step = steps(tokens, requests)
                saved = "none" if save is None else "all" if save.every_row else "read"
                name = f"ratio {ratio} {kv_format} {'prefill' if requests else 'decode'} {tokens}"
                yield Case(
                    "compress_store",
                    f"{name}{f' of {tokens + padding}' if padding else ''} save {saved}",
                    "sm120" if kv_format == "fp8_ds_mla" else "sm100",
                    tokens,
                    serving.compress_bytes(step(0), **options),
                    inputs(serving.compress_arguments, step, padding=padding, **options),
                )


def index_cases() -> Iterator[Case]:
    for family in ("sm100", "sm120"):
        for tokens, requests, k in ((32, 0, 512), (256, 0, 512), (256, 0, 1024), (8192, 4, 512), (8192, 4, 1024), (32768, 8, 1024)):
            step = steps(tokens, requests)
            yield Case(
                "sparse_indices",
                f"{'prefill' if requests else 'decode'} {tokens} k={k}",
                family,
                tokens,
                serving.index_bytes(tokens, k),
                inputs(serving.index_arguments, step, k=k, family=family),
            )


def insert_cases() -> Iterator[Case]:
    e4m3 = torch.float8_e4m3fn
    for kv_format, q_dtype in (("bf16", torch.bfloat16), ("fp8", e4m3), ("fp8_ds_mla", torch.bfloat16)):
        for tokens, requests, heads in (
            (256, 0, 8),
            (256, 0, 64),
            (256, 0, 128),
            (8192, 4, 8),
            (8192, 4, 16),
            (8192, 4, 64),
            (8192, 4, 128),
        ):
            step = steps(tokens, requests)
            yield Case(
                "qkv_insert",
                f"{kv_format} {tokens} rows, {heads} heads",
                "sm120" if kv_format == "fp8_ds_mla" else "sm100",
                tokens,
                serving.insert_bytes(tokens, heads=heads, kv_format=kv_format, q_bytes=1 if q_dtype is e4m3 else 2),
                inputs(serving.insert_arguments, step, heads=heads, kv_format=kv_format, q_dtype=q_dtype),
            )


def gather_cases() -> Iterator[Case]:
    for kv_format in ("fp8_inline", "fp8_ds_mla", "fp8"):
        for requests, rows in ((8, 4096), (64, 2048)):
            yield Case(
                "gather_upconvert",
                f"{kv_format} {requests} x {rows} rows",
                "sm120" if kv_format == "fp8_ds_mla" else "sm100",
                requests * rows,
                serving.gather_bytes(requests * rows, kv_format=kv_format),
                inputs(serving.gather_arguments, steps(requests * rows, requests), kv_format=kv_format),
            )


def cases() -> Iterator[Case]:
    yield from compress_cases()
    yield from index_cases()
    yield from insert_cases()
    yield from gather_cases()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="CSV file to write")
    parser.add_argument("--only", default="", help="operation, or part of its name")
    chosen = parser.parse_args(arguments)
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        print("benchmarks.kernels needs an SM90 GPU (H100, H200); it runs both families' source, built as sm_90a", file=sys.stderr)
        return 2
    limit = harness.bandwidth_limit()
    print(f"{torch.cuda.get_device_name()}: limit {limit / 1e12:.2f} TB/s, an empty graph node {harness.empty_node():.2f} µs", flush=True)
    rows = []
    for case in cases():
        if chosen.only not in case.operation:
            continue
        call, target = getattr(ops, case.operation), Target.named(f"{case.family}:sm_90a")
        sets = [case.make(i) for i in range(case.sets)]
        time = harness.microseconds([functools.partial(call, *a, target=target, **k) for a, k in sets])
        del sets
        torch.cuda.empty_cache()
        rate = case.bytes / time * 1e6
        rows.append([case.operation, case.family, case.name, f"{time:.2f}", case.bytes, f"{rate / 1e12:.3f}", f"{rate / limit * 100:.1f}"])
        print(
            f"{case.operation:15} {case.family} {case.name:46} {time:8.2f} µs {rate / 1e12:6.2f} TB/s {rate / limit * 100:5.1f}%",
            flush=True,
        )
    if chosen.out:
        with chosen.out.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["operation", "family", "case", "microseconds", "bytes", "terabytes_per_second", "percent_of_limit"])
            writer.writerows(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
