"""Asynchronous copies: `cp.async` with groups, bulk copies and `st.async` with mbarriers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ptx_emulator import parser as ptx
from ptx_emulator.fragment import Fragment, faults_of, one_by_one
from ptx_emulator.instructions.forms import Modifiers
from ptx_emulator.instructions.memory import address_of, check_waited
from ptx_emulator.memory import AccessFault
from ptx_emulator.program import NUMPY, Build, Step, opcode

if TYPE_CHECKING:
    from ptx_emulator.machine import Machine
    from ptx_emulator.mbarriers import MBarrier

U64 = np.uint64


@opcode("cp")
def _cp(build: Build, ins: ptx.Instruction) -> Step:
    m = Modifiers(ins)
    if not m.take("async"):
        raise m.unsupported()
    if m.take("bulk"):
        return _bulk(build, ins, m)
    if m.take("commit_group"):
        m.finish(0)
        return lambda f: f.machine.copies.commit(f)
    if m.take("wait_all"):
        m.finish(0)
        return lambda f: f.machine.copies.wait_all(f)
    if m.take("wait_group"):
        m.finish(1)
        n = build.number(ins.operands[0], ins)
        return lambda f: f.machine.copies.wait(f, n)
    if m.take("mbarrier"):
        raise m.unsupported("arrival of cp.async on an mbarrier")
    cache = m.take("ca", "cg")
    if not cache or not m.take("shared", "shared::cta") or not m.take("global"):
        raise m.unsupported()
    m.take("L2::64B", "L2::128B", "L2::256B")
    hint = bool(m.take("L2::cache_hint"))
    m.finish((3 + hint, 4 + hint))
    target = address_of(build, ins, ins.operands[0], "shared")
    source = address_of(build, ins, ins.operands[1], "global")
    size = build.number(ins.operands[2], ins)
    build.shared_granule = min(build.shared_granule, min(size, 8))
    has_actual = len(ins.operands) - hint == 4
    actual = build.source(ins.operands[3], "u32", ins) if has_actual else None
    if size not in ((16,) if cache == "cg" else (4, 8, 16)):
        raise m.unsupported(f"{size} bytes")
    width = min(size, 8)

    def run(f: Fragment) -> None:
        check_waited(f)
        machine = f.machine
        addresses, targets = np.broadcast_to(source(f), (f.n,)), np.broadcast_to(target(f), (f.n,))
        sizes = f.full(actual).astype(np.int64) if actual is not None else np.full(f.n, size)
        if (sizes > size).any():
            i = int(np.argmax(sizes > size))
            raise AccessFault("out of bounds", i, f"source size {int(sizes[i])} of a copy of {size} bytes")
        data = np.zeros((f.n, size), np.uint8)
        full = np.flatnonzero(sizes == size)
        if full.size:
            with faults_of(f.take(full, [], f.pc)):
                words = machine.memory.load(addresses[full], width, size // width, machine.global_races, f.lanes[full])
            data[full] = np.stack(words, 1).view(np.uint8).reshape(full.size, size)
        for i in np.flatnonzero((sizes > 0) & (sizes < size)).tolist():
            with faults_of(f.take(np.array([i]), [], f.pc)):
                bytewise = addresses[i] + np.arange(sizes[i], dtype=U64)
                data[i, : sizes[i]] = machine.memory.load(bytewise, 1, 1, machine.global_races, np.repeat(f.lanes[i], sizes[i]))[0]
        machine.counters.loaded += int(sizes.sum())
        some = np.flatnonzero(sizes)
        if some.size:
            machine.counters.access(ins.line, f.lanes[some], addresses[some], int(sizes.sum()))
        machine.copies.start(f, machine.shared.place(f, targets, size)[0], data)

    return run


class Groups:
    """Copies that threads commit in numbered groups and wait for: per thread of a chunk the groups committed, and those that are over.

    Each thread has a column among those of the clocks, dated by its groups.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.committed, self.over, self.last = (np.zeros(machine.alive.size, np.int32) for _ in range(3))  # last: group with a copy
        self.columns = np.full(machine.block_lanes * machine.launch.cluster_size, -1)

    def add(self, lanes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Threads issue copies: agents and dates of those, for `races`."""
        self.last[lanes] = self.committed[lanes] + 1
        races = self.machine.races
        agents = races.threads + races.clocks.assign(self.columns, lanes) if races else lanes
        return agents, self.last[lanes]

    def commit(self, f: Fragment) -> None:
        """Close the group that each thread has open."""
        self.committed[f.lanes] += 1

    def wait(self, f: Fragment, allowed: int) -> None:
        """Threads have waited for all but the latest `allowed` of their groups."""
        over = np.maximum(self.committed[f.lanes] - allowed, self.over[f.lanes])
        news = np.minimum(over, self.last[f.lanes]) > self.over[f.lanes]
        if self.machine.races and news.any():
            lanes = f.lanes[news]
            clocks = self.machine.races.clocks
            clocks.learn_singly(lanes, clocks.assign(self.columns, lanes), over[news])
        self.over[f.lanes] = over


class CopyGroups(Groups):
    """Those of `cp.async`, which are carried out when they are waited for; a proxy fence has to follow, as after other stores."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self.flying: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []  # lanes, places, bytes, groups

    def start(self, f: Fragment, place: np.ndarray, data: np.ndarray) -> None:
        """Copies of `data` to `place`, one a thread, are on their way: their bytes count as unwritten until waited for."""
        agents, dates = self.add(f.lanes)
        if self.machine.races:
            self.machine.races.write(f, place, data.shape[1], by=agents, date=dates)
        self.machine.shared.written[place[:, None] + np.arange(data.shape[1])] = 2
        self.flying.append((f.lanes, place, data, dates))

    def wait(self, f: Fragment, allowed: int) -> None:
        """As above; and what has been waited for lands."""
        super().wait(f, allowed)
        rest = []
        for lanes, place, data, group in self.flying:
            over = group <= self.over[lanes]
            if over.any():
                put(self.machine, place[over], data[over])
            if not over.all():
                rest.append((lanes[~over], place[~over], data[~over], group[~over]))
        self.flying = rest

    def wait_all(self, f: Fragment) -> None:
        """Wait for every copy, those of the open group included."""
        self.commit(f)
        self.wait(f, 0)


class BulkGroups(Groups):
    """Those of bulk stores, which are carried out at once; but their source counts as read until its group has been waited for."""

    def check_exit(self, f: Fragment) -> None:
        """A block's shared memory must outlive the stores that read it."""
        bad = self.last[f.lanes] > self.over[f.lanes]
        if bad.any():
            i = int(np.flatnonzero(bad)[0])
            raise AccessFault("bulk store not waited for", i, "a thread leaves while its bulk store may still read shared memory")


def put(machine: Machine, place: np.ndarray, data: np.ndarray) -> None:
    """Write rows of bytes into shared memory and mark them written."""
    where = place[:, None] + np.arange(data.shape[1])
    machine.shared.data[where] = data
    machine.shared.written[where] = 1


def _bulk(build: Build, ins: ptx.Instruction, m: Modifiers) -> Step:
    """`cp.async.bulk` between global and shared memory, and its groups."""
    build.asynchronous = True
    if m.take("commit_group"):
        m.finish(0)
        return lambda f: f.machine.bulk.commit(f)
    if m.take("wait_group"):
        m.take("read")
        m.finish(1)
        n = build.number(ins.operands[0], ins)
        return lambda f: f.machine.bulk.wait(f, n)
    if m.take("prefetch"):
        return _bulk_prefetch(build, ins, m)
    spaces = [s for s in m.rest if s in ("shared::cluster", "shared::cta", "global")]
    m.rest = [s for s in m.rest if s not in spaces]
    hint = bool(m.take("L2::cache_hint"))
    completes = bool(m.take("mbarrier::complete_tx::bytes"))
    grouped = bool(m.take("bulk_group"))
    m.finish((4 if completes else 3) + hint)
    if spaces == ["global", "shared::cta"] and grouped:
        return _bulk_store(build, ins)
    if spaces in (["shared::cluster", "global"], ["shared::cta", "global"]) and completes:
        return _bulk_load(build, ins, spaces[0], hint)
    raise m.unsupported()


def _bulk_prefetch(build: Build, ins: ptx.Instruction, m: Modifiers) -> Step:
    """Nothing is loaded, so it may come before the wait for the kernels in front; but what is named must be there."""
    if not (m.take("L2") and m.take("global")):
        raise m.unsupported()
    hint = bool(m.take("L2::cache_hint"))
    m.finish(2 + hint)
    source, size = address_of(build, ins, ins.operands[0], "global"), build.source(ins.operands[1], "u32", ins)

    def run(f: Fragment) -> None:
        sources, sizes = np.broadcast_to(source(f), (f.n,)), f.full(size)

        def prefetch(i: int, one: Fragment) -> None:
            _check_bulk(sources[i], sizes[i])
            f.machine.memory.load(np.arange(sources[i], sources[i] + U64(sizes[i]), 16, dtype=U64), 8, 2)

        one_by_one(f, prefetch)

    return run


def _check_bulk(*values: np.integer) -> None:
    if any(v % 16 for v in values):
        raise AccessFault("misaligned access", 0, f"bulk copy of {values[-1]} bytes: addresses and size must be multiples of 16")


def _words(address: int, nbytes: int) -> np.ndarray:
    """The addresses of the eight-byte words of a bulk copy in global memory."""
    return np.arange(address, address + nbytes, 8, dtype=U64)


def _shared_start(one: Fragment, address: np.ndarray, nbytes: int) -> int:
    """Place of a bulk copy in shared memory, all of which must exist."""
    shared = one.machine.shared
    shared.place(one, address + U64(nbytes - 16), 16)
    return int(shared.place(one, address, 16)[0][0])


def _bulk_load(build: Build, ins: ptx.Instruction, space: str, hint: bool) -> Step:
    target, source = address_of(build, ins, ins.operands[0], space), address_of(build, ins, ins.operands[1], "global")
    size, bar = build.source(ins.operands[2], "u32", ins), address_of(build, ins, ins.operands[3], space)
    policy = build.source(ins.operands[4], "u64", ins) if hint else None

    def run(f: Fragment) -> None:
        check_waited(f)
        machine = f.machine
        targets, sources, bars = (np.broadcast_to(g(f), (f.n,)) for g in (target, source, bar))
        sizes = f.full(size)
        policies = None if policy is None else f.full(policy)

        def load(i: int, one: Fragment) -> None:
            _check_bulk(targets[i], sources[i], sizes[i])
            nbytes, address = int(sizes[i]), int(sources[i])
            if nbytes == 0:
                return
            words = _words(address, nbytes)
            data = machine.memory.load(words, 8, 1, machine.global_races, np.repeat(one.lanes, words.size))[0].view(np.uint8)
            machine.counters.loaded += nbytes
            machine.counters.bulk(ins.line, address, nbytes)
            machine.counters.policies[None if policies is None else int(policies[i])] += nbytes
            _start_copy(one, targets[i : i + 1], bars[i : i + 1], data)

        one_by_one(f, load)

    return run


def _start_copy(one: Fragment, target: np.ndarray, bar: np.ndarray, data: np.ndarray) -> None:
    """Mark the destination as in flight and queue the arrival of its bytes on the mbarrier."""
    machine, nbytes = one.machine, data.size
    start = _shared_start(one, target, nbytes)
    place = int(machine.shared.place(one, bar, 8)[0][0])
    barrier = machine.mbarriers.get(place, one.lanes, np.array([0]), copy=True)
    if machine.races:
        agent, date = machine.mbarriers.agent(barrier, place)
        machine.races.copy(int(one.lanes[0]), start, nbytes, agent, date, writes=True)
    machine.shared.written[start : start + nbytes] = 2

    def arrive() -> None:
        machine.shared.data[start : start + nbytes] = data
        machine.shared.written[start : start + nbytes] = 1
        machine.mbarriers.transfer(barrier, nbytes)

    machine.mbarriers.pending.append((int(one.blocks[0]), arrive))


def _bulk_store(build: Build, ins: ptx.Instruction) -> Step:
    target, source = address_of(build, ins, ins.operands[0], "global"), address_of(build, ins, ins.operands[1], "shared")
    build.global_granule = min(build.global_granule, 8)
    size = build.source(ins.operands[2], "u32", ins)

    def run(f: Fragment) -> None:
        check_waited(f)
        machine = f.machine
        targets, sources = (np.broadcast_to(g(f), (f.n,)) for g in (target, source))
        sizes = f.full(size)

        def store(i: int, one: Fragment) -> None:
            _check_bulk(targets[i], sources[i], sizes[i])
            nbytes, address = int(sizes[i]), int(targets[i])
            if nbytes == 0:
                return
            start = _shared_start(one, sources[i : i + 1], nbytes)
            agents, dates = machine.bulk.add(one.lanes)
            if machine.races:
                machine.races.copy(int(one.lanes[0]), start, nbytes, int(agents[0]), int(dates[0]), writes=False)
            if (machine.shared.written[start : start + nbytes] != 1).any():
                raise AccessFault("uninitialised read", 0, "bulk store of shared memory nobody has written", "shared memory")
            data, words = machine.shared.data[start : start + nbytes].copy().view(U64), _words(address, nbytes)
            machine.memory.store(words, 8, [data], machine.global_races, np.repeat(one.lanes, words.size))
            machine.counters.stored += nbytes
            machine.counters.bulk(ins.line, address, nbytes)

        one_by_one(f, store)

    return run


def store_async(build: Build, ins: ptx.Instruction, m: Modifiers) -> Step:
    """`st.async.shared::cluster.mbarrier::complete_tx::bytes`: remote store that completes on the target block's mbarrier."""
    build.asynchronous = True
    m.take("weak")
    space, completes = m.take("shared::cluster"), m.take("mbarrier::complete_tx::bytes")
    vector, kind = m.take("v2", "v4"), m.type()
    m.finish(3)
    if not space or not completes or kind not in ("b32", "u32", "s32", "f32", "b64", "u64", "s64", "f64"):
        raise m.unsupported()
    target, bar = address_of(build, ins, ins.operands[0], space), address_of(build, ins, ins.operands[2], space)
    value = ins.operands[1]
    items = value.items if isinstance(value, ptx.Vector) else (value,)
    if len(items) != (int(vector[1:]) if vector else 1):
        raise m.unsupported()
    slots = [build.source(o, kind, ins) for o in items]
    width = NUMPY[kind].itemsize
    build.shared_granule = min(build.shared_granule, width)

    def run(f: Fragment) -> None:
        machine = f.machine
        targets, bars = np.broadcast_to(target(f), (f.n,)), np.broadcast_to(bar(f), (f.n,))
        nbytes = width * len(slots)
        places = machine.shared.place(f, targets, nbytes)[0]
        at = np.broadcast_to(machine.shared.place(f, bars, 8)[0], (f.n,))
        data = np.stack([f.full(s) for s in slots], 1).view(np.uint8).reshape(f.n, nbytes)
        barriers: list[tuple[MBarrier, np.ndarray]] = []
        agents, dates = np.zeros(f.n, np.int32), np.zeros(f.n, np.int32)
        for place in np.unique(at).tolist():
            index = np.flatnonzero(at == place)
            barrier = machine.mbarriers.get(place, f.lanes[index], index)
            if machine.races:
                agents[index], dates[index] = machine.mbarriers.agent(barrier, place)
            barriers.append((barrier, index))
        if machine.races:
            machine.races.write(f, places, nbytes, by=agents, date=dates)
            for barrier, index in barriers:
                machine.mbarriers.publish(barrier, f.lanes[index])  # complete_tx is a release, of what the thread did before, too
        machine.shared.written[places[:, None] + np.arange(nbytes)] = 2

        def arrive() -> None:
            put(machine, places, data)
            for barrier, index in barriers:
                machine.mbarriers.transfer(barrier, nbytes * index.size)

        machine.mbarriers.pending.append((-1, arrive))  # the other block's memory is watched by itself

    return run
