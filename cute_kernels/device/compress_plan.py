"""How the compressor's work is cut: threads and stages of a block, and which rows of a step each block takes."""

import operator
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import Int32

from cute_kernels.compile.spec import CompressStoreSpec
from cute_kernels.device import WARP
from cute_kernels.device.window_ring import WindowRing
from cute_kernels.kv_format import HEAD_DIM
from cute_kernels.save_policy import overlap

MIDDLE = (4, 24)  # rows of a block, from and below, that make a step a middle one


@dataclass(frozen=True)
class Plan:
    """Compile-time shape of the work. All numbers but `slots`, `deal` and `long` are powers of two, or 0.

    ratio          4 or 128
    vector         fp32 numbers of a thread's access to a state row that is saved: 4 or 8
    columns        columns that a thread pools
    batch          rows of a stage, which a thread pools together
    looks          groups of 32 rows that are looked at together
    slots          stages in flight
    saver          a warp saves rows
    unit           consecutive rows that are dealt together
    middle         the same for middle steps, where one window more is much for a block; but rows that lie together make padding uneven
    deal           teams over which neighbouring units are dealt, and the most there are, where the splitter does not say
    resident       blocks that should fit on an SM at once: bounds the registers
    short          rows of a short block; 0: there are none
    long           rows of a block from which on a step is a long one, which has short blocks
    on_the_way     rows are saved by the threads that pool them; the saving warp takes those that the step's windows do not pool whole
    """

    ratio: int
    vector: int
    columns: int
    batch: int
    looks: int
    slots: int
    saver: bool
    unit: int
    middle: int
    deal: int
    resident: int
    short: int
    long: int
    on_the_way: bool

    @property
    def width(self) -> int:
        """Columns of the values, or of the scores, of a state row."""
        return 2 * HEAD_DIM if self.ratio == 4 else HEAD_DIM

    @property
    def window(self) -> int:
        """Rows of a window."""
        return self.ratio + overlap(self.ratio)

    @property
    def pooling(self) -> int:
        """Threads that pool."""
        return HEAD_DIM // self.columns

    @property
    def streaming(self) -> bool:
        """Whether rows leave the L2 first. Where ratio 4 saves every row, which writes as much as it reads, that made steps longer."""
        return self.ratio != 4 or not self.on_the_way

    @property
    def threads(self) -> int:
        """Threads of a block: those that pool, the warp that has rows copied, those that save."""
        return self.pooling + WARP * (1 + self.saver)

    @property
    def ring(self) -> WindowRing:
        """The ring of stages between them."""
        return WindowRing(
            rows=self.batch,
            slots=self.slots,
            readers=self.pooling,
            whole=self.ratio != 4,
            scores=self.saver,
            goals=self.on_the_way,
            streaming=self.streaming,
        )

    def half(self, row):
        """First column that a window row contributes. Ratio 4: the older group its first 512 columns, the closing group its second."""
        return row // 4 * HEAD_DIM if self.ratio == 4 else 0

    def evenly(self, row_count: Int32) -> Int32:
        """Leading rows of a step that are dealt evenly (host). Of a long step a 16th is left to short blocks, with consecutive rows, which
        start where others have ended: SMs do not get equal shares of the memory's bandwidth."""
        if not self.short:
            return row_count
        return row_count - cutlass.min(row_count // (self.long * self.deal), 1) * (row_count // (16 * self.short) * self.short)

    @property
    def fixed_bits(self) -> int | None:
        """log2 of the rows of a unit, where all steps have the same."""
        return self.unit.bit_length() - 1 if self.middle == self.unit else None

    def unit_bits(self, row_count: Int32, deal: Int32):
        """log2 of the rows of a unit, for a step of `row_count` rows (host)."""
        if self.fixed_bits is not None:
            return self.fixed_bits
        bits = self.unit.bit_length() - 1
        first, last = (cutlass.min(row_count // (rows * deal), 1) for rows in MIDDLE)
        return bits + (first - last) * (self.middle.bit_length() - 1 - bits)

    def rows_of(self, row_count: Int32, deal: Int32) -> Int32:
        """Rows that a team takes (host), a multiple of a unit's: the same for all; `deal` teams take those dealt evenly."""
        bits = self.unit_bits(row_count, deal)
        stretch = deal << bits
        return cutlass.max((self.evenly(row_count) + (stretch - 1)) // stretch, 1) << bits

    def row_of(self, team: Int32, i: Int32, deal: Int32, bits, remainder=operator.mod) -> Int32:
        """The row that a team takes as its i-th. Of every `deal` units it takes one, each time the next one, so that its units fall
        on different places modulo `ratio`, and the leading rows of a long, mostly padded step on different teams."""
        turn = i >> bits
        return ((turn * deal + remainder(team + turn, deal)) << bits) + (i & ((1 << bits) - 1))

    def saved_row(self, team, rank, i, teams, shift):
        """The row that the rank-th of a team's 2^shift blocks examines as its i-th, to save it: of n blocks, every n-th of the step."""
        return team + ((i << shift) + rank) * teams

    def even_teams(self, evenly: Int32, deal: Int32, bits) -> Int32:
        """Teams that take equally many rows: `deal`, or as many as there are units."""
        return cutlass.min((evenly + ((1 << bits) - 1)) >> bits, deal)

    def teams(self, row_count: Int32, deal: Int32) -> Int32:
        """Teams for a step of `row_count` rows (host)."""
        evenly = self.evenly(row_count)
        teams = self.even_teams(evenly, deal, self.unit_bits(row_count, deal))
        return teams + (row_count - evenly) // self.short if self.short else teams


def plan_of(spec: CompressStoreSpec) -> Plan:
    """Tuning of a block, the same for both families: at most 99 KB of shared memory.

    Ratio 4: a window a stage, three windows of 32 KB in flight. Ratio 128: 16 rows in flight, eight a stage, pooled by twice as many
    threads, two warps for each of an SM's schedulers. Where every row is saved, a row is read once and saved from the ring; at ratio 128
    stages have four rows then, which need fewer registers. Short blocks gain from 24 rows a block on, where every row is saved from 48 on:
    8192 rows took 19.8 µs without and 19.2 with them, and where every row is saved 37.9 and 38.6 (H200, 2026-11-30).
    """
    vector, every_row = spec.vector_bytes // 4, spec.save == "every_row"
    if spec.ratio == 4:
        return Plan(
            ratio=4, vector=vector, columns=4, batch=8, looks=1, slots=3, saver=spec.scores,
            unit=1, middle=4, deal=264, resident=2, short=8, long=48 if every_row else 24, on_the_way=every_row,
        )  # fmt: skip
    return Plan(
        ratio=128, vector=vector, columns=2, batch=4 if every_row else 8, looks=4, slots=4 if every_row else 2, saver=spec.scores,
        unit=4, middle=4, deal=128, resident=2, short=0, long=0, on_the_way=every_row,
    )  # fmt: skip


class Dealt(NamedTuple):
    """Which rows a team looks at for windows that close.

    team   its number; a short block has a higher one than those that take equally many rows
    rows   how many
    first  the first of a short block's consecutive rows; -1: rows are dealt evenly
    end    rows that are dealt evenly, or of the step
    deal   teams over which they are dealt
    bits   log2 of the rows of a unit
    teams  how many take equally many rows; their blocks save, too
    """

    team: Int32
    rows: Int32
    first: Any
    end: Any
    deal: Any
    bits: Any
    teams: Any
