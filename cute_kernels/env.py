"""Every environment variable the package reads, declared once. docs/environment.md is generated from this table."""

from __future__ import annotations

import functools
import os
from collections.abc import Container
from dataclasses import dataclass

from cute_kernels.errors import InvalidArgument

# The variables that are set now, by their encoded names: what `os.environ` itself reads and writes.
_SET: Container[object] = getattr(os.environ, "_data", os.environ)


@dataclass(frozen=True)
class Variable:
    """One environment variable: its name, the value it has when unset, and what it does."""

    name: str
    default: str
    doc: str

    def get(self) -> str:
        """The value now; an empty string counts as unset."""
        return os.environ.get(self.name) or self.default

    def flag(self) -> bool:
        """The value as a switch: "1" or "0"."""
        if self._encoded not in _SET:  # every call of an operation asks, and `get` takes ten times as long
            return self._default_flag
        value = self.get()
        if value not in ("0", "1"):
            raise InvalidArgument(self.name, repr(value), "0 or 1")
        return value == "1"

    @functools.cached_property
    def _encoded(self) -> object:
        """The name as `_SET` has it."""
        return self.name if _SET is os.environ else os.environ.encodekey(self.name)

    @functools.cached_property
    def _default_flag(self) -> bool:
        return self.default == "1"

    def number(self) -> float:
        """The value as a non-negative number."""
        value = self.get()
        try:
            number = float(value)
        except ValueError:
            number = -1.0
        if not 0 <= number < float("inf"):
            raise InvalidArgument(self.name, repr(value), "a number >= 0")
        return number

    def paths(self) -> list[str]:
        """The value as a list of paths joined with `os.pathsep`."""
        return [p for p in self.get().split(os.pathsep) if p]


CACHE_DIR = Variable(
    "CUTE_KERNELS_CACHE_DIR",
    "",
    "Folder of compiled kernels. Default: `cute_kernels` in the user's cache folder (`XDG_CACHE_HOME`, else `~/.cache`). "
    "May be shared by processes and hosts, and may be read-only.",
)
CACHE_MAX_MB = Variable(
    "CUTE_KERNELS_CACHE_MAX_MB",
    "2048",
    "Size bound of that folder in MB. The kernels that were used least recently are removed when a new one would exceed it. 0: no bound.",
)
LOCK_TIMEOUT = Variable(
    "CUTE_KERNELS_LOCK_TIMEOUT",
    "120",
    "Seconds to wait for another process that compiles the same kernel; after that the kernel is compiled for this process alone.",
)
PACKS = Variable(
    "CUTE_KERNELS_PACKS",
    "",
    "Folders of AOT packs, joined with the path separator, searched in order before the disk cache. Packs in `build/packs/*` "
    "of a source checkout are found without it.",
)
FREEZE = Variable(
    "CUTE_KERNELS_FREEZE",
    "0",
    "1: never compile; a kernel that is in no pack and not in the cache is a `MissingKernel` error. The same as calling `freeze()`.",
)
VALIDATE = Variable(
    "CUTE_KERNELS_VALIDATE",
    "0",
    "1: also check the values of index tensors and scales on every call. This synchronises with the device: for debugging.",
)

VARIABLES: tuple[Variable, ...] = (CACHE_DIR, CACHE_MAX_MB, LOCK_TIMEOUT, PACKS, FREEZE, VALIDATE)
DSL_SETTINGS = ("COMPILER_OPT", "COMPILER_BACKEND", "LINEINFO", "DEBUG", "ENABLE_ASSERTIONS", "ENABLE_PYIR", "AUTO_M2S")
# Variables of others that count here, with what they do.
OTHERS: tuple[tuple[str, str], ...] = (
    ("`CC`", "C compiler that links compiled kernels into shared libraries. Default: `cc`, else `gcc`, else `clang`."),
    ("`CUTE_DSL_LIBS`", "Where CuTe DSL's runtime library is looked for first; else in its package."),
    (
        ", ".join(f"`CUTE_DSL_{name}`" for name in DSL_SETTINGS),
        "Settings of CuTe DSL that change the code it generates: where they are set, they are part of every key.",
    ),
    ("`CUTE_DSL_ARCH`", "Has no effect: a spec names its architecture. Set for the length of a compile, and put back."),
)


def markdown() -> str:
    """The text of docs/environment.md."""
    rows = [f"| `{v.name}` | `{v.default}` | {v.doc} |" if v.default else f"| `{v.name}` | unset | {v.doc} |" for v in VARIABLES]
    others = [f"| {names} | {doc} |" for names, doc in OTHERS]
    own = ["# Environment variables", "", "| variable | default | meaning |", "|---|---|---|", *rows]
    return "\n".join([*own, "", "Of others:", "", "| variable | meaning here |", "|---|---|", *others, ""])
