"""`python -m ptx_emulator`: the report of one case, and what is printed when a kernel is at fault."""

from __future__ import annotations

from typing import Any

import pytest

from cute_kernels import ops
from cute_kernels.compile.spec import SPEC_TYPES
from ptx_emulator import KernelFault, Memory
from ptx_emulator.__main__ import main
from ptx_emulator.report import checked
from tests.emulator import cases, small_kernels
from tests.emulator.emulated import emulated
from tests.support.gather import make_convert_case


@pytest.mark.parametrize("target", ["sm_100a", "sm_120a"])
def test_report_of_a_case(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sparse_indices", "padded", "--target", target]) == 0
    text = capsys.readouterr().out
    for part in ("1 launch of", "thread instructions", "integer", "bytes loaded", "sectors", "st.global", "never executed", "every lane"):
        assert part in text, f"{part!r} not in\n{text}"


@pytest.mark.parametrize("target", ["sm_100a", "sm_120a"])
@pytest.mark.parametrize("kernel", ["gather_upconvert", "convert_indices"])
def test_cases_of_dense_prefill(kernel: str, target: str, capsys: pytest.CaptureFixture[str]) -> None:
    for case in cases.CASES[kernel]:
        assert main([kernel, case, "--target", target]) == 0
        assert "nothing else written" in capsys.readouterr().out


def test_every_kernel_has_cases(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert {line.split(":")[0] for line in capsys.readouterr().out.splitlines()} == set(cases.CASES)
    assert {name.split("-")[0] for name in cases.CASES} == set(SPEC_TYPES)
    assert main(["sparse_indices", "no such case"]) == 2
    assert main(["no such kernel", "decode"]) == 2
    with pytest.raises(SystemExit, match="2"):
        main(["sparse_indices", "decode", "--target", "sm_7"])
    assert "'sm_7' is none of sm_100a" in capsys.readouterr().err


def test_a_crowded_ring_and_what_was_checked(capsys: pytest.CaptureFixture[str]) -> None:
    """Bulk copies stand in the table of accesses, and the last line names what this kernel gave occasion to check."""
    assert main(["compress_store-4", "crowded"]) == 0
    text = capsys.readouterr().out
    assert "27 rows stored" in text
    bulk = [line.split() for line in text.splitlines() if "cp.async.bulk.shared" in line]
    assert bulk and all(int(row[2].replace(",", "")) * 32 == int(row[3].replace(",", "")) for row in bulk)
    for part in ("proxy fences", "mbarriers", "griddepcontrol.wait", "read-only tensors"):
        assert part in text.split("checks:")[1], part


def test_checks_are_those_that_were_made() -> None:
    _, result = small_kernels.run_reverse(small_kernels.REVERSE, pdl=False)
    made = checked([result])
    assert {"shared-memory races", "barriers", "outputs read before they are written"} <= set(made)
    assert not {"proxy fences", "mbarriers", "griddepcontrol.wait", "owned rows", "member masks"} & set(made)
    _, result = small_kernels.run_reverse(small_kernels.REVERSE, owned=50, check_races=False)
    assert "owned rows" in checked([result]) and "griddepcontrol.wait" in checked([result])
    assert "shared-memory races" not in checked([result])


def test_counts_of_a_small_kernel() -> None:
    """64 threads load and store 50 words each of 3 rows of 200 bytes; every second row starts in the middle of a sector."""
    _, result = small_kernels.run_reverse(small_kernels.REVERSE, statistics=True)
    load, store = (row for _, row in sorted(result.accesses.items()))
    assert load == store and load[0] == 6 and load[2] == 600
    assert result.loaded == 600 and result.stored == 600
    assert 3 * 200 / 32 <= load[1] <= 3 * (200 / 32 + 3)
    assert result.opcodes["bar"] == 192
    assert {n for line, n in result.warps.items() if "bar.sync" in result.texts[line]} == {6}


def test_a_fault_names_the_ptx_file() -> None:
    def declare(name: str, memory: Memory, arguments: dict[str, Any]) -> None:
        for buffer in memory.buffers:
            buffer.writable = False

    case = make_convert_case(4, 5, 40, prefill=False)
    with emulated("sm_100a", prepare=declare), pytest.raises(KernelFault, match=r"of .*kernel\.ptx") as caught:
        ops.convert_indices(*case.args(), **case.kwargs())
    assert caught.value.file is not None
    assert caught.value.file.read_text().splitlines()[caught.value.line - 1].strip().startswith(("st.global", "@"))


def test_a_fault_is_the_whole_answer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(target: str, settings: object) -> str:
        small_kernels.run_reverse(small_kernels.REVERSE.replace("bar.sync 0;", ""))
        return "not reached"

    monkeypatch.setitem(cases.CASES, "broken", {"race": broken})
    assert main(["broken", "race"]) == 1
    assert "shared-memory race" in capsys.readouterr().out
