"""Instructions among the lanes of a warp: shuffles, votes, matches, reductions, election, warp barrier."""

from __future__ import annotations

import numpy as np

from ptx_emulator import parser as ptx
from ptx_emulator.fragment import Fragment
from ptx_emulator.instructions.forms import Modifiers
from ptx_emulator.memory import AccessFault
from ptx_emulator.numerics import canonical
from ptx_emulator.program import Build, Collective, Step, collective, opcode

F32, U32, U64 = np.float32, np.uint32, np.uint64
ALL = U32(0xFFFFFFFF)


def assemble(f: Fragment, mask_slot: int) -> tuple[Fragment | None, np.ndarray]:
    """The lanes whose whole member mask has arrived, with that mask (others are parked), and the positions' member masks."""
    machine = f.machine
    mask = f.regs[mask_slot]
    if f.whole_warps and mask.shape[0] == 1 and mask[0] == ALL:
        return f, mask
    masks = f.full(mask_slot)
    warps, first, bits = machine.warps(f)
    lengths = np.diff(np.r_[first, f.n])
    here = np.repeat(bits, lengths)
    if (masks != np.repeat(masks[first], lengths)).any():  # lanes meet those alone that name the same lanes
        _, group = np.unique(f.lanes.astype(np.int64) // 32 << 32 | masks.astype(np.int64), return_inverse=True)
        together = np.zeros(int(group.max()) + 1, U64)
        np.bitwise_or.at(together, group, U64(1) << (f.lanes % 32).astype(U64))
        here = together[group]
    outside = (masks >> (f.lanes % 32).astype(U32)) & U32(1) == 0
    if outside.any():
        i = int(np.flatnonzero(outside)[0])
        raise AccessFault("member mask", i, f"a thread executes this with a mask {int(masks[i]):#010x} that does not name it")
    missing = masks.astype(U64) & np.repeat(machine.alive_bits(warps), lengths) & ~here
    late = missing != 0
    if not late.any():
        return f, masks
    live = machine.program.blocks[f.pc].live_in
    machine.park(f.take(np.flatnonzero(late), live, f.pc))
    if late.all():
        return None, masks
    return f.take(np.flatnonzero(~late), live, f.pc), masks[~late]


def lane_positions(f: Fragment, lane: np.ndarray, masks: np.ndarray, wanted: np.ndarray | None = None) -> np.ndarray:
    """Positions in the fragment of lane numbers `lane` (0..31) of each position's own warp; inactive ones are a fault."""
    target = (f.lanes & ~31) + lane.astype(np.int32)
    position = np.minimum(np.searchsorted(f.lanes, target), f.n - 1)
    inside = (f.lanes[position] == target) & ((masks >> lane.astype(U32)) & U32(1) == 1)
    bad = ~inside if wanted is None else ~inside & wanted
    if bad.any():
        i = int(np.flatnonzero(bad)[0])
        raise AccessFault("inactive lane", i, f"reads from lane {int(lane[i])}, which does not take part")
    return position


@collective("shfl")
def _shfl(build: Build, ins: ptx.Instruction) -> Collective:
    m = Modifiers(ins)
    sync = m.take("sync")
    mode, kind = m.take("up", "down", "bfly", "idx"), m.type()
    m.finish(5)
    if not sync or kind != "b32" or not mode:
        raise m.unsupported()
    target, value, lane_operand, clamp, members = ins.operands
    d = build.destination(target.first if isinstance(target, ptx.Pair) else target, "b32", ins)
    p = build.destination(target.second, "pred", ins) if isinstance(target, ptx.Pair) else None
    a, b, c = build.source(value, "b32", ins), build.source(lane_operand, "u32", ins), build.source(clamp, "u32", ins)
    mask_slot = build.source(members, "u32", ins)

    def source_lane(lane: np.ndarray, b: np.ndarray, c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        b = b.astype(np.int64) & 31
        segment, clamp = (c.astype(np.int64) >> 8) & 31, c.astype(np.int64) & 31
        most = (lane & segment) | (clamp & ~segment)
        if mode == "up":
            j = lane - b
            valid = j >= most
        elif mode == "down":
            j = lane + b
            valid = j <= most
        elif mode == "bfly":
            j = lane ^ b
            valid = j <= most
        else:
            j = (lane & segment) | (b & ~segment)
            valid = j <= most
        return np.where(valid, j, lane), valid

    def run(f: Fragment) -> list[Fragment]:
        ready, masks = assemble(f, mask_slot)
        if ready is None:
            return []
        r = ready.regs
        b_value, c_value, source = r[b], r[c], r[a]
        if ready.whole_warps and masks.shape[0] == 1 and b_value.shape[0] == 1 and c_value.shape[0] == 1:
            lane, valid = source_lane(np.arange(32), b_value, c_value)
            r[d] = source if source.shape[0] == 1 else source.reshape(-1, 32)[:, lane].ravel()
            if p is not None:
                r[p] = np.tile(np.broadcast_to(valid, 32), ready.n // 32)
            return [ready]
        lane, valid = source_lane((ready.lanes % 32).astype(np.int64), b_value, c_value)
        position = lane_positions(ready, lane, np.broadcast_to(masks, (ready.n,)))
        r[d] = source if source.shape[0] == 1 else source[position]
        if p is not None:
            r[p] = valid
        return [ready]

    return run


def ballot(f: Fragment, bits: np.ndarray, masks: np.ndarray) -> np.ndarray:
    """Per lane: the lanes of its member mask for which `bits` holds, as uint64."""
    _warps, first, _ = f.machine.warps(f)
    values = np.where(bits, U64(1) << (f.lanes % 32).astype(U64), U64(0))
    total = np.repeat(np.add.reduceat(values, first), np.diff(np.r_[first, f.n]))
    return total & np.broadcast_to(masks, (f.n,)).astype(U64)


@collective("vote")
def _vote(build: Build, ins: ptx.Instruction) -> Collective:
    m = Modifiers(ins)
    sync, mode, kind = m.take("sync"), m.take("all", "any", "uni", "ballot"), m.type()
    m.finish(3)
    if not sync or kind != ("b32" if mode == "ballot" else "pred"):
        raise m.unsupported()
    d = build.destination(ins.operands[0], kind, ins)
    operand = ins.operands[1]
    negated = isinstance(operand, ptx.Negated)
    p = build.source(operand.of if isinstance(operand, ptx.Negated) else operand, "pred", ins)
    mask_slot = build.source(ins.operands[2], "u32", ins)

    def run(f: Fragment) -> list[Fragment]:
        ready, masks = assemble(f, mask_slot)
        if ready is None:
            return []
        bits = ready.full(p)
        yes = ballot(ready, ~bits if negated else bits, masks)
        everyone = ballot(ready, np.ones(ready.n, bool), masks)
        if mode == "ballot":
            ready.regs[d] = yes.astype(U32)
        elif mode == "all":
            ready.regs[d] = yes == everyone
        elif mode == "any":
            ready.regs[d] = yes != 0
        else:
            ready.regs[d] = (yes == everyone) | (yes == 0)
        return [ready]

    return run


@collective("match")
def _match(build: Build, ins: ptx.Instruction) -> Collective:
    m = Modifiers(ins)
    mode, sync, kind = m.take("any", "all"), m.take("sync"), m.type()
    m.finish(3)
    if not sync or kind not in ("b32", "b64") or not mode:
        raise m.unsupported()
    target = ins.operands[0]
    d = build.destination(target.first if isinstance(target, ptx.Pair) else target, "b32", ins)
    p = build.destination(target.second, "pred", ins) if isinstance(target, ptx.Pair) else None
    a, mask_slot = build.source(ins.operands[1], kind, ins), build.source(ins.operands[2], "u32", ins)

    def run(f: Fragment) -> list[Fragment]:
        ready, masks = assemble(f, mask_slot)
        if ready is None:
            return []
        values, masks = ready.full(a), np.broadcast_to(masks, (ready.n,))
        warp = ready.lanes // 32
        out = np.zeros(ready.n, U32)
        for w in np.unique(warp):
            index = np.flatnonzero(warp == w)
            bit = U32(1) << (ready.lanes[index] % 32).astype(U32)
            same = values[index][:, None] == values[index][None, :]
            out[index] = np.where(same, bit[None, :], U32(0)).sum(1, dtype=U32) & masks[index]
        everyone = ballot(ready, np.ones(ready.n, bool), masks).astype(U32)
        agree = out == everyone
        ready.regs[d] = out if mode == "any" else np.where(agree, everyone, U32(0))
        if p is not None:
            ready.regs[p] = agree
        return [ready]

    return run


@collective("redux")
def _redux(build: Build, ins: ptx.Instruction) -> Collective:
    m = Modifiers(ins)
    sync, operation = m.take("sync"), m.take("add", "min", "max", "and", "or", "xor")
    absolute, nan, kind = m.take("abs"), m.take("NaN"), m.type()
    m.finish(3)
    floats = kind == "f32" and operation in ("min", "max")
    integers = (kind in ("u32", "s32") and operation in ("add", "min", "max")) or (kind == "b32" and operation in ("and", "or", "xor"))
    if not sync or not (floats or (integers and not (absolute or nan))):
        raise m.unsupported()
    d, a = build.destination(ins.operands[0], kind, ins), build.source(ins.operands[1], kind, ins)
    mask_slot = build.source(ins.operands[2], "u32", ins)
    combine = {
        "add": np.add,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
        "min": (np.minimum if nan else np.fmin) if floats else np.minimum,
        "max": (np.maximum if nan else np.fmax) if floats else np.maximum,
    }[operation]

    def run(f: Fragment) -> list[Fragment]:
        ready, masks = assemble(f, mask_slot)
        if ready is None:
            return []
        values = ready.full(a).view({"f32": F32, "s32": np.int32}.get(kind, U32))
        if absolute:
            values = np.abs(values)
        masks = np.broadcast_to(masks, (ready.n,))
        key = (ready.lanes // 32).astype(np.int64) << 32 | masks.astype(np.int64)
        _, group = np.unique(key, return_inverse=True)
        order = np.argsort(group, kind="stable")
        first = np.flatnonzero(np.r_[True, np.diff(group[order]) != 0])
        total = combine.reduceat(values[order], first, dtype=values.dtype)[group]
        bits = np.ascontiguousarray(total).view(U32)
        ready.regs[d] = canonical(bits) if floats else bits
        return [ready]

    return run


@collective("elect")
def _elect(build: Build, ins: ptx.Instruction) -> Collective:
    m = Modifiers(ins)
    sync = m.take("sync")
    m.finish(2)
    target = ins.operands[0]
    if not sync or not isinstance(target, ptx.Pair):
        raise m.unsupported()
    d, p = build.destination(target.first, "b32", ins), build.destination(target.second, "pred", ins)
    mask_slot = build.source(ins.operands[1], "u32", ins)

    def run(f: Fragment) -> list[Fragment]:
        ready, masks = assemble(f, mask_slot)
        if ready is None:
            return []
        members = ballot(ready, np.ones(ready.n, bool), masks)
        lowest = np.bitwise_count((members & (~members + U64(1))) - U64(1)).astype(U32)
        ready.regs[d] = lowest
        ready.regs[p] = lowest == (ready.lanes % 32).astype(U32)
        return [ready]

    return run


@opcode("activemask")
def _activemask(build: Build, ins: ptx.Instruction) -> Step:
    m = Modifiers(ins)
    m.type()
    m.finish(1)
    d = build.destination(ins.operands[0], "b32", ins)

    def run(f: Fragment) -> None:
        f.regs[d] = ballot(f, np.ones(f.n, bool), np.array([ALL])).astype(U32)

    return run


def warp_barrier(build: Build, ins: ptx.Instruction, m: Modifiers) -> Collective:
    """`bar.warp.sync`: orders memory among the lanes of its mask."""
    m.finish(1)
    mask_slot = build.source(ins.operands[0], "u32", ins)

    def run(f: Fragment) -> list[Fragment]:
        ready, masks = assemble(f, mask_slot)
        if ready is None:
            return []
        if ready.machine.races:
            clocks = ready.machine.races.clocks
            if masks.shape[0] == 1 and masks[0] == ALL:
                clocks.meet(ready.lanes)
            else:
                key = ready.lanes.astype(np.int64) // 32 << 32 | np.broadcast_to(masks, (ready.n,)).astype(np.int64)
                for group in np.unique(key):
                    clocks.meet(ready.lanes[key == group])
        return [ready]

    return run
