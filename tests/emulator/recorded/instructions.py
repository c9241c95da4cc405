"""Instructions whose results on an SM90 GPU are recorded, and the operands they were recorded for."""

from __future__ import annotations

import hashlib
import re

import numpy as np

from tests.emulator import test_opcodes_convert, test_opcodes_float, test_opcodes_integer

# What an SM90 GPU cannot execute, and mov of parts, which the recorded format does not cover.
_NOT_SM90 = re.compile(r"f32x2|ue8m0|\.f32\.b?f16 d32, a16, b|\.f32 d32, a32, b32, c32;(?<=max.f32 d32, a32, b32, c32;)")
_COMPARED = {
    "u32": ("eq", "ne", "lt", "le", "gt", "ge", "lo", "ls", "hi", "hs"),
    "s32": ("lt", "le", "gt", "ge"),
    "s64": ("lt", "ge"),
    "u16": ("lt", "ge"),
    "s16": ("lt", "ge"),
    "f32": ("eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"),
}
_COMPARISONS = [f"setp.{name}.{kind} d1, a{kind[1:]}, b{kind[1:]};" for kind, names in _COMPARED.items() for name in names]

INSTRUCTIONS = [
    text
    for text in (*test_opcodes_integer.TABLE, *test_opcodes_float.TABLE, *test_opcodes_convert.TABLE, *_COMPARISONS)
    if not _NOT_SM90.search(text)
]

_FLOATS = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    2.0,
    0.5,
    3.0,
    448.0,
    464.0,
    465.0,
    65504.0,
    2.0**-126,
    2.0**-149,
    -(2.0**-149),
    1.5 * 2.0**-149,
    3.4e38,
    -3.4e38,
]
_SPECIAL_FLOATS = np.concatenate(
    [np.array(_FLOATS, np.float32).view(np.uint32), np.array([0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC12345, 0x7F800001], np.uint32)]
)
_SPECIAL_INTEGERS = np.array(
    [0, 1, 2, 3, 7, 8, 31, 32, 33, 63, 64, 65, 255, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF], np.uint64
)


def is_approximate(text: str) -> bool:
    """Whether the hardware may deviate within a documented error."""
    return ".approx" in text or "div.full" in text


def operands(text: str, widths: tuple[int, ...], rows: int) -> list[np.ndarray]:
    """Deterministic operands: special values against each other, floats of close exponents, and random bits, a third each."""
    rng = np.random.default_rng(int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little"))
    floats = re.search(r"\.f32 [dq]\d+, |\.f32 d1", text) is not None
    arrays = []
    for position, width in enumerate(widths):
        kind = np.arange(rows) % 3
        bits = rng.integers(0, 1 << 64, rows, dtype=np.uint64)
        special = rng.choice(_SPECIAL_INTEGERS, rows)
        special = np.where(rng.random(rows) < 0.3, ~special + np.uint64(1), special)
        small = rng.integers(0, 70, rows).astype(np.uint64)
        if width == 32 and floats:
            special = rng.choice(_SPECIAL_FLOATS, rows).astype(np.uint64)
            close = (rng.integers(118, 134, rows) << 23 | rng.integers(0, 1 << 23, rows) | rng.integers(0, 2, rows) << 31).astype(np.uint64)
            value = np.choose(kind, [special, close, bits & np.uint64(0xFFFFFFFF)])
        elif width == 16 and re.search(r"bf16 d|f16 d|e4m3|e5m2", text):
            value = bits
        else:
            value = np.choose(kind, [special, small if position else special, bits])
        if text.startswith(("bfe", "bfi")) and position >= 1 + text.startswith("bfi"):
            value = value & np.uint64(0xFF)  # positions and lengths beyond 8 bits are unspecified
        if position == 1 and text.startswith(("div.u", "div.s", "rem.")):
            value = np.where(value & np.uint64((1 << min(width, 63)) - 1) == 0, np.uint64(3), value)  # division by zero is unspecified
        dtype = {1: np.uint32, 16: np.uint16, 32: np.uint32, 64: np.uint64}[width]
        arrays.append((value & np.uint64(1)).astype(dtype) if width == 1 else value.astype(dtype))
    return arrays
