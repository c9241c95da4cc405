"""Generated pages are what the package says now; what they claim is so; the matrix command prints them."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET

import pytest
from click.testing import CliRunner

import cute_kernels as ck
from cute_kernels import cli, dispatch, matrix_docs
from cute_kernels.compile.matrix import support_matrix
from cute_kernels.compile.spec import SPEC_TYPES
from cute_kernels.kv_format import FORMATS, PACKED, formats_of, resolve_format
from cute_kernels.kv_pool import PoolPlan
from cute_kernels.target import Target, all_targets
from scripts import docs
from tests.processes import ROOT

PAGES = docs.pages()
MATRIX = PAGES["support_matrix.md"]


@pytest.mark.parametrize("name", PAGES)
def test_pages_are_not_stale(name: str) -> None:
    assert (ROOT / "docs" / name).read_text() == PAGES[name], "write it again: make docs"


def test_no_other_picture_lies_about() -> None:
    found = {f"kv_layout/{p.name}" for p in (ROOT / "docs" / "kv_layout").iterdir()}
    assert found == {name for name in PAGES if "/" in name}


def test_the_script_writes_what_is_stale_and_checks_what_is_not(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(docs, "DOCS", tmp_path)
    assert docs.main(["--check"]) == 1 and not list(tmp_path.iterdir())
    assert docs.main([]) == 0 and {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*.*")} == set(PAGES)
    assert docs.main(["--check"]) == 0
    (tmp_path / "kv_layout.md").write_text("old")
    capsys.readouterr()
    assert docs.main(["--check"]) == 1 and capsys.readouterr().out.split() == ["kv_layout.md"]


def run(*arguments: str) -> str:
    result = CliRunner().invoke(cli.main, ["matrix", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_the_command() -> None:
    assert run() == run("--format", "md") == MATRIX
    data = json.loads(run("--format", "json"))
    assert data == matrix_docs.matrix() == json.loads(json.dumps(data))
    assert CliRunner().invoke(cli.main, ["matrix", "--format", "html"]).exit_code == 2


def test_every_kernel_of_a_pack_is_counted() -> None:
    data = matrix_docs.matrix()
    assert set(data["operations"]) == set(SPEC_TYPES)
    for family in matrix_docs.FAMILIES:
        specs = support_matrix(Target.named(family))
        assert sum((o[family] or {"kernels": 0})["kernels"] for o in data["operations"].values()) == len(specs)
        assert data["packs"][family.replace("sm", "sm_") + "f"] == len(specs)
        for spec in specs:
            choices = data["operations"][spec.operation][family]["choices"]
            assert all(spec.fields()[name] in values for name, values in choices.items())
    for operation in SPEC_TYPES:
        assert f"| `{operation}` |" in MATRIX
    assert f"sm_100f holds {data['packs']['sm_100f']} kernels, one for sm_120f {data['packs']['sm_120f']}:" in MATRIX


def test_devices_and_packs() -> None:
    found = {d["capability"]: d for d in matrix_docs.matrix()["devices"]}
    assert set(found) == {"10.0", "10.3", "12.0", "12.1"}
    for target in all_targets():
        for major, minor in target.capabilities:
            if (major, minor) != (9, 0):
                assert target.gpu_arch in found[f"{major}.{minor}"]["packs"] and found[f"{major}.{minor}"]["family"] == target.family


def test_formats_and_heads_are_those_of_supports() -> None:
    """`supports` without a target follows the SM100 family; its answers need no FlashInfer on the CPU."""
    data = matrix_docs.matrix()
    for name, answers in data["kv_cache_dtype"].items():
        answer = ck.supports("cpu", kv_cache_dtype=name)
        assert answer.kv_format == answers["sm100"].get("format", "") and bool(answer) == ("format" in answers["sm100"])
        for family in matrix_docs.FAMILIES:
            if "format" in answers[family]:
                fmt = resolve_format(name, family)
                assert (fmt.name, fmt.row_bytes, fmt.scaled) == tuple(answers[family].values()) and fmt in formats_of(family)
            else:
                with pytest.raises(ck.UnsupportedRequest, match=re.escape(answers[family]["refused"].splitlines()[0])):
                    resolve_format(name, family)
    assert {a["format"] for answers in data["kv_cache_dtype"].values() for a in answers.values() if "format" in a} == set(FORMATS)
    for span, padded in data["padded_heads"].items():
        first, last = map(int, span.split("-"))
        assert {ck.supports("cpu", num_heads=n).padded_heads for n in range(first, last + 1)} == {padded}
    assert not ck.supports("cpu", num_heads=last + 1)
    assert data["index_form"] == {"sm100": "combined", "sm120": "segments"}
    assert data["decode"] == {f: dispatch.decode_path(Target.named(f)) for f in ("sm100", "sm120")}


def test_every_refusal_names_what_is_supported() -> None:
    refused = matrix_docs.matrix()["refused"]
    assert len(refused) >= 10
    for what, answer in refused.items():
        assert "not supported on" in answer and "supported: " in answer and "hint: " in answer, what


def test_evidence_is_there_and_nothing_claims_blackwell() -> None:
    for claims in (matrix_docs.EMULATED, matrix_docs.ON_SM90):
        for operation, path in claims.items():
            assert operation in SPEC_TYPES and re.search(rf"\b{operation}\b", (ROOT / path).read_text()), path
    for operation, found in matrix_docs.matrix()["operations"].items():
        emulated, sm90 = operation in matrix_docs.EMULATED, operation in matrix_docs.ON_SM90
        assert ("emulated" in found["evidence"], "SM90" in found["evidence"]) == (emulated, sm90)
    assert "none of which is a run on Blackwell; nothing here has run there" in MATRIX


@pytest.mark.parametrize("name", [name for name in PAGES if name.endswith(".svg")])
def test_pictures_are_plain_svg_within_their_frame(name: str) -> None:
    root = ET.fromstring(PAGES[name])
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    assert f"]({name})" in PAGES["kv_layout.md"]
    kinds, box = set(), 0.0
    for shape in root:
        kind = shape.tag.split("}")[1]
        kinds.add(kind)
        if kind == "rect":
            x, y = float(shape.attrib.get("x", 0)), float(shape.attrib.get("y", 0))
            assert x >= 0 and x + float(shape.attrib["width"]) <= width + 0.1
            assert y >= 0 and y + float(shape.attrib["height"]) <= height
            box = float(shape.attrib["width"])
        elif kind == "text":
            assert 0 < float(shape.attrib["y"]) < height
            length = len(shape.text or "") * int(shape.attrib["font-size"]) * 0.5
            inside = shape.attrib["text-anchor"] == "middle"
            assert length < (box if inside else width - float(shape.attrib["x"])), shape.text
    assert kinds == {"title", "rect", "text"}


def test_the_layout_page_states_the_numbers_of_the_plans() -> None:
    page = PAGES["kv_layout.md"]
    for ratios in docs.MODELS.values():
        for fmt in FORMATS.values():
            assert f"{PoolPlan.of(ratios, fmt).block_bytes:,}" in page
    assert len(docs.MODELS["V4-Flash"]) == 44 and len(docs.MODELS["V4-Pro"]) == 62
    (described,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    entry = json.loads(described)
    assert entry in PoolPlan.of([0, 4, 128], PACKED).describe()["pages"]
    assert (entry["footer_offset"], entry["payload_bytes"]) == (64 * 576, 64 * 584)
    better = docs.fuller()
    assert all(g.waste_bytes < 0.45 * better.block_bytes for g in better.groups.values())
