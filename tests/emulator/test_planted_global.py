"""Faults in global memory: elements of a vector, several readers, batches of blocks, blocks that order each other, ends of tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ptx_emulator import KernelFault, Memory, run_ptx
from ptx_emulator.memory import AccessFault
from tests.emulator.small_global_kernels import CHAIN, HANDOVER, LAST, WORDS, run_chain, run_handover, run_last
from tests.emulator.small_kernels import changed, entry, fault_of, run_vector

HEAD = """
    ld.param.b64 %l1, [y];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, %ctaid.x;
    setp.eq.u32 %p1, %r1, 0;
    setp.eq.u32 %p2, %r2, 0;
    setp.eq.u32 %p3, %r1, 32;
    and.pred %p4, %p1, %p2;
    not.pred %p5, %p2;
    and.pred %p5, %p5, %p1;
"""


def kernel(body: str) -> str:
    return entry(".param .u64 y", HEAD + body)


def race_of(text: str, **options: Any) -> str:
    fault = fault_of(text, **options)
    assert fault.check == "global-memory race"
    return str(fault)


def test_any_element_of_a_vector_may_differ() -> None:
    """Two threads write two words to one place, of which the first differs: with one instruction, and with two."""
    both = kernel("st.global.v2.b32 [%l1], {%r2, 7};")
    single = kernel("@%p1 st.global.v2.b32 [%l1], {3, 7};\nbar.sync 0;\n@%p3 st.global.v2.b32 [%l1], {4, 7};")
    run_vector(both)
    run_vector(single)
    assert "two threads write different values" in race_of(changed(both, ("{%r2, 7}", "{%r1, 7}")))
    assert "writes another value than thread (0, 0, 0)" in race_of(changed(single, ("bar.sync 0;", "")))


@pytest.mark.parametrize(
    "read",
    ["@%p1 ld.global.b32 %r3, [%l1];", "@%p4 ld.global.b32 %r3, [%l1];\n@%p5 ld.global.b32 %r3, [%l1];"],
    ids=["together", "in turn"],
)
def test_a_place_that_two_blocks_have_read(read: str) -> None:
    """Thread 0 of both blocks reads it, together or one after the other; that of block 1 then writes it."""
    run_vector(changed(kernel(f"{read}\n@%p5 st.global.b32 [%l1], 5;"), ("[%l1], 5", "[%l1+4], 5")), threads=32, grid=2)
    assert "another block reads" in race_of(kernel(f"{read}\n@%p5 st.global.b32 [%l1], 5;"), threads=32, grid=2)


def test_threads_are_numbered_through_all_batches_of_blocks() -> None:
    """So many blocks that they are executed one batch after another: the first of the second batch writes where that of the first has."""
    body = """
    and.b32 %r3, %r2, LAST;
    mad.lo.s32 %r3, %r3, 1024, %r1;
    mul.wide.u32 %l2, %r3, 4;
    add.s64 %l2, %l1, %l2;
    st.global.b32 [%l2], %r2;
    """
    text = kernel(body)
    run_vector(text.replace("LAST", "31"), threads=1024, grid=17)
    assert "writes another value than another block" in race_of(text.replace("LAST", "15"), threads=1024, grid=17)


# ---- blocks that order each other

SET, POLL = "st.release.gpu.global.b32 [%l2+128], 1;", "ld.acquire.gpu.global.b32 %r4, [%l2+128];"
ADD, LOOK = "red.release.gpu.global.add.u32 [%l2+128], 1;", "atom.acquire.gpu.global.or.b32 %r4, [%l2+128], 0;"
WIDE = "fence.acq_rel.gpu;"
SET_LATE, POLL_EARLY = f"{WIDE}\nst.relaxed.gpu.global.b32 [%l2+128], 1;", "ld.relaxed.gpu.global.b32 %r4, [%l2+128];"
GIVEN = "st.relaxed.gpu.global.b32 [%l2], %r3;"
COUNT = f"{WIDE}\natom.add.global.u32 %r5, [%l2], 1;\n{WIDE}"


@pytest.mark.parametrize(
    ("write", "read"),
    [
        (SET, POLL),
        (ADD, LOOK),
        (ADD.replace(".global", ""), POLL),
        (SET.replace(".global", ""), POLL),
        (SET_LATE, f"{POLL_EARLY}\n{WIDE}"),
        (SET_LATE.replace("acq_rel", "release"), f"{POLL_EARLY}\nfence.acquire.gpu;"),
        ("membar.gl;\nst.volatile.global.b32 [%l2+128], 1;", "ld.volatile.global.b32 %r4, [%l2+128];\nmembar.gl;"),
    ],
)
def test_blocks_may_communicate(write: str, read: str) -> None:
    assert (run_handover(changed(HANDOVER, (SET, write), (POLL, read))) == np.arange(5, 37)).all()


@pytest.mark.parametrize(
    ("write", "read"),
    [
        (SET.replace("release", "relaxed"), POLL),
        (SET, POLL_EARLY),
        (SET_LATE, POLL_EARLY),
        (SET_LATE.replace("acq_rel", "acquire"), POLL),
        (SET_LATE.replace(".gpu;", ".cta;"), POLL),
        (SET.replace("gpu", "cta"), POLL),
        (SET, POLL.replace("gpu", "cta")),
        (SET, f"{POLL_EARLY}\nfence.release.gpu;"),
        (f"st.relaxed.gpu.global.b32 [%l2+128], 1;\n{WIDE}", POLL),
        (SET, f"{WIDE}\n{POLL_EARLY}"),
    ],
)
def test_blocks_communicate_by_release_and_acquire(write: str, read: str) -> None:
    with pytest.raises(KernelFault, match="reads what thread"):
        run_handover(changed(HANDOVER, (SET, write), (POLL, read)))


def test_words_that_say_that_they_are_there() -> None:
    """They need no order but that of each place."""
    y, memory = np.zeros(64, np.int32), Memory()
    result = run_ptx(WORDS, 2, 32, [memory.add_array("y", y)], memory)
    assert not y[:32].any() and (y[32:] == np.arange(5, 37)).all()
    looks = [runs for line, (runs, _) in result.lines.items() if "ld.relaxed" in result.texts[line]]
    assert looks == [2], "who looks in vain lets all others go first"


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        pytest.param(GIVEN, GIVEN.replace(".relaxed.gpu", ""), "global-memory race", id="weak"),
        pytest.param(GIVEN, GIVEN.replace("gpu", "cta"), "global-memory race", id="for the block"),
        pytest.param("ld.relaxed.gpu", "ld.relaxed.cta", "global-memory race", id="from the block"),
        pytest.param("ld.relaxed.gpu", "ld", "global-memory race", id="weak load"),
        pytest.param("st.relaxed.gpu.global.b32 [%l2], 0", "st.global.b32 [%l2], 0", "global-memory race", id="weak zero"),
        pytest.param("@%p1 bra SECOND", "@%p1 bra END", "endless loop: 256 looks at memory", id="never there"),
    ],
)
def test_words_that_do_not(old: str, new: str, fault: str) -> None:
    with pytest.raises(KernelFault, match=fault):
        run_vector(changed(WORDS, (old, new)), threads=32, grid=2, count=64)


def test_the_last_block_knows_of_all() -> None:
    sums = np.r_[0, 3 * np.arange(64) + 192]
    assert (run_last(LAST) == sums).all()
    assert (run_last(changed(LAST, (COUNT, "atom.add.acq_rel.gpu.global.u32 %r5, [%l2], 1;"))) == sums).all()
    assert (run_chain(CHAIN) == 100 + np.arange(5)).all()


@pytest.mark.parametrize(
    ("old", "new", "check"),
    [
        pytest.param(COUNT, COUNT.replace(WIDE, "", 1), "global-memory race", id="not released"),
        pytest.param(COUNT, COUNT.removesuffix(WIDE), "global-memory race", id="not acquired"),
        pytest.param("bar.sync 0;\nsetp.ne.u32 %p1", "setp.ne.u32 %p1", "global-memory race", id="other warps not waited for"),
        pytest.param("COUNTED:\nbar.sync 0;", "COUNTED:", "shared-memory race", id="other warps not told"),
        pytest.param("add.global", "add.cta.global", "global-memory race", id="of the block alone"),
    ],
)
def test_the_last_block_does_not_know_of_all(old: str, new: str, check: str) -> None:
    with pytest.raises(KernelFault) as caught:
        run_last(changed(LAST, (old, new)))
    assert caught.value.check == check, caught.value


def test_a_chain_of_blocks_with_a_link_missing() -> None:
    """Block 2 reads the flag of block 1 without acquiring."""
    poll = "ld.acquire.gpu.global.b32 %r3, [%l2+124];"
    relaxed = changed(CHAIN, (poll, f"setp.eq.u32 %p4, %r2, 2;\n@%p4 {poll.replace('acquire', 'relaxed')}\n@!%p4 {poll}"))
    with pytest.raises(KernelFault, match=r"reads what thread \(0, 0, 0\) of block \(0, 0, 0\) writes"):
        run_chain(relaxed)


def test_a_cluster_barrier_orders_global_memory() -> None:
    body = """
    ld.param.b64 %l1, [y];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, %ctaid.x;
    mad.lo.s32 %r3, %r2, 32, %r1;
    mul.wide.u32 %l2, %r3, 4;
    add.s64 %l2, %l1, %l2;
    st.global.b32 [%l2], %r3;
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    xor.b32 %r4, %r3, 32;
    mul.wide.u32 %l3, %r4, 4;
    add.s64 %l3, %l1, %l3;
    ld.global.b32 %r5, [%l3];
    st.global.b32 [%l2+512], %r5;
    """
    text = entry(".param .u64 y", body)
    assert (run_vector(text, threads=32, grid=4, cluster=2, count=256)[128:] == np.arange(128) ^ 32).all()
    with pytest.raises(KernelFault, match="reads what thread"):
        run_vector(changed(text, ("%r3, 32;\nmul.wide.u32 %l3", "%r3, 64;\nmul.wide.u32 %l3")), threads=32, grid=4, cluster=2, count=256)
    with pytest.raises(KernelFault, match="reads what thread"):
        run_vector(changed(text, ("cluster.arrive.aligned", "cluster.arrive.relaxed.aligned")), threads=32, grid=4, cluster=2, count=256)


def test_same_values_and_atomics_are_no_conflict() -> None:
    body = """
    ld.param.b64 %l1, [y];
    mov.u32 %r1, %tid.x;
    st.global.b32 [%l1], 7;
    red.global.add.u32 [%l1+4], 1;
    """
    assert run_vector(entry(".param .u64 y", body), threads=64, grid=3)[:2].tolist() == [7, 192]


# ---- ends of tensors, where a warp reaches for several at once


def test_an_access_ends_within_its_tensor() -> None:
    memory, room = Memory(), np.zeros(16, np.int64).view(np.int32)
    x, z = (memory.add_array(name, part) for name, part in (("x", room[:3]), ("z", room[8:16])))
    memory.load(np.array([x, z], np.uint64), 4, 2)
    with pytest.raises(AccessFault, match="8 bytes at") as caught:
        memory.load(np.array([z, x + 8], np.uint64), 4, 2)
    assert (caught.value.check, caught.value.index, caught.value.tensor) == ("out of bounds", 1, "x")


def test_room_behind_the_last_row_of_a_plane_belongs_to_nobody() -> None:
    """Three planes of five rows of ten words, each row and each plane followed by a gap."""
    memory, room = Memory(), np.zeros((3, 10, 25), np.int32)
    at = memory.add_array("x", room[:, :5, :10])
    for plane, row, column in ((0, 4, 9), (2, 4, 9), (1, 0, 0)):
        memory.load(np.array([at + (plane * 250 + row * 25 + column) * 4], np.uint64), 4, 1)
    for plane, row, column in ((0, 7, 0), (0, 5, 0), (1, 4, 10)):
        with pytest.raises(AccessFault, match="4 bytes at"):
            memory.load(np.array([at + (plane * 250 + row * 25 + column) * 4], np.uint64), 4, 1)
