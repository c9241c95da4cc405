"""Threads that stand at the same instruction, with their registers as arrays.

A launch is executed as a set of fragments. Lanes of a chunk of blocks are numbered block by block, each block padded to whole
warps; a fragment holds an ascending array of lane numbers and, for each register, either one value per lane or, where all
lanes agree, an array of length one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from ptx_emulator.memory import AccessFault

if TYPE_CHECKING:
    from ptx_emulator.machine import Machine

GARBAGE = {
    np.dtype(np.uint16): np.uint16(0xDEAD),
    np.dtype(np.uint32): np.uint32(0xDEADBEEF),
    np.dtype(np.uint64): np.uint64(0xDEADBEEFDEADBEEF),
    np.dtype(np.bool_): np.bool_(False),
}


class Fragment:
    """`pc` basic block to run next; `lanes` ascending lane numbers; `regs` one array per register slot."""

    __slots__ = ("_blocks", "_whole", "lanes", "machine", "pc", "regs")

    def __init__(self, pc: int, lanes: np.ndarray, regs: list[Any], machine: Machine) -> None:
        self.pc, self.lanes, self.regs, self.machine = pc, lanes, regs, machine
        self._blocks: np.ndarray | None = None
        self._whole: bool | None = None

    @property
    def n(self) -> int:
        """Number of threads."""
        return self.lanes.shape[0]

    @property
    def blocks(self) -> np.ndarray:
        """Index within the chunk of each lane's block."""
        if self._blocks is None:
            self._blocks = self.lanes // self.machine.block_lanes
        return self._blocks

    @property
    def whole_warps(self) -> bool:
        """All 32 lanes of each warp are here."""
        if self._whole is None:
            lanes = self.lanes
            self._whole = bool(lanes.size % 32 == 0 and (lanes[::32] % 32 == 0).all() and (lanes[31::32] - lanes[::32] == 31).all())
        return self._whole

    def full(self, slot: int) -> np.ndarray:
        """A register as one value per lane."""
        value = self.regs[slot]
        return value if value.shape[0] == self.n else np.broadcast_to(value, (self.n,))

    def take(self, index: np.ndarray, live: list[int], pc: int) -> Fragment:
        """The lanes at positions `index` (ascending, or a mask) with the registers of `live`."""
        machine = self.machine
        regs = list(machine.program.initial)
        mine = self.regs
        for slot in live:
            value = mine[slot]
            regs[slot] = value if value.shape[0] == 1 else value[index]
        return Fragment(pc, self.lanes[index], regs, machine)


def merge(parts: list[Fragment], live: list[int]) -> Fragment:
    """One fragment of several that stand at the same place."""
    first = parts[0]
    machine = first.machine
    lanes = np.concatenate([p.lanes for p in parts])
    order = np.argsort(lanes, kind="stable")
    regs = list(machine.program.initial)
    for slot in live:
        values = [p.regs[slot] for p in parts]
        first_value = values[0]
        if all(v.shape[0] == 1 and (v is first_value or v[0] == first_value[0]) for v in values):
            regs[slot] = first_value
            continue
        whole = np.concatenate([v if v.shape[0] == p.n else np.full(p.n, v[0]) for p, v in zip(parts, values, strict=True)])
        regs[slot] = whole[order]
    return Fragment(first.pc, lanes[order], regs, machine)


def one_by_one(f: Fragment, act: Callable[[int, Fragment], None]) -> None:
    """`act` for each thread of a fragment: its position, and it alone."""
    for i in range(f.n):
        one = f.take(np.array([i]), [], f.pc)
        with faults_of(one):
            act(i, one)


@contextlib.contextmanager
def faults_of(part: Fragment) -> Iterator[None]:
    """Faults within count the positions of `part`, which is no more than a part of the fragment that executes the instruction."""
    try:
        yield
    except AccessFault as fault:
        if fault.lane is None:
            fault.lane = int(part.lanes[min(fault.index, part.n - 1)])
        raise
