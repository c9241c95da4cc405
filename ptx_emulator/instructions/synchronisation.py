"""Barriers of blocks and clusters, and mbarrier operations."""

from __future__ import annotations

import numpy as np

from ptx_emulator import parser as ptx
from ptx_emulator.fragment import Fragment, faults_of
from ptx_emulator.instructions.forms import Modifiers
from ptx_emulator.instructions.memory import address_of
from ptx_emulator.instructions.warp import warp_barrier
from ptx_emulator.memory import AccessFault
from ptx_emulator.program import SHARED_WINDOW, Build, Collective, collective

U64 = np.uint64


@collective("bar", "barrier")
def _bar(build: Build, ins: ptx.Instruction) -> Collective:
    m = Modifiers(ins)
    if m.take("warp"):
        if not m.take("sync"):
            raise m.unsupported()
        return warp_barrier(build, ins, m)
    if m.take("cluster"):
        return _cluster(m)
    aligned = ins.base == "bar"
    m.take("cta")
    action = m.take("sync", "arrive", "red")
    operation = m.take("popc", "and", "or") if action == "red" else ""
    aligned = bool(m.take("aligned")) or aligned
    operands = list(ins.operands)
    note: tuple[str, int, int] | None = None
    if action == "red":
        kind = m.type()
        d = build.destination(operands.pop(0), kind, ins)
        predicate = operands.pop()
        if not operation or isinstance(predicate, ptx.Negated):
            raise m.unsupported()
        note = (operation, d, build.source(predicate, "pred", ins))
    m.finish()
    if not action or len(operands) not in (1, 2) or (action == "arrive" and len(operands) != 2):
        raise m.unsupported()
    number = build.source(operands[0], "u32", ins)
    count = build.source(operands[1], "u32", ins) if len(operands) == 2 else None
    # Both forms need whole warps: the hardware counts an unaligned barrier by warps as well, but not for lanes that have left.

    def run(f: Fragment) -> list[Fragment]:
        machine = f.machine
        ready, rest = machine.barriers.split_whole_warps(f, machine.program.blocks[f.pc].live_in, aligned)
        if rest is not None:
            machine.park(rest)
        if ready is None:
            return []
        numbers = ready.regs[number]
        counts = ready.regs[count] if count is not None else np.zeros(1, np.uint32)
        if numbers.shape[0] == 1 and counts.shape[0] == 1:
            groups = [(ready, int(numbers[0]), int(counts[0]))]
        else:
            key = np.broadcast_to(numbers, (ready.n,)).astype(np.int64) << 32 | np.broadcast_to(counts, (ready.n,)).astype(np.int64)
            live = machine.program.blocks[ready.pc].live_in
            groups = [(ready.take(np.flatnonzero(key == k), live, ready.pc), int(k) >> 32, int(k) & 0xFFFFFFFF) for k in np.unique(key)]
        passing = []
        for part, which, expected in groups:
            with faults_of(part):
                if which >= 16:
                    raise AccessFault("barrier mismatch", 0, f"barrier {which}; there are 16")
                if expected % 32 or (count is not None and not expected):
                    raise AccessFault("barrier mismatch", 0, f"thread count {expected} is no multiple of the warp size above 0")
                machine.barriers.arrive(part, which, expected, wait=action != "arrive", note=note)
            if action == "arrive":
                passing.append(part)
        return passing

    return run


def _cluster(m: Modifiers) -> Collective:
    action = m.take("arrive", "wait")
    order = m.take(*(("release", "relaxed") if action == "arrive" else ("acquire",)))
    aligned = bool(m.take("aligned"))
    m.finish(0)
    if action == "arrive":

        def arrive(f: Fragment) -> list[Fragment]:
            ready, rest = f.machine.barriers.split_whole_warps(f, f.machine.program.blocks[f.pc].live_in, aligned)
            if rest is not None:
                f.machine.park(rest)
            if ready is None:
                return []
            with faults_of(ready):
                ready.machine.clusters.arrive(ready, order != "relaxed")
            return [ready]

        return arrive
    if action == "wait":
        return lambda f: f.machine.clusters.wait(f)
    raise m.unsupported()


# ---- mbarriers


def shared_places(f: Fragment, address: np.ndarray, generic: bool) -> np.ndarray:
    """Byte positions of mbarriers in the chunk's shared memory, one per lane."""
    if generic:
        if (address >> U64(60) != 1).any():
            raise AccessFault("mbarrier", 0, "address outside shared memory", "shared memory")
        address = address - U64(SHARED_WINDOW)
    return np.broadcast_to(f.machine.shared.place(f, address, 8)[0], (f.n,))


def state_token(place: int, phase: int) -> int:
    """The 64-bit state that an arrival returns: phase and place of the mbarrier."""
    return (phase << 40) | (place & 0xFFFFFFFFFF)


@collective("mbarrier")
def _mbarrier(build: Build, ins: ptx.Instruction) -> Collective:
    build.asynchronous = True
    m = Modifiers(ins)
    action = m.take("init", "inval", "arrive", "arrive_drop", "expect_tx", "complete_tx", "test_wait", "try_wait", "pending_count")
    if action == "arrive" and m.take("expect_tx"):
        action = "arrive.expect_tx"
    parity = m.take("parity")
    no_complete = m.take("noComplete")
    order = m.take("acquire", "release", "relaxed")
    m.take("cta", "cluster")
    space = m.take("shared::cluster", "shared::cta", "shared")
    if m.type() != "b64":
        raise m.unsupported("an mbarrier is a .b64")
    counts = {"init": (2,), "inval": (1,), "arrive": (1, 2, 3), "arrive.expect_tx": (2, 3), "expect_tx": (2,), "complete_tx": (2,)}
    m.finish(counts.get(action, (3, 4)))
    if no_complete or action in ("arrive_drop", "pending_count", "") or (order and action in ("init", "inval")):
        raise m.unsupported()
    operands = list(ins.operands)
    if action in ("test_wait", "try_wait"):
        return _wait(build, ins, operands, space, bool(parity), order != "relaxed")
    d = None
    if action.startswith("arrive") and not isinstance(operands[0], ptx.Address):
        target = operands.pop(0)
        d = None if isinstance(target, ptx.Symbol) else build.destination(target, "b64", ins)
    where = address_of(build, ins, operands[0], space or "generic")
    amount = build.source(operands[1], "u32", ins) if len(operands) > 1 else None
    if action in ("init", "expect_tx", "complete_tx", "arrive.expect_tx") and amount is None:
        raise m.unsupported()

    release = order != "relaxed" and action not in ("expect_tx", "complete_tx")

    def run(f: Fragment) -> list[Fragment]:
        machine = f.machine
        bars = machine.mbarriers
        places = shared_places(f, where(f), not space)
        amounts = (f.full(amount) if amount is not None else np.ones(f.n, np.uint32)).astype(np.int64)
        tokens = np.zeros(f.n, U64)
        for place in np.unique(places).tolist():
            index = np.flatnonzero(places == place)
            if action == "init":
                for i in index.tolist():
                    bars.initialise(f, i, place, int(amounts[i]))
                continue
            bar = bars.get(place, f.lanes[index], index)
            if action == "inval":
                bars.invalidate(place)
            elif action == "expect_tx":
                bar.bytes += int(amounts[index].sum())
            elif action == "complete_tx":
                bars.transfer(bar, int(amounts[index].sum()))
            else:
                expects = action == "arrive.expect_tx"
                counts = np.ones(index.size, np.int64) if expects else amounts[index]
                # All at once, unless they complete a phase on the way.
                groups = [index] if counts.sum() <= bar.pending else [index[i : i + 1] for i in range(index.size)]
                for group in groups:
                    count, expect = (group.size, int(amounts[group].sum())) if expects else (int(amounts[group].sum()), 0)
                    phase = bars.arrive(bar, f.lanes[group], int(group[0]), count, expect, release=release)
                    tokens[group] = state_token(place, phase)
        if d is not None:
            f.regs[d] = tokens
        return [f]

    return run


def _wait(build: Build, ins: ptx.Instruction, operands: list[ptx.Operand], space: str, parity: bool, acquire: bool) -> Collective:
    p = build.destination(operands[0], "pred", ins)
    where = address_of(build, ins, operands[1], space or "generic")
    wanted = build.source(operands[2], "u32" if parity else "b64", ins)
    if len(operands) > 3:
        build.source(operands[3], "u32", ins)  # time limit

    def run(f: Fragment) -> list[Fragment]:
        machine = f.machine
        bars = machine.mbarriers
        places, values = shared_places(f, where(f), not space), f.full(wanted)
        phases = (values if parity else values >> 40).astype(np.int64) & 1
        key = places.astype(np.int64) * 2 + phases
        done = np.zeros(f.n, bool)
        for value in np.unique(key).tolist():
            index = np.flatnonzero(key == value)
            done[index] = ready = bars.get(value // 2, f.lanes[index], index).phase & 1 != value & 1
            if acquire and ready:
                bars.acquire(value // 2, f.lanes[index])
        f.regs[p] = done
        if done.all():
            machine.asked[f.lanes] = False
            return [f]
        # A thread that waits in vain goes on with false, once: who does not ask again has not waited. The next time it stays here until
        # something has changed.
        live = machine.program.blocks[f.pc].live_in
        after = machine.program.blocks[f.pc + 1].live_in
        out = []
        again = machine.asked[f.lanes] & (not machine.giving_up)
        machine.asked[f.lanes] = ~done
        for stays in (True, False):
            index = np.flatnonzero(~done & (again == stays))
            if index.size:
                late = f.take(index, live, f.pc)
                if stays:
                    machine.poll(late)
                else:
                    late.regs[p] = np.zeros(late.n, bool)
                    out.append(late)
        if done.any():
            out.append(f.take(np.flatnonzero(done), sorted({*after, p}), f.pc))
        return out

    return run
