"""The only call of `cute.compile`: one spec in, an object file with its PTX and cubin out."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import shlex
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cute_kernels.compile.cubin import read_resources
from cute_kernels.compile.fingerprint import OPTIONS, host_cpu
from cute_kernels.compile.spec import KernelSpec
from cute_kernels.errors import CompileError, CuteKernelsError

OBJECT, PTX, CUBIN = "kernel.o", "kernel.ptx", "kernel.cubin"

# The DSL keeps its state in process-wide singletons: one compile at a time.
_compiling = threading.RLock()
_SHARED_STORE = re.compile(
    r"(%\w+) = llvm\.getelementptr %\w+\[0, 2\].*!llvm\.struct<\(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32\)>"
)


@dataclass(frozen=True)
class BuildInfo:
    """What a compile yields besides its files; a row of the manifest.

    registers     of one thread
    spill_bytes   stack of one thread (0: nothing spilled)
    shared_bytes  static and dynamic shared memory of one block, the most a launch asks for
    cubin_bytes   size of the machine code
    seconds       time of tracing and compiling, without imports
    """

    registers: int
    spill_bytes: int
    shared_bytes: int
    cubin_bytes: int
    seconds: float

    def row(self) -> dict[str, Any]:
        """The kernel's figures by name, for a manifest."""
        return asdict(self)


def build(spec: KernelSpec, folder: Path, symbol: str) -> BuildInfo:
    """Compile `spec` and write `kernel.o` (exporting `symbol`), `kernel.ptx` and `kernel.cubin` into `folder`.

    `CompileError` names the spec and the target when the kernel cannot be traced or ptxas refuses it.
    """
    with _compiling, _architecture(spec.target.gpu_arch):
        import cutlass.cute as cute
        from cutlass.cute.runtime import make_fake_stream

        module = importlib.import_module(spec.module)
        started = time.perf_counter()
        options = " ".join(
            (f"--gpu-arch {spec.target.gpu_arch}", *OPTIONS, "--keep-ptx", "--keep-cubin", shlex.quote(f"--dump-dir={folder}"))
        )
        try:
            host, arguments = module.trace(spec)
            compiled = cute.compile(host, *arguments, make_fake_stream(use_tvm_ffi_env_stream=True), options=options)
            _set_host_cpu(compiled.ir_module)
            compiled.export_to_c(str(folder / OBJECT), function_name=symbol, export_only_tvm_ffi_symbols=True)
        except CuteKernelsError:
            raise
        except Exception as error:
            raise CompileError(f"{spec} does not compile: {error}", hint=f"the kernel's source is {spec.module}") from error
        seconds = time.perf_counter() - started
        dynamic = _dynamic_shared(str(compiled.ir_module), spec)
    for wanted in (PTX, CUBIN):
        dumped = list(folder.glob(f"*{Path(wanted).suffix}"))
        if len(dumped) != 1:
            raise CompileError(f"{spec}: the DSL left {len(dumped)} {wanted} files, one was expected")
        dumped[0].rename(folder / wanted)
    found = read_resources((folder / CUBIN).read_bytes())
    return BuildInfo(found.registers, found.spill_bytes, found.static_shared + dynamic, found.cubin_bytes, round(seconds, 3))


def _set_host_cpu(module: Any) -> None:
    """Have the host functions of an MLIR module compiled for the baseline CPU instead of the one at hand."""
    from cutlass._mlir import ir

    cpu, features = host_cpu()
    with module.context:
        attributes = {
            "target_cpu": ir.StringAttr.get(cpu),
            "target_features": ir.Attribute.parse(f'#llvm.target_features<["{features}"]>'),
        }
        for function in module.body.operations:
            operation = function.operation
            if operation.name == "llvm.func" and len(operation.regions[0].blocks):
                for name, value in attributes.items():
                    operation.attributes[name] = value


def _dynamic_shared(host_code: str, spec: KernelSpec) -> int:
    """The most bytes of dynamic shared memory the host code asks for: the third field of its launch configurations."""
    most = 0
    for function in re.split(r"^\s*llvm\.func\b", host_code, flags=re.MULTILINE):
        for pointer in _SHARED_STORE.findall(function):
            store = re.search(rf"llvm\.store (%\w+), {pointer} : i64", function)
            size = store and _most(function, store[1])
            if size is None:
                raise CompileError(f"{spec}: the shared memory of a launch is no choice between compile-time constants")
            most = max(most, size)
    return most


def _most(function: str, value: str) -> int | None:
    """The largest value that host code may choose for a number made of constants, or None if it is made of anything else."""
    found = re.search(rf"^\s*{value} = llvm\.(mlir\.constant|select|add|sext|zext)\b(.*) : ", function, re.MULTILINE)
    if found is None:
        return None
    kind, operands = found[1], found[2]
    if kind == "mlir.constant":
        return int(operands.strip(" ()").split(":")[0])
    wanted = re.findall(r"%\w+", operands)[kind == "select" :]
    sizes = [size for operand in wanted if (size := _most(function, operand)) is not None]
    if len(sizes) < len(wanted):
        return None
    return sum(sizes) if kind == "add" else max(sizes)


@contextlib.contextmanager
def _architecture(gpu_arch: str) -> Iterator[None]:
    """Make the DSL's own default agree with --gpu-arch for one compile, whatever the environment says."""
    before = os.environ.get("CUTE_DSL_ARCH")
    os.environ["CUTE_DSL_ARCH"] = gpu_arch
    try:
        from cutlass.cutlass_dsl import CuTeDSL

        settings = CuTeDSL._get_dsl().envar
        default = settings._arch
        settings.arch = gpu_arch
        try:
            yield
        finally:
            settings._arch = default
    finally:
        if before is None:
            del os.environ["CUTE_DSL_ARCH"]
        else:
            os.environ["CUTE_DSL_ARCH"] = before
