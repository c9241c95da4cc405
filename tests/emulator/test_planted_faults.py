"""Small right kernels pass; each with a fault planted in its text is caught, and the fault named with its place."""

from __future__ import annotations

import mmap

import numpy as np
import pytest

from ptx_emulator import Buffer, KernelFault, LaunchError, Memory, run_ptx
from ptx_emulator.report import checked
from tests.emulator.small_kernels import (
    ASYNC,
    BULK,
    EXCHANGE,
    FETCH,
    REVERSE,
    ROUNDS,
    SEND,
    entry,
    run_copy,
    run_reverse,
    run_vector,
)


def planted(text: str, old: str, new: str) -> str:
    assert text.count(old) >= 1, old
    return text.replace(old, new, 1)


def last(text: str, old: str, new: str) -> str:
    head, found, tail = text.rpartition(old)
    assert found, old
    return head + new + tail


def line_of(text: str, part: str) -> int:
    return text[: text.index(part)].count("\n") + 1


# ---- the right kernels


def test_right_kernels_pass() -> None:
    y, result = run_reverse(REVERSE)
    assert (y == np.arange(150).reshape(3, 50)[:, ::-1]).all() and not result.never
    tid = np.arange(64)
    assert (run_vector(ROUNDS, parameters=(3,)) == 3 * (tid ^ 63) + 3).all()
    for text in (EXCHANGE, SEND, FETCH):
        y = run_vector(text, threads=32, grid=4, cluster=2)
        assert (y.reshape(4, 32) == np.array([1, 0, 3, 2])[:, None] * 100 + np.arange(32)).all()
    assert (run_copy(BULK) == np.arange(7, 71)).all()
    assert (run_copy(ASYNC) == np.arange(7, 71).reshape(32, 2)[:, ::-1].ravel()).all()


# ---- faults in REVERSE: (what, old text, new text, check, part of the message)

REVERSE_FAULTS = [
    ("off-by-one bound", "setp.ge.s32 %p1, %r3, %r1", "setp.gt.s32 %p1, %r3, %r1", "out of bounds", "'x'"),
    ("off-by-one bound at the store", "setp.ge.s32 %p2, %r3, %r1", "setp.gt.s32 %p2, %r3, %r1", "out of bounds", ""),
    ("wrong stride", "mul.wide.s32 %l3, %r4, %r2", "mul.wide.s32 %l3, %r4, 64", "out of bounds", "'x'"),
    ("wrong element size", "shl.b64 %l3, %l3, 2", "shl.b64 %l3, %l3, 3", "out of bounds", ""),
    ("missing barrier", "bar.sync 0;", "", "shared-memory race", "thread"),
    ("missing store to shared memory", "st.shared.b32 [%r6], %r7;", "", "uninitialised read", "shared offset"),
    ("misaligned address", "add.s64 %l6, %l6, %l4", "add.s64 %l6, %l6, 2", "misaligned access", "'y'"),
    ("shared memory past its end", "sub.s32 %r8, %r1, %r3", "add.s32 %r8, %r1, %r3", "out of bounds", "shared offset"),
    ("missing wait", "griddepcontrol.wait;", "", "global access before griddepcontrol.wait", ""),
    ("input written", "st.global.b32 [%l6], %r10", "st.global.b32 [%l5], %r10", "write to read-only tensor", "'x'"),
    ("output read", "ld.global.b32 %r7, [%l5]", "ld.global.b32 %r7, [%l6]", "uninitialised read", "'y'"),
    ("barrier in divergent code", "@%p1 bra LOADED;", "@%p1 bra DONE;", "divergent barrier", "never come"),
    (
        "all threads but one warp",
        "LOADED:",
        "LOADED:\n    setp.ge.s32 %p3, %r3, 32;\n    @%p3 bra STUCK;\nSTUCK:\n    @%p3 bar.sync 1;",
        "barrier mismatch",
        "",
    ),
    (
        "wrong barrier",
        "bar.sync 0;",
        "setp.lt.s32 %p3, %r3, 32;\n    @%p3 bar.sync 1, 64;\n    @!%p3 bar.sync 2, 64;",
        "barrier mismatch",
        "never come",
    ),
    ("wrong thread count", "bar.sync 0;", "bar.sync 1, 96;", "barrier mismatch", "never come"),
    (
        "two thread counts",
        "bar.sync 0;",
        "setp.lt.s32 %p3, %r3, 32;\n    @%p3 bar.sync 1, 64;\n    @!%p3 bar.sync 1, 96;",
        "barrier mismatch",
        "96",
    ),
    ("count of no whole warps", "bar.sync 0;", "bar.sync 1, 50;", "barrier mismatch", "50 is no multiple of the warp size"),
    ("trap", "DONE:", "trap;\nDONE:", "trap", ""),
]


@pytest.mark.parametrize(("what", "old", "new", "check", "part"), REVERSE_FAULTS, ids=[f[0] for f in REVERSE_FAULTS])
def test_fault_is_named(what: str, old: str, new: str, check: str, part: str) -> None:
    with pytest.raises(KernelFault) as caught:
        run_reverse(planted(REVERSE, old, new))
    assert caught.value.check == check, f"{what}: {caught.value}"
    assert part in str(caught.value)


def test_fault_gives_tensor_block_thread_and_line() -> None:
    text = planted(REVERSE, "setp.ge.s32 %p1, %r3, %r1", "setp.gt.s32 %p1, %r3, %r1")
    with pytest.raises(KernelFault) as caught:
        run_reverse(text)
    fault = caught.value
    assert (fault.tensor, fault.block, fault.thread) == ("x", (2, 0, 0), (50, 0, 0))
    assert fault.line == line_of(text, "ld.global.b32 %r7") and "ld.global.b32 %r7, [%l5]" in str(fault)
    assert "0 bytes past the end" in str(fault)


def test_store_before_the_wait() -> None:
    text = planted(planted(REVERSE, "griddepcontrol.wait;", ""), "DONE:", "DONE:\n    griddepcontrol.wait;")
    with pytest.raises(KernelFault, match=r"before griddepcontrol\.wait"):
        run_reverse(text)
    y, _ = run_reverse(text, pdl=False)  # without programmatic dependent launch the order does not matter
    assert y[0, 0] == 49


def test_one_thread_may_wait_for_all() -> None:
    """Behind a barrier its wait counts for the whole block, but not before."""
    one = "mov.u32 %r3, %tid.x;\n    setp.ne.u32 %p5, %r3, 0;\n    @%p5 bra WAITED;\n    griddepcontrol.wait;\nWAITED:\n"
    text = planted(REVERSE, "griddepcontrol.wait;", one + "    bar.sync 0;")
    assert (run_reverse(text)[0] == run_reverse(REVERSE)[0]).all()
    with pytest.raises(KernelFault, match=r"before griddepcontrol\.wait"):
        run_reverse(planted(text, "WAITED:\n    bar.sync 0;", "WAITED:"))


def test_blocks_that_leave_without_the_wait() -> None:
    text = planted(
        REVERSE, "griddepcontrol.wait;", "mov.u32 %r4, %ctaid.x;\n    setp.eq.u32 %p5, %r4, 1;\n    @%p5 exit;\n    griddepcontrol.wait;"
    )
    with pytest.raises(KernelFault) as caught:
        run_reverse(text)
    assert caught.value.check == "missing griddepcontrol.wait" and caught.value.block == (1, 0, 0)


def test_an_independent_launch_may_wait_last() -> None:
    late = planted(planted(REVERSE, "griddepcontrol.wait;", ""), "DONE:", "DONE:\n    griddepcontrol.wait;")
    first = planted(late, "DONE:", "DONE:\n    mov.u32 %r4, %ctaid.x;\n    setp.ne.u32 %p5, %r4, 0;\n    @%p5 exit;")
    for text in (late, first):
        y, result = run_reverse(text, independent=True)
        assert (y == np.arange(150).reshape(3, 50)[:, ::-1]).all()
        assert [c for c in checked([result]) if "griddep" in c] == ["griddepcontrol.wait before the grid ends"]
    for text in (planted(REVERSE, "griddepcontrol.wait;", ""), planted(late, "DONE:", "    @%p2 exit;\nDONE:\n    @%p2 exit;")):
        with pytest.raises(KernelFault) as caught:
            run_reverse(text, independent=True, rows=1, n=0)
        assert caught.value.check == "missing griddepcontrol.wait"


def test_lane_past_the_length_stored() -> None:
    with pytest.raises(KernelFault) as caught:
        run_reverse(REVERSE, owned=49)
    assert caught.value.check == "write outside the owned rows" and caught.value.thread == (49, 0, 0)
    run_reverse(REVERSE, owned=50)


def test_offset_overflow_of_32_bits() -> None:
    """Rows 2^31 bytes and more apart: right with a 64-bit product, caught with a 32-bit one."""
    pitch = 2**29 + 16
    region = mmap.mmap(-1, 2 * pitch * 4 + 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0))
    x = np.frombuffer(region, np.int32)
    for row in range(3):
        x[row * pitch : row * pitch + 8] = np.arange(8) + 10 * row
    host = x.ctypes.data
    address = 0x7000_0000_0000 + host % 256

    def run(text: str) -> None:
        space = Memory([Buffer("x", address, host, 32, ((pitch * 4, 3),))])
        run_ptx(text, 3, 64, [address, address, 8, pitch, 3], space, pdl=True)

    run(REVERSE)
    assert (x[2 * pitch : 2 * pitch + 8] == np.arange(27, 19, -1)).all()
    narrow = planted(REVERSE, "mul.wide.s32 %l3, %r4, %r2;", "mul.lo.s32 %r20, %r4, %r2;")
    narrow = planted(narrow, "shl.b64 %l3, %l3, 2;", "shl.b32 %r20, %r20, 2;\n    cvt.s64.s32 %l3, %r20;")
    with pytest.raises(KernelFault, match="out of bounds"):
        run(narrow)
    del x


def test_bytes_between_rows_belong_to_nobody() -> None:
    x = np.zeros((4, 16), np.int32)
    memory = Memory()
    address = memory.add_array("x", x[:, :8])
    with pytest.raises(KernelFault, match="out of bounds"):
        run_ptx(REVERSE, 4, 64, [address, address, 9, 16, 4], memory, pdl=True)


# ---- races and asynchronous copies


@pytest.mark.parametrize("barrier", ["bar.sync 0;", "barrier.sync 0;"])
def test_either_barrier_of_a_reused_buffer_missing(barrier: str) -> None:
    with pytest.raises(KernelFault) as caught:
        run_vector(planted(ROUNDS, barrier, ""), parameters=(3,))
    assert caught.value.check == "shared-memory race"


def test_race_inside_a_warp() -> None:
    """Lanes of one warp need a warp barrier between a store and a neighbour's load; a shuffle is none."""
    body = """
    ld.param.b64 %l1, [y];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, stage;
    shl.b32 %r3, %r1, 2;
    add.s32 %r4, %r2, %r3;
    st.shared.b32 [%r4], %r1;
    bar.warp.sync -1;
    xor.b32 %r5, %r3, 4;
    add.s32 %r5, %r2, %r5;
    ld.shared.b32 %r6, [%r5];
    mul.wide.u32 %l2, %r1, 4;
    add.s64 %l2, %l1, %l2;
    st.global.b32 [%l2], %r6;
    """
    right = entry(".param .u64 y", body, shared=128)
    assert (run_vector(right, threads=32) == np.arange(32) ^ 1).all()
    for instead in ("", "shfl.sync.bfly.b32 %r9, %r1, 1, 31, -1;"):
        with pytest.raises(KernelFault, match="shared-memory race"):
            run_vector(planted(right, "bar.warp.sync -1;", instead), threads=32)


def test_two_values_written_to_one_place() -> None:
    body = "mov.u32 %r1, %tid.x;\n    mov.u32 %r2, stage;\n    st.shared.b32 [%r2], %r1;\n"
    with pytest.raises(KernelFault, match="shared-memory race"):
        run_vector(entry(".param .u64 y", body, shared=16), threads=32)


def test_named_barriers_order_only_those_who_meet() -> None:
    """Warps 0 and 1 meet at barrier 1, warps 2 and 3 at barrier 2; data passed between the pairs is a race."""
    body = """
    ld.param.b64 %l1, [y];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, stage;
    shl.b32 %r3, %r1, 2;
    add.s32 %r4, %r2, %r3;
    st.shared.b32 [%r4], %r1;
    shr.u32 %r5, %r1, 6;
    add.s32 %r5, %r5, 1;
    bar.sync %r5, 64;
    xor.b32 %r6, %r3, 128;
    add.s32 %r6, %r2, %r6;
    ld.shared.b32 %r7, [%r6];
    mul.wide.u32 %l2, %r1, 4;
    add.s64 %l2, %l1, %l2;
    st.global.b32 [%l2], %r7;
    """
    right = entry(".param .u64 y", body, shared=512)
    assert (run_vector(right, threads=128) == np.arange(128) ^ 32).all()
    with pytest.raises(KernelFault, match="shared-memory race"):
        run_vector(planted(right, "xor.b32 %r6, %r3, 128", "xor.b32 %r6, %r3, 256"), threads=128)


CLUSTER_FAULTS = [
    ("no barrier before the first remote store", planted, EXCHANGE, "remote shared memory", "may not have started"),
    ("no barrier before the exchanged value is read", last, EXCHANGE, "shared-memory race", ""),
    ("no barrier before the other block is read", planted, FETCH, "remote shared memory", "may not have started"),
    ("no barrier before leaving", last, FETCH, "remote shared memory", "may leave while"),
]


@pytest.mark.parametrize(("what", "where", "text", "check", "part"), CLUSTER_FAULTS, ids=[f[0] for f in CLUSTER_FAULTS])
def test_missing_cluster_barrier(what: str, where: object, text: str, check: str, part: str) -> None:
    pair = "    barrier.cluster.arrive.aligned;\n    barrier.cluster.wait.aligned;\n"
    if what.startswith("no barrier before the first remote store"):
        pair = pair.replace("arrive", "arrive.relaxed")
    with pytest.raises(KernelFault) as caught:
        run_vector(where(text, pair, ""), threads=32, grid=4, cluster=2)  # type: ignore[operator]
    assert caught.value.check == check and part in str(caught.value)


def test_relaxed_arrival_passes_no_data() -> None:
    with pytest.raises(KernelFault, match="shared-memory race"):
        run_vector(last(EXCHANGE, "arrive.aligned", "arrive.relaxed.aligned"), threads=32, grid=4, cluster=2)


def test_faults_of_asynchronous_stores() -> None:
    barrier = "        barrier.cluster.arrive.relaxed;\n        barrier.cluster.wait;\n"
    wait = SEND[SEND.index("        {\n") : SEND.index("        ld.shared.b32")]
    for text, check in (
        (planted(SEND, wait, ""), "uninitialised read"),
        (planted(SEND, "[%r11], 128;", "[%r11], 256;"), "deadlock"),
        (planted(SEND, barrier, ""), "remote shared memory"),
    ):
        with pytest.raises(KernelFault) as caught:
            run_vector(text, threads=32, grid=4, cluster=2)
        assert caught.value.check == check


def test_cluster_barrier_misuse() -> None:
    with pytest.raises(KernelFault, match="without having arrived"):
        run_vector(planted(EXCHANGE, "barrier.cluster.arrive.relaxed.aligned;", ""), threads=32, grid=2, cluster=2)
    with pytest.raises(KernelFault, match="never come"):
        text = last(
            EXCHANGE,
            "    barrier.cluster.arrive.aligned;",
            "    setp.eq.u32 %p5, %r2, 1;\n    @!%p5 barrier.cluster.arrive.aligned;\nSPIN:\n    @%p5 bra SPIN2;",
        )
        run_vector(
            text.replace("    st.global.b32 [%l2], %r9;", "    st.global.b32 [%l2], %r9;\nSPIN2:\n    bar.sync 0, 64;"),
            threads=32,
            grid=2,
            cluster=2,
        )


COPY_FAULTS = [
    (
        "bulk copy not waited for",
        BULK,
        "mbarrier.try_wait.parity.shared.b64 done, [%r3], 0;",
        "setp.eq.u32 done, 0, 0;",
        "uninitialised read",
    ),
    ("too many bytes expected", BULK, "%l5, [%r3], 256;", "%l5, [%r3], 512;", "deadlock"),
    ("waits for the wrong phase", BULK, "done, [%r3], 0;", "done, [%r3], 1;", "uninitialised read"),
    ("mbarrier not initialised", BULK, "mbarrier.init.shared.b64 [%r3], 1;", "", "mbarrier"),
    ("size no multiple of 16", BULK, "[%r2], [%l2], 256, [%r3]", "[%r2], [%l2], 248, [%r3]", "misaligned access"),
    ("bulk copy past the tensor", BULK, "[%r2], [%l2], 256, [%r3]", "[%r2], [%l2], 272, [%r3]", "out of bounds"),
    ("cp.async not waited for", ASYNC, "cp.async.wait_group 0;", "", "uninitialised read"),
    ("one group too many left", ASYNC, "cp.async.wait_group 0;", "cp.async.wait_group 1;", "uninitialised read"),
    ("no barrier after cp.async", ASYNC, "bar.sync 0;", "", "shared-memory race"),
]


@pytest.mark.parametrize(("what", "text", "old", "new", "check"), COPY_FAULTS, ids=[f[0] for f in COPY_FAULTS])
def test_faulty_copies(what: str, text: str, old: str, new: str, check: str) -> None:
    with pytest.raises(KernelFault) as caught:
        run_copy(planted(text, old, new))
    assert caught.value.check == check, f"{what}: {caught.value}"


def test_shuffle_from_a_lane_that_does_not_take_part() -> None:
    body = """
    ld.param.b64 %l1, [y];
    mov.u32 %r1, %tid.x;
    setp.ge.u32 %p1, %r1, 16;
    @%p1 bra OUT;
    shfl.sync.bfly.b32 %r2, %r1, 1, 31, 0xffff;
    mul.wide.u32 %l2, %r1, 4;
    add.s64 %l2, %l1, %l2;
    st.global.b32 [%l2], %r2;
OUT:
    """
    right = entry(".param .u64 y", body)
    assert (run_vector(right, threads=32)[:16] == np.arange(16) ^ 1).all()
    with pytest.raises(KernelFault, match="inactive lane"):
        run_vector(planted(right, "%r1, 1, 31", "%r1, 16, 31"), threads=32)
    with pytest.raises(KernelFault, match="does not name it"):
        run_vector(planted(right, "0xffff", "0xff"), threads=32)
    with pytest.raises(KernelFault, match="inactive lane"):  # the whole warp is named, but half of it has left
        run_vector(planted(planted(right, "%r1, 1, 31", "%r1, 16, 31"), "0xffff", "-1"), threads=32)


def test_launches_that_do_not_fit_the_kernel() -> None:
    text = EXCHANGE.replace(".visible .entry k(.param .u64 y)", ".visible .entry k(.param .u64 y)\n.reqntid 32, 1, 1")
    for options, part in (
        ({"threads": 64}, "requires"),
        ({"threads": 32, "grid": 3, "cluster": 2}, "multiple"),
        ({"threads": 32, "dynamic_shared": 1 << 20}, "at most"),
    ):
        with pytest.raises(LaunchError, match=part):
            run_vector(text, count=400, **options)
