"""mbarrier objects in shared memory, and the asynchronous copies that complete on them.

The state of an mbarrier lives beside shared memory, keyed by its place; ordinary accesses there are faults. Copies into shared memory
are carried out only when nothing else can run: a kernel that reads before it waits reads memory nobody has written, and is told so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ptx_emulator.clocks import merge
from ptx_emulator.fragment import Fragment, faults_of
from ptx_emulator.memory import AccessFault
from ptx_emulator.program import SHARED_START

if TYPE_CHECKING:
    from ptx_emulator.machine import Machine


@dataclass
class MBarrier:
    """`expected` arrivals per phase, `pending` of them still to come, `bytes` transactions still to come.

    maker, made        lane that initialised it, and the date of that
    users, copiers     by lane: known to use it rightly, itself and by copies
    gathering, passed  what those who have arrived in this phase knew, and what those did who arrived in all phases before
    column             of the copies that complete here, among those of the clocks; -1: none has
    """

    expected: int
    pending: int
    maker: int
    made: int
    users: np.ndarray
    copiers: np.ndarray
    bytes: int = 0
    phase: int = 0
    gathering: np.ndarray | None = None
    passed: np.ndarray | None = None
    column: int = -1


@dataclass
class MBarriers:
    """All mbarriers of a chunk."""

    machine: Machine
    objects: dict[int, MBarrier] = field(default_factory=dict)
    pending: list[tuple[int, Callable[[], None]]] = field(default_factory=list)  # copies in flight: block they write into or -1, and how

    def get(self, place: int, lanes: np.ndarray, index: np.ndarray, *, copy: bool = False) -> MBarrier:
        """The mbarrier at a place, for lanes (at positions `index` of their fragment) that use it, or name it to a copy."""
        bar = self.objects.get(place)
        if bar is None:
            offset = place % self.machine.shared.row - SHARED_START
            raise AccessFault("mbarrier", int(index[0]), f"shared offset {offset} holds no initialised mbarrier", "shared memory")
        if self.machine.races:
            self.machine.races.use(bar, lanes, index, copy=copy)
        return bar

    def initialise(self, f: Fragment, index: int, place: int, count: int) -> None:
        """mbarrier.init by the thread at position `index`; `AccessFault` for a count out of range, and where one is live at the place."""
        if not 1 <= count < 1 << 20:
            raise AccessFault("mbarrier", index, f"count {count} is not in 1 .. 2^20-1", "shared memory")
        if place in self.objects:
            raise AccessFault("mbarrier", index, "initialises one that is live: mbarrier.inval comes first", "shared memory")
        races, lane, made = self.machine.races, int(f.lanes[index]), 0
        if races:
            made = int(races.clocks.clock[lane // 32])
            one = f.take(np.array([index]), [], f.pc)
            with faults_of(one):
                races.write(one, np.array([place]), 8)
            races.occupy(place, live=True)
        users, copiers = np.zeros((2, self.machine.alive.size), bool)
        self.objects[place] = MBarrier(count, count, lane, made, users, copiers)
        self.machine.shared.written[place : place + 8] = 1

    def invalidate(self, place: int) -> None:
        """Ends the life of an mbarrier; what is at its place then is nothing that anybody wrote."""
        del self.objects[place]
        self.machine.shared.written[place : place + 8] = 0
        if self.machine.races:
            self.machine.races.occupy(place, live=False)

    def arrive(self, bar: MBarrier, lanes: np.ndarray, index: int, count: int, expect: int, *, release: bool) -> int:
        """Threads arrive, `count` times together, expecting `expect` more bytes; returns the phase they arrived in."""
        bar.bytes += expect
        phase = bar.phase
        if release:
            if self.machine.races:
                self.machine.races.reach(np.full(lanes.size, bar.maker // self.machine.block_lanes), lanes)
            self.publish(bar, lanes)
        if count:
            if bar.pending < count:
                raise AccessFault(
                    "mbarrier", index, f"arrival count {count} exceeds the {bar.pending} arrivals still expected", "shared memory"
                )
            bar.pending -= count
        self.settle(bar)
        return phase

    def publish(self, bar: MBarrier, lanes: np.ndarray) -> None:
        """Hand what these threads know to those who will wait for the phase."""
        races = self.machine.races
        if races:
            bar.gathering = merge(bar.gathering, races.clocks.release(lanes))

    def agent(self, bar: MBarrier, place: int) -> tuple[int, int]:
        """Who copies that complete in this phase are to `races`, and their date."""
        machine = self.machine
        assert machine.races is not None
        if bar.column < 0:
            bar.column = machine.races.clocks.column(("mbarrier", place % (machine.shared.row * machine.launch.cluster_size)))
        return machine.races.threads + bar.column, bar.phase + 1

    def settle(self, bar: MBarrier) -> None:
        """Complete the phase if no arrival and no byte is missing."""
        if bar.pending == 0 and bar.bytes == 0:
            bar.phase += 1
            bar.pending = bar.expected
            if bar.gathering is not None:
                bar.passed, bar.gathering = merge(bar.passed, bar.gathering), None
            if bar.column >= 0:
                done = np.zeros((self.machine.races.clocks.kinds, bar.column + 1), np.int32)  # type: ignore[union-attr]
                done[:, bar.column] = bar.phase
                bar.passed = merge(bar.passed, done)
            self.machine.events += 1

    def transfer(self, bar: MBarrier, nbytes: int) -> None:
        """`complete_tx`: bytes have arrived."""
        bar.bytes -= nbytes
        self.settle(bar)

    def acquire(self, place: int, lanes: np.ndarray) -> None:
        """Threads that have waited learn what the last phase handed on."""
        bar = self.objects[place]
        if self.machine.races and bar.passed is not None:
            self.machine.races.clocks.learn(lanes, bar.passed)

    def complete_pending(self) -> bool:
        """Carry out the oldest copy in flight; False if there is none.

        The oldest into each other block lands with it, so that blocks go on side by side. Stores into another block (-1) land one by one.
        """
        if not self.pending:
            return False
        alone = self.pending[0][0] < 0
        due = {block: copy for block, copy in reversed(self.pending) if (block < 0) == alone}  # the oldest of each comes last and stays
        self.pending = [entry for entry in self.pending if entry[1] is not due.get(entry[0])]
        for copy in due.values():
            copy()
        self.machine.events += 1
        return True

    def check_exit(self, f: Fragment) -> None:
        """A block's shared memory must outlive the copies into it: the last of its threads leaves behind them."""
        flying = [block for block, _ in self.pending if block >= 0]
        if not flying:
            return
        left = np.logical_not(self.machine.alive.reshape(self.machine.block_count, -1).any(axis=1))
        bad = np.isin(f.blocks, [block for block in flying if left[block]])
        if bad.any():
            i = int(np.flatnonzero(bad)[0])
            raise AccessFault("bulk copy not waited for", i, "a block leaves while a copy into its shared memory is still under way")

    def finish(self) -> None:
        """At the end of a launch: complete all copies."""
        while self.complete_pending():
            pass
