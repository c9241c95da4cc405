"""Building AOT packs: every spec of the support matrix for one architecture, without a GPU, over several processes."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from cute_kernels.compile import build, cache, loader
from cute_kernels.compile.fingerprint import source_fingerprint, versions
from cute_kernels.compile.packs import LAYOUT, MANIFEST
from cute_kernels.compile.spec import KernelSpec
from cute_kernels.compile.store import seal
from cute_kernels.errors import CompileError, InvalidArgument

Progress = Callable[[KernelSpec, dict[str, Any]], None]
_MANIFEST_FIELDS = ("key", "spec", "symbol", *build.BuildInfo.__dataclass_fields__)


def compile_objects(
    specs: Sequence[KernelSpec], scratch: Path, *, workers: int = 2, progress: Progress | None = None
) -> list[dict[str, Any]]:
    """Compile `specs` (through the disk cache) in `workers` processes; copies `<key>.o` of each into `scratch`.

    Returns the manifests in the order of `specs`; `progress(spec, manifest)` is called as each is done.
    """
    done: dict[KernelSpec, dict[str, Any]] = {}
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
    try:
        waiting = {pool.submit(_compile_one, spec, scratch): spec for spec in specs}
        for future in as_completed(waiting):
            spec = waiting[future]
            done[spec] = future.result()
            if progress:
                progress(spec, done[spec])
    except BrokenProcessPool as error:
        raise CompileError("a compile process died", hint="it may have run out of memory: use fewer workers") from error
    finally:
        pool.shutdown(cancel_futures=True)
    return [done[spec] for spec in specs]


def _compile_one(spec: KernelSpec, scratch: Path) -> dict[str, Any]:
    def copy(compiled: loader.CompiledObject, manifest: dict[str, Any]) -> dict[str, Any]:
        shutil.copyfile(compiled.object, scratch / f"{manifest['key']}.o")
        return manifest

    manifest = cache.use_object(spec, copy)
    return {name: manifest[name] for name in _MANIFEST_FIELDS} | {"source": source_fingerprint(spec.module)}


def compile_pack(specs: Sequence[KernelSpec], out: Path, *, workers: int = 2, progress: Progress | None = None) -> dict[str, Any]:
    """Compile `specs`, all of one architecture, and write a pack into `out`; returns its manifest.

    The library is named after its contents and the manifest is replaced last, so a process that opens the pack meanwhile
    gets the old one or the new one.
    """
    architectures = sorted({spec.target.gpu_arch for spec in specs})
    if len(architectures) != 1:
        raise InvalidArgument("specs", f"{len(specs)} specs for {architectures or 'no architecture'}", "specs of one architecture")
    started = time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".building-", dir=out) as folder:
        scratch = Path(folder)
        kernels = compile_objects(specs, scratch, workers=workers, progress=progress)
        linked = scratch / "kernels.so"
        loader.link([scratch / f"{k['key']}.o" for k in kernels], linked)
        digest = hashlib.sha256(linked.read_bytes()).hexdigest()
        library = out / f"kernels-{digest[:16]}.so"
        os.replace(linked, library)
        manifest = {
            "layout": LAYOUT,
            "gpu_arch": architectures[0],
            "machine": platform.machine(),
            "versions": versions(),
            "library": library.name,
            "sha256": digest,
            "seconds": round(time.perf_counter() - started, 1),
            "kernels": kernels,
        }
        manifest["seal"] = seal(manifest)
        (scratch / MANIFEST).write_text(json.dumps(manifest, indent=1))
        os.replace(scratch / MANIFEST, out / MANIFEST)
    for other in out.glob("kernels-*.so"):
        if other != library:
            other.unlink()
    return manifest
