"""The disk cache among processes: warm starts, races, kills, bad objects, folders that cannot be written."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests import processes

# Makes the object of one small kernel and says how this process came by it.
ENSURE = """
    import json, logging, sys
    logging.basicConfig(level=logging.INFO)
    from cute_kernels.compile import cache
    from cute_kernels.target import Target
    from tests.scale.spec import ScaleSpec
    found, manifest = cache.ensure_with_manifest(ScaleSpec(Target.named(sys.argv[1])))
    print(json.dumps({
        **vars(cache.stats), "key": manifest["key"], "object": str(found.object), "exists": found.object.is_file(),
        "cutlass": "cutlass" in sys.modules, "ptx": found.ptx.read_text(), "library": found.library and str(found.library),
    }))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def ensure(folder: Path, target: str = "sm_100a", **options: object) -> dict:
    return processes.run(ENSURE, target, CUTE_KERNELS_CACHE_DIR=str(folder), **options)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that one process has filled; copy it to change it."""
    folder = tmp_path_factory.mktemp("filled") / "cache"
    first = ensure(folder)
    assert (first["compiled"], first["from_disk"], first["cutlass"]) == (1, 0, True)
    return folder


@pytest.fixture
def warm(filled: Path, folder: Path) -> Path:
    shutil.copytree(filled, folder)
    return folder


def test_second_process_compiles_nothing_and_imports_no_compiler(filled: Path) -> None:
    second = ensure(filled)
    assert (second["compiled"], second["from_disk"], second["cutlass"]) == (0, 1, False)
    assert second["exists"] and Path(second["object"]).is_relative_to(filled)


def test_the_cache_is_private_and_leaves_nothing_behind(filled: Path) -> None:
    folder = filled
    assert {p.stat().st_mode & 0o777 for p in (folder, folder / "objects", folder / "locks", folder / "tmp")} == {0o700}
    assert not list((folder / "tmp").iterdir())


def test_eight_processes_on_a_cold_cache_compile_once(folder: Path) -> None:
    started = [processes.start(ENSURE, "sm_100a", CUTE_KERNELS_CACHE_DIR=str(folder)) for _ in range(8)]
    results = [processes.result(p) for p in started]
    assert sum(r["compiled"] for r in results) == 1
    assert sum(r["from_disk"] for r in results) == 7
    assert len({r["object"] for r in results}) == 1


# Takes the lock, starts "compiling", says so by a file, and never finishes.
STUCK = """
    import pathlib, sys, time
    from cute_kernels.compile import build, cache
    from cute_kernels.target import Target
    from tests.scale.spec import ScaleSpec
    def never(spec, folder, symbol):
        (folder / "kernel.o").write_bytes(b"half an object")
        pathlib.Path(sys.argv[1]).touch()
        time.sleep(600)
    build.build = never
    cache.ensure(ScaleSpec(Target.named("sm_100a")))
"""


@pytest.fixture
def stuck(folder: Path, tmp_path: Path):
    marker = tmp_path / "compiling"
    process = processes.start(STUCK, marker, CUTE_KERNELS_CACHE_DIR=str(folder))
    deadline = time.monotonic() + 60
    while not marker.exists():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.05)
    yield process
    process.kill()
    process.wait()


def test_others_finish_when_one_is_killed_in_the_middle_of_a_compile(folder: Path, stuck) -> None:
    waiting = [processes.start(ENSURE, "sm_100a", CUTE_KERNELS_CACHE_DIR=str(folder)) for _ in range(2)]
    time.sleep(1.0)  # let them reach the lock
    assert all(p.poll() is None for p in waiting), "nobody may get past the lock while it is held"
    os.kill(stuck.pid, signal.SIGKILL)
    results = [processes.result(p) for p in waiting]
    assert sorted(r["compiled"] for r in results) == [0, 1]
    assert [p.name for p in (folder / "objects").iterdir()] == [results[0]["key"]]
    assert ensure(folder)["from_disk"] == 1


def test_a_lock_held_too_long_is_waited_for_only_so_long(folder: Path, stuck) -> None:
    result = ensure(folder, CUTE_KERNELS_LOCK_TIMEOUT="0.5")
    assert (result["compiled"], result["exists"]) == (1, True)
    assert not Path(result["object"]).is_relative_to(folder)
    assert not list((folder / "objects").iterdir())


READ_ONLY = """
    import json, logging, sys
    lines = []
    class Keep(logging.Handler):
        def emit(self, record):
            lines.append((record.levelname, record.getMessage()))
    logging.getLogger("cute_kernels").addHandler(Keep())
    from cute_kernels.compile import cache
    from cute_kernels.target import Target
    from tests.scale.spec import ScaleSpec
    held, new = (ScaleSpec(Target.named("sm_100a"), factor=f) for f in (2, 3))
    exist = [cache.ensure(s).object.is_file() for s in (held, new, ScaleSpec(Target.named("sm_100a"), factor=4))]
    print(json.dumps({**vars(cache.stats), "exist": exist, "warnings": [m for level, m in lines if level == "WARNING"]}))
"""


def test_read_only_cache_serves_what_it_has_and_warns_once(warm: Path) -> None:
    for path in (warm, *warm.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = sorted(p.name for p in warm.rglob("*"))
    result = processes.run(READ_ONLY, bound_by_permissions=True, CUTE_KERNELS_CACHE_DIR=str(warm))
    for path in (warm, *warm.rglob("*")):
        path.chmod(0o755)
    assert (result["from_disk"], result["compiled"], result["exist"]) == (1, 2, [True] * 3)
    assert len(result["warnings"]) == 1 and str(warm) in result["warnings"][0]
    assert sorted(p.name for p in warm.rglob("*")) == before


def test_an_impossible_cache_folder_still_works(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.touch()
    result = ensure(blocker / "cache")
    assert (result["compiled"], result["exists"]) == (1, True)


@pytest.mark.parametrize("arch_of_the_environment", [None, "sm_90a"])
def test_the_spec_decides_the_architecture(folder: Path, arch_of_the_environment: str | None) -> None:
    result = ensure(folder, "sm_120f", CUTE_DSL_ARCH=arch_of_the_environment)
    assert ".target sm_120f" in result["ptx"]


TWO_TARGETS = """
    import json, os
    from cute_kernels.compile import cache
    from cute_kernels.target import Target
    from tests.scale.spec import ScaleSpec
    targets = ("sm_100a", "sm_120f", "sm100:sm_90a", "sm_103a", "sm_100a")
    found = [cache.ensure(ScaleSpec(Target.named(t))) for t in targets]
    result = {"ptx": [f.ptx.read_text() for f in found], **vars(cache.stats)}
    print(json.dumps({**result, "arch": os.environ.get("CUTE_DSL_ARCH")}))
"""


def test_several_targets_in_one_process(folder: Path) -> None:
    result = processes.run(TWO_TARGETS, CUTE_KERNELS_CACHE_DIR=str(folder))
    for ptx, arch in zip(result["ptx"], ("sm_100a", "sm_120f", "sm_90a", "sm_103a", "sm_100a"), strict=True):
        assert f".target {arch}" in ptx
    assert result["compiled"] == 4
    assert result["arch"] is None, "the environment is left as it was"


LOAD = """
    import json, sys
    from cute_kernels.compile import cache
    from cute_kernels.target import Target
    from tests.scale.spec import ScaleSpec
    kernel = cache.get(ScaleSpec(Target.named("sm_100a")))
    import torch
    x = torch.zeros(4, dtype=torch.float64)
    try:
        kernel(x, x, 0.0)
        said = ""
    except Exception as error:
        said = str(error)
    print(json.dumps({"said": said, "cutlass": "cutlass" in sys.modules, **vars(cache.stats)}))
"""


def test_a_linked_object_loads_without_the_dsl_and_checks_its_arguments(filled: Path) -> None:
    assert ensure(filled)["library"]
    result = processes.run(LOAD, CUTE_KERNELS_CACHE_DIR=str(filled))
    assert (result["cutlass"], result["from_disk"]) == (False, 1)
    assert "float32" in result["said"]


def test_without_a_c_compiler_the_dsl_loads_the_object(folder: Path, tmp_path: Path) -> None:
    empty = tmp_path / "bin"
    empty.mkdir()
    no_compiler = {"PATH": str(empty), "CC": None}
    assert ensure(folder, **no_compiler)["library"] is None
    result = processes.run(LOAD, CUTE_KERNELS_CACHE_DIR=str(folder), **no_compiler)
    assert (result["cutlass"], result["from_disk"]) == (True, 1)
    assert "float32" in result["said"]


def test_leftovers_of_a_killed_process_are_swept(folder: Path, stuck) -> None:
    stuck.kill()
    stuck.wait()
    (leftover,) = (folder / "tmp").iterdir()
    os.utime(leftover, (0, 0))
    ensure(folder)
    assert not leftover.exists()
