"""The disk cache: one folder per key, published whole by a rename, checked by checksums, bounded in size.

<root>/objects/<key>/   kernel.o  kernel.so  kernel.ptx  kernel.cubin  manifest.json
<root>/locks/<key>.lock   <root>/quarantine/   <root>/tmp/
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock

from cute_kernels import env
from cute_kernels.compile import build
from cute_kernels.compile.loader import CompiledObject
from cute_kernels.errors import InvalidArgument

MANIFEST, LIBRARY = "manifest.json", "kernel.so"
_STALE_SECONDS = 3600.0


def default_root() -> Path:
    """The cache folder that the environment asks for."""
    chosen = env.CACHE_DIR.get()
    if chosen:
        try:
            return Path(chosen).expanduser()
        except RuntimeError as error:
            raise InvalidArgument(
                env.CACHE_DIR.name, repr(chosen), "a folder", hint="write the path out: that home is not known"
            ) from error
    import platformdirs

    return platformdirs.user_cache_path("cute_kernels", appauthor=False)


@dataclass(frozen=True)
class Usage:
    """What a cache folder holds: entries, their bytes, and the number of quarantined ones."""

    entries: int
    bytes: int
    quarantined: int


class Store:
    """One cache folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.objects, self.locks = root / "objects", root / "locks"
        self.quarantine, self.tmp = root / "quarantine", root / "tmp"

    def writable(self) -> bool:
        """Create the folders (mode 0700) where needed; False for a folder that cannot be written."""
        try:
            for folder in (self.root, self.objects, self.locks, self.quarantine, self.tmp):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            probe = self.tmp / f"probe-{uuid.uuid4().hex}"
            probe.touch()
            probe.unlink()
        except OSError:
            return False
        return True

    def lock(self, key: str) -> filelock.BaseFileLock:
        """The lock of one key among all processes of a host; the kernel drops it when its holder dies."""
        return filelock.FileLock(self.locks / f"{key}.lock", timeout=env.LOCK_TIMEOUT.number())

    def read(self, key: str) -> tuple[CompiledObject, dict[str, Any]] | None:
        """The entry of a key, or None where there is none. A damaged entry is moved away, so that it is built again."""
        folder = self.objects / key
        if not os.path.lexists(folder):
            return None
        try:
            manifest = json.loads((folder / MANIFEST).read_bytes())
            ok = (
                manifest["key"] == key
                and manifest.pop("seal") == seal(manifest)
                and all(checksum(folder / name) == wanted for name, wanted in manifest["files"].items())
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            ok = False
        if not ok:
            self._set_aside(folder)
            return None
        try:
            os.utime(folder)
        except OSError:
            pass  # a read-only folder keeps no record of use
        return compiled_object(folder, manifest), manifest

    def stage(self) -> Path:
        """A private folder on the same file system, to build an entry in."""
        folder = self.tmp / uuid.uuid4().hex
        folder.mkdir(mode=0o700)
        return folder

    def publish(self, key: str, staged: Path) -> None:
        """Make a staged entry visible under its key, whole or not at all."""
        for path in staged.iterdir():
            _sync(path)
        _sync(staged)
        try:
            staged.rename(self.objects / key)
        except OSError:
            if not (self.objects / key).is_dir():
                raise
            shutil.rmtree(staged)  # another process published the same key while its lock timed out here
        _sync(self.objects)
        self.bound(env.CACHE_MAX_MB.number() * 1e6, keep=key)
        self._sweep(self.tmp, _STALE_SECONDS)

    def entries(self) -> Iterator[tuple[Path, int, float]]:
        """Every entry as (folder, bytes, time of last use)."""
        for folder in list(self.objects.iterdir()) if self.objects.is_dir() else []:
            try:
                yield folder, sum(p.stat().st_size for p in folder.iterdir()), folder.stat().st_mtime
            except OSError:
                continue  # removed by another process meanwhile

    def kinds(self) -> Iterator[tuple[str, str]]:
        """Operation and target of every entry whose manifest says so."""
        for folder, _, _ in self.entries():
            try:
                fields = json.loads((folder / MANIFEST).read_bytes())["spec"]
                kind = (str(fields["operation"]), f"{fields['family']}:{fields['gpu_arch']}")
            except (OSError, ValueError, LookupError, TypeError):
                continue
            yield kind

    def usage(self) -> Usage:
        """Entries, their bytes, and entries in quarantine."""
        sizes = [size for _, size, _ in self.entries()]
        return Usage(len(sizes), sum(sizes), len(list(self.quarantine.iterdir())) if self.quarantine.is_dir() else 0)

    def bound(self, limit: float, keep: str = "") -> int:
        """Remove the least recently used entries until at most `limit` bytes (0: any number) remain; returns how many went."""
        if not limit:
            return 0
        entries = sorted(self.entries(), key=lambda e: e[2])
        total, removed = sum(size for _, size, _ in entries), 0
        for folder, size, _ in entries:
            if total <= limit:
                break
            if folder.name != keep and self._discard(folder):
                total, removed = total - size, removed + 1
        return removed

    def gc(self, max_age_days: float | None = None) -> int:
        """Apply the size bound, drop entries unused for `max_age_days`, and clear quarantine and leftovers; entries removed."""
        removed = self.bound(env.CACHE_MAX_MB.number() * 1e6)
        now = time.time()
        if max_age_days is not None:
            for folder, _, used in list(self.entries()):
                if now - used > max_age_days * 86400:
                    removed += self._discard(folder)
        self._sweep(self.quarantine, 0.0)
        self._sweep(self.tmp, _STALE_SECONDS)
        return removed

    def clear(self) -> int:
        """Remove every entry; other processes keep what they have loaded. Returns how many entries went."""
        removed = sum(self._discard(folder) for folder, _, _ in list(self.entries()))
        self._sweep(self.quarantine, 0.0)
        return removed

    def _sweep(self, folder: Path, age: float) -> None:
        """Delete what lies in `folder` for at least `age` seconds: leftovers of killed processes, and quarantine."""
        now = time.time()
        for path in list(folder.iterdir()) if folder.is_dir() else []:
            try:
                old = now - path.lstat().st_mtime >= age
            except OSError:
                continue
            if old and path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif old:
                with contextlib.suppress(OSError):  # another process was first
                    path.unlink()

    def _discard(self, folder: Path) -> bool:
        """Out of sight by one rename, then deleted: a reader sees an entry whole or not at all. False if it stays, or went before."""
        grave = self.tmp / f"gone-{uuid.uuid4().hex}"
        try:
            self.tmp.mkdir(mode=0o700, exist_ok=True)
            folder.rename(grave)
        except OSError:
            return False  # read-only, or another process was first
        shutil.rmtree(grave, ignore_errors=True)
        return True

    def _set_aside(self, folder: Path) -> None:
        try:
            folder.rename(self.quarantine / f"{folder.name}-{uuid.uuid4().hex[:8]}")
        except OSError:
            pass  # read-only, or another process was first


def compiled_object(folder: Path, manifest: dict[str, Any]) -> CompiledObject:
    """The entry in `folder`, described by its manifest."""
    library = folder / LIBRARY if LIBRARY in manifest["files"] else None
    return CompiledObject(folder / build.OBJECT, library, folder / build.PTX, manifest["symbol"])


def write_manifest(folder: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    """Add the checksums of the files in `folder` to a manifest, seal it with its own, and write it beside them."""
    manifest = {**manifest, "files": {p.name: checksum(p) for p in sorted(folder.iterdir())}}
    (folder / MANIFEST).write_text(json.dumps({**manifest, "seal": seal(manifest)}, indent=1))
    return manifest


def seal(manifest: dict[str, Any]) -> str:
    """Checksum of a manifest's contents."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def checksum(path: Path) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
