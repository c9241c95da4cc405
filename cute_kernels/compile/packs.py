"""AOT packs: folders with one shared library of many kernels and a manifest, read only, loaded without `cutlass`."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import platform
from pathlib import Path
from typing import Any

from cute_kernels import env
from cute_kernels.compile import loader
from cute_kernels.compile.fingerprint import source_fingerprint
from cute_kernels.compile.loader import Kernel
from cute_kernels.compile.spec import KernelSpec
from cute_kernels.errors import PackError
from cute_kernels.target import Target

log = logging.getLogger("cute_kernels")
MANIFEST, LAYOUT = "manifest.json", 1


class Pack:
    """One opened pack, its checksums compared; `PackError` for a folder that is none. The library is loaded for its first kernel."""

    def __init__(self, folder: Path) -> None:
        from cute_kernels.compile.store import checksum, seal

        self.folder = folder
        try:
            self.manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_bytes())
            layout, machine = self.manifest["layout"], self.manifest["machine"]
            self.gpu_arch: str = self.manifest["gpu_arch"]
            self._rows = {(json.dumps(k["spec"], sort_keys=True), k["source"]): str(k["symbol"]) for k in self.manifest["kernels"]}
            self.families = {str(k["spec"]["family"]) for k in self.manifest["kernels"]}
            self.library, wanted = folder / self.manifest["library"], self.manifest["sha256"]
            sealed = {name: value for name, value in self.manifest.items() if name != "seal"}
            untouched = self.manifest["seal"] == seal(sealed)
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            missing = not (folder / MANIFEST).exists()
            reason = f"it has no {MANIFEST}" if missing else repr(error)
            hint = f"{env.PACKS.name} names each pack's own folder; " if missing else ""
            raise PackError(f"{folder} is no AOT pack: {reason}", hint=f"{hint}build one with `python -m cute_kernels compile`") from error
        if layout != LAYOUT or machine != platform.machine():
            raise PackError(
                f"{folder} has layout {layout} for {machine}, expected layout {LAYOUT} for {platform.machine()}",
                hint="build it again with this version on this kind of machine",
            )
        if not untouched:
            raise PackError(f"{folder / MANIFEST} was changed after it was written: its seal does not fit", hint="build the pack again")
        try:
            intact = checksum(self.library) == wanted
        except OSError:
            intact = False
        if not intact:
            raise PackError(f"{self.library} is missing or damaged: its checksum is not the manifest's", hint="build the pack again")
        self._module: Any = None

    def serves(self, target: Target) -> bool:
        """Whether code in this pack runs on the target's device."""
        return self.gpu_arch in target.pack_architectures and target.family in self.families

    def require(self, target: Target) -> Pack:
        """This pack, or a `PackError` with the list of what it holds where nothing in it runs on the target's device."""
        if not self.serves(target):
            raise PackError(
                f"{self.folder} holds {len(self._rows)} kernels for {self.gpu_arch}, families {sorted(self.families)}, "
                f"none for {target}; usable there: {', '.join(target.pack_architectures)}",
                hint=f"python -m cute_kernels compile --arch {target.family}:{target.pack_architectures[-1]} --out DIR",
            )
        return self

    def find(self, spec: KernelSpec) -> Kernel | None:
        """The kernel of `spec`, built for any architecture of this pack that its device runs, from the same sources; else None.

        `PackError` where the library, or its function, went away after the pack was opened.
        """
        if not self.serves(spec.target):
            return None
        mine = dataclasses.replace(spec, target=Target(spec.target.family, self.gpu_arch))
        symbol = self._rows.get((json.dumps(mine.fields(), sort_keys=True), source_fingerprint(spec.module)))
        if symbol is None:
            return None
        try:
            if self._module is None:
                self._module = loader.load_library(self.library)
            return self._module[symbol]
        except (OSError, RuntimeError, AttributeError) as error:
            raise PackError(f"{self.library} does not load: {error}", hint="build the pack again") from error


def folders() -> list[Path]:
    """Where packs are looked for: CUTE_KERNELS_PACKS, then build/packs of a source checkout."""
    checkout = Path(__file__).resolve().parents[2] / "build" / "packs"
    own = sorted(p.parent for p in checkout.glob(f"*/{MANIFEST}")) if checkout.is_dir() else []
    return [*map(Path, env.PACKS.paths()), *own]


@functools.cache
def _opened(folder: Path) -> Pack | None:
    try:
        return Pack(folder)
    except PackError as error:
        log.warning("pack ignored: %s", error)
        return None


@functools.cache
def _note(note: str) -> None:
    log.warning("%s", note)


def find(spec: KernelSpec) -> tuple[Kernel | None, str]:
    """The kernel of `spec` from the packs at hand, exact architecture first; and, where none has it, why not."""
    opened = [p for p in map(_opened, folders()) if p is not None]
    serving = [p for arch in spec.target.pack_architectures for p in opened if p.gpu_arch == arch and p.serves(spec.target)]
    for pack in serving:
        try:
            kernel = pack.find(spec)
        except PackError as error:
            _note(f"pack ignored: {error}")
            continue
        if kernel is not None:
            return kernel, ""
    if not opened:
        return None, ""
    if serving:
        note = f"{', '.join(str(p.folder) for p in serving)}: no such spec built from these sources"
    else:
        held = ", ".join(f"{p.folder} holds {p.gpu_arch}" for p in opened)
        note = f"no pack serves {spec.target}: {held}; usable there: {', '.join(spec.target.pack_architectures)}"
    if env.PACKS.paths():
        _note(note)
    return None, note
