"""Kernels whose results on an SM90 GPU are recorded: small deterministic cases of the public calls, both families' source.

`python -m tests.emulator.recorded.kernels` on an SM90 GPU runs them and writes `kernels.json`; the tests run the same sm_90a PTX in the
emulator and compare. What no approximate function touches is kept as a digest and must be equal; the rest is kept whole.
"""

from __future__ import annotations

import argparse
import base64
import dataclasses
import hashlib
import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cute_kernels import ops
from cute_kernels.compile import cache, loader
from cute_kernels.indices import IdSource
from cute_kernels.save_policy import SavePolicy
from cute_kernels.scratch import compress_scratch
from cute_kernels.target import Target
from tests.support.compress import make_compress_case
from tests.support.gather import make_convert_case, make_gather_case
from tests.support.index_case import make_index_case
from tests.support.insert import make_insert_case
from tests.support.pools import owned_bytes
from tests.support.steps import Request, mix

FILE = Path(__file__).with_name("kernels.json")


@dataclass(frozen=True)
class Recording:
    """One call. `run(target, device)` gives ({name: exact bytes}, {name: (kind, values that approximate functions touch)})."""

    name: str
    target: Target
    run: Callable[[Target, str], tuple[dict[str, np.ndarray], dict[str, np.ndarray]]]


def raw(x: torch.Tensor) -> np.ndarray:
    """The bytes of a contiguous copy."""
    return x.detach().cpu().contiguous().view(torch.uint8).numpy()


def _compress(ratio: int, kv_format: str, **options: Any) -> Callable[..., Any]:
    rows = [Request(2 * ratio - 3, 6), Request(ratio - 1, 1), Request(0, ratio + 1), Request(5 * ratio - 2, 2)]

    def run(target: Target, device: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        case = make_compress_case(rows, ratio=ratio, kv_format=kv_format, seed=11, kv_scale=0.5 if kv_format == "fp8" else None, **options)
        after = dataclasses.replace(case.to(device).clone(), scratch=compress_scratch(device))
        ops.compress_store(*after.args(), **after.kwargs(), target=target)
        storage = after.kv_storage.cpu().numpy()
        changed = owned_bytes(
            case.pool, storage.size, [s for s in case.kv_slots.tolist() if 0 <= s < case.pool.pages * case.pool.page_rows]
        )
        return {"state": raw(after.state_storage), "other bytes": storage[~changed]}, {kv_format: storage[changed]}

    return run


def _indices(source: IdSource, **options: Any) -> Callable[..., Any]:
    def run(target: Target, device: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        ratio = 128 if source is IdSource.ALL_GROUPS else 4
        case = make_index_case(
            mix(40, 6, ratio=ratio),
            source=source,
            ratio=ratio,
            k=68,
            padding=4,
            extra_rows=2,
            garbage=0.2,
            stale_blocks=True,
            id_pitch=4,
            **options,
        ).to(device)
        result = ops.sparse_indices(*case.args(), **case.kwargs(), target=target)
        return {name: raw(table) for name, table in vars(result).items() if table is not None}, {}

    return run


def _insert(kv_format: str, **options: Any) -> Callable[..., Any]:
    def run(target: Target, device: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        case = make_insert_case(12, heads=5, padded_heads=8, kv_format=kv_format, seed=4, **options).to(device)
        q = ops.qkv_insert(*case.args(), **case.kwargs(), target=target)
        return {"KV pool": raw(case.storage)}, {"fp8" if q.dtype == torch.float8_e4m3fn else "bf16": raw(q)}

    return run


def _gather(kv_format: str) -> Callable[..., Any]:
    def run(target: Target, device: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        lengths = [9, 0, 40, 3, 0, 1, 1, 1, 1, 1, 1, 17]
        case = make_gather_case(lengths, kv_format=kv_format, page_rows=3, stale=True, lead=6, one_more_start=True, seed=7).to(device)
        guarded = case.guarded_out()
        ops.gather_upconvert(*case.args(guarded.out), **case.kwargs(), target=target)
        return {"workspace": raw(guarded.whole)}, {}

    return run


def _convert(*, prefill: bool, compact: bool) -> Callable[..., Any]:
    def run(target: Target, device: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        case = make_convert_case(14, 5, 1063, page_rows=16, span=48, prefill=prefill, garbage=0.1, stale=True, seed=9).to(device)
        out, counts = case.guarded()
        written = {"out": out.out, "counts": counts.out if compact else None}
        ops.convert_indices(*case.args(), **case.kwargs(), return_counts=compact, **written, target=target)
        return {"slots": raw(out.whole), "counts": raw(counts.whole)}, {}

    return run


def recordings() -> list[Recording]:
    """All recorded calls."""
    sm100, sm120 = Target("sm100", "sm_90a"), Target("sm120", "sm_90a")
    found = []
    for ratio in (4, 128):
        for target, kv_format in ((sm100, "bf16"), (sm100, "fp8"), (sm120, "fp8_ds_mla")):
            found.append(Recording(f"compress_store ratio {ratio} {kv_format}", target, _compress(ratio, kv_format)))
            policy = _compress(ratio, kv_format, save=SavePolicy(rollback=2, prefix_stride=8))
            found.append(Recording(f"compress_store ratio {ratio} {kv_format} policy", target, policy))
    for target in (sm100, sm120):
        for source in IdSource:
            found.append(Recording(f"sparse_indices {target.family} {source.value}", target, _indices(source)))
    fp8 = {"q_dtype": torch.float8_e4m3fn, "q_scale": 0.05, "kv_scale": 0.04}
    found.append(Recording("qkv_insert bf16", sm100, _insert("bf16")))
    found.append(Recording("qkv_insert fp8", sm100, _insert("fp8", **fp8)))
    found.append(Recording("qkv_insert packed", sm120, _insert("fp8_ds_mla")))
    for target in (sm100, sm120):
        for kv_format in ("fp8_inline", "fp8_ds_mla", "fp8"):
            found.append(Recording(f"gather_upconvert {target.family} {kv_format}", target, _gather(kv_format)))
        for prefill in (False, True):
            for compact in (True, False):
                name = f"convert_indices {target.family}{' prefill' if prefill else ''}{' compact' if compact else ''}"
                found.append(Recording(name, target, _convert(prefill=prefill, compact=compact)))
    return found


def digest(values: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()


def packed(values: np.ndarray) -> str:
    return base64.b64encode(zlib.compress(values.tobytes(), 9)).decode()


def unpacked(text: str) -> np.ndarray:
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), np.uint8)


def use_libraries(folder: Path) -> None:
    """Take kernels from `<folder>/<n>.so`, named in `<folder>/index.json`, where they cannot be compiled."""
    index = json.loads((folder / "index.json").read_text())

    def get(spec: Any) -> Any:
        library, symbol = index[str(spec)]
        return loader.load_library(folder / library)[symbol]

    cache.get = get  # type: ignore[assignment]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--libraries", type=Path, help="a folder of linked kernels and an index.json, for a machine without the compiler")
    parser.add_argument("--out", type=Path, default=FILE)
    options = parser.parse_args()
    if options.libraries:
        use_libraries(options.libraries)
    results = {}
    for recording in recordings():
        exact, rest = recording.run(recording.target, "cuda")
        results[recording.name] = {
            "exact": {name: digest(values) for name, values in exact.items()},
            "rest": {name: packed(values) for name, values in rest.items()},
        }
        print("recorded", recording.name)
    options.out.write_text(json.dumps({"gpu": torch.cuda.get_device_name(0), "results": results}, indent=0) + "\n")


if __name__ == "__main__":
    main()
