"""Faults of order that give right results most of the time: proxies, single lanes, mbarriers too early, global memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest

from ptx_emulator import KernelFault, Memory, machine, run_ptx
from tests.emulator.small_global_kernels import HANDOVER, OVERWRITE, SWAP, run_handover, run_swap
from tests.emulator.small_kernels import (
    ARRIVE,
    ASYNC,
    BULK,
    BULK_STORE,
    EXCHANGE,
    LANES,
    RING,
    SEND,
    SIGNAL,
    changed,
    entry,
    run_bulk_store,
    run_copy,
    run_ring,
    run_vector,
)

FENCE = "fence.proxy.async.shared::cta;"
OVER = "    xor.b32 %r5, %r4, 4;\n    st.shared.b32 [%r5], %r1;"  # a neighbour's word
WAIT_SIGNAL = "    mbarrier.try_wait.parity.acquire.cluster.shared.b64 %p2, [%r2], 0;\n    @!%p2 bra WAIT;\n"
NC = ("ld.global.b32 %r5", "ld.global.nc.b32 %r5")
READ = "    ld.shared.b32 %r10, [%r9];\n"
HALVES = """setp.lt.u32 %p5, %r3, 16;
    @%p5 bra LOW;
    bar.warp.sync 0xffff0000;
    bra END;
LOW:
    bar.warp.sync 0xffff;"""
TWICE = """xor.b32 %r4, %r3, 32;
    mul.wide.u32 %l5, %r4, 4;
    add.s64 %l5, %l1, %l5;
    st.global.b32 [%l5], %r3;
    bar.sync 0;"""
ONE_ARRIVES = "    setp.ne.u32 %p5, %r15, 0;\n    @!%p5 mbarrier.arrive.shared.b64 %l5, [%r6+272];"


# ASYNC without the exchange of neighbours: thread 0 stores the words to y in bulk.
ASYNC_BULK = changed(
    ASYNC,
    (
        "cp.async.wait_group 0;\n    bar.sync 0;",
        f"""cp.async.wait_group 0;
    {FENCE}
    bar.sync 0;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 exit;
    cp.async.bulk.global.shared::cta.bulk_group [%l1], [%r2], 256;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
    exit;""",
    ),
)

# EXCHANGE whose second arrival is relaxed, behind a fence.
CLUSTER_FENCE = "fence.acq_rel.cluster;"
FENCED = changed(EXCHANGE, ("barrier.cluster.arrive.aligned;", f"{CLUSTER_FENCE}\n    barrier.cluster.arrive.relaxed.aligned;"))


def one_arrives(sync: str) -> str:
    """RING with one lane that arrives on the empty barrier for its warp."""
    text = changed(RING, ("[%r2+272], 32", "[%r2+272], 1"), ("[%r2+280], 32", "[%r2+280], 1"))
    return changed(text, ("    mbarrier.arrive.shared.b64 %l5, [%r6+272];", sync + ONE_ARRIVES))


def run_lanes(text: str) -> np.ndarray:
    return run_vector(text, threads=64, count=32)


def run_cluster(text: str) -> np.ndarray:
    return run_vector(text, threads=32, grid=4, cluster=2)


def test_right_kernels_pass() -> None:
    swapped = np.arange(192).reshape(-1, 2)[:, ::-1].ravel()
    by_producer = changed(RING, (FENCE, ""), ("FREE:", f"FREE:\n    {FENCE}"))  # anywhere between the reads and the copy
    for text in (RING, by_producer, changed(RING, (FENCE, "fence.proxy.async;")), one_arrives("    bar.warp.sync -1;\n")):
        assert (run_ring(text) == swapped).all()
    assert (run_lanes(LANES) == np.arange(32)).all()
    assert (run_lanes(ARRIVE) == np.arange(32)).all()
    assert (run_bulk_store(BULK_STORE) == np.arange(64)).all()
    for before in ("setp.ne.u32 %p1, %r1, 0;", "cp.async.bulk.global"):  # by all behind the barrier, or by who issues the copy
        late = changed(BULK_STORE, (FENCE, ""), (before, f"{FENCE}\n{before}"))
        assert (run_bulk_store(late) == np.arange(64)).all()
    empty_group = changed(BULK_STORE, ("OUT:", "    cp.async.bulk.commit_group;\nOUT:"))
    assert (run_bulk_store(empty_group) == np.arange(64)).all()
    assert (run_swap(SWAP) == np.arange(192) ^ 32).all()
    assert (run_swap(OVERWRITE) == -1).all()
    assert (run_cluster(SIGNAL)[:128] == np.arange(128)).all()
    again = "mbarrier.inval.shared.b64 [%r2+256];\n    mbarrier.init.shared.b64 [%r2+256], 1;"
    assert (run_ring(changed(RING, ("fence.mbarrier_init", f"{again}\n    fence.mbarrier_init"))) == swapped).all()
    assert (run_cluster(FENCED) == run_cluster(EXCHANGE)).all()
    assert (run_copy(ASYNC_BULK) == np.arange(7, 71)).all()
    twice = "    add.s64 %l4, %l2, 4;\n    cp.async.ca.shared.global [%r4], [%l4], 4;\n    cp.async.commit_group;\n    cp.async.wait_all;"
    assert (run_copy(changed(ASYNC, ("cp.async.wait_group 0;", f"cp.async.wait_group 0;\n{twice}"))) == 8).all()


class Case(NamedTuple):
    """A kernel with a fault: what it is, who runs it, the check that finds it, and a part of the message."""

    what: str
    run: Callable[[str], np.ndarray]
    text: str
    check: str
    part: str = ""


FAULTS = [
    Case("ring: no proxy fence", run_ring, changed(RING, (FENCE, "")), "missing proxy fence", "overwrites what is read by"),
    Case(
        "ring: proxy fence before the read",
        run_ring,
        changed(RING, (READ, f"    {FENCE}\n{READ}"), (READ + f"    {FENCE}", READ)),
        "missing proxy fence",
    ),
    Case("ring: proxy fence of global memory", run_ring, changed(RING, (FENCE, "fence.proxy.async.global;")), "missing proxy fence"),
    Case("ring: fence of another kind", run_ring, changed(RING, (FENCE, "fence.acq_rel.gpu;")), "missing proxy fence"),
    Case(
        "ring: arrival before the read",
        run_ring,
        changed(
            RING,
            (READ, "    mbarrier.arrive.shared.b64 %l5, [%r6+272];\n" + READ),
            (f"{FENCE}\n    mbarrier.arrive.shared.b64 %l5, [%r6+272];", FENCE),
        ),
        "shared-memory race",
        "overwrites what is read by",
    ),
    Case("ring: one lane arrives for its warp", run_ring, one_arrives(""), "shared-memory race", "overwrites what is read by"),
    Case(
        "ring: relaxed arrival",
        run_ring,
        changed(RING, ("mbarrier.arrive.shared.b64 %l5, [%r6+272]", "mbarrier.arrive.relaxed.cta.shared.b64 %l5, [%r6+272]")),
        "shared-memory race",
    ),
    Case(
        "ring: the producer does not wait",
        run_ring,
        changed(RING, ("    @!%p4 bra EMPTY;", "")),
        "mbarrier",
        "arrival count 1 exceeds the 0 arrivals",
    ),
    Case(
        "ring: wrong parity at the empty barrier",
        run_ring,
        changed(RING, ("add.s32 %r8, %r7, -1;", "mov.u32 %r8, %r7;")),
        "mbarrier",
        "arrival count 1 exceeds the 0 arrivals",
    ),
    Case(
        "ring: wrong parity at the full barrier",
        run_ring,
        changed(RING, ("CONSUME:\n    and.b32 %r8, %r7, 1;", "CONSUME:\n    and.b32 %r8, %r7, 1;\n    xor.b32 %r8, %r8, 1;")),
        "uninitialised read",
    ),
    Case(
        "ring: initialisation not fenced",
        run_ring,
        changed(RING, ("fence.mbarrier_init.release.cluster;", "")),
        "mbarrier",
        "without fence.mbarrier_init",
    ),
    Case(
        "ring: no barrier after the initialisation",
        run_ring,
        changed(RING, ("bar.sync 0;", "")),
        "mbarrier",
        "thread (0, 0, 0) of block (0, 0, 0) initialised, without synchronisation",
    ),
    Case(
        "ring: initialised twice",
        run_ring,
        changed(RING, ("fence.mbarrier_init", "mbarrier.init.shared.b64 [%r2+256], 1;\n    fence.mbarrier_init")),
        "mbarrier",
        "initialises one that is live",
    ),
    Case(
        "ring: an mbarrier stored over",
        run_ring,
        changed(RING, ("fence.mbarrier_init", "st.shared.b32 [%r2+260], 0;\n    fence.mbarrier_init")),
        "shared-memory race",
        "overwrites what was written by the initialisation of a live mbarrier",
    ),
    Case(
        "ring: an mbarrier read",
        run_ring,
        changed(RING, ("fence.mbarrier_init", "ld.shared.b32 %r3, [%r2+260];\n    fence.mbarrier_init")),
        "shared-memory race",
        "reads what was written by the initialisation of a live mbarrier",
    ),
    Case(
        "ring: an mbarrier copied over",
        run_ring,
        changed(RING, ("READY:", "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r2+272], [%l2], 16, [%r2+256];\nREADY:")),
        "shared-memory race",
        "a copy overwrites what was written by the initialisation of a live mbarrier",
    ),
    Case(
        "ring: used after its end",
        run_ring,
        changed(RING, ("fence.mbarrier_init", "mbarrier.inval.shared.b64 [%r2+256];\n    fence.mbarrier_init")),
        "mbarrier",
        "holds no initialised mbarrier",
    ),
    Case(
        "lanes: no barrier among the writers",
        run_lanes,
        changed(LANES, ("bar.warp.sync -1;", "")),
        "shared-memory race",
        "reads what was written by thread (1, 0, 0)",
    ),
    Case("lanes: no barrier among the readers", run_lanes, changed(LANES, ("bar.warp.sync 0xffffffff;", "")), "shared-memory race"),
    Case(
        "lanes: barrier of too few writers",
        run_lanes,
        changed(LANES, ("bar.warp.sync -1;", HALVES)),
        "shared-memory race",
        "thread (16, 0, 0)",
    ),
    Case(
        "lanes: no barrier after the initialisation", run_lanes, changed(LANES, ("bar.sync 0;", "")), "mbarrier", "without synchronisation"
    ),
    Case(
        "arrive: written after the arrival",
        run_lanes,
        changed(
            ARRIVE, ("bar.arrive 1, 64;", ""), ("    st.shared.b32 [%r4], %r1;", "    bar.arrive 1, 64;\n    st.shared.b32 [%r4], %r1;")
        ),
        "shared-memory race",
    ),
    Case(
        "arrive: one who only arrives learns nothing",
        run_lanes,
        changed(ARRIVE, ("bar.arrive 1, 64;", "bar.arrive 1, 64;\n    st.shared.b32 [%r4], 5;")),
        "shared-memory race",
    ),
    Case(
        "cp.async: waited for behind the barrier",
        run_copy,
        changed(
            ASYNC, ("cp.async.wait_group 0;", "bar.sync 0;"), ("bar.sync 0;\n    bar.sync 0;", "bar.sync 0;\n    cp.async.wait_group 0;")
        ),
        "shared-memory race",
    ),
    Case(
        "cp.async: stored over before it is waited for",
        run_copy,
        changed(ASYNC, ("cp.async.wait_group 0;", f"bar.sync 0;\n{OVER}\n    bar.sync 0;\n    cp.async.wait_group 0;")),
        "shared-memory race",
        "overwrites what was written by an asynchronous copy",
    ),
    Case(
        "cp.async: stored over by its own thread",
        run_copy,
        changed(ASYNC, ("cp.async.wait_group 0;", "st.shared.b32 [%r4], %r1;\n    cp.async.wait_group 0;")),
        "shared-memory race",
        "overwrites what was written by an asynchronous copy",
    ),
    Case(
        "cp.async: stored over behind a wait for the group before",
        run_copy,
        changed(ASYNC, ("cp.async.wait_group 0;", f"cp.async.wait_group 1;\n    bar.sync 0;\n{OVER}\n    cp.async.wait_group 0;")),
        "shared-memory race",
        "overwrites what was written by an asynchronous copy",
    ),
    Case(
        "cp.async: sent on in bulk without a proxy fence",
        run_copy,
        changed(ASYNC_BULK, (FENCE, "")),
        "missing proxy fence",
        "a copy reads what was written by an asynchronous copy",
    ),
    Case(
        "bulk load: initialisation not fenced",
        run_copy,
        changed(BULK, ("fence.mbarrier_init.release.cluster;", "")),
        "mbarrier",
        "without fence.mbarrier_init",
    ),
    Case(
        "bulk load: into what was just written",
        run_copy,
        changed(BULK, ("mov.u32 %r2, stage;", "mov.u32 %r2, stage;\n    setp.eq.u32 %p2, %r1, 0;\n    @%p2 st.shared.b32 [%r2], %r1;")),
        "missing proxy fence",
        "overwrites what was written by thread (0, 0, 0)",
    ),
    Case(
        "bulk store: no proxy fence",
        run_bulk_store,
        changed(BULK_STORE, (FENCE, "")),
        "missing proxy fence",
        "a copy reads what was written by",
    ),
    Case(
        "bulk store: proxy fence before the store",
        run_bulk_store,
        changed(BULK_STORE, (FENCE, ""), ("    st.shared.b32 [%r3]", f"    {FENCE}\n    st.shared.b32 [%r3]")),
        "missing proxy fence",
    ),
    Case("bulk store: no barrier", run_bulk_store, changed(BULK_STORE, ("bar.sync 0;", "")), "shared-memory race"),
    Case(
        "bulk store: source used again too early",
        run_bulk_store,
        changed(BULK_STORE, ("cp.async.bulk.wait_group.read 0;", "cp.async.bulk.wait_group.read 1;")),
        "shared-memory race",
        "asynchronous copy",
    ),
    Case(
        "bulk store: not waited for",
        run_bulk_store,
        changed(BULK_STORE, ("    cp.async.bulk.wait_group.read 0;\n    st.shared.b32 [%r2], %r1;\n", "")),
        "bulk store not waited for",
    ),
    Case("bulk store: not committed", run_bulk_store, changed(BULK_STORE, ("cp.async.bulk.commit_group;", "")), "shared-memory race"),
    Case(
        "cluster: initialisation not fenced",
        run_cluster,
        changed(SEND, ("fence.mbarrier_init.release.cluster;", "")),
        "mbarrier",
        "thread (0, 0, 0) of block (0, 0, 0) initialised, without synchronisation",
    ),
    Case(
        "cluster: relaxed arrival without a fence",
        run_cluster,
        changed(EXCHANGE, ("barrier.cluster.arrive.aligned;", "barrier.cluster.arrive.relaxed.aligned;")),
        "shared-memory race",
    ),
    Case(
        "cluster: fence before the store",
        run_cluster,
        changed(FENCED, (f"{CLUSTER_FENCE}\n", ""), ("    st.shared::cluster", f"    {CLUSTER_FENCE}\n    st.shared::cluster")),
        "shared-memory race",
        "reads what was written by thread (0, 0, 0) of block (1, 0, 0)",
    ),
    Case(
        "cluster: arrival at a block that may have left",
        run_cluster,
        changed(SIGNAL, (WAIT_SIGNAL, "")),
        "remote shared memory",
        "still uses its shared memory",
    ),
    Case(
        "cluster: arrival at a block that may not have started",
        run_cluster,
        changed(SIGNAL, ("barrier.cluster.arrive.aligned;\n    barrier.cluster.wait.aligned;", "")),
        "remote shared memory",
        "block (0, 0, 0) may not have started",
    ),
    Case(
        "global: handed over by a weak flag",
        run_handover,
        changed(HANDOVER, ("st.release.gpu.global", "st.global"), ("ld.acquire.gpu.global", "ld.global")),
        "global-memory race",
        "reads what thread (0, 0, 0) of block (0, 0, 0) writes",
    ),
    Case(
        "global: a weak flag that is read with acquire",
        run_handover,
        changed(HANDOVER, ("st.release.gpu.global", "st.global")),
        "global-memory race",
        "reads what thread (0, 0, 0) of block (0, 0, 0) writes",
    ),
    Case("global: no barrier in the block", run_swap, changed(SWAP, ("bar.sync 0;", "")), "global-memory race", "reads what thread"),
    Case(
        "global: written over before it is read",
        run_swap,
        changed(OVERWRITE, ("bar.sync 0;", "")),
        "global-memory race",
        "of block (0, 0, 0) has read",
    ),
    Case(
        "global: read by .nc, then written",
        run_swap,
        changed(OVERWRITE, NC),
        "global-memory race",
        "writes what is read by loads that are not coherent",
    ),
    Case(
        "global: written, then read by .nc",
        run_swap,
        changed(SWAP, NC),
        "global-memory race",
        "reads, by a load that is not coherent (.nc), what thread",
    ),
    Case(
        "global: another block's word read",
        run_swap,
        changed(SWAP, ("xor.b32 %r4, %r3, 32;", "xor.b32 %r4, %r3, 64;\n    min.u32 %r4, %r4, 191;")),
        "global-memory race",
        "reads what",
    ),
    Case(
        "global: another block's word written",
        run_swap,
        changed(SWAP, ("mul.wide.u32 %l3, %r3, 4;", "mul.wide.u32 %l3, %r1, 4;")),
        "global-memory race",
        "different values",
    ),
    Case(
        "global: written over what others read",
        run_swap,
        changed(SWAP, ("    st.global.b32 [%l4], %r3;", "    ld.global.b32 %r6, [%l1];\n    st.global.b32 [%l4], %r3;")),
        "global-memory race",
        "another block reads",
    ),
    Case(
        "global: written twice in a block",
        run_swap,
        changed(SWAP, ("bar.sync 0;", TWICE)),
        "global-memory race",
        "writes another value than thread",
    ),
    Case(
        "global: two threads of one instruction",
        run_swap,
        changed(SWAP, ("    add.s64 %l4, %l1, %l3;", "    and.b64 %l7, %l3, -8;\n    add.s64 %l4, %l1, %l7;")),
        "global-memory race",
        "different values",
    ),
]


@pytest.mark.parametrize("case", [pytest.param(c, id=c.what) for c in FAULTS])
def test_fault_of_order_is_named(case: Case) -> None:
    with pytest.raises(KernelFault) as caught:
        case.run(case.text)
    assert caught.value.check == case.check, caught.value
    assert case.part in str(caught.value)


def test_lanes_meet_those_who_name_the_same_lanes() -> None:
    """Half a warp among itself, then the whole: the second half waits until the first half names it, too."""
    body = """
    ld.param.b64 %l1, [y];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, FIRST;
    setp.ge.u32 %p1, %r1, 16;
    selp.b32 %r3, -1, %r2, %p1;
AGAIN:
    shfl.sync.bfly.b32 %r4, %r1, 16, 31, %r3;
    setp.eq.u32 %p2, %r3, -1;
    mov.u32 %r3, -1;
    @!%p2 bra AGAIN;
    mul.wide.u32 %l2, %r1, 4;
    add.s64 %l2, %l1, %l2;
    st.global.b32 [%l2], %r4;
    """
    text = entry(
        ".param .u64 y", body.replace("bfly.b32 %r4, %r1, 16", "idx.b32 %r4, %r1, %r5").replace("AGAIN:", "xor.b32 %r5, %r1, 1;\nAGAIN:")
    )
    assert (run_vector(text.replace("FIRST", "0xffff"), threads=32, count=32) == np.arange(32) ^ 1).all()
    with pytest.raises(KernelFault, match="divergent barrier"):
        run_vector(text.replace("FIRST", "0x1ffff"), threads=32, count=32)


def test_a_block_waits_for_the_copies_into_its_memory() -> None:
    text = changed(BULK, ("AGAIN:", "AGAIN:\n    ret;"))
    with pytest.raises(KernelFault, match="bulk copy not waited for"):
        run_copy(text)


@pytest.mark.parametrize("grid", [1, 3])
def test_a_wait_for_one_copy_is_none_for_the_next(grid: int) -> None:
    """Copies into one block land one after another, however many blocks run side by side."""
    start = (
        "mbarrier.arrive.expect_tx.shared.b64 %l5, [%r3{0}], {1};\n"
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2{2}], [%l2{2}], {1}, [%r3{0}];"
    )
    halves = start.format("", 128, "") + "\n" + start.format("+8", 128, "+128")
    made = "mbarrier.init.shared.b64 [%r3], 1;"
    early = changed(BULK, (start.format("", 256, ""), halves), (made, made + "\n" + made.replace("%r3", "%r3+8")))
    right = changed(early, ("OUT:", "OUT:\nSECOND:\nmbarrier.try_wait.parity.shared.b64 done, [%r3+8], 0;\n@!done bra SECOND;"))
    assert (run_copy(right, grid=grid) == np.arange(7, 71)).all()
    with pytest.raises(KernelFault, match="uninitialised read"):
        run_copy(early, grid=grid)


def test_a_loop_without_end_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_LOOP_LIMIT", 1000)
    body = """
    ld.param.b64 %l1, [y];
AGAIN:
    ld.global.b32 %r1, [%l1];
    setp.eq.u32 %p1, %r1, 0;
    @%p1 bra AGAIN;
    """
    with pytest.raises(KernelFault, match="endless loop"):
        run_vector(entry(".param .u64 y", body))


def test_local_memory_has_a_lower_end() -> None:
    body = """
    .local .align 16 .b8 depot[16];
    ld.param.b64 %l1, [y];
    mov.u32 %r1, %tid.x;
    mov.u64 %l2, depot;
    st.local.b32 [%l2+OFFSET], %r1;
    """
    run_vector(entry(".param .u64 y", body.replace("OFFSET", "12")))
    with pytest.raises(KernelFault, match="out of bounds"):
        run_vector(entry(".param .u64 y", body.replace("OFFSET", "-4")))


def test_a_lane_may_pass_on_its_own_accesses_alone() -> None:
    """A lane's own words need no warp barrier, nor do those of a half warp whose lanes all arrive; those of other lanes do."""
    body = """
    ld.param.b64 %l1, [y];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, stage;
    and.b32 %r3, %r1, 31;
    shl.b32 %r4, %r3, 2;
    add.s32 %r4, %r2, %r4;
    setp.ne.u32 %p2, %r1, 0;
    @%p2 bra READY;
    mbarrier.init.shared.b64 [%r2+128], 16;
READY:
    bar.sync 0;
    setp.ge.u32 %p1, %r3, 16;
    setp.ge.u32 %p3, %r1, 32;
    @%p3 bra READ;
    st.shared.b32 [%r4], %r1;
    @%p1 bra END;
    mbarrier.arrive.shared.b64 %l5, [%r2+128];
    bra END;
READ:
    mbarrier.try_wait.parity.shared.b64 %p4, [%r2+128], 0;
    @!%p4 bra READ;
    @%p1 bra END;
    ld.shared.b32 %r6, [%r4];
    mul.wide.u32 %l2, %r3, 4;
    add.s64 %l2, %l1, %l2;
    st.global.b32 [%l2], %r6;
END:
    """
    text = entry(".param .u64 y", body, shared=136)
    assert (run_vector(text, threads=64, count=16) == np.arange(16)).all()
    with pytest.raises(KernelFault, match="reads what was written by thread"):
        run_vector(text.replace("ld.shared.b32 %r6, [%r4]", "ld.shared.b32 %r6, [%r4+64]"), threads=64, count=16)


def test_checks_can_be_switched_off() -> None:
    memory, y = Memory(), np.zeros(192, np.int32)
    z = memory.add_array("z", np.zeros(192, np.int32))
    run_ptx(changed(SWAP, ("bar.sync 0;", "")), 3, 64, [memory.add_array("y", y), z], memory, check_races=False)
    assert (y == np.arange(192)).all()
