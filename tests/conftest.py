"""Settings of every test run: one cache of compiled kernels for the whole run, no packs, and the seconds of each kind of test."""

from __future__ import annotations

import collections
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Before any import of the package: a run shares its objects among workers, compile tests and emulator, and with `make demo`.
os.environ.setdefault("CUTE_KERNELS_CACHE_DIR", str(ROOT / "build" / "cache"))
# Tests run in parallel processes and their tensors are small: a pool of threads in each only makes them wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")
for name in ("CUTE_KERNELS_PACKS", "CUTE_KERNELS_FREEZE", "CUTE_KERNELS_VALIDATE", "CUTE_DSL_ARCH"):
    os.environ.pop(name, None)

_seconds: dict[str, float] = collections.defaultdict(float)
_counts: dict[str, int] = collections.defaultdict(int)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    kind = report.nodeid.split("/")[1] if report.nodeid.count("/") else "other"
    _seconds[kind] += report.duration
    _counts[kind] += report.when == "call"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for kind in sorted(_seconds):
        terminalreporter.write_line(f"tests/{kind}: {_counts[kind]} tests, {_seconds[kind]:.0f} s of one process")
