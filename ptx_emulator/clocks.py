"""Who knows of whose accesses: vector clocks of the threads of a chunk.

Each warp has a clock that advances whenever one of its threads passes something on; an access is dated by it. A row says up to which
date, per column, accesses happen before what comes next. Columns are the warps of a cluster, then, made when they are needed, single
threads (for what one lane passed on, its warp did not) and asynchronous copies (dated by the phase of the mbarrier or by the group they
complete in). The lanes of a warp share a row until one of them learns something alone; from then on it has its own, until the warp
meets again.

Three kinds of knowledge are kept, each passed on by whatever passes on order:

ORDER    the access happens before what comes next
BRIDGED  and a proxy fence lies between, so that it happens before asynchronous copies, too
INIT     and, if it is the initialisation of an mbarrier, it has been fenced for the other blocks and for copies
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ptx_emulator.machine import Machine

ORDER, BRIDGED, INIT = range(3)
STARTED = 1  # a date that says no more than: the warp runs
_BEFORE = "griddepcontrol.wait"  # name of a column
_LANES = np.arange(32)
_BITS = (np.uint32(1) << _LANES.astype(np.uint32)).astype(np.uint32)


def fit(known: np.ndarray, columns: int) -> np.ndarray:
    """`known` [..., n] with at least `columns` columns."""
    missing = columns - known.shape[-1]
    return known if missing <= 0 else np.concatenate([known, np.zeros((*known.shape[:-1], missing), np.int32)], -1)


def merge(a: np.ndarray | None, b: np.ndarray) -> np.ndarray:
    """What two know together."""
    if a is None:
        return b
    return np.maximum(fit(a, b.shape[-1]), fit(b, a.shape[-1]))


def unknown_to(known: np.ndarray, rows: np.ndarray, own_column: np.ndarray, thread: np.ndarray, date: np.ndarray) -> np.ndarray:
    """Whether what `thread` of a cluster did at `date` is in none of these `rows` of `known` [rows, columns].

    own_column  column of each thread of the cluster, -1: it has none; numbers of `thread` behind those are columns of copies, -1 is nobody
    """
    limit = own_column.size
    column = np.where(thread < limit, thread >> 5, thread - limit)
    bad = (date > known[rows, column]) & (thread >= 0)
    index = np.flatnonzero(bad & (thread < limit))
    if index.size:
        own = own_column[thread[index]]
        row = rows if rows.size == 1 else rows[index]
        there = (own >= 0) & (own < known.shape[-1])
        bad[index] = ~there | (date[index] > known[row, np.where(there, own, 0)])
    return bad


class Clocks:
    """`clock[g]` of warp g of the chunk; `seen[row, kind, column]`; `row[lane]` where a lane's knowledge stands now."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.width = machine.warps_per_block * machine.launch.cluster_size
        warps = machine.block_count * machine.warps_per_block
        self.kinds = 3 if machine.program.build.asynchronous else 1
        self.clock = np.full(warps, STARTED + 1, np.int32)
        self.seen = np.zeros((warps, self.kinds, self.width), np.int32)
        self.fenced: np.ndarray | None = None  # what each row knew at its last fence of cluster scope or wider
        self.rows, self.columns = warps, self.width
        self.row = np.arange(machine.alive.size) // 32
        self.warp_of_row = np.arange(warps)
        self.split = np.zeros(warps, bool)  # some lane of the warp has its own row
        self.own_row = np.full(machine.alive.size, -1)
        self.own_column = np.full(self.width * 32, -1)
        self.single = False  # there are columns of single threads
        self.named: dict[Hashable, int] = {}

    # ---- rows and columns

    def _room(self, rows: int, columns: int) -> None:
        have = self.seen.shape
        if rows <= have[0] and columns <= have[2]:
            return
        shape = (max(rows, have[0] * 3 // 2) if rows > have[0] else have[0], have[1], columns + 16 if columns > have[2] else have[2])
        for name in ("seen", "fenced"):
            old = getattr(self, name)
            if old is not None:
                new = np.zeros(shape, np.int32)
                new[: have[0], :, : have[2]] = old
                setattr(self, name, new)

    def column(self, name: Hashable) -> int:
        """The column of an asynchronous agent of each cluster, by name."""
        if name not in self.named:
            self._room(0, self.columns + 1)
            self.named[name] = self.columns
            self.columns += 1
        return self.named[name]

    def columns_of(self, lanes: np.ndarray) -> np.ndarray:
        """The columns of single threads."""
        self.single = True
        return self.assign(self.own_column, lanes)

    def assign(self, columns: np.ndarray, lanes: np.ndarray) -> np.ndarray:
        """Columns of single threads by a table [threads of a cluster], -1: none yet; it is filled as it is asked."""
        threads = lanes % (self.width * 32)
        new = np.unique(threads[columns[threads] < 0])
        if new.size:
            self._room(0, self.columns + new.size)
            columns[new] = self.columns + np.arange(new.size)
            self.columns += new.size
        return columns[threads]

    def _own_rows(self, lanes: np.ndarray) -> np.ndarray:
        """Rows that these lanes share with nobody."""
        new = lanes[self.own_row[lanes] < 0]
        if new.size:
            self._room(self.rows + new.size, 0)
            self.own_row[new] = self.rows + np.arange(new.size)
            self.rows += new.size
            self.warp_of_row = np.r_[self.warp_of_row, new // 32]
        rows = self.own_row[lanes]
        fresh = self.row[lanes] != rows
        self.seen[rows[fresh]] = self.seen[self.row[lanes[fresh]]]
        if self.fenced is not None:
            self.fenced[rows[fresh]] = self.fenced[self.row[lanes[fresh]]]
        self.row[lanes] = rows
        self.split[lanes // 32] = True
        return rows

    def _parties(self, lanes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(warps all of whose lanes are here, their rows, the other lanes) of ascending lanes."""
        warps = lanes // 32
        first = np.flatnonzero(np.r_[True, warps[1:] != warps[:-1]])
        counts = np.diff(np.r_[first, lanes.size])
        warps = warps[first]
        whole = counts == self.machine.alive.reshape(-1, 32)[warps].sum(1)
        if whole.all():
            return warps, np.unique(self.row[lanes]) if self.split[warps].any() else warps, lanes[:0]
        mask = np.repeat(whole, counts)
        return warps[whole], np.unique(self.row[lanes[mask]]), lanes[~mask]

    def _unite(self, table: np.ndarray, warps: np.ndarray) -> np.ndarray:
        """What the lanes of each warp that have not left have together in `seen` or `fenced`."""
        known = table[warps]
        some = self.split[warps]
        if some.any():
            mine = warps[some, None]
            lanes = mine * 32 + _LANES
            known[some] = table[np.where(self.machine.alive[lanes], self.row[lanes], mine)].max(1)
        return known

    # ---- any lanes

    def release(self, lanes: np.ndarray) -> np.ndarray:
        """What these lanes of one cluster pass on together: what they know, and their own accesses."""
        whole, rows, rest = self._parties(lanes)
        if rest.size:
            own = self.columns_of(rest)
            rows = np.unique(np.r_[rows, self.row[rest]])
        known = self.seen[rows].max(0)
        known[ORDER, whole % self.width] = self.clock[whole]
        if rest.size:
            known[ORDER, own] = self.clock[rest // 32]
            self.clock[np.unique(rest // 32)] += 1
        self.clock[whole] += 1
        return known

    def learn(self, lanes: np.ndarray, known: np.ndarray) -> None:
        """Each of these lanes learns the same."""
        _, rows, rest = self._parties(lanes)
        if rest.size:
            rows = np.r_[rows, self._own_rows(rest)]
        part = self.seen[rows, :, : known.shape[-1]]
        self.seen[rows, :, : known.shape[-1]] = np.maximum(part, known)

    def learn_singly(self, lanes: np.ndarray, columns: np.ndarray, dates: np.ndarray) -> None:
        """Each of these lanes learns the ORDER of one column, up to a date."""
        rows = self._own_rows(lanes)
        self.seen[rows, ORDER, columns] = np.maximum(self.seen[rows, ORDER, columns], dates)

    def fence(self, lanes: np.ndarray, *, proxy: bool = False, init: bool = False) -> None:
        """A fence of cluster scope or wider, one between proxies, or one of mbarrier initialisations."""
        if self.kinds == 1 and (proxy or init):
            return
        _, rows, rest = self._parties(lanes)
        own = np.zeros(0, np.int64)
        if rest.size:
            own, mine = self.columns_of(rest), self._own_rows(rest)
        parts = [(rows, None), (mine, own)] if rest.size else [(rows, None)]
        for some, single in parts:
            known = self.seen[some]
            dated = known.copy()
            if single is None:  # rows of whole warps: each knows its own warp
                lead = self.warp_of_row[some]
                dated[np.arange(some.size), ORDER, lead % self.width] = self.clock[lead]
            else:
                dated[np.arange(some.size), ORDER, single] = self.clock[rest // 32]
            if proxy:
                known[:, BRIDGED] = np.maximum(known[:, BRIDGED], dated[:, ORDER])
                known[:, INIT] = np.maximum(known[:, INIT], known[:, BRIDGED])
                self.seen[some] = known
                continue
            if self.fenced is None:
                self.fenced = np.zeros_like(self.seen)
            if init:
                column = single if single is not None else lead % self.width
                known[np.arange(some.size), INIT, column] = dated[np.arange(some.size), ORDER, column]
                self.seen[some] = known
                self.fenced[some, INIT] = known[:, INIT]
            else:
                self.fenced[some] = dated
        self.clock[np.unique(lanes // 32)] += 1

    def meet(self, lanes: np.ndarray) -> None:
        """`bar.warp.sync` among some lanes of one warp, or among all lanes of several."""
        whole, _, rest = self._parties(lanes)
        if whole.size:
            self.seen[whole] = self._unite(self.seen, whole)
            self._rejoin(whole)
            self.seen[whole, ORDER, whole % self.width] = self.clock[whole]
            self.clock[whole] += 1
        if rest.size:
            own, rows = self.columns_of(rest), self._own_rows(rest)
            known = self.seen[rows].max(0)
            known[ORDER, own] = self.clock[rest // 32]
            self.seen[rows] = known
            self.clock[np.unique(rest // 32)] += 1

    def _rejoin(self, warps: np.ndarray) -> None:
        some = warps[self.split[warps]]
        if some.size:
            if self.fenced is not None:
                self.fenced[some] = self._unite(self.fenced, some)
            self.row[(some[:, None] * 32 + _LANES).ravel()] = np.repeat(some, 32)
            self.split[some] = False

    # ---- whole warps: barriers

    def release_warps(self, warps: np.ndarray, *, relaxed: bool = False) -> np.ndarray:
        """What each warp passes on [warps, kinds, columns]; a relaxed arrival that it runs, and what it has fenced."""
        own = warps % self.width
        rows = np.arange(warps.size)
        if relaxed:
            nothing = np.zeros((warps.size, *self.seen.shape[1:]), np.int32)
            known = nothing if self.fenced is None else self._unite(self.fenced, warps)
            known[rows, ORDER, own] = np.maximum(known[rows, ORDER, own], STARTED)
        else:
            known = self._unite(self.seen, warps)
            known[rows, ORDER, own] = self.clock[warps]
        self.clock[warps] += 1
        return known

    def learn_warps(self, warps: np.ndarray, known: np.ndarray) -> None:
        """Every lane of each warp learns `known` [warps, kinds, columns], which holds what each of its lanes knew alone."""
        self._rejoin(warps)
        n = known.shape[-1]
        self.seen[warps, :, :n] = np.maximum(self.seen[warps, :, :n], known)

    # ---- the kernels before this one

    def wait_for_kernels(self, lanes: np.ndarray) -> None:
        """`griddepcontrol.wait` by these lanes: an event that whoever learns of it is ordered behind."""
        column = self.column(_BEFORE)
        known = np.zeros((self.kinds, column + 1), np.int32)
        known[ORDER, column] = 1
        self.learn(lanes, known)

    def after_kernels(self, lanes: np.ndarray) -> np.ndarray:
        """Whether each of these lanes knows that some thread has waited for the kernels before this one."""
        column = self.column(_BEFORE)
        return self.seen[self.row[lanes], ORDER, column] > 0

    # ---- questions

    def unknown(self, rows: np.ndarray, kind: int, thread: np.ndarray, date: np.ndarray) -> np.ndarray:
        """Whether what `thread` did at `date` is unknown to `rows`; numbers from 32 * width on are columns of copies, -1 is nobody."""
        return unknown_to(self.seen[:, kind], rows, self.own_column, thread, date)

    def unknown_lanes(self, rows: np.ndarray, kind: int, warps: np.ndarray, dates: np.ndarray, lanes: np.ndarray) -> np.ndarray:
        """Of bit masks `lanes` of warps whose accesses up to `dates` the rows do not know as a whole: those not known singly."""
        if not self.single or not lanes.size:
            return lanes
        own = self.own_column.reshape(self.width, 32)[warps]
        known = (own >= 0) & (self.seen[rows[:, None], kind, own] >= dates[:, None])
        return lanes & ~np.where(known, _BITS, np.uint32(0)).sum(1, dtype=np.uint32)

    def of_block(self, block: int) -> np.ndarray:
        """ORDER that some thread of a block knows, by column."""
        lanes = self.machine.block_lanes
        rows = np.unique(self.row[block * lanes : (block + 1) * lanes])
        return self.seen[rows, ORDER].max(0)
