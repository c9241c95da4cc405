"""What a kernel is built for: a family (which source and which policy) and a GPU architecture (which instructions).

A target is resolved once, from a tensor's device or from a name, and handed down. Nothing below dispatch asks the GPU.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

from cute_kernels.errors import InvalidArgument, UnsupportedRequest

Family = Literal["sm100", "sm120"]

# Which architectures a family's source may be built for, by the compute capability they run on. An architecture with
# an "f" (family) suffix runs on every capability listed; one with an "a" suffix on exactly one. sm_90a serves tests only.
_ARCHITECTURES: dict[str, dict[str, tuple[tuple[int, int], ...]]] = {
    "sm100": {
        "sm_100a": ((10, 0),),
        "sm_103a": ((10, 3),),
        "sm_100f": ((10, 0), (10, 3)),
        "sm_90a": ((9, 0),),
    },
    "sm120": {
        "sm_120a": ((12, 0),),
        "sm_121a": ((12, 1),),
        "sm_120f": ((12, 0), (12, 1)),
        "sm_90a": ((9, 0),),
    },
}
_BY_CAPABILITY: dict[tuple[int, int], tuple[Family, str]] = {
    (10, 0): ("sm100", "sm_100a"),
    (10, 3): ("sm100", "sm_103a"),
    (12, 0): ("sm120", "sm_120a"),
    (12, 1): ("sm120", "sm_121a"),
}
_WHICH = '"sm100" is for B200, B300 and GB300, "sm120" for RTX and GB10; "sm100:sm_90a" and "sm120:sm_90a" are for tests on H100, H200'
_SHARED_BYTES = {"sm100": 232_448, "sm120": 101_376}


@dataclass(frozen=True, order=True)
class Target:
    """`family` chooses source, cache format and index form; `gpu_arch` is what CuTe DSL and ptxas are told.

    `Target("sm100", "sm_90a")` and `Target("sm120", "sm_90a")` build a family's source for a Hopper GPU: for tests and
    benchmarks, never chosen by itself.
    """

    family: Family
    gpu_arch: str

    def __post_init__(self) -> None:
        if not isinstance(self.family, str) or self.family not in _ARCHITECTURES:
            raise InvalidArgument("family", repr(self.family), " or ".join(map(repr, _ARCHITECTURES)))
        allowed = _ARCHITECTURES[self.family]
        if not isinstance(self.gpu_arch, str) or self.gpu_arch not in allowed:
            raise InvalidArgument(
                "gpu_arch",
                repr(self.gpu_arch),
                f"one of {', '.join(allowed)} for family {self.family}",
                hint=f"Target.named({self.family!r}) gives the family's default",
            )

    @staticmethod
    def named(name: str) -> Target:
        """A target from `"sm_100a"`, `"sm_120f"`, ...; or from a family's name, which means its first architecture.

        `sm_90a` belongs to both families, so it has to be written `Target("sm100", "sm_90a")`, or "sm100:sm_90a". `InvalidArgument` for
        other names.
        """
        if not isinstance(name, str):
            raise InvalidArgument("target", repr(name), 'a name, such as "sm100" or "sm_120f"', hint=_WHICH)
        family, _, arch = name.partition(":")
        if arch:
            return Target(family, arch)  # type: ignore[arg-type]  # checked in __post_init__
        if name in _ARCHITECTURES:
            return Target(name, next(iter(_ARCHITECTURES[name])))  # type: ignore[arg-type]
        owners = [fam for fam, archs in _ARCHITECTURES.items() if name in archs]
        if len(owners) != 1:
            known = sorted({a for archs in _ARCHITECTURES.values() for a in archs} - {"sm_90a"})
            raise InvalidArgument(
                "target",
                repr(name),
                f"one of {', '.join([*_ARCHITECTURES, *known])}, sm100:sm_90a, sm120:sm_90a",
                hint="sm_90a needs a family: it runs either family's source" if owners else _WHICH,
            )
        return Target(owners[0], name)  # type: ignore[arg-type]

    @staticmethod
    def from_capability(capability: tuple[int, int], device: object = "this GPU") -> Target:
        """The exact target of a compute capability; `UnsupportedRequest` for anything but 10.0, 10.3, 12.0 and 12.1."""
        if not isinstance(capability, tuple) or [type(part) for part in capability] != [int, int]:
            raise InvalidArgument("capability", repr(capability), "(major, minor), as torch.cuda.get_device_capability gives it")
        if capability not in _BY_CAPABILITY:
            major, minor = capability
            raise UnsupportedRequest(
                f"compute capability {major}.{minor}",
                device=device,
                supported="10.0, 10.3 (SM100 family), 12.0, 12.1 (SM120 family)",
                nearest=(
                    'pass target=Target("sm100", "sm_90a") or Target("sm120", "sm_90a") to run a family\'s source on SM90 in tests'
                    if capability == (9, 0)
                    else 'run on the CPU, or pass backend="reference" to decode'
                ),
            )
        return Target(*_BY_CAPABILITY[capability])

    @property
    def capabilities(self) -> tuple[tuple[int, int], ...]:
        """The compute capabilities that code built for this target runs on."""
        return _ARCHITECTURES[self.family][self.gpu_arch]

    @property
    def pack_architectures(self) -> tuple[str, ...]:
        """Architectures whose AOT packs can serve this target, best first: the exact one, then the family's."""
        mine = set(self.capabilities)
        archs = _ARCHITECTURES[self.family]
        return (self.gpu_arch, *(a for a, caps in archs.items() if a != self.gpu_arch and mine <= set(caps)))

    @property
    def vector_bytes(self) -> int:
        """Widest global access of one thread: 32 bytes on Blackwell, 16 on Hopper."""
        return 16 if self.gpu_arch == "sm_90a" else 32

    @property
    def shared_bytes(self) -> int:
        """Shared memory one block of this family may use, in bytes."""
        return _SHARED_BYTES[self.family]

    @functools.cached_property
    def name(self) -> str:
        """The target as `named` takes it. What is remembered for a target is found by it: a string keeps its hash."""
        return str(self)

    def __str__(self) -> str:
        return f"{self.family}:{self.gpu_arch}"


def all_targets(family: Family | None = None) -> list[Target]:
    """Every target, of one family or of both."""
    return [Target(fam, arch) for fam, archs in _ARCHITECTURES.items() if family in (None, fam) for arch in archs]  # type: ignore[arg-type]
