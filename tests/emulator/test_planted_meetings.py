"""Faults where threads meet, each found by a single check: barriers, cluster barriers, members of a warp, threads that leave.

Right kernels stand here, too, which a barrier that counts wrongly would hold up.
"""

from __future__ import annotations

import numpy as np
import pytest

from ptx_emulator import LaunchError
from tests.emulator.small_kernels import EXCHANGE, changed, entry, fault_of, run_vector

HEAD = """
    ld.param.b64 %l1, [y];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r9, %ntid.x;
    mad.lo.s32 %r3, %r2, %r9, %r1;
    mul.wide.u32 %l2, %r3, 4;
    add.s64 %l2, %l1, %l2;
    shr.u32 %r4, %r1, 5;
    setp.eq.u32 %p1, %r4, 0;
    setp.eq.u32 %p2, %r4, 1;
    setp.eq.u32 %p3, %r4, 2;
"""


def kernel(body: str) -> str:
    return entry(".param .u64 y", HEAD + body, shared=16)


# ---- barriers of a block


def test_a_barrier_forgets_who_met_there_before() -> None:
    """Warp 0 writes and meets warp 1 at a barrier, where then warps 1 and 2 meet: warp 2 knows of the word if warp 1 does."""
    body = """
    setp.eq.u32 %p4, %r1, 0;
    @%p4 st.shared.b32 [stage], 7;
    @%p1 bar.arrive 1, 64;
    @%p2 bar.sync 1, 64;
    @%p2 bar.arrive 1, 64;
    @%p3 bar.sync 1, 64;
    @%p3 ld.shared.b32 %r5, [stage];
    """
    right = kernel(body)
    run_vector(right, threads=96)
    fault = fault_of(changed(right, ("@%p2 bar.sync", "@%p2 bar.arrive")), threads=96)
    assert fault.check == "shared-memory race" and "reads what was written by thread (0, 0, 0)" in str(fault)


def test_more_threads_than_a_barrier_expects() -> None:
    fault = fault_of(kernel("bar.sync 1, 32;"))
    assert fault.check == "barrier mismatch" and "more threads arrive at barrier 1 than the 32 it expects" in str(fault)


@pytest.mark.parametrize("number", [15, 16])
def test_numbers_of_barriers(number: int) -> None:
    text = kernel(f"mov.u32 %r5, {number};\nbar.sync %r5;")
    if number < 16:
        run_vector(text)
    else:
        assert "barrier 16; there are 16" in str(fault_of(text))


def test_a_reduction_is_of_those_who_meet() -> None:
    """Two of three warps; in one of three blocks all agree, in one somebody does not, in one nobody does."""
    body = """
    @%p3 bra END;
    setp.eq.u32 %p4, %r2, 0;
    setp.eq.u32 %p5, %r2, 1;
    setp.ne.u32 %p6, %r1, 40;
    and.pred %p5, %p5, %p6;
    or.pred %p4, %p4, %p5;
    barrier.red.and.pred %p7, 1, 64, %p4;
    barrier.red.or.pred %p8, 1, 64, %p4;
    barrier.red.popc.u32 %r5, 1, 64, %p4;
    selp.u32 %r6, 1000, 0, %p7;
    selp.u32 %r7, 100, 0, %p8;
    add.s32 %r5, %r5, %r6;
    add.s32 %r5, %r5, %r7;
    st.global.b32 [%l2], %r5;
END:
    """
    y = run_vector(kernel(body), threads=96, grid=3).reshape(3, 96)
    assert (y[:, :64] == np.array([[1164], [163], [0]])).all() and not y[:, 64:].any()


@pytest.mark.parametrize("barrier", ["bar.sync 0;", "barrier.cluster.arrive;\nbarrier.cluster.wait;"], ids=["block", "cluster"])
def test_nobody_waits_for_those_who_have_left(barrier: str) -> None:
    """Warp 0 waits while warp 1 has yet to leave."""
    text = kernel(f"@!%p1 bra END;\n{barrier}\nst.global.b32 [%l2], 5;\nEND:")
    y = run_vector(text, grid=2, cluster=2).reshape(2, 2, 32)
    assert (y[:, 0] == 5).all() and not y[:, 1].any()


def test_clusters_count_their_own_phases() -> None:
    """The first cluster meets twice before the second one does once."""
    meet = "barrier.cluster.arrive;\nbarrier.cluster.wait;\n"
    text = changed(
        EXCHANGE,
        (
            "barrier.cluster.arrive.relaxed.aligned;",
            f"setp.ge.u32 %p1, %r3, 2;\n@%p1 bra LATE;\n{meet}{meet}LATE:\nbarrier.cluster.arrive.relaxed;",
        ),
    )
    assert (run_vector(text, threads=32, grid=4, cluster=2) == run_vector(EXCHANGE, threads=32, grid=4, cluster=2)).all()


# ---- members of a warp

HALVES = """
    setp.lt.u32 %p4, %r1, 16;
    selp.b32 %r5, 0xffff, 0xffff0000, %p4;
    and.b32 %r6, %r1, 3;
    setp.eq.u32 %p5, %r6, 1;
"""


@pytest.mark.parametrize(
    ("instruction", "low", "high"),
    [
        ("redux.sync.add.u32 %r7, %r1, %r5;", sum(range(16)), sum(range(16, 32))),
        ("redux.sync.max.u32 %r7, %r1, %r5;", 15, 31),
        ("vote.sync.ballot.b32 %r7, %p5, %r5;", 0x2222, 0x22220000),
        ("vote.sync.all.pred %p6, %p4, %r5;\nselp.u32 %r7, 1, 0, %p6;", 1, 0),
        ("vote.sync.any.pred %p6, %p4, %r5;\nselp.u32 %r7, 1, 0, %p6;", 1, 0),
        ("vote.sync.uni.pred %p6, %p4, %r5;\nselp.u32 %r7, 1, 0, %p6;", 1, 1),
        ("match.any.sync.b32 %r7, 3, %r5;", 0xFFFF, 0xFFFF0000),
        ("match.all.sync.b32 %r7|%p6, %r2, %r5;", 0xFFFF, 0xFFFF0000),
        ("elect.sync %r7|%p6, %r5;", 0, 16),
        ("shfl.sync.bfly.b32 %r7, %r5, 8, 31, %r5;", 0xFFFF, 0xFFFF0000),
    ],
    ids=["add", "max", "ballot", "all", "any", "uni", "match any", "match all", "elect", "shuffle"],
)
def test_halves_of_a_warp_are_told_apart_by_their_masks(instruction: str, low: int, high: int) -> None:
    """Both halves come to the instruction together, each with the mask of its own lanes."""
    y = run_vector(kernel(f"{HALVES}{instruction}\nst.global.b32 [%l2], %r7;"), threads=32).view(np.uint32)
    assert (y[:16] == low).all() and (y[16:] == high).all()


def test_a_shuffle_from_a_lane_that_another_mask_names() -> None:
    fault = fault_of(kernel(f"{HALVES}shfl.sync.bfly.b32 %r7, %r1, 16, 31, %r5;"), threads=32)
    assert fault.check == "inactive lane" and "reads from lane 16" in str(fault)


# ---- leaving, and launches


def test_a_block_that_leaves_beside_one_that_has_waited() -> None:
    """Block 1 goes around the wait; all blocks leave together."""
    text = kernel("setp.eq.u32 %p4, %r2, 1;\n@%p4 bra END;\ngriddepcontrol.wait;\nEND:")
    run_vector(text, grid=1, pdl=True)
    fault = fault_of(text, grid=3, pdl=True)
    assert fault.check == "missing griddepcontrol.wait" and fault.block == (1, 0, 0)


def test_a_launch_with_another_cluster_than_the_kernel_requires() -> None:
    text = EXCHANGE.replace("k(.param .u64 y)", "k(.param .u64 y)\n.reqnctapercluster 2")
    run_vector(text, threads=32, grid=4, cluster=2)
    with pytest.raises(LaunchError, match=r"cluster \(4, 1, 1\), but the kernel requires \(2, 1, 1\)"):
        run_vector(text, threads=32, grid=4, cluster=4)
