"""Run a kernel: text or parsed program, grid, parameters and memory in; counters and coverage out."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ptx_emulator import parser as ptx
from ptx_emulator.faults import KernelFault, LaunchError
from ptx_emulator.global_races import GlobalRaces
from ptx_emulator.machine import Counters, Launch, Machine
from ptx_emulator.memory import FOREIGN, UNWRITTEN, Buffer, Memory
from ptx_emulator.program import SHARED_START, Program

_LANES = 16384  # threads executed side by side: wide enough to hide Python, small enough for the cache
_SHARED = 32 << 20  # bytes of shared memory held at once


@dataclass
class Result:
    """What a launch did. `lines` maps each PTX line of an instruction to (times executed, threads).

    A guarded instruction is executed by those threads whose predicate holds; a guarded branch by all.

    policies  bytes of bulk loads by the L2 policy that they name; None: none
    prefetched  addresses in global memory of which `prefetch.global` brings the line
    accesses  with `statistics`: PTX line of each global access -> (warps, 32-byte sectors they touched, bytes)
    warps     with `statistics`: PTX line of each instruction -> warps that executed it, with any number of lanes
    races, pdl, independent, read_only, owned, unwritten
              what could be judged: races; waiting, as launched with PDL, and if independent only that some block does so before it
              leaves; stores to read-only tensors and outside owned rows, reads of unwritten outputs, as buffers were declared so
    """

    kernel: str
    lines: dict[int, tuple[int, int]]
    texts: dict[int, str]
    opcodes: dict[str, int]
    loaded: int
    stored: int
    policies: dict[int | None, int]
    prefetched: set[int]
    accesses: dict[int, tuple[int, int, int]]
    warps: dict[int, int]
    races: bool
    pdl: bool
    independent: bool
    read_only: bool
    owned: bool
    unwritten: bool

    @property
    def never(self) -> list[int]:
        """PTX lines never executed."""
        return [line for line, (runs, _) in self.lines.items() if not runs]


@lru_cache(maxsize=64)
def load_programs(text: str) -> dict[str, Program]:
    """Parse and build every kernel of a PTX file, by name."""
    module = ptx.parse(text)
    return {name: Program(kernel, module) for name, kernel in module.kernels.items()}


def load_program(text: str, kernel: str = "") -> Program:
    """One kernel of a PTX file; without a name the file must hold exactly one."""
    programs = load_programs(text)
    if not kernel and len(programs) != 1:
        raise LaunchError(f"the PTX holds {len(programs)} kernels ({', '.join(programs)}); name one")
    if kernel and kernel not in programs:
        raise LaunchError(f"no kernel {kernel!r} in the PTX; it holds {', '.join(programs)}")
    return programs[kernel or next(iter(programs))]


def pack_parameters(program: Program, values: Sequence[object]) -> bytes:
    """The parameter buffer of a kernel from one value per parameter: int, float, or bytes."""
    parameters = program.kernel.parameters
    if len(values) != len(parameters):
        raise LaunchError(f"{len(values)} parameters given, the kernel has {len(parameters)}")
    buffer = bytearray(program.kernel.parameter_bytes)
    for parameter, value in zip(parameters, values, strict=True):
        if isinstance(value, (bytes, bytearray)):
            raw = bytes(value)
        elif isinstance(value, float):
            raw = struct.pack("<f" if parameter.size == 4 else "<d", value)
        else:
            raw = (int(value) % (1 << 8 * parameter.size)).to_bytes(parameter.size, "little")  # type: ignore[call-overload]
        if len(raw) != parameter.size:
            raise LaunchError(f"parameter {parameter.name}: {len(raw)} bytes given, {parameter.size} expected")
        buffer[parameter.offset : parameter.offset + parameter.size] = raw
    return bytes(buffer)


def _three(value: int | Sequence[int]) -> tuple[int, int, int]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return (*values, 1, 1, 1)[:3]  # type: ignore[return-value]


def run_ptx(
    ptx_text: str | Program,
    grid: int | Sequence[int],
    block: int | Sequence[int],
    params: Sequence[object] | bytes,
    memory: Memory,
    *,
    cluster: int | Sequence[int] | None = None,
    dynamic_shared: int = 0,
    pdl: bool = False,
    independent: bool = False,
    kernel: str = "",
    approximation: str = "nearest",
    check_races: bool = True,
    statistics: bool = False,
    shared_limit: int = 232_448,
) -> Result:
    """Execute a kernel on the CPU.

    cluster       blocks per cluster, as the launch asks for; without it the kernel's own `.reqnctapercluster`, or 1
    params        one value per kernel parameter (int, float or raw bytes), or the whole parameter buffer
    memory        every buffer the kernel may touch
    pdl           launched with programmatic dependent launch: global accesses before `griddepcontrol.wait` are faults, and so are
                  blocks that leave without it
    independent   such accesses are meant: whoever launches knows that the kernels in front touch other memory. One block has to wait
                  before it leaves, so that the grid does not complete before those in front of it
    approximation "nearest", or "low" / "high" for an end of the documented error interval of the approximate functions
    statistics    count the warps of every instruction, and sectors and bytes of every global access (slower)

    Raises `KernelFault` for what is wrong in the kernel, `LaunchError` for what is wrong in the launch.
    """
    program = ptx_text if isinstance(ptx_text, Program) else load_program(ptx_text, kernel)
    parameters = bytes(params) if isinstance(params, (bytes, bytearray)) else pack_parameters(program, params)
    if len(parameters) != program.kernel.parameter_bytes:
        raise LaunchError(f"parameter buffer of {len(parameters)} bytes, {program.kernel.parameter_bytes} expected")
    if approximation not in ("nearest", "low", "high"):
        raise LaunchError(f"approximation {approximation!r}: nearest, low or high expected")
    if cluster is None:
        cluster = program.kernel.directives.get("reqnctapercluster", 1)
    launch = Launch(_three(grid), _three(block), _three(cluster), dynamic_shared, parameters, pdl, approximation, check_races, independent)
    _check(program, launch, shared_limit)
    runs, lanes, warps = (np.zeros(program.counted, np.int64) for _ in range(3))
    counters = Counters(runs, lanes, warps)
    counters.accesses = {} if statistics else None
    constants = _constants(program)
    whole = Memory([*memory.buffers, *constants]) if constants else memory
    size = program.build.dynamic_start + dynamic_shared
    clusters_at_once = max(min(_LANES // launch.threads, _SHARED // size) // launch.cluster_size, 1)
    order = _cluster_order(launch)
    step = clusters_at_once * launch.cluster_size
    global_races = GlobalRaces(program.build.global_granule) if check_races else None
    waited = np.zeros(0, bool)
    for start in range(0, order.shape[0], step):
        machine = Machine(program, launch, whole, order[start : start + step], counters, global_races)
        machine.run()
        waited = np.r_[waited, machine.waited_blocks]
        vars(machine).clear()  # its parts refer to it: 100 MB and more would stay until the garbage collector comes by
    if pdl:
        _check_waits(program, independent, waited, order)
    return _result(program, counters, launch, memory.buffers)


def _check(program: Program, launch: Launch, shared_limit: int) -> None:
    kernel = program.kernel
    if min(*launch.grid, *launch.block, *launch.cluster) < 1:
        raise LaunchError(f"grid {launch.grid}, block {launch.block}, cluster {launch.cluster}: every extent must be at least 1")
    if launch.grid[0] >= 1 << 31 or max(launch.grid[1:]) > 65535:
        raise LaunchError(f"grid {launch.grid} exceeds (2^31-1, 65535, 65535)")
    if launch.block[2] > 64:
        raise LaunchError(f"block {launch.block} exceeds (1024, 1024, 64)")
    if launch.threads > 1024:
        raise LaunchError(f"block {launch.block} has {launch.threads} threads, 1024 at most")
    if any(g % c for g, c in zip(launch.grid, launch.cluster, strict=True)):
        raise LaunchError(f"grid {launch.grid} is no multiple of the cluster {launch.cluster}")
    if launch.cluster_size > 16:
        raise LaunchError(f"cluster {launch.cluster} has {launch.cluster_size} blocks, 16 at most")
    required = kernel.directives.get("reqntid")
    if required and _three(required) != launch.block:
        raise LaunchError(f"block {launch.block}, but the kernel requires {_three(required)}")
    most = kernel.directives.get("maxntid")
    if most and launch.threads > int(np.prod(most)):
        raise LaunchError(f"block {launch.block} has more threads than the kernel allows: {most}")
    wanted = kernel.directives.get("reqnctapercluster")
    if wanted and _three(wanted) != launch.cluster:
        raise LaunchError(f"cluster {launch.cluster}, but the kernel requires {_three(wanted)}")
    total = program.build.dynamic_start - SHARED_START + launch.dynamic_shared
    if total > shared_limit:
        raise LaunchError(f"{total} bytes of shared memory, {shared_limit} at most")


def _check_waits(program: Program, independent: bool, waited: np.ndarray, order: np.ndarray) -> None:
    """Every block has to wait for the kernels in front before it leaves; in an independent launch one of them."""
    if waited.all() or (independent and waited.any()):
        return
    x, y, z = order[np.argmin(waited)].tolist()
    message = (
        f"{'all blocks leave' if independent else 'a block leaves'} without waiting for earlier kernels, so later ones may start too early"
    )
    raise KernelFault("missing griddepcontrol.wait", message, block=None if independent else (x, y, z), kernel=program.kernel.name)


def _cluster_order(launch: Launch) -> np.ndarray:
    """Block coordinates [blocks, 3], cluster after cluster, by rank within each; x runs fastest in both."""
    gx, gy, gz = (g // c for g, c in zip(launch.grid, launch.cluster, strict=True))
    outer = np.stack(np.meshgrid(np.arange(gz), np.arange(gy), np.arange(gx), indexing="ij"), -1).reshape(-1, 3)[:, ::-1]
    cx, cy, cz = launch.cluster
    inner = np.stack(np.meshgrid(np.arange(cz), np.arange(cy), np.arange(cx), indexing="ij"), -1).reshape(-1, 3)[:, ::-1]
    return (outer[:, None, :] * np.array(launch.cluster) + inner[None]).reshape(-1, 3)


def _constants(program: Program) -> list[Buffer]:
    found = []
    for name, address, variable in program.build.constant_data:
        data = np.zeros((variable.size or 0) + 64, np.uint8)
        start = (-data.ctypes.data) % 32
        data[start : start + len(variable.data)] = np.frombuffer(variable.data, np.uint8)
        found.append(Buffer(name, address, data.ctypes.data + start, variable.size or 0, writable=variable.space == "global", keep=data))
    return found


def _result(program: Program, counters: Counters, launch: Launch, buffers: Sequence[Buffer]) -> Result:
    lines: dict[int, tuple[int, int]] = {}
    texts: dict[int, str] = {}
    opcodes: dict[str, int] = {}
    warps: dict[int, int] = {}
    for block in program.blocks:
        for position, ins in enumerate(block.instructions):
            counter = block.guarded.get(position, block.index)
            runs, lanes = int(counters.runs[counter]), int(counters.lanes[counter])
            before = lines.get(ins.line, (0, 0))
            lines[ins.line] = (before[0] + runs, before[1] + lanes)
            texts[ins.line] = ins.text
            warps[ins.line] = warps.get(ins.line, 0) + int(counters.warps[counter])
            opcodes[ins.base] = opcodes.get(ins.base, 0) + lanes
    accesses = {line: (row[0], row[1], row[2]) for line, row in sorted((counters.accesses or {}).items())}
    return Result(
        kernel=program.kernel.name,
        lines=lines,
        texts=texts,
        opcodes=opcodes,
        loaded=counters.loaded,
        stored=counters.stored,
        policies=dict(counters.policies),
        prefetched=counters.prefetched,
        accesses=accesses,
        warps=warps,
        races=launch.check_races,
        pdl=launch.pdl,
        independent=launch.independent,
        read_only=any(not b.writable for b in buffers),
        owned=any(b.declared & FOREIGN for b in buffers),
        unwritten=any(b.declared & UNWRITTEN for b in buffers),
    )
