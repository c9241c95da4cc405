"""`python -m ptx_emulator [--cases MODULE] KERNEL CASE [--target T]`: run one case of a kernel and report what it did.

The cases come from a module of the project under test (default `tests.emulator.cases`), which has `TARGETS`, a tuple of names, and
`CASES: dict[kernel, dict[case, run]]`; `run(target, settings)` launches through `ptx_emulator.device` with those settings, judges the
result and returns lines for the report. Without arguments the kernels and cases are listed.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time

from ptx_emulator.device import Settings
from ptx_emulator.faults import EmulatorError
from ptx_emulator.launch import Result
from ptx_emulator.report import report


def main(arguments: list[str] | None = None) -> int:
    """Run one case and report it: 0 without a fault, 1 with one, 2 for a case that there is not."""
    parser = argparse.ArgumentParser(prog="python -m ptx_emulator", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("kernel", nargs="?", help="name of the kernel")
    parser.add_argument("case", nargs="?", help="name of its case; without one, kernels and cases are listed")
    parser.add_argument("--target", default="sm_100a", help="what to compile for (default sm_100a)")
    parser.add_argument("--cases", default="tests.emulator.cases", help="module that holds the cases (default tests.emulator.cases)")
    parser.add_argument(
        "--approximation",
        choices=("nearest", "low", "high"),
        default="nearest",
        help="value of an approximate instruction: the correctly rounded one, or an end of its error interval",
    )
    parser.add_argument("--never", action="store_true", help="list the instructions that the case never executes")
    options = parser.parse_args(arguments)
    sys.path.insert(0, "")
    try:
        module = importlib.import_module(options.cases)
        cases = module.CASES
    except (ModuleNotFoundError, AttributeError) as error:
        parser.error(f"argument --cases: {options.cases!r} is no module with CASES and TARGETS: {error}")
    if options.target not in module.TARGETS:
        parser.error(f"argument --target: {options.target!r} is none of {', '.join(module.TARGETS)}")
    chosen = cases.get(options.kernel, {}).get(options.case)
    if chosen is None:
        if options.kernel is not None:
            known = f"no case {options.case!r} of kernel {options.kernel!r}" if options.case else f"kernel {options.kernel!r} needs a case"
            print(f"{known if options.kernel in cases else f'no kernel {options.kernel!r}'}; there are", file=sys.stderr)
        for kernel, named in cases.items():
            print(f"{kernel}: {', '.join(named)}", file=sys.stdout if options.kernel is None else sys.stderr)
        return 0 if options.kernel is None else 2
    results: list[Result] = []
    settings = Settings(on_result=results.append, approximation=options.approximation, statistics=True)
    begin = time.perf_counter()
    try:
        judged = chosen(options.target, settings)
    except (EmulatorError, AssertionError) as error:
        print(f"{type(error).__name__}: {error}")
        return 1
    print(report(results, never=options.never))
    print(f"result: {judged}")
    print(f"{time.perf_counter() - begin:.1f} s, compilation included")
    return 0


if __name__ == "__main__":
    sys.exit(main())
