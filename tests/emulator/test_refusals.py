"""What the emulator does not execute is refused with its line, and a fault names the thread that made it."""

from __future__ import annotations

import numpy as np
import pytest

from ptx_emulator import KernelFault, LaunchError, PtxSyntaxError, UnsupportedInstruction
from ptx_emulator.__main__ import main
from tests.emulator.small_kernels import entry, run_vector

START = "ld.param.b64 %l1, [y];\nmov.u32 %r1, %tid.x;\nmov.u32 %r2, stage;\n"
FIRST = 14  # line of what follows START


def kernel(body: str, shared: int = 256) -> str:
    return entry(".param .u64 y", START + body, shared=shared)


@pytest.mark.parametrize(
    "instruction",
    [
        "bra.foo END;\nEND:",
        "bra;",
        "brx.idx %r1;",
        "ret.foo;",
        "exit %r1;",
        "nanosleep.foo 3;",
        "setmaxnreg.more.sync.aligned.u32 40;",
        "createpolicy.foo.b64 %l2;",
        "discard.global.L2 [%l1], 128;",
        "prefetch.global [%l1];",
        "fence.proxy;",
        "fence.acq_rel;",
        "fence.mbarrier_init.acquire.cluster;",
        "mbarrier.init.shared.b32 [%r2], 1;",
        "mbarrier.init.shared.b64 [%r2], 1, 1;",
        "mbarrier.arrive.shared.b64;",
        "mbarrier.try_wait.parity.shared.b64 %p1;",
        "barrier.cluster.wait.relaxed;",
        "barrier.cluster.arrive.acquire;",
        "st.shared.v8.b32 [%r2], {%r1, %r1, %r1, %r1, %r1, %r1, %r1, %r1};",
        "cp.async.cg.shared.global [%r2], [%l1], 4;",
        "cp.async.ca.shared.global [%r2], [%l1], %r1;",
        "cp.async.wait_group %r1;",
        "cp.async.bulk.prefetch.global [%l1], 16;",
        "add.f32 %r3, %r1, -0f3F800000;",
        "frobnicate.b32 %r3, %r1;",
    ],
)
def test_an_unknown_form_is_refused_with_its_line(instruction: str) -> None:
    with pytest.raises(UnsupportedInstruction, match=f"PTX line {FIRST}: "):
        run_vector(kernel(instruction))


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        (".version 9.0", ".version 99", 2),
        (".target sm_100a", ".target compute", 3),
        (".address_size 64", ".address_size 32", 4),
        (".visible .entry", ".const .f32 c[2] = {0f3F800000, 0f3F800000};\n.visible .entry", 5),
        (".visible .entry", ".global .u64 p = q;\n.visible .entry", 5),
        (".visible .entry", ".global .texref t;\n.visible .entry", 5),
        ("u64 y)", "u64 y)\n.frobnicate 3", 7),
        ("    ret;", "A:\nA:\n    ret;", 15),
    ],
)
def test_an_unknown_declaration_is_refused_with_its_line(old: str, new: str, line: int) -> None:
    with pytest.raises(PtxSyntaxError, match=f"PTX line {line}: "):
        run_vector(kernel("").replace(old, new, 1))


def test_literals() -> None:
    body = """
    mov.u32 %r3, 010;
    lop3.b32 %r4, %r3, 0, 0, 0xF0U;
    st.global.v2.b32 [%l1], {%r3, %r4};
    """
    assert run_vector(kernel(body), threads=1, count=2).tolist() == [8, 8]


def test_an_empty_kernel_runs() -> None:
    text = entry(".param .u64 y", "")
    assert "    ret;\n" in text
    assert (run_vector(text.replace("    ret;\n", "")) == 0).all()


PART = "setp.eq.u32 %p1, %r1, 50;\nmov.u32 %r9, %ctaid.x;\nsetp.eq.and.u32 %p1, %r9, 1, %p1;\n"


@pytest.mark.parametrize(
    ("body", "check", "thread"),
    [
        pytest.param(PART + "@%p1 st.shared.b32 [%r2+4096], %r1;", "out of bounds", 50, id="predicate"),
        pytest.param(PART + "@%p1 red.shared.add.u32 [%r2+4096], 1;", "out of bounds", 50, id="atomic"),
        pytest.param(
            PART + "@%p1 cp.async.bulk.prefetch.L2.global [%l1+4], 256;", "misaligned access", 50, id="bulk copy behind a predicate"
        ),
        pytest.param(
            PART + "mov.u64 %l9, 0;\ncvta.shared.u64 %l2, %l9;\ncvt.u64.u32 %l3, %r2;\nadd.s64 %l2, %l2, %l3;\n"
            "add.s64 %l4, %l2, 4096;\nselp.b64 %l2, %l4, %l2, %p1;\nsetp.lt.u32 %p2, %r1, 40;\nmul.wide.u32 %l5, %r1, 4;\n"
            "add.s64 %l5, %l1, %l5;\nselp.b64 %l2, %l5, %l2, %p2;\nst.b32 [%l2], 5;",
            "out of bounds",
            50,
            id="generic addresses of two spaces",
        ),
        pytest.param(
            PART + "shl.b32 %r3, %r1, 2;\nadd.s32 %r4, %r2, %r3;\nmul.wide.u32 %l2, %r1, 4;\nadd.s64 %l2, %l1, %l2;\n"
            "add.s64 %l3, %l2, 99999;\nselp.b64 %l2, %l3, %l2, %p1;\nselp.u32 %r5, 2, 4, %p1;\n"
            "cp.async.ca.shared.global [%r4], [%l2], 4, %r5;\ncp.async.wait_all;",
            "out of bounds",
            50,
            id="part of a copy",
        ),
        pytest.param(
            "shr.u32 %r3, %r1, 5;\nmov.u32 %r9, %ctaid.x;\nand.b32 %r4, %r3, %r9;\nsetp.eq.u32 %p1, %r4, 1;\n"
            "selp.u32 %r4, 17, %r3, %p1;\nbar.sync %r4, 32;",
            "barrier mismatch",
            32,
            id="a warp's own barrier",
        ),
    ],
)
def test_a_fault_names_its_own_thread(body: str, check: str, thread: int) -> None:
    with pytest.raises(KernelFault) as caught:
        run_vector(kernel(body), grid=2)
    assert (caught.value.check, caught.value.block, caught.value.thread) == (check, (1, 0, 0), (thread, 0, 0)), caught.value


@pytest.mark.parametrize(
    ("body", "part"),
    [
        ("mapa.shared::cluster.u32 %r3, %r2, 0;\nst.shared.b32 [%r3], %r1;", "no address of .shared::cta"),
        ("mapa.shared::cluster.u32 %r3, %r2, 0;\nld.shared::cta.b32 %r4, [%r3];", "no address of .shared::cta"),
        ("add.s32 %r3, %r2, 16777216;\nst.shared.b32 [%r3], %r1;", "no address of .shared::cta"),
        ("cp.async.ca.shared.global [%r2], [%l1], 4, 8;", "source size 8 of a copy of 4 bytes"),
        ("cp.async.bulk.prefetch.L2.global [%l1], 8;", "multiples of 16"),
        ("cp.async.bulk.prefetch.L2.global [%l1+1048576], 16;", "past the end of 'y'"),
        ("prefetch.global.L2 [%l1+1048576];", "past the end of 'y'"),
        ("bar.arrive 1, 0;", "thread count 0"),
    ],
)
def test_misuse_is_a_fault(body: str, part: str) -> None:
    with pytest.raises(KernelFault, match=part.replace(".", r"\.")):
        run_vector(kernel(body))


def test_blocks_are_at_most_64_deep() -> None:
    with pytest.raises(LaunchError, match="64"):
        run_vector(kernel(""), threads=(1, 1, 128))  # type: ignore[arg-type]


def test_a_kernel_may_name_its_own_cluster() -> None:
    text = entry(".param .u64 y", "ld.param.b64 %l1, [y];\nmov.u32 %r1, %cluster_nctarank;\nst.global.b32 [%l1], %r1;")
    assert run_vector(text.replace("u64 y)", "u64 y)\n.reqnctapercluster 2"), threads=32, grid=4, count=1).tolist() == [2]


@pytest.mark.parametrize("module", ["no.such.module", "json"])
def test_the_command_names_a_module_without_cases(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["k", "c", "--cases", module])
    assert f"argument --cases: {module!r}" in capsys.readouterr().err


def test_conversions_of_wide_values() -> None:
    body = """
    .reg .b16 %h;
    mov.b64 %l2, 0x7ff8000000000000;
    cvt.rzi.s32.f64 %r3, %l2;
    cvt.rzi.u32.f64 %r4, %l2;
    mov.b64 %l2, 0x8080000000000001;
    cvt.rn.bf16.u64 %h, %l2;
    cvt.u32.u16 %r5, %h;
    cvt.rn.bf16.s64 %h, %l2;
    cvt.u32.u16 %r6, %h;
    st.global.v4.b32 [%l1], {%r3, %r4, %r5, %r6};
    """
    # NaN of .f64: the top bit alone. 2^63 + 2^55 + 1 lies above the tie between 0x5f00 and 0x5f01; as .s64 it is -(2^63 - 2^55 - 1).
    found = run_vector(kernel(body), threads=1, count=4).view(np.uint32).tolist()
    assert found == [0x80000000, 0x80000000, 0x5F01, 0xDEFF]
