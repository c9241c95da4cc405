"""Registers, stack and shared memory of a cubin, read from its ELF sections; no CUDA tool is needed."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from cute_kernels.errors import CompileError

_EIATTR_FRAME_SIZE, _EIATTR_MIN_STACK_SIZE, _EIATTR_REGCOUNT = 0x11, 0x12, 0x2F
_EIFMT_SVAL = 4
RESERVED = 1024  # bytes of shared memory that a multiprocessor takes for itself of each block, from compute capability 9.0 on


@dataclass(frozen=True)
class Resources:
    """What the kernels of one object need.

    registers     of one thread, the most of any kernel
    spill_bytes   stack of one thread, the most of any kernel: 0 means that nothing was spilled
    static_shared shared memory the code reserves by itself, in bytes, without the `RESERVED` ones
    cubin_bytes   size of the machine code file
    """

    registers: int
    spill_bytes: int
    static_shared: int
    cubin_bytes: int


def read_resources(cubin: bytes) -> Resources:
    """The resources recorded in a cubin."""
    sections = _sections(cubin)
    values: dict[int, list[int]] = {}
    for name, (offset, size) in sections.items():
        if name == ".nv.info":
            for attribute, value in _attributes(cubin[offset : offset + size]):
                values.setdefault(attribute, []).append(value)
    registers = values.get(_EIATTR_REGCOUNT, [])
    if not registers:
        raise CompileError("the cubin records no register count", hint="its format is unknown to this version; report it")
    stack = values.get(_EIATTR_FRAME_SIZE, []) + values.get(_EIATTR_MIN_STACK_SIZE, [])
    shared = [size for name, (_, size) in sections.items() if name.startswith(".nv.shared.") and "reserved" not in name]
    # Addresses begin behind the reserved bytes, which such a section therefore counts: of one of 1024 the driver says 0 (H200).
    return Resources(max(registers), max(stack, default=0), max(shared, default=RESERVED) - RESERVED, len(cubin))


def _sections(elf: bytes) -> dict[str, tuple[int, int]]:
    if elf[:5] != b"\x7fELF\x02":
        raise CompileError("not a 64-bit ELF file: a cubin was expected")
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    entry, count, names = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + i * entry) for i in range(count)]
    strings = headers[names][4]
    return {elf[strings + h[0] : elf.index(b"\0", strings + h[0])].decode(): (h[4], h[5]) for h in headers}


def _attributes(info: bytes) -> list[tuple[int, int]]:
    """(attribute, value) of the per-kernel entries: each is a symbol index and a 32-bit value."""
    found = []
    at = 0
    while at + 4 <= len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if form != _EIFMT_SVAL:
            continue  # the 16 bits just read were the value
        if size == 8:
            found.append((attribute, struct.unpack_from("<II", info, at)[1]))
        at += size
    return found
