"""The emulator against a real GPU: instruction and kernel results recorded on an H200, byte for byte.

Instructions: every recorded value equal, or inside the documented interval where the instruction is approximate. Kernels: the sm_90a PTX
of both families; what no approximate function touches is equal, and of the rounded values that one touches few differ, by one step.
`tests/emulator/recorded/record.py` and `kernels.py` make the recordings again on an SM90 GPU.
"""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from tests.emulator.emulated import emulated
from tests.emulator.opcode import harness
from tests.emulator.recorded import kernels, record
from tests.emulator.recorded.instructions import INSTRUCTIONS, operands

RECORDED = json.loads(record.FILE.read_text())
KERNELS = json.loads(kernels.FILE.read_text())
STEPS = 0.02  # share of rounded values that may differ by one step: the sources move on after a recording, the sums' order with them


def test_recordings_come_from_an_sm90_gpu_and_cover_nearly_all() -> None:
    assert re.search("H100|H200", RECORDED["gpu"]) and re.search("H100|H200", KERNELS["gpu"])
    missing = [text for text in INSTRUCTIONS if text not in RECORDED["results"]]
    assert len(missing) <= 0.05 * len(INSTRUCTIONS), missing
    assert [r.name for r in kernels.recordings()] == list(KERNELS["results"])


def test_instructions_equal_the_gpu() -> None:
    for text, columns in RECORDED["results"].items():
        made = harness(text, target="sm_90a", version="8.0")
        # Operands depend on the number of rows they are drawn for: the recording's.
        arrays = [a[: record.KEPT] for a in operands(text, made.inputs, RECORDED["drawn"])]
        got = [np.array(column, result.dtype) for column, result in zip(columns, made.outputs(1), strict=True)]
        bad, want = record.differing(text, made, arrays, got)
        assert not bad.any(), f"{text} row {int(np.flatnonzero(bad)[0])}: GPU {got}, emulator {want}"


@pytest.mark.parametrize("recording", kernels.recordings(), ids=lambda r: r.name)
def test_kernels_equal_the_gpu(recording: kernels.Recording) -> None:
    with emulated(recording.target):
        exact, rest = recording.run(recording.target, "cpu")
    recorded = KERNELS["results"][recording.name]
    assert {name: kernels.digest(values) for name, values in exact.items()} == recorded["exact"]
    assert set(rest) == set(recorded["rest"])
    for name, values in rest.items():
        dtype = np.uint16 if name == "bf16" else np.uint8
        ours, gpus = (v.ravel().view(dtype).astype(np.int64) for v in (values, kernels.unpacked(recorded["rest"][name])))
        steps = np.abs(ours - gpus)
        assert steps.max() <= 1 and (steps > 0).mean() <= STEPS, (
            f"{name}: {int((steps > 0).sum())} of {steps.size} differ, by {steps.max()} steps"
        )
