"""A parsed kernel made executable: basic blocks of Python closures, register slots, and which registers are live where."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ptx_emulator import parser as ptx
from ptx_emulator.faults import PtxSyntaxError, UnsupportedInstruction
from ptx_emulator.fragment import GARBAGE, Fragment, faults_of

Step = Callable[[Fragment], None]
# A collective returns the fragments that go on; it parks the rest with the machine.
Collective = Callable[[Fragment], list[Fragment]]

STORAGE = {1: np.bool_, 16: np.uint16, 32: np.uint32, 64: np.uint64}
NUMPY: dict[str, np.dtype[Any]] = {
    **{f"{k}{b}": np.dtype(f"uint{b}") for k in "ub" for b in (8, 16, 32, 64)},
    **{f"s{b}": np.dtype(f"int{b}") for b in (8, 16, 32, 64)},
    **{"f32": np.dtype("f4"), "f64": np.dtype("f8"), "f16": np.dtype("f2"), "bf16": np.dtype("u2")},
    **{"f16x2": np.dtype("u4"), "bf16x2": np.dtype("u4"), "f32x2": np.dtype("u8"), "pred": np.dtype("bool")},
}

# Space of addresses as kernels see them.
SHARED_START = 0x400  # hardware keeps the first 1 KiB of shared memory; address 0 is never valid
RANK_SHIFT = 24  # shared::cluster addresses: block rank + 1 above this bit, 0 for the block's own memory
SHARED_WINDOW = 0x1000_0000_0000_0000  # generic addresses of shared memory
LOCAL_WINDOW = 0x2000_0000_0000_0000  # generic addresses of local memory
CONST_BASE = 0x3000_0000_0000_0000  # module-level .const and initialised .global variables

WAITED = 0  # slot of the flag "this thread has executed griddepcontrol.wait"

Builder = Callable[..., Any]
_OPCODES: dict[str, Builder] = {}
_COLLECTIVES: dict[str, Builder] = {}


def opcode(*names: str) -> Callable[[Builder], Builder]:
    """Register the builder of straight-line opcodes: `builder(build, instruction) -> Step`."""

    def register(builder: Builder) -> Builder:
        for name in names:
            _OPCODES[name] = builder
        return builder

    return register


def collective(*names: str) -> Callable[[Builder], Builder]:
    """Register the builder of opcodes that wait for other threads: `builder(build, instruction) -> Collective`."""

    def register(builder: Builder) -> Builder:
        for name in names:
            _COLLECTIVES[name] = builder
        return builder

    return register


_POLLS = frozenset(("relaxed", "acquire", "volatile", "mmio"))


@dataclass
class Block:
    """A basic block: `steps`, or one `collective`; then a branch on `condition` to `target`, else on to the next block.

    `ends` marks blocks whose last act is to leave the kernel. `table` holds the targets of an indexed branch on slot `condition`.
    `guarded` counts apart, by its position in the block, each instruction that runs for those alone whose predicate holds.
    `polls`: it has loads of global memory that are not weak.
    """

    index: int
    instructions: list[ptx.Instruction] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    collective: Collective | None = None
    condition: int | None = None
    negated: bool = False
    target: int | None = None
    table: list[int] = field(default_factory=list)
    falls: bool = True
    ends: bool = False
    trap: bool = False
    guarded: dict[int, int] = field(default_factory=dict)
    polls: bool = False
    reads: int = 0
    writes: int = 0
    live_in: list[int] = field(default_factory=list)
    successors: list[int] = field(default_factory=list)


class Build:
    """Turns operands into register slots while instructions are compiled, and notes what each block reads and writes."""

    def __init__(self, kernel: ptx.Kernel, module: ptx.Module) -> None:
        self.kernel = kernel
        self.initial: list[np.ndarray | None] = [None]
        self.slots: dict[str, int] = {}
        self.widths: dict[int, int] = {WAITED: 1}
        self.constants: dict[tuple[int, int], int] = {}
        self.specials: dict[str, int] = {}
        self.reads: set[int] = set()
        self.writes: set[int] = set()
        self.parameters = {p.name: p for p in kernel.parameters}
        self.symbols: dict[str, tuple[str, int]] = {}
        self.static_shared = SHARED_START
        self.local_bytes = 0
        self.dynamic_align = 1
        self.dynamic_names: list[str] = []
        self.constant_data: list[tuple[str, int, ptx.Variable]] = []
        self.shared_granule = 8  # narrowest access to shared memory, in bytes
        self.asynchronous = False  # there are mbarriers or bulk copies
        self.global_granule = 16  # smallest store to global memory, in bytes
        self._place([*module.variables, *kernel.variables])

    def _place(self, variables: list[ptx.Variable]) -> None:
        constant = CONST_BASE
        for v in variables:
            if v.space == "shared" and v.size is None:
                self.dynamic_names.append(v.name)
                self.dynamic_align = max(self.dynamic_align, v.align)
            elif v.space == "shared":
                self.static_shared = -(-self.static_shared // v.align) * v.align
                self.symbols[v.name] = ("shared", self.static_shared)
                self.static_shared += v.size or 0
            elif v.space == "local":
                self.local_bytes = -(-self.local_bytes // v.align) * v.align
                self.symbols[v.name] = ("local", self.local_bytes)
                self.local_bytes += v.size or 0
            else:
                constant = -(-constant // 256) * 256
                self.symbols[v.name] = (v.space, constant)
                self.constant_data.append((v.name, constant, v))
                constant += v.size or 0
        align = max(self.dynamic_align, 16)
        self.dynamic_start = -(-self.static_shared // align) * align
        for name in self.dynamic_names:
            self.symbols[name] = ("shared", self.dynamic_start)

    def new_slot(self, bits: int, value: np.ndarray | None = None) -> int:
        """A slot for values of so many bits, with a value from the start or none."""
        self.initial.append(value)
        slot = len(self.initial) - 1
        self.widths[slot] = bits
        return slot

    def constant(self, value: int, bits: int) -> int:
        """A slot holding `value` for every lane."""
        value = bool(value) if bits == 1 else value % (1 << bits)
        key = (value, bits)
        if key not in self.constants:
            self.constants[key] = self.new_slot(bits, np.array([value], STORAGE[bits]))
        return self.constants[key]

    def register(self, register: ptx.Register) -> int:
        """The slot of a register."""
        if register.name not in self.slots:
            if register.bits not in STORAGE:
                raise UnsupportedInstruction(f"{register.bits}-bit register {register.name}", 0)
            # Compilers leave registers undefined where the value does not matter; if it does, this pattern shows.
            dtype = np.dtype(STORAGE[register.bits])
            self.slots[register.name] = self.new_slot(register.bits, np.array([GARBAGE[dtype]], dtype))
        return self.slots[register.name]

    def source(self, operand: ptx.Operand, kind: str, ins: ptx.Instruction) -> int:
        """Slot of a source operand, read as PTX type `kind`."""
        bits = ptx.WIDTHS[kind]
        if isinstance(operand, ptx.Register):
            slot = self.register(operand)
            if operand.bits < bits or (operand.bits == 1) != (bits == 1):
                raise UnsupportedInstruction(f"{operand.bits}-bit register read as .{kind}", ins.line, ins.text)
            self.reads.add(slot)
            return slot
        if isinstance(operand, ptx.Immediate):
            return self.constant(self.literal(operand.text, kind, ins), max(bits, 16) if bits > 1 else 1)
        if isinstance(operand, ptx.Special):
            name = operand.name
            if name not in self.specials:
                from ptx_emulator.specials import special_bits

                width = special_bits(name)
                if width is None:
                    raise UnsupportedInstruction(f"special register {name}", ins.line, ins.text)
                self.specials[name] = self.new_slot(width)
            slot = self.specials[name]
            if self.widths[slot] < bits:
                raise UnsupportedInstruction(f"special register {name} read as .{kind}", ins.line, ins.text)
            self.reads.add(slot)
            return slot
        if isinstance(operand, ptx.Symbol):
            if operand.name in self.symbols:
                return self.constant(self.symbols[operand.name][1], bits)
            if operand.name in self.parameters:
                return self.constant(self.parameters[operand.name].offset, bits)
        raise UnsupportedInstruction(f"source operand {operand}", ins.line, ins.text)

    def literal(self, text: str, kind: str, ins: ptx.Instruction) -> int:
        """Bits of a literal read as `kind`."""
        bits = ptx.WIDTHS[kind]
        low = text.lower().rstrip("u") if not text.lower().startswith(("0f", "0d")) else text.lower()
        if low.startswith("0f"):
            value = int(low[2:], 16)
            if bits == 32:
                return value
            if kind == "f64":
                single = np.array([value], np.uint32).view(np.float32).astype(np.float64)
                return int(single.view(np.uint64)[0])
        elif low.startswith("0d"):
            value = int(low[2:], 16)
            if bits == 64:
                return value
            if kind == "f32":
                return int(np.array([value], np.uint64).view(np.float64).astype(np.float32).view(np.uint32)[0])
        elif kind in ("f32", "f64"):
            dtype, unsigned = (np.float32, np.uint32) if kind == "f32" else (np.float64, np.uint64)
            return int(np.array([float(low)], dtype).view(unsigned)[0])
        elif ("." not in low and "e" not in low) or low.startswith(("0x", "-0x")):
            value = _integer(low)
            return value % (1 << bits) if bits > 1 else int(value != 0)
        raise UnsupportedInstruction(f"literal {text} as .{kind}", ins.line, ins.text)

    def number(self, operand: ptx.Operand, ins: ptx.Instruction) -> int:
        """An operand that must be an integer literal."""
        if not isinstance(operand, ptx.Immediate):
            raise UnsupportedInstruction(f"{operand}: an integer literal expected", ins.line, ins.text)
        return self.literal(operand.text, "u32", ins)

    def destination(self, operand: ptx.Operand, kind: str, ins: ptx.Instruction) -> int:
        """Slot of a destination operand; `_` gives a slot nobody reads."""
        if isinstance(operand, ptx.Symbol) and operand.name == "_":
            bits = max(ptx.WIDTHS[kind], 16) if kind != "pred" else 1
            return self.new_slot(bits, np.zeros(1, STORAGE[bits]))
        if not isinstance(operand, ptx.Register):
            raise UnsupportedInstruction(f"destination operand {operand}", ins.line, ins.text)
        slot = self.register(operand)
        bits = ptx.WIDTHS[kind]
        if operand.bits < bits or (operand.bits == 1) != (bits == 1):
            raise UnsupportedInstruction(f".{kind} written to a {operand.bits}-bit register", ins.line, ins.text)
        self.writes.add(slot)
        return slot

    def width(self, slot: int) -> int:
        """Bits of a slot."""
        return self.widths[slot]


def _integer(text: str) -> int:
    """A literal as PTX has them: hexadecimal, octal with a leading 0, or decimal."""
    digits = text.lstrip("+-")
    value = int(digits, 8) if len(digits) > 1 and digits.isdigit() and digits[0] == "0" else int(digits, 0)
    return -value if text.startswith("-") else value


class Program:
    """An executable kernel: `blocks` in layout order, `initial` register values, sizes of its memories."""

    def __init__(self, kernel: ptx.Kernel, module: ptx.Module) -> None:
        import ptx_emulator.instructions  # noqa: F401  (registers the opcodes)

        self.kernel = kernel
        self.build = Build(kernel, module)
        self.blocks = self._split()
        self.counted = len(self.blocks)  # and guarded instructions
        for block in self.blocks:
            self._compile(block)
        self._liveness()
        self.initial = self.build.initial
        self.specials = self.build.specials

    # ---- structure

    def _split(self) -> list[Block]:
        kernel = self.kernel
        count = len(kernel.instructions)
        leaders = {0, *kernel.labels.values()}
        for i, ins in enumerate(kernel.instructions):
            if ins.base in ("bra", "brx", "ret", "exit", "trap"):
                leaders.add(i + 1)
            elif ins.base in _COLLECTIVES:
                leaders.update((i, i + 1))
        starts = sorted(s for s in leaders if s < count)
        blocks: list[Block] = []
        place: dict[int, int] = {}
        for start, end in itertools.pairwise([*starts, count]):
            body = kernel.instructions[start:end]
            place[start] = len(blocks)
            guarded = len(body) == 1 and body[0].guard is not None and body[0].base in (*_COLLECTIVES, "ret", "exit", "trap")
            if guarded:
                # `@p sync` becomes a branch around `sync`: so a fragment always stands as a whole at an instruction that may wait.
                blocks.append(Block(len(blocks), [body[0]]))
                blocks[-1].target = -2
            blocks.append(Block(len(blocks), body))
            tail = body[-1]
            if len(body) > 1 and tail.guard is not None and tail.base in ("ret", "exit", "trap"):
                blocks[-1].instructions = body[:-1]
                blocks.append(Block(len(blocks), [tail]))
                blocks[-1].target = -2
                blocks.append(Block(len(blocks), [tail]))
        end_label = len(blocks)
        blocks.append(Block(end_label, ends=True, falls=False))
        place[count] = end_label
        self._place = place
        return blocks

    def _target(self, operand: ptx.Operand, ins: ptx.Instruction) -> int:
        if not isinstance(operand, ptx.Symbol) or operand.name not in self.kernel.labels:
            raise PtxSyntaxError("branch target unknown", ins.line, ins.text)
        return self._place[self.kernel.labels[operand.name]]

    def _compile(self, block: Block) -> None:
        build = self.build
        around = block.target == -2
        kill: set[int] = set()
        use: set[int] = set()

        def account(guarded: bool) -> None:
            use.update(build.reads - kill)
            if not guarded:
                kill.update(build.writes)
            else:
                use.update(build.writes - kill)
            build.reads, build.writes = set(), set()

        if around:
            ins = block.instructions[0]
            assert ins.guard is not None
            block.condition, block.negated, block.target = build.source(ins.guard, "pred", ins), not ins.negated, block.index + 2
            block.instructions = []
            account(False)
        for ins in block.instructions:
            build.reads, build.writes = set(), set()
            try:
                self._instruction(block, ins, account)
            except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
                raise UnsupportedInstruction(f"{ins.opcode}: operands not understood ({error})", ins.line, ins.text) from error
        block.reads = sum(1 << s for s in use)
        block.writes = sum(1 << s for s in kill)

    def _instruction(self, block: Block, ins: ptx.Instruction, account: Callable[[bool], None]) -> None:
        """Adds one instruction to its block."""
        build, base = self.build, ins.base
        if base in ("ld", "atom") and not any(m.startswith("shared") for m in ins.modifiers):
            block.polls |= base == "atom" or not _POLLS.isdisjoint(ins.modifiers)
        if base in ("bra", "brx", "ret", "exit", "trap"):
            form = {"bra": ({"uni"}, 1), "brx": ({"idx", "uni"}, 2), "ret": ({"uni"}, 0)}.get(base, (set[str](), 0))
            if set(ins.modifiers) - form[0] or len(ins.operands) != form[1]:
                raise UnsupportedInstruction(f"{ins.opcode}: form not known", ins.line, ins.text)
        if base == "bra":
            block.target = self._target(ins.operands[0], ins)
            if ins.guard is not None:
                block.condition, block.negated = build.source(ins.guard, "pred", ins), ins.negated
            else:
                block.falls = False
            account(False)
        elif base == "brx":
            name = ins.operands[1]
            if ins.guard is not None or not isinstance(name, ptx.Symbol) or name.name not in self.kernel.tables:
                raise UnsupportedInstruction("indexed branch", ins.line, ins.text)
            block.condition = build.source(ins.operands[0], "u32", ins)
            block.table = [self._target(ptx.Symbol(t), ins) for t in self.kernel.tables[name.name]]
            block.falls = False
            account(False)
        elif base in ("ret", "exit", "trap"):
            block.falls, block.ends, block.trap = False, True, base == "trap"
        elif base in _COLLECTIVES:
            block.collective = _COLLECTIVES[base](build, ins)
            account(False)
        elif base in _OPCODES:
            step = _OPCODES[base](build, ins)
            if ins.guard is not None:
                reads, writes = sorted(build.reads | {WAITED}), sorted(build.writes)
                block.guarded[len(block.steps)] = self.counted
                step = guarded_step(step, build.source(ins.guard, "pred", ins), ins.negated, reads, writes, self.counted)
                self.counted += 1
            block.steps.append(step)
            account(ins.guard is not None)
        else:
            raise UnsupportedInstruction(f"opcode {ins.opcode!r} is not known", ins.line, ins.text)

    def _liveness(self) -> None:
        blocks = self.blocks
        always = 1 << WAITED
        for slot in self.build.specials.values():
            always |= 1 << slot
        live = [0] * len(blocks)
        for b in blocks:
            b.successors = [*([b.target] if b.target is not None else []), *b.table, *([b.index + 1] if b.falls else [])]
        changed = True
        while changed:
            changed = False
            for b in reversed(blocks):
                out = 0
                for s in b.successors:
                    out |= live[s]
                new = b.reads | (out & ~b.writes)
                if new != live[b.index]:
                    live[b.index] = new
                    changed = True
        for b in blocks:
            bits = live[b.index] | always
            b.live_in = [i for i in range(bits.bit_length()) if bits >> i & 1]


def guarded_step(step: Step, predicate: int, negated: bool, reads: list[int], writes: list[int], counter: int) -> Step:
    """`@p step`: runs it on the lanes where the predicate holds and writes their results back; it counts as `counter`."""

    def run(f: Fragment) -> None:
        mask = f.regs[predicate]
        if negated:
            mask = ~mask
        if mask.all():
            f.machine.counters.run(counter, f)
            step(f)
            return
        if not mask.any():
            return
        index = np.flatnonzero(mask)
        part = f.take(index, reads, f.pc)
        f.machine.counters.run(counter, part)
        with faults_of(part):
            step(part)
        n = f.n
        for slot in writes:
            value, old = part.regs[slot], f.regs[slot]
            if old.shape[0] == n:
                new = old.copy()
            else:
                new = np.full(n, old[0])
            new[index] = value
            f.regs[slot] = new

    return run
