"""The CSV file of a run: one row a figure, read and written here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks import tables
from cute_kernels.errors import InvalidArgument

MACHINE = "machine"
HOST = "host"


@dataclass(frozen=True)
class Row:
    """One figure of a run. Empty where a column does not apply.

    operation             a public call, "glue", "host" (host time of a call) or "machine" (the run's device and limit)
    family                whose source ran
    case                  shape, format and variant
    microseconds          median time of one launch, rotating through a few input sets
    cold_microseconds     the same with sets that together are three times the L2 cache
    bytes                 that the call must move
    terabytes_per_second  bytes / microseconds
    percent_of_limit      of the bandwidth of an elementwise add in the same run
    peer, peer_microseconds, ratio   the peer's kernels on the same inputs in the same run; peer time / own time
    bar_microseconds, scaled_bar_microseconds, met   at 4.25 TB/s; at this run's limit; whether it is met and the peer is beaten
    checked               what the comparison of the timed buffers with the reference said, before and after the timing
    """

    operation: str
    family: str
    case: str
    microseconds: float | None = None
    cold_microseconds: float | None = None
    bytes: int | None = None
    terabytes_per_second: float | None = None
    percent_of_limit: float | None = None
    peer: str = ""
    peer_microseconds: float | None = None
    ratio: float | None = None
    bar_microseconds: float | None = None
    scaled_bar_microseconds: float | None = None
    met: str = ""
    checked: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        return self.operation, self.family, self.case


_DIGITS = {"terabytes_per_second": 4, "percent_of_limit": 1}


def write(rows: list[Row], path: Path) -> None:
    tables.write(Row, rows, path, lambda column, value: f"{value:.{_DIGITS.get(column, 3)}f}")


def read(path: Path) -> list[Row]:
    return tables.read(Row, path, "python -m cute_kernels bench --out")


def limit(rows: list[Row]) -> float:
    """Bytes per second that the elementwise add of this run reached."""
    for row in rows:
        if row.operation == MACHINE and row.terabytes_per_second:
            return row.terabytes_per_second * 1e12
    raise InvalidArgument("results", "no row of the machine's limit", "one, as `python -m cute_kernels bench` writes it first")
