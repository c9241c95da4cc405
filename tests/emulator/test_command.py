"""`python -m ptx_emulator`: the report of one case, and what is printed when a kernel is at fault."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from cute_kernels import ops
from cute_kernels.compile.spec import SPEC_TYPES
from cute_kernels.indices import IdSource
from ptx_emulator import KernelFault, Memory, Result, run_ptx
from ptx_emulator.__main__ import main
from ptx_emulator.machine import Machine
from ptx_emulator.report import checked, instruction_classes, report
from tests.emulator import cases, small_kernels
from tests.emulator.emulated import emulated
from tests.support.gather import make_convert_case, make_gather_case
from tests.support.index_case import make_index_case
from tests.support.steps import Request


@pytest.mark.parametrize("target", ["sm_100a", "sm_120a"])
def test_report_of_a_case(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sparse_indices", "padded", "--target", target]) == 0
    text = capsys.readouterr().out
    for part in (
        "1 launch of",
        "thread instructions",
        "integer",
        "bytes loaded",
        "sectors",
        "st.global",
        "PTX instructions",
        "never executed",
        "every lane",
    ):
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
    assert "30 rows stored" in text
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


def accesses_by_opcode(result: Result) -> dict[str, tuple[int, int, int]]:
    return {result.texts[line].split()[0].partition(".")[0]: row for line, row in result.accesses.items()}


def test_a_guarded_instruction_counts_for_those_whose_predicate_holds() -> None:
    body = """
    ld.param.b64 %l1, [y];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %l2, %r1, 4;
    add.s64 %l2, %l1, %l2;
    setp.lt.u32 %p1, %r1, 40;
    setp.gt.u32 %p2, %r1, 1000;
    @%p1 st.global.b32 [%l2], %r1;
    @%p2 st.global.b32 [%l1+99999], %r1;
    @%p2 bra END;
    @!%p2 add.s32 %r2, %r1, 1;
END:
    """
    memory, text = Memory(), small_kernels.entry(".param .u64 y", body)
    result = run_ptx(text, 2, 64, [memory.add_array("y", np.zeros(64, np.int32))], memory, statistics=True)
    lines = {result.texts[line]: (*counts, result.warps[line]) for line, counts in result.lines.items()}
    assert lines["@%p1 st.global.b32 [%l2], %r1"] == (1, 80, 4)
    assert lines["@%p2 st.global.b32 [%l1+99999], %r1"] == (0, 0, 0)
    assert lines["@%p2 bra END"] == lines["@!%p2 add.s32 %r2, %r1, 1"] == (1, 128, 4)
    assert [result.texts[line] for line in result.never] == ["@%p2 st.global.b32 [%l1+99999], %r1"]
    assert instruction_classes([result])["memory"] == 128 + 80 and result.opcodes["st"] == 80
    assert "never executed in this case: 1" in report([result])
    unreached = "@%p2 st.global.b32 [%l1+99999], %r1"
    assert unreached in report([result], never=True) and report([result]).count("99999") == 0


def test_copies_and_atomics_stand_in_the_table_of_accesses() -> None:
    """Each of 64 threads copies four bytes, or less, and adds to one of eight words."""
    sized = "and.b32 %r7, %r1, 1;\nshl.b32 %r7, %r7, 2;\ncp.async.ca.shared.global [%r4], [%l4], 4, %r7;"
    adds = "and.b64 %l6, %l3, 28;\nadd.s64 %l6, %l1, %l6;\nred.global.add.u32 [%l6], 1;\natom.add.u32 %r9, [%l6], 1;\n"
    plain = small_kernels.ASYNC.replace("bar.sync 0;", adds + "bar.sync 0;").replace("st.global.b32 [%l5], %r6;", "")
    for text, copied in ((plain, 256), (plain.replace("cp.async.ca.shared.global [%r4], [%l4], 4;", sized), 128)):
        memory, x, y = Memory(), torch.arange(64, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
        parameters = [memory.add_tensor("y", y), memory.add_tensor("x", x, writable=False)]
        found = accesses_by_opcode(run_ptx(text, 1, 64, parameters, memory, statistics=True))
        assert found == {"cp": (2, 8, copied), "red": (2, 2, 256), "atom": (2, 2, 256)}
        assert y[:8].tolist() == [16] * 8


def test_figures_are_those_of_aligned_allocations() -> None:
    """The tensors of the cases begin where a sector does, as those of a GPU do: else two runs would differ."""
    indices = make_index_case([Request(30, 5), Request(7, 1)], source=IdSource.LOCAL, ratio=4, k=24)
    gathered, converted = make_gather_case([3, 9], kv_format="fp8_inline"), make_convert_case(4, 5, 40, prefill=True)
    for case in (indices, gathered, converted):
        tensors = [t for t in vars(case).values() if isinstance(t, torch.Tensor)]
        assert len(tensors) > 2 and all(t.untyped_storage().data_ptr() % 64 == 0 for t in tensors)


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


def test_a_machine_is_let_go_when_it_has_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the garbage collector, which may be long in coming."""
    seen, run = [], Machine.run

    def watched(machine: Machine) -> None:
        seen.extend(map(weakref.ref, (machine, machine.shared, machine.races)))
        run(machine)

    monkeypatch.setattr(Machine, "run", watched)
    gc.disable()
    try:
        small_kernels.run_reverse(small_kernels.REVERSE, pdl=False)
        assert seen and not any(part() for part in seen)
    finally:
        gc.enable()
