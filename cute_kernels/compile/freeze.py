"""When compiling is forbidden: after `freeze()`, under CUTE_KERNELS_FREEZE=1, and while a CUDA graph is being captured."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from cute_kernels import env
from cute_kernels.compile.spec import KernelSpec
from cute_kernels.errors import MissingKernel

_frozen = False


def freeze() -> None:
    """From now on a kernel that would have to be compiled is a `MissingKernel` error: call it when warm-up is done."""
    global _frozen
    _frozen = True


def unfreeze() -> None:
    """Compiling is allowed again (CUTE_KERNELS_FREEZE=1 still forbids it)."""
    global _frozen
    _frozen = False


@contextlib.contextmanager
def frozen() -> Iterator[None]:
    """`freeze()` for the length of a `with` block."""
    global _frozen
    before, _frozen = _frozen, True
    try:
        yield
    finally:
        _frozen = before


def is_frozen() -> bool:
    """Whether compiling is forbidden in this process."""
    return _frozen or env.FREEZE.flag()


def is_capturing() -> bool:
    """Whether the current torch stream is being captured into a CUDA graph. Never initialises CUDA."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def require_compile_allowed(spec: KernelSpec, note: str = "") -> None:
    """Raise `MissingKernel` where `spec` must not be compiled now. `note` says why no pack had it."""
    if is_capturing():
        reason = "a CUDA graph is being captured"
    elif is_frozen():
        reason = "kernels are frozen"
    else:
        return
    raise MissingKernel(
        f"{spec} is not compiled, and {reason}{f' ({note})' if note else ''}",
        hint=f"warm up first: call warm_up() of the layer, or `python -m cute_kernels compile --arch {spec.target} --out build/packs/"
        f"{spec.target.gpu_arch}` and point {env.PACKS.name} at it",
    )
