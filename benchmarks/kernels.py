"""What every kernel costs on this GPU, in the shapes that engines have, judged on the buffers that are timed.

    python -m cute_kernels bench [--peer vllm] [--out results.csv] [--only REGEX]

Times are medians of 15 replays of a CUDA graph of 24 launches that rotate through 8, 4 or 3 input sets; the cold column has as many
sets as make up three times the L2 cache. Bytes are what an operation must move, each byte once; percents are of the bandwidth that an
elementwise add over 2 GiB reaches in the same run.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import math
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Protocol

import torch

from benchmarks import cases, harness, plots, results
from benchmarks.calls import Call, storage
from benchmarks.cases import Case
from benchmarks.checking import Judge, Mismatch
from benchmarks.peer_vllm import LIBRARY, PeerRun, PeerUnavailable, Vllm
from benchmarks.results import Row
from cute_kernels.compile.spec import KernelSpec
from cute_kernels.errors import CuteKernelsError
from cute_kernels.target import Target

NEEDS = "the benchmark needs an NVIDIA GPU: B200, B300, GB300, an RTX or GB10 of compute capability 12, or H100 or H200"
_COLD_LAUNCHES = 1500
_COLD_SHARE = 0.5  # of the free memory


class Timer(Protocol):
    """µs of one of `count` launches that rotate through `launches`; `between` runs after whatever is launched once in advance."""

    def __call__(self, launches: Sequence[harness.Launch], count: int, between: Callable[[], None]) -> float: ...


def graph_timer(launches: Sequence[harness.Launch], count: int, between: Callable[[], None]) -> float:
    graph = harness.graph_of(launches, count)
    between()
    return harness.replayed(graph, count)


def targets() -> dict[str, Target]:
    """The target of each family whose source this GPU runs: its own, or both, built for it, on an SM90."""
    capability = torch.cuda.get_device_capability()
    if capability == (9, 0):
        return {family: Target.named(f"{family}:sm_90a") for family in ("sm100", "sm120")}
    target = Target.from_capability(capability, torch.cuda.get_device_name())
    return {target.family: target}


def selected(on: dict[str, Target], only: str) -> list[Case]:
    """The cases whose family this GPU runs, and whose line matches; what both families share once."""
    found = (c for c in cases.cases() if c.family in on and not (c.repeats and len(on) > 1))
    return [c for c in found if re.search(only, c.label)]


def specs(target: Target, operations: set[str]) -> list[KernelSpec]:
    """What the cases of `operations` launch, and a little more."""
    from cute_kernels.compile.matrix import support_matrix

    wanted = {"source": ("local",), "slots": (False,), "seq_starts": (True,), "apply_q_norm": (True,), "prefill": (False,)}
    return [
        spec
        for spec in support_matrix(target)
        if spec.operation in operations and all(spec.fields().get(name, values[0]) in values for name, values in wanted.items())
    ]


def compile_ahead(chosen: Sequence[Case], on: dict[str, Target], jobs: int) -> None:
    """Compiles in parallel processes what neither a pack nor the disk cache has."""
    from cute_kernels.compile import aot, cache, packs, store

    disk = store.Store(store.default_root())
    operations = {part[0] for case in chosen for part in case.parts}
    missing = [
        s for target in on.values() for s in specs(target, operations) if packs.find(s)[0] is None and disk.read(cache.key(s)) is None
    ]
    if missing:
        with tempfile.TemporaryDirectory() as scratch:
            aot.compile_objects(missing, Path(scratch), workers=min(jobs, len(missing)))


def _chain(launches: list[Callable[[], object]]) -> Callable[[], object]:
    def run() -> None:
        for launch in launches:
            launch()

    return launches[0] if len(launches) == 1 else run


def _check(judges: Sequence[Judge], when: str) -> float:
    try:
        return max(judge.check() for judge in judges)
    except Mismatch as error:
        raise Mismatch(f"{when} the timing: {error}") from error


def run_case(
    case: Case,
    target: Target | None,
    limit: float,
    *,
    timer: Timer = graph_timer,
    cold_bytes: int = 0,
    peer: Vllm | None = None,
) -> Row:
    """One line of the table. `Mismatch` where a timed buffer is not what the reference writes, before the timing or after it.

    limit       bytes per second that percents refer to
    cold_bytes  what the sets of the cold column have to sum to; 0: no cold column
    """
    sets = [case.make(i) for i in range(case.sets)]
    judges = [Judge(call, case.family) for calls in sets for call in calls]

    def launch_of(calls: list[Call]) -> Callable[[], object]:
        return _chain([call.launch(target) for call in calls])

    launches = [launch_of(calls) for calls in sets]
    for launch in launches:
        launch()
    differ = _check(judges, "before")

    def fresh_poison() -> None:
        for judge in judges:
            judge.poison()

    time_ = timer(launches, harness.LAUNCHES, fresh_poison)
    differ = max(differ, _check(judges, "after"))

    cold = None
    size = case.bytes
    if cold_bytes and len(sets) * size >= cold_bytes:
        cold = time_
    elif cold_bytes and (more := _cold_sets(sets, size, cold_bytes)):
        cold = timer([launch_of(calls) for calls in more], len(more), lambda: None)
        del more
    rate = size / time_ * 1e6
    row: dict[str, object] = {
        "microseconds": time_,
        "cold_microseconds": cold,
        "bytes": size,
        "terabytes_per_second": rate / 1e12,
        "percent_of_limit": rate / limit * 100,
        "checked": f"{len(sets)} sets equal" if not differ else f"{len(sets)} sets, {differ:.2g} of the values one step off",
    }
    if peer is not None:
        row |= _run_peer(case, sets, peer, timer, time_)
    if case.bar is not None:
        bar = cases.scaled(case.bar, limit)
        peers = row.get("peer_microseconds")
        beaten = not isinstance(peers, float) or time_ < peers
        row |= {"bar_microseconds": case.bar, "scaled_bar_microseconds": bar, "met": "yes" if time_ <= bar and beaten else "no"}
    return Row(case.operation, case.family, case.name, **row)  # type: ignore[arg-type]


def _cold_sets(sets: list[list[Call]], size: int, total: int) -> list[list[Call]]:
    """Copies of the input sets, as many as sum to `total` bytes moved; none where memory does not hold them."""
    count = max(math.ceil(total / size), harness.LAUNCHES)
    held = sum(storage(x).numel() for calls in sets for call in calls for x in call.tensors()) / len(sets)
    if count > _COLD_LAUNCHES or (torch.cuda.is_available() and count * held > _COLD_SHARE * torch.cuda.mem_get_info()[0]):
        return []
    return [[call.clone() for call in sets[i % len(sets)]] for i in range(count)]


def _run_peer(case: Case, sets: list[list[Call]], peer: Vllm, timer: Timer, own: float) -> dict[str, object]:
    """The columns of the peer; it runs last, because it writes the same buffers."""
    try:
        runs: list[list[PeerRun]] = []
        for calls in sets:
            found = [peer.run(call, case.family) for call in calls]
            parts = [run for run in found if run is not None]
            if len(parts) < len(found):
                return {}
            runs.append(parts)
        for run in runs[0]:
            run.check()
        time_ = timer([_chain([run.launch for run in parts]) for parts in runs], harness.LAUNCHES, lambda: None)
    except Mismatch as error:
        return {"peer": f"{peer.name} is called wrongly: {error}"}
    except Exception as error:  # whatever the peer raises must not cost our own figures
        traceback.print_exc()
        return {"peer": f"{peer.name} failed: {type(error).__name__}: {error}".splitlines()[0]}
    return {"peer": peer.name, "peer_microseconds": time_, "ratio": time_ / own}


def host_rows() -> Iterator[Row]:
    """Host µs of one eager call, plain and bound, of every operation on a decode step (SM90, by the method of benchmarks.host).

    In a process of its own: whatever the peer's modules and all cases before have left in this one must not count.
    """
    from benchmarks import host

    measured = host.in_own_process()
    for name, value in measured.yardsticks.items():
        yield Row(results.HOST, "", f"for comparison: {name}", value)
    for line in measured.lines:
        for kind, bar in cases.HOST_BARS.items():
            figure = line.times.bound if kind == "bound" else line.times.call
            met = "yes" if figure <= bar else "no"
            name = f"{line.operation} {line.name}, {kind}"
            yield Row(results.HOST, line.family, name, figure, bar_microseconds=bar, scaled_bar_microseconds=bar, met=met)


def _line(row: Row) -> str:
    def figure(value: float | None, unit: str = "") -> str:
        return "       -" if value is None else f"{value:8.2f}{unit}"

    return (
        f"{row.operation:16} {row.family:5} {row.case:46} {figure(row.microseconds)} cold{figure(row.cold_microseconds)}"
        f" {figure(row.terabytes_per_second)} TB/s{figure(row.percent_of_limit)}% peer{figure(row.peer_microseconds)} x{figure(row.ratio)}"
        f" bar{figure(row.scaled_bar_microseconds)} {row.met:3} {row.checked}"
        f"{' | ' + row.peer if row.peer and row.peer_microseconds is None else ''}"
    )


def machine() -> Iterator[str]:
    """Lines that say what was run, where and with what."""
    commit = os.environ.get("COMMIT") or _output("git", "rev-parse", "--short", "HEAD")
    yield f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%dT%H:%MZ}, commit {commit}"
    yield _output("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")
    yield f"python {platform.python_version()} torch {torch.__version__} cuda {torch.version.cuda}"
    for package in ("nvidia-cutlass-dsl", "apache-tvm-ffi", "triton", "vllm"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            yield f"{package} {metadata.version(package)}"


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _find_peer(name: str | None, library: Path) -> Vllm | None:
    if name is None:
        return None
    try:
        peer = Vllm(library)
    except PeerUnavailable as error:
        print(f"{name} is not importable here, so its columns stay empty: {error}", flush=True)
        return None
    for text in peer.missing:
        print(f"part of {name} is not importable here: {text}", flush=True)
    return peer


def _plot(rows: list[Row], path: Path) -> None:
    try:
        plots.write(rows, path.parent)
    except CuteKernelsError as error:
        print(f"no plots: {error}; later, anywhere: python -m benchmarks.plots {path}", flush=True)


def main(arguments: list[str] | None = None, prog_name: str = "python -m benchmarks.kernels") -> int:
    parser = argparse.ArgumentParser(prog=prog_name, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="CSV file to write; beside it two plots, where matplotlib is installed")
    parser.add_argument("--peer", choices=["vllm"], help="also measure the kernels of vLLM, in the same process")
    text = f"vLLM's CUDA operations as a library file, where no installed vLLM has them (default ~/{LIBRARY.name})"
    parser.add_argument("--peer-library", type=Path, default=LIBRARY, help=text)
    parser.add_argument("--only", default="", help="only cases whose line (operation, family, case) matches this regular expression")
    parser.add_argument("--no-cold", action="store_true", help="leave the cold column out")
    parser.add_argument("--jobs", type=int, default=min(16, os.cpu_count() or 1), help="processes that compile")
    parser.add_argument("--compile-only", action="store_true", help="compile what is missing for the GPU at hand, and stop")
    chosen = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print(f"{NEEDS}; torch sees none here", file=sys.stderr)
        return 2
    try:
        on = targets()
    except CuteKernelsError as error:
        print(f"{NEEDS}: {error}", file=sys.stderr)
        return 2
    wanted = selected(on, chosen.only)
    if not wanted:
        print(f"no case matches {chosen.only!r}", file=sys.stderr)
        return 2
    started = time.perf_counter()
    print(" ".join([prog_name, *(sys.argv[1:] if arguments is None else arguments)]), *machine(), sep="\n", flush=True)
    compile_ahead(wanted, on, chosen.jobs)
    print(f"kernels ready after {time.perf_counter() - started:.0f} s", flush=True)
    if chosen.compile_only:
        return 0
    peer = _find_peer(chosen.peer, chosen.peer_library)

    limit, empty, name = harness.bandwidth_limit(), harness.empty_node(), torch.cuda.get_device_name()
    cold = 0 if chosen.no_cold else 3 * torch.cuda.get_device_properties(0).L2_cache_size
    print(f"{name}: limit {limit / 1e12:.3f} TB/s, an empty graph node {empty:.2f} µs", flush=True)
    rows = [
        Row(results.MACHINE, "", f"{name}: elementwise add over 2 GiB", terabytes_per_second=limit / 1e12),
        Row(results.MACHINE, "", f"{name}: empty graph node", empty),
    ]
    failed = 0
    for case in wanted:
        begun = time.perf_counter()
        try:
            row = run_case(case, on[case.family], limit, cold_bytes=cold, peer=peer)
        except Exception as error:  # the other cases are worth having
            failed += 1
            traceback.print_exc()
            row = Row(case.operation, case.family, case.name, checked=f"FAILED: {type(error).__name__}: {error}".splitlines()[0])
        rows.append(row)
        print(f"{_line(row)}  [{time.perf_counter() - begun:.1f} s]", flush=True)
        if chosen.out:
            results.write(rows, chosen.out)  # after each, so that a run cut short keeps what it has
        torch.cuda.empty_cache()
    if not chosen.only and "sm_90a" in {t.gpu_arch for t in on.values()}:
        for row in host_rows():
            rows.append(row)
            print(_line(row), flush=True)
    if chosen.out:
        results.write(rows, chosen.out)
        _plot(rows, chosen.out)
    missed = sum(row.met == "no" for row in rows)
    print(f"{len(wanted)} cases, {failed} failed, {missed} above their bar, {time.perf_counter() - started:.0f} s", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
