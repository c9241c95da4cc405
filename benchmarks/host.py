"""What one eager call costs on the host, on an SM90 GPU: µs per public call, plain and bound, and what no call can go below.

    python -m benchmarks.host [--out host.csv] [--only compress_store]

A figure is the median of BATCHES batches of CALLS calls in the quietest of ROUNDS rounds, which go over all cases: whatever else the
machine does can only add to it. The GPU is idle before each batch and a batch fits its launch queue, so that no call waits for a kernel.
Columns: "call", the public call with every argument; "bound", the same through `bind` with the named arguments given on each call;
"compiled", the compiled function itself with torch tensors; "prepared", the same with tensors converted beforehand, all but one: the
checks of the compiled function and CUDA's launch, a bound on any call; "nothing", a function of TVM-FFI that takes the same torch
tensors and does nothing. It and the yardsticks above the table let figures of other machines be compared.
"""

from __future__ import annotations

import argparse
import csv
import functools
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import serving
from benchmarks.calls import Call
from benchmarks.cases import READ
from cute_kernels import ops
from cute_kernels.compile import loader
from cute_kernels.compile.spec import KernelSpec
from cute_kernels.target import Target

CALLS, BATCHES, ROUNDS = 100, 10, 8
TOKENS = 256


@dataclass(frozen=True)
class Case:
    """One line of the table.

    arguments  all arguments of the call by name
    varying    those that a bound call is given on each call
    """

    operation: str
    name: str
    family: str
    arguments: dict[str, Any]
    varying: tuple[str, ...]


class Times(NamedTuple):
    """µs of the columns of one line."""

    call: float
    bound: float
    compiled: float
    prepared: float
    nothing: float


class Line(NamedTuple):
    """What was measured of a `Case`. given: arguments that the bound call is given on each call."""

    operation: str
    family: str
    name: str
    given: int
    times: Times


class Measured(NamedTuple):
    """µs of the yardsticks by name, and the table."""

    yardsticks: dict[str, float]
    lines: list[Line]


def microseconds(*calls: Callable[[], object]) -> list[float]:
    """Median host time of one call of each in this round; their batches take turns, so that a slow moment meets all of them."""
    times: list[list[float]] = [[] for _ in calls]
    for batch in range(-1, BATCHES):
        for call, found in zip(calls, times, strict=True):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(CALLS):
                call()
            if batch >= 0:  # the first warms up
                found.append(time.perf_counter() - begin)
    torch.cuda.synchronize()
    return [statistics.median(found) / CALLS * 1e6 for found in times]


def cases() -> Iterator[Case]:
    """The five operations on a decode step (`convert_indices`, `gather_upconvert`: on as many rows), outputs given and not."""
    step = serving.decode(TOKENS, 0)
    for family, kv_format in (("sm100", "fp8"), ("sm120", "fp8_ds_mla")):
        options: dict[str, Any] = {"ratio": 4, "kv_format": kv_format, "save": READ}
        a = Call.of("compress_store", *serving.compress_arguments(step, **options)).arguments
        yield Case("compress_store", f"ratio 4 {kv_format}", family, a, ("kv_score", "positions", "state_slots", "kv_slots"))
        a = Call.of("sparse_indices", *serving.index_arguments(step, k=512, family=family)).arguments
        a["slots"] = a["positions"].clone()
        yield Case("sparse_indices", "own tables", family, a, ("ids", "positions", "slots"))
        yield Case("sparse_indices", "new tables", family, {**a, "out": None}, ("ids", "positions", "slots"))
        dtype = torch.float8_e4m3fn if kv_format == "fp8" else torch.bfloat16
        a = Call.of("qkv_insert", *serving.insert_arguments(step, heads=8, kv_format=kv_format, q_dtype=dtype)).arguments
        yield Case("qkv_insert", f"{kv_format} own q", family, a, ("q", "kv", "slots", "positions"))
        yield Case("qkv_insert", f"{kv_format} new q", family, {**a, "out": None}, ("q", "kv", "slots", "positions"))
    a = Call.of("gather_upconvert", *serving.gather_arguments(serving.prefill(TOKENS, 4), kv_format="fp8_inline")).arguments
    yield Case("gather_upconvert", "fp8_inline", "sm100", a, ("block_table", "workspace_starts", "seq_starts"))
    ids = torch.randint(0, 512, (TOKENS, 512), dtype=torch.int32, device="cuda")
    rows, table = (torch.zeros(n, dtype=torch.int32, device="cuda") for n in (TOKENS, 64))
    a = {"ids": ids, "token_to_req": rows, "block_table": table.view(1, 64), "page_rows": 64, "return_counts": True}
    own = {"out": torch.empty_like(ids), "counts": torch.empty_like(rows)}
    yield Case("convert_indices", "own slots", "sm100", {**a, **own}, ("ids", "token_to_req"))
    yield Case("convert_indices", "new slots", "sm100", a, ("ids", "token_to_req"))


def spelled(call: Callable[..., Any], arguments: dict[str, Any]) -> Callable[[], Any]:
    """`call` with arguments written out by name, as an engine's code has them: `functools.partial` would add half a microsecond."""
    text = f"lambda: call({', '.join(f'{name}={name}' for name in arguments)})"
    return eval(text, {"call": call, **arguments})


class Seen:
    """A loader's executor that keeps what the last launch was given: the compiled function and its arguments, in order."""

    def __init__(self) -> None:
        self.kernel: Callable[..., Any] | None = None
        self.arguments: tuple[Any, ...] = ()

    def executor(self, compiled: loader.CompiledObject, spec: KernelSpec) -> loader.Kernel:
        kernel = loader.load_with_tvm_ffi(compiled, spec)

        def launch(*arguments: Any) -> None:
            self.kernel, self.arguments = kernel, arguments
            kernel(*arguments)

        return launch


def calls_of(case: Case) -> list[Callable[[], object]]:
    """What the columns of one line time."""
    import tvm_ffi

    call = getattr(ops, case.operation)
    a = {**case.arguments, "target": Target.named(f"{case.family}:sm_90a")}
    seen = Seen()
    with loader.use_executor(seen.executor):
        call(**a)
    kernel, arguments = seen.kernel, seen.arguments
    assert kernel is not None
    first = next(i for i, value in enumerate(arguments) if isinstance(value, torch.Tensor))  # tells TVM-FFI torch's stream
    prepared = [tvm_ffi.from_dlpack(v) if isinstance(v, torch.Tensor) and i != first else v for i, v in enumerate(arguments)]
    bound = ops.bind(call, **{n: v for n, v in a.items() if n not in case.varying})
    calls: dict[str, Callable[[], object]] = {
        "call": spelled(call, a),
        "bound": spelled(bound, {n: a[n] for n in case.varying}),
        "compiled": functools.partial(kernel, *arguments),
        "prepared": functools.partial(kernel, *prepared),
        "nothing": functools.partial(tvm_ffi.get_global_func("testing.nop"), *arguments),
    }
    return [calls[column] for column in Times._fields]


def yardsticks() -> dict[str, Callable[[], object]]:
    """A call of TVM-FFI, a new tensor, torch's smallest launch."""
    import tvm_ffi

    nothing = tvm_ffi.get_global_func("testing.nop")
    three = [torch.zeros(256, 512, device="cuda") for _ in range(3)]
    converted = [tvm_ffi.from_dlpack(t) for t in three]
    word = torch.zeros(1, device="cuda")
    return {
        "TVM-FFI, nothing done, 3 torch tensors": functools.partial(nothing, *three),
        "TVM-FFI, nothing done, 3 converted tensors": functools.partial(nothing, *converted),
        "torch.empty": functools.partial(torch.empty, 256, 512, dtype=torch.int32, device=word.device),
        "torch.add of one number, into a tensor": functools.partial(torch.add, word, word, out=word),
    }


def measure(only: str = "") -> Measured:
    """Times of the cases whose operation's name has `only` in it: the quietest of ROUNDS rounds."""
    yards, chosen = yardsticks(), [case for case in cases() if only in case.operation]
    lines = [list(yards.values()), *(calls_of(case) for case in chosen)]
    rounds = [[microseconds(*calls) for calls in lines] for _ in range(ROUNDS)]
    first, *others = [[min(times) for times in zip(*line, strict=True)] for line in zip(*rounds, strict=True)]
    measured = [Line(c.operation, c.family, c.name, len(c.varying), Times(*best)) for c, best in zip(chosen, others, strict=True)]
    return Measured(dict(zip(yards, first, strict=True)), measured)


def in_own_process() -> Measured:
    """`measure` of all cases in a process that has done nothing else."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure).result()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="CSV file to write")
    parser.add_argument("--only", default="", help="operation, or part of its name")
    chosen = parser.parse_args(arguments)
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        print("benchmarks.host needs an SM90 GPU (H100, H200); it runs both families' source, built as sm_90a", file=sys.stderr)
        return 2
    measured = measure(chosen.only)
    for name, value in measured.yardsticks.items():
        print(f"{name:44} {value:6.2f} µs")
    for line in measured.lines:
        times = "  ".join(f"{column} {value:6.2f}" for column, value in line.times._asdict().items())
        print(f"{line.operation:17} {line.family} {line.name:18} {times}  ({line.given} given to bound)")
    if chosen.out:
        with chosen.out.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["operation", "family", "case", "given_to_bound", *(f"{column}_us" for column in Times._fields)])
            writer.writerows([*line[:-1], *(f"{value:.2f}" for value in line.times)] for line in measured.lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
