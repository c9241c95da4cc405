"""Conflicts in global memory within one launch.

Every place that the kernel may write remembers who wrote it last, who read it last, which cluster read it, and whether somebody did so
by a load that is not coherent (`.nc`). Threads of a cluster are ordered by its barriers (`clocks`), those of different ones only by what
they release and acquire in global memory (`communication`). Two strong accesses, of different clusters both of the whole GPU's scope, or
writing the value that is there already, are no conflict.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from ptx_emulator.clocks import ORDER
from ptx_emulator.communication import Communication
from ptx_emulator.memory import AccessFault

if TYPE_CHECKING:
    from ptx_emulator.clocks import Clocks
    from ptx_emulator.machine import Machine
    from ptx_emulator.memory import Buffer, Manner

_MANY = -1
_STRONG, _WIDE = 1 << 31, 1 << 30
_PAGE = 12  # bits of a number within a page of places


class _Record:
    """Of one buffer, by places of some bytes.

    writes   of the last write, (thread + 1) << 32 | _STRONG if it was | _WIDE if of the whole GPU | date
    reads    the same of the last read: of several readers of a place, one
    readers  cluster + 1 of the weak ones, or _MANY
    fixed    somebody read it as memory that does not change during the launch

    Places are kept by pages, as a buffer's rows may lie gigabytes apart.
    """

    def __init__(self, places: int) -> None:
        self.page = np.zeros((places >> _PAGE) + 1, np.int32)
        self.pages = 1  # page 0 belongs to nobody
        self.writes = np.zeros(1 << _PAGE, np.int64)
        self.reads = np.zeros(0, np.int64)
        self.readers = np.zeros(0, np.int32)
        self.fixed = np.zeros(0, bool)

    def index(self, place: np.ndarray) -> np.ndarray:
        """Where the notes on these places are."""
        high = place >> _PAGE
        page = self.page[high]
        if not page.all():
            new = np.unique(high[page == 0])
            self.page[new] = self.pages + np.arange(new.size)
            self.pages += new.size
            page = self.page[high]
            if self.pages << _PAGE > self.writes.size:
                self.writes = _longer(self.writes, self.pages << _PAGE)
        for name in ("reads", "readers", "fixed"):
            notes = getattr(self, name)
            if 0 < notes.size < self.writes.size:
                setattr(self, name, _longer(notes, self.writes.size))
        return (page.astype(np.int64) << _PAGE) | (place & ((1 << _PAGE) - 1))

    def noting(self, name: str) -> np.ndarray:
        """`reads`, `readers` or `fixed`, which exist from the first note on."""
        notes: np.ndarray = getattr(self, name)
        if not notes.size:
            notes = np.zeros(self.writes.size, notes.dtype)
            setattr(self, name, notes)
        return notes


def _longer(array: np.ndarray, size: int) -> np.ndarray:
    longer = np.zeros(max(size, 2 * array.size), array.dtype)
    longer[: array.size] = array
    return longer


def _places(lanes: np.ndarray, addresses: np.ndarray, manner: Manner) -> Iterable[tuple[int, int]]:
    """(lane, address) of an access by which blocks may order each other."""
    return zip(lanes.tolist(), np.broadcast_to(addresses, lanes.shape).tolist(), strict=True) if manner.wide else ()


class GlobalRaces:
    """Of one launch. Threads are numbered through all chunks; `base` is the first one of the chunk under way, `next` of the one behind."""

    def __init__(self, granule: int) -> None:
        self.granule = granule
        self.communication = Communication()
        self.records: dict[int, _Record] = {}
        self.machine: Machine | None = None
        self.base = self.next = 0

    def enter(self, machine: Machine) -> None:
        """A chunk starts."""
        self.base, self.next = self.next, self.next + machine.alive.size
        self.machine = machine
        self.communication.pending.clear()

    def _record(self, buffer: Buffer) -> _Record:
        found = self.records.get(id(buffer))
        if found is None:
            found = self.records[id(buffer)] = _Record(buffer.length // self.granule + 1)
        return found

    def _cells(self, record: _Record, place: np.ndarray, width: int, count: int) -> list[np.ndarray]:
        start = place * width // self.granule
        first = record.index(start)
        last = max(width * count // self.granule, 1) - 1  # a naturally aligned access lies within a page
        return [first + k if k else first for k in range(last + 1)]

    def _who(self, other: int) -> str:
        m = self.machine
        assert m is not None
        lane = other - self.base
        if not 0 <= lane < m.alive.size:
            return "another block"
        return f"thread {m.thread(lane)} of block {m.coordinates(lane // m.block_lanes)}"

    def _clocks(self) -> Clocks:
        assert self.machine is not None
        assert self.machine.races is not None
        return self.machine.races.clocks

    def _cluster(self, thread: np.ndarray) -> np.ndarray:
        """Of threads numbered through all chunks."""
        return thread // (self._clocks().width * 32)

    def _unordered(self, lanes: np.ndarray, noted: np.ndarray, manner: Manner) -> np.ndarray:
        """Whether accesses of other threads (`_Record.writes`) are not ordered before what these lanes do."""
        mine, other = lanes + self.base, (noted >> 32) - 1
        bad = (noted != 0) & (other != mine)
        if manner.strong:
            bad &= (noted & _STRONG == 0) | (self._cluster(other) != self._cluster(mine)) & ~(manner.wide & (noted & _WIDE != 0))
        index = np.flatnonzero(bad)
        if not index.size:
            return bad
        clocks, cluster = self._clocks(), self._cluster(other[index])
        rows, date = clocks.row[lanes[index]], (noted[index] & (_WIDE - 1)).astype(np.int32)
        thread = (other[index] % (clocks.width * 32)).astype(np.int32)
        near = cluster == self._cluster(mine[index])
        late = np.empty(index.size, bool)
        late[near] = clocks.unknown(rows[near], ORDER, thread[near], date[near])
        late[~near] = self.communication.unknown(clocks, rows[~near], cluster[~near], thread[~near], date[~near])
        bad[index] = late
        return bad

    def _dated(self, lanes: np.ndarray, manner: Manner) -> np.ndarray:
        """What is noted of accesses that these lanes make now."""
        dates = self._clocks().clock[lanes // 32]
        return (lanes + (self.base + 1)).astype(np.int64) << 32 | (_STRONG * manner.strong | _WIDE * manner.wide) | dates

    def read(self, buffer: Buffer, lanes: np.ndarray, place: np.ndarray, width: int, count: int, manner: Manner) -> None:
        """Check and note loads of `count` elements of `width` bytes at `place`, in elements."""
        record = self._record(buffer)
        if place.size < lanes.size:
            place = np.broadcast_to(place, lanes.shape)
        now = self._dated(lanes, manner)
        for cell in self._cells(record, place, width, count):
            written = record.writes[cell]
            if written.any():
                bad = self._unordered(lanes, written, manner) if manner.coherent else written != 0
                if bad.any():
                    i = int(np.flatnonzero(bad)[0])
                    who = self._who(int(written[i] >> 32) - 1)
                    how = "reads" if manner.coherent else "reads, by a load that is not coherent (.nc),"
                    raise AccessFault("global-memory race", i, f"{how} what {who} writes in this launch, without order", buffer.name)
            record.noting("reads")[cell] = now
            if not manner.coherent:
                record.noting("fixed")[cell] = True
            if not manner.strong:
                readers = record.noting("readers")
                mine = (self._cluster(lanes + self.base) + 1).astype(np.int32)
                old = readers[cell]
                new = np.where((old == 0) | (old == mine), mine, np.int32(_MANY))
                readers[cell] = new
                lost = readers[cell] != new
                if lost.any():
                    readers[cell[lost]] = _MANY

    def write(
        self, buffer: Buffer, lanes: np.ndarray, place: np.ndarray, width: int, values: list[np.ndarray], manner: Manner
    ) -> np.ndarray | None:
        """Check and note stores before they are carried out; which of them meet another of this very instruction (None: none does)."""
        record = self._record(buffer)
        mine, cluster = self._dated(lanes, manner), self._cluster(lanes + self.base) + 1
        met: np.ndarray | None = None

        def refuse(bad: np.ndarray, what: str, noted: np.ndarray | None = None) -> None:
            if bad.any():
                bad = bad & self._changes(buffer, place, width, values)
            if bad.any():
                i = int(np.flatnonzero(bad)[0])
                who = "" if noted is None else self._who(int(noted[i] >> 32) - 1)
                raise AccessFault("global-memory race", i, f"{what.format(who=who)}, without order", buffer.name)

        for cell in self._cells(record, place, width, len(values)):
            written = record.writes[cell]
            if written.any():
                refuse(self._unordered(lanes, written, manner), "writes another value than {who}", written)
            if record.readers.size and not self.communication.released:
                readers = record.readers[cell]
                refuse((readers != 0) & (readers != cluster), "writes what another block reads in this launch")
            if record.reads.size:
                read = record.reads[cell]
                refuse(self._unordered(lanes, read, manner), "writes what {who} has read", read)
            if record.fixed.size:
                refuse(record.fixed[cell], "writes what is read by loads that are not coherent (.nc)")
            record.writes[cell] = mine
            lost = record.writes[cell] != mine
            if lost.any() and not manner.strong:
                met = lost if met is None else met | lost
        return met

    # ---- strong accesses

    def publish(self, lanes: np.ndarray, addresses: np.ndarray, manner: Manner) -> None:
        """Before strong stores: what they pass on to those who acquire there."""
        for lane, address in _places(lanes, addresses, manner):
            cluster = int(self._cluster(np.int64(lane + self.base)))
            self.communication.publish(self._clocks(), lane, cluster, address, release=manner.release)

    def observe(self, lanes: np.ndarray, addresses: np.ndarray, manner: Manner) -> None:
        """Before strong loads, which find what was stored last."""
        for lane, address in _places(lanes, addresses, manner):
            self.communication.observe(self._clocks(), lane, address, acquire=manner.acquire)

    def after(self, buffer: Buffer, place: np.ndarray, width: int, values: list[np.ndarray], met: np.ndarray) -> None:
        """After the stores: those that met others must have written the same."""
        bad = met & self._changes(buffer, place, width, values)
        if bad.any():
            i = int(np.flatnonzero(bad)[0])
            raise AccessFault("global-memory race", i, "two threads write different values to one place with this instruction", buffer.name)

    @staticmethod
    def _changes(buffer: Buffer, place: np.ndarray, width: int, values: list[np.ndarray]) -> np.ndarray:
        view = buffer.views[width]
        changed = np.zeros(place.shape, bool)
        for k, value in enumerate(values):
            changed |= view[place + k] != value
        return changed
