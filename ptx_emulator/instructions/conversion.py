"""`cvt`: between integers and floats of every size, and to and from packed small formats."""

from __future__ import annotations

import numpy as np

from ptx_emulator import numerics as num
from ptx_emulator import parser as ptx
from ptx_emulator.fragment import Fragment
from ptx_emulator.instructions.forms import ROUNDINGS, Modifiers
from ptx_emulator.program import STORAGE, Build, Step, opcode

F32, F64, U16, U32, U64 = np.float32, np.float64, np.uint16, np.uint32, np.uint64
_INTEGERS = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")
_FLOATS = ("f16", "bf16", "f32", "f64")
_FORMATS = {"f16": num.F16, "bf16": num.BF16, "e4m3x2": num.E4M3, "e5m2x2": num.E5M2}
_TO_INT = ("rni", "rzi", "rmi", "rpi")


def _read_integer(bits: np.ndarray, kind: str) -> np.ndarray:
    """Register bits → the integer type, low bits taken."""
    width = ptx.WIDTHS[kind] // 8
    return bits.astype(f"u{width}").view(f"{'i' if kind[0] == 's' else 'u'}{width}")


def _write_integer(value: np.ndarray, store: np.dtype) -> np.ndarray:
    """An integer → register bits, extended by its own sign."""
    if value.dtype.kind == "i":
        return value.astype(f"i{store.itemsize}").view(store)
    return value.astype(store)


def _read_float(bits: np.ndarray, kind: str) -> np.ndarray:
    """Register bits → float32 or float64 values, exact."""
    if kind == "f32":
        return bits.astype(U32, copy=False).view(F32)
    if kind == "f64":
        return bits.view(F64)
    return num.decode(bits.astype(U16), _FORMATS[kind])


@opcode("cvt")
def _cvt(build: Build, ins: ptx.Instruction) -> Step:
    m = Modifiers(ins)
    kinds = m.types()
    if len(kinds) != 2:
        raise m.unsupported("two types expected")
    to, source = kinds
    if to in _INTEGERS and source in _INTEGERS:
        return _int_to_int(build, ins, m, to, source)
    if to in _INTEGERS and source in _FLOATS:
        return _float_to_int(build, ins, m, to, source)
    if to in _FLOATS and source in _INTEGERS:
        return _int_to_float(build, ins, m, to, source)
    if to in _FLOATS and source in _FLOATS:
        return _float_to_float(build, ins, m, to, source)
    if to in ("bf16x2", "f16x2") and source == "f32":
        return _pack_halves(build, ins, m, to)
    if to in ("e4m3x2", "e5m2x2") and source in ("f32", "f16x2", "bf16x2"):
        return _pack_bytes(build, ins, m, to, source)
    if to in ("f16x2", "bf16x2") and source in ("e4m3x2", "e5m2x2"):
        return _unpack_bytes(build, ins, m, to, source)
    if to == "ue8m0x2" and source in ("f32", "bf16x2"):
        return _pack_scales(build, ins, m, source)
    if to == "bf16x2" and source == "ue8m0x2":
        return _unpack_scales(build, ins, m)
    raise m.unsupported(f"conversion from .{source} to .{to}")


def _one(build: Build, ins: ptx.Instruction, to: str, source: str) -> tuple[int, int, np.dtype]:
    """Destination slot, source slot and storage type; registers may be wider than the types."""
    target = ins.operands[0]
    d = build.destination(target, to, ins)
    s = build.source(ins.operands[1], source, ins)
    return d, s, np.dtype(STORAGE[build.width(d)])


def _int_to_int(build: Build, ins: ptx.Instruction, m: Modifiers, to: str, source: str) -> Step:
    sat = m.take("sat")
    m.finish(2)
    d, s, store = _one(build, ins, to, source)
    width = ptx.WIDTHS[to] // 8
    target = np.dtype(f"{'i' if to[0] == 's' else 'u'}{width}")
    low, high = int(np.iinfo(target).min), int(np.iinfo(target).max)

    def run(f: Fragment) -> None:
        value = _read_integer(f.regs[s], source)
        if sat:
            info = np.iinfo(value.dtype)
            value = np.clip(value, value.dtype.type(max(low, int(info.min))), value.dtype.type(min(high, int(info.max))))
        f.regs[d] = _write_integer(value.astype(target), store)

    return run


def _float_to_int(build: Build, ins: ptx.Instruction, m: Modifiers, to: str, source: str) -> Step:
    mode, ftz, sat = m.take(*_TO_INT), m.take("ftz"), m.take("sat")
    m.finish(2)
    if not mode or (ftz and source != "f32"):
        raise m.unsupported()
    d, s, store = _one(build, ins, to, source)
    bits, signed = ptx.WIDTHS[to], to[0] == "s"
    # Out-of-range values clamp with and without .sat (PTX ISA: float to integer saturates by default).
    del sat

    def run(f: Fragment) -> None:
        raw = f.regs[s]
        if ftz:
            raw = num.flush(raw)
        value = num.float_to_int(_read_float(raw, source).astype(F64), mode, bits, signed, double=source == "f64")
        narrow = value.astype(f"u{bits // 8}")
        f.regs[d] = _write_integer(narrow.view(f"i{bits // 8}") if signed else narrow, store)

    return run


def _int_to_float(build: Build, ins: ptx.Instruction, m: Modifiers, to: str, source: str) -> Step:
    mode, sat = m.take(*ROUNDINGS), m.take("sat")
    m.finish(2)
    if mode != "rn" or sat:
        raise m.unsupported(f"rounding .{mode}")
    d, s, store = _one(build, ins, to, source)

    def run(f: Fragment) -> None:
        value = _read_integer(f.regs[s], source)
        if to == "f32":
            result = value.astype(F32).view(U32)
        elif to == "f64":
            result = value.astype(F64).view(U64)
        else:
            exact = value.astype(F64)
            if value.dtype.itemsize == 8:  # keep what float64 cannot hold as the odd bit
                negative = value < 0
                size = np.where(negative, ~value.view(U64) + U64(1), value.view(U64))
                low = size & U64(0x7FF)
                exact = num.round_to_odd((size - low).astype(F64), low.astype(F64))
                exact = np.where(negative, -exact, exact)
            result = num.encode(exact, _FORMATS[to]).astype(U16)
        f.regs[d] = result.astype(store, copy=False)

    return run


def _float_to_float(build: Build, ins: ptx.Instruction, m: Modifiers, to: str, source: str) -> Step:
    whole = m.take(*_TO_INT)
    mode, ftz, sat, relu, finite = m.take(*ROUNDINGS), m.take("ftz"), m.take("sat"), m.take("relu"), m.take("satfinite")
    m.finish(2)
    narrowing = ptx.WIDTHS[to] < ptx.WIDTHS[source]
    if (narrowing and not mode) or (whole and to != source) or (finite and not narrowing) or (relu and to not in ("f16", "bf16")):
        raise m.unsupported()
    if to in ("f16", "bf16") and mode not in ("", "rn", "rz"):
        raise m.unsupported(f"rounding .{mode}")
    d, s, store = _one(build, ins, to, source)
    rounding = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}.get(whole)

    def run(f: Fragment) -> None:
        raw = f.regs[s]
        if ftz and source == "f32":
            raw = num.flush(raw)
        value = _read_float(raw, source)
        if rounding is not None:
            value = rounding(value)
        if sat:
            value = np.where(value > 0, np.minimum(value, 1), value.dtype.type(0))
        if to == "f32":
            result = value if value.dtype == F32 else num.to_f32(value, mode or "rn")
            bits = np.ascontiguousarray(result).view(U32)
            if source == "bf16":  # the payload of a NaN stays
                bits = np.where(np.isnan(value), raw.astype(U32) << U32(16), bits)
            elif source != "f64":
                bits = num.canonical(bits)
            bits = num.flush(bits) if ftz else bits
        elif to == "f64":
            bits = value.astype(F64).view(U64)
        elif to == "bf16" and source == "f32" and mode == "rn" and not (relu or finite):
            bits = num.f32_to_bf16(np.ascontiguousarray(value).view(U32))
        else:
            bits = num.encode(value, _FORMATS[to], mode=mode or "rn", saturate_finite=bool(finite), relu=bool(relu))
        f.regs[d] = bits.astype(store, copy=False)

    return run


def _pack_halves(build: Build, ins: ptx.Instruction, m: Modifiers, to: str) -> Step:
    mode, relu, finite = m.take("rn", "rz"), m.take("relu"), m.take("satfinite")
    m.finish(3)
    if not mode:
        raise m.unsupported()
    d = build.destination(ins.operands[0], "b32", ins)
    high, low = (build.source(o, "f32", ins) for o in ins.operands[1:])
    fmt = _FORMATS[to[:-2]]
    quick = to == "bf16x2" and mode == "rn" and not (relu or finite)

    def half(bits: np.ndarray) -> np.ndarray:
        if quick:
            return num.f32_to_bf16(bits)
        return num.encode(bits.view(F32), fmt, mode=mode, saturate_finite=bool(finite), relu=bool(relu))

    def run(f: Fragment) -> None:
        f.regs[d] = (half(f.regs[high]) << U32(16)) | half(f.regs[low])

    return run


def _pack_bytes(build: Build, ins: ptx.Instruction, m: Modifiers, to: str, source: str) -> Step:
    mode, finite, relu = m.take("rn"), m.take("satfinite"), m.take("relu")
    m.finish(3 if source == "f32" else 2)
    if not (mode and finite):
        raise m.unsupported()
    d = build.destination(ins.operands[0], "b16", ins)
    store = np.dtype(STORAGE[build.width(d)])
    slots = [build.source(o, "f32" if source == "f32" else "b32", ins) for o in ins.operands[1:]]
    fmt = _FORMATS[to]

    def code(value: np.ndarray) -> np.ndarray:
        return num.encode(value, fmt, saturate_finite=True, relu=bool(relu))

    def run(f: Fragment) -> None:
        if source == "f32":
            high, low = (f.regs[s].view(F32) for s in slots)
        else:
            both = f.regs[slots[0]]
            high, low = _read_float(both >> U32(16), source[:-2]), _read_float(both & U32(0xFFFF), source[:-2])
        f.regs[d] = ((code(high) << U32(8)) | code(low)).astype(store)

    return run


def _unpack_bytes(build: Build, ins: ptx.Instruction, m: Modifiers, to: str, source: str) -> Step:
    mode, relu = m.take("rn"), m.take("relu")
    m.finish(2)
    if not mode:
        raise m.unsupported()
    d, s = build.destination(ins.operands[0], "b32", ins), build.source(ins.operands[1], "b16", ins)
    fmt, target = _FORMATS[source], _FORMATS[to[:-2]]

    def run(f: Fragment) -> None:
        both = f.regs[s]
        high, low = num.decode((both >> both.dtype.type(8)) & both.dtype.type(0xFF), fmt), num.decode(both & both.dtype.type(0xFF), fmt)
        f.regs[d] = (num.encode(high, target, relu=bool(relu)) << U32(16)) | num.encode(low, target, relu=bool(relu))

    return run


def _pack_scales(build: Build, ins: ptx.Instruction, m: Modifiers, source: str) -> Step:
    mode, finite = m.take("rz", "rp"), m.take("satfinite")
    m.finish(3 if source == "f32" else 2)
    if not (mode and finite):
        raise m.unsupported()
    d = build.destination(ins.operands[0], "b16", ins)
    store = np.dtype(STORAGE[build.width(d)])
    slots = [build.source(o, "f32" if source == "f32" else "b32", ins) for o in ins.operands[1:]]

    def run(f: Fragment) -> None:
        if source == "f32":
            high, low = (f.regs[s].view(F32) for s in slots)
        else:
            both = f.regs[slots[0]]
            high, low = _read_float(both >> U32(16), "bf16"), _read_float(both & U32(0xFFFF), "bf16")
        f.regs[d] = ((num.encode_ue8m0(high, mode) << U32(8)) | num.encode_ue8m0(low, mode)).astype(store)

    return run


def _unpack_scales(build: Build, ins: ptx.Instruction, m: Modifiers) -> Step:
    mode = m.take("rn")
    m.finish(2)
    if not mode:
        raise m.unsupported()
    d, s = build.destination(ins.operands[0], "b32", ins), build.source(ins.operands[1], "b16", ins)

    def run(f: Fragment) -> None:
        both = f.regs[s].astype(U32)
        high, low = num.decode_ue8m0((both >> U32(8)) & U32(0xFF)), num.decode_ue8m0(both & U32(0xFF))
        f.regs[d] = (num.encode(high, num.BF16) << U32(16)) | num.encode(low, num.BF16)

    return run
