"""Warp instructions, special registers, memory instructions and control flow of the emulator, against hand-derived results."""

from __future__ import annotations

import numpy as np
import pytest

from ptx_emulator import Memory, UnsupportedInstruction, load_program, run_ptx
from tests.emulator.one_opcode import f32
from tests.emulator.small_kernels import entry, run_vector

LANE = np.arange(32)


def lanes(body: str, *, threads: int = 32, shared: int = 0, **options: object) -> np.ndarray:
    """%r2 of each thread after `body`, which finds %tid.x in %r1."""
    store = "mul.wide.u32 %l9, %r1, 4;\n    add.s64 %l9, %l8, %l9;\n    st.global.b32 [%l9], %r2;\n"
    text = entry(".param .u64 y", f"    ld.param.b64 %l8, [y];\n    mov.u32 %r1, %tid.x;\n    {body}\n    {store}", shared=shared)
    return run_vector(text, threads=threads, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("instruction", "source"),
    [
        ("shfl.sync.bfly.b32 %r2, %r1, 5, 31, -1;", LANE ^ 5),
        ("shfl.sync.idx.b32 %r2, %r1, 37, 31, -1;", np.full(32, 5)),  # the lane is taken modulo 32
        ("shfl.sync.up.b32 %r2, %r1, 3, 0, -1;", np.where(LANE >= 3, LANE - 3, LANE)),
        ("shfl.sync.down.b32 %r2, %r1, 3, 31, -1;", np.where(LANE <= 28, LANE + 3, LANE)),
        ("shfl.sync.bfly.b32 %r2, %r1, 8, 0x181f, -1;", np.where((LANE ^ 8) <= (LANE | 7), LANE ^ 8, LANE)),  # segments of 8
        ("shfl.sync.bfly.b32 %r2, %r1, 8, 0x0f, -1;", np.where((LANE ^ 8) <= 15, LANE ^ 8, LANE)),
        ("shfl.sync.idx.b32 %r2, %r1, 2, 0x1807, -1;", LANE // 8 * 8 + 2),
        ("shfl.sync.up.b32 %r2, %r1, 1, 0x1800, -1;", np.where(LANE % 8 >= 1, LANE - 1, LANE)),
        ("shfl.sync.down.b32 %r2, %r1, 1, 0x1807, -1;", np.where(LANE % 8 < 7, LANE + 1, LANE)),
    ],
)
def test_shuffles(instruction: str, source: np.ndarray) -> None:
    assert (lanes(instruction) == source).all()
    assert (lanes(instruction, threads=64) == np.concatenate([source, source + 32])).all()


def test_shuffle_predicate_tells_whether_the_source_is_in_range() -> None:
    got = lanes("shfl.sync.down.b32 %r3|%p1, %r1, 4, 31, -1;\n    selp.u32 %r2, 1, 0, %p1;")
    assert (got == (LANE + 4 <= 31)).all()


def test_votes() -> None:
    odd = "and.b32 %r3, %r1, 1;\n    setp.ne.u32 %p1, %r3, 0;\n    "
    assert (lanes(odd + "vote.sync.ballot.b32 %r2, %p1, -1;").view(np.uint32) == 0xAAAAAAAA).all()
    assert (lanes(odd + "vote.sync.ballot.b32 %r2, !%p1, -1;").view(np.uint32) == 0x55555555).all()
    for mode, want in (("any", 1), ("all", 0), ("uni", 0)):
        assert (lanes(odd + f"vote.sync.{mode}.pred %p2, %p1, -1;\n    selp.u32 %r2, 1, 0, %p2;") == want).all()
    only_odd = (
        odd + "mov.u32 %r2, 7;\n    @!%p1 bra EVEN;\n    vote.sync.all.pred %p2, %p1, 0xaaaaaaaa;\n    selp.u32 %r2, 1, 0, %p2;\nEVEN:"
    )
    assert (lanes(only_odd) == np.where(LANE % 2, 1, 7)).all()


def test_votes_of_the_two_sides_of_a_branch() -> None:
    body = """
    setp.lt.u32 %p1, %r1, 8;
    @%p1 bra LOW;
    activemask.b32 %r3;
    vote.sync.ballot.b32 %r2, 1, 0xffffff00;
    bra JOIN;
LOW:
    vote.sync.ballot.b32 %r2, 1, 0xff;
JOIN:
    """
    assert (lanes(body).view(np.uint32) == np.where(LANE < 8, 0xFF, 0xFFFFFF00)).all()


def test_match_redux_and_elect() -> None:
    quarter = "shr.u32 %r3, %r1, 3;\n    "
    masks = [0xFF << (8 * (i // 8)) for i in range(32)]
    assert (lanes(quarter + "match.any.sync.b32 %r2, %r3, -1;").view(np.uint32) == masks).all()
    assert (lanes(quarter + "match.all.sync.b32 %r2|%p1, %r3, -1;") == 0).all()
    assert (lanes("match.all.sync.b32 %r4|%p1, 5, -1;\n    selp.u32 %r2, 1, 0, %p1;") == 1).all()
    for operation, want in (("add.u32", 496), ("max.u32", 31), ("min.s32", 0), ("or.b32", 31), ("xor.b32", 0), ("and.b32", 0)):
        assert (lanes(f"redux.sync.{operation} %r2, %r1, -1;") == want).all()
    floats = "cvt.rn.f32.u32 %r3, %r1;\n    neg.f32 %r3, %r3;\n    "
    assert (lanes(floats + "redux.sync.max.f32 %r2, %r3, -1;").view(np.uint32) == 0x80000000).all()
    assert (lanes(floats + "redux.sync.min.f32 %r2, %r3, -1;").view(np.uint32) == f32(-31)).all()
    assert (lanes(floats + "redux.sync.max.abs.f32 %r2, %r3, -1;").view(np.uint32) == f32(31)).all()
    assert (lanes("elect.sync %r3|%p1, -1;\n    selp.u32 %r2, 1, 0, %p1;") == (LANE == 0)).all()
    late = "mov.u32 %r2, 5;\n    setp.lt.u32 %p2, %r1, 12;\n    @%p2 bra OUT;\n    "
    late += "elect.sync %r3|%p1, 0xfffff000;\n    selp.u32 %r2, %r3, 0, %p1;\nOUT:"
    assert (lanes(late) == np.where(LANE < 12, 5, np.where(LANE == 12, 12, 0))).all()


def test_special_registers() -> None:
    wanted = {
        "%laneid": np.tile(LANE, 2),
        "%warpid": np.repeat([0, 1], 32),
        "%ntid.x": np.full(64, 64),
        "%ntid.y": np.full(64, 1),
        "%nctaid.x": np.full(64, 1),
        "%lanemask_lt": np.tile([(1 << i) - 1 for i in LANE], 2),
        "%lanemask_ge": np.tile([(0xFFFFFFFF << i) & 0xFFFFFFFF for i in LANE], 2),
        "%cluster_nctarank": np.full(64, 1),
    }
    for name, want in wanted.items():
        assert (lanes(f"mov.u32 %r2, {name};", threads=64).view(np.uint32) == want).all(), name
    with pytest.raises(UnsupportedInstruction, match="envreg"):
        lanes("mov.b32 %r2, %envreg3;")


def test_block_and_cluster_coordinates() -> None:
    body = """
    ld.param.b64 %l1, [y];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, %tid.y;
    mov.u32 %r3, %ctaid.x;
    mov.u32 %r4, %ctaid.y;
    mov.u32 %r5, %cluster_ctarank;
    mov.u32 %r6, %clusterid.y;
    mad.lo.s32 %r7, %r4, 4, %r3;
    mad.lo.s32 %r7, %r7, 2, %r2;
    mad.lo.s32 %r7, %r7, 32, %r1;
    mad.lo.s32 %r8, %r6, 10, %r5;
    mul.wide.u32 %l2, %r7, 4;
    add.s64 %l2, %l1, %l2;
    st.global.b32 [%l2], %r8;
    """
    memory, y = Memory(), np.zeros((4, 4, 2, 32), np.int32)
    run_ptx(entry(".param .u64 y", body), (4, 4), (32, 2), [memory.add_array("y", y)], memory, cluster=(2, 2))
    by, bx = np.meshgrid(np.arange(4), np.arange(4), indexing="ij")
    assert (y == (by // 2 * 10 + by % 2 * 2 + bx % 2)[..., None, None]).all()


def test_loops_with_different_trip_counts_meet_again() -> None:
    body = """
    mov.u32 %r2, 0;
    mov.u32 %r3, 0;
LOOP:
    add.s32 %r2, %r2, %r3;
    add.s32 %r3, %r3, 1;
    setp.le.u32 %p1, %r3, %r1;
    @%p1 bra LOOP;
    vote.sync.ballot.b32 %r4, 1, -1;
    popc.b32 %r4, %r4;
    mad.lo.s32 %r2, %r4, 1000, %r2;
    """
    assert (lanes(body) == 32000 + LANE * (LANE + 1) // 2).all()


def test_indexed_branch() -> None:
    body = """
    and.b32 %r3, %r1, 3;
    mov.u32 %r2, 0;
TABLE: .branchtargets A, B, C, D;
    brx.idx %r3, TABLE;
A:
    add.s32 %r2, %r2, 1;
B:
    add.s32 %r2, %r2, 10;
    bra E;
C:
    add.s32 %r2, %r2, 100;
    bra E;
D:
    add.s32 %r2, %r2, 1000;
E:
    """
    assert (lanes(body) == np.tile([11, 10, 100, 1000], 8)).all()


def test_local_memory_and_generic_addresses() -> None:
    body = """
    .local .align 8 .b8 depot[16];
    .reg .b64 %SP;
    mov.b64 %SP, depot;
    cvta.local.u64 %l1, %SP;
    st.u32 [%l1+4], %r1;
    st.local.u32 [%SP+8], 5;
    ld.local.u32 %r3, [%SP+4];
    ld.u32 %r4, [%l1+8];
    mov.u32 %r5, stage;
    cvt.u64.u32 %l2, %r5;
    cvta.shared.u64 %l2, %l2;
    mul.wide.u32 %l3, %r1, 4;
    add.s64 %l2, %l2, %l3;
    st.u32 [%l2], %r3;
    ld.u32 %r6, [%l2];
    isspacep.shared %p1, %l2;
    selp.u32 %r7, 100, 0, %p1;
    add.s32 %r2, %r6, %r4;
    add.s32 %r2, %r2, %r7;
    """
    assert (lanes(body, shared=128) == LANE + 105).all()


def test_narrow_and_vector_accesses() -> None:
    body = """
    ld.param.b64 %l1, [x];
    ld.param.b64 %l2, [y];
    ld.global.s8 %r1, [%l1+3];
    ld.global.u16 %r2, [%l1+6];
    ld.global.v8.b32 {%r3, %r4, %r5, %r6, %r7, %r8, %r9, %r10}, [%l1];
    ld.global.L1::no_allocate.v4.b64 {%l3, %l4, %l5, %l6}, [%l1+32];
    cvt.u32.u64 %r11, %l6;
    st.global.v4.b32 [%l2], {%r1, %r2, %r10, %r11};
    st.global.u8 [%l2+17], %r3;
    """
    store = np.zeros(64, np.uint32)
    start = (-store.ctypes.data % 32) // 4
    x, y = store[start : start + 16], np.zeros(8, np.uint32)
    x[:] = np.arange(16) * 0x01020304 + 0x80000000
    memory = Memory()
    parameters = [memory.add_array("x", x), memory.add_array("y", y)]
    run_ptx(entry(".param .u64 x, .param .u64 y", body), 1, 1, parameters, memory)
    assert y[0] == 0xFFFFFF80 and y[1] == int(x[1]) >> 16 and y[2] == x[7] and y[3] == x[14] and y[4] == (int(x[0]) & 0xFF) << 8


def test_atomics() -> None:
    body = """
    atom.global.add.u32 %r3, [%l8], 1;
    red.global.max.s32 [%l8+4], %r1;
    atom.global.cas.b32 %r4, [%l8+8], 0, %r1;
    atom.global.inc.u32 %r5, [%l8+12], 5;
    red.relaxed.gpu.global.add.f32 [%l8+16], 0f3F000000;
    mov.u32 %r6, stage;
    setp.eq.u32 %p1, %r1, 0;
    @%p1 st.shared.b32 [%r6], 0;
    bar.warp.sync -1;
    atom.shared.add.u32 %r2, [%r6], 2;
    """
    store = "mul.wide.u32 %l9, %r1, 4;\n    add.s64 %l9, %l8, %l9;\n    st.global.b32 [%l9+32], %r2;\n"
    text = entry(".param .u64 y", f"    ld.param.b64 %l8, [y];\n    mov.u32 %r1, %tid.x;\n    {body}\n    {store}", shared=16)
    y = run_vector(text, threads=32, count=40)
    assert y[:4].tolist() == [32, 31, 1, 2] and y[4] == f32(16)
    assert sorted(y[8:].tolist()) == list(range(0, 64, 2))


def test_reduction_barrier() -> None:
    body = "and.b32 %r3, %r1, 1;\n    setp.ne.u32 %p1, %r3, 0;\n    barrier.red.popc.u32 %r2, 0, %p1;"
    assert (lanes(body, threads=96) == 48).all()
    assert (lanes(body.replace("popc.u32 %r2", "or.pred %p2") + "\n    selp.u32 %r2, 1, 0, %p2;", threads=96) == 1).all()


def test_undefined_registers_show() -> None:
    assert (lanes("mov.b64 %l1, {%r1, %r20};\n    shr.u64 %l1, %l1, 32;\n    cvt.u32.u64 %r2, %l1;").view(np.uint32) == 0xDEADBEEF).all()


def test_constant_memory_and_two_kernels_in_one_file() -> None:
    text = entry(".param .u64 y", "    ld.param.b64 %l1, [y];\n    ld.const.u32 %r1, [numbers+4];\n    st.global.b32 [%l1], %r1;\n")
    text = text.replace(".visible", ".const .align 4 .b8 numbers[8] = {1, 0, 0, 0, 7, 1, 0, 0};\n.visible")
    assert run_vector(text, threads=1)[0] == 263
    both = text + text[text.index(".visible") :].replace(".entry k(", ".entry other(")
    assert load_program(both, "other").kernel.name == "other"
