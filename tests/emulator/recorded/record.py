"""Records instruction results on an SM90 GPU and compares them with the emulator: `python -m tests.emulator.recorded.record [--rows N]`.

Needs PyTorch with a GPU of compute capability 9.0 and nothing else. Compares N rows of every instruction, then writes the first 64 of
each to `instructions.json`, which the tests compare with the emulator everywhere.
"""

from __future__ import annotations

import argparse
import ctypes
import json
from pathlib import Path

import numpy as np

from tests.emulator.one_opcode import Harness, emulate, harness
from tests.emulator.recorded.instructions import INSTRUCTIONS, is_approximate, operands

FILE = Path(__file__).with_name("instructions.json")
KEPT = 64


class Gpu:
    """The CUDA driver through ctypes; PyTorch makes the context and holds the memory."""

    def __init__(self) -> None:
        import torch

        self.torch = torch
        torch.zeros(1, device="cuda")
        self.driver = ctypes.CDLL("libcuda.so.1")

    def call(self, name: str, *arguments: object) -> None:
        code = getattr(self.driver, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self.driver.cuGetErrorString(code, ctypes.byref(text))
            raise RuntimeError(f"{name}: {code} {(text.value or b'').decode()}")

    def run(self, made: Harness, arrays: list[np.ndarray]) -> list[np.ndarray]:
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(module), made.source.encode() + b"\0")
        self.call("cuModuleGetFunction", ctypes.byref(function), module, b"k")
        results = made.outputs(len(arrays[0]))
        tensors = [self.torch.from_numpy(a.view(np.uint8).copy()).cuda() for a in (*arrays, *results)]
        pointers = [ctypes.c_uint64(t.data_ptr()) for t in tensors]
        packed = (ctypes.c_void_p * len(pointers))(*(ctypes.cast(ctypes.byref(p), ctypes.c_void_p) for p in pointers))
        self.torch.cuda.synchronize()
        self.call("cuLaunchKernel", function, len(arrays[0]) // 64, 1, 1, 64, 1, 1, 0, None, packed, None)
        self.call("cuCtxSynchronize")
        out = [t.cpu().numpy().view(r.dtype) for t, r in zip(tensors[len(arrays) :], results, strict=True)]
        self.call("cuModuleUnload", module)
        return out


def differing(text: str, made: Harness, arrays: list[np.ndarray], got: list[np.ndarray]) -> tuple[np.ndarray, list[np.ndarray]]:
    """Rows in which recorded results are not what the emulator allows, and the emulator's results."""
    want = emulate(made, arrays)
    bad = np.zeros(len(got[0]), bool)
    if not is_approximate(text):
        for g, w in zip(got, want, strict=True):
            bad |= g != w
        return bad, want
    low, high = (emulate(made, arrays, approximation=end)[0].view(np.float32) for end in ("low", "high"))
    value, nearest = got[0].view(np.float32), want[0].view(np.float32)
    with np.errstate(invalid="ignore"):
        inside = (low <= value) & (value <= high)
    return ~(inside | (got[0] == want[0]) | (np.isnan(value) & np.isnan(nearest))), want


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=19200)
    parser.add_argument("--out", type=Path, default=FILE)
    options = parser.parse_args()
    gpu, recorded, wrong = Gpu(), {}, 0
    for text in INSTRUCTIONS:
        made = harness(text, target="sm_90a", version="8.0")
        arrays = operands(text, made.inputs, options.rows)
        try:
            got = gpu.run(made, arrays)
        except RuntimeError as error:
            print(f"NOT RUN {text}: {error}")
            continue
        bad, want = differing(text, made, arrays, got)
        if bad.any():
            wrong += 1
            i = int(np.flatnonzero(bad)[0])
            given, gpus, ours = ([hex(int(column[i])) for column in columns] for columns in (arrays, got, want))
            print(f"DIFFERS {text} in {int(bad.sum())} of {bad.size} rows: {given} -> GPU {gpus}, emulator {ours}")
        recorded[text] = [g[:KEPT].tolist() for g in got]
    name = gpu.torch.cuda.get_device_name(0)
    data = {"gpu": name, "drawn": options.rows, "results": recorded}
    options.out.write_text(json.dumps(data, separators=(",", ":")) + "\n")
    print(f"{len(recorded)} instructions on {name}, {options.rows} rows each: {wrong} differ")


if __name__ == "__main__":
    main()
