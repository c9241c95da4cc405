"""What README and the pages under docs/ say is so: the code runs, the links lead somewhere, the tables agree with the package."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch

from cute_kernels import UnsupportedRequest, cli, pad_q_heads
from cute_kernels.compile.spec import SPEC_TYPES
from cute_kernels.compile.store import Store
from cute_kernels.kv_format import resolve_format
from cute_kernels.reference import cos_sin_table

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
CACHE = (ROOT / "docs" / "compile_cache.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def test_the_use_shown_in_the_readme_runs():
    (code,) = blocks(README, "python")
    torch.manual_seed(0)
    table = {"dtype": torch.int32}
    given = {
        "window_cache": torch.zeros(12, 64, 512, dtype=torch.bfloat16),
        "compressed_cache": torch.zeros(4, 64, 512, dtype=torch.bfloat16),
        "state_pool": torch.zeros(200, 4, 2048),
        "ape": torch.randn(4, 1024),
        "norm_weight": torch.ones(512, dtype=torch.bfloat16),
        "cos_sin": cos_sin_table(512, ratio=4),
        "sinks": torch.zeros(64),
        "query_lens": [1, 300],
        "seq_lens": [200, 300],
        "window_table": torch.arange(12, **table).view(2, 6),
        "compressed_table": torch.arange(4, **table).view(2, 2),
        "state_table": torch.arange(200, **table).view(2, 100),
        "q": torch.randn(301, 64, 512).bfloat16(),
        "kv": torch.randn(301, 512).bfloat16(),
        "kv_score": torch.randn(301, 2048),
        "ids": torch.full((301, 512), -1, **table),
    }
    given["ids"][1:, 0] = 0
    assert 'device="cuda"' in code
    exec(code.replace('device="cuda"', 'device="cpu"'), given)
    out = given["out"]
    assert out.shape == (301, 64, 512) and out.dtype == torch.bfloat16 and bool(out.isfinite().all()) and float(out.abs().max()) > 0.1


def test_the_code_in_the_readme_is_short():
    (code,) = blocks(README, "python")
    statements = ast.parse(code).body
    assert len(statements) <= 10


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_verbs_and_commands_exist(page):
    text = page.read_text()
    verbs = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line in re.findall(r"^make ([^#\n]*)|`make ([^`]*)`", text, re.MULTILINE):
        for word in "".join(line).split():
            if "=" in word or word.startswith('"'):
                break
            assert word in verbs, f"make {word}"
    for name in re.findall(r"python -m cute_kernels ([a-z]+)", text):
        assert name in cli.main.commands, name


def test_every_kernel_and_head_count_is_in_the_readme():
    for operation in SPEC_TYPES:
        assert f"`{operation}`" in README, operation
    heads = sorted({pad_q_heads(n) for n in range(1, 129)})
    assert f"padded to {', '.join(map(str, heads[:-1]))} or {heads[-1]}" in README


@pytest.mark.parametrize("name", ["auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_ds_mla"])
def test_the_readme_names_the_dtypes_of_each_family(name):
    row = next(line for line in README.splitlines() if line.startswith("| `kv_cache_dtype`"))
    for family, cell in zip(("sm100", "sm120"), row.split("|")[2:4], strict=True):
        try:
            resolve_format(name, family)
        except UnsupportedRequest:
            assert f"`{name}`" not in cell
        else:
            assert f"`{name}`" in cell


def test_the_cache_page_shows_the_folders_of_the_cache(tmp_path):
    disk = Store(tmp_path / "cache")
    assert disk.writable()
    for folder in disk.root.iterdir():
        assert f"<root>/{folder.name}/" in CACHE
