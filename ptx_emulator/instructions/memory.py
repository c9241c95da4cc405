"""Loads, stores, atomics and prefetches, in every state space."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ptx_emulator import parser as ptx
from ptx_emulator.faults import UnsupportedInstruction
from ptx_emulator.fragment import Fragment, faults_of, one_by_one
from ptx_emulator.instructions.forms import Modifiers
from ptx_emulator.memory import WEAK, AccessFault, Manner
from ptx_emulator.program import LOCAL_WINDOW, NUMPY, RANK_SHIFT, SHARED_WINDOW, STORAGE, WAITED, Build, Step, opcode

U64 = np.uint64
_SPACES = ("global", "shared::cluster", "shared::cta", "shared", "local", "param", "param::entry", "const")
_ORDER = ("relaxed", "acquire", "release", "acq_rel", "volatile", "weak", "mmio")
_SCOPE = ("cta", "cluster", "gpu", "sys")
_CACHE = ("ca", "cg", "cs", "lu", "cv", "wb", "wt")
_L1 = (
    "L1::evict_normal",
    "L1::evict_unchanged",
    "L1::evict_first",
    "L1::evict_last",
    "L1::no_allocate",
    "L2::evict_last",
    "L2::evict_normal",
    "L2::evict_first",
)
_L2 = ("L2::64B", "L2::128B", "L2::256B")


def address_of(build: Build, ins: ptx.Instruction, operand: ptx.Operand, space: str) -> Callable[[Fragment], np.ndarray]:
    """A function fragment → uint64 addresses (length one where all lanes agree).

    `space` as the instruction spells it: what `mapa` gives is an address of "shared::cluster" alone.
    """
    if space in ("shared", "shared::cta"):
        return _own_block(_address_of(build, ins, operand, space))
    return _address_of(build, ins, operand, space)


def _own_block(address: Callable[[Fragment], np.ndarray]) -> Callable[[Fragment], np.ndarray]:
    def run(f: Fragment) -> np.ndarray:
        found = address(f)
        if int(np.bitwise_or.reduce(found)) >> RANK_SHIFT:
            i = int(np.flatnonzero(found >> U64(RANK_SHIFT))[0])
            what = f"{int(found[i]):#x} is no address of .shared::cta: mapa gives those of .shared::cluster"
            raise AccessFault("out of bounds", i, what, "shared memory")
        return found

    return run


def _address_of(build: Build, ins: ptx.Instruction, operand: ptx.Operand, space: str) -> Callable[[Fragment], np.ndarray]:
    if not isinstance(operand, ptx.Address):
        raise UnsupportedInstruction(f"address operand {operand}", ins.line, ins.text)
    offset = U64(operand.offset % (1 << 64))
    base = operand.base
    if isinstance(base, ptx.Register):
        kind = "u32" if base.bits == 32 else "u64"
        if kind == "u32" and space not in ("shared", "shared::cta", "shared::cluster", "local", "param"):
            raise UnsupportedInstruction("32-bit address outside shared memory", ins.line, ins.text)
        s = build.source(base, kind, ins)
        if kind == "u32":
            low = U64(0xFFFFFFFF)
            return lambda f: (f.regs[s].astype(U64) + offset) & low
        return (lambda f: f.regs[s] + offset) if operand.offset else (lambda f: f.regs[s])
    s = build.source(base, "u64", ins)
    return lambda f: f.regs[s] + offset


class Access:
    """The common part of a memory instruction: space, element type, vector length."""

    def __init__(self, build: Build, ins: ptx.Instruction, m: Modifiers) -> None:
        self.ins = ins
        self.spelled = m.take(*_SPACES).replace("param::entry", "param") or "generic"
        self.space = "shared" if self.spelled.startswith("shared") else self.spelled
        self.manner = Manner.of(m.take(*_ORDER), m.take(*_SCOPE))
        if m.take("nc"):
            self.manner = self.manner._replace(coherent=False)
        m.take(*_CACHE)
        while m.take(*_L1):
            pass
        m.take(*_L2)
        self.hint = bool(m.take("L2::cache_hint"))
        vector = m.take("v2", "v4", "v8")
        self.count = int(vector[1:]) if vector else 1
        self.kind = m.type()
        self.width = ptx.WIDTHS[self.kind] // 8
        most = 32 if self.space == "global" else 16
        if self.kind == "pred" or self.width > 8 or self.width * self.count > most:
            raise m.unsupported(f"{self.count} elements of .{self.kind} in {self.space} memory")
        if self.space in ("shared", "generic"):
            build.shared_granule = min(build.shared_granule, self.width)

    def elements(self, operand: ptx.Operand) -> list[ptx.Operand]:
        """The operands that are moved, as many as the vector has; `UnsupportedInstruction` for another number."""
        items: list[ptx.Operand] = list(operand.items) if isinstance(operand, ptx.Vector) else [operand]
        if len(items) != self.count:
            raise UnsupportedInstruction(f"{self.ins.opcode}: {len(items)} elements", self.ins.line, self.ins.text)
        return items


def spaces(f: Fragment, address: np.ndarray) -> list[tuple[str, np.ndarray | None, np.ndarray]]:
    """Split generic addresses by window: (space, positions or None for all, address inside the space)."""
    window = address >> U64(60)
    names = {0: "global", 1: "shared", 2: "local", 3: "const"}
    found = [int(w) for w in np.unique(window)]
    offsets = {"shared": U64(SHARED_WINDOW), "local": U64(LOCAL_WINDOW)}
    if len(found) == 1:
        space = names.get(found[0], "global")
        return [(space, None, address - offsets.get(space, U64(0)))]
    address = np.broadcast_to(address, (f.n,))
    parts: list[tuple[str, np.ndarray | None, np.ndarray]] = []
    for w in found:
        space = names.get(w, "global")
        index = np.flatnonzero(window == w)
        parts.append((space, index, address[index] - offsets.get(space, U64(0))))
    return parts


def check_waited(f: Fragment) -> None:
    """With programmatic dependent launch: no access to global memory before the wait, unless the launch is independent.

    The wait of another thread will do, if a barrier or the like lies between (without the race checker only the thread's own).
    """
    launch, waited = f.machine.launch, f.regs[WAITED]
    if not launch.pdl or launch.independent or waited.all():
        return
    if f.machine.races:
        waited = waited | f.machine.races.clocks.after_kernels(f.lanes)
    if not waited.all():
        i = int(np.flatnonzero(~waited)[0])
        raise AccessFault("global access before griddepcontrol.wait", i, "memory of earlier kernels may not be ready")


def load(f: Fragment, space: str, address: np.ndarray, width: int, count: int, line: int = 0, manner: Manner = WEAK) -> list[np.ndarray]:
    """`count` elements per lane, as unsigned integers of `width` bytes; arrays of one where all lanes agree."""
    machine = f.machine
    if space == "global":
        check_waited(f)
        machine.counters.loaded += width * count * f.n
        machine.counters.access(line, f.lanes, address, width * count * f.n)
        if manner.strong and machine.global_races:
            machine.global_races.observe(f.lanes, address, manner)
        return machine.memory.load(address, width, count, machine.global_races, f.lanes, manner)
    if space == "shared":
        values, place = machine.shared.load(f, address, width, count)
        if machine.races:
            machine.races.read(f, place, width * count)
        return values
    if space == "local":
        return machine.local.load(f, address, width, count)
    if space == "const":
        return machine.memory.load(address, width, count)
    if space == "param":
        index = address.astype(np.int64)
        end = f.machine.program.kernel.parameter_bytes
        if (index + width * count > end).any():
            raise AccessFault("out of bounds", 0, f"parameter offset {int(index.max())} of {end}", "parameters")
        raw = machine.parameters
        dtype = np.dtype(f"u{width}")
        return [np.concatenate([raw[i + k * width : i + (k + 1) * width] for i in index]).view(dtype) for k in range(count)]
    parts = spaces(f, address)
    if len(parts) == 1:
        return load(f, parts[0][0], parts[0][2], width, count, line, manner)
    results = [np.zeros(f.n, f"u{width}") for _ in range(count)]
    for inner, some, mine in parts:
        assert some is not None  # only a single part covers all positions
        part = f.take(some, [WAITED], f.pc)
        with faults_of(part):
            values = load(part, inner, mine, width, count, line, manner)
        for out, value in zip(results, values, strict=True):
            out[some] = value
    return results


def store(f: Fragment, space: str, address: np.ndarray, width: int, values: list[np.ndarray], line: int = 0, manner: Manner = WEAK) -> None:
    """The counterpart of `load`."""
    machine = f.machine
    if space == "global":
        check_waited(f)
        machine.counters.stored += width * len(values) * f.n
        machine.counters.access(line, f.lanes, address, width * len(values) * f.n)
        if address.shape[0] == 1 and f.n > 1:
            address = np.broadcast_to(address, (f.n,))
        if manner.strong and machine.global_races:
            machine.global_races.publish(f.lanes, address, manner)
        machine.memory.store(address, width, values, machine.global_races, f.lanes, manner)
    elif space == "shared":
        if machine.races:
            machine.races.write(f, machine.shared.place(f, address, width * len(values))[0], width * len(values))
        place = machine.shared.store(f, address, width, values)
        if machine.races and place.shape[0] > 1:
            index = place >> (width.bit_length() - 1)
            now = [machine.shared.views[width][index + k] for k in range(len(values))]
            machine.races.same_value(place, now, values)
    elif space == "local":
        machine.local.store(f, address, width, values)
    elif space == "generic":
        parts = spaces(f, address)
        if len(parts) == 1:
            store(f, parts[0][0], parts[0][2], width, values, line, manner)
            return
        for inner, some, mine in parts:
            assert some is not None
            chosen = [v if v.shape[0] == 1 else v[some] for v in values]
            part = f.take(some, [WAITED], f.pc)
            with faults_of(part):
                store(part, inner, mine, width, chosen, line, manner)
    else:
        raise AccessFault("write to read-only memory", 0, f"store to {space} memory", space)


@opcode("ld", "ldu")
def _ld(build: Build, ins: ptx.Instruction) -> Step:
    m = Modifiers(ins)
    access = Access(build, ins, m)
    m.finish(3 if access.hint else 2)
    ds = [build.destination(o, access.kind, ins) for o in access.elements(ins.operands[0])]
    address = address_of(build, ins, ins.operands[1], access.spelled)
    width, count, space, manner = access.width, access.count, access.space, access.manner
    dtype = NUMPY[access.kind]
    stores = [np.dtype(STORAGE[build.width(d)]) for d in ds]
    plain = all(s.itemsize == width for s in stores)

    def run(f: Fragment) -> None:
        values = load(f, space, address(f), width, count, ins.line, manner)
        if plain:
            for d, value in zip(ds, values, strict=True):
                f.regs[d] = value
            return
        for d, value, target in zip(ds, values, stores, strict=True):
            if dtype.kind == "i":
                f.regs[d] = value.view(f"i{width}").astype(f"i{target.itemsize}").view(target)
            else:
                f.regs[d] = value.astype(target)

    return run


@opcode("st")
def _st(build: Build, ins: ptx.Instruction) -> Step:
    m = Modifiers(ins)
    if m.take("async"):
        from ptx_emulator.instructions.copies import store_async

        return store_async(build, ins, m)
    access = Access(build, ins, m)
    if access.space in ("global", "generic"):
        build.global_granule = min(build.global_granule, access.width * access.count)
    m.finish(3 if access.hint else 2)
    address = address_of(build, ins, ins.operands[0], access.spelled)
    slots = [build.source(o, access.kind, ins) for o in access.elements(ins.operands[1])]
    width, space, manner = access.width, access.space, access.manner
    dtype = np.dtype(f"u{width}")

    def run(f: Fragment) -> None:
        store(f, space, address(f), width, [f.regs[s].astype(dtype, copy=False) for s in slots], ins.line, manner)

    return run


@opcode("prefetch", "prefetchu")
def _prefetch(build: Build, ins: ptx.Instruction) -> Step:
    """Nothing is loaded, so it may come before the wait for the kernels in front; but what `.global` names must be there. Generic
    addresses are not checked."""
    m = Modifiers(ins)
    space = m.take("global", "local")
    if not m.take("L1", "L2", "L2::evict_last", "L2::evict_normal"):
        raise m.unsupported()
    m.finish(1)
    address = address_of(build, ins, ins.operands[0], "global")
    if space != "global":
        return lambda f: None

    def run(f: Fragment) -> None:
        addresses = np.broadcast_to(address(f), (f.n,))
        f.machine.memory.load(addresses, 1, 1)
        f.machine.counters.prefetched.update(addresses.tolist())

    return run


@opcode("fence", "membar")
def _fence(build: Build, ins: ptx.Instruction) -> Step:
    # Accesses are carried out in program order here, so a fence orders nothing that is not ordered already. What it orders
    # between threads matters to the race checkers alone: a fence makes a relaxed arrival at the cluster barrier, or a relaxed
    # store after it, a release, and a relaxed load before it an acquire.
    m = Modifiers(ins)
    proxy, init = bool(m.take("proxy")), bool(m.take("mbarrier_init"))
    kind = m.take("async", "async::generic", "alias")
    place = m.take("global", "shared::cta", "shared::cluster")
    m.take("sync_restrict::shared::cta", "sync_restrict::shared::cluster")
    order = m.take("sc", "acq_rel", "acquire", "release")
    scope = m.take("cta", "cluster", "gpu", "sys", "gl")
    m.finish(0)
    if (proxy and not kind) or (not proxy and (kind or not scope)) or (init and (order, scope) != ("release", "cluster")):
        raise m.unsupported()
    if proxy and (kind == "alias" or place == "global"):
        return lambda f: None  # of no concern to shared memory
    plain = not (proxy or init)
    if plain and scope == "cta":
        return lambda f: None
    releases, acquires = not plain or order != "acquire", plain and scope != "cluster" and order != "release"

    def run(f: Fragment) -> None:
        if not f.machine.races:
            return
        clocks = f.machine.races.clocks
        if acquires and f.machine.global_races:
            f.machine.global_races.communication.fence(clocks, f.lanes)
        if releases:
            clocks.fence(f.lanes, proxy=proxy, init=init)

    return run


# ---- atomics


def _atomic_operation(m: Modifiers, name: str, kind: str) -> Callable[[Any, Any, Any], Any]:
    """(old, operand, second operand) → new, as Python-level scalars of the NumPy type."""
    dtype = NUMPY[kind]
    integer = kind[0] in "bus"
    if name == "exch":
        return lambda old, b, c: b
    if name == "cas" and integer:
        return lambda old, b, c: c if old == b else old
    if name == "add" and kind in ("u32", "s32", "u64", "s64", "f32"):
        return lambda old, b, c: dtype.type(old + b)
    if name in ("min", "max") and kind in ("u32", "s32", "u64", "s64"):
        pick = min if name == "min" else max
        return lambda old, b, c: pick(old, b)
    if name == "and" and kind[0] == "b":
        return lambda old, b, c: old & b
    if name == "or" and kind[0] == "b":
        return lambda old, b, c: old | b
    if name == "xor" and kind[0] == "b":
        return lambda old, b, c: old ^ b
    if name == "inc" and kind == "u32":
        return lambda old, b, c: dtype.type(0) if old >= b else dtype.type(old + dtype.type(1))
    if name == "dec" and kind == "u32":
        return lambda old, b, c: b if old == 0 or old > b else dtype.type(old - dtype.type(1))
    raise m.unsupported(f"atomic .{name}.{kind}")


@opcode("atom", "red")
def _atomic(build: Build, ins: ptx.Instruction) -> Step:
    m = Modifiers(ins)
    returns = ins.base == "atom"
    spelled = m.take("global", "shared::cluster", "shared::cta", "shared") or "generic"
    space = "shared" if spelled.startswith("shared") else spelled
    manner = Manner.of(m.take(*_ORDER) or "relaxed", m.take(*_SCOPE))
    name = m.take("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec")
    kind = m.type()
    count = 2 + (name == "cas") + returns
    m.finish(count)
    operation = _atomic_operation(m, name, kind)
    operands = list(ins.operands)
    width = ptx.WIDTHS[kind] // 8
    if space != "global":
        build.shared_granule = min(build.shared_granule, width)
    if space != "shared":
        build.global_granule = min(build.global_granule, width)
    d = build.destination(operands.pop(0), kind, ins) if returns else None
    address = address_of(build, ins, operands[0], spelled)
    b = build.source(operands[1], kind, ins)
    c = build.source(operands[2], kind, ins) if name == "cas" else b
    dtype = NUMPY[kind]
    raw = np.dtype(f"u{width}")

    def apply(f: Fragment, inner: str, places: np.ndarray, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        """Lane after lane, in ascending order: one of the orders hardware may take."""
        machine = f.machine
        places = np.broadcast_to(places, (f.n,))
        old = np.empty(f.n, raw)
        if inner == "shared":
            place, _ = machine.shared.place(f, places, width)
            if machine.races:
                machine.races.write(f, place, width, atomic=True)
            machine.shared.load(f, places, width, 1)  # reading what nobody wrote is a fault here too
            view, index = machine.shared.views[width].view(dtype), place >> (width.bit_length() - 1)
            for i in range(f.n):
                now = view[index[i]]
                old[i] = now.view(raw)
                view[index[i]] = operation(now, first[i], second[i])
            return old
        if inner != "global":
            raise AccessFault("atomic", 0, f"atomic access to {inner} memory")
        check_waited(f)
        machine.counters.loaded += width * f.n
        machine.counters.stored += width * f.n
        machine.counters.access(ins.line, f.lanes, places, width * f.n)
        races = machine.global_races

        def act(i: int, one: Fragment) -> None:
            place, lane = places[i : i + 1], one.lanes
            if races:
                races.observe(lane, place, manner)
                races.publish(lane, place, manner)
            now = machine.memory.load(place, width, 1, races, lane, manner)[0].view(dtype)[0]
            old[i] = now.view(raw)
            new = np.array([operation(now, first[i], second[i])], dtype).view(raw)
            machine.memory.store(place, width, [new], races, lane, manner)

        one_by_one(f, act)
        return old

    def run(f: Fragment) -> None:
        first, second = f.full(b).view(dtype), f.full(c).view(dtype)
        places = address(f)
        parts = spaces(f, places) if space == "generic" else [(space, None, places)]
        if len(parts) == 1:
            old = apply(f, parts[0][0], parts[0][2], first, second)
        else:
            old = np.empty(f.n, raw)
            for inner, index, mine in parts:
                assert index is not None
                part = f.take(index, [WAITED], f.pc)
                with faults_of(part):
                    old[index] = apply(part, inner, mine, first[index], second[index])
        if d is not None:
            f.regs[d] = old

    return run
