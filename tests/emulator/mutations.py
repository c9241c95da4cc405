"""`python -m tests.emulator.mutations KERNEL [CASE ...] [--target T]`: does the emulator notice faults planted in our own kernels?

Every line of the kernel's PTX that orders something is removed, moved past the access next to it, or changed (parity, bytes expected,
arrivals expected, a wait that does not wait), one at a time, and the command's cases are run. A mutant is caught by a check, or by a wrong
result; those that survive are listed, and each is either equivalent to the kernel or a hole in the checks.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterator

from ptx_emulator import EmulatorError, device
from ptx_emulator.launch import load_programs
from tests.emulator import cases, emulated

ORDERS = re.compile(r"fence|bar\.|barrier\.|mbarrier\.(arrive|expect_tx|init)|griddepcontrol\.wait|cp\.async\.(?!bulk\.prefetch)")
WAIT = re.compile(r"(mbarrier\.try_wait\S*)\s+(\S+), (\[[^\]]*\]), (%r\d+)(.*)")
AMOUNT = re.compile(r"(mbarrier\.(?:init|arrive|expect_tx)\S*\s+.*, )(\d+|%r\d+);")
MOVED = re.compile(r"fence\.proxy|bar\.|mbarrier\.arrive|griddepcontrol\.wait")
SHARED = re.compile(r"(ld|st)\.shared|cp\.async|mbarrier\.arrive|bar\.")
GLOBAL = re.compile(r"(ld|st)\.global")
EDGE = re.compile(r"[\w$%.]+:|bra|ret|[{}]|$")


def mutants(text: str) -> Iterator[tuple[str, str]]:
    """(what, changed text) of every mutation of a PTX file."""
    lines = text.split("\n")
    bare = [re.sub(r"^@!?%\w+\s+", "", line.strip()) for line in lines]

    def replaced(i: int, new: str) -> str:
        return "\n".join([*lines[:i], new, *lines[i + 1 :]])

    for i, line in enumerate(bare):
        what = f"line {i + 1}: {' '.join(line.split())[:80]}"
        if ORDERS.match(line):
            yield f"removed, {what}", replaced(i, "")
        if found := WAIT.match(line):
            wait, predicate, place, parity, rest = found.groups()
            flipped = f"{{ .reg .b32 flipped; xor.b32 flipped, {parity}, 1; {wait} {predicate}, {place}, flipped{rest} }}"
            yield f"other parity, {what}", replaced(i, flipped)
            yield f"not waited, {what}", replaced(i, f"setp.eq.u32 {predicate}, 0, 0;")
        if found := AMOUNT.match(line):
            for step in (16, -16) if "expect_tx" in line else (1, -1):
                other = f"{{ .reg .b32 other; add.s32 other, {found[2]}, {step}; {found[1]}other; }}"
                yield f"{found[2]}{step:+}, {what}", replaced(i, other)
        if MOVED.match(line):
            wanted = GLOBAL if line.startswith("griddep") else SHARED
            for step, where in ((1, "later"), (-1, "earlier")):
                j = i + step
                while 0 <= j < len(lines) and not EDGE.match(bare[j]) and not wanted.match(bare[j]):
                    j += step
                if 0 <= j < len(lines) and wanted.match(bare[j]):
                    moved = [*lines[:i], *lines[i + 1 :]]
                    moved.insert(j, lines[i])
                    yield f"{where}, past {bare[j][:40]}, {what}", "\n".join(moved)


def verdict(kernel: device.EmulatedKernel, runs: list[cases.Run], target: str, text: str) -> str:
    """What becomes of the cases that run `kernel` when its PTX is `text`."""
    kernel.programs = load_programs(text)
    try:
        for run in runs:
            kernel.results = []
            run(target, device.Settings())
            if not kernel.results:
                return "not run"
    except EmulatorError as error:
        return getattr(error, "check", type(error).__name__)
    except AssertionError:
        return "wrong result"
    finally:
        kernel.programs = load_programs(kernel.ptx)
    return "survived"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.emulator.mutations", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("kernel", choices=sorted(cases.CASES))
    parser.add_argument("case", nargs="*", help="cases to run (default: all)")
    parser.add_argument("--target", default="sm_100a", choices=cases.TARGETS)
    options = parser.parse_args()
    used: dict[str, tuple[device.EmulatedKernel, list[cases.Run]]] = {}
    for name, run in cases.CASES[options.kernel].items():
        if options.case and name not in options.case:
            continue
        for kernel in emulated.loaded:
            kernel.results = []
        run(options.target, device.Settings())
        for kernel in emulated.loaded:
            if kernel.results:
                used.setdefault(kernel.ptx, (kernel, []))[1].append(run)
    for text, (kernel, runs) in used.items():
        count = Counter[str]()
        print(f"{kernel.name}: {len(runs)} cases")
        for what, mutant in mutants(text):
            end = verdict(kernel, runs, options.target, mutant)
            count[end] += 1
            if end in ("survived", "not run"):
                print(f"  {end}: {what}", flush=True)
        print("  " + ", ".join(f"{end}: {n}" for end, n in count.most_common()), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
