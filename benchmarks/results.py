"""The CSV file of a run: one row a figure, read and written here."""

from __future__ import annotations

import csv
import dataclasses
from dataclasses import dataclass
from pathlib import Path

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


_COLUMNS = {field.name: str(field.type) for field in dataclasses.fields(Row)}
_DIGITS = {"microseconds": 3, "terabytes_per_second": 4, "percent_of_limit": 1, "ratio": 3}


def write(rows: list[Row], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(_COLUMNS)
        writer.writerows([_text(name, getattr(row, name)) for name in _COLUMNS] for row in rows)


def _text(column: str, value: object) -> str:
    if isinstance(value, float):
        return f"{value:.{_DIGITS.get(column, 3)}f}"
    return "" if value is None else str(value)


def read(path: Path) -> list[Row]:
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if reader.fieldnames is None or list(reader.fieldnames) != list(_COLUMNS):
            raise InvalidArgument(
                str(path), f"columns {reader.fieldnames}", f"{', '.join(_COLUMNS)}", hint="a file of `cute-kernels bench --out`"
            )
        return [Row(**{name: _value(kind, line[name]) for name, kind in _COLUMNS.items()}) for line in reader]  # type: ignore[arg-type]


def _value(kind: str, text: str) -> object:
    if kind == "str":
        return text
    if not text:
        return None
    return int(text) if kind.startswith("int") else float(text)


def limit(rows: list[Row]) -> float:
    """Bytes per second that the elementwise add of this run reached."""
    for row in rows:
        if row.operation == MACHINE and row.terabytes_per_second:
            return row.terabytes_per_second * 1e12
    raise InvalidArgument("results", "no row of the machine's limit", "one, as `cute-kernels bench` writes it first")
