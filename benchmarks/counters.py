"""What the hardware counts while a kernel runs: the measured cause of a time, by NVIDIA's profiler.

    python -m benchmarks.counters [--only REGEX] [--out counters.csv]      default: the cases that have a bar

Runs itself under `ncu`, launches every case once with caches flushed and clocks as they are, and reads: time, bytes from and to DRAM and
the share of its peak, warp instructions and the share of issue slots they take, the share of LSU and L2, resident warps, and what warps
wait for most. Needs a GPU and the right to read its counters.
"""

from __future__ import annotations

import argparse
import csv
import io
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import kernels, tables
from benchmarks.cases import Case
from cute_kernels.errors import CuteKernelsError

METRICS = {
    "gpu__time_duration.sum": "nanoseconds",
    "dram__bytes_read.sum": "dram_read",
    "dram__bytes_write.sum": "dram_written",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "dram",
    "sm__inst_executed.sum": "instructions",
    "sm__inst_executed.avg.pct_of_peak_sustained_elapsed": "issue",
    "l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed": "lsu",
    "lts__t_sectors.avg.pct_of_peak_sustained_elapsed": "l2",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "warps",
    **{
        f"smsp__average_warps_issue_stalled_{reason}_per_issue_active.ratio": f"stall {reason}"
        for reason in ("long_scoreboard", "short_scoreboard", "barrier", "membar", "wait", "math_pipe_throttle", "lg_throttle", "sleeping")
    },
}


@dataclass(frozen=True)
class Counters:
    """One launch. Percents are of the peak over the launch's time; microseconds with a cold cache and ncu's overhead of a launch.

    waits  what its warps wait for most, and the share of their waits
    """

    operation: str
    family: str
    case: str
    kernel: str
    microseconds: float
    dram_bytes: int
    dram_percent: float
    instructions: int
    issue_percent: float
    lsu_percent: float
    l2_percent: float
    warps_percent: float
    waits: str


class NoCounters(CuteKernelsError):
    """The profiler is not there, or may not read the counters."""


def launch_once(chosen: Sequence[Case]) -> None:
    """The child: every case's first input set, launched once unprofiled and once between the profiler's marks."""
    import torch

    on = kernels.targets()
    for case in chosen:
        calls = case.make(0)
        launches = [call.launch(on[case.family]) for call in calls]
        for launch in launches:
            launch()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        for launch in launches:
            launch()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
        del calls, launches
        torch.cuda.empty_cache()


def parse(text: str) -> list[dict[str, Any]]:
    """Launches in order, each its metrics by short name, from the output of `ncu --csv`."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    launches: dict[str, dict[str, Any]] = {}
    for row in csv.DictReader(io.StringIO("\n".join(lines))):
        metric = METRICS.get(row.get("Metric Name") or "")
        if metric is not None:
            found = launches.setdefault(row["ID"], {"kernel": row["Kernel Name"]})
            value = row["Metric Value"].replace(",", "")
            found[metric] = float(value) if re.fullmatch(r"-?[\d.]+(e[+-]?\d+)?", value) else 0.0
    return list(launches.values())


def counters(chosen: Sequence[Case], launches: Sequence[dict[str, Any]]) -> list[Counters]:
    """The parsed launches with the cases that they belong to."""
    names = [(case, part[0]) for case in chosen for part in case.parts]
    if len(names) != len(launches):
        raise NoCounters(f"the profiler saw {len(launches)} launches, {len(names)} were expected")
    rows = []
    for (case, part), found in zip(names, launches, strict=True):
        stalls = {name.partition(" ")[2]: value for name, value in found.items() if name.startswith("stall ")}
        total = sum(stalls.values())
        worst = max(stalls, key=lambda name: stalls[name], default="")
        rows.append(
            Counters(
                operation=case.operation,
                family=case.family,
                case=case.name,
                kernel=part,
                microseconds=found.get("nanoseconds", 0.0) / 1e3,
                dram_bytes=round(found.get("dram_read", 0) + found.get("dram_written", 0)),
                dram_percent=found.get("dram", 0.0),
                instructions=round(found.get("instructions", 0)),
                issue_percent=found.get("issue", 0.0),
                lsu_percent=found.get("lsu", 0.0),
                l2_percent=found.get("l2", 0.0),
                warps_percent=found.get("warps", 0.0),
                waits=f"{worst} {stalls[worst] / total:.0%}" if total else "",
            )
        )
    return rows


def profile(only: str, chosen: Sequence[Case]) -> list[Counters]:
    """Run the child under ncu and read what it counted."""
    command = ["ncu", "--profile-from-start", "off", "--csv", "--print-units", "base", "--clock-control", "none"]
    command += ["--metrics", ",".join(METRICS), sys.executable, "-m", "benchmarks.counters", "--child", "--only", only]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).resolve().parents[1])
    except FileNotFoundError as error:
        raise NoCounters("ncu is not installed", hint="it comes with the CUDA toolkit") from error
    found = parse(ran.stdout)
    if ran.returncode or not found:
        tail = "\n".join((ran.stdout + ran.stderr).splitlines()[-12:])
        raise NoCounters(f"ncu ended with {ran.returncode} and {len(found)} launches:\n{tail}")
    return counters(chosen, found)


def write(rows: Iterable[Counters], path: Path) -> None:
    tables.write(Counters, rows, path, lambda _, value: f"{value:.2f}")


def read(path: Path) -> list[Counters]:
    return tables.read(Counters, path, "python -m benchmarks.counters --out")


def line(row: Counters) -> str:
    return (
        f"{row.operation} {row.family} {row.case} {row.kernel if row.operation == 'glue' else ''}: {row.microseconds:.1f} µs, "
        f"{row.dram_bytes / 1e6:.1f} MB of DRAM ({row.dram_percent:.0f}% of its peak), {row.instructions:,} warp instructions "
        f"({row.issue_percent:.0f}% of issue slots), LSU {row.lsu_percent:.0f}%, L2 {row.l2_percent:.0f}%, "
        f"warps {row.warps_percent:.0f}%, waits {row.waits}"
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="CSV file to write")
    parser.add_argument("--only", default="", help="only cases whose line (operation, family, case) matches this regular expression")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    import torch

    if not torch.cuda.is_available():
        print(kernels.NEEDS, file=sys.stderr)
        return 2
    try:
        on = kernels.targets()
        selected = [c for c in kernels.selected(on, chosen.only) if chosen.only or c.bar is not None]
        if chosen.child:
            launch_once(selected)
            return 0
        kernels.compile_ahead(selected, on, os.cpu_count() or 1)
        rows = profile(chosen.only, selected)
    except CuteKernelsError as error:
        print(error, file=sys.stderr)
        return 1
    for row in rows:
        print(line(row))
    if chosen.out:
        write(rows, chosen.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
