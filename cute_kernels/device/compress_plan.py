"""How the compressor's work is cut: threads and stages of a block, and which rows of a step each block takes."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import Int32

from cute_kernels.compile.spec import CompressStoreSpec
from cute_kernels.device import WARP
from cute_kernels.device.window_ring import WindowRing
from cute_kernels.kv_format import HEAD_DIM
from cute_kernels.save_policy import overlap

TICKET = 4  # consecutive rows of a ticket
# Rows of a block, and how many of them are dealt late (Plan.late), by steps of 3500 to 32768 rows on an H200 (2026-11-30).
LATE = ((12, 4), (24, 8), (64, 12))
MIDDLE = (4, 24)  # rows of a block, from and below, that make a step a middle one


@dataclass(frozen=True)
class Plan:
    """Compile-time shape of the work. All numbers but `slots`, `deal` and those of `late` are powers of two.

    ratio          4 or 128
    vector         fp32 numbers of a thread's access to a state row that is saved: 4 or 8
    columns        columns that a thread pools
    batch          rows of a stage, which a thread pools together
    looks          groups of 32 rows that are looked at together
    slots          stages in flight
    saver          a warp saves rows
    unit           consecutive rows that are dealt together; `widest` says when more are
    middle         the same for middle steps, where one window more is much for a block; but rows that lie together make padding uneven
    widest         0, or the most consecutive rows that are dealt together in dense steps, those of a window's rows a request or more: as
                   few as give each team one unit, so that all rows of its windows lie near
    deal           teams over which neighbouring units are dealt, and the most there are, where the splitter does not say
    resident       blocks that should fit on an SM at once: bounds the registers, and so what is under way in them
    late           (rows of a block, how many of them): from so many rows a block on, so many are dealt late, by tickets; (): none are
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
    widest: int
    deal: int
    resident: int
    late: tuple[tuple[int, int], ...]
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
    def halves(self) -> bool:
        """Whether the saving warp copies a row in halves, as registers for three blocks allow."""
        return self.resident > 2

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
            turns=self.slots if self.ratio == 4 else 2,
            readers=self.pooling,
            whole=self.ratio != 4,
            scores=self.saver,
            goals=self.on_the_way,
            streaming=self.streaming,
        )

    def half(self, row):
        """First column that a window row contributes. Ratio 4: the older group its first 512 columns, the closing group its second."""
        return row // 4 * HEAD_DIM if self.ratio == 4 else 0

    def late_rows(self, row_count: Int32):
        """Last rows of a step that are dealt late (host): a block takes a ticket for the next `TICKET` of them whenever it has none left.

        SMs do not get equal shares of the memory's bandwidth: dealt evenly, the last rows of some blocks would take long.
        """
        shares = (0, *(share for _, share in self.late))
        steps = ((rows, after - before) for (rows, _), before, after in zip(self.late, shares, shares[1:], strict=False))
        return sum((cutlass.min(row_count // (rows * self.deal), 1) * (more * self.deal) for rows, more in steps), 0)

    @property
    def fixed_bits(self) -> int | None:
        """log2 of the rows of a unit, where all steps have the same."""
        return self.unit.bit_length() - 1 if self.middle == self.unit and not self.widest else None

    def unit_bits(self, row_count: Int32, deal: Int32, requests: Int32):
        """log2 of the rows of a unit, for a step of `row_count` rows and a block table of `requests` rows (host)."""
        if self.fixed_bits is not None:
            return self.fixed_bits
        bits = self.unit.bit_length() - 1
        if self.widest:
            dense = cutlass.min(row_count // cutlass.max(requests * self.ratio, 1), 1)
            return bits + dense * sum(cutlass.min((row_count - 1) // (deal << b), 1) for b in range(bits, self.widest.bit_length() - 1))
        first, last = (cutlass.min(row_count // (rows * deal), 1) for rows in MIDDLE)
        return bits + (first - last) * (self.middle.bit_length() - 1 - bits)

    def rows_of(self, evenly: Int32, deal: Int32, bits) -> Int32:
        """Rows that a team takes of those that are dealt evenly (host), a multiple of a unit's: the same for all."""
        stretch = deal << bits
        return cutlass.max((evenly + (stretch - 1)) // stretch, 1) << bits

    def row_of(self, team: Int32, i: Int32, deal: Int32, bits, unit_of) -> Int32:
        """The row that a team takes as its i-th. Of every `deal` units it takes one, each time the next one, so that its units fall
        on different places modulo `ratio`, and the leading rows of a long, mostly padded step on different teams. unit_of: a splitter's."""
        turn = i >> bits
        return ((turn * deal + unit_of(team + turn, deal, bits)) << bits) + (i & ((1 << bits) - 1))

    def saved_row(self, team, rank, i, teams, shift):
        """The row that the rank-th of a team's 2^shift blocks examines as its i-th, to save it: of n blocks, every n-th of the step."""
        return team + ((i << shift) + rank) * teams

    def teams(self, evenly: Int32, deal: Int32) -> Int32:
        """Teams: `deal`, or as many as there are units. Where units are wide some may take no row: they save."""
        return cutlass.min((evenly + (self.unit - 1)) // self.unit, deal)


def plan_of(spec: CompressStoreSpec, resident: int) -> Plan:
    """Tuning of a block: at most 99 KB of shared memory. resident: blocks of ratio 128 that should fit on an SM, 2 or 3.

    Ratio 4: a window a stage, three windows of 32 KB in flight. Ratio 128: 16 rows in flight, pooled by twice as many threads, two warps
    for each of an SM's schedulers. Where every row is saved, a row is read once and saved from the ring.

    Three blocks of ratio 128 fit on an SM of 228 KB where eight share a window, by stages of four rows, which need fewer registers, and
    by looks at 64 rows where more is noted of each. So a step's blocks find room beside those of the step before. Else stages have eight
    rows, or four where those are saved on the way.
    """
    vector, every_row, room = spec.vector_bytes // 4, spec.save == "every_row", resident > 2
    batch = 4 if every_row or room else 8
    if spec.ratio == 4:
        return Plan(
            ratio=4, vector=vector, columns=4, batch=8, looks=1, slots=3, saver=spec.scores,
            unit=1, middle=4, widest=0, deal=264, resident=2, late=LATE[every_row:], on_the_way=every_row,
        )  # fmt: skip
    return Plan(
        ratio=128, vector=vector, columns=2, batch=batch, looks=2 if every_row and room else 4, slots=16 // batch, saver=spec.scores,
        unit=4, middle=4, widest=128, deal=128, resident=resident, late=(), on_the_way=every_row,
    )  # fmt: skip


class Dealt(NamedTuple):
    """Which rows a team looks at for windows that close.

    team    its number
    rows    how many of those that are dealt evenly
    evenly  how many of the step are dealt evenly
    deal    teams over which they are dealt
    bits    log2 of the rows of a unit
    teams   how many there are
    """

    team: Int32
    rows: Int32
    evenly: Int32
    deal: Any
    bits: Any
    teams: Any
