"""docs/performance.md: what was measured, what misses its bar and why, and, apart from it, what is predicted for Blackwell.

    python -m benchmarks.report [RESULTS.csv] [--prediction docs/prediction.csv] [--draft]      default: the newest record

`make docs` writes the same page. Every case above its bar, or slower than the peer, needs a line in `causes.csv` beside the results
(columns pattern, cause; pattern is a regular expression over "operation family case"); without it the page is refused, but for --draft.
`notes.txt`, where there is one, stands above the table; `stale.csv` (pattern, since) names the cases whose kernels have changed
since the run: their figures are marked.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import cases, counters, predict, results
from benchmarks.predict import Prediction
from benchmarks.results import Row
from cute_kernels.errors import CuteKernelsError

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "performance.md"
PREDICTION = ROOT / "docs" / "prediction.csv"
NAMES = {"bf16": "BF16", "fp8": "FP8", "fp8_ds_mla": "packed", "fp8_inline": "656 B", "sm100": "one table", "sm120": "two tables"}
# SGLang 0.5.23 on the same kind of GPU, by the same method, 2026-11-29; it was not run beside ours.
SGLANG = {
    "ratio 4 decode 32 save read": 3.2,
    "ratio 4 decode 256 save read": 5.2,
    "ratio 4 prefill 2048 save read": 9.9,
    "ratio 4 prefill 8192 save read": 25.1,
    "ratio 4 prefill 32768 save read": 85.9,
    "ratio 4 decode 256 of 8192 save read": 39.5,
    "ratio 128 decode 256 save read": 6.3,
    "ratio 128 prefill 2048 save read": 7.8,
    "ratio 128 prefill 8192 save read": 14.1,
    "ratio 128 prefill 32768 save read": 37.5,
    "ratio 128 decode 256 of 8192 save read": 155.0,
    "packed 256 rows, 8 heads": 3.3,
    "packed 256 rows, 64 heads": 11.8,
    "packed 256 rows, 128 heads": 19.9,
    "packed 8192 rows, 8 heads": 47.0,
    "packed 8192 rows, 16 heads": 80.0,
    "packed 8192 rows, 64 heads": 274.0,
    "packed 8192 rows, 128 heads": 533.0,
    "FP8 256 rows, 8 heads": 6.3,
    "FP8 256 rows, 64 heads": 20.6,
    "FP8 8192 rows, 64 heads": 515.0,
}
_FORMAT = re.compile(r"\b(bf16|fp8_ds_mla|fp8_inline|fp8)\b ?")
_SAVES = {
    "read": "whole step, saving the rows that a later step can read",
    "all": "whole step, saving every row",
    "none": "compress only, rows saved before",
}


class Unexplained(CuteKernelsError):
    """A case misses its bar and no cause is written down."""


def record() -> Path:
    """The newest record that has benchmark results."""
    found = sorted((ROOT / "docs" / "results").glob("*/bench.csv"))
    if not found:
        raise CuteKernelsError("no docs/results/*/bench.csv", hint="python -m cute_kernels bench --out docs/results/DATE-GPU/bench.csv")
    return found[-1]


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)])


def rules(path: Path, column: str) -> list[tuple[str, str]]:
    """(pattern, text of `column`) lines of a file beside the results; none without the file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [(line["pattern"], line[column]) for line in csv.DictReader(file)]


def rule(known: Sequence[tuple[str, str]], key: tuple[str, str, str]) -> str | None:
    """The text of the first pattern that a case's "operation family case" matches."""
    return next((text for pattern, text in known if re.search(pattern, " ".join(key))), None)


@dataclass(frozen=True)
class Changed:
    """Cases whose kernels have changed since they were measured: the rules of `stale.csv`."""

    known: Sequence[tuple[str, str]] = ()

    def __contains__(self, key: tuple[str, str, str]) -> bool:
        return rule(self.known, key) is not None

    def mark(self, key: tuple[str, str, str], text: str) -> str:
        """The text of a case's figure, marked where it is not of today's kernel."""
        return f"{text}†" if key in self else text

    def explained(self) -> str:
        """What the mark means: a paragraph for each change."""
        return "".join(f"\n\n† {text}" for text in dict.fromkeys(text for _, text in self.known))


def figure(value: float | None, beside: float | None = None) -> str:
    """A time to three digits, or as many as tell it from the one beside it."""
    if value is None:
        return "–"
    places = 0 if value >= 100 else 1 if value >= 10 else 2
    while beside is not None and value != beside and places < 4 and f"{value:.{places}f}" == f"{beside:.{places}f}":
        places += 1
    return f"{value:.{places}f}"


def kind(row: Row) -> tuple[str, str, str]:
    """(title, shape, variant) of a kernel's row: rows of one title and shape share a line of the table."""
    match = _FORMAT.search(row.case)
    name = match[1] if match else row.family
    plain = _FORMAT.sub("", row.case)
    if row.operation == "compress_store":
        ratio, _, rest = plain.removeprefix("ratio ").partition(" ")
        shape, _, saved = rest.partition(" save ")
        return f"compress_store ratio {ratio}, {_SAVES[saved]}", shape, NAMES[name]
    if row.operation == "sparse_indices":
        return "sparse_indices (remapped, compacted)", row.case, NAMES[row.family]
    if row.operation == "convert_indices":
        return "convert_indices", row.case, ""
    if row.operation == "glue":
        return f"glue of one ratio-4 layer, {NAMES[name]}", plain, ""
    rows = f"{NAMES[name]} full row" if row.operation == "qkv_insert" and name != "fp8_ds_mla" else f"{NAMES[name]} rows"
    return f"{row.operation} {rows}", plain, ""


def sglang(row: Row) -> float | None:
    match = _FORMAT.search(row.case)
    plain = _FORMAT.sub("", row.case)
    if row.operation == "compress_store":
        return SGLANG.get(plain)
    return SGLANG.get(f"{NAMES[match[1]]} {plain}") if row.operation == "qkv_insert" and match else None


def measured(rows: Sequence[Row], changed: Changed) -> str:
    """Every case: those with a bar first in each group, the formats of one case in one line."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.operation not in (results.MACHINE, results.HOST):
            groups.setdefault(kind(row)[:2], []).append(row)
    lines = []
    for (title, shape), mine in groups.items():
        variants = [kind(r)[2] for r in mine]

        def cells(get: Callable[[Row], float | None], mine: Sequence[Row] = mine) -> str:
            found = [figure(get(r)) for r in mine]
            return found[0] if len(set(found)) == 1 else " / ".join(found)

        bar = mine[0].scaled_bar_microseconds
        met = ["yes" if r.met == "yes" else "**no**" for r in mine if r.met]
        peer = [r.peer_microseconds for r in mine if r.peer_microseconds is not None]
        lines.append(
            (
                title,
                shape,
                " / ".join(v for v in variants if v) or "–",
                " / ".join(changed.mark(r.key, figure(r.microseconds)) if r.microseconds else "failed" for r in mine),
                figure(bar),
                "–" if not met else met[0] if len(set(met)) == 1 else " / ".join(met),
                " / ".join("–" if r.percent_of_limit is None else changed.mark(r.key, f"{r.percent_of_limit:.0f}%") for r in mine),
                " / ".join(changed.mark(r.key, figure(r.cold_microseconds)) if r.cold_microseconds else "–" for r in mine),
                cells(lambda r: r.peer_microseconds) if peer else "–",
                figure(sglang(mine[0])),
            )
        )
    head = ("operation", "case", "formats", "µs", "bar", "met", "share of limit", "cold µs", "vLLM 0.33, same run", "SGLang 0.5.23")
    return table(head, lines)


def host(rows: Sequence[Row]) -> str:
    lines = [
        (r.case, r.family, figure(r.microseconds, r.bar_microseconds), figure(r.bar_microseconds), r.met)
        for r in rows
        if r.operation == results.HOST
    ]
    if not lines:
        return "Not measured in this run."
    return table(("call", "family", "µs", "bar", "met"), lines)


def aim(row: Row) -> float | None:
    """What a row's time should be below: its bar, or the peer's time where that is less or there is no bar."""
    return min((t for t in (row.scaled_bar_microseconds, row.peer_microseconds) if t is not None), default=None)


def causes(rows: Sequence[Row], path: Path, draft: bool, changed: Changed) -> str:
    """Each miss, of the bar or of the peer's time, with its cause; `Unexplained` names those without one."""
    known = rules(path, "cause")
    grouped: dict[str, list[Row]] = {}
    unknown = []
    for row in rows:
        if row.met != "no" and not (row.ratio and row.ratio < 1):
            continue
        cause = rule(known, row.key)
        if cause is None:
            unknown.append(" ".join(row.key))
        grouped.setdefault(cause or "no cause written down", []).append(row)
    if unknown and not draft:
        raise Unexplained(
            f"{len(unknown)} cases above their bar or the peer's time have no cause: {'; '.join(unknown)}",
            hint=f"add lines pattern,cause to {path}",
        )
    if not grouped:
        return "Every bar is met."
    text = []
    for cause, mine in grouped.items():
        names = "; ".join(
            f"{' '.join(n for n in r.key if n)}: {changed.mark(r.key, figure(r.microseconds, aim(r)))} of {figure(aim(r), r.microseconds)}"
            for r in mine
        )
        text.append(f"* {cause}\n  ({names})")
    return "\n".join(text)


def counted(rows: Sequence[Row], path: Path, changed: Changed) -> str:
    """What the profiler counted, where a file of it lies beside the results."""
    if not path.exists():
        return ""
    moved = {row.key: row.bytes for row in rows}
    lines = []
    for c in counters.read(path):
        needed = moved.get((c.operation, c.family, c.case)) if c.operation == c.kernel else None
        lines.append(
            (
                f"{c.operation}: {c.kernel}" if c.operation != c.kernel else c.operation,
                c.family,
                c.case,
                changed.mark((c.kernel, c.family, c.case), figure(c.microseconds)),
                f"{c.dram_bytes / 1e6:.1f}{f' of {needed / 1e6:.1f}' if needed else ''}",
                f"{c.dram_percent:.0f}%",
                f"{c.issue_percent:.0f}%",
                f"{c.lsu_percent:.0f}%",
                f"{c.l2_percent:.0f}%",
                f"{c.warps_percent:.0f}%",
                c.waits.replace("_", " "),
            )
        )
    head = (
        "operation",
        "family",
        "case",
        "µs",
        "MB of DRAM, of those to move",
        "DRAM",
        "issue slots",
        "LSU",
        "L2",
        "resident warps",
        "waits most for",
    )
    return f"""
Counters of one launch each, by `python -m benchmarks.counters` (ncu, caches flushed before, its own launch in the time); percents are of
the peak over the launch. Stores still in the L2 cache when a launch ends are not in its DRAM bytes.

{table(head, lines)}
"""


def predicted(rows: Sequence[Prediction], measured_rows: Sequence[Row], changed: Changed) -> str:
    """The chapter on Blackwell: limits, arithmetic, one line for each kernel, faults, and the same arithmetic checked on the H200."""
    blackwell = [r for r in rows if not r.target.endswith("sm_90a")]
    machines = [(m.name, m.sms, f"{m.clock / 1e9:.3g}", f"{m.dram / 1e12:.3g}", m.source) for m in predict.MACHINES.values()]
    example = next((r for r in blackwell if r.operation == "qkv_insert"), blackwell[0])
    machine = predict.MACHINES[example.target.partition(":")[2]]
    slots = example.instructions_per_kilobyte * example.bytes / 1024
    arithmetic = (
        f"{example.operation}, {example.case}, {example.target}: {example.bytes:,} bytes / {machine.dram / 1e12:g} TB/s = "
        f"{example.dram_us:.1f} µs of DRAM. {example.instructions_per_kilobyte:.1f} warp instructions per KB moved x "
        f"{example.bytes / 1024:,.0f} KB = {slots / 1e6:.1f} million, / ({machine.sms} SMs x {machine.issue} a cycle x "
        f"{machine.clock / 1e9:g} GHz) = {example.issue_us:.1f} µs of issue slots. {example.l1_bytes_per_byte:.2f} bytes through L1 per "
        f"byte moved / ({machine.sms} x {machine.l1} B x {machine.clock / 1e9:g} GHz) = {example.l1_us:.1f} µs. The longest, DRAM at "
        f"{predict.ACHIEVED:.0%} of its nominal rate ({example.dram_us / predict.ACHIEVED:.1f} µs), and {predict.LAUNCH_US:g} µs for the "
        f"launch: {example.expected_us:.1f} µs."
    )
    lines = [
        (
            r.operation,
            r.case,
            predict.MACHINES[r.target.partition(":")[2]].name,
            r.registers,
            r.spill_bytes,
            r.shared_bytes,
            f"{r.threads}, {r.occupancy:.0%}",
            f"{r.widest_load} / {r.widest_store}, {r.wide_share:.0%}",
            f"{r.instructions_per_kilobyte:.0f}",
            figure(r.dram_us),
            figure(r.issue_us),
            figure(r.l1_us),
            figure(r.pipe_us),
            r.binds,
            figure(r.expected_us),
        )
        for r in blackwell
    ]
    head = (
        "operation", "case", "on", "registers", "spilled B", "shared B", "threads, occupancy", "widest load / store B, share of bytes",
        "warp instr. / KB", "DRAM µs", "issue µs", "L1/LSU µs", "slow pipe µs", "binds", "expected µs",
    )  # fmt: skip
    faults = [
        f"* {r.operation}, {r.case}, {predict.MACHINES[r.target.partition(':')[2]].name}: {r.issue_share:.0%} of the DRAM time"
        for r in blackwell
        if r.issue_share > predict.FAULT
    ]
    times = {r.key: r.microseconds for r in measured_rows}
    checked = []
    for r in rows:
        family, _, arch = r.target.partition(":")
        key = (r.operation, family, r.case)
        time = times.get(key)
        if arch == "sm_90a" and time:
            ratio = f"{time / r.expected_us:.2f}"
            checked.append((*key, figure(r.expected_us), r.binds, changed.mark(key, figure(time)), ratio))
    return f"""\
{table(("GPU", "SMs", "GHz", "DRAM TB/s, nominal", "source"), machines)}

Each multiprocessor issues 4 warp instructions a cycle and moves 128 bytes a cycle through L1 and shared memory. Instructions are those that
the emulator executed on a small prefill step (at ratio 128 the step itself) of the PTX for that target, times the kernel's ratio of
SASS to PTX instructions (a wait for a barrier counts once, as the hardware suspends the warp); bytes are what the operation must
move. "Slow pipe" is the slowest of conversions (64 lanes a cycle), special functions (16) and shuffles (32). Shared memory, without
the 1 KB that a multiprocessor takes for each block, is the most that a launch asks for: at ratio 128 short steps of the SM100 family
ask for 12 KB less, so that three blocks fit.

{arithmetic}

{table(head, lines)}

"Share of bytes" says how much moves by accesses of the full width, 32 bytes, or by bulk copies. Rows of 656 bytes allow 16. Where one
side has bytes and the other BF16 (gathered rows, q written as FP8), 16 values are 16 bytes here and 32 there. At ratio 128 the rest are
position embeddings, read again for each window, 8 bytes for the two columns of a thread. Where every row is saved, the threads that pool
it store it, four columns (ratio 4) or two each: a warp's stores lie side by side and fill lines, but a thread's are 16 and 8 bytes.

An issue-slot time above {predict.FAULT:.0%} of the nominal DRAM time counts as a fault:

{chr(10).join(faults) or "none."}

### How far the arithmetic is to be trusted

The same arithmetic on the objects for sm_90a against the times measured above:

{table(("operation", "family", "case", "predicted µs", "binds", "measured µs", "measured / predicted"), checked)}
"""


def page(path: Path, prediction: Path = PREDICTION, draft: bool = False) -> str:
    """The whole page from a results file, the causes beside it, and the prediction."""
    rows = results.read(path)
    machine = [r for r in rows if r.operation == results.MACHINE]
    limit = results.limit(rows)
    empty = next((r.microseconds for r in machine if r.microseconds), None)
    device = machine[0].case.partition(":")[0]
    folder = path.parent.resolve()
    where = f"results/{folder.name}" if folder.parent == ROOT / "docs" / "results" else path.parent.as_posix()
    kernels = [r for r in rows if r.operation not in (results.MACHINE, results.HOST)]
    judged = [r for r in kernels if r.met]
    met = sum(r.met == "yes" for r in judged)
    pictures = "\n".join(
        f"![{text}]({where}/{name})"
        for name, text in (("roofline.svg", "Percent of the limit by bytes moved"), ("speedup.svg", "Speed-up over vLLM"))
        if (folder / name).exists()
    )
    changed = Changed(rules(folder / "stale.csv", "since"))
    past_met = sum(r.met == "yes" and r.key in changed for r in judged)
    past = f", {past_met} of them by a kernel that has changed since" if past_met else ""
    notes = folder / "notes.txt"
    said = f"\n\n{notes.read_text().strip()}" if notes.exists() else ""
    log = folder / "bench.txt"
    when = next((f" ({line})" for line in log.read_text().splitlines() if ", commit " in line), "") if log.exists() else ""
    backing = f"\nThe runs behind these causes: [variants.txt]({where}/variants.txt).\n" if (folder / "variants.txt").exists() else ""
    return f"""\
# Performance

Generated by `make docs` from [{path.name}]({where}/{path.name}), the causes beside it, and [prediction.csv](prediction.csv). Measured and
predicted figures stand apart: the first chapter is one run on one {device}, the last one is arithmetic.

## Measured

`python -m cute_kernels bench --peer vllm --out {path.name}` on one {device}{when}; its log, [bench.txt]({where}/bench.txt), names machine,
versions and commit.
A time is the median of 15 replays of a CUDA graph of 24 launches that rotate through 8 input sets (4 at 8192 rows, 3 above), divided by the
launches; the cold column rotates through as many sets as make up three times the L2 cache. Every timed buffer was compared with the
reference before the timing and, after fresh poison, behind it. In this run an elementwise add over 2 GiB reached
{limit / 1e12:.2f} TB/s, the limit that shares refer to, and an empty graph node took {figure(empty)} µs. Bars, times to reach, were set at
{cases.BAR_LIMIT / 1e12:.2f} TB/s; the column shows them at this run's limit. A bar is met where the time is below it, and below vLLM's
where vLLM ran the same work beside it. SGLang's figures are of a run on another H200 (2026-11-29) by the same method, which no command
here repeats; its compressor's are of packed rows, also beside other formats. vLLM's compressor saves every row, whichever of them a later
step can read: "saving every row" and "rows saved before" are the same work on both sides, elsewhere it does more, as it does in a model.
Its index tables of decode steps leave out the kernel that finds the window's slots.

{met} of {len(judged)} timed cases with a bar meet it{past} (host times apart, below).{changed.explained()}{said}

{measured(rows, changed)}

{pictures}

### Above the bar or slower than vLLM, and why

{causes(rows, folder / "causes.csv", draft, changed)}
{backing}{counted(rows, folder / "counters.csv", changed)}
### Host time of one eager call

`bound`: through `bind`, with the tensors that change; `unbound`: the public call with every argument.

{host(rows)}

## Predicted for Blackwell

Nothing of this library has run on Blackwell. What follows is arithmetic of `python -m benchmarks.predict --out docs/prediction.csv`.

{predicted(predict.read(prediction), rows, changed)}"""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="?", help="CSV file of `python -m cute_kernels bench --out`")
    parser.add_argument("--prediction", type=Path, default=PREDICTION)
    parser.add_argument("--draft", action="store_true", help="also with misses that have no cause")
    parser.add_argument("--out", type=Path, default=PAGE, help="default docs/performance.md")
    chosen = parser.parse_args(arguments)
    try:
        chosen.out.write_text(page(chosen.results or record(), chosen.prediction, chosen.draft))
    except CuteKernelsError as error:
        print(error, file=sys.stderr)
        return 1
    print(chosen.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
