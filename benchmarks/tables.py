"""CSV files of rows that are dataclasses: one column a field, of type str, int or float, the latter two empty where they may be None."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from cute_kernels.errors import InvalidArgument

Row = TypeVar("Row")


def columns(row_type: type) -> dict[str, str]:
    """Field names and types, as written in the source."""
    return {field.name: str(field.type) for field in dataclasses.fields(row_type)}


def write(row_type: type[Row], rows: Iterable[Row], path: Path, number: Callable[[str, float], str]) -> None:
    """number(column, value): the text of a float."""

    def text(column: str, value: object) -> str:
        return number(column, value) if isinstance(value, float) else "" if value is None else str(value)

    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns(row_type))
        writer.writerows([text(name, getattr(row, name)) for name in columns(row_type)] for row in rows)


def read(row_type: type[Row], path: Path, source: str) -> list[Row]:
    """The rows that `write` wrote; `InvalidArgument` where the columns are others. source: the command that writes such files."""
    kinds = columns(row_type)
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if list(reader.fieldnames or ()) != list(kinds):
            raise InvalidArgument(str(path), f"columns {reader.fieldnames}", ", ".join(kinds), hint=f"a file of `{source}`")
        return [row_type(**{name: _value(kind, line[name]) for name, kind in kinds.items()}) for line in reader]


def _value(kind: str, text: str) -> Any:
    if kind == "str":
        return text
    if not text and kind.endswith("| None"):
        return None
    return int(text) if kind.startswith("int") else float(text)
