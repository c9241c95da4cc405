"""Small PTX kernels that are right, for the tests that plant faults in them."""

from __future__ import annotations

import textwrap
from typing import Any

import numpy as np
import pytest

from ptx_emulator import FOREIGN, UNWRITTEN, KernelFault, Memory, Result, run_ptx

HEADER = """
.version 9.0
.target sm_100a
.address_size 64
"""
REGISTERS = """
    .reg .pred %p<9>;
    .reg .b32 %r<30>;
    .reg .b64 %l<30>;
"""


def entry(parameters: str, body: str, shared: int = 0) -> str:
    """A kernel `k` with `shared` bytes of shared memory named `stage`."""
    stage = f".shared .align 16 .b8 stage[{shared}];" if shared else ""
    code = textwrap.indent(textwrap.dedent(body), "    ")
    return f"{HEADER}.visible .entry k({parameters})\n{{{REGISTERS}    {stage}\n{code}    ret;\n}}\n"


# Reverses each row of x [rows, n] into y [rows, n] through shared memory. One block a row, 64 threads, n <= 64; launched with PDL.
REVERSE = entry(
    ".param .u64 x, .param .u64 y, .param .u32 n, .param .u32 pitch, .param .u32 rows",
    """
    griddepcontrol.wait;
    ld.param.b64 %l1, [x];
    ld.param.b64 %l2, [y];
    ld.param.b32 %r1, [n];
    ld.param.b32 %r2, [pitch];
    mov.u32 %r3, %tid.x;
    mov.u32 %r4, %ctaid.x;
    mul.wide.s32 %l3, %r4, %r2;
    shl.b64 %l3, %l3, 2;
    mul.wide.s32 %l4, %r3, 4;
    add.s64 %l5, %l1, %l3;
    add.s64 %l5, %l5, %l4;
    add.s64 %l6, %l2, %l3;
    add.s64 %l6, %l6, %l4;
    mov.u32 %r5, stage;
    shl.b32 %r6, %r3, 2;
    add.s32 %r6, %r5, %r6;
    setp.ge.s32 %p1, %r3, %r1;
    @%p1 bra LOADED;
    ld.global.b32 %r7, [%l5];
    st.shared.b32 [%r6], %r7;
LOADED:
    bar.sync 0;
    setp.ge.s32 %p2, %r3, %r1;
    @%p2 bra DONE;
    sub.s32 %r8, %r1, %r3;
    add.s32 %r8, %r8, -1;
    shl.b32 %r9, %r8, 2;
    add.s32 %r9, %r5, %r9;
    ld.shared.b32 %r10, [%r9];
    st.global.b32 [%l6], %r10;
DONE:
    griddepcontrol.launch_dependents;
    """,
    shared=256,
)


def run_reverse(
    text: str, *, rows: int = 3, n: int = 50, pitch: int = 50, owned: int | None = None, **options: Any
) -> tuple[np.ndarray, Result]:
    """Run REVERSE or a mutation; `owned` columns of y may be written (all by default). Returns y and the result."""
    memory = Memory()
    x = np.arange(rows * n, dtype=np.int32).reshape(rows, n)
    y = np.zeros((rows, n), np.int32)
    at_x = memory.add_array("x", x, writable=False)
    at_y = memory.add_array("y", y)
    memory.find("y").mark(UNWRITTEN, True)
    if owned is not None:
        mask = np.zeros((rows, n, 4), bool)
        mask[:, owned:] = True
        memory.find("y").mark(FOREIGN, True, mask.ravel())
    options.setdefault("pdl", True)
    result = run_ptx(text, rows, 64, [at_x, at_y, n, pitch, rows], memory, **options)
    return y, result


# Sums 64 values per round over several rounds: a shared buffer that is used again, so it needs both barriers.
ROUNDS = entry(
    ".param .u64 y, .param .u32 rounds",
    """
    ld.param.b64 %l1, [y];
    ld.param.b32 %r1, [rounds];
    mov.u32 %r2, %tid.x;
    mov.u32 %r3, stage;
    shl.b32 %r4, %r2, 2;
    add.s32 %r4, %r3, %r4;
    xor.b32 %r5, %r2, 63;
    shl.b32 %r5, %r5, 2;
    add.s32 %r5, %r3, %r5;
    mov.u32 %r6, 0;
    mov.u32 %r7, 0;
LOOP:
    add.s32 %r8, %r2, %r7;
    st.shared.b32 [%r4], %r8;
    bar.sync 0;
    ld.shared.b32 %r9, [%r5];
    add.s32 %r6, %r6, %r9;
    barrier.sync 0;
    add.s32 %r7, %r7, 1;
    setp.lt.s32 %p1, %r7, %r1;
    @%p1 bra LOOP;
    mul.wide.u32 %l2, %r2, 4;
    add.s64 %l2, %l1, %l2;
    st.global.b32 [%l2], %r6;
    """,
    shared=256,
)


def changed(text: str, *pairs: tuple[str, str]) -> str:
    """`text` with each (old, new) replaced once, all without their indentation."""
    text = flat(text)
    for old, new in pairs:
        assert flat(old) in text, old
        text = text.replace(flat(old), flat(new), 1)
    return text


def flat(text: str) -> str:
    return "\n".join(line.strip() for line in text.split("\n"))


def fault_of(text: str, **options: Any) -> KernelFault:
    """The fault of a kernel that `run_vector` runs."""
    with pytest.raises(KernelFault) as caught:
        run_vector(text, **options)
    return caught.value


def aligned(count: int) -> np.ndarray:
    """`count` int32 zeros at an address that bulk copies take: a multiple of 16."""
    room = np.zeros(count + 3, np.int32)
    return room[-room.ctypes.data % 16 // 4 :][:count]


def run_vector(
    text: str, *, threads: int = 64, grid: int = 1, count: int | None = None, parameters: tuple[int, ...] = (), **options: Any
) -> np.ndarray:
    """Run a kernel of parameters (y, *parameters) over int32 y; returns it."""
    memory = Memory()
    y = np.zeros(count or threads * grid, np.int32)
    run_ptx(text, grid, threads, [memory.add_array("y", y), *parameters], memory, **options)
    return y


# Blocks of a cluster of 2 exchange a value through distributed shared memory.
EXCHANGE = entry(
    ".param .u64 y",
    """
    ld.param.b64 %l1, [y];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, %cluster_ctarank;
    mov.u32 %r3, %ctaid.x;
    mov.u32 %r4, stage;
    shl.b32 %r5, %r1, 2;
    add.s32 %r5, %r4, %r5;
    xor.b32 %r6, %r2, 1;
    mad.lo.s32 %r7, %r3, 100, %r1;
    barrier.cluster.arrive.relaxed.aligned;
    barrier.cluster.wait.aligned;
    mapa.shared::cluster.u32 %r8, %r5, %r6;
    st.shared::cluster.b32 [%r8], %r7;
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    ld.shared.b32 %r9, [%r5];
    mul.lo.s32 %r10, %r3, 32;
    add.s32 %r10, %r10, %r1;
    mul.wide.u32 %l2, %r10, 4;
    add.s64 %l2, %l1, %l2;
    st.global.b32 [%l2], %r9;
    """,
    shared=128,
)

# The same by asynchronous stores, counted by an mbarrier of the block that receives them, which therefore may leave at once.
SEND = entry(
    ".param .u64 y",
    """
    ld.param.b64 %l1, [y];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, %cluster_ctarank;
    mov.u32 %r3, %ctaid.x;
    mov.u32 %r4, stage;
    shl.b32 %r5, %r1, 2;
    add.s32 %r5, %r4, %r5;
    add.s32 %r11, %r4, 128;
    xor.b32 %r6, %r2, 1;
    mad.lo.s32 %r7, %r3, 100, %r1;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra READY;
    mbarrier.init.shared.b64 [%r11], 1;
    fence.mbarrier_init.release.cluster;
READY:
    barrier.cluster.arrive.relaxed;
    barrier.cluster.wait;
    @%p1 bra EXPECTED;
    mbarrier.arrive.expect_tx.shared.b64 %l5, [%r11], 128;
EXPECTED:
    mapa.shared::cluster.u32 %r8, %r5, %r6;
    mapa.shared::cluster.u32 %r12, %r11, %r6;
    st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r8], %r7, [%r12];
    {
    .reg .pred done;
AGAIN:
    mbarrier.try_wait.parity.shared.b64 done, [%r11], 0;
    @done bra OUT;
    bra AGAIN;
OUT:
    }
    ld.shared.b32 %r9, [%r5];
    mul.lo.s32 %r10, %r3, 32;
    add.s32 %r10, %r10, %r1;
    mul.wide.u32 %l2, %r10, 4;
    add.s64 %l2, %l1, %l2;
    st.global.b32 [%l2], %r9;
    """,
    shared=136,
)

# The same by reading the other block's memory: nobody may leave before the other has read.
FETCH = entry(
    ".param .u64 y",
    """
    ld.param.b64 %l1, [y];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, %cluster_ctarank;
    mov.u32 %r3, %ctaid.x;
    mov.u32 %r4, stage;
    shl.b32 %r5, %r1, 2;
    add.s32 %r5, %r4, %r5;
    mad.lo.s32 %r7, %r3, 100, %r1;
    st.shared.b32 [%r5], %r7;
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    xor.b32 %r6, %r2, 1;
    mapa.shared::cluster.u32 %r8, %r5, %r6;
    ld.shared::cluster.b32 %r9, [%r8];
    mul.lo.s32 %r10, %r3, 32;
    add.s32 %r10, %r10, %r1;
    mul.wide.u32 %l2, %r10, 4;
    add.s64 %l2, %l1, %l2;
    st.global.b32 [%l2], %r9;
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    """,
    shared=128,
)

# One thread copies 256 bytes of x into shared memory in bulk; all wait on the mbarrier and copy them to y.
BULK = entry(
    ".param .u64 y, .param .u64 x",
    """
    ld.param.b64 %l1, [y];
    ld.param.b64 %l2, [x];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, stage;
    add.s32 %r3, %r2, 256;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra READY;
    mbarrier.init.shared.b64 [%r3], 1;
    fence.mbarrier_init.release.cluster;
READY:
    bar.sync 0;
    @%p1 bra WAIT;
    mbarrier.arrive.expect_tx.shared.b64 %l5, [%r3], 256;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%l2], 256, [%r3];
WAIT:
    {
    .reg .pred done;
AGAIN:
    mbarrier.try_wait.parity.shared.b64 done, [%r3], 0;
    @done bra OUT;
    bra AGAIN;
OUT:
    }
    shl.b32 %r4, %r1, 2;
    add.s32 %r5, %r2, %r4;
    ld.shared.b32 %r6, [%r5];
    mul.wide.u32 %l3, %r1, 4;
    add.s64 %l3, %l1, %l3;
    st.global.b32 [%l3], %r6;
    """,
    shared=272,
)

# Four bytes per thread by cp.async, then read by the neighbour.
ASYNC = entry(
    ".param .u64 y, .param .u64 x",
    """
    ld.param.b64 %l1, [y];
    ld.param.b64 %l2, [x];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, stage;
    shl.b32 %r3, %r1, 2;
    add.s32 %r4, %r2, %r3;
    mul.wide.u32 %l3, %r1, 4;
    add.s64 %l4, %l2, %l3;
    cp.async.ca.shared.global [%r4], [%l4], 4;
    cp.async.commit_group;
    cp.async.wait_group 0;
    bar.sync 0;
    xor.b32 %r5, %r3, 4;
    add.s32 %r5, %r2, %r5;
    ld.shared.b32 %r6, [%r5];
    add.s64 %l5, %l1, %l3;
    st.global.b32 [%l5], %r6;
    """,
    shared=256,
)


def run_copy(text: str, *, grid: int = 1) -> np.ndarray:
    """Run BULK or ASYNC on x = 7, 8, ..., 70, in every block the same; returns y."""
    memory, x, y = Memory(), aligned(64), aligned(64)
    x[:] = np.arange(7, 71)
    parameters = [memory.add_array("y", y), memory.add_array("x", x, writable=False)]
    run_ptx(text, grid, 64, parameters, memory)
    return y


# A ring of two stages: thread 0 copies six pieces of 128 bytes of x in bulk, warp 1 exchanges neighbours and writes them to y.
RING = entry(
    ".param .u64 y, .param .u64 x",
    """
    ld.param.b64 %l1, [y];
    ld.param.b64 %l2, [x];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, stage;
    and.b32 %r15, %r1, 31;
    mov.u32 %r3, 0;
    setp.ge.u32 %p2, %r1, 32;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra READY;
    mbarrier.init.shared.b64 [%r2+256], 1;
    mbarrier.init.shared.b64 [%r2+264], 1;
    mbarrier.init.shared.b64 [%r2+272], 32;
    mbarrier.init.shared.b64 [%r2+280], 32;
    fence.mbarrier_init.release.cluster;
READY:
    bar.sync 0;
STAGE:
    and.b32 %r4, %r3, 1;
    shl.b32 %r5, %r4, 7;
    add.s32 %r5, %r2, %r5;
    shl.b32 %r6, %r4, 3;
    add.s32 %r6, %r2, %r6;
    shr.u32 %r7, %r3, 1;
    @%p2 bra CONSUME;
    setp.eq.u32 %p3, %r7, 0;
    @%p3 bra FREE;
    add.s32 %r8, %r7, -1;
    and.b32 %r8, %r8, 1;
EMPTY:
    mbarrier.try_wait.parity.shared.b64 %p4, [%r6+272], %r8;
    @!%p4 bra EMPTY;
FREE:
    @%p1 bra NEXT;
    mbarrier.arrive.expect_tx.shared.b64 %l5, [%r6+256], 128;
    mul.wide.u32 %l3, %r3, 128;
    add.s64 %l3, %l2, %l3;
    cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r5], [%l3], 128, [%r6+256];
    bra NEXT;
CONSUME:
    and.b32 %r8, %r7, 1;
FULL:
    mbarrier.try_wait.parity.shared.b64 %p4, [%r6+256], %r8;
    @!%p4 bra FULL;
    xor.b32 %r9, %r15, 1;
    shl.b32 %r9, %r9, 2;
    add.s32 %r9, %r5, %r9;
    ld.shared.b32 %r10, [%r9];
    fence.proxy.async.shared::cta;
    mbarrier.arrive.shared.b64 %l5, [%r6+272];
    mad.lo.s32 %r11, %r3, 32, %r15;
    mul.wide.u32 %l3, %r11, 4;
    add.s64 %l3, %l1, %l3;
    st.global.b32 [%l3], %r10;
NEXT:
    add.s32 %r3, %r3, 1;
    setp.lt.u32 %p3, %r3, 6;
    @%p3 bra STAGE;
    """,
    shared=288,
)

# The lanes of warp 0 each write a word; one of them arrives on an mbarrier. One lane of warp 1 waits for it, then all read the words.
LANES = entry(
    ".param .u64 y",
    """
    ld.param.b64 %l1, [y];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, stage;
    and.b32 %r3, %r1, 31;
    setp.ne.u32 %p1, %r3, 0;
    shl.b32 %r4, %r3, 2;
    add.s32 %r4, %r2, %r4;
    add.s32 %r5, %r2, 128;
    setp.ne.u32 %p2, %r1, 0;
    @%p2 bra READY;
    mbarrier.init.shared.b64 [%r5], 1;
READY:
    bar.sync 0;
    setp.ge.u32 %p3, %r1, 32;
    @%p3 bra READ;
    st.shared.b32 [%r4], %r1;
    bar.warp.sync -1;
    @%p1 bra END;
    mbarrier.arrive.shared.b64 %l5, [%r5];
    bra END;
READ:
    @%p1 bra KNOWN;
WAIT:
    mbarrier.try_wait.parity.shared.b64 %p4, [%r5], 0;
    @!%p4 bra WAIT;
KNOWN:
    bar.warp.sync 0xffffffff;
    ld.shared.b32 %r6, [%r4];
    mul.wide.u32 %l2, %r3, 4;
    add.s64 %l2, %l1, %l2;
    st.global.b32 [%l2], %r6;
END:
    """,
    shared=136,
)

# Warp 0 writes words and only arrives at a named barrier, warp 1 waits there and reads them.
ARRIVE = entry(
    ".param .u64 y",
    """
    ld.param.b64 %l1, [y];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, stage;
    and.b32 %r3, %r1, 31;
    shl.b32 %r4, %r3, 2;
    add.s32 %r4, %r2, %r4;
    setp.ge.u32 %p3, %r1, 32;
    @%p3 bra READ;
    st.shared.b32 [%r4], %r1;
    bar.arrive 1, 64;
    bra END;
READ:
    bar.sync 1, 64;
    ld.shared.b32 %r6, [%r4];
    mul.wide.u32 %l2, %r3, 4;
    add.s64 %l2, %l1, %l2;
    st.global.b32 [%l2], %r6;
END:
    """,
    shared=128,
)

# 64 words collected in shared memory and stored to y in bulk by thread 0, which then uses the room again.
BULK_STORE = entry(
    ".param .u64 y",
    """
    ld.param.b64 %l1, [y];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, stage;
    shl.b32 %r3, %r1, 2;
    add.s32 %r3, %r2, %r3;
    st.shared.b32 [%r3], %r1;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra OUT;
    cp.async.bulk.global.shared::cta.bulk_group [%l1], [%r2], 256;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group.read 0;
    st.shared.b32 [%r2], %r1;
OUT:
    """,
    shared=256,
)

# The threads of each block arrive at an mbarrier of the other block of their cluster, and wait at their own.
SIGNAL = entry(
    ".param .u64 y",
    """
    ld.param.b64 %l1, [y];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, stage;
    mov.u32 %r3, %cluster_ctarank;
    xor.b32 %r3, %r3, 1;
    mapa.shared::cluster.u32 %r4, %r2, %r3;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra READY;
    mbarrier.init.shared.b64 [%r2], 32;
    fence.mbarrier_init.release.cluster;
READY:
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r4];
WAIT:
    mbarrier.try_wait.parity.acquire.cluster.shared.b64 %p2, [%r2], 0;
    @!%p2 bra WAIT;
    mov.u32 %r5, %ctaid.x;
    mad.lo.s32 %r5, %r5, 32, %r1;
    mul.wide.u32 %l2, %r5, 4;
    add.s64 %l2, %l1, %l2;
    st.global.b32 [%l2], %r5;
    """,
    shared=8,
)


def run_ring(text: str) -> np.ndarray:
    """Run RING on x = 0, 1, ..., 191; returns y."""
    memory, x, y = Memory(), aligned(192), np.zeros(192, np.int32)
    x[:] = np.arange(192)
    parameters = [memory.add_array("y", y), memory.add_array("x", x, writable=False)]
    run_ptx(text, 1, 64, parameters, memory)
    return y


def run_bulk_store(text: str) -> np.ndarray:
    """Run BULK_STORE; returns y."""
    memory, y = Memory(), aligned(64)
    run_ptx(text, 1, 64, [memory.add_array("y", y)], memory)
    return y
