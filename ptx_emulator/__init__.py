"""Executes PTX for sm_90a, sm_100a and sm_120a on the CPU, and checks it as it runs.

`run_ptx` runs one kernel on buffers named in a `Memory`; `KernelFault` says what the kernel did wrong, in which block and thread,
and at which PTX line. The package knows nothing of the kernels it runs.
"""

from ptx_emulator.faults import EmulatorError, KernelFault, LaunchError, PtxSyntaxError, UnsupportedInstruction
from ptx_emulator.launch import Result, load_program, run_ptx
from ptx_emulator.memory import FOREIGN, UNWRITTEN, Buffer, Memory

__all__ = [
    "FOREIGN",
    "UNWRITTEN",
    "Buffer",
    "EmulatorError",
    "KernelFault",
    "LaunchError",
    "Memory",
    "PtxSyntaxError",
    "Result",
    "UnsupportedInstruction",
    "load_program",
    "run_ptx",
]
