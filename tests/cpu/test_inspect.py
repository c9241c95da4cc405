"""The readers of machine code and PTX, on text whose contents are known."""

from __future__ import annotations

import pytest

from cute_kernels.compile.cubin import read_resources
from cute_kernels.compile.inspect import Instructions, Multiprocessor, block_threads, count_instructions, multiprocessor, pdl_faults
from cute_kernels.errors import CompileError

SASS = """
        /*0000*/                   LDC R1, c[0x0][0x37c] ;
        /*0010*/                   ACQBULK ;
        /*0020*/              @!P0 LDG.E.ENL2.256 R4, R8, desc[UR6][R2.64] ;
        /*0030*/                   LDG.E.128.CONSTANT R4, desc[UR6][R2.64] ;
        /*0040*/              @P1 STG.E.U8 desc[UR6][R2.64], R5 ;
        /*0050*/                   STG.E.64 desc[UR6][R2.64], R5 ;
        /*0060*/                   FFMA R5, R6, R11, 1 ;
        /*0070*/             @UP0  UBLKCP.S.G [UR4], [UR6], UR8 ;
        /*0080*/                   STL [R1], R2                                           (*"SpillRefill"*);
        /*0090*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*00a0*/                   EXIT ;
        /*00b0*/                   NOP;
"""


def test_instruction_classes_and_widths() -> None:
    counts = {"global load": 2, "global store": 2, "float": 1, "bulk copy": 1, "local memory": 1, "barrier": 1, "branch": 1, "pdl": 1}
    assert count_instructions(SASS) == Instructions({**counts, "integer and other": 1}, 32, 8, 32 + 16 + 1 + 8)
    assert count_instructions(SASS).per_byte == 11 / 57 and Instructions({"bulk copy": 1}).per_byte is None


def test_a_plain_access_is_four_bytes_wide() -> None:
    assert count_instructions("        /*0000*/  LDG.E R0, desc[UR6][R2.64] ;\n").widest_load == 4


def entry(*lines: str) -> str:
    return ".visible .entry k(\n\t.param .u32 k_param_0\n)\n.reqntid 128, 1, 1\n{\n" + "".join(f"\t{line}\n" for line in lines) + "}\n"


LOAD, WAIT = "ld.global.v8.b32 \t{%r1}, [%rd1];", "griddepcontrol.wait;"
PARAMETER = "ld.param.b32 \t%r9, [k_param_0];"
FIRST = ("setp.ne.b32 \t%p8, %r9, 0;", "@%p8 bra \t$L__BB0_7;", "// begin inline asm", WAIT, "// end inline asm", "$L__BB0_7:")
SCOPE = ("{\n.reg .pred p;\n@p st.shared.b32 [%r1], %r2;\n}",)  # of an inline assembly: its brace begins a line, as a kernel's last one
BLOCK, ELSEWHERE = "mov.u32 \t%r8, %ctaid.x;", ("setp.ne.b32 \t%p7, %r8, 0;", "or.pred \t%p6, %p7, %p9;")
LAST = ("setp.eq.b32 \t%p9, %r9, 0;", *ELSEWHERE, "@%p6 bra \t$L__BB0_8;", "// begin", WAIT, "// end", "$L__BB0_8:", "ret;")


@pytest.mark.parametrize(
    "lines",
    [
        (WAIT, LOAD),
        ("prefetch.global.L2 [%rd1];", "cp.async.bulk.prefetch.L2.global [%rd1], 64;", WAIT, LOAD),
        ("ld.param.b64 \t%rd1, [k_param_0];", "st.shared.b32 \t[%r1], %r2;", WAIT, LOAD, "@%p1 bra \t$L__BB0_2;", "$L__BB0_2:", "ret;"),
        ("@%p1 bra \t$L__BB0_1;", "mbarrier.init.shared.b64 [%r1], 1;", "$L__BB0_1:", WAIT, "st.global.b32 \t[%rd1], %r1;"),
        ("@%p1 bra \t$L__BB0_2;", WAIT, LOAD, "bra.uni \t$L__BB0_3;", "$L__BB0_2:", WAIT, LOAD, "$L__BB0_3:", "ret;"),
        ("bra.uni \t$L__BB0_2;", "$L__BB0_1:", LOAD, "ret;", "$L__BB0_2:", WAIT, "bra.uni \t$L__BB0_1;"),
        (PARAMETER, BLOCK, *FIRST, LOAD, *LAST),
        ("@%p1 bra \t$L__BB0_2;", *SCOPE, WAIT, LOAD, "$L__BB0_2:", WAIT, LOAD),
        (PARAMETER, *FIRST, "@%p1 bra \t$L__BB0_5;", LOAD, "$L__BB0_5:", PARAMETER, LAST[0], BLOCK, *LAST[1:]),
    ],
)
def test_sound_kernels(lines: tuple[str, ...]) -> None:
    assert pdl_faults(entry(*lines)) == []


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ((LOAD, WAIT), "ld.global.v8.b32"),
        (("st.global.b32 \t[%rd1], %r1;", WAIT), "st.global"),
        (("ld.b32 \t%r1, [%rd1];", WAIT), "ld.b32"),
        (("atom.global.add.u32 \t%r1, [%rd1], 1;", WAIT), "atom.global"),
        (("cp.async.bulk.shared::cluster.global.mbarrier [%r1], [%rd1], %r2, [%r3];", WAIT), "cp.async.bulk"),
        ((LOAD,), "no unconditional"),
        (("@%p1 griddepcontrol.wait;", LOAD), "no unconditional"),
        (("@%p1 ret;", WAIT, LOAD), "ret"),
        (("@%p1 bra \t$L__BB0_9;", WAIT, LOAD, "$L__BB0_9:", "ret;"), "leads around"),
        (("@%p1 bra \t$L__BB0_2;", WAIT, LOAD, "bra.uni \t$L__BB0_3;", "$L__BB0_2:", LOAD, WAIT, "$L__BB0_3:", "ret;"), "ld.global"),
        (("@%p1 bra \t$L__BB0_9;", WAIT, LOAD, "ret;"), "does not hold"),
        ((PARAMETER, BLOCK, *FIRST, LOAD, "ret;"), "no last one"),
        ((PARAMETER, BLOCK, *FIRST, LOAD, *FIRST, "ret;"), "no last one"),
        ((BLOCK, *FIRST, LOAD, *LAST), "no last one"),
        ((PARAMETER, *FIRST, LOAD, *LAST), "no last one"),
        ((PARAMETER, BLOCK, *FIRST, LOAD, PARAMETER.replace("k_param_0", "k_param_1"), *LAST), "no last one"),
        ((PARAMETER, BLOCK, *FIRST, LOAD, "@%p1 ret;", *LAST), "no last one"),
        ((PARAMETER, BLOCK, *FIRST, LOAD, *LAST[:-1], LOAD, "ret;"), "no last one"),
        ((PARAMETER, BLOCK, *FIRST, LOAD, *(line.replace("or.pred", "and.pred") for line in LAST)), "no last one"),
        ((PARAMETER, BLOCK, LOAD, *FIRST, *LAST), "ld.global.v8.b32"),
    ],
)
def test_faults_are_found(lines: tuple[str, ...], says: str) -> None:
    faults = pdl_faults(entry(*lines))
    assert len(faults) == 1 and says in faults[0]


def test_every_entry_is_looked_at() -> None:
    assert len(pdl_faults(entry(WAIT, LOAD) + entry(LOAD) + entry(LOAD, WAIT))) == 2
    assert pdl_faults(".version 9.4\n") == ["the PTX has no entry"]


@pytest.mark.parametrize("data", [b"", b"\x7fELF\x01" + bytes(64), b"not an object"])
def test_what_is_no_cubin_is_refused(data: bytes) -> None:
    with pytest.raises(CompileError, match="ELF"):
        read_resources(data)


@pytest.mark.parametrize(
    ("threads", "registers", "shared", "wanted"),
    [
        (128, 64, 0, 8 * 128 / 1024),  # 4 warps x 2048 registers: 8 blocks
        (128, 32, 0, 1.0),  # threads
        (128, 65, 0, 7 * 128 / 1024),  # 65 registers a thread are 72: 4 x 2304
        (32, 16, 0, 16 * 32 / 1024),  # blocks
        (128, 16, 49 * 1024, 2 * 128 / 1024),  # 50 KB a block, of 100
        (1024, 16, 0, 1.0),
    ],
)
def test_occupancy(threads: int, registers: int, shared: int, wanted: float) -> None:
    assert Multiprocessor(threads=1024, blocks=16, shared=100 * 1024).occupancy(threads, registers, shared) == wanted


@pytest.mark.parametrize(
    ("threads", "registers", "shared", "blocks"),
    [
        (320, 64, 76704, 3),
        (320, 64, 76576 + 256, 2),
        (288, 68, 74464 + 1024, 3),
        (160, 72, 45568, 5),
        (160, 72, 45666, 4),  # five of them fit, were shared memory not given in units of 128 bytes
        (192, 148, 100064, 2),
    ],
)
def test_blocks_that_the_driver_of_an_h200_counts(threads: int, registers: int, shared: int, blocks: int) -> None:
    """By cuOccupancyMaxActiveBlocksPerMultiprocessor (2026-12-01), for kernels of `compress_store`."""
    found = multiprocessor("sm_90a")
    assert found.occupancy(threads, registers, shared) == blocks * threads / found.threads


def test_threads_of_a_block() -> None:
    assert block_threads(".reqntid 32, 4, 1") == 128
    assert block_threads(".maxntid 256") == 256
    with pytest.raises(CompileError, match="how many threads"):
        block_threads(".entry k")


@pytest.mark.parametrize(
    ("arch", "threads"), [("sm_90a", 2048), ("sm_100f", 2048), ("sm_103a", 2048), ("sm_120f", 1536), ("sm_121a", 1536)]
)
def test_every_architecture_has_its_multiprocessor(arch: str, threads: int) -> None:
    assert multiprocessor(arch).threads == threads
