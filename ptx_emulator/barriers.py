"""Named barriers of a block (`bar`, `barrier`) and the cluster barrier."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ptx_emulator.clocks import fit, merge
from ptx_emulator.memory import AccessFault

if TYPE_CHECKING:
    from ptx_emulator.fragment import Fragment
    from ptx_emulator.machine import Machine

IDS = 16


class NamedBarriers:
    """Sixteen barriers per block; each counts the warps that arrived, in threads, as the hardware does."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.arrived = np.zeros((machine.block_count, IDS), np.int64)
        self.expected = np.zeros((machine.block_count, IDS), np.int64)  # 0: every thread that has not left
        self.open = np.zeros((machine.block_count, IDS), bool)
        self.came = np.zeros((IDS, machine.block_count * machine.warps_per_block), bool)
        self.known: dict[int, np.ndarray] = {}  # what those knew who have arrived [blocks, kinds, columns]
        self.waiting: dict[int, list[tuple[Fragment, Any]]] = {}

    def fragments(self) -> list[Fragment]:
        """All fragments that wait."""
        return [f for parts in self.waiting.values() for f, _ in parts]

    def split_whole_warps(self, f: Fragment, live: list[int], aligned: bool) -> tuple[Fragment | None, Fragment | None]:
        """(lanes whose whole warp is here, the rest). An aligned barrier needs even the lanes that have left: PTX demands all of a warp."""
        machine = self.machine
        if f.whole_warps:
            return f, None
        warps, first, bits = machine.warps(f)
        complete = bits == machine.lane_bits(warps, machine.launched if aligned else machine.alive)
        if complete.all():
            return f, None
        lanes = np.repeat(complete, np.diff(np.r_[first, f.n]))
        ready = f.take(np.flatnonzero(lanes), live, f.pc) if lanes.any() else None
        return ready, f.take(np.flatnonzero(~lanes), live, f.pc)

    def arrive(self, f: Fragment, number: int, count: int, wait: bool, note: Any = None) -> None:
        """Whole warps arrive at barrier `number`, `count` threads expected (0: all)."""
        machine = self.machine
        warps, first, _ = machine.warps(f)
        blocks = warps // machine.warps_per_block
        here = np.unique(blocks)
        clash = self.open[here, number] & (self.expected[here, number] != count)
        if clash.any():
            block = here[clash][0]
            position = int(np.flatnonzero(f.blocks == block)[0])
            raise AccessFault(
                "barrier mismatch",
                position,
                f"barrier {number} expects {count or 'all'} threads here and {int(self.expected[block, number]) or 'all'} elsewhere",
            )
        again = self.came[number, warps]
        if again.any():
            raise AccessFault("barrier mismatch", int(first[again][0]), f"a warp arrives twice at barrier {number} before it completes")
        self.came[number, warps] = True
        self.open[here, number] = True
        self.expected[here, number] = count
        np.add.at(self.arrived[:, number], blocks, 32)
        over = (count > 0) & (self.arrived[here, number] > count)
        if np.any(over):
            position = int(np.flatnonzero(f.blocks == here[over][0])[0])
            raise AccessFault("barrier mismatch", position, f"more threads arrive at barrier {number} than the {count} it expects")
        if machine.races:
            self._publish(number, warps, blocks)
        if wait:
            self.waiting.setdefault(number, []).append((f, note))
        self._release(number)

    def _publish(self, number: int, warps: np.ndarray, blocks: np.ndarray) -> None:
        assert self.machine.races is not None
        known = self.machine.races.clocks.release_warps(warps)
        first = np.flatnonzero(np.r_[True, blocks[1:] != blocks[:-1]])
        together = np.maximum.reduceat(known, first, axis=0)
        before = self.known.get(number)
        if before is None:
            before = np.zeros((self.machine.block_count, *known.shape[1:]), np.int32)
        self.known[number] = before = fit(before, known.shape[-1])
        before[blocks[first]] = np.maximum(before[blocks[first]], together)

    def release_ready(self) -> None:
        """Let those go on whose barrier is complete, now that threads have left."""
        for number in list(self.waiting):
            self._release(number)

    def _release(self, number: int) -> None:
        machine = self.machine
        expected = self.expected[:, number]
        opened = self.open[:, number]
        if (opened & (expected == 0)).any():
            alive = machine.alive.reshape(machine.block_count, machine.warps_per_block, 32).any(2)
            came = self.came[number].reshape(machine.block_count, machine.warps_per_block)
            everyone = (came | ~alive).all(1)
            done = opened & np.where(expected == 0, everyone, self.arrived[:, number] == expected)
        else:
            done = opened & (self.arrived[:, number] == expected)
        if not done.any():
            return
        machine.events += 1
        came = self.came[number].reshape(machine.block_count, machine.warps_per_block)
        came[done] = False
        self.arrived[done, number] = 0
        self.open[done, number] = False
        released: list[tuple[Fragment, Any]] = []
        kept: list[tuple[Fragment, Any]] = []
        for f, note in self.waiting.pop(number, []):
            mask = done[f.blocks]
            live = machine.program.blocks[f.pc].live_in
            if mask.all():
                released.append((f, note))
            elif mask.any():
                released.append((f.take(np.flatnonzero(mask), live, f.pc), note))
                kept.append((f.take(np.flatnonzero(~mask), live, f.pc), note))
            else:
                kept.append((f, note))
        if kept:
            self.waiting[number] = kept
        reductions = [(f, note) for f, note in released if note is not None]
        if reductions:
            _reduce(machine, reductions)
        if machine.races:
            for f, _ in released:
                warps = machine.warps(f)[0]
                machine.races.clocks.learn_warps(warps, self.known[number][warps // machine.warps_per_block])
            self.known[number][done] = 0
        for f, _ in released:
            f.pc += 1
            machine.enqueue(f)


def _reduce(machine: Machine, parts: list[tuple[Fragment, Any]]) -> None:
    """`barrier.red`: every waiting thread gets the reduction over its block's predicates."""
    total = np.zeros(machine.block_count, np.int64)
    count = np.zeros(machine.block_count, np.int64)
    for f, note in parts:
        _, _, predicate = note
        np.add.at(total, f.blocks, f.full(predicate).astype(np.int64))
        np.add.at(count, f.blocks, 1)
    for f, note in parts:
        operation, destination, _ = note
        mine = total[f.blocks]
        if operation == "popc":
            f.regs[destination] = mine.astype(np.uint32)
        else:
            f.regs[destination] = mine > 0 if operation == "or" else mine == count[f.blocks]


class ClusterBarriers:
    """`barrier.cluster.arrive` / `.wait`: one barrier with phases per cluster."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.count = machine.block_count // machine.launch.cluster_size
        self.lanes_per_cluster = machine.block_lanes * machine.launch.cluster_size
        self.phase = np.zeros(self.count, np.int64)
        self.arrived = np.zeros(machine.alive.size, bool)
        self.entered = np.full(machine.alive.size, -1, np.int64)  # phase in which each lane last arrived, -1: no arrival to wait for
        self.gathering: list[np.ndarray | None] = [None] * self.count
        self.passed: list[np.ndarray | None] = [None] * self.count
        self.waiting: list[Fragment] = []

    def arrive(self, f: Fragment, release: bool) -> None:
        """Threads arrive; without `release`, what they wrote is not handed on. `AccessFault` where one arrives twice."""
        bad = self.entered[f.lanes] >= 0
        if bad.any():
            raise AccessFault(
                "barrier mismatch", int(np.flatnonzero(bad)[0]), "a thread arrives twice at the cluster barrier without waiting"
            )
        cluster = f.lanes // self.lanes_per_cluster
        self.entered[f.lanes] = self.phase[cluster]
        self.arrived[f.lanes] = True
        races = self.machine.races
        if races:
            warps = self.machine.warps(f)[0]
            known = races.clocks.release_warps(warps, relaxed=not release)
            for i, c in enumerate((warps // races.width).tolist()):
                self.gathering[c] = merge(self.gathering[c], known[i])
        self.release_ready()

    def wait(self, f: Fragment) -> list[Fragment]:
        """The lanes whose phase is complete; the others stay."""
        bad = self.entered[f.lanes] < 0
        if bad.any():
            raise AccessFault(
                "barrier mismatch", int(np.flatnonzero(bad)[0]), "a thread waits at the cluster barrier without having arrived"
            )
        done = self.phase[f.lanes // self.lanes_per_cluster] > self.entered[f.lanes]
        live = self.machine.program.blocks[f.pc].live_in
        if done.all():
            go, stay = f, None
        elif not done.any():
            go, stay = None, f
        else:
            go, stay = f.take(np.flatnonzero(done), live, f.pc), f.take(np.flatnonzero(~done), live, f.pc)
        if stay is not None:
            self.waiting.append(stay)
        if go is None:
            return []
        self.entered[go.lanes] = -1
        if self.machine.races:
            cluster = go.lanes // self.lanes_per_cluster
            for c in np.unique(cluster).tolist():
                known = self.passed[c]
                assert known is not None  # a phase is complete when all have arrived
                self.machine.races.clocks.learn(go.lanes[cluster == c], known)
        return [go]

    def release_ready(self) -> None:
        """Let clusters go on whose threads have all arrived or left."""
        alive = self.machine.alive.reshape(self.count, -1)
        arrived = self.arrived.reshape(self.count, -1)
        done = arrived.any(1) & ~(alive & ~arrived).any(1)
        if not done.any():
            return
        self.machine.events += 1
        self.phase[done] += 1
        arrived[done] = False
        for c in np.flatnonzero(done).tolist():
            self.passed[c], self.gathering[c] = self.gathering[c], None
        waiting, self.waiting = self.waiting, []
        for f in waiting:
            self.machine.enqueue(f)
