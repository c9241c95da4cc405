"""Shared-memory races, found by vector clocks.

Each warp has a clock that advances at every synchronisation, and knows of every warp of its cluster up to which clock value that
warp's accesses happen before its own. An access races with an earlier one of another warp that it does not know of, or of
another thread of the same warp since the last synchronisation of that warp. Barriers, cluster barriers and mbarriers pass
knowledge on; shuffles and votes do not, as PTX gives them no memory ordering.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ptx_emulator.faults import KernelFault
from ptx_emulator.memory import AccessFault
from ptx_emulator.program import SHARED_START

if TYPE_CHECKING:
    from ptx_emulator.fragment import Fragment
    from ptx_emulator.machine import Machine

MANY = 255
STARTED = 1  # clock value that says no more than: the warp runs


class RaceChecker:
    """`clock[g]` of warp g of the chunk; `seen[g, w]` the clock up to which g knows warp w of its cluster."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.per_block = machine.warps_per_block
        self.cluster = machine.launch.cluster_size
        self.width = self.per_block * self.cluster
        warps = machine.block_count * self.per_block
        self.clock = np.full(warps, STARTED + 1, np.int32)
        self.seen = np.zeros((warps, self.width), np.int32)
        self.fenced = np.zeros((warps, self.width), np.int32)  # what each warp knew at its last fence of cluster scope or wider
        self.granule = machine.program.build.shared_granule
        self.started = False

    def _start(self) -> None:
        cells = self.machine.shared.data.size // self.granule
        self.writer = np.full(cells, -1, np.int32)
        self.write_epoch = np.zeros(cells, np.int32)
        self.write_atomic = np.zeros(cells, bool)
        self.read_epoch = np.zeros((cells, self.width), np.int32)
        self.read_lane = np.zeros((cells, self.width), np.uint8)
        self.remote = np.zeros((self.machine.block_count, self.width), np.int32)
        self.started = True

    # ---- knowledge

    def in_cluster(self, warps: np.ndarray) -> np.ndarray:
        return warps % self.width

    def knowledge(self, warps: np.ndarray) -> np.ndarray:
        """What these warps know, themselves included."""
        known = self.seen[warps]
        known[np.arange(warps.size), self.in_cluster(warps)] = self.clock[warps]
        return known

    def fence(self, warps: np.ndarray) -> None:
        """A later relaxed arrival releases what happened before the fence."""
        self.fenced[warps] = self.knowledge(warps)
        self.advance(warps)

    def relaxed_knowledge(self, warps: np.ndarray) -> np.ndarray:
        """What a relaxed arrival passes on: that the warp runs, and what was fenced."""
        known = self.fenced[warps]
        own = self.in_cluster(warps)
        rows = np.arange(warps.size)
        known[rows, own] = np.maximum(known[rows, own], STARTED)
        return known

    def advance(self, warps: np.ndarray) -> None:
        self.clock[warps] += 1

    def learn(self, warps: np.ndarray, known: np.ndarray) -> None:
        self.seen[warps] = np.maximum(self.seen[warps], known)

    def join(self, warps: np.ndarray, groups: np.ndarray) -> None:
        """A barrier among the warps of each group; `groups` ascending."""
        known = self.knowledge(warps)
        first = np.flatnonzero(np.r_[True, groups[1:] != groups[:-1]])
        together = np.maximum.reduceat(known, first, axis=0)
        self.learn(warps, np.repeat(together, np.diff(np.r_[first, groups.size]), axis=0))
        self.advance(warps)

    # ---- accesses

    def _cells(self, place: np.ndarray, nbytes: int) -> list[np.ndarray]:
        start = place // self.granule
        return [start + k for k in range(max(nbytes // self.granule, 1))]

    def _who(self, f: Fragment) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        lanes = f.lanes.astype(np.int64)
        warps = lanes // 32
        return warps, self.in_cluster(warps), lanes % 32

    def _unordered(
        self, warps: np.ndarray, mine: np.ndarray, thread: np.ndarray, other_thread: np.ndarray, epoch: np.ndarray
    ) -> np.ndarray:
        other = other_thread >> 5
        known = self.seen[warps, np.maximum(other, 0)]
        limit = np.where(other == mine, self.clock[warps] - 1, known)
        return (other_thread >= 0) & (other_thread != thread) & (epoch > limit)

    def _report(self, kind: str, bad: np.ndarray, place: np.ndarray, other_thread: np.ndarray) -> None:
        i = int(np.flatnonzero(bad)[0])
        m = self.machine
        other = int(other_thread[i])
        block = int(place[i]) // m.shared.row
        first = block // self.cluster * self.cluster
        who = f"thread {m.thread(other % m.block_lanes)} of block {m.coordinates(first + other // m.block_lanes)}"
        offset = int(place[i]) % m.shared.row - SHARED_START
        raise AccessFault(
            "shared-memory race", i, f"{kind} {who} at shared offset {offset} without synchronisation between them", "shared memory"
        )

    def read(self, f: Fragment, place: np.ndarray, nbytes: int) -> None:
        """Check and record loads of `nbytes` at `place` (one per lane)."""
        if not self.started:
            self._start()
        warps, mine, lane = self._who(f)
        self._remote(f, place, warps, mine)
        thread = mine * 32 + lane
        now = self.clock[warps]
        for cell in self._cells(place, nbytes):
            writer = self.writer[cell]
            bad = self._unordered(warps, mine, thread, writer, self.write_epoch[cell])
            if bad.any():
                self._report("reads what was written by", bad, place, writer)
            again = (self.read_epoch[cell, mine] == now) & (self.read_lane[cell, mine] != lane)
            self.read_epoch[cell, mine] = now
            self.read_lane[cell, mine] = np.where(again, MANY, lane).astype(np.uint8)
            many = self.read_lane[cell, mine] != lane
            if many.any():
                self.read_lane[cell[many], mine[many]] = MANY

    def write(self, f: Fragment, place: np.ndarray, nbytes: int, *, atomic: bool = False) -> None:
        """Check and record stores (before they are carried out)."""
        if not self.started:
            self._start()
        warps, mine, lane = self._who(f)
        self._remote(f, place, warps, mine)
        thread = mine * 32 + lane
        now = self.clock[warps]
        limits = self.seen[warps]
        limits[np.arange(warps.size), mine] = np.iinfo(np.int32).max
        for cell in self._cells(place, nbytes):
            writer = self.writer[cell]
            bad = self._unordered(warps, mine, thread, writer, self.write_epoch[cell])
            if atomic:
                bad &= ~self.write_atomic[cell]
            if bad.any():
                self._report("overwrites what was written by", bad, place, writer)
            reads = self.read_epoch[cell]
            late = reads > limits
            if late.any():
                other = late.argmax(1)
                self._report("overwrites what is read by", late.any(1), place, other * 32 + np.minimum(self.read_lane[cell, other], 31))
            bad = (reads[np.arange(warps.size), mine] >= now) & (self.read_lane[cell, mine] != lane)
            if bad.any():
                self._report("overwrites what is read by", bad, place, mine * 32 + np.minimum(self.read_lane[cell, mine], 31))
            self.writer[cell] = thread
            self.write_epoch[cell] = now
            self.write_atomic[cell] = atomic

    def same_value(self, f: Fragment, place: np.ndarray, stored: list[np.ndarray], wanted: list[np.ndarray]) -> None:
        """After a store: two threads of one instruction must not have written different values to one place."""
        for now, value in zip(stored, wanted, strict=True):
            bad = now != value
            if bad.any():
                i = int(np.flatnonzero(bad)[0])
                writer = self.writer[place // self.granule]
                self._report("writes another value than", bad, place, np.where(writer < 0, 0, writer))
                raise AssertionError(i)

    def _remote(self, f: Fragment, place: np.ndarray, warps: np.ndarray, mine: np.ndarray) -> None:
        if self.cluster == 1:
            return
        owner = place // self.machine.shared.row
        away = owner != f.blocks
        if not away.any():
            return
        first = owner % self.cluster * self.per_block
        known = np.zeros(warps.size, np.int32)
        for w in range(self.per_block):
            known = np.maximum(known, self.seen[warps, first + w])
        bad = away & (known < STARTED)
        if bad.any():
            i = int(np.flatnonzero(bad)[0])
            target = self.machine.coordinates(int(owner[i]))
            raise AccessFault(
                "remote shared memory", i, f"block {target} may not have started: no cluster barrier before this access", "shared memory"
            )
        np.maximum.at(self.remote, (owner[away], mine[away]), self.clock[warps[away]])

    # ---- ends

    def exited(self, f: Fragment) -> None:
        """Nothing to do when threads leave: what their warps know stays."""

    def finish(self) -> None:
        if not self.started or self.cluster == 1 or not self.remote.any():
            return
        m = self.machine
        known = self.seen.reshape(m.block_count, self.per_block, self.width).max(1)
        late = self.remote > known
        if late.any():
            block, warp = (int(v[0]) for v in np.nonzero(late))
            peer = block // self.cluster * self.cluster + warp // self.per_block
            raise KernelFault(
                "remote shared memory",
                f"the block may leave while warp {warp % self.per_block} of block {m.coordinates(peer)} still uses its shared memory",
                block=m.coordinates(block),
                kernel=m.program.kernel.name,
            )
