"""Imports go one way, and importing the package costs next to nothing."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Each module may import those after it, never those before it; modules of one line are peers and do not import each other.
CHAIN = (
    ("__main__",),
    ("cli",),
    ("demo", "integrations", "matrix_docs"),
    ("demo_judge",),
    ("layer",),
    ("ops",),
    ("dispatch",),
    ("validate", "value_checks"),
    ("sm100", "sm120", "flashinfer_backend", "reference"),
    ("device",),
    ("kv_pool", "scales"),
    ("kv_format",),
)
LEVEL = {name: level for level, names in enumerate(CHAIN) for name in names}
# One module in several files: the calls, what launches and binds them, and the same calls as torch operators; a layer and its operator.
SAME = {
    "torch_ops": "ops",
    "launching": "ops",
    "binding": "ops",
    "forms": "ops",
    "gather_ops": "ops",
    "torch_gather": "ops",
    "layer_op": "layer",
}
# Below the chain: they import none of it.
GROUND = ("compile", "target", "errors", "env", "save_policy", "indices", "step", "handles", "scratch")
COMPILER = ("device", "sm100", "sm120")


def sources() -> Iterator[tuple[Path, str]]:
    for path in sorted((ROOT / "cute_kernels").rglob("*.py")):
        relative = path.relative_to(ROOT / "cute_kernels")
        if relative.parts != ("__init__.py",):
            name = relative.parts[0].removesuffix(".py")
            yield path, SAME.get(name, name)


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """(dotted name, whether it runs on import) of every import in a file, functions included; type-checking imports aside."""
    tree = ast.parse(path.read_text())
    typing_only = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and ast.unparse(branch.test) == "TYPE_CHECKING"
        for node in ast.walk(branch)
    }
    inside = {id(node) for f in ast.walk(tree) if isinstance(f, ast.FunctionDef | ast.Lambda) for node in ast.walk(f)}
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        at_top = id(node) not in inside
        if isinstance(node, ast.Import):
            yield from ((alias.name, at_top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from ((f"{node.module}.{alias.name}", at_top) for alias in node.names)


def own(name: str) -> str | None:
    """The package's module that a dotted name belongs to."""
    parts = name.split(".")
    return SAME.get(parts[1], parts[1]) if parts[0] == "cute_kernels" and len(parts) > 1 else None


@pytest.mark.parametrize(("path", "module"), [pytest.param(p, m, id=str(p.relative_to(ROOT))) for p, m in sources()])
def test_imports_go_one_way(path, module):
    assert module in LEVEL or module in GROUND, f"{module}: give it a place in CHAIN or GROUND"
    for name, at_top in imports(path):
        target = own(name)
        if target in LEVEL and target != module:
            assert module in LEVEL, f"{module} imports {name}, but lies below the chain"
            assert LEVEL[module] < LEVEL[target], f"{module} imports {name} upwards or sideways"
        if name.split(".")[0] == "cutlass" and at_top:
            assert module in COMPILER, f"{module} imports cutlass when it is imported"
        if name.split(".")[0] == "flashinfer":
            assert module in ("flashinfer_backend", "__main__", "cli") and not at_top, f"{module} imports {name}"


def test_the_emulator_knows_nothing_of_the_package():
    for path in (ROOT / "ptx_emulator").rglob("*.py"):
        assert not [name for name, _ in imports(path) if name.split(".")[0] == "cute_kernels"], path


SCRIPT = """
import json, sys, time
import torch
before, start = set(sys.modules), time.process_time()
import cute_kernels
seconds = time.process_time() - start
at_import = sorted(set(sys.modules) - before)
for name in cute_kernels.__all__:
    getattr(cute_kernels, name)
heavy = sorted({m.split(".")[0] for m in set(sys.modules) - before} & {"cutlass", "flashinfer", "tvm_ffi", "triton", "cuda"})
print(json.dumps({"seconds": seconds, "at_import": at_import, "heavy": heavy, "cuda": torch.cuda.is_initialized()}))
"""


def test_importing_costs_nothing_and_no_public_name_needs_a_compiler():
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, cwd=ROOT)
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["seconds"] < 0.2
    assert found["at_import"] == ["cute_kernels"]
    assert found["heavy"] == [] and not found["cuda"]


def test_an_unknown_name_is_an_attribute_error():
    import cute_kernels

    with pytest.raises(AttributeError, match="no_such_name"):
        cute_kernels.no_such_name  # noqa: B018
    assert set(cute_kernels.__all__) <= set(dir(cute_kernels))
