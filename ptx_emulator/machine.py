"""Executes a chunk of blocks: which threads run next, who waits for whom, what a stall means.

The fragment at the lowest program counter runs next, so threads that took the longer way are met again where the ways join.
Instructions that wait for other threads (barriers, shuffles, mbarrier waits) park fragments; when nothing can run any more and
threads are still parked, the kernel is at fault and the report says who waits where.
"""

from __future__ import annotations

import collections
import heapq
from dataclasses import dataclass, field

import numpy as np

from ptx_emulator.barriers import ClusterBarriers, NamedBarriers
from ptx_emulator.faults import KernelFault
from ptx_emulator.fragment import Fragment, merge
from ptx_emulator.global_races import GlobalRaces
from ptx_emulator.instructions.copies import BulkGroups, CopyGroups
from ptx_emulator.mbarriers import MBarriers
from ptx_emulator.memory import AccessFault, Memory
from ptx_emulator.parser import Instruction
from ptx_emulator.program import WAITED, Block, Program
from ptx_emulator.races import RaceChecker
from ptx_emulator.shared import LocalMemory, SharedMemory
from ptx_emulator.specials import special_value

_SPIN_LIMIT = 64  # polls in a row that change nothing before a wait counts as a deadlock
_LOOP_LIMIT = 250_000  # basic blocks in a row without a barrier, an mbarrier or an exit before a loop counts as endless
_ROUNDS = 256  # looks at global memory, while nobody stores and nobody else can go on, before a loop of them counts as endless
_PATIENCE = 1000  # such blocks before all who can run take turns: one may spin until another has written


@dataclass(frozen=True)
class Launch:
    """What the host asked for; `parameters` is the kernel's parameter buffer, `approximation` "nearest", "low" or "high".

    `pdl` and `independent` are those of `run_ptx`.
    """

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    dynamic_shared: int
    parameters: bytes
    pdl: bool = False
    approximation: str = "nearest"
    check_races: bool = True
    independent: bool = False

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.block[0] * self.block[1] * self.block[2]

    @property
    def cluster_size(self) -> int:
        """Blocks of a cluster."""
        return self.cluster[0] * self.cluster[1] * self.cluster[2]


@dataclass
class Counters:
    """Per basic block, and behind those per guarded instruction (`Block.guarded`): how often it ran, and for how many threads; bytes
    moved, those of bulk loads by their L2 policy; addresses that `prefetch` names; and on demand warps and every global access.
    """

    runs: np.ndarray
    lanes: np.ndarray
    warps: np.ndarray
    loaded: int = 0
    stored: int = 0
    policies: collections.Counter[int | None] = field(default_factory=collections.Counter)  # None: none is named
    prefetched: set[int] = field(default_factory=set)
    accesses: dict[int, list[int]] | None = None  # PTX line -> [warps, 32-byte sectors, bytes]

    def run(self, index: int, f: Fragment) -> None:
        """A fragment executes a block, or a guarded instruction."""
        self.runs[index] += 1
        self.lanes[index] += f.n
        if self.accesses is not None:
            self.warps[index] += np.unique(f.lanes // 32).size

    def access(self, line: int, lanes: np.ndarray, address: np.ndarray, nbytes: int) -> None:
        """Count the sectors that each warp touches with an access of these lanes, of `nbytes` in all."""
        if self.accesses is None:
            return
        warps = lanes.astype(np.uint64) // np.uint64(32)
        sectors = np.broadcast_to(address >> np.uint64(5), warps.shape)
        row = self.accesses.setdefault(line, [0, 0, 0])
        row[0] += int(np.unique(warps).size)
        row[1] += int(np.unique((warps << np.uint64(44)) ^ sectors).size)
        row[2] += nbytes

    def bulk(self, line: int, address: int, nbytes: int) -> None:
        """Count one bulk copy, as of a warp."""
        if self.accesses is None:
            return
        row = self.accesses.setdefault(line, [0, 0, 0])
        for i, count in enumerate((1, (address + nbytes - 1) // 32 - address // 32 + 1, nbytes)):
            row[i] += count


class Machine:
    """Runs the blocks with coordinates `coordinates` ([n, 3], whole clusters, rank order inside each)."""

    def __init__(
        self,
        program: Program,
        launch: Launch,
        memory: Memory,
        coordinates: np.ndarray,
        counters: Counters,
        global_races: GlobalRaces | None = None,
    ) -> None:
        self.program, self.launch, self.memory, self.counters = program, launch, memory, counters
        self.block_coordinates = coordinates
        self.block_count = coordinates.shape[0]
        self.block_lanes = -(-launch.threads // 32) * 32
        self.warps_per_block = self.block_lanes // 32
        lanes = np.arange(self.block_count * self.block_lanes, dtype=np.int32)
        thread = lanes % self.block_lanes
        lanes = lanes[thread < launch.threads]
        self.lane_thread = (lanes % self.block_lanes).astype(np.int64)
        self.lane_block = (lanes // self.block_lanes).astype(np.int64)
        total = self.block_count * self.block_lanes
        self.alive = np.zeros(total, bool)
        self.alive[lanes] = True
        self.launched = self.alive.copy()
        self.parameters = np.frombuffer(launch.parameters + bytes(16), np.uint8)
        self.shared = SharedMemory(self.block_count, program.build.dynamic_start + launch.dynamic_shared, launch.cluster_size)
        self.local = LocalMemory(total, program.build.local_bytes)
        self.races = RaceChecker(self) if launch.check_races else None
        self.global_races = global_races  # of the whole launch
        if global_races:
            global_races.enter(self)
        self.barriers = NamedBarriers(self)
        self.clusters = ClusterBarriers(self)
        self.mbarriers = MBarriers(self)
        self.copies = CopyGroups(self)
        self.bulk = BulkGroups(self)
        self.waited_blocks = np.zeros(self.block_count, bool)
        self.ready: dict[int, list[Fragment]] = {}
        self.heap: list[int] = []
        self.turn = -1  # of those in `ready`, who ran last
        self.parked: dict[int, list[Fragment]] = {}
        self.polling: list[Fragment] = []
        self.yielding: list[Fragment] = []
        self.asked = np.zeros(total, bool)  # the thread's last mbarrier wait was in vain
        self.events = 0
        self.giving_up = False  # pollers go on with "not yet": nothing else can run
        self.current: Instruction | None = None
        regs = list(program.initial)
        regs[WAITED] = np.array([False])
        for name, slot in program.specials.items():
            regs[slot] = special_value(name, self)
        self.enqueue(Fragment(0, lanes, regs, self))

    # ---- scheduling

    def enqueue(self, f: Fragment) -> None:
        """A fragment goes on at its program counter."""
        if f.pc in self.ready:
            self.ready[f.pc].append(f)
        else:
            self.ready[f.pc] = [f]
            heapq.heappush(self.heap, f.pc)

    def park(self, f: Fragment) -> None:
        """Keep a fragment at its instruction until other threads arrive there."""
        self.parked.setdefault(f.pc, []).append(f)

    def poll(self, f: Fragment) -> None:
        """Keep a fragment at its mbarrier wait until something changes."""
        self.polling.append(f)

    def poll_memory(self, f: Fragment) -> None:
        """Keep a fragment that goes round a loop which looks at global memory until all others have gone as far as they can."""
        self.yielding.append(f)

    def run(self) -> None:
        """Execute until every thread has left; raises `KernelFault`."""
        with np.errstate(all="ignore"):
            self._run()

    def _run(self) -> None:
        blocks = self.program.blocks
        spins, seen, polled = 0, -1, -1
        steps, rounds, before, stored = 0, 0, -1, -1
        while True:
            steps = steps + 1 if before == self.events else 0
            before = self.events
            if steps > _LOOP_LIMIT:
                self._endless(f"{_LOOP_LIMIT} basic blocks in a row in which no thread met a barrier or left")
            if not self.heap:
                if self.mbarriers.complete_pending():
                    self._requeue_polling()
                    continue
                if self.polling and polled != self.events:
                    polled = self.events
                    self._requeue_polling()
                    continue
                if self.yielding:
                    now = self.events + self.counters.stored
                    rounds, stored = rounds + 1 if stored == now else 0, now
                    waiting, self.yielding = self.yielding, []
                    for f in waiting:
                        self.enqueue(f)
                    if rounds > _ROUNDS:
                        self._endless(f"{_ROUNDS} looks at memory that nobody is left to write")
                    continue
                if self.polling:
                    spins = spins + 1 if seen == self.events else 0
                    seen = self.events
                    if spins < _SPIN_LIMIT:
                        self.giving_up = True
                        self._requeue_polling()
                        self._drain()
                        self.giving_up = False
                        continue
                if self.polling or self.parked or self.barriers.waiting or self.clusters.waiting:
                    self._deadlock()
                break
            self._next(blocks, fair=steps > _PATIENCE)
        self._finish()

    def _next(self, blocks: list[Block], *, fair: bool = False) -> None:
        """Run who is furthest behind, so that threads meet again; or, to be `fair`, who comes after the last one."""
        if fair:
            pc = min((pc for pc in self.heap if pc > self.turn), default=self.heap[0])
            self.heap.remove(pc)
            heapq.heapify(self.heap)
            self.turn = pc
        else:
            pc = heapq.heappop(self.heap)
        parts = self.ready.pop(pc) + self.parked.pop(pc, [])
        f = parts[0] if len(parts) == 1 else merge(parts, blocks[pc].live_in)
        self._run_block(f, blocks[pc])

    def _drain(self) -> None:
        """Let each poller pass its wait once."""
        for _ in range(len(self.heap)):
            self._next(self.program.blocks)

    def _requeue_polling(self) -> None:
        waiting, self.polling = self.polling, []
        for f in waiting:
            self.enqueue(f)

    def _run_block(self, f: Fragment, block: Block) -> None:
        index = block.index
        self.counters.run(index, f)
        step_index = 0
        try:
            if block.collective is not None:
                self.current = block.instructions[0]
                for out in block.collective(f):
                    out.pc = index + 1
                    self.enqueue(out)
                return
            for step in block.steps:
                step(f)
                step_index += 1
        except AccessFault as fault:
            ins = block.instructions[step_index]
            raise self.fault(fault.check, fault.message, f, fault.index, ins, fault.tensor, fault.lane) from None
        if block.ends:
            if block.trap:
                raise self.fault("trap", "the kernel stopped itself", f, 0, block.instructions[-1])
            kernel = self.program.kernel
            try:
                self.exit(f)
            except AccessFault as fault:
                raise self.fault(fault.check, fault.message, f, fault.index, (block.instructions or kernel.instructions)[-1]) from None
        elif block.condition is None:
            f.pc = block.target if block.target is not None else index + 1
            self.enqueue(f)
        elif block.table:
            self._branch_table(f, block, block.condition)
        else:
            assert block.target is not None  # every condition belongs to a branch
            self._branch(f, block, block.condition, block.target)

    def _branch(self, f: Fragment, block: Block, condition: int, target: int) -> None:
        blocks = self.program.blocks
        taken = f.regs[condition]
        if block.negated:
            taken = ~taken
        after = block.index + 1
        again = self.poll_memory if block.polls and target <= block.index else self.enqueue
        if taken.all():
            f.pc = target
            again(f)
        elif not taken.any():
            f.pc = after
            self.enqueue(f)
        else:
            again(f.take(np.flatnonzero(taken), blocks[target].live_in, target))
            self.enqueue(f.take(np.flatnonzero(~taken), blocks[after].live_in, after))

    def _branch_table(self, f: Fragment, block: Block, condition: int) -> None:
        which = f.full(condition)
        if (which >= len(block.table)).any():
            i = int(np.flatnonzero(which >= len(block.table))[0])
            raise self.fault("out of bounds", f"indexed branch {int(which[i])} of {len(block.table)}", f, i, block.instructions[-1])
        for value in np.unique(which):
            target = block.table[int(value)]
            self.enqueue(f.take(np.flatnonzero(which == value), self.program.blocks[target].live_in, target))

    def exit(self, f: Fragment) -> None:
        """Threads leave; those that waited only for them go on."""
        self.bulk.check_exit(f)
        waited = f.full(WAITED)
        self.waited_blocks[f.blocks[waited]] = True
        self.alive[f.lanes] = False
        self.mbarriers.check_exit(f)
        self.events += 1
        self.barriers.release_ready()
        self.clusters.release_ready()
        parked, self.parked = self.parked, {}
        for parts in parked.values():  # nobody waits for threads that have left
            for part in parts:
                self.enqueue(part)

    def warps(self, f: Fragment) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of a fragment: warp numbers, first position of each warp, and the bit mask of lanes present."""
        warp = f.lanes // 32
        first = np.flatnonzero(np.r_[True, warp[1:] != warp[:-1]])
        bits = np.uint64(1) << (f.lanes % 32).astype(np.uint64)
        return warp[first], first, np.add.reduceat(bits, first)

    def alive_bits(self, warps: np.ndarray) -> np.ndarray:
        """Bit masks of the lanes of these warps that have not left."""
        return self.lane_bits(warps, self.alive)

    def lane_bits(self, warps: np.ndarray, lanes: np.ndarray) -> np.ndarray:
        """Bit masks of the lanes of these warps marked in `lanes`."""
        rows = lanes.reshape(-1, 32)[warps]
        return (rows.astype(np.uint64) << np.arange(32, dtype=np.uint64)).sum(1, dtype=np.uint64)

    # ---- ends

    def _finish(self) -> None:
        self.mbarriers.finish()
        if self.races:
            self.races.finish()

    def _endless(self, message: str) -> None:
        pc = min(self.ready)
        f, instruction = self.ready[pc][0], self.program.blocks[pc].instructions[0]
        raise self.fault("endless loop", message, f, 0, instruction)

    def _deadlock(self) -> None:
        lines: list[str] = []
        first: tuple[Fragment, Instruction] | None = None
        kinds = []
        groups = [("diverged", f) for parts in self.parked.values() for f in parts]
        groups += [("mbarrier", f) for f in self.polling]
        groups += [("barrier", f) for f in self.barriers.fragments()] + [("cluster barrier", f) for f in self.clusters.waiting]
        for kind, f in groups:
            ins = self.program.blocks[f.pc].instructions[0]
            if first is None:
                first = (f, ins)
                kinds.append(kind)
            for block in np.unique(f.blocks)[:2]:
                count = int((f.blocks == block).sum())
                where = f"block {self.coordinates(int(block))}: {count} of {self.launch.threads} threads"
                lines.append(f"{where} wait at line {ins.line} ({ins.text})")
        assert first is not None  # somebody waits, or there would be no deadlock
        block = int(first[0].blocks[0])
        left = self.launch.threads - int(self.alive.reshape(self.block_count, -1)[block].sum())
        if left:
            lines.append(f"block {self.coordinates(block)}: {left} threads have left")
        check = {"diverged": "divergent barrier", "barrier": "barrier mismatch", "cluster barrier": "barrier mismatch"}.get(
            kinds[0], "deadlock"
        )
        raise self.fault(check, "threads wait for others that never come\n    " + "\n    ".join(lines[:12]), first[0], 0, first[1])

    # ---- reports

    def coordinates(self, block: int) -> tuple[int, int, int]:
        """(x, y, z) of a block."""
        return tuple(int(v) for v in self.block_coordinates[block])  # type: ignore[return-value]

    def thread(self, lane: int) -> tuple[int, int, int]:
        """(x, y, z) of a thread in its block."""
        t = lane % self.block_lanes
        x, y, _ = self.launch.block
        return (t % x, t // x % y, t // (x * y))

    def fault(
        self, check: str, message: str, f: Fragment, position: int, ins: Instruction, tensor: str = "", lane: int | None = None
    ) -> KernelFault:
        """A fault of the thread at `position` of a fragment, or of the one that is `lane`."""
        if lane is None:
            lane = int(f.lanes[min(position, f.n - 1)])
        return KernelFault(
            check,
            message,
            line=ins.line,
            text=ins.text,
            kernel=self.program.kernel.name,
            block=self.coordinates(lane // self.block_lanes),
            thread=self.thread(lane),
            tensor=tensor,
        )
