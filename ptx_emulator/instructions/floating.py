"""Floating-point arithmetic: f32, packed f32x2, f64, bf16 and f16, and the approximate functions.

Approximate functions give the correctly rounded result, or either end of the error interval documented in the PTX ISA, as the
launch asks (`Launch.approximation`).
"""

from __future__ import annotations

import numpy as np

from ptx_emulator import numerics as num
from ptx_emulator import parser as ptx
from ptx_emulator.fragment import Fragment
from ptx_emulator.instructions.forms import ROUNDINGS, Function, Modifiers, elementwise
from ptx_emulator.instructions.integer import add_sub, integer_div, integer_min_max, integer_sign, is_float, mad, mul
from ptx_emulator.program import Build, Step, opcode

F32, F64, U16, U32, U64 = np.float32, np.float64, np.uint16, np.uint32, np.uint64
_SMALL = {"bf16": num.BF16, "bf16x2": num.BF16, "f16": num.F16, "f16x2": num.F16}

# Documented maximum relative errors (PTX ISA, instruction descriptions). lg2, sin and cos: absolute, near where it matters.
ERRORS = {
    "rcp": 2.0**-23,
    "sqrt": 2.0**-23,
    "rsqrt": 2.0**-22.9,
    "ex2": 2.0**-22,
    "tanh": 2.0**-11,
    "div": 2.0**-22,
    "lg2": 2.0**-22,
    "sin": 2.0**-20.9,
    "cos": 2.0**-20.9,
}
_ABSOLUTE = ("lg2", "sin", "cos")


def _arithmetic(m: Modifiers, operation: str, mode: str) -> Function:
    """float32 arrays → float32 array."""
    if operation == "fma":
        if mode == "rn":
            return num.fma
        return lambda a, b, c: num.to_f32(num.signed_sum(a.astype(F64) * b.astype(F64), c.astype(F64), mode), mode)
    if mode == "rn":
        return {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}[operation]
    if operation == "add":
        return lambda a, b: num.to_f32(num.signed_sum(a.astype(F64), b.astype(F64), mode), mode)
    if operation == "sub":
        return lambda a, b: num.to_f32(num.signed_sum(a.astype(F64), -b.astype(F64), mode), mode)
    if operation == "mul":
        return lambda a, b: num.to_f32(a.astype(F64) * b.astype(F64), mode)
    raise m.unsupported(f"rounding .{mode}")


def _f32(m: Modifiers, operation: str, mode: str, ftz: str, sat: str) -> Function:
    """float32 views → canonical f32 bits, with .ftz and .sat applied."""
    inner = _arithmetic(m, operation, mode)

    def run(*sources: np.ndarray) -> np.ndarray:
        if ftz:
            sources = tuple(num.flush(s.view(U32)).view(F32) for s in sources)
        bits = np.ascontiguousarray(inner(*sources)).view(U32)
        if ftz:
            bits = num.flush(bits)
        return num.saturate(bits) if sat else num.canonical(bits)

    return run


def _packed(function: Function) -> Function:
    """The same on both halves of 64-bit registers."""

    def run(*sources: np.ndarray) -> np.ndarray:
        halves = [np.ascontiguousarray(s).view(F32).reshape(-1, 2) for s in sources]
        return np.ascontiguousarray(function(*halves)).view(U64).reshape(-1)

    return run


def _mixed(kind: str, function: Function) -> Function:
    """float32 arithmetic on operands of which all but the last are bf16 or f16; float32 holds these exactly."""

    def run(*sources: np.ndarray) -> np.ndarray:
        *small, last = sources
        return function(*(num.decode(codes, _SMALL[kind]).astype(F32) for codes in small), last)

    return run


def _small(kind: str, operation: str, sat: str, relu: str) -> Function:
    """bf16 and f16 arithmetic: exact in float64 or rounded to odd there, then rounded once."""
    fmt = _SMALL[kind]

    def one(*codes: np.ndarray) -> np.ndarray:
        values = [num.decode(c, fmt) for c in codes]
        if operation == "fma":
            exact = num.exact_sum(values[0] * values[1], values[2])
        elif operation == "mul":
            exact = values[0] * values[1]
        else:
            exact = num.exact_sum(values[0], values[1] if operation == "add" else -values[1])
        if relu:
            exact = np.where(exact > 0, exact, np.where(np.isnan(exact), exact, 0.0))
        if sat:
            exact = np.where(exact > 0, np.minimum(exact, 1.0), 0.0)
        return num.encode(exact, fmt).astype(U16)

    return _by_halves(one) if kind.endswith("x2") else one


def _by_halves(one: Function) -> Function:
    def run(*codes: np.ndarray) -> np.ndarray:
        low = one(*((c & U32(0xFFFF)).astype(U16) for c in codes)).astype(U32)
        high = one(*((c >> U32(16)).astype(U16) for c in codes)).astype(U32)
        return low | (high << U32(16))

    return run


def _float_operation(build: Build, ins: ptx.Instruction, operation: str) -> Step:
    m = Modifiers(ins)
    mode = m.take(*ROUNDINGS) or "rn"
    ftz, sat, relu, kinds = m.take("ftz"), m.take("sat"), m.take("relu"), m.types()
    count = 3 if operation == "fma" else 2
    m.finish(count + 1)
    if len(kinds) == 2 and kinds[0] == "f32" and kinds[1] in ("bf16", "f16") and operation != "mul" and not (ftz or relu):
        return elementwise(build, ins, ["b16"] * (count - 1) + ["f32"], "f32", _mixed(kinds[1], _f32(m, operation, mode, "", sat)))
    if len(kinds) != 1:
        raise m.unsupported("type expected")
    kind = kinds[0]
    if relu and kind not in _SMALL:
        raise m.unsupported()
    if kind == "f32":
        return elementwise(build, ins, [kind] * count, kind, _f32(m, operation, mode, ftz, sat))
    if kind == "f32x2":
        if sat:
            raise m.unsupported()
        return elementwise(build, ins, ["b64"] * count, "b64", _packed(_f32(m, operation, mode, ftz, "")))
    if kind == "f64" and mode == "rn" and operation != "fma" and not (ftz or sat):
        return elementwise(build, ins, [kind] * 2, kind, {"add": np.add, "sub": np.subtract, "mul": np.multiply}[operation])
    if kind in _SMALL and mode == "rn" and not ftz:
        width = "b32" if kind.endswith("x2") else "b16"
        return elementwise(build, ins, [width] * count, width, _small(kind, operation, sat, relu))
    raise m.unsupported()


def _kind(ins: ptx.Instruction) -> str:
    return ins.modifiers[-1] if ins.modifiers else ""


@opcode("add")
def _add(build: Build, ins: ptx.Instruction) -> Step:
    return _float_operation(build, ins, "add") if is_float(_kind(ins)) else add_sub(build, ins, np.add)


@opcode("sub")
def _sub(build: Build, ins: ptx.Instruction) -> Step:
    return _float_operation(build, ins, "sub") if is_float(_kind(ins)) else add_sub(build, ins, np.subtract)


@opcode("mul")
def _mul(build: Build, ins: ptx.Instruction) -> Step:
    return _float_operation(build, ins, "mul") if is_float(_kind(ins)) else mul(build, ins)


@opcode("fma")
def _fma(build: Build, ins: ptx.Instruction) -> Step:
    return _float_operation(build, ins, "fma")


@opcode("mad")
def _mad(build: Build, ins: ptx.Instruction) -> Step:
    return _float_operation(build, ins, "fma") if is_float(_kind(ins)) else mad(build, ins)


# ---- sign, minimum, maximum


@opcode("neg", "abs")
def _sign(build: Build, ins: ptx.Instruction) -> Step:
    kind, negate = _kind(ins), ins.base == "neg"
    if not is_float(kind):
        return integer_sign(build, ins, np.negative if negate else np.abs)
    m = Modifiers(ins)
    ftz = m.take("ftz")
    m.types()
    m.finish(2)
    width = ptx.WIDTHS[kind]
    top = 1 << 31 | 1 << 63 if kind == "f32x2" else 1 << 15 | 1 << 31 if kind.endswith("x2") else 1 << (width - 1)
    if ftz and kind != "f32":
        raise m.unsupported()
    mask = np.dtype(f"u{width // 8}").type(top)

    def change(a: np.ndarray) -> np.ndarray:
        bits = num.flush(a) if ftz else a
        bits = bits ^ mask if negate else bits & ~mask
        return num.canonical(bits) if kind == "f32" else bits

    return elementwise(build, ins, [f"b{width}"], f"b{width}", change)


def _extreme(pick_left: Function, keep_nan: str, magnitude: str) -> Function:
    """minimum or maximum of float views: -0 < +0; NaN loses unless `.NaN`."""

    def run(*values: np.ndarray) -> np.ndarray:
        result = values[0]
        for other in values[1:]:
            a, b = np.broadcast_arrays(result, other)
            x, y = (np.abs(a), np.abs(b)) if magnitude else (a, b)
            tie = (x == y) & (np.signbit(x) != np.signbit(y))
            left = np.where(tie, np.signbit(x) == (pick_left is np.less), pick_left(x, y))
            nan_a, nan_b = np.isnan(a), np.isnan(b)
            value = np.where(left | nan_b, x, y)
            value = np.where(nan_a, np.where(nan_b, a.dtype.type(np.nan), y), value)
            if keep_nan:
                value = np.where(nan_a | nan_b, a.dtype.type(np.nan), value)
            if magnitude:
                value = np.where(np.signbit(a) != np.signbit(b), -value, value)
            result = value
        return result

    return run


@opcode("min", "max")
def _min_max(build: Build, ins: ptx.Instruction) -> Step:
    kind = _kind(ins)
    least = ins.base == "min"
    if not is_float(kind):
        return integer_min_max(build, ins, np.minimum if least else np.maximum)
    m = Modifiers(ins)
    ftz, nan, sign = m.take("ftz"), m.take("NaN"), m.take("xorsign")
    if sign and not m.take("abs"):
        raise m.unsupported()
    absolute = "" if sign else m.take("abs")
    if absolute:
        raise m.unsupported()
    m.types()
    m.finish((3, 4) if kind == "f32" and not sign else 3)
    count = len(ins.operands) - 1
    extreme = _extreme(np.less if least else np.greater, nan, sign)
    if kind == "f64":
        if ftz or nan or sign:
            raise m.unsupported()
        return elementwise(build, ins, [kind] * count, kind, extreme)
    if kind == "f32":

        def run(*values: np.ndarray) -> np.ndarray:
            if ftz:
                values = tuple(num.flush(v.view(U32)).view(F32) for v in values)
            return num.canonical(np.ascontiguousarray(extreme(*values)).view(U32))

        return elementwise(build, ins, [kind] * count, kind, run)
    if kind in _SMALL and not ftz:
        fmt = _SMALL[kind]

        def one(*codes: np.ndarray) -> np.ndarray:
            return num.encode(extreme(*(num.decode(c, fmt) for c in codes)), fmt).astype(U16)

        width = "b32" if kind.endswith("x2") else "b16"
        return elementwise(build, ins, [width] * count, width, _by_halves(one) if kind.endswith("x2") else one)
    raise m.unsupported()


@opcode("copysign")
def _copysign(build: Build, ins: ptx.Instruction) -> Step:
    Modifiers(ins).only_type(3, ("f32",))
    sign = U32(1 << 31)
    return elementwise(build, ins, ["b32", "b32"], "b32", lambda a, b: (a & sign) | (b & ~sign))


@opcode("testp")
def _testp(build: Build, ins: ptx.Instruction) -> Step:
    m = Modifiers(ins)
    test, kind = m.take("finite", "infinite", "number", "notanumber", "normal", "subnormal"), m.type()
    m.finish(2)
    if kind != "f32" or not test:
        raise m.unsupported()
    d, s = build.destination(ins.operands[0], "pred", ins), build.source(ins.operands[1], kind, ins)

    def run(f: Fragment) -> None:
        bits = f.regs[s] & U32(0x7FFFFFFF)
        inf = U32(0x7F800000)
        f.regs[d] = {
            "finite": lambda: bits < inf,
            "infinite": lambda: bits == inf,
            "number": lambda: bits <= inf,
            "notanumber": lambda: bits > inf,
            "normal": lambda: (bits < inf) & (bits >= U32(0x00800000)),
            "subnormal": lambda: (bits < U32(0x00800000)) & (bits > 0),
        }[test]()

    return run


# ---- division, roots, transcendental functions


def _exp2(a: np.ndarray) -> np.ndarray:
    return np.exp2(a)


_FUNCTIONS: dict[str, Function] = {
    "rcp": lambda a: 1.0 / a,
    "sqrt": np.sqrt,
    "rsqrt": lambda a: 1.0 / np.sqrt(a),
    "ex2": _exp2,
    "lg2": np.log2,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
}


def interval_end(exact: np.ndarray, error: float, absolute: bool, end: str) -> np.ndarray:
    """float64 result → float32: nearest, or the lowest or highest value the documented error allows."""
    if end == "nearest":
        return exact.astype(F32)
    slack = np.where(np.isfinite(exact), error if absolute else np.abs(exact) * error, 0.0)
    moved = num.to_f32(exact - slack, "rm") if end == "low" else num.to_f32(exact + slack, "rp")
    if absolute:
        return moved
    # Zeros and infinities keep their value and sign.
    return np.where((exact == 0) | ~np.isfinite(exact), exact.astype(F32), moved)


def _approximate(build: Build, ins: ptx.Instruction, operation: str) -> Step:
    m = Modifiers(ins)
    approximate, mode, ftz, kind = m.take("approx"), m.take(*ROUNDINGS), m.take("ftz"), m.type()
    m.finish(2)
    if kind != "f32" or bool(approximate) == bool(mode) or (mode and operation not in ("rcp", "sqrt")):
        raise m.unsupported()
    d, s = build.destination(ins.operands[0], kind, ins), build.source(ins.operands[1], kind, ins)
    function = _FUNCTIONS[operation]
    error, absolute = ERRORS[operation], operation in _ABSOLUTE
    # The approximate functions treat subnormals as the PTX ISA says: rsqrt, ex2, lg2 and rcp support them unless .ftz.

    def run(f: Fragment) -> None:
        bits = f.regs[s]
        if ftz:
            bits = num.flush(bits)
        exact = function(bits.view(F32).astype(F64))
        if mode:
            value = num.to_f32(exact, mode) if mode == "rn" else _directed(operation, bits.view(F32), exact, mode)
        else:
            value = interval_end(exact, error, absolute, f.machine.launch.approximation)
        out = num.canonical(np.ascontiguousarray(value).view(U32))
        f.regs[d] = num.flush(out) if ftz else out

    return run


def _directed(operation: str, a: np.ndarray, nearest: np.ndarray, mode: str) -> np.ndarray:
    """Directed rounding of 1/a or sqrt(a): the sign of the float64 residual decides on which side the exact value lies."""
    x = a.astype(F64)
    product = nearest.astype(F32).astype(F64)
    residual = np.where(operation == "rcp", 1.0 - product * x, x - product * product)
    residual = np.where(operation == "rcp", residual * np.sign(x), residual)
    tiny = np.nextafter(product, np.where(residual > 0, np.inf, -np.inf))
    return num.to_f32(np.where((residual == 0) | ~np.isfinite(residual), product, tiny), mode)


for _name in ("rcp", "sqrt", "rsqrt", "ex2", "lg2", "sin", "cos", "tanh"):
    opcode(_name)(lambda build, ins, _name=_name: _approximate(build, ins, _name))


@opcode("div")
def _div(build: Build, ins: ptx.Instruction) -> Step:
    kind = _kind(ins)
    if not is_float(kind):
        return integer_div(build, ins)
    m = Modifiers(ins)
    approximate, mode, ftz, _ = m.take("approx", "full"), m.take(*ROUNDINGS), m.take("ftz"), m.types()
    m.finish(3)
    if kind == "f64" and mode == "rn":
        return elementwise(build, ins, [kind] * 2, kind, np.divide)
    if kind != "f32" or (mode and mode != "rn") or not (approximate or mode):
        raise m.unsupported()
    d, a, b = build.destination(ins.operands[0], kind, ins), *(build.source(o, kind, ins) for o in ins.operands[1:])

    def run(f: Fragment) -> None:
        x, y = f.regs[a], f.regs[b]
        if ftz:
            x, y = num.flush(x), num.flush(y)
        if approximate:
            exact = x.view(F32).astype(F64) / y.view(F32).astype(F64)
            if approximate == "approx":  # a * (1 / b), whose reciprocal is flushed for 2^126 < |b|: 0, and NaN for infinite a
                flushed = (np.abs(y.view(F32)) > F32(2.0**126)) & np.isfinite(y.view(F32))
                exact = np.where(flushed, exact * 0.0, exact)
            value = interval_end(exact, ERRORS["div"], False, f.machine.launch.approximation)
        else:
            value = x.view(F32) / y.view(F32)
        out = num.canonical(np.ascontiguousarray(value).view(U32))
        f.regs[d] = num.flush(out) if ftz else out

    return run
