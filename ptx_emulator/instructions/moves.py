"""Register moves, packing, address spaces, and instructions without a visible effect here."""

from __future__ import annotations

import numpy as np

from ptx_emulator import parser as ptx
from ptx_emulator.faults import UnsupportedInstruction
from ptx_emulator.fragment import Fragment
from ptx_emulator.instructions.forms import Modifiers, unsigned
from ptx_emulator.memory import AccessFault
from ptx_emulator.program import LOCAL_WINDOW, RANK_SHIFT, SHARED_WINDOW, STORAGE, WAITED, Build, Step, opcode

_MOVES = ("pred", "b16", "u16", "s16", "b32", "u32", "s32", "f32", "b64", "u64", "s64", "f64")
U64 = np.uint64


def nothing(f: Fragment) -> None:
    """A step without effect in this model."""


@opcode("mov")
def _mov(build: Build, ins: ptx.Instruction) -> Step:
    kind = Modifiers(ins).only_type(2, _MOVES)
    target, value = ins.operands
    if isinstance(target, ptx.Vector):
        return _unpack(build, ins, kind, target, value)
    if isinstance(value, ptx.Vector):
        return _pack(build, ins, kind, target, value)
    d, s = build.destination(target, kind, ins), build.source(value, kind, ins)
    dtype = np.dtype(STORAGE[build.width(d)])

    def run(f: Fragment) -> None:
        value = f.regs[s]
        # Arrays are never changed in place, so sharing one is safe.
        f.regs[d] = value if value.dtype == dtype else value.astype(dtype)

    return run


def _part_kind(ins: ptx.Instruction, kind: str, count: int) -> str:
    width = ptx.WIDTHS[kind] // count
    if width not in (16, 32) or ptx.WIDTHS[kind] % count:
        raise UnsupportedInstruction(f"{ins.opcode} of {count} parts", ins.line, ins.text)
    return f"b{width}"


def _unpack(build: Build, ins: ptx.Instruction, kind: str, target: ptx.Vector, value: ptx.Operand) -> Step:
    part = _part_kind(ins, kind, len(target.items))
    ds = [build.destination(o, part, ins) for o in target.items]
    s = build.source(value, kind, ins)
    width, dtype = ptx.WIDTHS[part], unsigned(part)
    stores = [np.dtype(STORAGE[build.width(d)]) for d in ds]

    def run(f: Fragment) -> None:
        whole = f.regs[s]
        for k, (d, store) in enumerate(zip(ds, stores, strict=True)):
            f.regs[d] = (whole >> whole.dtype.type(width * k)).astype(dtype).astype(store, copy=False)

    return run


def _pack(build: Build, ins: ptx.Instruction, kind: str, target: ptx.Operand, value: ptx.Vector) -> Step:
    part = _part_kind(ins, kind, len(value.items))
    d = build.destination(target, kind, ins)
    sources = [build.source(o, part, ins) for o in value.items]
    width, dtype, narrow = ptx.WIDTHS[part], unsigned(kind), unsigned(part)

    def run(f: Fragment) -> None:
        r = f.regs
        whole = r[sources[0]].astype(narrow, copy=False).astype(dtype)
        for k, s in enumerate(sources[1:], 1):
            whole = whole | (r[s].astype(narrow, copy=False).astype(dtype) << dtype.type(width * k))
        r[d] = whole

    return run


@opcode("cvta")
def _cvta(build: Build, ins: ptx.Instruction) -> Step:
    m = Modifiers(ins)
    to, space, kind = m.take("to"), m.take("shared::cluster", "shared::cta", "shared", "global", "local", "const", "param"), m.type()
    m.finish(2)
    if kind != "u64" or not space:
        raise m.unsupported()
    d, s = build.destination(ins.operands[0], kind, ins), build.source(ins.operands[1], kind, ins)
    if space == "param":
        raise m.unsupported("generic addresses of parameters")
    window = U64({"shared": SHARED_WINDOW, "local": LOCAL_WINDOW}.get(space.split("::")[0], 0))

    def run(f: Fragment) -> None:
        f.regs[d] = f.regs[s] - window if to else f.regs[s] + window

    return run


@opcode("isspacep")
def _isspacep(build: Build, ins: ptx.Instruction) -> Step:
    m = Modifiers(ins)
    space = m.take("shared::cluster", "shared::cta", "shared", "global", "local")
    m.finish(2)
    if not space:
        raise m.unsupported()
    d, s = build.destination(ins.operands[0], "pred", ins), build.source(ins.operands[1], "u64", ins)

    def run(f: Fragment) -> None:
        where = f.regs[s] >> U64(60)
        if space == "global":
            f.regs[d] = where == 0
        elif space == "local":
            f.regs[d] = where == 2
        else:
            own = (f.regs[s] & U64(0xFFFFFFFF)) >> U64(RANK_SHIFT) == 0
            f.regs[d] = (where == 1) & own if space == "shared::cta" else where == 1

    return run


@opcode("mapa")
def _mapa(build: Build, ins: ptx.Instruction) -> Step:
    m = Modifiers(ins)
    space, kind = m.take("shared::cluster"), m.type()
    m.finish(3)
    if kind not in ("u32", "u64"):
        raise m.unsupported()
    d, s, rank = (
        build.destination(ins.operands[0], kind, ins),
        build.source(ins.operands[1], kind, ins),
        build.source(ins.operands[2], "u32", ins),
    )
    window = 0 if space else SHARED_WINDOW

    def run(f: Fragment) -> None:
        r = f.regs
        address, target = r[s].astype(U64) - U64(window), r[rank].astype(U64)
        bad = target >= U64(f.machine.launch.cluster_size)
        if bad.any():
            i = int(np.flatnonzero(bad)[0])
            raise AccessFault("out of bounds", i, f"mapa to block rank {int(target[i])} of a cluster of {f.machine.launch.cluster_size}")
        offset = address & U64((1 << RANK_SHIFT) - 1)
        r[d] = (offset + ((target + U64(1)) << U64(RANK_SHIFT)) + U64(window)).astype(unsigned(kind))

    return run


@opcode("getctarank")
def _getctarank(build: Build, ins: ptx.Instruction) -> Step:
    m = Modifiers(ins)
    space, kind = m.take("shared::cluster"), m.type()
    m.finish(2)
    if kind not in ("u32", "u64"):
        raise m.unsupported()
    d, s = build.destination(ins.operands[0], "u32", ins), build.source(ins.operands[1], kind, ins)
    window = 0 if space else SHARED_WINDOW

    def run(f: Fragment) -> None:
        rank = (f.regs[s].astype(U64) - U64(window)) >> U64(RANK_SHIFT)
        own = (f.blocks % f.machine.launch.cluster_size).astype(U64)
        f.regs[d] = np.where(rank > 0, rank - U64(1), own).astype(np.uint32)

    return run


@opcode("griddepcontrol")
def _griddepcontrol(build: Build, ins: ptx.Instruction) -> Step:
    m = Modifiers(ins)
    action = m.take("wait", "launch_dependents")
    m.finish(0)
    if action == "launch_dependents":
        return nothing
    if action != "wait":
        raise m.unsupported()
    build.reads.add(WAITED)

    def run(f: Fragment) -> None:
        f.regs[WAITED] = np.array([True])
        if f.machine.races:
            f.machine.races.clocks.wait_for_kernels(f.lanes)

    build.writes.add(WAITED)
    return run


@opcode("nanosleep", "discard", "applypriority", "setmaxnreg", "pmevent")
def _hint(build: Build, ins: ptx.Instruction) -> Step:
    for operand in ins.operands:
        if isinstance(operand, ptx.Register):
            build.source(operand, f"b{operand.bits}", ins)
    return nothing


@opcode("createpolicy")
def _createpolicy(build: Build, ins: ptx.Instruction) -> Step:
    d = build.destination(ins.operands[0], "b64", ins)

    def run(f: Fragment) -> None:
        f.regs[d] = np.array([0], U64)

    return run
