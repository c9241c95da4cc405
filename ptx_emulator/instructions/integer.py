"""Integer arithmetic and comparisons."""

from __future__ import annotations

import numpy as np

from ptx_emulator import parser as ptx
from ptx_emulator.fragment import Fragment
from ptx_emulator.instructions.forms import Function, Modifiers, as_type, elementwise
from ptx_emulator.program import NUMPY, Build, Step, opcode

INTEGERS = ("u16", "s16", "u32", "s32", "u64", "s64")
_WIDE = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"}


def is_float(kind: str) -> bool:
    """Whether a PTX type holds floating-point numbers."""
    return kind in ("f32", "f64", "f32x2", "f16", "f16x2", "bf16", "bf16x2")


def saturated(function: Function) -> Function:
    """`.sat.s32`: the exact result clamped to 32 bits."""

    def run(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        exact = function(a.astype(np.int64), b.astype(np.int64))
        return np.clip(exact, -(1 << 31), (1 << 31) - 1).astype(np.int32)

    return run


def add_sub(build: Build, ins: ptx.Instruction, function: Function) -> Step:
    """add or sub on integers; .sat on s32."""
    m = Modifiers(ins)
    kind, sat = m.type(), m.take("sat")
    if kind not in INTEGERS or (sat and kind != "s32"):
        raise m.unsupported()
    m.finish(3)
    return elementwise(build, ins, [kind, kind], kind, saturated(function) if sat else function)


def high_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Upper half of the double-width product."""
    if a.dtype.itemsize < 8:
        wide = np.dtype(f"{a.dtype.kind}{2 * a.dtype.itemsize}")
        return ((a.astype(wide) * b.astype(wide)) >> (8 * a.dtype.itemsize)).astype(a.dtype)
    signed = a.dtype.kind == "i"
    x, y = a.view(np.uint64), b.view(np.uint64)
    low = np.uint64(0xFFFFFFFF)
    s = np.uint64(32)
    x0, x1, y0, y1 = x & low, x >> s, y & low, y >> s
    middle = x1 * y0 + ((x0 * y0) >> s)
    middle2 = x0 * y1 + (middle & low)
    high = x1 * y1 + (middle >> s) + (middle2 >> s)
    if signed:
        high = high - np.where(a < 0, y, np.uint64(0)) - np.where(b < 0, x, np.uint64(0))
    return high.view(a.dtype)


def mul(build: Build, ins: ptx.Instruction) -> Step:
    """mul on integers: .lo, .hi or .wide."""
    m = Modifiers(ins)
    kind, part = m.type(), m.take("lo", "hi", "wide")
    m.finish(3)
    if kind not in INTEGERS:
        raise m.unsupported()
    if part == "lo":
        return elementwise(build, ins, [kind, kind], kind, np.multiply)
    if part == "hi":
        return elementwise(build, ins, [kind, kind], kind, high_product)
    if part == "wide" and kind in _WIDE:
        wide = NUMPY[_WIDE[kind]]
        return elementwise(build, ins, [kind, kind], _WIDE[kind], lambda a, b: a.astype(wide) * b.astype(wide))
    raise m.unsupported()


def mad(build: Build, ins: ptx.Instruction) -> Step:
    """mad on integers: .lo, .hi or .wide."""
    m = Modifiers(ins)
    kind, part = m.type(), m.take("lo", "hi", "wide")
    m.finish(4)
    if kind not in INTEGERS:
        raise m.unsupported()
    if part == "lo":
        return elementwise(build, ins, [kind] * 3, kind, lambda a, b, c: a * b + c)
    if part == "hi":
        return elementwise(build, ins, [kind] * 3, kind, lambda a, b, c: high_product(a, b) + c)
    if part == "wide" and kind in _WIDE:
        wide = NUMPY[_WIDE[kind]]
        return elementwise(build, ins, [kind, kind, _WIDE[kind]], _WIDE[kind], lambda a, b, c: a.astype(wide) * b.astype(wide) + c)
    raise m.unsupported()


@opcode("mul24", "mad24")
def _mul24(build: Build, ins: ptx.Instruction) -> Step:
    raise Modifiers(ins).unsupported("24-bit products are not executed")


def _quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Division toward zero; a zero divisor gives all ones (unspecified by PTX, so chosen to be seen)."""
    zero = b == 0
    safe = np.where(zero, b.dtype.type(1), b)
    if a.dtype.kind == "u":
        quotient = a // safe
    else:
        width = a.dtype.itemsize
        magnitude = _magnitude(a) // _magnitude(safe)
        quotient = np.where((a < 0) != (safe < 0), (~magnitude) + magnitude.dtype.type(1), magnitude).view(f"i{width}")
    return np.where(zero, b.dtype.type(-1) if b.dtype.kind == "i" else ~b.dtype.type(0), quotient)


def _magnitude(a: np.ndarray) -> np.ndarray:
    bits = a.view(f"u{a.dtype.itemsize}")
    return np.where(a < 0, (~bits) + bits.dtype.type(1), bits)


def integer_div(build: Build, ins: ptx.Instruction) -> Step:
    """div on integers."""
    kind = Modifiers(ins).only_type(3, INTEGERS)
    return elementwise(build, ins, [kind, kind], kind, _quotient)


@opcode("rem")
def _rem(build: Build, ins: ptx.Instruction) -> Step:
    kind = Modifiers(ins).only_type(3, INTEGERS)
    return elementwise(build, ins, [kind, kind], kind, lambda a, b: np.where(b == 0, a, a - _quotient(a, b) * b))


def integer_min_max(build: Build, ins: ptx.Instruction, function: Function) -> Step:
    """min or max on integers; .relu on s32."""
    m = Modifiers(ins)
    relu, kind = m.take("relu"), m.type()
    m.finish(3)
    if kind not in INTEGERS or (relu and kind != "s32"):
        raise m.unsupported()
    return elementwise(build, ins, [kind, kind], kind, (lambda a, b: np.maximum(function(a, b), np.int32(0))) if relu else function)


def integer_sign(build: Build, ins: ptx.Instruction, function: Function) -> Step:
    """neg or abs on signed integers."""
    kind = Modifiers(ins).only_type(2, ("s16", "s32", "s64"))
    return elementwise(build, ins, [kind], kind, function)


@opcode("sad")
def _sad(build: Build, ins: ptx.Instruction) -> Step:
    kind = Modifiers(ins).only_type(4, INTEGERS)
    return elementwise(build, ins, [kind] * 3, kind, lambda a, b, c: c + np.where(a < b, b - a, a - b))


# ---- comparisons

_ORDERED = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}
_UNSIGNED = {"lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal}


def _float_compare(name: str) -> Function | None:
    def ordered(function: Function) -> Function:
        # IEEE comparisons of NumPy are false on NaN except for !=.
        return lambda a, b: function(a, b) & ~(np.isnan(a) | np.isnan(b)) if function is np.not_equal else function(a, b)

    if name in _ORDERED:
        return ordered(_ORDERED[name])
    if name in ("equ", "neu", "ltu", "leu", "gtu", "geu"):
        function = _ORDERED[name[:2]]
        return lambda a, b: function(a, b) | np.isnan(a) | np.isnan(b)
    if name == "num":
        return lambda a, b: ~(np.isnan(a) | np.isnan(b))
    if name == "nan":
        return lambda a, b: np.isnan(a) | np.isnan(b)
    return None


COMPARISONS = (*_ORDERED, *_UNSIGNED, "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")


def comparison(m: Modifiers, kind: str, name: str, ftz: str) -> Function:
    """The function (a, b) -> bool of a comparison; refuses what the type does not have."""
    if is_float(kind):
        if kind not in ("f32", "f64"):
            raise m.unsupported(f"comparison of .{kind}")
        function = _float_compare(name)
        if function is None:
            raise m.unsupported()
        if ftz:
            from ptx_emulator.numerics import flush

            inner = function
            function = lambda a, b: inner(flush(a.view(np.uint32)).view(np.float32), flush(b.view(np.uint32)).view(np.float32))  # noqa: E731
        return function
    if name in _UNSIGNED and kind[0] == "u":
        return _UNSIGNED[name]
    if name in _ORDERED and (kind[0] in "us" or name in ("eq", "ne")):
        return _ORDERED[name]
    raise m.unsupported()


@opcode("setp")
def _setp(build: Build, ins: ptx.Instruction) -> Step:
    m = Modifiers(ins)
    name, combine, ftz, kind = m.take(*COMPARISONS), m.take("and", "or", "xor"), m.take("ftz"), m.type()
    m.finish(4 if combine else 3)
    function = comparison(m, kind, name, ftz)
    target = ins.operands[0]
    p = build.destination(target.first if isinstance(target, ptx.Pair) else target, "pred", ins)
    q = build.destination(target.second, "pred", ins) if isinstance(target, ptx.Pair) else None
    a, b = build.source(ins.operands[1], kind, ins), build.source(ins.operands[2], kind, ins)
    c, invert = None, False
    if combine:
        third = ins.operands[3]
        invert = isinstance(third, ptx.Negated)
        c = build.source(third.of if isinstance(third, ptx.Negated) else third, "pred", ins)
    dtype = NUMPY[kind]
    join = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}.get(combine)

    def run(f: Fragment) -> None:
        r = f.regs
        x, y = r[a], r[b]
        if x.dtype.itemsize == dtype.itemsize and y.dtype.itemsize == dtype.itemsize:
            result = function(x.view(dtype), y.view(dtype))
        else:
            result = function(as_type(x, kind), as_type(y, kind))
        opposite = ~result if q is not None else None
        if join is not None and c is not None:
            other = ~r[c] if invert else r[c]
            result = join(result, other)
            opposite = join(opposite, other) if opposite is not None else None
        r[p] = result
        if q is not None:
            r[q] = opposite

    return run


@opcode("set")
def _set(build: Build, ins: ptx.Instruction) -> Step:
    m = Modifiers(ins)
    name, ftz, kinds = m.take(*COMPARISONS), m.take("ftz"), m.types()
    m.finish(3)
    if len(kinds) != 2 or kinds[0] not in ("u32", "s32", "f32"):
        raise m.unsupported()
    function = comparison(m, kinds[1], name, ftz)
    true = np.uint32(0x3F800000 if kinds[0] == "f32" else 0xFFFFFFFF)
    return elementwise(build, ins, [kinds[1]] * 2, kinds[0], lambda a, b: np.where(function(a, b), true, np.uint32(0)))


@opcode("selp")
def _selp(build: Build, ins: ptx.Instruction) -> Step:
    m = Modifiers(ins)
    kind = m.type()
    m.finish(4)
    d = build.destination(ins.operands[0], kind, ins)
    a, b = build.source(ins.operands[1], kind, ins), build.source(ins.operands[2], kind, ins)
    p = build.source(ins.operands[3], "pred", ins)

    def run(f: Fragment) -> None:
        r = f.regs
        r[d] = np.where(r[p], r[a], r[b])

    return run


@opcode("slct")
def _slct(build: Build, ins: ptx.Instruction) -> Step:
    m = Modifiers(ins)
    kinds = m.types()
    m.finish(4)
    if len(kinds) != 2 or kinds[1] != "s32":
        raise m.unsupported()
    return elementwise(build, ins, [kinds[0], kinds[0], "s32"], kinds[0], lambda a, b, c: np.where(c >= 0, a, b))
