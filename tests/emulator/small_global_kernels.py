"""Small PTX kernels that are right, and whose threads and blocks share global memory."""

from __future__ import annotations

import numpy as np

from ptx_emulator import Memory, run_ptx
from tests.emulator.small_kernels import entry, run_vector

# Three blocks with two values per thread in global memory: its own word of y, [%l4], that of its neighbour in the block, [%l5], and z.
_NEIGHBOURS = """
    ld.param.b64 %l1, [y];
    ld.param.b64 %l2, [z];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, %ctaid.x;
    mad.lo.s32 %r3, %r2, 64, %r1;
    mul.wide.u32 %l3, %r3, 4;
    add.s64 %l4, %l1, %l3;
    xor.b32 %r4, %r3, 32;
    mul.wide.u32 %l5, %r4, 4;
    add.s64 %l5, %l1, %l5;
    FIRST
    bar.sync 0;
    SECOND
    add.s64 %l6, %l2, %l3;
    st.global.b32 [%l6], %r5;
"""


def _neighbours(first: str, second: str) -> str:
    return entry(".param .u64 y, .param .u64 z", _NEIGHBOURS.replace("FIRST", first).replace("SECOND", second))


# Each thread writes its word, and reads its neighbour's; or reads its own, and writes its neighbour's.
SWAP = _neighbours("st.global.b32 [%l4], %r3;", "ld.global.b32 %r5, [%l5];")
OVERWRITE = _neighbours("ld.global.b32 %r5, [%l4];", "st.global.b32 [%l5], %r3;")


def _handover(give: str, poll: str, take: str, taker_first: bool) -> str:
    """Two blocks share the words of y: each thread's is at [%l2] in both. Block 0 gives; block 1 takes, when what it polls is not zero.

    taker_first: its part comes first in the text.
    """
    wait = f"WAIT:\n    {poll}\n    setp.eq.u32 %p2, %r4, 0;\n    @%p2 bra WAIT;\n    {take}"
    first, second = (wait, give) if taker_first else (give, wait)
    return entry(
        ".param .u64 y",
        f"""
    ld.param.b64 %l1, [y];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, %ctaid.x;
    mul.wide.u32 %l2, %r1, 4;
    add.s64 %l2, %l1, %l2;
    setp.eq.u32 %p1, %r2, {0 if taker_first else 1};
    @%p1 bra SECOND;
    {first}
    bra END;
SECOND:
    {second}
END:
    """,
    )


# Words, each with a flag of its own: words, flags, the words as block 1 got them.
HANDOVER = _handover(
    give="add.s32 %r3, %r1, 5;\n    st.global.b32 [%l2], %r3;\n    st.release.gpu.global.b32 [%l2+128], 1;",
    poll="ld.acquire.gpu.global.b32 %r4, [%l2+128];",
    take="ld.global.b32 %r5, [%l2];\n    st.global.b32 [%l2+256], %r5;",
    taker_first=False,
)
# Words that say by themselves that they are there, and are zero again afterwards: words, then what block 1 got.
WORDS = _handover(
    give="add.s32 %r3, %r1, 5;\n    st.relaxed.gpu.global.b32 [%l2], %r3;",
    poll="ld.relaxed.gpu.global.b32 %r4, [%l2];",
    take="st.relaxed.gpu.global.b32 [%l2], 0;\n    st.global.b32 [%l2+128], %r4;",
    taker_first=True,
)

# Each block leaves 64 words in y and counts itself; the last one to do so sums the words of all blocks, and puts the count back.
LAST = entry(
    ".param .u64 y, .param .u64 z",
    """
    ld.param.b64 %l1, [y];
    ld.param.b64 %l2, [z];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, stage;
    mad.lo.s32 %r4, %r2, 64, %r1;
    mul.wide.u32 %l3, %r4, 4;
    add.s64 %l3, %l1, %l3;
    st.global.b32 [%l3], %r4;
    bar.sync 0;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra COUNTED;
    fence.acq_rel.gpu;
    atom.add.global.u32 %r5, [%l2], 1;
    fence.acq_rel.gpu;
    st.shared.b32 [%r3], %r5;
COUNTED:
    bar.sync 0;
    ld.shared.b32 %r5, [%r3];
    mov.u32 %r6, %nctaid.x;
    sub.s32 %r6, %r6, 1;
    setp.ne.u32 %p2, %r5, %r6;
    @%p2 bra END;
    mul.wide.u32 %l4, %r1, 4;
    add.s64 %l4, %l1, %l4;
    mov.u32 %r7, 0;
    mov.u32 %r8, 0;
NEXT:
    ld.global.b32 %r9, [%l4];
    add.s32 %r7, %r7, %r9;
    add.s64 %l4, %l4, 256;
    add.s32 %r8, %r8, 1;
    setp.le.u32 %p3, %r8, %r6;
    @%p3 bra NEXT;
    mul.wide.u32 %l5, %r1, 4;
    add.s64 %l5, %l2, %l5;
    st.global.b32 [%l5+4], %r7;
    @%p1 bra END;
    st.global.b32 [%l2], 0;
END:
    """,
    shared=4,
)

# Thread 0 of each block waits for the block before it, and adds to the word of block 0, of which it knows through those between.
CHAIN = entry(
    ".param .u64 y",
    """
    ld.param.b64 %l1, [y];
    mov.u32 %r1, %tid.x;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra END;
    mov.u32 %r2, %ctaid.x;
    mul.wide.u32 %l2, %r2, 4;
    add.s64 %l2, %l1, %l2;
    mov.u32 %r4, 100;
    setp.eq.u32 %p2, %r2, 0;
    @%p2 bra MINE;
WAIT:
    ld.acquire.gpu.global.b32 %r3, [%l2+124];
    setp.eq.u32 %p3, %r3, 0;
    @%p3 bra WAIT;
    ld.global.b32 %r4, [%l1];
MINE:
    add.s32 %r5, %r4, %r2;
    st.global.b32 [%l2], %r5;
    st.release.gpu.global.b32 [%l2+128], 1;
END:
    """,
)


def run_last(text: str) -> np.ndarray:
    """Run LAST with three blocks; returns the sums, behind the count."""
    memory, y, z = Memory(), np.full(192, -1, np.int32), np.zeros(65, np.int32)
    run_ptx(text, 3, 64, [memory.add_array("y", y), memory.add_array("z", z)], memory)
    return z


def run_chain(text: str) -> np.ndarray:
    """Run CHAIN with five blocks; returns their words."""
    return run_vector(text, threads=32, grid=5, count=96)[:5]


def run_handover(text: str) -> np.ndarray:
    """Run HANDOVER; returns the words as block 1 got them."""
    return run_vector(text, threads=32, grid=2, count=96)[64:]


def run_swap(text: str) -> np.ndarray:
    """Run SWAP or OVERWRITE with three blocks of 64 threads; returns z."""
    memory, y, z = Memory(), np.full(192, -1, np.int32), np.full(192, -1, np.int32)
    run_ptx(text, 3, 64, [memory.add_array("y", y), memory.add_array("z", z)], memory)
    return z
