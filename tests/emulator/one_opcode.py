"""Runs one PTX instruction on hand-picked operands: the harness of the conformance tests."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ptx_emulator import Memory, run_ptx

_LOAD = {16: "u16", 32: "b32", 64: "b64"}
_DTYPE = {1: np.uint32, 16: np.uint16, 32: np.uint32, 64: np.uint64}
_PREFIX = {1: "%p", 16: "%h", 32: "%r", 64: "%l"}


@dataclass(frozen=True)
class Harness:
    """PTX around one instruction text: widths in bits of its inputs and results, in the order of the kernel's parameters."""

    source: str
    inputs: tuple[int, ...]
    results: tuple[int, ...]

    def arrays(self, rows: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """The input arrays for rows of operands."""
        return [
            np.array([int(row[i]) % (1 << max(width, 32 if width == 1 else width)) for row in rows], _DTYPE[width])
            for i, width in enumerate(self.inputs)
        ]

    def outputs(self, count: int) -> list[np.ndarray]:
        return [np.zeros(count, _DTYPE[width]) for width in self.results]


def harness(text: str, *, target: str = "sm_100a", version: str = "9.0") -> Harness:
    """One thread per row of operands executes `text`.

    Operands stand in the text as `d32` (destination of 32 bits) and `a32`, `b64`, `c16`, `e1`, ...: letter and width in bits, 1 for a
    predicate; letters a, b, c, e in the order of the inputs. A second destination is `q1`, `q32`.
    """
    operand = re.compile(r"(?<![.\w])([a-e]|q)(1|16|32|64)\b")
    widths = {letter: int(width) for letter, width in operand.findall(text)}
    body = operand.sub(lambda m: f"{_PREFIX[int(m[2])]}{'abcdeq'.index(m[1])}", text)
    lines: list[str] = []
    places = [letter for letter in "abcedq" if letter in widths]
    for position, letter in enumerate(places):
        width = widths[letter]
        register, size = f"{_PREFIX[width]}{'abcdeq'.index(letter)}", np.dtype(_DTYPE[width]).itemsize
        if letter == "d" or (letter == "q" and "d" not in widths):
            lines.append(body)
        lines += [f"ld.param.b64 %l9, [p{position}];", f"mul.wide.u32 %l8, %r9, {size};", "add.s64 %l9, %l9, %l8;"]
        if letter in "dq" and width == 1:
            lines += [f"selp.u32 %r8, 1, 0, {register};", "st.global.b32 [%l9], %r8;"]
        elif letter in "dq":
            lines.append(f"st.global.{_LOAD[width]} [%l9], {register};")
        elif width == 1:
            lines += ["ld.global.b32 %r8, [%l9];", f"setp.ne.u32 {register}, %r8, 0;"]
        else:
            lines.append(f"ld.global.{_LOAD[width]} {register}, [%l9];")
    declared = ", ".join(f".param .u64 p{i}" for i in range(len(places)))
    newline = "\n    "
    source = f"""
.version {version}
.target {target}
.address_size 64
.visible .entry k({declared})
{{
    .reg .pred %p<10>;
    .reg .b16 %h<10>;
    .reg .b32 %r<10>;
    .reg .b64 %l<10>;
    mov.u32 %r9, %ctaid.x;
    mov.u32 %r8, %tid.x;
    mad.lo.u32 %r9, %r9, 64, %r8;
    {newline.join(lines)}
    ret;
}}
"""
    inputs = tuple(widths[letter] for letter in places if letter not in "dq")
    return Harness(source, inputs, tuple(widths[letter] for letter in places if letter in "dq"))


def execute(text: str, inputs: Sequence[Sequence[int]], *, approximation: str = "nearest") -> list[int]:
    """Results of `text` (see `harness`), one per row of `inputs`; pairs where it has two destinations."""
    made = harness(text)
    rows = [*inputs, *[inputs[-1]] * (-len(inputs) % 64)]
    outputs = emulate(made, made.arrays(rows), approximation=approximation)
    if len(outputs) == 2:
        return [(int(a), int(b)) for a, b in zip(*outputs, strict=True)][: len(inputs)]  # type: ignore[misc]
    return [int(v) for v in outputs[0][: len(inputs)]]


def emulate(made: Harness, arrays: Sequence[np.ndarray], *, approximation: str = "nearest") -> list[np.ndarray]:
    """The results of a harness for input arrays whose length is a multiple of 64."""
    count = len(arrays[0])
    memory, results = Memory(), made.outputs(count)
    parameters = [memory.add_array(f"parameter {i}", array) for i, array in enumerate([*arrays, *results])]
    run_ptx(made.source, count // 64, 64, parameters, memory, approximation=approximation)
    return results


def f32(value: float) -> int:
    """Bits of a float32."""
    return int(np.array([value], np.float32).view(np.uint32)[0])


def check(text: str, table: Sequence[tuple[int, ...]], **options: str) -> None:
    """Each row of `table` is (operands..., expected)."""
    got = execute(text, [row[:-1] for row in table], **options)
    for row, value in zip(table, got, strict=True):
        want = row[-1]
        assert value == want, f"{text} of {[hex(v) for v in row[:-1]]}: {_show(value)}, expected {_show(want)}"


def _show(value: object) -> str:
    return str(tuple(map(hex, value))) if isinstance(value, tuple) else hex(value)  # type: ignore[arg-type]
