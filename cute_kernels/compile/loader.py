"""From an object file to a callable: the executor seam, linking, and loading without `cutlass`."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cute_kernels.compile.spec import KernelSpec
from cute_kernels.errors import CompileError

Kernel = Callable[..., Any]


@dataclass(frozen=True)
class CompiledObject:
    """Where a compiled kernel lies.

    object   the relocatable object file; it exports `__tvm_ffi_<symbol>`
    library  the object linked into a shared library, or None where there was no C compiler
    ptx      its PTX
    symbol   name of the function
    """

    object: Path
    library: Path | None
    ptx: Path
    symbol: str


Executor = Callable[[CompiledObject, KernelSpec], Kernel]


def load_with_tvm_ffi(compiled: CompiledObject, spec: KernelSpec) -> Kernel:
    """The default executor: the function as TVM-FFI loads it. Without a linked library the DSL loads the object itself."""
    if compiled.library is not None:
        return load_library(compiled.library)[compiled.symbol]
    from cutlass.cute.runtime import load_module

    return load_module(str(compiled.object), enable_tvm_ffi=True)[compiled.symbol]


_executor: Executor = load_with_tvm_ffi


def executor() -> Executor:
    """The executor in force."""
    return _executor


@contextlib.contextmanager
def use_executor(replacement: Executor) -> Iterator[None]:
    """Run every kernel of a `with` block through `replacement`, which gets the compiled object and its spec.

    For tests: this is where an emulator stands in for a GPU. AOT packs are not consulted meanwhile.
    """
    global _executor
    before, _executor = _executor, replacement
    try:
        yield
    finally:
        _executor = before


def load_library(path: Path) -> Any:
    """A linked library as a TVM-FFI module. Needs TVM-FFI and the DSL's small runtime library, never `cutlass`."""
    _load_runtime()
    import tvm_ffi

    return tvm_ffi.load_module(str(path))


@functools.cache
def _load_runtime() -> tuple[ctypes.CDLL, ...]:
    """Make the symbols that objects leave open visible to the loader."""
    import tvm_ffi

    libraries = (tvm_ffi.libinfo.find_libtvm_ffi(), runtime_library())
    return tuple(ctypes.CDLL(str(p), mode=ctypes.RTLD_GLOBAL) for p in libraries)


def runtime_library() -> Path:
    """The DSL's runtime library, found without importing the DSL."""
    name = "libcute_dsl_runtime.so"
    candidates = [Path(p) for p in os.environ.get("CUTE_DSL_LIBS", "").split(os.pathsep) if p.endswith(name)]
    spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    for base in (spec.submodule_search_locations or ()) if spec else ():
        candidates += [Path(base, "lib", name), *(Path(base, toolkit, "lib", name) for toolkit in ("cu13", "cu12"))]
    for path in candidates:
        if path.is_file():
            return path
    raise CompileError(f"{name} is not installed", hint="pip install 'nvidia-cutlass-dsl[cu13]'")


def c_compiler() -> str | None:
    """The C compiler that links libraries, or None."""
    return shutil.which(os.environ.get("CC") or "cc") or shutil.which("gcc") or shutil.which("clang")


def link(objects: Sequence[Path], library: Path) -> None:
    """Link objects into one shared library; the runtime's symbols stay open until it is loaded."""
    compiler = c_compiler()
    if compiler is None:
        raise CompileError("no C compiler to link a shared library with", hint="install cc, gcc or clang, or set CC")
    # Through a response file: a pack has more objects than a command line may hold.
    arguments = library.with_suffix(".rsp")
    arguments.write_text("\n".join('"{}"'.format(str(o).replace("\\", "\\\\").replace('"', '\\"')) for o in objects))
    try:
        subprocess.run([compiler, "-shared", "-o", str(library), f"@{arguments}"], check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        raise CompileError(f"{compiler} cannot link {library.name}: {error.stderr.strip()}") from error
    finally:
        arguments.unlink()
