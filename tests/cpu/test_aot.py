"""AOT packs: what is in one, which process may use it, and how a bad one is refused. Built from the small test kernel."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
from pathlib import Path

import pytest

from cute_kernels import env
from cute_kernels.compile import aot, cache, fingerprint, freeze, packs, store
from cute_kernels.compile.spec import KernelSpec
from cute_kernels.errors import InvalidArgument, MissingKernel, PackError
from cute_kernels.target import Target
from tests import processes
from tests.scale.spec import ScaleSpec

FAMILY = Target("sm100", "sm_100f")
SPECS = [ScaleSpec(FAMILY, factor=f) for f in (2, 3)]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict, list[KernelSpec]]:
    folder = tmp_path_factory.mktemp("packs") / "sm_100f"
    seen: list[KernelSpec] = []
    manifest = aot.compile_pack(SPECS, folder, workers=1, progress=lambda spec, _: seen.append(spec))
    return folder, manifest, seen


@pytest.fixture
def pack(built: tuple[Path, dict, list[KernelSpec]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the pack, the only one this process finds, in front of an empty disk cache."""
    folder = tmp_path / "pack"
    shutil.copytree(built[0], folder)
    monkeypatch.setenv(env.CACHE_DIR.name, str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "stats", cache.Stats())
    only(monkeypatch, folder)
    yield folder
    forget()


def only(monkeypatch: pytest.MonkeyPatch, *folders: Path) -> None:
    monkeypatch.setattr(packs, "folders", lambda: list(folders))
    monkeypatch.setenv(env.PACKS.name, ":".join(map(str, folders)))
    forget()


def forget() -> None:
    cache.clear_memory()
    packs._opened.cache_clear()
    packs._note.cache_clear()


def edit(folder: Path, **changes: object) -> None:
    """Another manifest, with a seal that fits it."""
    path = folder / packs.MANIFEST
    manifest = {**json.loads(path.read_text()), **changes}
    del manifest["seal"]
    path.write_text(json.dumps({**manifest, "seal": store.seal(manifest)}))


def rows(folder: Path, **changes: object) -> None:
    """Every kernel's row changed; None: left out."""
    kernels = json.loads((folder / packs.MANIFEST).read_text())["kernels"]
    edit(folder, kernels=[{k: v for k, v in {**row, **changes}.items() if v is not None} for row in kernels])


def swap_symbols(folder: Path) -> None:
    path = folder / packs.MANIFEST
    manifest = json.loads(path.read_text())
    first, second = manifest["kernels"]
    first["symbol"], second["symbol"] = second["symbol"], first["symbol"]
    path.write_text(json.dumps(manifest))


def test_manifest_and_files(built: tuple[Path, dict, list[KernelSpec]]) -> None:
    folder, manifest, seen = built
    assert json.loads((folder / "manifest.json").read_text()) == manifest
    assert sorted(p.name for p in folder.iterdir()) == [manifest["library"], "manifest.json"]
    assert sorted(seen, key=str) == sorted(SPECS, key=str)
    assert [k["spec"] for k in manifest["kernels"]] == [s.fields() for s in SPECS]
    for row in manifest["kernels"]:
        assert {"key", "spec", "registers", "spill_bytes", "shared_bytes", "cubin_bytes", "seconds"} <= set(row)
        assert row["spill_bytes"] == 0 < row["registers"]
    assert (manifest["gpu_arch"], set(manifest["versions"])) == ("sm_100f", {"nvidia-cutlass-dsl", "apache-tvm-ffi"})


def test_building_again_replaces_the_library(built: tuple[Path, dict, list[KernelSpec]], tmp_path: Path) -> None:
    folder = tmp_path / "pack"
    shutil.copytree(built[0], folder)
    manifest = aot.compile_pack(SPECS[:1], folder, workers=1)
    assert manifest["library"] != built[1]["library"]
    assert sorted(p.name for p in folder.iterdir()) == [manifest["library"], "manifest.json"]


def test_one_pack_holds_one_architecture(tmp_path: Path) -> None:
    for specs in ([], [*SPECS, ScaleSpec(Target("sm100", "sm_100a"))]):
        with pytest.raises(InvalidArgument, match="specs of one architecture"):
            aot.compile_pack(specs, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("arch", ["sm_100f", "sm_100a", "sm_103a"])
def test_a_family_pack_serves_its_capabilities_without_a_compile(pack: Path, arch: str) -> None:
    with freeze.frozen():
        assert callable(cache.get(ScaleSpec(Target("sm100", arch), factor=3)))
    assert (cache.stats.from_packs, cache.stats.from_disk, cache.stats.compiled) == (1, 0, 0)


RESOLVE = """
    import json, sys, time
    from cute_kernels.compile import cache
    from cute_kernels.target import Target
    from tests.scale.spec import ScaleSpec
    kernel = cache.get(ScaleSpec(Target.named("sm_103a"), factor=3))
    print(json.dumps({"callable": callable(kernel), "cutlass": "cutlass" in sys.modules, **vars(cache.stats)}))
"""


def test_a_process_that_loads_a_pack_imports_no_compiler(pack: Path, tmp_path: Path) -> None:
    result = processes.run(RESOLVE, CUTE_KERNELS_PACKS=str(pack), CUTE_KERNELS_CACHE_DIR=str(tmp_path / "none"), CUTE_KERNELS_FREEZE="1")
    assert result == {"callable": True, "cutlass": False, "from_packs": 1, "from_disk": 0, "compiled": 0}


@pytest.mark.parametrize(
    ("held", "asked", "serves"),
    [
        ("sm_100f", "sm_100a", True),
        ("sm_100f", "sm_103a", True),
        ("sm_100a", "sm_100a", True),
        ("sm_100a", "sm_103a", False),
        ("sm_103a", "sm_100a", False),
        ("sm_100f", "sm_120a", False),
        ("sm_100f", "sm100:sm_90a", False),
        ("sm_100a", "sm_100f", False),
    ],
)
def test_which_architecture_serves_which(pack: Path, held: str, asked: str, serves: bool) -> None:
    edit(pack, gpu_arch=held)
    opened = packs.Pack(pack)
    assert opened.serves(Target.named(asked)) == serves
    if serves:
        assert opened.require(Target.named(asked)) is opened
    else:
        with pytest.raises(PackError, match=rf"2 kernels for {held}.*none for"):
            opened.require(Target.named(asked))


def test_without_the_architecture_the_error_lists_what_packs_hold(pack: Path, caplog: pytest.LogCaptureFixture) -> None:
    with freeze.frozen(), caplog.at_level(logging.WARNING), pytest.raises(MissingKernel) as caught:
        cache.get(ScaleSpec(Target("sm120", "sm_120a")))
    for text in (str(caught.value), caplog.text):
        assert f"{pack} holds sm_100f" in text and "usable there: sm_120a, sm_120f" in text


def test_the_exact_architecture_comes_first(pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = tmp_path / "exact"
    shutil.copytree(pack, exact)
    fields = [dataclasses.replace(s, target=Target("sm100", "sm_100a")).fields() for s in SPECS]
    rows = json.loads((exact / packs.MANIFEST).read_text())["kernels"]
    edit(exact, gpu_arch="sm_100a", kernels=[{**row, "spec": f} for row, f in zip(rows, fields, strict=True)])
    used: list[Path] = []
    find = packs.Pack.find
    monkeypatch.setattr(packs.Pack, "find", lambda self, spec: used.append(self.folder) or find(self, spec))
    for order in ((pack, exact), (exact, pack)):
        only(monkeypatch, *order)
        used.clear()
        cache.get(ScaleSpec(Target("sm100", "sm_100a"), factor=2))
        assert used == [exact]


def test_other_sources_or_specs_are_not_served(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with freeze.frozen(), pytest.raises(MissingKernel, match="no such spec built from these sources"):
        cache.get(ScaleSpec(FAMILY, factor=99))
    forget()
    monkeypatch.setattr(packs, "source_fingerprint", lambda module: "edited")
    with freeze.frozen(), pytest.raises(MissingKernel, match="no such spec built from these sources"):
        cache.get(SPECS[0])


def test_other_versions_are_served(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "versions", lambda: {"nvidia-cutlass-dsl": "99", "apache-tvm-ffi": "99"})
    with freeze.frozen():
        assert callable(cache.get(SPECS[0]))


def damage_library(folder: Path) -> None:
    (library,) = folder.glob("*.so")
    data = bytearray(library.read_bytes())
    data[5000] ^= 1
    library.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (damage_library, "missing or damaged"),
        (lambda folder: next(folder.glob("*.so")).unlink(), "missing or damaged"),
        (lambda folder: (folder / packs.MANIFEST).write_text("{"), "is no AOT pack"),
        (lambda folder: (folder / packs.MANIFEST).write_text("{}"), "is no AOT pack"),
        (lambda folder: (folder / packs.MANIFEST).unlink(), "is no AOT pack: it has no manifest.json"),
        (lambda folder: edit(folder, machine="vax"), "for vax"),
        (lambda folder: edit(folder, layout=99), "layout 99"),
        (lambda folder: (folder / packs.MANIFEST).write_text("[" * 100_000), "is no AOT pack"),
        (lambda folder: rows(folder, symbol=None), "is no AOT pack"),
        (lambda folder: rows(folder, spec={"factor": 2}), "is no AOT pack"),
        (lambda folder: rows(folder, spec="scale"), "is no AOT pack"),
        (swap_symbols, "its seal does not fit"),
    ],
)
def test_a_bad_pack_is_refused_and_ignored(pack: Path, damage, says: str, caplog: pytest.LogCaptureFixture) -> None:
    damage(pack)
    with pytest.raises(PackError, match=says):
        packs.Pack(pack)
    with freeze.frozen(), caplog.at_level(logging.WARNING), pytest.raises(MissingKernel):
        cache.get(SPECS[0])
    assert says in caplog.text


def test_packs_are_found_by_variable_and_in_the_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(env.PACKS.name, f"{tmp_path / 'a'}:{tmp_path / 'b'}")
    checkout = tmp_path / "checkout"
    for name in ("sm_100f", "sm_120f"):
        (checkout / "build" / "packs" / name).mkdir(parents=True)
        (checkout / "build" / "packs" / name / packs.MANIFEST).touch()
    monkeypatch.setattr(packs, "__file__", str(checkout / "cute_kernels" / "compile" / "packs.py"))
    own = [checkout / "build" / "packs" / name for name in ("sm_100f", "sm_120f")]
    assert packs.folders() == [tmp_path / "a", tmp_path / "b", *own]


@pytest.mark.parametrize("how", ["library gone", "function gone"])
def test_a_pack_that_breaks_after_it_was_opened_is_ignored(pack: Path, how: str, caplog: pytest.LogCaptureFixture) -> None:
    if how == "function gone":
        rows(pack, symbol="nothing_of_this_name")
    assert packs._opened(pack) is not None
    if how == "library gone":
        next(pack.glob("*.so")).unlink()
    with freeze.frozen(), caplog.at_level(logging.WARNING), pytest.raises(MissingKernel):
        cache.get(SPECS[0])
    assert "does not load" in caplog.text


def test_a_pack_without_a_seal_is_no_pack(pack: Path) -> None:
    path = pack / packs.MANIFEST
    manifest = json.loads(path.read_text())
    del manifest["seal"]
    path.write_text(json.dumps(manifest))
    with pytest.raises(PackError, match="seal"):
        packs.Pack(pack)
