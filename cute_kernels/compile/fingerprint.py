"""What a compiled kernel depends on besides its spec: sources, compile options, compiler versions.

The sources are found by walking import statements, not by importing, so a fingerprint costs no `import cutlass`.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import json
import os
import platform
from importlib import metadata
from pathlib import Path

from cute_kernels import env
from cute_kernels.errors import CompileError

# Options of every compile, besides --gpu-arch. -fmad=false makes the PTX the exact meaning of a kernel.
OPTIONS = ("--enable-tvm-ffi", "--ptxas-options=-fmad=false")
ENTRY = 2  # raised where an entry of the disk cache says something else than before about the same object
# Host code is compiled for the oldest CPU of the machine's kind, as (LLVM's CPU name, features): left alone the DSL uses all that the
# building machine has, and a pack or a shared cache would crash on an older one.
_HOST_CPUS = {"x86_64": ("x86-64", "+sse2"), "aarch64": ("generic", "+neon")}
# Modules a kernel may import that put nothing into its code.
_HOST_ONLY = ("cute_kernels", "cute_kernels.errors", "cute_kernels.env", "cute_kernels.compile")


def host_cpu() -> tuple[str, str]:
    """LLVM's CPU name and features that host code is compiled for."""
    machine = platform.machine()
    if machine not in _HOST_CPUS:
        raise CompileError(f"kernels cannot be compiled on {machine}", hint=f"supported machines: {', '.join(_HOST_CPUS)}")
    return _HOST_CPUS[machine]


def compile_options() -> tuple[str, ...]:
    """The options of a compile in this process, `--gpu-arch` excepted, and the CPU that host code is for."""
    settings = [f"CUTE_DSL_{name}={os.environ[f'CUTE_DSL_{name}']}" for name in env.DSL_SETTINGS if os.environ.get(f"CUTE_DSL_{name}")]
    return (*OPTIONS, f"host={' '.join(host_cpu())}", *settings)


def versions() -> dict[str, str]:
    """Versions of the compiler and of the calling convention."""
    return {name: metadata.version(name) for name in ("nvidia-cutlass-dsl", "apache-tvm-ffi")}


@functools.cache
def sources(module: str) -> dict[str, Path]:
    """The files a kernel module is built from, by module name: itself and whatever it imports from its own package or this one."""
    roots = {module.partition(".")[0], "cute_kernels"}
    found: dict[str, Path] = {}
    queue = [module]
    while queue:
        name = queue.pop()
        if name in found or any(name == host or (host != "cute_kernels" and name.startswith(f"{host}.")) for host in _HOST_ONLY):
            continue
        path = _file_of(name)
        if path is None:
            continue
        found[name] = path
        queue.extend(n for n in _imports(name, path) if n.partition(".")[0] in roots)
        queue.extend(name.rsplit(".", i)[0] for i in range(1, name.count(".") + 1))
    if module not in found:
        raise CompileError(f"kernel module {module} has no source file", hint="install the package with its sources, or load an AOT pack")
    return found


def _file_of(name: str) -> Path | None:
    """The file of a module, without importing anything; None for a name that is no module (an attribute, say)."""
    root, *rest = name.split(".")
    spec = importlib.util.find_spec(root)
    if spec is None:
        return None
    if not rest:
        return Path(spec.origin) if spec.origin else None
    for base in spec.submodule_search_locations or ():
        stem = Path(base, *rest)
        for path in (stem.with_suffix(".py"), stem / "__init__.py"):
            if path.is_file():
                return path
    return None


def _imports(name: str, path: Path) -> list[str]:
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_bytes(), filename=str(path))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = package.rsplit(".", node.level - 1)[0] if node.level > 1 else package
                base = f"{parent}.{base}".rstrip(".")
            names += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return names


@functools.cache
def _source_hash(module: str) -> str:
    digest = hashlib.sha256()
    for name, path in sorted(sources(module).items()):
        text = path.read_bytes()
        digest.update(f"{name}\0{len(text)}\0".encode())
        digest.update(text)
    return digest.hexdigest()


def source_fingerprint(module: str) -> str:
    """Hash of the sources of a kernel module and of the compile options: what an AOT pack must agree with."""
    return _hash([_source_hash(module), *compile_options()])


def fingerprint(module: str) -> str:
    """`source_fingerprint`, the versions of the DSL and of TVM-FFI, and `ENTRY`: what an object of the disk cache must agree with."""
    return _hash([source_fingerprint(module), versions(), ENTRY])


def _hash(data: object) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
