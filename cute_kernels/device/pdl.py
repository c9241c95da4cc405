"""Programmatic dependent launch: how a kernel starts and ends.

A launch waits for the grid in front of it at its start, or, where its caller promises that it is independent of that grid, at its end.
Either way a grid completes only after all grids in front of it have: whoever waits for it waits for them too.
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
    """Wait, in an independent launch, for the kernels in front of it: every thread comes through here last."""
    if cutlass.const_expr(pdl):
        if independent != 0:
            cute.arch.griddepcontrol_wait()
