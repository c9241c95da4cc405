"""Programmatic dependent launch: the two instructions that every kernel starts with."""

import cutlass
from cutlass import cute


def begin(pdl: bool) -> None:
    """Wait for the kernels this one depends on, then let the kernels that depend on it be scheduled.

    Every thread of every block comes through here before its first access to global memory, loads and stores alike. The
    trigger may follow at once: a dependent kernel runs this wait too, which ends only when this grid has completed and its
    writes are visible, so the trigger hands over no data; it lets the next kernel's blocks take free places early.
    """
    if cutlass.const_expr(pdl):
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
