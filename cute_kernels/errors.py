"""Typed errors. Each message names what was asked, what was found, and the way out (the `hint` line)."""

from __future__ import annotations


class CuteKernelsError(Exception):
    """Base of every error this package raises on purpose.

    `hint` is one sentence that says what to do; it is printed as the last line of the message.
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        self.hint = hint
        super().__init__(f"{message}\n  hint: {hint}" if hint else message)


class InvalidArgument(CuteKernelsError, ValueError):
    """An argument has the wrong dtype, shape, device, stride, alignment or value.

    Raised before anything is launched or written.
    """

    def __init__(self, argument: str, got: object, expected: object, *, hint: str = "") -> None:
        self.argument, self.got, self.expected = argument, got, expected
        super().__init__(f"{argument}: got {got}, expected {expected}", hint=hint)


class UnsupportedRequest(CuteKernelsError, NotImplementedError):
    """A well-formed request that no path of this package serves on this device."""

    def __init__(self, asked: str, *, device: object, supported: str, nearest: str) -> None:
        self.asked, self.device, self.supported, self.nearest = asked, device, supported, nearest
        super().__init__(f"{asked} is not supported on {device}; supported: {supported}", hint=nearest)


class MissingKernel(CuteKernelsError, RuntimeError):
    """A kernel would have to be compiled where compiling is forbidden (`freeze()`, graph capture)."""


class CompileError(CuteKernelsError, RuntimeError):
    """CuTe DSL or ptxas refused a kernel; the message names the spec and the target."""


class PackError(CuteKernelsError, RuntimeError):
    """An AOT pack cannot be used: wrong architecture, damaged, or not a pack."""
