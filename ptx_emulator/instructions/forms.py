"""What instruction builders share: reading modifiers strictly, and wrapping array functions as steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from ptx_emulator import parser as ptx
from ptx_emulator.faults import UnsupportedInstruction
from ptx_emulator.fragment import Fragment
from ptx_emulator.program import NUMPY, STORAGE, Build, Step

Function = Callable[..., Any]  # arrays to an array
ROUNDINGS = ("rn", "rz", "rm", "rp")


class Modifiers:
    """The modifiers of one opcode; each must be taken by somebody, or `finish` refuses the instruction."""

    def __init__(self, ins: ptx.Instruction) -> None:
        self.ins = ins
        self.rest = list(ins.modifiers)

    def take(self, *names: str) -> str:
        """The first of `names` present, removed; "" if none is."""
        for name in names:
            if name in self.rest:
                self.rest.remove(name)
                return name
        return ""

    def types(self) -> list[str]:
        """All type modifiers in order, removed."""
        found = [m for m in self.rest if m in ptx.WIDTHS or m in EXTRA_TYPES]
        self.rest = [m for m in self.rest if m not in found]
        return found

    def type(self) -> str:
        """The only type left; `UnsupportedInstruction` for more or none."""
        found = self.types()
        if len(found) != 1:
            raise self.unsupported("type expected")
        return found[0]

    def only_type(self, operands: int, allowed: Iterable[str]) -> str:
        """The one type modifier, which must be one of `allowed`, of an instruction of `operands` operands and no other modifier."""
        kind = self.type()
        self.finish(operands)
        if kind not in allowed:
            raise self.unsupported()
        return kind

    def unsupported(self, what: str = "") -> UnsupportedInstruction:
        """The error to raise for this instruction."""
        return UnsupportedInstruction(f"{self.ins.opcode}: {what or 'form not known'}", self.ins.line, self.ins.text)

    def finish(self, operands: int | Iterable[int] | None = None) -> None:
        """`UnsupportedInstruction` where a modifier is left, or the number of operands is none of those given."""
        if self.rest:
            raise self.unsupported(f"modifier .{self.rest[0]} not known")
        if operands is not None:
            allowed = (operands,) if isinstance(operands, int) else tuple(operands)
            if len(self.ins.operands) not in allowed:
                raise self.unsupported(f"{len(self.ins.operands)} operands")


EXTRA_TYPES = ("e4m3x2", "e5m2x2", "e4m3x4", "ue8m0x2", "e2m1x2", "tf32", "u16x2", "s16x2", "bf16", "f16")


def unsigned(kind: str) -> np.dtype:
    """Storage type of a register holding `kind`."""
    return np.dtype(STORAGE[max(ptx.WIDTHS[kind], 16) if kind != "pred" else 1])


def as_type(value: np.ndarray, kind: str) -> np.ndarray:
    """Register bits as `kind`, whose width must be that of the register or less."""
    dtype = NUMPY[kind]
    if value.dtype.itemsize != dtype.itemsize:
        value = value.astype(f"u{dtype.itemsize}")
    return value.view(dtype)


def elementwise(build: Build, ins: ptx.Instruction, kinds: list[str], result: str, function: Function) -> Step:
    """`d = function(a, ...)`: sources read as `kinds`, result an array of `result`'s NumPy type (or its unsigned bits)."""
    d = build.destination(ins.operands[0], result, ins)
    slots = [build.source(o, k, ins) for o, k in zip(ins.operands[1:], kinds, strict=True)]
    dtypes = [NUMPY[k] for k in kinds]
    store = np.dtype(STORAGE[build.width(d)])
    exact = all(np.dtype(STORAGE[build.width(s)]).itemsize == t.itemsize for s, t in zip(slots, dtypes, strict=True))
    if exact and len(slots) == 2:
        (a, b), (ta, tb) = slots, dtypes

        def run2(f: Fragment) -> None:
            r = f.regs
            r[d] = _fit(function(r[a].view(ta), r[b].view(tb)), store)

        return run2
    if exact and len(slots) == 3:
        (a, b, c), (ta, tb, tc) = slots, dtypes

        def run3(f: Fragment) -> None:
            r = f.regs
            r[d] = _fit(function(r[a].view(ta), r[b].view(tb), r[c].view(tc)), store)

        return run3

    def run(f: Fragment) -> None:
        r = f.regs
        r[d] = _fit(function(*(as_type(r[s], k) for s, k in zip(slots, kinds, strict=True))), store)

    return run


def _fit(value: np.ndarray, store: np.dtype) -> np.ndarray:
    """A result as register bits: reinterpreted, then sign- or zero-extended to the register's width."""
    if value.dtype == store:
        return value
    if value.dtype.itemsize == store.itemsize:
        return value.view(store)
    if value.dtype.kind == "i":
        return value.astype(f"i{store.itemsize}").view(store)
    return value.astype(store)
