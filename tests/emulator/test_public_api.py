"""The whole public API on the emulated device: layer, dispatch and demo, with the product's kernels, tables and FlashInfer calls.

Only FlashInfer's final launch is replaced, by a strict double that computes attention from the arguments it is handed.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from cute_kernels import CuteKernelsError, demo, dispatch, ops
from cute_kernels.target import Target
from tests.emulator.emulated import emulated
from tests.support.compress import make_compress_case
from tests.support.flashinfer_double import Launches, flashinfer_on
from tests.support.steps import Request

DEFAULT, BALANCED = 0, 2  # cudaClusterSchedulingPolicy


@contextlib.contextmanager
def whole_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Counter[str], list[Launches]]]:
    """Kernels run in the emulator, decode goes through FlashInfer for the capability of each call's target."""
    kernels: Counter[str] = Counter()
    attention: list[Launches] = []
    real = dispatch.decode

    def decode(**arguments: Any) -> Any:
        target = arguments["target"]
        target = Target.named(target) if isinstance(target, str) else target
        with flashinfer_on(target.capabilities[0], monkeypatch) as launches:
            attention.append(launches)
            return real(**{**arguments, "backend": "flashinfer"})

    with emulated("sm_100a", on_result=lambda result: kernels.update([result.kernel])), mock.patch.object(dispatch, "decode", decode):
        yield kernels, attention


def test_demo_with_every_layer_kind_and_format(monkeypatch: pytest.MonkeyPatch) -> None:
    with whole_device(monkeypatch) as (kernels, attention):
        outcomes = demo.run(tokens=300, heads=8, layers=3)
    assert len(outcomes) == 9 and all(line.verdict.passed for line in outcomes)
    steps = len(demo.schedule(300))
    assert sum(len(launches.calls) for launches in attention) >= 9 * steps
    launched = {name.partition("[")[0] for name in kernels}
    assert launched == {"compress_store", "sparse_indices", "qkv_insert"}
    families = {"sm100:sm_100a", "sm120:sm_120a"}
    assert {family for name in kernels for family in families if family in name} == families
    assert sum(kernels.values()) > 6 * steps


@pytest.mark.parametrize("target", ["sm_100a", "sm_120a"])
def test_bad_arguments_are_refused_by_the_host_code_of_the_kernel(target: str) -> None:
    """What the compiled function's own checks refuse comes out as the typed error that names the argument."""
    kv_format = "bf16" if target == "sm_100a" else "fp8_ds_mla"
    case = make_compress_case([Request(0, 9)], ratio=4, kv_format=kv_format)
    names = (
        "kv_score",
        "ape",
        "state",
        "state_block_table",
        "positions",
        "token_to_req",
        "state_slots",
        "kv_slots",
        "norm_weight",
        "cos_sin",
    )
    wrong = {
        "kv_score": lambda x: x.double(),
        "ape": lambda x: x[:3],
        "state": lambda x: x[..., :-4],
        "state_block_table": lambda x: x.long(),
        "positions": lambda x: x.int(),
        "token_to_req": lambda x: x.long(),
        "kv_slots": lambda x: x[:, None],
        "norm_weight": lambda x: x.float(),
        "cos_sin": lambda x: x[:, :32],
    }
    with emulated(target, on_result=lambda result: pytest.fail(f"{result.kernel} was launched")):
        for name, change in wrong.items():
            arguments = list(case.args())
            arguments[names.index(name)] = change(arguments[names.index(name)])
            with pytest.raises(CuteKernelsError, match=name):
                ops.compress_store(*arguments, **case.kwargs())


@pytest.mark.parametrize("rows,blocks,placing", [(300, 8, DEFAULT), (2100, 4, BALANCED), (4100, 2, DEFAULT)])
def test_clusters_of_four_are_placed_evenly_and_others_as_by_default(rows: int, blocks: int, placing: int) -> None:
    """By cudaLaunchAttributeClusterSchedulingPolicyPreference; all rows are padding."""
    from cute_kernels.compile import cache
    from cute_kernels.compile.spec import CompressStoreSpec

    case = make_compress_case([Request(0, rows)], ratio=128, kv_format="bf16")
    case.state_slots.fill_(-1)
    with emulated("sm_100a"):
        ops.compress_store(*case.args(), **case.kwargs())
        record = cache.get(CompressStoreSpec(Target("sm100", "sm_100a"), 32, ratio=128)).launches[-1]  # type: ignore[attr-defined]
    assert record.cluster == (blocks, 1, 1) and record.placing == placing


def test_launch_configuration_is_that_of_the_product() -> None:
    """Grid, cluster, programmatic dependent launch and shared memory as the compiled host code asks for them."""
    from cute_kernels.compile import cache, loader
    from cute_kernels.compile.spec import CompressStoreSpec
    from tests.support.compress_plan import plan_of, split_of

    case = make_compress_case([Request(0, 300)], ratio=128, kv_format="bf16")
    with emulated("sm_100a"):
        ops.compress_store(*case.args(), **case.kwargs())
        spec = CompressStoreSpec(Target("sm100", "sm_100a"), 32, ratio=128)
        record = cache.get(spec).launches[-1]  # type: ignore[attr-defined]
    plan, (blocks, deal) = plan_of(spec), split_of(spec, 300)
    assert record.pdl and record.grid[0] == plan.teams(300, deal) * blocks and record.block[0] == plan.threads
    assert record.cluster == (blocks, 1, 1) and blocks > 1
    assert 3 * (record.dynamic_shared + 1024) <= 228 * 1024, "three blocks fit on an SM, which reserves 1 KB for each"
    assert loader.executor() is loader.load_with_tvm_ffi
    assert torch.isfinite(case.kv_cache[case.kv_slots.max() // case.pool.page_rows].float()).any()
