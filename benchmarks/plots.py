"""Two pictures of a run: percent of the bandwidth limit by kernel and size, and the speed-up over the peer.

    python -m benchmarks.plots results.csv [--out FOLDER]      default: beside the file

Writes roofline.svg and, where a peer was measured, speedup.svg. Needs matplotlib, but no GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.results import Row
from cute_kernels.errors import CuteKernelsError

_COLOURS = ("#1b6ca8", "#d1495b", "#3c8d5a", "#8d6cab", "#c98a1b", "#4a4a4a")
_STYLE = {"svg.fonttype": "none", "svg.hashsalt": "cute_kernels", "font.family": "sans-serif", "font.size": 8, "axes.axisbelow": True}


def measured(rows: Sequence[Row]) -> list[Row]:
    """The rows of kernels that have a time."""
    return [r for r in rows if r.microseconds and r.bytes]


def roofline(rows: Sequence[Row], path: Path) -> None:
    """Percent of the limit over the bytes moved, a colour for each operation; hollow: decode-sized steps with a cold cache."""
    pyplot = _pyplot()
    found = measured(rows)
    with pyplot.rc_context(_STYLE):
        figure, axes = pyplot.subplots(figsize=(6.4, 3.6))
        for colour, operation in zip(_COLOURS * 2, dict.fromkeys(r.operation for r in found), strict=False):
            mine = [r for r in found if r.operation == operation]
            warm = [(r.bytes, r.percent_of_limit) for r in mine]
            cold = [(r.bytes, r.percent_of_limit * r.microseconds / r.cold_microseconds) for r in mine if _has_cold(r)]  # type: ignore[operator]
            axes.scatter(*zip(*warm, strict=True), s=14, color=colour, label=operation, linewidths=0)
            if cold:
                axes.scatter(*zip(*cold, strict=True), s=14, facecolors="none", edgecolors=colour, linewidths=0.6)
        axes.set(xscale="log", ylim=(0, 105), xlabel="bytes that one launch must move", ylabel="% of the measured bandwidth limit")
        axes.set_title(f"Share of {results.limit(list(rows)) / 1e12:.2f} TB/s (hollow: cold L2)", fontsize=9)
        axes.grid(alpha=0.25, linewidth=0.5)
        axes.legend(frameon=False, fontsize=7, loc="lower right")
        _save(figure, path)


def _has_cold(row: Row) -> bool:
    return bool(row.cold_microseconds) and row.cold_microseconds != row.microseconds


def speedup(rows: Sequence[Row], path: Path) -> bool:
    """A bar for each case that the peer ran, too; False (and no file) where there is none."""
    found = [r for r in measured(rows) if r.ratio]
    if not found:
        return False
    pyplot = _pyplot()
    with pyplot.rc_context(_STYLE):
        figure, axes = pyplot.subplots(figsize=(6.4, 0.8 + 0.13 * len(found)))
        operations = list(dict.fromkeys(r.operation for r in found))
        places = range(len(found) - 1, -1, -1)
        axes.barh(
            places, [r.ratio for r in found], color=[_COLOURS[operations.index(r.operation) % len(_COLOURS)] for r in found], height=0.7
        )
        axes.set_yticks(places, [f"{r.operation} {r.case}" for r in found], fontsize=6)
        axes.axvline(1, color="#444", linewidth=0.8)
        for place, row in zip(places, found, strict=True):
            axes.text(row.ratio, place, f" {row.ratio:.2f}", va="center", fontsize=6)
        axes.set(xlabel=f"time of {found[0].peer} / time of this library, same run", ylim=(-0.6, len(found) - 0.4))
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x", alpha=0.25, linewidth=0.5)
        _save(figure, path)
    return True


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise CuteKernelsError("matplotlib is not installed", hint="pip install 'cute-kernels[dev]'") from error
    matplotlib.use("svg")
    from matplotlib import pyplot

    return pyplot


def _save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None, "Creator": None})
    path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")
    _pyplot().close(figure)


def write(rows: list[Row], folder: Path) -> list[Path]:
    """Both pictures into `folder`; the files written."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [folder / "roofline.svg"]
    roofline(rows, names[0])
    if speedup(rows, folder / "speedup.svg"):
        names.append(folder / "speedup.svg")
    return names


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="CSV file of `python -m cute_kernels bench --out`")
    parser.add_argument("--out", type=Path, help="folder (default: the file's)")
    chosen = parser.parse_args(arguments)
    try:
        for path in write(results.read(chosen.results), chosen.out or chosen.results.parent):
            print(path)
    except CuteKernelsError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
