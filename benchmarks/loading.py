"""What starting costs: imports, opening a pack and resolving all of it, a look-up in memory and in the disk cache.

    python -m benchmarks.loading [PACK ...]        default: the packs in build/packs

Each figure is the median over fresh processes; nothing here needs a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REPEATS = 5

IMPORTS = """
import json, sys, time
t = time.perf_counter(); import torch; torch_s = time.perf_counter() - t
t = time.perf_counter(); import cute_kernels; own = time.perf_counter() - t
t = time.perf_counter(); import cute_kernels.ops; ops = time.perf_counter() - t
t = time.perf_counter(); import tvm_ffi; ffi = time.perf_counter() - t
assert not {"cutlass", "flashinfer"} & set(sys.modules), "importing the package is to import neither"
print(json.dumps({"import torch": torch_s, "import cute_kernels beyond it": own, "its operations": ops, "tvm_ffi": ffi}))
"""
PACK = """
import json, os, sys, time
import torch, tvm_ffi
from cute_kernels.compile import cache, packs
from cute_kernels.compile.spec import spec_from_fields
folder = os.environ["CUTE_KERNELS_PACKS"]
specs = [spec_from_fields(k["spec"]) for k in json.load(open(f"{folder}/manifest.json"))["kernels"]]
packs.folders = lambda: [packs.Path(folder)]
os.environ["CUTE_KERNELS_FREEZE"] = "1"
t = time.perf_counter(); kernels = [cache.get(s) for s in specs]; loading = time.perf_counter() - t
assert cache.stats.from_packs == len(specs) and "cutlass" not in sys.modules
t = time.perf_counter()
for s in specs * 100:
    cache.get(s)
memory = (time.perf_counter() - t) / len(specs) / 100
print(json.dumps({f"open {folder} and resolve its {len(specs)} kernels": loading, "one look-up in memory": memory}))
"""


def measure(program: str, **environment: str) -> dict[str, float]:
    """Medians of what a program prints, over fresh processes."""
    rows = []
    for _ in range(REPEATS):
        command = [sys.executable, "-c", program]
        printed = subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, check=True, stdout=subprocess.PIPE, text=True).stdout
        rows.append(json.loads(printed.splitlines()[-1]))
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packs", type=Path, nargs="*", help="folders of packs; default: those in build/packs")
    packs = parser.parse_args(arguments).packs or sorted(p.parent for p in (ROOT / "build" / "packs").glob("*/manifest.json"))
    results = measure(IMPORTS)
    for pack in packs:
        results |= measure(PACK, CUTE_KERNELS_PACKS=str(pack))
    for name, seconds in results.items():
        print(f"{seconds * 1e3:12.4f} ms  {name}")
    if not packs:
        print("no packs: build them with `make compile-sm100 compile-sm120`")


if __name__ == "__main__":
    main()
