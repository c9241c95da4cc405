"""What the kernels should take on Blackwell, from their machine code and from public limits of the hardware. Nothing here is measured.

    python -m benchmarks.predict [--out prediction.csv] [--only REGEX]

For each kernel of a prefill step: registers, shared memory and spills from the object; executed warp instructions, sectors and access
widths from the emulator, which runs the PTX of that target on a small step; the bytes that the operation must move from `cases`. PTX
instructions become issue slots by the kernel's ratio of SASS to PTX instructions. Per byte moved, these hold for a large step, too.

The same arithmetic on the objects for sm_90a can be compared with times measured on an H200: that is how far it is to be trusted.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import cases, serving, tables
from benchmarks.calls import Call
from benchmarks.cases import READ, Part, Requests
from cute_kernels import ops
from cute_kernels.save_policy import SavePolicy
from cute_kernels.target import Target

FAULT = 0.7  # an issue-slot time above this share of the DRAM time is a fault
ACHIEVED = 0.9  # share of the nominal DRAM bandwidth that a copy reaches: 4.25 to 4.37 of 4.8 TB/s on an H200
LAUNCH_US = 1.0  # an empty graph node on an H200; assumed for all


@dataclass(frozen=True)
class Machine:
    """Public limits of a GPU.

    sms, clock   multiprocessors, Hz
    dram         nominal bytes per second
    source       where the figures come from
    issue        warp instructions per cycle and multiprocessor
    l1           bytes per cycle and multiprocessor through L1 and shared memory
    """

    name: str
    sms: int
    clock: float
    dram: float
    source: str
    issue: int = 4
    l1: int = 128


MACHINES = {
    "sm_90a": Machine("H200", 132, 1.755e9, 4.8e12, "132 SMs, 4.8 TB/s: NVIDIA H200 data sheet; 1.755 GHz: H100 SXM boost"),
    "sm_100f": Machine("B200", 148, 1.86e9, 8.0e12, "8 TB/s: NVIDIA HGX B200; 148 SMs, 1.86 GHz under tensor load: hmc-tech.com/gpus"),
    "sm_120f": Machine(
        "RTX PRO 6000",
        188,
        2.6e9,
        1.792e12,
        "188 SMs, 1792 GB/s, 125 TFLOPS (188 x 128 x 2 x 2.6 GHz): NVIDIA data sheet",
    ),
}
# Lanes per cycle and multiprocessor of instructions that do not run at full rate (CUDA programming guide, arithmetic throughput).
_PIPES = {
    "special function": (16, re.compile(r"(ex2|rcp|rsqrt|lg2|sqrt|sin|cos|tanh)\b")),
    "conversion": (64, re.compile(r"cvt\b")),
    "shuffle": (32, re.compile(r"(shfl|redux|match)\b")),
}


@dataclass(frozen=True)
class Kernel:
    """What is predicted: a part of a step, emulated on `small` and scaled to `large`."""

    name: str
    part: Part
    small: Requests
    large: Requests


@dataclass(frozen=True)
class Prediction:
    """One kernel on one machine; times in µs for the large step."""

    operation: str
    target: str
    case: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    threads: int
    occupancy: float
    widest_load: int
    widest_store: int
    wide_share: float
    sass_per_ptx: float
    instructions_per_kilobyte: float
    l1_bytes_per_byte: float
    bytes: int
    dram_us: float
    issue_us: float
    l1_us: float
    pipe_us: float
    binds: str
    expected_us: float

    @property
    def issue_share(self) -> float:
        return self.issue_us / self.dram_us


def kernels(target: Target) -> Iterator[Kernel]:
    """The kernels of a family on a prefill step."""
    prefill = serving.prefill
    large = prefill(8192, 4)
    formats = {"sm100": ("bf16", "fp8"), "sm120": ("fp8_ds_mla",)}[target.family]
    for kv_format in formats:
        for ratio, save in itertools.product((4, 128), (READ, SavePolicy.EVERY_ROW, None)):
            options = {"ratio": ratio, "kv_format": kv_format, "save": save}
            # At ratio 128 the step's length says how many blocks share a window: no smaller step does what the large one does.
            small = prefill(2048, 4) if ratio == 4 else large
            yield Kernel(f"ratio {ratio} {kv_format} prefill 8192 {cases.saving(save)}", cases.compress_part(options), small, large)
    # Enough rows that each is one warp's, as in the large step: up to 1024 a block serves a row.
    yield Kernel("prefill 8192 k=512", cases.index_part(512, target.family), prefill(2048, 4), large)
    for kv_format in formats:
        q_dtype = torch.float8_e4m3fn if kv_format == "fp8" else torch.bfloat16
        yield Kernel(f"{kv_format} 8192 rows, 64 heads", cases.insert_part(64, kv_format, q_dtype), prefill(64, 4), large)
    for kv_format in ("fp8_inline", "fp8_ds_mla", "fp8"):
        yield Kernel(f"{kv_format} 8 x 4096 rows", cases.gather_part(kv_format), prefill(2048, 8), prefill(8 * 4096, 8))
    yield Kernel("prefill 8192 k=2048 compacted", cases.convert_part(True), prefill(128, 4), large)


_POLL = re.compile(r"mbarrier\.(try|test)_wait")
_WIDTH = re.compile(r"\.(?:v(\d)\.)?[bfus](\d+)\b")


def access_bytes(text: str) -> int:
    """Bytes that one thread moves by a load or store instruction."""
    found = _WIDTH.search(text.replace("::", "."))
    return int(found[1] or 1) * int(found[2]) // 8 if found else 0


def _is_wide(opcode: str, vector_bytes: int) -> bool:
    return opcode.startswith("cp.async.bulk") or access_bytes(opcode) >= vector_bytes


def _opcode(text: str) -> str:
    return text.split(None, 1)[-1] if text.startswith("@") else text


def issued(warps: dict[int, int], texts: dict[int, str]) -> int:
    """Warp instructions of a launch from those of each PTX line. A wait for an mbarrier counts as often as it ends: the emulator polls,
    the hardware suspends the warp."""
    total, after = 0, 0
    for line in sorted(warps, reverse=True):
        count = warps[line]
        total += min(count, after) if _POLL.match(_opcode(texts[line])) else count
        after = count
    return total


def predict(kernel: Kernel, target: Target) -> Prediction:
    """Compile (or find) the kernel for `target`, emulate the small step, and scale to the large one."""
    from cute_kernels.compile import cache
    from cute_kernels.compile.build import CUBIN, PTX
    from cute_kernels.compile.inspect import block_threads, count_instructions, disassemble, multiprocessor

    emulated = importlib.import_module("tests.emulator.emulated").emulated
    operation, arguments, size = kernel.part
    machine = MACHINES[target.gpu_arch]
    torch.manual_seed(0)
    call = Call.of(operation, *arguments(kernel.small))
    results: list[Any] = []
    with emulated(target, on_result=results.append, statistics=True, check_races=False):
        getattr(ops, operation)(**call.arguments)
    result, *others = results
    assert not others, f"{operation} launched {len(results)} kernels"
    compiled, manifest = cache.ensure_with_manifest(_spec(result.kernel, target))
    sass = count_instructions(disassemble(compiled.object.with_name(CUBIN)))
    threads = block_threads(compiled.object.with_name(PTX).read_text())

    small, large = size(kernel.small), size(kernel.large)
    scale = large / small
    ratio = sass.total / len(result.lines)
    slots = issued(result.warps, result.texts) * ratio * scale
    direct = sum(row[2] for row in result.accesses.values())
    bulk = max(result.loaded + result.stored - direct, 0)
    wide = bulk + sum(row[2] for line, row in result.accesses.items() if _is_wide(_opcode(result.texts[line]), target.vector_bytes))
    shared = sum(
        warps * 32 * access_bytes(_opcode(result.texts[line]))
        for line, warps in result.warps.items()
        if re.match(r"(ld|st)\.shared", _opcode(result.texts[line]))
    )
    l1 = sum(row[1] * 32 for row in result.accesses.values()) + bulk + shared
    pipes = {
        pipe: sum(warps for line, warps in result.warps.items() if pattern.match(_opcode(result.texts[line])))
        * 32
        * scale
        / (machine.sms * lanes * machine.clock)
        * 1e6
        for pipe, (lanes, pattern) in _PIPES.items()
    }
    pipe, pipe_us = max(pipes.items(), key=lambda item: item[1])
    dram_us = large / machine.dram * 1e6
    issue_us = slots / (machine.sms * machine.issue * machine.clock) * 1e6
    l1_us = l1 * scale / (machine.sms * machine.l1 * machine.clock) * 1e6
    times = {"DRAM": dram_us / ACHIEVED, "issue slots": issue_us, "L1/LSU": l1_us, pipe: pipe_us}
    binds, longest = max(times.items(), key=lambda item: item[1])
    return Prediction(
        operation=operation,
        target=str(target),
        case=kernel.name,
        registers=manifest["registers"],
        spill_bytes=manifest["spill_bytes"],
        shared_bytes=manifest["shared_bytes"],
        threads=threads,
        occupancy=multiprocessor(target.gpu_arch).occupancy(threads, manifest["registers"], manifest["shared_bytes"]),
        widest_load=sass.widest_load,
        widest_store=sass.widest_store,
        wide_share=wide / max(direct + bulk, 1),
        sass_per_ptx=ratio,
        instructions_per_kilobyte=slots / scale / small * 1024,
        l1_bytes_per_byte=l1 / small,
        bytes=large,
        dram_us=dram_us,
        issue_us=issue_us,
        l1_us=l1_us,
        pipe_us=pipe_us,
        binds=binds,
        expected_us=longest + LAUNCH_US,
    )


def _spec(name: str, target: Target) -> Any:
    from cute_kernels.compile.matrix import support_matrix

    return next(spec for spec in support_matrix(target) if str(spec) == name)


TARGETS = ("sm_100f", "sm_120f", "sm100:sm_90a", "sm120:sm_90a")


def predictions(only: str, progress: Callable[[Prediction], None]) -> list[Prediction]:
    """Every kernel on every target whose line matches."""
    device, serving.DEVICE = serving.DEVICE, "cpu"
    found = []
    try:
        for target in map(Target.named, TARGETS):
            for kernel in kernels(target):
                if re.search(only, f"{kernel.part[0]} {target} {kernel.name}"):
                    found.append(predict(kernel, target))
                    progress(found[-1])
    finally:
        serving.DEVICE = device
    return found


def write(rows: list[Prediction], path: Path) -> None:
    tables.write(Prediction, rows, path, lambda _, value: f"{value:.4g}")


def read(path: Path) -> list[Prediction]:
    return tables.read(Prediction, path, "python -m benchmarks.predict --out")


def line(row: Prediction) -> str:
    times = f"DRAM {row.dram_us:6.1f} issue {row.issue_us:6.1f} L1 {row.l1_us:6.1f} pipe {row.pipe_us:5.1f} µs"
    return (
        f"{row.operation:16} {row.target:13} {row.case:38} {row.registers:4} regs {row.shared_bytes:6} B shared, "
        f"occupancy {row.occupancy:4.0%}, wide {row.wide_share:4.0%}, {row.instructions_per_kilobyte:5.1f}/KB; {times}: "
        f"{row.binds}, {row.expected_us:.1f} µs{'  FAULT' if row.issue_share > FAULT else ''}"
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="CSV file to write")
    parser.add_argument("--only", default="", help="only kernels whose line (operation, target, case) matches this regular expression")
    chosen = parser.parse_args(arguments)
    rows = predictions(chosen.only, lambda row: print(line(row), flush=True))
    if chosen.out:
        write(rows, chosen.out)
    faults = [row for row in rows if row.issue_share > FAULT and not row.target.endswith("sm_90a")]
    print(f"{len(rows)} kernels; issue slots take more than {FAULT:.0%} of the DRAM time in {len(faults)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
