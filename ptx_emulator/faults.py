"""What the emulator raises: text it cannot read, and faults of the kernel it runs."""

from __future__ import annotations

from pathlib import Path


class EmulatorError(Exception):
    """Base of everything this package raises on purpose. `file` is the PTX file concerned, where it is known."""

    file: Path | None = None

    def of_file(self, path: Path | None) -> EmulatorError:
        """This error, which names the file."""
        if path is not None and self.file is None:
            self.file = path
            self.args = (f"{self.args[0]}\n    of {path}", *self.args[1:])
        return self


class PtxSyntaxError(EmulatorError):
    """The PTX text has a form the parser does not know."""

    def __init__(self, message: str, line: int, text: str = "") -> None:
        self.line = line
        super().__init__(f"PTX line {line}: {message}" + (f"\n    {text.strip()}" if text else ""))


class UnsupportedInstruction(PtxSyntaxError):
    """An opcode, modifier or operand the emulator does not execute. It never guesses a meaning."""


class LaunchError(EmulatorError):
    """Grid, block, cluster, shared memory or parameters do not fit the kernel."""


class KernelFault(EmulatorError):
    """The kernel did something that is wrong on a GPU, even where the hardware would let it pass.

    check   short name of the check that found it, such as "out of bounds" or "shared-memory race"
    line    PTX line (1-based) of the instruction, 0 when no single instruction is to blame
    block   (x, y, z) of the first offending block, or None
    thread  (x, y, z) of the first offending thread, or None
    tensor  name of the buffer concerned, or ""
    """

    def __init__(
        self,
        check: str,
        message: str,
        *,
        line: int = 0,
        text: str = "",
        kernel: str = "",
        block: tuple[int, int, int] | None = None,
        thread: tuple[int, int, int] | None = None,
        tensor: str = "",
    ) -> None:
        self.check, self.line, self.block, self.thread, self.tensor = check, line, block, thread, tensor
        where = [f"tensor {tensor!r}"] if tensor else []
        where += [f"block {block}"] if block is not None else []
        where += [f"thread {thread}"] if thread is not None else []
        where += [f"PTX line {line}"] if line else []
        parts = [f"{check}: {message}"]
        parts += ["    at " + ", ".join(where)] if where else []
        parts += [f"    {text.strip()}"] if text else []
        parts += [f"    in {kernel}"] if kernel else []
        super().__init__("\n".join(parts))
