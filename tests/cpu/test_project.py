"""The project's own files: what they promise to one another."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from cute_kernels import env
from cute_kernels.errors import InvalidArgument
from tests.processes import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it on 3.10

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def python_files(*folders: str) -> list[Path]:
    return [p for folder in folders for p in sorted((ROOT / folder).rglob("*.py"))]


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / "constraints" / name).read_text().splitlines()
    return dict(line.partition(" ;")[0].split("==") for line in lines if line and not line.startswith("#"))


@pytest.mark.parametrize("name", ["newest.txt", "vllm-0.33.txt"])
def test_pins_lie_in_the_ranges_of_the_project(name: str) -> None:
    from packaging.requirements import Requirement

    pinned = pins(name)
    extras = [line for lines in PROJECT["optional-dependencies"].values() for line in lines]
    wanted = {r.name: r for r in map(Requirement, [*PROJECT["dependencies"], *extras])}
    for package in ("nvidia-cutlass-dsl", "apache-tvm-ffi", "flashinfer-python"):
        assert package in pinned
    for package, version in pinned.items():
        if package in wanted:
            assert wanted[package].specifier.contains(version, prereleases=True), f"{package} {version}"


def test_runtime_dependencies_are_ranges() -> None:
    assert all(">=" in d and "==" not in d for d in PROJECT["dependencies"])


def test_every_verb_of_the_makefile_is_listed_by_help() -> None:
    tests = "test test-cpu test-compile test-emulator test-gpu test-pins"
    wanted = f"help setup docs demo {tests} compile-sm100 compile-sm120 lint type bench bench-loading clean-cache"
    listed = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert {line.split()[0] for line in listed.splitlines() if line.startswith("  ")} == set(wanted.split())


def test_every_environment_variable_is_declared_once_and_no_other_is_read() -> None:
    declared = [v.name for v in env.VARIABLES]
    assert len(set(declared)) == len(declared)
    read: set[str] = set()
    for path in python_files("cute_kernels", "ptx_emulator", "examples"):
        read |= set(re.findall(r"\bCUTE_KERNELS_\w+", path.read_text()))
    assert read <= set(declared), "declare it in env.py"
    for variable in env.VARIABLES:
        assert variable.name in env.markdown() and variable.doc in env.markdown()
    for path in python_files("cute_kernels", "ptx_emulator"):
        for name in re.findall(r"""environ(?:\.get\(|\[)"(\w+)""", path.read_text()):
            assert f"`{name}`" in env.markdown(), f"{path}: {name}"


@pytest.mark.parametrize(
    ("value", "method"), [("yes", "flag"), ("2", "flag"), ("-1", "number"), ("nan", "number"), ("inf", "number"), ("x", "number")]
)
def test_a_bad_value_is_refused_by_name(value: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    variable = env.FREEZE if method == "flag" else env.LOCK_TIMEOUT
    monkeypatch.setenv(variable.name, value)
    with pytest.raises(InvalidArgument, match=f"{variable.name}: got '{value}'"):
        getattr(variable, method)()


def test_the_environment_page_is_the_table() -> None:
    page = ROOT / "docs" / "environment.md"
    assert page.read_text() == env.markdown(), "write it again: python -c 'from cute_kernels import env; print(env.markdown(), end=\"\")'"


def test_no_file_is_too_long() -> None:
    long = {
        str(p.relative_to(ROOT)): n
        for p in python_files("cute_kernels", "ptx_emulator", "examples", "benchmarks", "tests")
        if (n := len(p.read_text().splitlines())) > 620
    }
    assert not long


def test_only_build_compiles() -> None:
    calling = [str(p.relative_to(ROOT)) for p in python_files("cute_kernels") if "cute.compile(" in p.read_text()]
    assert calling == ["cute_kernels/compile/build.py"]
