"""Programmatic dependent launch: how a kernel starts and ends.

A launch waits for the grid in front of it at its start. Where its caller promises that it is independent of that grid, its blocks do
not wait; only the first one does, at its end. Either way a grid completes only after all grids in front of it have: whoever waits
for it waits for them too.
"""

import cutlass
from cutlass import Int32, cute


@cute.jit
def begin(pdl: cutlass.Constexpr, independent: Int32 | None = None):
    """Wait for the kernels this one depends on, then let the kernels that depend on it be scheduled.

    Every thread of every block comes through here before its first access to global memory, loads and stores alike. The
    trigger may follow at once: a dependent kernel runs this wait too, which ends only when this grid has completed and its
    writes are visible, so the trigger hands over no data; it lets the next kernel's blocks take free places early.

    independent  not 0: `end` waits instead. None: the kernel has no such argument
    """
    if cutlass.const_expr(pdl):
        if cutlass.const_expr(independent is None):
            cute.arch.griddepcontrol_wait()
        else:
            if independent == 0:
                cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()


@cute.jit
def end(pdl: cutlass.Constexpr, independent: Int32):
    """In an independent launch, keep this grid from completing before those in front of it: every thread comes through here last.

    One block that waits is enough for that; the others leave, and make room for the blocks of the next launch.
    """
    if cutlass.const_expr(pdl):
        block, _, _ = cute.arch.block_idx()
        if (independent != 0) & (block == 0):
            cute.arch.griddepcontrol_wait()
