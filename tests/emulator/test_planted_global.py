"""Faults in global memory that a single check finds: elements of a vector, several readers, batches of blocks, ends of tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ptx_emulator import KernelFault, Memory
from ptx_emulator.memory import AccessFault
from tests.emulator.small_kernels import entry, run_vector
from tests.emulator.test_planted_orders import changed

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


def fault_of(text: str, **options: Any) -> KernelFault:
    with pytest.raises(KernelFault) as caught:
        run_vector(text, **options)
    assert caught.value.check == "global-memory race"
    return caught.value


def test_any_element_of_a_vector_may_differ() -> None:
    """Two threads write two words to one place, of which the first differs: with one instruction, and with two."""
    both = kernel("st.global.v2.b32 [%l1], {%r2, 7};")
    single = kernel("@%p1 st.global.v2.b32 [%l1], {3, 7};\nbar.sync 0;\n@%p3 st.global.v2.b32 [%l1], {4, 7};")
    run_vector(both)
    run_vector(single)
    assert "two threads write different values" in str(fault_of(changed(both, ("{%r2, 7}", "{%r1, 7}"))))
    assert "writes another value than thread (0, 0, 0)" in str(fault_of(changed(single, ("bar.sync 0;", ""))))


@pytest.mark.parametrize(
    "read",
    ["@%p1 ld.global.b32 %r3, [%l1];", "@%p4 ld.global.b32 %r3, [%l1];\n@%p5 ld.global.b32 %r3, [%l1];"],
    ids=["together", "in turn"],
)
def test_a_place_that_two_blocks_have_read(read: str) -> None:
    """Thread 0 of both blocks reads it, together or one after the other; that of block 1 then writes it."""
    run_vector(changed(kernel(f"{read}\n@%p5 st.global.b32 [%l1], 5;"), ("[%l1], 5", "[%l1+4], 5")), threads=32, grid=2)
    assert "another block reads" in str(fault_of(kernel(f"{read}\n@%p5 st.global.b32 [%l1], 5;"), threads=32, grid=2))


def test_threads_are_numbered_through_all_batches_of_blocks() -> None:
    """The first block of the second batch writes where that of the first one has written."""
    body = """
    and.b32 %r3, %r2, LAST;
    mad.lo.s32 %r3, %r3, 1024, %r1;
    mul.wide.u32 %l2, %r3, 4;
    add.s64 %l2, %l1, %l2;
    st.global.b32 [%l2], %r2;
    """
    text = kernel(body)
    run_vector(text.replace("LAST", "31"), threads=1024, grid=17)
    assert "writes another value than another block" in str(fault_of(text.replace("LAST", "15"), threads=1024, grid=17))


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
