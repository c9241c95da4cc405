"""The prediction on real kernels: counts come from the PTX that runs, and scale with the work."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks import cases, predict, serving
from cute_kernels.target import Target


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "DEVICE", "cpu")


@pytest.mark.parametrize("name", ["sm_100f", "sm_120f"])
def test_a_prediction_follows_the_work_and_the_machine(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target.named(name)
    part = cases.gather_part("fp8_inline")
    kernel = predict.Kernel("small", part, serving.prefill(256, 4), serving.prefill(4096, 4))
    found = predict.predict(kernel, target)
    machine = predict.MACHINES[name]
    assert found.bytes == serving.gather_bytes(4096, kv_format="fp8_inline")
    assert found.dram_us == pytest.approx(found.bytes / machine.dram * 1e6)
    slots = found.instructions_per_kilobyte / 1024 * found.bytes
    assert found.issue_us == pytest.approx(slots / machine.sms / 4 / machine.clock * 1e6)
    assert found.spill_bytes == 0 and found.widest_store == 32 and 0 < found.occupancy <= 1
    assert 1.0 <= found.l1_bytes_per_byte < 1.5, "rows are read and written once, a few sectors twice"
    assert 0.5 < found.sass_per_ptx < 1.5
    twice = predict.predict(dataclasses.replace(kernel, small=serving.prefill(512, 4)), target)
    assert twice.issue_us == pytest.approx(found.issue_us, rel=0.1), "what a byte costs does not depend on the step that was emulated"
    slow = dataclasses.replace(machine, clock=machine.clock / 2)
    monkeypatch.setitem(predict.MACHINES, name, slow)
    assert predict.predict(kernel, target).issue_us == pytest.approx(2 * found.issue_us)


@pytest.mark.parametrize("name", predict.TARGETS)
def test_every_kernel_of_a_target_is_named_as_in_the_benchmark(name: str) -> None:
    target = Target.named(name)
    known = {c.label for c in cases.cases()}
    for kernel in predict.kernels(target):
        assert f"{kernel.part[0]} {target.family} {kernel.name}" in known, "else it is not compared with what was measured"
