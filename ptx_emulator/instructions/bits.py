"""Bit operations: logic, shifts, fields, counts, permutation."""

from __future__ import annotations

import numpy as np

from ptx_emulator import parser as ptx
from ptx_emulator.fragment import Fragment
from ptx_emulator.instructions.forms import Function, Modifiers, elementwise
from ptx_emulator.program import Build, Step, opcode

U32, U64 = np.uint32, np.uint64
_BITS = ("b16", "b32", "b64")


def _logic(build: Build, ins: ptx.Instruction, function: Function, logical: Function) -> Step:
    m = Modifiers(ins)
    kind = m.type()
    m.finish(3)
    if kind == "pred":
        d = build.destination(ins.operands[0], "pred", ins)
        sources = []
        for operand in ins.operands[1:]:
            negated = isinstance(operand, ptx.Negated)
            sources.append((build.source(operand.of if isinstance(operand, ptx.Negated) else operand, "pred", ins), negated))
        (a, na), (b, nb) = sources

        def run(f: Fragment) -> None:
            r = f.regs
            r[d] = logical(~r[a] if na else r[a], ~r[b] if nb else r[b])

        return run
    if kind not in _BITS:
        raise m.unsupported()
    return elementwise(build, ins, [kind, kind], kind, function)


@opcode("and")
def _and(build: Build, ins: ptx.Instruction) -> Step:
    return _logic(build, ins, np.bitwise_and, np.logical_and)


@opcode("or")
def _or(build: Build, ins: ptx.Instruction) -> Step:
    return _logic(build, ins, np.bitwise_or, np.logical_or)


@opcode("xor")
def _xor(build: Build, ins: ptx.Instruction) -> Step:
    return _logic(build, ins, np.bitwise_xor, np.logical_xor)


@opcode("not")
def _not(build: Build, ins: ptx.Instruction) -> Step:
    kind = Modifiers(ins).only_type(2, (*_BITS, "pred"))
    return elementwise(build, ins, [kind], kind, np.invert)


@opcode("cnot")
def _cnot(build: Build, ins: ptx.Instruction) -> Step:
    kind = Modifiers(ins).only_type(2, _BITS)
    return elementwise(build, ins, [kind], kind, lambda a: (a == 0).astype(a.dtype))


@opcode("shl")
def _shl(build: Build, ins: ptx.Instruction) -> Step:
    kind = Modifiers(ins).only_type(3, _BITS)
    width = ptx.WIDTHS[kind]

    def shift(a: np.ndarray, n: np.ndarray) -> np.ndarray:
        n = np.minimum(n, U32(width))  # shifts past the width give 0
        return np.where(n >= width, a.dtype.type(0), a << (n % U32(width)).astype(a.dtype))

    return elementwise(build, ins, [kind, "u32"], kind, shift)


@opcode("shr")
def _shr(build: Build, ins: ptx.Instruction) -> Step:
    kind = Modifiers(ins).only_type(3, (*_BITS, "u16", "u32", "u64", "s16", "s32", "s64"))
    width = ptx.WIDTHS[kind]

    def shift(a: np.ndarray, n: np.ndarray) -> np.ndarray:
        if a.dtype.kind == "i":  # past the width the sign fills everything
            return a >> np.minimum(n, U32(width - 1)).astype(a.dtype)
        n = np.minimum(n, U32(width))
        return np.where(n >= width, a.dtype.type(0), a >> (n % U32(width)).astype(a.dtype))

    return elementwise(build, ins, [kind, "u32"], kind, shift)


@opcode("shf")
def _shf(build: Build, ins: ptx.Instruction) -> Step:
    m = Modifiers(ins)
    side, mode, kind = m.take("l", "r"), m.take("clamp", "wrap"), m.type()
    m.finish(4)
    if not side or not mode or kind != "b32":
        raise m.unsupported()

    def shift(low: np.ndarray, high: np.ndarray, n: np.ndarray) -> np.ndarray:
        n = (n & U32(31) if mode == "wrap" else np.minimum(n, U32(32))).astype(U64)
        both = high.astype(U64) << U64(32) | low
        if side == "r":
            return (both >> n).astype(U32)
        return ((both << n) >> U64(32)).astype(U32)

    return elementwise(build, ins, ["b32", "b32", "u32"], "b32", shift)


@opcode("bfe")
def _bfe(build: Build, ins: ptx.Instruction) -> Step:
    kind = Modifiers(ins).only_type(4, ("u32", "s32", "u64", "s64"))
    width = ptx.WIDTHS[kind]
    u = np.dtype(f"u{width // 8}")

    def extract(a: np.ndarray, position: np.ndarray, length: np.ndarray) -> np.ndarray:
        bits = a.view(u).astype(U64)
        position, length = (position & U32(0xFF)).astype(np.int64), (length & U32(0xFF)).astype(np.int64)
        # Length 0 gives 0; bits past the top are filled with the sign bit of the field (signed) or 0.
        top = np.minimum(position + length - 1, width - 1)
        shifted = np.where(position >= width, U64(0), bits >> np.minimum(position, 63).astype(U64))
        keep = np.minimum(length, width)
        mask = np.where(keep >= 64, U64(0xFFFFFFFFFFFFFFFF), (U64(1) << np.minimum(keep, 63).astype(U64)) - U64(1))
        value = shifted & mask
        if kind[0] == "s":
            sign = (bits >> np.maximum(top, 0).astype(U64)) & U64(1)
            available = np.maximum(np.minimum(length, width - position), 0)
            fill = ~np.where(available >= 64, U64(0xFFFFFFFFFFFFFFFF), (U64(1) << np.minimum(available, 63).astype(U64)) - U64(1))
            value = np.where((sign == 1) & (length > 0), value | fill, value)
            value = np.where(length == 0, U64(0), value)
        return value.astype(u)

    return elementwise(build, ins, [kind, "u32", "u32"], kind, extract)


@opcode("bfi")
def _bfi(build: Build, ins: ptx.Instruction) -> Step:
    kind = Modifiers(ins).only_type(5, ("b32", "b64"))
    width = ptx.WIDTHS[kind]

    def insert(a: np.ndarray, b: np.ndarray, position: np.ndarray, length: np.ndarray) -> np.ndarray:
        u = a.dtype
        position, length = (position & U32(0xFF)).astype(U64), (length & U32(0xFF)).astype(U64)
        low = np.where(length >= 64, U64(0xFFFFFFFFFFFFFFFF), (U64(1) << np.minimum(length, U64(63))) - U64(1))
        mask = np.where(position >= width, U64(0), low << np.minimum(position, U64(63)))
        moved = np.where(position >= width, U64(0), a.astype(U64) << np.minimum(position, U64(63)))
        return ((b.astype(U64) & ~mask) | (moved & mask)).astype(u)

    return elementwise(build, ins, [kind, kind, "u32", "u32"], kind, insert)


@opcode("bmsk")
def _bmsk(build: Build, ins: ptx.Instruction) -> Step:
    m = Modifiers(ins)
    mode, kind = m.take("clamp", "wrap"), m.type()
    m.finish(3)
    if kind != "b32" or not mode:
        raise m.unsupported()

    def mask(position: np.ndarray, length: np.ndarray) -> np.ndarray:
        if mode == "wrap":
            position, length = position & U32(31), length & U32(31)
        position, length = np.minimum(position, U32(32)).astype(U64), np.minimum(length, U32(32)).astype(U64)
        return ((((U64(1) << length) - U64(1)) << position) & U64(0xFFFFFFFF)).astype(U32)

    return elementwise(build, ins, ["u32", "u32"], "b32", mask)


@opcode("szext")
def _szext(build: Build, ins: ptx.Instruction) -> Step:
    m = Modifiers(ins)
    mode, kind = m.take("clamp", "wrap"), m.type()
    m.finish(3)
    if kind not in ("u32", "s32") or not mode:
        raise m.unsupported()

    def extend(a: np.ndarray, n: np.ndarray) -> np.ndarray:
        n = (n & U32(31) if mode == "wrap" else np.minimum(n, U32(32))).astype(np.int64)
        low = a.view(U32).astype(np.int64) & ((np.int64(1) << n) - 1)
        if kind == "s32":
            sign = (low >> np.maximum(n - 1, 0)) & 1
            low = np.where((n > 0) & (sign == 1), low - (np.int64(1) << n), low)
        return low.astype(U32)

    return elementwise(build, ins, [kind, "u32"], kind, extend)


@opcode("popc")
def _popc(build: Build, ins: ptx.Instruction) -> Step:
    kind = Modifiers(ins).only_type(2, ("b32", "b64"))
    return elementwise(build, ins, [kind], "u32", lambda a: np.bitwise_count(a).astype(U32))


def _leading_zeros(a: np.ndarray) -> np.ndarray:
    width = 8 * a.dtype.itemsize
    smeared = a.copy()
    step = 1
    while step < width:
        smeared |= smeared >> a.dtype.type(step)
        step *= 2
    return (width - np.bitwise_count(smeared).astype(np.int64)).astype(U32)


@opcode("clz")
def _clz(build: Build, ins: ptx.Instruction) -> Step:
    kind = Modifiers(ins).only_type(2, ("b32", "b64"))
    return elementwise(build, ins, [kind], "u32", _leading_zeros)


@opcode("bfind")
def _bfind(build: Build, ins: ptx.Instruction) -> Step:
    m = Modifiers(ins)
    shift, kind = m.take("shiftamt"), m.type()
    m.finish(2)
    if kind not in ("u32", "s32", "u64", "s64"):
        raise m.unsupported()
    width = ptx.WIDTHS[kind]

    def find(a: np.ndarray) -> np.ndarray:
        bits = a.view(f"u{width // 8}")
        if kind[0] == "s":
            bits = np.where(a < 0, ~bits, bits)
        zeros = _leading_zeros(bits)
        position = zeros if shift else U32(width - 1) - zeros
        return np.where(bits == 0, U32(0xFFFFFFFF), position)

    return elementwise(build, ins, [kind], "u32", find)


@opcode("brev")
def _brev(build: Build, ins: ptx.Instruction) -> Step:
    kind = Modifiers(ins).only_type(2, ("b32", "b64"))

    def reverse(a: np.ndarray) -> np.ndarray:
        for step, mask in ((1, 0x5555555555555555), (2, 0x3333333333333333), (4, 0x0F0F0F0F0F0F0F0F)):
            low = a.dtype.type(mask & ((1 << 8 * a.dtype.itemsize) - 1))
            s = a.dtype.type(step)
            a = ((a >> s) & low) | ((a & low) << s)
        return a.byteswap()

    return elementwise(build, ins, [kind], kind, reverse)


@opcode("lop3")
def _lop3(build: Build, ins: ptx.Instruction) -> Step:
    m = Modifiers(ins)
    boolean, kind = m.take("or", "and"), m.type()
    if boolean or kind != "b32":
        raise m.unsupported("with a predicate result" if boolean else "")
    m.finish(5)
    table = ins.operands[4]
    if not isinstance(table, ptx.Immediate):
        raise m.unsupported("the table must be a constant")
    entries = build.number(table, ins)

    def combine(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        result = np.zeros(np.broadcast_shapes(a.shape, b.shape, c.shape), U32)
        for i in range(8):
            if entries >> i & 1:
                result |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
        return result

    d = build.destination(ins.operands[0], "b32", ins)
    x, y, z = (build.source(o, "b32", ins) for o in ins.operands[1:4])

    def run(f: Fragment) -> None:
        r = f.regs
        r[d] = combine(r[x], r[y], r[z])

    return run


@opcode("prmt")
def _prmt(build: Build, ins: ptx.Instruction) -> Step:
    Modifiers(ins).only_type(4, ("b32",))  # the named modes (.f4e, .rc8, ...) are refused as unknown modifiers

    def permute(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
        both = (b.astype(U64) << U64(32)) | a.astype(U64)
        result = np.zeros(np.broadcast_shapes(both.shape, selector.shape), U32)
        for i in range(4):
            s = (selector >> U32(4 * i)) & U32(15)
            byte = ((both >> (U64(8) * (s & U32(7)).astype(U64))) & U64(0xFF)).astype(U32)
            sign = np.where(byte >> U32(7) == 1, U32(0xFF), U32(0))  # bit 3 of the selector replicates the sign
            result |= np.where(s >> U32(3) == 1, sign, byte) << U32(8 * i)
        return result

    return elementwise(build, ins, ["b32", "b32", "u32"], "b32", permute)
