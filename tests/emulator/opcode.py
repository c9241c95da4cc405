"""Runs one PTX instruction on hand-picked operands: the harness of the conformance tests."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from ptx_emulator import Memory, run_ptx

_LOAD = {16: "u16", 32: "b32", 64: "b64"}
_DTYPE = {1: np.uint32, 16: np.uint16, 32: np.uint32, 64: np.uint64}
_PREFIX = {1: "%p", 16: "%h", 32: "%r", 64: "%l"}


def execute(text: str, inputs: Sequence[Sequence[int]], *, approximation: str = "nearest") -> list[int]:
    """Results of `text`, one thread per row of `inputs`.

    Operands stand in the text as `d32` (destination of 32 bits) and `a32`, `b64`, `c16`, `e1`, ...: letter and width in bits, 1 for a
    predicate; letters a, b, c, e in the order of the inputs. A second destination is `q1`, `q32`.
    """
    rows = len(inputs)
    used = sorted(set(re.findall(r"(?<![.\w])([a-e]|q)(1|16|32|64)\b", text)))
    widths = {letter: int(width) for letter, width in used}
    body = re.sub(r"(?<![.\w])([a-e]|q)(1|16|32|64)\b", lambda m: f"{_PREFIX[int(m[2])]}{'abcdeq'.index(m[1])}", text)
    sources = [letter for letter in "abce" if letter in widths]
    memory = Memory()
    arrays, parameters, lines = [], [], []
    for position, letter in enumerate(sources):
        width = widths[letter]
        raw = [int(row[position]) % (1 << width if width > 1 else 1 << 32) for row in inputs]
        arrays.append(np.array(raw, _DTYPE[width]))
        parameters.append(memory.add_array(letter, arrays[-1]))
        size = arrays[-1].itemsize
        lines += [f"ld.param.b64 %l9, [p{position}];", f"mul.wide.u32 %l8, %r9, {size};", "add.s64 %l9, %l9, %l8;"]
        register = f"{_PREFIX[width]}{'abcdeq'.index(letter)}"
        if width == 1:
            lines += ["ld.global.b32 %r8, [%l9];", f"setp.ne.u32 {register}, %r8, 0;"]
        else:
            lines.append(f"ld.global.{_LOAD[width]} {register}, [%l9];")
    lines.append(body)
    outputs = []
    for letter in ("d", "q"):
        if letter not in widths:
            continue
        width = widths[letter]
        result = np.zeros(rows, _DTYPE[width])
        outputs.append(result)
        register = f"{_PREFIX[width]}{'abcdeq'.index(letter)}"
        lines += [f"ld.param.b64 %l9, [p{len(parameters)}];", f"mul.wide.u32 %l8, %r9, {result.itemsize};", "add.s64 %l9, %l9, %l8;"]
        if width == 1:
            lines += [f"selp.u32 %r8, 1, 0, {register};", "st.global.b32 [%l9], %r8;"]
        else:
            lines.append(f"st.global.{_LOAD[width]} [%l9], {register};")
        parameters.append(memory.add_array("out" + letter, result))
    declared = ", ".join(f".param .u64 p{i}" for i in range(len(parameters)))
    newline = "\n    "
    source = f"""
.version 9.0
.target sm_100a
.address_size 64
.visible .entry k({declared})
{{
    .reg .pred %p<10>;
    .reg .b16 %h<10>;
    .reg .b32 %r<10>;
    .reg .b64 %l<10>;
    mov.u32 %r9, %tid.x;
    {newline.join(lines)}
    ret;
}}
"""
    run_ptx(source, 1, rows, parameters, memory, approximation=approximation)
    if len(outputs) == 2:
        return [tuple(int(o[i]) for o in outputs) for i in range(rows)]  # type: ignore[misc]
    return [int(v) for v in outputs[0]]


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
