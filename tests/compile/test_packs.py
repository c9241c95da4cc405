"""The packs that users build: every spec of the support matrix, nothing spilled, loaded whole without the compiler."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cute_kernels.compile.matrix import support_matrix
from cute_kernels.compile.spec import spec_from_fields
from cute_kernels.target import Target
from tests import processes

COMPILE = """
    import json, sys
    from cute_kernels.cli import main
    main(["compile", "--arch", sys.argv[1], "--out", sys.argv[2], "--jobs", "1"], standalone_mode=False)
    print(json.dumps(None))
"""
# Resolves every kernel of the pack for each target it serves.
RESOLVE = """
    import json, os, sys, time
    import tvm_ffi
    from cute_kernels.compile import cache
    from cute_kernels.compile.matrix import support_matrix
    from cute_kernels.target import Target
    started = time.perf_counter()
    kernels = [cache.get(s) for name in sys.argv[1:] for s in support_matrix(Target.named(name))]
    seconds = time.perf_counter() - started
    print(json.dumps({"resolved": len(kernels), "seconds": seconds, "cutlass": "cutlass" in sys.modules, **vars(cache.stats)}))
"""


@pytest.mark.parametrize(("arch", "served"), [("sm_100f", ("sm_100a", "sm_103a")), ("sm_120f", ("sm_120a", "sm_121a"))])
def test_pack(arch: str, served: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / arch
    processes.run(COMPILE, arch, folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    specs = support_matrix(Target.named(arch))
    assert [spec_from_fields(k["spec"]) for k in manifest["kernels"]] == specs
    assert [k["spec"] for k in manifest["kernels"] if k["spill_bytes"]] == []
    assert len({k["key"] for k in manifest["kernels"]}) == len(specs)
    result = processes.run(
        RESOLVE, *served, CUTE_KERNELS_PACKS=str(folder), CUTE_KERNELS_FREEZE="1", CUTE_KERNELS_CACHE_DIR=str(tmp_path / "empty")
    )
    print(f"{arch}: {result['resolved']} look-ups in {result['seconds']:.3f} s")
    assert (result["resolved"], result["from_packs"], result["compiled"], result["cutlass"]) == (2 * len(specs), 2 * len(specs), 0, False)
