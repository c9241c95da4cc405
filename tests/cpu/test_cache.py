"""The compile layer within one process: look-up order, damage, bounds, freezing, the executor seam, log lines."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cute_kernels import env
from cute_kernels.compile import build, cache, freeze, loader, store
from cute_kernels.errors import CompileError, InvalidArgument, MissingKernel
from cute_kernels.target import Target
from tests.scale.spec import ScaleSpec

SPEC = ScaleSpec(Target("sm100", "sm_100a"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(env.CACHE_DIR.name, str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "stats", cache.Stats())
    cache.clear_memory()
    yield tmp_path / "cache"
    cache.clear_memory()


def entry(folder: Path) -> Path:
    (found,) = (folder / "objects").iterdir()
    return found


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [truncate, empty, flip_a_bit, Path.unlink])
def test_damaged_files_are_quarantined_and_built_again(folder: Path, damage: Callable[[Path], None]) -> None:
    cache.ensure(SPEC)
    names = sorted(p.name for p in entry(folder).iterdir())
    assert names == ["kernel.cubin", "kernel.o", "kernel.ptx", "kernel.so", "manifest.json"]
    for count, name in enumerate(names, 1):
        damage(entry(folder) / name)
        again = cache.ensure(SPEC)
        assert cache.stats.compiled == 1 + count, f"{name} was damaged, and used"
        assert len(list((folder / "quarantine").iterdir())) == count
        assert again.object.parent == entry(folder)
    assert cache.stats.from_disk == 0
    cache.ensure(SPEC)
    assert cache.stats.from_disk == 1


def replace_by_a_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("no entry")


def replace_by_a_dead_link(path: Path) -> None:
    shutil.rmtree(path)
    path.symlink_to(path.parent / "nowhere")


def empty_folder(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


def nest_the_manifest(path: Path) -> None:
    (path / store.MANIFEST).write_text("[" * 100_000)


@pytest.mark.parametrize("damage", [replace_by_a_file, replace_by_a_dead_link, empty_folder, nest_the_manifest])
def test_what_is_no_entry_gives_way_to_one(folder: Path, damage: Callable[[Path], None]) -> None:
    cache.ensure(SPEC)
    damage(entry(folder))
    assert cache.ensure(SPEC).object.parent == entry(folder)
    assert cache.stats.compiled == 2
    store.Store(folder).gc()
    assert not list((folder / "quarantine").iterdir())


def a_folder_as_lock(root: Path) -> None:
    (root / "locks" / f"{cache.key(SPEC)}.lock").mkdir(parents=True)


def objects_on_another_file_system(root: Path) -> None:
    other = Path(tempfile.mkdtemp(dir="/dev/shm"))
    root.mkdir()
    (root / "objects").symlink_to(other)


def a_name_that_the_dsl_refuses(root: Path) -> None:
    """Nothing to prepare: see the test."""


@pytest.mark.parametrize("trouble", [a_folder_as_lock, objects_on_another_file_system, a_name_that_the_dsl_refuses])
def test_a_folder_that_takes_no_kernel_is_worked_around(
    folder: Path, trouble: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Writable at first sight, but the lock, the compile or the publishing fails there: one warning, and the kernel all the same."""
    if trouble is a_name_that_the_dsl_refuses:
        folder = folder / 'it\'s a "folder"'
        monkeypatch.setenv(env.CACHE_DIR.name, str(folder))
    elif trouble is objects_on_another_file_system and (
        not os.path.isdir("/dev/shm") or os.stat("/dev/shm").st_dev == os.stat("/tmp").st_dev
    ):
        pytest.skip("no second file system")
    trouble(folder)
    try:
        found = cache.ensure(SPEC)
        assert found.object.is_file() and not found.object.is_relative_to(folder)
        cache.ensure(dataclasses.replace(SPEC, factor=5))
        assert caplog.text.count("takes no kernel") == 1
        assert not list((folder / "tmp").iterdir()), "a failed compile left something behind"
    finally:
        if (folder / "objects").is_symlink():
            shutil.rmtree((folder / "objects").resolve())


def test_an_entry_removed_between_look_up_and_load_is_made_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.ensure(SPEC)
    read, cleared = store.Store.read, []

    def read_then_lose(self: store.Store, key: str) -> object:
        found = read(self, key)
        if found is not None and not cleared:
            cleared.append(self.clear())
        return found

    monkeypatch.setattr(store.Store, "read", read_then_lose)
    assert callable(cache.get(SPEC))
    assert cleared == [1] and cache.stats.compiled == 2


def test_a_home_that_nobody_knows_is_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.CACHE_DIR.name, "~nobody-of-this-name/cache")
    with pytest.raises(InvalidArgument, match=env.CACHE_DIR.name):
        cache.ensure(SPEC)


def test_a_flipped_checksum_in_the_manifest_is_damage(folder: Path) -> None:
    cache.ensure(SPEC)
    path = entry(folder) / store.MANIFEST
    manifest = json.loads(path.read_text())
    manifest["files"]["kernel.o"] = "0" * 64
    path.write_text(json.dumps(manifest))
    cache.ensure(SPEC)
    assert cache.stats.compiled == 2


def test_manifest_of_an_entry(folder: Path) -> None:
    _, manifest = cache.ensure_with_manifest(SPEC)
    assert manifest["spec"] == SPEC.fields()
    assert manifest["key"] == cache.key(SPEC) == entry(folder).name
    assert 0 < manifest["registers"] <= 255 and manifest["spill_bytes"] == 0 and manifest["seconds"] > 0
    assert manifest["cubin_bytes"] == (entry(folder) / build.CUBIN).stat().st_size
    assert set(manifest["versions"]) == {"nvidia-cutlass-dsl", "apache-tvm-ffi"}


@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump to read x86 code")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="looks for AVX")
def test_host_code_runs_on_any_cpu_of_its_kind(folder: Path) -> None:
    listing = subprocess.run(["objdump", "-d", "--no-show-raw-insn", cache.ensure(SPEC).object], capture_output=True, text=True, check=True)
    opcodes = re.findall(r"^\s+[0-9a-f]+:\s+(\w+)", listing.stdout, re.MULTILINE)
    assert "call" in opcodes
    assert not [o for o in opcodes if o.startswith("v")], "AVX instructions: built for the CPU at hand"


def test_memory_serves_the_same_function(folder: Path) -> None:
    first = cache.get(SPEC)
    assert cache.get(dataclasses.replace(SPEC)) is first
    assert (cache.stats.compiled, cache.stats.from_disk) == (1, 0)
    cache.clear_memory()
    assert cache.get(SPEC) is not first
    assert (cache.stats.compiled, cache.stats.from_disk) == (1, 1)


def test_one_log_line_per_compile_names_spec_target_and_seconds(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "cute_kernels"):
        cache.ensure(SPEC)
        cache.ensure(SPEC)
    (line,) = [r.getMessage() for r in caplog.records if r.name == "cute_kernels"]
    assert str(SPEC) in line and "sm100:sm_100a" in line and line.endswith(" s")


def test_warm_up_loads_every_spec(folder: Path) -> None:
    specs = [dataclasses.replace(SPEC, factor=f) for f in (2, 3)]
    seen: list[object] = []
    assert cache.warm_up(specs, progress=seen.append) == 2
    assert seen == specs
    with freeze.frozen():
        assert all(callable(cache.get(s)) for s in specs)


@pytest.mark.parametrize("how", ["call", "variable"])
def test_frozen_cache_refuses_to_compile(folder: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "call":
        freeze.freeze()
    else:
        monkeypatch.setenv(env.FREEZE.name, "1")
    try:
        with pytest.raises(MissingKernel, match="frozen") as caught:
            cache.get(SPEC)
    finally:
        freeze.unfreeze()
    assert str(SPEC) in str(caught.value)
    assert "python -m cute_kernels compile --arch" in caught.value.hint
    monkeypatch.delenv(env.FREEZE.name, raising=False)
    cache.get(SPEC)
    assert cache.stats.compiled == 1


def test_the_warm_up_command_of_the_hint_parses(folder: Path) -> None:
    with freeze.frozen(), pytest.raises(MissingKernel) as caught:
        cache.get(ScaleSpec(Target("sm120", "sm_90a")))
    arch = caught.value.hint.split("--arch ")[1].split()[0]
    assert Target.named(arch) == Target("sm120", "sm_90a")


def test_frozen_cache_still_reads_the_disk(folder: Path) -> None:
    cache.ensure(SPEC)
    with freeze.frozen():
        cache.get(SPEC)
    assert (cache.stats.compiled, cache.stats.from_disk) == (1, 1)


def test_a_missing_kernel_during_graph_capture_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(MissingKernel, match="CUDA graph is being captured"):
        cache.get(SPEC)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    ready = cache.get(SPEC)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert cache.get(SPEC) is ready


def test_the_executor_seam_gets_object_ptx_and_spec(folder: Path) -> None:
    calls: list[tuple[loader.CompiledObject, object]] = []

    def recorder(compiled: loader.CompiledObject, spec: object) -> Callable[..., str]:
        calls.append((compiled, spec))
        return lambda *arguments: f"ran with {arguments}"

    with loader.use_executor(recorder):
        assert cache.get(SPEC)(1, 2) == "ran with (1, 2)"
        cache.get(SPEC)
    ((compiled, spec),) = calls
    assert spec == SPEC
    assert ".target sm_100a" in compiled.ptx.read_text()
    assert f"__tvm_ffi_{compiled.symbol}".encode() in compiled.object.read_bytes()
    assert cache.get(SPEC) is not calls, "the default executor is back"
    assert type(cache.get(SPEC)).__module__.startswith("tvm_ffi")


def test_a_kernel_that_does_not_trace_is_a_compile_error_and_leaves_no_entry(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tests.scale.kernel as kernel

    def broken(spec: object) -> tuple[object, tuple[object, ...]]:
        raise TypeError("no such layout")

    monkeypatch.setattr(kernel, "trace", broken)
    with pytest.raises(CompileError, match="no such layout") as caught:
        cache.ensure(SPEC)
    assert str(SPEC) in str(caught.value)
    assert not list((folder / "objects").iterdir()) and not list((folder / "tmp").iterdir())
    monkeypatch.undo()


def fill(disk: store.Store, key: str, size: int, used: float) -> None:
    staged = disk.stage()
    (staged / "kernel.o").write_bytes(bytes(size))
    disk.publish(key, staged)
    os.utime(disk.objects / key, (used, used))


def test_the_size_bound_removes_the_least_recently_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.CACHE_MAX_MB.name, "0.003")
    disk = store.Store(tmp_path / "cache")
    assert disk.writable()
    for used, key in enumerate(("a", "b", "c"), 1000):
        fill(disk, key, 1000, used)
    os.utime(disk.objects / "a", (2000, 2000))
    fill(disk, "d", 1000, 3000)
    assert {p.name for p in disk.objects.iterdir()} == {"a", "c", "d"}
    fill(disk, "huge", 5000, 4000)
    assert {p.name for p in disk.objects.iterdir()} == {"huge"}, "the newest stays even when it alone exceeds the bound"
    assert not list(disk.tmp.iterdir())


def test_gc_and_clear(tmp_path: Path) -> None:
    disk = store.Store(tmp_path / "cache")
    assert disk.usage() == store.Usage(0, 0, 0)
    assert disk.writable()
    fill(disk, "old", 10, 0)
    fill(disk, "new", 10, store.time.time())
    (disk.quarantine / "bad").mkdir()
    assert disk.usage() == store.Usage(2, 20, 1)
    assert disk.gc(max_age_days=30) == 1
    assert disk.usage() == store.Usage(1, 10, 0)
    assert disk.clear() == 1
    assert disk.usage() == store.Usage(0, 0, 0)


def test_publishing_twice_keeps_the_first(tmp_path: Path) -> None:
    disk = store.Store(tmp_path / "cache")
    assert disk.writable()
    fill(disk, "k", 10, 1000)
    fill(disk, "k", 20, 1000)
    assert (disk.objects / "k" / "kernel.o").stat().st_size == 10
    assert not list(disk.tmp.iterdir())


def test_the_default_folder_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(env.CACHE_DIR.name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert store.default_root() == tmp_path / "cute_kernels"
