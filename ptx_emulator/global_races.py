"""Conflicts in global memory within one launch.

Every place that the kernel may write remembers who wrote it last, and which block read it before anybody wrote. Threads of a block are
ordered by its barriers (`clocks`); blocks are not ordered at all, unless the kernel makes them communicate by atomics or strong stores,
which this does not follow: then only the threads of a block are judged. Strong loads alone order nobody. Writing the value that is there
already is no conflict.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ptx_emulator.clocks import ORDER
from ptx_emulator.memory import AccessFault

if TYPE_CHECKING:
    from ptx_emulator.machine import Machine
    from ptx_emulator.memory import Buffer

_MANY = -1
_PAGE = 12  # bits of a number within a page of places


class _Record:
    """Of one buffer, by places of some bytes: (thread + 1) << 32 | date of the last write; block + 1 of readers, or _MANY.

    Places are kept by pages, as a buffer's rows may lie gigabytes apart.
    """

    def __init__(self, places: int) -> None:
        self.page = np.zeros((places >> _PAGE) + 1, np.int32)
        self.pages = 1  # page 0 belongs to nobody
        self.writes = np.zeros(1 << _PAGE, np.int64)
        self.readers: np.ndarray | None = None

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
        if self.readers is not None and self.readers.size < self.writes.size:
            self.readers = _longer(self.readers, self.writes.size)
        return (page.astype(np.int64) << _PAGE) | (place & ((1 << _PAGE) - 1))


def _longer(array: np.ndarray, size: int) -> np.ndarray:
    longer = np.zeros(max(size, 2 * array.size), array.dtype)
    longer[: array.size] = array
    return longer


class GlobalRaces:
    """Of one launch. Threads are numbered through all chunks; `base` is the first one of the chunk under way."""

    def __init__(self, granule: int, communicates: bool) -> None:
        self.granule, self.communicates = granule, communicates
        self.records: dict[int, _Record] = {}
        self.machine: Machine | None = None
        self.base = 0

    def enter(self, machine: Machine) -> None:
        """A chunk starts."""
        if self.machine is not None:
            self.base += self.machine.alive.size
        self.machine = machine

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

    def _unordered(self, lanes: np.ndarray, written: np.ndarray) -> np.ndarray:
        """Whether writes by other threads are not ordered before what these lanes do."""
        m = self.machine
        assert m is not None
        assert m.races is not None
        other = (written >> 32) - 1 - self.base
        foreign = (written != 0) & (other != lanes)
        if not foreign.any():
            return foreign
        same_block = other // m.block_lanes == lanes // m.block_lanes
        bad = foreign & ~same_block & (not self.communicates)
        index = np.flatnonzero(foreign & same_block)
        if index.size:
            clocks = m.races.clocks
            thread, date = (other[index] % m.races.threads).astype(np.int32), (written[index] & 0xFFFFFFFF).astype(np.int32)
            bad[index] = clocks.unknown(clocks.row[lanes[index]], ORDER, thread, date)
        return bad

    def read(self, buffer: Buffer, lanes: np.ndarray, place: np.ndarray, width: int, count: int) -> None:
        """Check and note loads of `count` elements of `width` bytes at `place`, in elements."""
        record = self._record(buffer)
        m = self.machine
        assert m is not None
        if place.size < lanes.size:
            place = np.broadcast_to(place, lanes.shape)
        for cell in self._cells(record, place, width, count):
            written = record.writes[cell]
            if written.any():
                bad = self._unordered(lanes, written)
                if bad.any():
                    i = int(np.flatnonzero(bad)[0])
                    who = self._who(int(written[i] >> 32) - 1)
                    raise AccessFault("global-memory race", i, f"reads what {who} writes in this launch, without order", buffer.name)
            if not self.communicates:
                if record.readers is None:
                    record.readers = np.zeros(record.writes.size, np.int32)
                mine = ((lanes + self.base) // m.block_lanes + 1).astype(np.int32)
                old = record.readers[cell]
                new = np.where((old == 0) | (old == mine), mine, np.int32(_MANY))
                record.readers[cell] = new
                lost = record.readers[cell] != new
                if lost.any():
                    record.readers[cell[lost]] = _MANY

    def write(self, buffer: Buffer, lanes: np.ndarray, place: np.ndarray, width: int, values: list[np.ndarray]) -> np.ndarray | None:
        """Check and note stores before they are carried out; which of them meet another of this very instruction (None: none does)."""
        record = self._record(buffer)
        m = self.machine
        assert m is not None
        assert m.races is not None
        mine = (lanes + (self.base + 1)).astype(np.int64) << 32 | m.races.clocks.clock[lanes // 32]
        block = (lanes + self.base) // m.block_lanes + 1
        met: np.ndarray | None = None
        for cell in self._cells(record, place, width, len(values)):
            written = record.writes[cell]
            if written.any():
                bad = self._unordered(lanes, written)
                if bad.any():
                    bad &= self._changes(buffer, place, width, values)
                if bad.any():
                    i = int(np.flatnonzero(bad)[0])
                    who = self._who(int(written[i] >> 32) - 1)
                    raise AccessFault("global-memory race", i, f"writes another value than {who}, without order", buffer.name)
            if record.readers is not None and not self.communicates:
                read = record.readers[cell]
                bad = (read != 0) & (read != block)
                if bad.any():
                    bad &= self._changes(buffer, place, width, values)
                if bad.any():
                    i = int(np.flatnonzero(bad)[0])
                    raise AccessFault("global-memory race", i, "writes what another block reads in this launch, without order", buffer.name)
            record.writes[cell] = mine
            lost = record.writes[cell] != mine
            if lost.any():
                met = lost if met is None else met | lost
        return met

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
