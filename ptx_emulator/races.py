"""Races in shared memory, found by the clocks of its threads (`clocks`).

Every place remembers who wrote it last and, per warp, which lanes have read it since that warp last met, with dates. An access races
with an earlier one of another thread that it does not know of. Barriers, cluster barriers and mbarriers pass knowledge on; shuffles
and votes do not, as PTX gives them no memory ordering. An asynchronous copy works in a proxy of its own: what ordinary accesses did
before it must lie behind a proxy fence as well. What a copy did needs none, once its completion has been observed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ptx_emulator.clocks import BRIDGED, INIT, ORDER, STARTED, Clocks
from ptx_emulator.faults import KernelFault
from ptx_emulator.memory import AccessFault
from ptx_emulator.program import SHARED_START

if TYPE_CHECKING:
    from ptx_emulator.fragment import Fragment
    from ptx_emulator.machine import Machine
    from ptx_emulator.mbarriers import MBarrier

U32 = np.uint32
_ALL = U32(0xFFFFFFFF)
_NOBODY = -2
_NEVER = np.iinfo(np.int32).max  # a date that nobody knows of


class RaceChecker:
    """Last writer, its date and the readers of each place, `granule` bytes wide. Threads are numbered through their cluster."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.clocks = Clocks(machine)
        self.cluster = machine.launch.cluster_size
        self.width = self.clocks.width
        self.threads = self.width * 32
        self.granule = machine.program.build.shared_granule
        cells = machine.shared.data.size // self.granule
        self.writer = np.full(cells, -1, np.int32)  # a thread, or threads + column of a copy
        self.write_date = np.zeros(cells, np.int32)
        self.write_atomic = np.zeros(cells, bool)
        self.read_date = np.zeros((cells, self.width), np.int32)
        self.read_lanes = np.zeros((cells, self.width), U32)
        self.fetcher: np.ndarray | None = None  # from the first copy that reads on: such a copy as threads + column, with its date
        self.fetch_date = np.zeros(0, np.int32)
        # Accesses to the shared memory of other blocks: per owner the last date of each warp, with its lanes, and of each copy.
        self.remote = np.zeros((machine.block_count, self.width), np.int32)
        self.remote_lanes = np.zeros((machine.block_count, self.width), U32)
        self.remote_copies: dict[tuple[int, int], int] = {}
        self.objects = -1  # who has written live mbarriers, as threads + column

    # ---- reports

    def _fault(self, kind: int, what: str, index: int, place: int, other: int) -> AccessFault:
        """The fault of position `index`, which does `what` thread `other` without order, or without a fence (`kind` BRIDGED)."""
        m = self.machine
        if other >= self.threads:
            who = "the initialisation of a live mbarrier" if other == self.objects else "an asynchronous copy"
        else:
            first = place // m.shared.row // self.cluster * self.cluster
            who = f"thread {m.thread(other % m.block_lanes)} of block {m.coordinates(first + other // m.block_lanes)}"
        check, missing = ("missing proxy fence", "fence.proxy.async") if kind == BRIDGED else ("shared-memory race", "synchronisation")
        offset = place % m.shared.row - SHARED_START
        return AccessFault(check, index, f"{what} {who} at shared offset {offset} without {missing} between them", "shared memory")

    def _race(self, what: str, bad: np.ndarray, place: np.ndarray, other: np.ndarray) -> AccessFault:
        i = int(np.flatnonzero(bad)[0])
        return self._fault(ORDER, what, i, int(place[min(i, place.size - 1)]), int(other[i]))

    # ---- accesses of threads

    def _who(self, f: Fragment) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(row, warp of the cluster, thread of the cluster) of each lane."""
        thread = f.lanes % self.threads
        return self.clocks.row[f.lanes], thread >> 5, thread

    def read(self, f: Fragment, place: np.ndarray, nbytes: int) -> None:
        """Check and record loads of `nbytes` at `place` (one per lane)."""
        clocks = self.clocks
        row, warp, thread = self._who(f)
        self._remote(f, place, row)
        lanes = U32(1) << (thread & 31).astype(U32)
        if f.whole_warps and place.size == f.n:
            rows = place.reshape(-1, 32)
            if (rows == rows[:, :1]).all() and not clocks.split[f.lanes[::32] // 32].any():  # a warp reads one place: once is enough
                row, warp, place, lanes = row[::32], warp[::32], rows[:, 0], np.full(rows.shape[0], _ALL)
                thread = np.full(rows.shape[0], _NOBODY)
        now = clocks.clock[f.lanes // 32] if lanes.size == f.n else clocks.clock[f.lanes[::32] // 32]
        met = clocks.seen[row, ORDER, warp]
        start = place // self.granule
        for k in range(max(nbytes // self.granule, 1)):
            cell = start + k
            writer = self.writer[cell]
            bad = clocks.unknown(row, ORDER, writer, self.write_date[cell]) & (writer != thread)
            if bad.any():
                if lanes.size != f.n:  # name a lane that is not the writer itself
                    i = int(np.flatnonzero(bad)[0])
                    index = 32 * i + int(writer[i] == f.lanes[32 * i] % self.threads)
                    raise self._fault(ORDER, "reads what was written by", index, int(place[i]), int(writer[i]))
                raise self._race("reads what was written by", bad, place, writer)
            flat = cell * self.width + warp
            dates, masks = self.read_date.reshape(-1), self.read_lanes.reshape(-1)
            masks[flat] = np.where(dates[flat] > met, masks[flat], U32(0)) | lanes
            dates[flat] = now
            lost = masks[flat] & lanes != lanes
            if lost.any():  # lanes of one warp read one place
                np.bitwise_or.at(masks, flat[lost], lanes[lost])

    def write(
        self,
        f: Fragment,
        place: np.ndarray,
        nbytes: int,
        *,
        atomic: bool = False,
        by: np.ndarray | None = None,
        date: np.ndarray | None = None,
    ) -> None:
        """Check and record stores before they are carried out; they count as done `by` copies at `date`, or by the threads themselves."""
        clocks = self.clocks
        row, _, thread = self._who(f)
        self._remote(f, place, row, by, date)
        now = clocks.clock[f.lanes // 32]
        limits = clocks.seen[row, ORDER, : self.width]
        start = place // self.granule
        for k in range(max(nbytes // self.granule, 1)):
            cell = start + k
            writer = self.writer[cell]
            bad = clocks.unknown(row, ORDER, writer, self.write_date[cell]) & (writer != thread)
            if atomic:
                bad &= ~self.write_atomic[cell]
            if bad.any():
                raise self._race("overwrites what was written by", bad, place, writer)
            late = self.read_date[cell] > limits
            if late.any():
                i, w = np.nonzero(late)
                self._late(ORDER, i, w, row[i], cell[i], thread[i])
            if self.fetcher is not None:
                fetcher = self.fetcher[cell]
                bad = clocks.unknown(row, ORDER, fetcher, self.fetch_date[cell])
                if bad.any():
                    raise self._race("overwrites what is read by", bad, place, fetcher)
            self.writer[cell] = thread if by is None else by
            self.write_date[cell] = now if date is None else date
            self.write_atomic[cell] = atomic

    def _late(self, kind: int, index: np.ndarray, warp: np.ndarray, row: np.ndarray, cell: np.ndarray, thread: np.ndarray | None) -> None:
        """Of reads by `warp` that `row` does not know as a whole: a fault unless it knows of every lane, or `thread` is the only one."""
        lanes = self.read_lanes[cell, warp]
        if thread is not None:
            lanes = lanes & ~np.where(warp == thread >> 5, U32(1) << (thread & 31).astype(U32), U32(0))
        lanes = self.clocks.unknown_lanes(row, kind, warp, self.read_date[cell, warp], lanes)
        if lanes.any():
            n = int(np.flatnonzero(lanes)[0])
            reader = int(warp[n]) * 32 + (int(lanes[n]) & -int(lanes[n])).bit_length() - 1
            raise self._fault(kind, "overwrites what is read by", int(index[n]), int(cell[n]) * self.granule, reader)

    def same_value(self, place: np.ndarray, stored: list[np.ndarray], wanted: list[np.ndarray]) -> None:
        """After a store: two threads of one instruction must not have written different values to one place."""
        for now, value in zip(stored, wanted, strict=True):
            bad = now != value
            if bad.any():
                raise self._race("writes another value than", bad, place, np.maximum(self.writer[place // self.granule], 0))

    # ---- accesses of asynchronous copies

    def copy(self, lane: int, start: int, nbytes: int, agent: int, date: int, *, writes: bool) -> None:
        """A bulk copy of one thread writes or reads `nbytes` at `start`; it is over for who knows of `agent` at `date`."""
        clocks = self.clocks
        row, thread = clocks.row[lane : lane + 1], lane % self.threads
        cell = np.arange(start // self.granule, (start + nbytes) // self.granule)
        writer, written = self.writer[cell], self.write_date[cell]

        def refuse(kind: int, what: str, bad: np.ndarray, other: np.ndarray) -> None:
            if bad.any():
                at = int(np.flatnonzero(bad)[0])
                raise self._fault(kind, what, 0, int(cell[at]) * self.granule, int(other[at]))

        what = f"a copy {'overwrites' if writes else 'reads'} what was written by"
        refuse(ORDER, what, clocks.unknown(row, ORDER, writer, written) & (writer != thread), writer)
        refuse(BRIDGED, what, clocks.unknown(row, BRIDGED, writer, written), writer)
        if not writes:
            if self.fetcher is None:
                self.fetcher, self.fetch_date = np.full_like(self.writer, -1), np.zeros_like(self.write_date)
            self.fetcher[cell], self.fetch_date[cell] = agent, date
            return
        for kind in (ORDER, BRIDGED):
            late = self.read_date[cell] > clocks.seen[row, kind, : self.width]
            if late.any():
                n, warp = np.nonzero(late)
                itself = np.full(n.size, thread) if kind == ORDER else None
                self._late(kind, np.zeros(n.size, np.int64), warp, np.full(n.size, row[0]), cell[n], itself)
        if self.fetcher is not None:
            fetcher = self.fetcher[cell]
            refuse(ORDER, "a copy overwrites what is read by", clocks.unknown(row, ORDER, fetcher, self.fetch_date[cell]), fetcher)
        self.writer[cell], self.write_date[cell], self.write_atomic[cell] = agent, date, False

    # ---- mbarriers

    def occupy(self, place: int, live: bool) -> None:
        """An mbarrier starts or ends its life at `place`: meanwhile no ordinary access there is in order."""
        if self.objects < 0:
            self.objects = self.threads + self.clocks.column("live mbarriers")
        cells = slice(place // self.granule, place // self.granule + max(8 // self.granule, 1))
        self.writer[cells], self.write_date[cells] = (self.objects, _NEVER) if live else (-1, 0)

    def use(self, bar: MBarrier, lanes: np.ndarray, index: np.ndarray, *, copy: bool = False) -> None:
        """Threads use an mbarrier, or name it to a copy: they must know that it is initialised, and for a copy that this was fenced."""
        users = bar.copiers if copy else bar.users
        if users[lanes].all():
            return
        clocks = self.clocks
        row, thread = clocks.row[lanes], lanes % self.threads
        if self.cluster > 1:
            owner = np.full(lanes.size, bar.maker // self.machine.block_lanes)
            self._started(owner, owner != lanes // self.machine.block_lanes, row)
        maker, date = np.full(lanes.size, bar.maker % self.threads), np.full(lanes.size, bar.made)
        bad = clocks.unknown(row, INIT, maker, date)
        if not copy:
            bad &= clocks.unknown(row, ORDER, maker, date) & (thread != maker)
        if bad.any():
            i = int(np.flatnonzero(bad)[0])
            ordered = not clocks.unknown(row[i : i + 1], ORDER, maker[:1], date[:1])[0] or thread[i] == maker[0]
            missing = "fence.mbarrier_init" if copy and ordered else "synchronisation"
            m = self.machine
            who = f"thread {m.thread(bar.maker % m.block_lanes)} of block {m.coordinates(bar.maker // m.block_lanes)}"
            raise AccessFault(
                "mbarrier", int(index[i]), f"uses an mbarrier that {who} initialised, without {missing} between them", "shared memory"
            )
        users[lanes] = True

    # ---- other blocks of a cluster

    def _remote(
        self,
        f: Fragment,
        place: np.ndarray,
        row: np.ndarray,
        by: np.ndarray | None = None,
        date: np.ndarray | None = None,
    ) -> None:
        if self.cluster == 1:
            return
        owner = place // self.machine.shared.row
        away = owner != f.blocks
        if not away.any():
            return
        self._started(owner, away, row)
        if by is not None and date is not None:
            for block, column, when in np.unique(np.stack([owner, by - self.threads, date], 1)[away], axis=0).tolist():
                self.remote_copies[block, column] = max(when, self.remote_copies.get((block, column), 0))
            return
        self.reach(owner, f.lanes)

    def reach(self, owner: np.ndarray, lanes: np.ndarray) -> None:
        """Lanes use shared memory of blocks `owner`: those other than their own must not leave before they know of it."""
        away = owner != lanes // self.machine.block_lanes
        if not away.any():
            return
        owner, lanes = owner[away], lanes[away]
        at = (owner, lanes % self.threads // 32)
        np.maximum.at(self.remote, at, self.clocks.clock[lanes // 32])
        np.bitwise_or.at(self.remote_lanes, at, U32(1) << (lanes % 32).astype(U32))

    def _started(self, owner: np.ndarray, away: np.ndarray, row: np.ndarray) -> None:
        """Who reaches for shared memory of another block must know that the block runs."""
        per_block = self.machine.warps_per_block
        first = owner % self.cluster * per_block
        known = np.zeros(row.size, np.int32)
        for w in range(per_block):
            known = np.maximum(known, self.clocks.seen[row, ORDER, first + w])
        bad = away & (known < STARTED)
        if bad.any():
            i = int(np.flatnonzero(bad)[0])
            target = self.machine.coordinates(int(owner[i]))
            raise AccessFault(
                "remote shared memory", i, f"block {target} may not have started: no cluster barrier before this access", "shared memory"
            )

    # ---- ends

    def finish(self) -> None:
        """At the end of a launch: no block may have left while another of its cluster still used its shared memory."""
        if self.cluster == 1 or not (self.remote.any() or self.remote_copies):
            return
        m = self.machine
        for block in range(m.block_count):
            known = self.clocks.of_block(block)
            who = ""
            warps = np.flatnonzero(self.remote[block] > known[: self.width])
            for w in warps.tolist():
                lanes = int(self.remote_lanes[block, w])
                own = self.clocks.own_column[w * 32 : w * 32 + 32]
                if any(lanes >> k & 1 and (own[k] < 0 or known[own[k]] < self.remote[block, w]) for k in range(32)):
                    peer = block // self.cluster * self.cluster + w // m.warps_per_block
                    who = f"warp {w % m.warps_per_block} of block {m.coordinates(peer)} still uses"
            for (owner, column), date in self.remote_copies.items():
                if owner == block and known[column] < date:
                    who = "an asynchronous store still writes"
            if who:
                raise KernelFault(
                    "remote shared memory",
                    f"the block may leave while {who} its shared memory",
                    block=m.coordinates(block),
                    kernel=m.program.kernel.name,
                )
