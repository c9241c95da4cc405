"""Cache keys: every specialisation input, version and source line changes them, and nothing else does."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path

import pytest

from cute_kernels.compile import cache, fingerprint, matrix
from cute_kernels.compile.spec import (
    SPEC_TYPES,
    CompressStoreSpec,
    ConvertIndicesSpec,
    GatherUpconvertSpec,
    KernelSpec,
    QkvInsertSpec,
    SparseIndicesSpec,
    spec_from_fields,
)
from cute_kernels.errors import InvalidArgument
from cute_kernels.layer import LayerSpec
from cute_kernels.save_policy import SavePolicy
from cute_kernels.target import Target, all_targets
from tests import processes
from tests.scale.spec import ScaleSpec

SM100, SM120 = Target("sm100", "sm_100a"), Target("sm120", "sm_120a")
# For each spec type a spec, and for each of its fields another value that is legal with the rest.
VARIATIONS: dict[type[KernelSpec], tuple[KernelSpec, dict[str, object]]] = {
    CompressStoreSpec: (
        CompressStoreSpec(SM100),
        {"target": Target("sm100", "sm_103a"), "vector_bytes": 32, "pdl": False, "ratio": 128, "kv_format": "fp8", "save": "policy"},
    ),
    SparseIndicesSpec: (
        SparseIndicesSpec(SM100),
        {"target": SM120, "vector_bytes": 32, "pdl": False, "source": "global", "slots": False},
    ),
    QkvInsertSpec: (
        QkvInsertSpec(SM100, kv_format="fp8"),
        {
            "target": Target("sm100", "sm_103a"),
            "vector_bytes": 32,
            "pdl": False,
            "kv_format": "bf16",
            "q_dtype": "e4m3",
            "apply_q_norm": False,
        },
    ),
    GatherUpconvertSpec: (
        GatherUpconvertSpec(SM100),
        {"target": SM120, "vector_bytes": 32, "pdl": False, "kv_format": "fp8", "seq_starts": False},
    ),
    ConvertIndicesSpec: (
        ConvertIndicesSpec(SM100),
        {"target": SM120, "vector_bytes": 32, "pdl": False, "prefill": True, "compact": False},
    ),
    ScaleSpec: (ScaleSpec(SM100), {"target": SM120, "vector_bytes": 32, "pdl": False, "factor": 3}),
}


@pytest.fixture
def one_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """All specs share one source here, so that only their fields can tell them apart."""
    monkeypatch.setattr(cache, "fingerprint", lambda module: "the same")


def test_every_spec_type_and_field_is_varied_here() -> None:
    assert set(SPEC_TYPES.values()) <= set(VARIATIONS)
    for kind, (_, changes) in VARIATIONS.items():
        missing = {f.name for f in dataclasses.fields(kind)} - set(changes)
        assert missing <= {"scores"}, "`scores` cannot change alone: see below"


@pytest.mark.parametrize("kind", VARIATIONS, ids=lambda kind: kind.__name__)
def test_every_field_changes_the_key(kind: type[KernelSpec], one_source: None) -> None:
    spec, changes = VARIATIONS[kind]
    variants = [spec, *(dataclasses.replace(spec, **{name: value}) for name, value in changes.items())]
    if kind is CompressStoreSpec:
        variants.append(dataclasses.replace(spec, scores=False, save="none"))
    assert len({cache.key(v) for v in variants}) == len(variants)


def test_family_and_architecture_both_count(one_source: None) -> None:
    keys = {cache.key(SparseIndicesSpec(t)) for t in all_targets()}
    assert len(keys) == len(all_targets())


@pytest.mark.parametrize("target", all_targets(), ids=str)
def test_the_matrix_has_no_spec_twice(target: Target, one_source: None) -> None:
    specs = matrix.support_matrix(target)
    assert len({cache.key(s) for s in specs}) == len({s.canonical() for s in specs}) == len(specs)


@pytest.mark.parametrize("target", all_targets(), ids=str)
def test_fields_and_back(target: Target) -> None:
    for spec in matrix.support_matrix(target):
        assert spec_from_fields(json.loads(spec.canonical())) == spec
        assert str(target) in str(spec)
        assert len(set(spec.argument_names)) == len(spec.argument_names)


@pytest.mark.parametrize("target", all_targets(), ids=str)
def test_a_layer_never_needs_a_kernel_outside_the_matrix(target: Target) -> None:
    everything = set(matrix.support_matrix(target))
    for ratio in (1, 4, 128):
        for kv_cache_dtype in ("auto", "fp8"):
            for save in (SavePolicy.EVERY_ROW, SavePolicy(rollback=3)):
                layer = LayerSpec(num_heads=8, ratio=ratio, max_seq_len=4096, kv_cache_dtype=kv_cache_dtype, save=save)
                for scores in (True, False):
                    needed = set(layer.specs(target, scores=scores))
                    assert needed and needed <= everything


def test_impossible_specs_are_refused() -> None:
    for wrong in (
        lambda: CompressStoreSpec(SM100, ratio=8),
        lambda: CompressStoreSpec(SM100, kv_format="fp8_ds_mla"),
        lambda: CompressStoreSpec(SM120, kv_format="bf16"),
        lambda: CompressStoreSpec(SM100, scores=False, save="every_row"),
        lambda: SparseIndicesSpec(SM100, source="nowhere"),
        lambda: QkvInsertSpec(SM120, kv_format="bf16"),
        lambda: QkvInsertSpec(SM100, kv_format="bf16", q_dtype="e4m3"),
        lambda: GatherUpconvertSpec(SM100, kv_format="bf16"),
        lambda: SparseIndicesSpec(SM100, vector_bytes=64),
    ):
        with pytest.raises(InvalidArgument, match="expected"):
            wrong()


def test_versions_change_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = ScaleSpec(SM100)
    keys = {cache.key(spec)}
    now = fingerprint.versions()
    for name in now:
        monkeypatch.setattr(fingerprint, "versions", lambda name=name: {**now, name: "99"})
        keys.add(cache.key(spec))
    monkeypatch.undo()
    monkeypatch.setattr(fingerprint, "ENTRY", fingerprint.ENTRY + 1)
    keys.add(cache.key(spec))
    assert len(keys) == 2 + len(now) == 4


def test_versions_do_not_change_what_packs_are_matched_by(monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint.source_fingerprint(ScaleSpec(SM100).module)
    monkeypatch.setattr(fingerprint, "versions", lambda: {"nvidia-cutlass-dsl": "99"})
    monkeypatch.setattr(fingerprint, "ENTRY", 0)
    assert fingerprint.source_fingerprint(ScaleSpec(SM100).module) == before


def test_compile_options_change_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {cache.key(ScaleSpec(SM100))}
    monkeypatch.setattr(fingerprint, "OPTIONS", ("--enable-tvm-ffi",))
    keys.add(cache.key(ScaleSpec(SM100)))
    monkeypatch.undo()
    monkeypatch.setenv("CUTE_DSL_LINEINFO", "1")
    keys.add(cache.key(ScaleSpec(SM100)))
    assert len(keys) == 3


# Prints the key of one spec of every kernel module, given the folder the package is to be imported from.
KEYS = """
    import json, sys
    sys.path.insert(0, sys.argv[1])
    from cute_kernels.compile import cache, fingerprint
    from cute_kernels.compile.spec import SPEC_TYPES
    from cute_kernels.target import Target
    specs = {t(Target.named(a), kv_format=k) if o in ("compress_store", "qkv_insert") else t(Target.named(a))
             for o, t in SPEC_TYPES.items() for a, k in (("sm_100a", "bf16"), ("sm_120a", "fp8_ds_mla"))}
    print(json.dumps({s.module: [cache.key(s), sorted(fingerprint.sources(s.module))] for s in specs}))
"""


def keys_of(package_root: Path, **options: object) -> dict[str, list]:
    return processes.run(KEYS, package_root, **options)


def test_the_same_key_in_any_process(tmp_path: Path) -> None:
    here = keys_of(processes.ROOT)
    copy = tmp_path / "elsewhere"
    shutil.copytree(processes.ROOT / "cute_kernels", copy / "cute_kernels")
    for path in copy.rglob("*.py"):
        os.utime(path, (1, 1))
    changed = {
        "PYTHONHASHSEED": "7",
        "LANG": "C",
        "TZ": "Asia/Tokyo",
        "CUTE_KERNELS_CACHE_DIR": str(tmp_path / "c"),
        "CUTE_DSL_ARCH": "sm_90a",
    }
    there = keys_of(copy, cwd=tmp_path, PYTHONPATH=None, **changed)
    assert there == here


# Changes one line of each file of a copy of the package in turn; prints which kernel modules get a new key each time.
CHANGES = """
    import functools, json, pathlib, sys
    sys.path.insert(0, sys.argv[1])
    from cute_kernels.compile import cache, fingerprint
    from cute_kernels.compile.spec import SPEC_TYPES
    from cute_kernels.target import Target
    root = pathlib.Path(sys.argv[1])
    parse = functools.cache(lambda name, path, text, parse=fingerprint._imports: parse(name, path))
    fingerprint._imports = lambda name, path: parse(name, path, path.read_bytes())  # most files are the same in every round
    def modules():
        fingerprint.sources.cache_clear(); fingerprint._source_hash.cache_clear()
        return {f"cute_kernels.{f}.{o}": fingerprint.fingerprint(f"cute_kernels.{f}.{o}") for f in ("sm100", "sm120") for o in SPEC_TYPES}
    before = modules()
    changed = {}
    for path in sorted((root / "cute_kernels").rglob("*.py")):
        text = path.read_bytes()
        path.write_bytes(text + b"# one more line\\n")
        after = modules()
        path.write_bytes(text)
        changed[str(path.relative_to(root))] = sorted(m for m in before if before[m] != after[m])
    assert modules() == before
    print(json.dumps({"changed": changed, "sources": {m: sorted(fingerprint.sources(m)) for m in before}}))
"""


def test_a_line_of_source_changes_the_keys_of_the_kernels_built_from_it_and_of_no_other(tmp_path: Path) -> None:
    shutil.copytree(processes.ROOT / "cute_kernels", tmp_path / "cute_kernels")
    result = processes.run(CHANGES, tmp_path, cwd=tmp_path, PYTHONPATH=None)
    for path, modules in result["changed"].items():
        name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        assert modules == sorted(m for m, sources in result["sources"].items() if name in sources), path
        host_only = not name.startswith(("cute_kernels.device", "cute_kernels.sm100", "cute_kernels.sm120"))
        if host_only and name.rpartition(".")[2] not in ("target", "kv_format", "save_policy", "scratch", "indices"):
            assert not modules, f"{path} is no kernel source"
        if name.startswith("cute_kernels.sm100."):
            assert not [m for m in modules if ".sm120." in m], path
        if name.startswith("cute_kernels.sm120."):
            assert not [m for m in modules if ".sm100." in m], path
    for module, sources in result["sources"].items():
        assert module in sources and any(s.startswith("cute_kernels.device.") for s in sources)


def test_the_walk_follows_relative_and_nested_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "walked"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "inner" / "__init__.py").write_text("from . import far\n")
    (package / "inner" / "far.py").write_text("X = 1\n")
    (package / "kernel.py").write_text("from .tools import helper\n\n\ndef trace(spec):\n    from walked import late\n")
    (package / "tools.py").write_text("import os\nimport walked.inner.leaf\nhelper = 1\n")
    (package / "inner" / "leaf.py").write_text("from ..other import y as z\n")
    (package / "other.py").write_text("y = 1\n")
    (package / "late.py").write_text("")
    (package / "unused.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    names = {n.removeprefix("walked").lstrip(".") for n in fingerprint.sources("walked.kernel")}
    assert names == {"", "kernel", "tools", "inner", "inner.far", "inner.leaf", "other", "late"}
