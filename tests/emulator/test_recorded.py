"""The emulator against a real GPU: instruction and kernel results recorded on an H200, byte for byte.

Instructions: every recorded value equal, or inside the documented interval where the instruction is approximate. Kernels: the sm_90a PTX
of both families; what no approximate function touches is equal, and a value that one touches lies between what the emulator gives at the
ends of the documented error.
`tests/emulator/recorded/record.py` and `kernels.py` make the recordings again on an SM90 GPU.
"""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from tests.emulator.emulated import emulated
from tests.emulator.one_opcode import harness
from tests.emulator.recorded import kernels, record
from tests.emulator.recorded.instructions import INSTRUCTIONS, operands

RECORDED = json.loads(record.FILE.read_text())
KERNELS = json.loads(kernels.FILE.read_text())
AGAIN = "if a kernel adds in another order since, it has to be recorded again (tests.emulator.recorded.kernels)"


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
    recorded = KERNELS["results"][recording.name]

    def emulate(approximation: str) -> dict[str, np.ndarray]:
        with emulated(recording.target, approximation=approximation):
            exact, rest = recording.run(recording.target, "cpu")
        assert {name: kernels.digest(values) for name, values in exact.items()} == recorded["exact"]
        return {name: in_order(name, values) for name, values in rest.items()}

    rounded = emulate("nearest")
    gpus = {name: in_order(name, kernels.unpacked(packed)) for name, packed in recorded["rest"].items()}
    assert set(rounded) == set(gpus)
    if all(np.array_equal(rounded[name], values) for name, values in gpus.items()):
        return
    results = [rounded, emulate("low"), emulate("high")]
    for name, values in gpus.items():
        low, high = (bound.reduce([r[name] for r in results]) for bound in (np.minimum, np.maximum))
        outside = int(((values < low) | (values > high)).sum())
        assert not outside, f"{name}: {outside} of {values.size} values lie outside what the approximate functions' error allows: {AGAIN}"


def in_order(name: str, values: np.ndarray) -> np.ndarray:
    """Codes of a floating-point format, or bytes, as integers in the order of the values."""
    dtype, sign = (np.uint16, 1 << 15) if name == "bf16" else (np.uint8, 1 << 7)
    codes = values.ravel().view(dtype).astype(np.int64)
    return np.where(codes & sign, sign - codes, codes)
