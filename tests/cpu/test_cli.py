"""The command line, on the small commands and on errors; packs and inspection of real kernels are compile tests."""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from cute_kernels import cli, env
from cute_kernels.compile import cache, matrix
from cute_kernels.target import Target
from tests import processes
from tests.scale.spec import ScaleSpec


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(env.CACHE_DIR.name, str(tmp_path / "cache"))
    monkeypatch.setattr(cli, "console", cli.Console(width=200))
    return tmp_path / "cache"


@pytest.fixture
def small_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "support_matrix", lambda target: [ScaleSpec(target, factor=f) for f in (2, 3)])


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(cli.main, arguments)
    assert result.exit_code == code, result.output + repr(result.exception)
    return result.output


def test_info_names_versions_target_cache_and_flashinfer(folder: Path) -> None:
    cache.ensure(ScaleSpec(Target("sm100", "sm_100a")))
    text = run("info")
    for wanted in ("cute-kernels", *cli.PACKAGES, "kernel cache", str(folder), "1 kernels", "flashinfer"):
        assert wanted in text


def test_info_needs_no_cubin_download_and_no_compiler() -> None:
    program = """
        import json, socket, sys
        def refuse(*arguments):
            raise AssertionError(f"network use: {arguments}")
        socket.socket.connect = refuse
        socket.getaddrinfo = refuse
        from click.testing import CliRunner
        from cute_kernels.cli import main
        result = CliRunner().invoke(main, ["info"])
        print(json.dumps({"code": result.exit_code, "why": repr(result.exception), "cutlass": "cutlass" in sys.modules}))
    """
    assert processes.run(program)["code"] == 0


def test_cache_commands(folder: Path) -> None:
    assert "0 kernels" in run("cache", "info")
    cache.ensure(ScaleSpec(Target("sm100", "sm_100a")))
    text = run("cache", "info")
    assert "1 kernels" in text and "test_scale" in text and "sm100:sm_100a" in text
    assert "0 kernels removed" in run("cache", "gc", "--max-age-days", "1")
    assert "1 kernels removed" in run("cache", "gc", "--max-age-days", "0")
    cache.ensure(ScaleSpec(Target("sm100", "sm_100a")))
    assert "1 kernels removed" in run("cache", "clear")
    assert "0 kernels" in run("cache", "info")


def test_cache_commands_on_a_damaged_cache(folder: Path) -> None:
    """Manifests of any JSON, and a cache of which the entries alone were copied."""
    cache.ensure(ScaleSpec(Target("sm100", "sm_100a")))
    [manifest] = folder.rglob("manifest.json")
    for junk in (
        "{}",
        "[]",
        "null",
        '{"spec": 3}',
        '{"spec": {"operation": 1}}',
        '{"spec": {"operation": [], "family": 0, "gpu_arch": 1}}',
        "{",
    ):
        manifest.write_text(junk)
        assert "1 kernels" in run("cache", "info")
    shutil.rmtree(folder / "tmp")
    assert "1 kernels removed" in run("cache", "clear")
    assert "0 kernels" in run("cache", "info")


def test_compile_writes_one_pack_or_one_for_each_target(folder: Path, small_matrix: None, tmp_path: Path) -> None:
    run("compile", "--arch", "sm_100f", "--out", str(tmp_path / "one"), "--jobs", "1")
    assert json.loads((tmp_path / "one" / "manifest.json").read_text())["gpu_arch"] == "sm_100f"
    text = run("compile", "--arch", "sm_120f", "--arch", "sm100:sm_90a", "--out", str(tmp_path / "two"), "--jobs", "1")
    assert {p.parent.name for p in (tmp_path / "two").rglob("manifest.json")} == {"sm120-sm_120f", "sm100-sm_90a"}
    assert "0 of them spill" in text


def test_inspect_prints_resources_widths_and_counts(folder: Path, small_matrix: None) -> None:
    text = run("inspect", "--arch", "sm_120f", "--only", "factor=3", "--jobs", "1")
    assert "factor=3" in text and "factor=2" not in text
    for wanted in (
        "registers",
        "spill B",
        "shared B",
        "occupancy",
        "per byte",
        "load B",
        "store B",
        "global load 1",
        "global store 1",
        "pdl 2",
    ):
        assert wanted in text


def test_inspect_refuses_a_choice_of_no_kernel(folder: Path, small_matrix: None) -> None:
    text = run("inspect", "--arch", "sm_120f", "--only", "factor=4", code=2)
    assert "no kernel for sm120:sm_120f has 'factor=4' in its spec" in text and "test_scale" in text


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm100:sm_120a"])
def test_an_unknown_architecture_is_refused_with_the_list(arch: str, tmp_path: Path) -> None:
    text = run("compile", "--arch", arch, "--out", str(tmp_path), code=2)
    assert "sm_100f" in text or "sm100:sm_90a" in text
    assert not list(tmp_path.iterdir())


def test_errors_of_the_package_end_without_a_traceback(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.CACHE_MAX_MB.name, "-1")
    text = run("cache", "gc", code=1)
    assert "CUTE_KERNELS_CACHE_MAX_MB" in text and "'-1'" in text and "Traceback" not in text


def test_demo_hands_its_arguments_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[list[str], str]] = []
    demo = importlib.import_module("cute_kernels.demo")
    monkeypatch.setattr(demo, "main", lambda arguments, prog_name: seen.append((arguments, prog_name)) or 3)
    run("demo", "--tokens", "300", code=3)
    assert seen == [(["--tokens", "300"], "main demo")]
    monkeypatch.undo()
    assert "Usage: main demo [OPTIONS]" in run("demo", "-h")
