"""mbarrier objects in shared memory, and the asynchronous copies that complete on them.

The state of an mbarrier lives beside shared memory, keyed by its place, so that plain stores over it are noticed. Copies into
shared memory are carried out only when nothing else can run: a kernel that reads before it waits reads memory nobody has
written, and is told so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ptx_emulator.memory import AccessFault

if TYPE_CHECKING:
    from ptx_emulator.machine import Machine


@dataclass
class MBarrier:
    """`expected` arrivals per phase, `pending` of them still to come, `bytes` transactions still to come."""

    expected: int
    pending: int
    bytes: int = 0
    phase: int = 0
    gathering: np.ndarray | None = None
    passed: np.ndarray | None = None


@dataclass
class MBarriers:
    """All mbarriers of a chunk."""

    machine: Machine
    objects: dict[int, MBarrier] = field(default_factory=dict)
    pending: list[Callable[[], None]] = field(default_factory=list)

    def get(self, place: int, index: int) -> MBarrier:
        if place not in self.objects:
            offset = place % self.machine.shared.row
            raise AccessFault("mbarrier", index, f"shared address {offset:#x} holds no initialised mbarrier", "shared memory")
        return self.objects[place]

    def initialise(self, place: int, count: int, index: int) -> None:
        if not 1 <= count < 1 << 20:
            raise AccessFault("mbarrier", index, f"count {count} is not in 1 .. 2^20-1", "shared memory")
        self.objects[place] = MBarrier(count, count)
        self.machine.shared.written[place : place + 8] = 1

    def arrive(self, place: int, warp: int, index: int, count: int = 1, expect: int = 0, *, release: bool = True) -> int:
        """One thread arrives `count` times, expecting `expect` more bytes; returns the phase it arrived in."""
        bar = self.get(place, index)
        bar.bytes += expect
        phase = bar.phase
        if release:
            self.publish(bar, warp)
        if count:
            if bar.pending < count:
                raise AccessFault(
                    "mbarrier", index, f"arrival count {count} exceeds the {bar.pending} arrivals still expected", "shared memory"
                )
            bar.pending -= count
        self.settle(bar)
        return phase

    def publish(self, bar: MBarrier, warp: int) -> None:
        races = self.machine.races
        if races:
            known = races.knowledge(np.array([warp]))[0]
            bar.gathering = known if bar.gathering is None else np.maximum(bar.gathering, known)
            races.advance(np.array([warp]))

    def settle(self, bar: MBarrier) -> None:
        if bar.pending == 0 and bar.bytes == 0:
            bar.phase += 1
            bar.pending = bar.expected
            if bar.gathering is not None:
                bar.passed, bar.gathering = bar.gathering, None
            self.machine.events += 1

    def transfer(self, place: int, nbytes: int, index: int) -> None:
        """`complete_tx`: bytes have arrived."""
        bar = self.get(place, index)
        bar.bytes -= nbytes
        self.settle(bar)

    def done(self, place: int, parity: int, index: int) -> bool:
        """Whether the phase of this parity is complete."""
        return (self.get(place, index).phase & 1) != parity

    def acquire(self, place: int, warp: int) -> None:
        bar = self.objects[place]
        if self.machine.races and bar.passed is not None:
            self.machine.races.learn(np.array([warp]), bar.passed)
            self.machine.races.advance(np.array([warp]))

    def complete_pending(self) -> bool:
        """Carry out the oldest copy in flight; False if there is none."""
        if not self.pending:
            return False
        self.pending.pop(0)()
        self.machine.events += 1
        return True

    def finish(self) -> None:
        while self.complete_pending():
            pass
