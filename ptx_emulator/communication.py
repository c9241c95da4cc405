"""How blocks order each other: by strong accesses of global memory, which are atomics, and loads and stores that are not weak.

A place of global memory keeps what was released there, one record after another. Who acquires there learns of all records so far: the
clocks have a column for each place, dated by the number of records, so that barriers and mbarriers pass that on like anything else.
A fence of the whole GPU makes a release of a relaxed access after it, and an acquire of a relaxed access before it.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ptx_emulator.clocks import ORDER, merge, unknown_to

if TYPE_CHECKING:
    from collections.abc import Hashable

    from ptx_emulator.clocks import Clocks


class Released(NamedTuple):
    """What a thread of a cluster knew: ORDER by column, and what columns its clocks gave to single threads and to places."""

    cluster: int
    known: np.ndarray
    own_column: np.ndarray
    named: dict[Hashable, int]


class Communication:
    """Of one launch, whose chunks have clocks of their own. Clusters are numbered through all chunks."""

    def __init__(self) -> None:
        self.released: dict[int, list[Released]] = {}  # by address
        self.pending: dict[int, dict[int, int]] = {}  # lane -> {address: records} of relaxed reads that no fence has followed

    def publish(self, clocks: Clocks, lane: int, cluster: int, address: int, *, release: bool) -> None:
        """A thread writes a place; not `release`: it passes on what lay before its last fence."""
        if release:
            known = clocks.release(np.array([lane]))[ORDER]
        elif clocks.fenced is not None:
            known = clocks.fenced[clocks.row[lane], ORDER].copy()
        else:
            return
        self.released.setdefault(address, []).append(Released(cluster, known, clocks.own_column, clocks.named))

    def observe(self, clocks: Clocks, lane: int, address: int, *, acquire: bool) -> None:
        """A thread reads a place; not `acquire`: it learns of the releases there at its next fence."""
        count = len(self.released.get(address, ()))
        if not count:
            return
        if acquire:
            self._learn(clocks, lane, address, count)
        else:
            self.pending.setdefault(lane, {})[address] = count

    def fence(self, clocks: Clocks, lanes: np.ndarray) -> None:
        """A fence of the whole GPU by these lanes."""
        for lane in lanes.tolist() if self.pending else ():
            for address, count in self.pending.pop(lane, {}).items():
                self._learn(clocks, lane, address, count)

    def _learn(self, clocks: Clocks, lane: int, address: int, count: int) -> None:
        clocks.learn_singly(np.array([lane]), np.array([clocks.column(address)]), np.array([count]))

    def unknown(self, clocks: Clocks, rows: np.ndarray, cluster: np.ndarray, thread: np.ndarray, date: np.ndarray) -> np.ndarray:
        """Whether what `thread` of another `cluster` did at `date` is unknown to `rows` of these clocks."""
        bad = np.ones(rows.size, bool)
        if not self.released:
            return bad
        _, first, group = np.unique(rows.astype(np.int64) << 32 | cluster, return_index=True, return_inverse=True)
        for g, i in enumerate(first.tolist()):
            records = self._of_cluster(clocks.seen[rows[i], ORDER], clocks.named, int(cluster[i]))
            if records:
                known = functools.reduce(merge, (record.known for record in records))
                index = np.flatnonzero(group == g)
                row = np.zeros(index.size, np.int64)
                bad[index] = unknown_to(known[None], row, records[0].own_column, thread[index], date[index])
        return bad

    def _of_cluster(self, known: np.ndarray, named: dict[Hashable, int], cluster: int) -> list[Released]:
        """The records of a cluster that somebody who knows this has learned of, directly or through others."""
        found: list[Released] = []
        taken = dict.fromkeys(self.released, 0)
        todo = [(known, named)]
        while todo:
            known, named = todo.pop()
            for address, records in self.released.items():
                column = named.get(address, known.size)
                count = int(known[column]) if column < known.size else 0
                for record in records[taken[address] : count]:
                    if record.cluster == cluster:
                        found.append(record)
                    todo.append((record.known, record.named))
                taken[address] = max(taken[address], count)
        return found
