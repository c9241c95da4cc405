"""The instructions. Importing this package registers every opcode with `program`."""

from ptx_emulator.instructions import (  # noqa: F401
    bits,
    conversion,
    copies,
    floating,
    integer,
    memory,
    moves,
    synchronisation,
    warp,
)
