"""What the machine code of a kernel does: instruction classes, access widths, occupancy, and where it waits for its predecessor."""

from __future__ import annotations

import collections
import importlib.metadata
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from cute_kernels.compile.cubin import RESERVED
from cute_kernels.errors import CompileError

# SASS opcodes by class, first match wins. `barrier` counts block barriers and mbarrier operations, `cluster` whatever needs a
# cluster of blocks, `pdl` the wait for, and the release of, a programmatic dependent launch.
_CLASSES: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (name, re.compile(pattern))
    for name, pattern in (
        ("global load", r"LDG\b"),
        ("global store", r"STG\b"),
        ("bulk copy", r"(UBLKCP|UBLKRED|UTMA\w*|LDGSTS|LDGDEPBAR)\b"),
        ("shared load", r"(LDS|LDSM)\b"),
        ("shared store", r"(STS|STSM)\b"),
        ("local memory", r"(LDL|STL)\b"),
        ("generic access", r"(LD|ST|STAS|ATOM|ATOMG|ATOMS|RED|REDG|REDAS)\b"),
        ("cluster", r"(UCGABAR\w*|MAPA)\b"),
        ("barrier", r"(BAR|SYNCS|WARPSYNC|MEMBAR|FENCE)\b"),
        ("shuffle", r"(SHFL|REDUX|CREDUX|VOTE|MATCH)\b"),
        ("pdl", r"(ACQBULK|PREEXIT)\b"),
        ("special function", r"MUFU\b"),
        ("conversion", r"(F2F|F2FP|F2I|I2F|I2FP|F2IP)\b"),
        ("float", r"(FADD2?|FMUL2?|FFMA2?|FMNMX3?|FSETP?|FSEL|FCHK|HADD2|HMUL2|HFMA2|HMNMX2|D\w+)\b"),
        ("branch", r"(BRA|BRX|EXIT|RET|CALL|BSSY|BSYNC|BREAK|JMP)\b"),
    )
)
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", re.MULTILINE)
_WIDTHS = (("256", 32), ("128", 16), ("64", 8), ("U16", 2), ("S16", 2), ("U8", 1), ("S8", 1))


@dataclass(frozen=True)
class Instructions:
    """Static counts of a kernel's instructions.

    counts        by class, padding excluded
    widest_load   bytes one thread reads with its widest global load (0: none)
    widest_store  bytes one thread writes with its widest global store
    global_bytes  bytes that one thread would move if each of its global loads and stores ran once
    """

    counts: dict[str, int] = field(default_factory=dict)
    widest_load: int = 0
    widest_store: int = 0
    global_bytes: int = 0

    @property
    def total(self) -> int:
        """All instructions counted."""
        return sum(self.counts.values())

    @property
    def per_byte(self) -> float | None:
        """Instructions for each byte of the global loads and stores among them; None where only bulk copies move bytes."""
        return self.total / self.global_bytes if self.global_bytes else None


@dataclass(frozen=True)
class Multiprocessor:
    """What one multiprocessor holds at a time (CUDA programming guide, technical specifications by compute capability).

    shared  bytes of shared memory, of which it takes `cubin.RESERVED` for itself for each block, and gives blocks multiples of UNIT
    """

    threads: int
    blocks: int
    shared: int
    registers: int = 65536

    UNIT: ClassVar[int] = 128

    def occupancy(self, threads: int, registers: int, shared: int) -> float:
        """Share of its threads that can be resident, with blocks of `threads`, `registers` a thread and `shared` bytes a block."""
        warps = -(-threads // 32)
        of_warp = -(-registers * 32 // 256) * 256
        of_block = -(-(shared + RESERVED) // self.UNIT) * self.UNIT
        blocks = (self.threads // threads, self.blocks, self.registers // (of_warp * warps), self.shared // of_block)
        return min(blocks) * threads / self.threads


_DATA_CENTRE, _WORKSTATION = Multiprocessor(2048, 32, 228 << 10), Multiprocessor(1536, 24, 100 << 10)
_MULTIPROCESSORS = {"sm_90": _DATA_CENTRE, "sm_100": _DATA_CENTRE, "sm_103": _DATA_CENTRE, "sm_120": _WORKSTATION, "sm_121": _WORKSTATION}
_BLOCK = re.compile(r"\.(?:reqntid|maxntid)\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?")


def multiprocessor(gpu_arch: str) -> Multiprocessor:
    """The multiprocessor of an architecture such as "sm_100f"."""
    return _MULTIPROCESSORS[gpu_arch.rstrip("af")]


def block_threads(ptx: str) -> int:
    """Threads of a block, as the PTX of a kernel declares them."""
    found = _BLOCK.search(ptx)
    if found is None:
        raise CompileError("the PTX does not say how many threads a block has", hint="launch the kernel with a constant block")
    return int(found[1]) * int(found[2] or 1) * int(found[3] or 1)


def cuda_tool(name: str) -> Path:
    """`nvdisasm` or `cuobjdump`, from NVIDIA's wheel or from a toolkit on the PATH."""
    try:
        files = importlib.metadata.files(f"nvidia-cuda-{name}") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for entry in files:
        if entry.name == name:
            return Path(str(entry.locate()))
    found = shutil.which(name)
    if found is None:
        raise CompileError(f"{name} is not installed", hint="pip install '.[inspect]' in a checkout, or a CUDA toolkit on PATH")
    return Path(found)


def disassemble(cubin: Path) -> str:
    """The SASS of a cubin as text."""
    ran = subprocess.run([str(cuda_tool("nvdisasm")), "-c", str(cubin)], capture_output=True, text=True)
    if ran.returncode:
        raise CompileError(f"nvdisasm refuses {cubin.name}: {ran.stderr.strip()}", hint="it may be older than the compiler")
    return ran.stdout


def count_instructions(sass: str) -> Instructions:
    """Classes and access widths of the instructions in a disassembly."""
    counts: collections.Counter[str] = collections.Counter()
    widest = {"global load": 0, "global store": 0}
    moved = 0
    for opcode in _INSTRUCTION.findall(sass):
        if opcode == "NOP":
            continue
        name = next((name for name, pattern in _CLASSES if pattern.match(opcode)), "integer and other")
        counts[name] += 1
        if name in widest:
            widest[name] = max(widest[name], _width(opcode))
            moved += _width(opcode)
    return Instructions(dict(counts), widest["global load"], widest["global store"], moved)


def _width(opcode: str) -> int:
    parts = opcode.split(".")
    return next((size for mark, size in _WIDTHS if mark in parts), 4)


_ENTRY = re.compile(r"\.entry\s+(\w+)[^{]*\{")
_GLOBAL_ACCESS = re.compile(r"\b(?:ld|st|atom|red|cp(?!\.async\.bulk\.prefetch)|multimem)\.(?!param|shared|const|local)[\w.:]*")
_LEAVES = re.compile(r"^\s*(?:@!?%p\d+\s+)?(?:ret|exit|trap|brx\S*|call\S*)\b", re.MULTILINE)
_BRANCH = re.compile(r"\bbra(?:\.uni)?\s+(\$\w+);")
_JUMP = re.compile(r"^\s*bra(?:\.uni)?\s+\$\w+;", re.MULTILINE)  # whatever stands behind it is not reached from in front
_WAIT = re.compile(r"^\s*griddepcontrol\.wait;", re.MULTILINE)
# A wait that a branch leads around: unless a register is 0; and in all blocks but the first, or where a register is 0.
_SKIPPED = r"bra\s+(\$\w+);\s*(?://.*\s*)?griddepcontrol\.wait;\s*(?://.*\s*)?"
_FIRST_WAIT = re.compile(rf"setp\.ne\.[bsu]32\s+(%p\d+), (%r\d+), 0;\s*@\1 {_SKIPPED}\3:")
_LAST_WAIT = re.compile(
    r"setp\.eq\.[bsu]32\s+(%p\d+), (%r\d+), 0;\s*(?:mov\.u32\s+(%r\d+), %ctaid\.x;\s*)?setp\.ne\.[bsu]32\s+(%p\d+), (%r\d+), 0;\s*"
    rf"or\.pred\s+(%p\d+), (?:\4, \1|\1, \4);\s*@\6 {_SKIPPED}\7:\s*ret;\s*(?://.*\s*)*$"
)
_PARAMETER, _BLOCK_INDEX = r"ld\.param\.[bsu]32\s+{}, \[(\w+)\];", r"mov\.u32\s+{}, %ctaid\.x;"


def pdl_faults(ptx: str) -> list[str]:
    """Where a kernel breaks the rule of programmatic dependent launch: one sentence a fault, none for a sound kernel.

    The rule: every thread executes a wait before its first access to global memory. Prefetches are no accesses: they load nothing. So on
    the way from the entry, along every branch, a wait must come before any global access and before any return. One exception: a kernel
    may skip its waits where a parameter is not 0, if the threads of its first block then execute one directly before they leave.
    """
    entries = list(_ENTRY.finditer(ptx))
    if not entries:
        return ["the PTX has no entry"]
    return [f"{entry[1]}: {fault}" for entry in entries for fault in _faults_of(_body(ptx, entry.end()))]


def _body(ptx: str, start: int) -> str:
    """What stands between the brace in front of `start` and the one that closes it: scopes and vectors have braces, too."""
    depth = 1
    for brace in re.finditer(r"[{}]", ptx[start:]):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return ptx[start : start + brace.start()]
    return ptx[start:]


def _faults_of(body: str) -> list[str]:
    if _WAIT.search(body) is None:
        return ["no unconditional griddepcontrol.wait"]
    faults: list[str] = []
    starts, seen = [(0, "")], set()
    while starts:
        start, label = starts.pop()
        if start in seen:
            continue
        seen.add(start)
        wait, jump, guard = _WAIT.search(body, start), _JUMP.search(body, start), _FIRST_WAIT.search(body, start)
        if wait is None or (jump is not None and jump.end() < wait.start()):
            if jump is None:
                faults.append(f"a branch to {label} leads around griddepcontrol.wait")
                continue
            end = jump.end()
        else:
            end = wait.start()
            if guard is not None and guard.start() < end < guard.end():
                end = guard.start()
                if not _waits_last(body, guard):
                    faults.append("a griddepcontrol.wait that may be skipped, and no last one in its place")
        before = body[start:end]
        faults += [f"`{access[0]}` before griddepcontrol.wait" for access in _GLOBAL_ACCESS.finditer(before)]
        faults += [f"`{leave[0].strip()}` before griddepcontrol.wait" for leave in _LEAVES.finditer(before)]
        for target in _BRANCH.findall(before):
            place = body.find(f"{target}:")
            if place < 0:
                faults.append(f"a branch to {target}, which the kernel does not hold")
            elif not start <= place < end:
                starts.append((place, target))
    return faults


def _waits_last(body: str, first: re.Match[str]) -> bool:
    """Whether the first block's threads wait directly before the only way out, where the parameter lets all skip the first wait."""
    last = _LAST_WAIT.search(body)
    if last is None or len(_LEAVES.findall(body)) != 1:
        return False
    parameters = [re.findall(_PARAMETER.format(r), body[: m.start()])[-1:] for r, m in ((first[2], first), (last[2], last))]
    block = last[3] == last[5] or re.search(_BLOCK_INDEX.format(last[5]), body) is not None
    return bool(parameters[0]) and parameters[0] == parameters[1] and block
