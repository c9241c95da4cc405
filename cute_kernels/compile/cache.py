"""`get(spec)`: memory, AOT packs, the disk cache, and at last a compile."""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import filelock

from cute_kernels.compile import build, loader, packs, store
from cute_kernels.compile.fingerprint import fingerprint, versions
from cute_kernels.compile.freeze import require_compile_allowed
from cute_kernels.compile.loader import CompiledObject, Kernel
from cute_kernels.compile.spec import KernelSpec
from cute_kernels.errors import CompileError, CuteKernelsError

log = logging.getLogger("cute_kernels")
Result = TypeVar("Result")
_TRIES = 3


@dataclass
class Stats:
    """How this process came by its kernels, in numbers of look-ups: from memory's misses on."""

    from_packs: int = 0
    from_disk: int = 0
    compiled: int = 0


stats = Stats()
_memory: dict[tuple[str, loader.Executor], Kernel] = {}
_warned: set[Path] = set()


def key(spec: KernelSpec) -> str:
    """Name of the compiled kernel on disk: hash of the spec's fields, its architecture and everything the code is built from."""
    text = json.dumps({"spec": spec.fields(), "built_from": fingerprint(spec.module)}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def symbol(of: str) -> str:
    """The function name inside the object with this key."""
    return f"k_{of[:32]}"


def get(spec: KernelSpec) -> Kernel:
    """The compiled function of `spec`, to be called with arguments in the order of `spec.argument_names`.

    Raises `MissingKernel` where it would have to be compiled although `freeze()` or a graph capture forbids it, and
    `CompileError` where it cannot be compiled.
    """
    executor = loader.executor()
    kernel = _memory.get((spec.identity, executor))
    if kernel is None:
        kernel = _load(spec, executor)
        _memory[spec.identity, executor] = kernel
    return kernel


def _load(spec: KernelSpec, executor: loader.Executor) -> Kernel:
    note = ""
    if executor is loader.load_with_tvm_ffi:
        found, note = packs.find(spec)
        if found is not None:
            stats.from_packs += 1
            return found
    return use_object(spec, lambda compiled, _: executor(compiled, spec), note)


def warm_up(specs: Iterable[KernelSpec], progress: Callable[[KernelSpec], None] | None = None) -> int:
    """Load, and compile where needed, every spec; `progress` is called after each. Returns how many there were."""
    wanted = list(specs)
    for spec in wanted:
        get(spec)
        if progress:
            progress(spec)
    return len(wanted)


def clear_memory() -> None:
    """Forget what this process has loaded; the disk cache stays."""
    _memory.clear()


def ensure(spec: KernelSpec, note: str = "") -> CompiledObject:
    """The object of `spec`, from the disk cache or compiled now, without loading it."""
    return ensure_with_manifest(spec, note)[0]


def ensure_with_manifest(spec: KernelSpec, note: str = "") -> tuple[CompiledObject, dict[str, Any]]:
    """`ensure`, and the object's manifest: key, spec, resources, checksums, versions."""
    disk, name = store.Store(store.default_root()), key(spec)
    found = disk.read(name)
    if found is None:
        require_compile_allowed(spec, note)
        found = _compile_once(disk, name, spec)
    else:
        stats.from_disk += 1
    return found


def use_object(spec: KernelSpec, use: Callable[[CompiledObject, dict[str, Any]], Result], note: str = "") -> Result:
    """What `use` makes of the object of `spec` and its manifest; asked again where another process removes the object meanwhile."""
    for _ in range(_TRIES):
        try:
            return use(*ensure_with_manifest(spec, note))
        except CuteKernelsError:
            raise
        except (OSError, RuntimeError) as error:
            log.info("%s could not be used, once more: %s", spec, error)
    return use(*ensure_with_manifest(spec, note))


def _compile_once(disk: store.Store, name: str, spec: KernelSpec) -> tuple[CompiledObject, dict[str, Any]]:
    """Compile under the key's lock, so that of all processes that miss one compiles and the others read its result."""
    if not disk.writable():
        _warn_once(disk.root, "cache folder %s cannot be written; kernels are compiled for this process alone", disk.root)
        return _compile_alone(name, spec)
    try:
        with disk.lock(name):
            found = disk.read(name)
            if found is not None:
                stats.from_disk += 1
                return found
            staged = disk.stage()
            try:
                _compile(name, spec, staged)
                disk.publish(name, staged)
            except BaseException:
                shutil.rmtree(staged, ignore_errors=True)
                raise
            published = disk.read(name)
    except filelock.Timeout:
        log.warning("another process holds the lock of %s for too long; compiling it for this process alone", spec)
        return _compile_alone(name, spec)
    except (OSError, CompileError) as error:
        alone = _compile_alone(name, spec)  # fails again where not the folder is at fault (full, or of a name that tools refuse)
        _warn_once(disk.root, "cache folder %s takes no kernel (%s); kernels are compiled for this process alone", disk.root, error)
        return alone
    return published or _compile_alone(name, spec)


def _compile_alone(name: str, spec: KernelSpec) -> tuple[CompiledObject, dict[str, Any]]:
    folder = Path(tempfile.mkdtemp(prefix="cute_kernels-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    manifest = _compile(name, spec, folder)
    return store.compiled_object(folder, manifest), manifest


def _compile(name: str, spec: KernelSpec, folder: Path) -> dict[str, Any]:
    info = build.build(spec, folder, symbol(name))
    stats.compiled += 1
    if loader.c_compiler():
        loader.link([folder / build.OBJECT], folder / store.LIBRARY)
    manifest = {
        "key": name,
        "spec": spec.fields(),
        "symbol": symbol(name),
        **info.row(),
        "versions": versions(),
    }
    log.info("compiled %s in %.1f s", spec, info.seconds)
    return store.write_manifest(folder, manifest)


def _warn_once(about: Path, message: str, *arguments: object) -> None:
    if about not in _warned:
        _warned.add(about)
        log.warning(message, *arguments)
