"""Faults in shared memory that a single check finds: who has read, dates of single lanes, ends and sources of copies, mbarrier counts.

Beside each stands a right kernel that differs from it in that alone.
"""

from __future__ import annotations

import numpy as np
import pytest

from ptx_emulator import KernelFault, Memory, run_ptx
from tests.emulator.small_kernels import ASYNC, BULK, BULK_STORE, EXCHANGE, changed, entry, fault_of, run_bulk_store, run_copy, run_vector

FENCE = "fence.proxy.async.shared::cta;"
# Each lane of the first warp, or of a few, knows its word %r3 of the stage and its word of y.
HEAD = """
    ld.param.b64 %l1, [y];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, stage;
    and.b32 %r4, %r1, 31;
    shl.b32 %r3, %r4, 2;
    add.s32 %r3, %r2, %r3;
    setp.eq.u32 %p1, %r1, 0;
    setp.eq.u32 %p2, %r1, 1;
    setp.ge.u32 %p3, %r1, 32;
    setp.ge.u32 %p4, %r4, 16;
    mul.wide.u32 %l2, %r1, 4;
    add.s64 %l2, %l1, %l2;
"""
WAIT = """
WAIT:
    mbarrier.try_wait.parity.shared.b64 %p5, [%r2+128], 0;
    @!%p5 bra WAIT;
"""


def kernel(body: str, shared: int = 144) -> str:
    return entry(".param .u64 y", HEAD + body, shared)


# ---- who has read a place


def test_all_lanes_that_read_a_place_together_are_remembered() -> None:
    """Pairs of lanes read the word of the even one; the odd one writes over it."""
    body = """
    st.shared.b32 [%r3], %r1;
    bar.warp.sync -1;
    and.b32 %r5, %r3, -8;
    ld.shared.b32 %r6, [%r5];
    bar.warp.sync -1;
    and.b32 %r7, %r1, 1;
    setp.eq.u32 %p6, %r7, 1;
    @%p6 st.shared.b32 [%r5], %r1;
    st.global.b32 [%l2], %r6;
    """
    right = kernel(body)
    assert (run_vector(right, threads=32) == np.arange(32) // 2 * 2).all()
    fault = fault_of(changed(right, ("ld.shared.b32 %r6, [%r5];\nbar.warp.sync -1;", "ld.shared.b32 %r6, [%r5];")), threads=32)
    assert fault.check == "shared-memory race" and "overwrites what is read by thread (0, 0, 0)" in str(fault)


def test_lanes_that_read_a_place_one_after_another_are_remembered() -> None:
    """Lane 0 reads a word, then lane 1 does, which writes over it."""
    body = """
    @%p1 st.shared.b32 [%r2], 7;
    bar.warp.sync -1;
    @%p1 ld.shared.b32 %r6, [%r2];
    @%p2 ld.shared.b32 %r6, [%r2];
    bar.warp.sync -1;
    @%p2 st.shared.b32 [%r2], 8;
    """
    right = kernel(body)
    run_vector(right, threads=32)
    fault = fault_of(changed(right, ("@%p2 ld.shared.b32 %r6, [%r2];\nbar.warp.sync -1;", "@%p2 ld.shared.b32 %r6, [%r2];")), threads=32)
    assert fault.check == "shared-memory race" and "overwrites what is read by thread (0, 0, 0)" in str(fault)


def test_lanes_that_have_read_may_say_so_singly() -> None:
    """Half a warp reads a word and arrives, lane by lane; who waits for that may write over it, but not over what the others read."""
    body = f"""
    @%p1 mbarrier.init.shared.b64 [%r2+128], 16;
    @%p1 st.shared.b32 [%r2], 7;
    @%p1 st.shared.b32 [%r2+4], 8;
    bar.sync 0;
    @!%p3 bra WRITE;
    selp.u32 %r5, 4, 0, %p4;
    add.s32 %r5, %r2, %r5;
    ld.shared.b32 %r6, [%r5];
    @%p4 bra END;
    mbarrier.arrive.shared.b64 %l5, [%r2+128];
    bra END;
WRITE:
    @!%p1 bra END;
    {WAIT}
    st.shared.b32 [%r2+0], 9;
END:
    """
    right = kernel(body)
    run_vector(right)
    fault = fault_of(changed(right, ("[%r2+0], 9", "[%r2+4], 9")))
    assert fault.check == "shared-memory race" and "overwrites what is read by thread (48, 0, 0)" in str(fault)


def test_an_ordinary_store_after_an_atomic_is_none() -> None:
    body = """
    @%p1 st.shared.b32 [%r2], 0;
    bar.sync 0;
    atom.shared.add.u32 %r5, [%r2], 1;
    bar.sync 0;
    @%p1 st.shared.b32 [%r2], 5;
    bar.sync 1;
    atom.shared.add.u32 %r5, [%r2], 1;
    """
    right = kernel(body)
    run_vector(right)
    fault = fault_of(changed(right, ("bar.sync 1;", "")))
    assert fault.check == "shared-memory race" and "overwrites what was written by thread (0, 0, 0)" in str(fault)


def test_a_bulk_copy_after_an_atomic_is_none() -> None:
    atomic = "    atom.shared.add.u32 %r9, [%r2], 1;\n"
    started = f"READY:\n@!%p1 st.shared.b32 [%r2], 0;\n{FENCE}\nbar.sync 0;\n{atomic}{FENCE}\n"
    right = changed(BULK, ("READY:\n", started), ("OUT:\n    }\n", f"OUT:\n}}\n{atomic}"), ("ld.shared.b32 %r6, [%r5]", "mov.u32 %r6, 1"))
    run_copy(right)
    with pytest.raises(KernelFault) as caught:
        run_copy(changed(right, ("WAIT:\n", f"WAIT:\n@%p1 {atomic.strip()}\n")))
    assert caught.value.check == "shared-memory race" and "what was written by an asynchronous copy" in str(caught.value)


# ---- dates: what follows a release, or a meeting of lanes, is not part of it


@pytest.mark.parametrize(("count", "who"), [(1, "@%p1 "), (16, "@!%p4 "), (32, "")], ids=["one lane", "half a warp", "a warp"])
def test_written_behind_an_arrival(count: int, who: str) -> None:
    body = f"""
    @%p1 mbarrier.init.shared.b64 [%r2+128], {count};
    bar.sync 0;
    @%p3 bra READ;
    {who}st.shared.b32 [%r3], %r1;
    {who}mbarrier.arrive.shared.b64 %l5, [%r2+128];
    bra END;
READ:
    {WAIT}
    {who.replace("%p1", "%p6")}ld.shared.b32 %r6, [%r3];
END:
    """.replace("READ:", "READ:\n    setp.eq.u32 %p6, %r4, 0;")
    right = kernel(body)
    run_vector(right)
    store, arrive = f"{who}st.shared.b32 [%r3], %r1;\n", f"{who}mbarrier.arrive.shared.b64 %l5, [%r2+128];\n"
    fault = fault_of(changed(right, (store + arrive, arrive + store)))
    assert fault.check == "shared-memory race" and "reads what was written by thread (0, 0, 0)" in str(fault)


@pytest.mark.parametrize("meet", ["bar.warp.sync -1;", "@!%p4 bar.warp.sync 0xffff;"], ids=["a warp", "half a warp"])
def test_written_behind_a_warp_barrier(meet: str) -> None:
    """Lanes have met, write, and have to meet again before they read what others wrote."""
    body = f"""
    {meet}
    @!%p4 st.shared.b32 [%r3], %r1;
    {meet}
    xor.b32 %r5, %r3, 4;
    @!%p4 ld.shared.b32 %r6, [%r5];
    @!%p4 st.global.b32 [%l2], %r6;
    """
    right = kernel(body)
    assert (run_vector(right, threads=32)[:16] == np.arange(16) ^ 1).all()
    fault = fault_of(changed(right, (f"[%r3], %r1;\n{meet}", "[%r3], %r1;")), threads=32)
    assert fault.check == "shared-memory race" and "reads what was written by thread (1, 0, 0)" in str(fault)


# ---- blocks of a cluster


def test_a_block_runs_when_any_of_its_warps_does() -> None:
    """Warp 0 of each block leaves at once; the others exchange values."""
    leave = "mov.u32 %r1, %tid.x;\nsetp.lt.u32 %p1, %r1, 32;\n@%p1 exit;\nsub.s32 %r1, %r1, 32;"
    text = changed(EXCHANGE, ("mov.u32 %r1, %tid.x;", leave))
    y = run_vector(text, threads=64, grid=4, cluster=2, count=128)
    assert (y.reshape(4, 32) == np.array([1, 0, 3, 2])[:, None] * 100 + np.arange(32)).all()


# ---- copies

# BULK with its mbarrier in front.
FRONT = changed(
    BULK,
    ("add.s32 %r3, %r2, 256;", "mov.u32 %r3, %r2;\nadd.s32 %r2, %r2, 16;"),
    ("shl.b32 %r4, %r1, 2;", "and.b32 %r4, %r1, 31;\nshl.b32 %r4, %r4, 2;"),
)


def test_a_bulk_load_ends_within_shared_memory() -> None:
    assert (run_copy(FRONT) == np.arange(7, 71) - np.arange(64) // 32 * 32).all()
    with pytest.raises(KernelFault) as caught:
        run_copy(changed(FRONT, ("add.s32 %r2, %r2, 16;", "add.s32 %r2, %r2, 32;")))
    assert caught.value.check == "out of bounds" and "16 bytes at shared offset 272 of 272" in str(caught.value)


def test_a_bulk_store_begins_and_ends_within_what_was_written() -> None:
    for old, new, check in (
        ("[%l1], [%r2], 256;", "[%l1], [%r2+16], 256;", "out of bounds"),
        ("[%l1], [%r2], 256;", "[%l1], [%r2], 272;", "out of bounds"),
        ("    st.shared.b32 [%r3], %r1;", "    setp.lt.u32 %p2, %r1, 63;\n    @%p2 st.shared.b32 [%r3], %r1;", "uninitialised read"),
    ):
        with pytest.raises(KernelFault) as caught:
            run_bulk_store(changed(BULK_STORE, (old, new)))
        assert caught.value.check == check, caught.value


def test_a_bulk_load_over_what_a_bulk_store_still_reads() -> None:
    """Thread 0 sends the stage to y, and fetches the next words into it."""
    body = """
    @%p1 mbarrier.init.shared.b64 [%r2+128], 1;
    @%p1 fence.mbarrier_init.release.cluster;
    @!%p3 st.shared.b32 [%r3], %r1;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    @!%p1 bra FETCHED;
    cp.async.bulk.global.shared::cta.bulk_group [%l1], [%r2], 128;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group.read 0;
    mbarrier.arrive.expect_tx.shared.b64 %l5, [%r2+128], 128;
    cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r2], [%l3], 128, [%r2+128];
FETCHED:
    """
    right = changed(kernel(body + WAIT), ("mul.wide.u32 %l2", "ld.param.b64 %l3, [x];\nmul.wide.u32 %l2"))
    right = right.replace("k(.param .u64 y)", "k(.param .u64 y, .param .u64 x)")
    late = "cp.async.bulk.wait_group.read 0;\n"
    assert (run_copy(right)[:32] == np.arange(32)).all()
    with pytest.raises(KernelFault) as caught:
        run_copy(changed(right, (late, ""), ("FETCHED:\n", f"{late}FETCHED:\n")))
    assert caught.value.check == "shared-memory race"
    assert "a copy overwrites what is read by an asynchronous copy" in str(caught.value)


def test_cp_async_fills_up_with_zeros() -> None:
    """Threads copy 0, 1, 2 or 4 bytes of their words; who copies none may name an address outside."""
    part = """
    and.b32 %r7, %r1, 3;
    mov.u32 %r8, 1;
    shl.b32 %r8, %r8, %r7;
    shr.u32 %r8, %r8, 1;
    setp.eq.u32 %p1, %r8, 0;
    @%p1 mov.u64 %l4, 64;
    cp.async.ca.shared.global [%r4], [%l4], 4, %r8;
    """
    text = changed(ASYNC, ("cp.async.ca.shared.global [%r4], [%l4], 4;", part), ("xor.b32 %r5, %r3, 4;", "mov.u32 %r5, %r3;"))
    memory, x, y = Memory(), np.arange(64, dtype=np.int32) + 0x01020304, np.zeros(64, np.int32)
    run_ptx(text, 1, 64, [memory.add_array("y", y), memory.add_array("x", x, writable=False)], memory)
    assert (y == (x & np.array([0, 0xFF, 0xFFFF, -1])[np.arange(64) & 3])).all()


# ---- mbarriers


def test_a_phase_says_nothing_of_the_copies_of_the_next() -> None:
    """Thread 0 fetches half the words, waits, fetches the other half, waits, and stores over them."""
    half = "mbarrier.arrive.expect_tx.shared.b64 %l5, [%r3], 256;\n"
    copy = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%l2], 256, [%r3];\n"
    again = "mbarrier.try_wait.parity.shared.b64 %p2, [%r3], 1;\n@!%p2 bra SECOND;\n"
    text = changed(
        BULK,
        (half, half.replace("256", "128")),
        (copy, copy.replace("256", "128")),
        ("}\n", f"}}\n@%p1 exit;\n{half.replace('256', '128')}{copy.replace('[%r2], [%l2], 256', '[%r2+128], [%l2+128], 128')}"),
        ("shl.b32 %r4, %r1, 2;", f"SECOND:\n{again}st.shared.b32 [%r2+128], 5;\nshl.b32 %r4, %r1, 2;"),
    )
    assert run_copy(text)[0] == 7
    wait, store = f"SECOND:\n{again}", "st.shared.b32 [%r2+128], 5;\n"
    with pytest.raises(KernelFault) as caught:
        run_copy(changed(text, (wait + store, store + wait)))
    assert caught.value.check == "shared-memory race" and "overwrites what was written by an asynchronous copy" in str(caught.value)


def test_more_bytes_than_expected_complete_no_phase() -> None:
    with pytest.raises(KernelFault) as caught:
        run_copy(changed(BULK, ("%l5, [%r3], 256;", "%l5, [%r3], 128;")))
    assert caught.value.check == "deadlock"


@pytest.mark.parametrize("count", [0, 1 << 20])
def test_count_of_an_mbarrier(count: int) -> None:
    body = "@%p1 mbarrier.init.shared.b64 [%r2], COUNT;\n"
    run_vector(kernel(body.replace("COUNT", str((1 << 20) - 1))))
    fault = fault_of(kernel(body.replace("COUNT", str(count))))
    assert fault.check == "mbarrier" and f"count {count} is not in 1 .. 2^20-1" in str(fault)


def test_who_has_waited_in_vain_may_do_something_else() -> None:
    """A thread asks five times in vain, then arrives itself."""
    body = f"""
    @%p1 mbarrier.init.shared.b64 [%r2+128], 1;
    @!%p1 bra END;
    mov.u32 %r5, 0;
ASK:
    mbarrier.test_wait.parity.shared.b64 %p5, [%r2+128], 0;
    @%p5 bra END;
    add.s32 %r5, %r5, 1;
    setp.lt.u32 %p6, %r5, 5;
    @%p6 bra ASK;
    mbarrier.arrive.shared.b64 %l5, [%r2+128];
    {WAIT}
    st.global.b32 [%l1], %r5;
END:
    """
    assert run_vector(kernel(body), threads=32)[0] == 5
