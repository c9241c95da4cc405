"""The whole path on a Blackwell GPU, FlashInfer's kernels included, against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cute_kernels as ck
from tests.support.decode_case import FAMILY_FORMATS, decode_case
from tests.support.devices import on_gpu

CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
pytestmark = pytest.mark.skipif(
    CAPABILITY not in ((10, 0), (10, 3), (12, 0), (12, 1)),
    reason=f"needs a GPU of compute capability 10.0, 10.3, 12.0 or 12.1, found {CAPABILITY}",
)
FAMILY = "sm120" if CAPABILITY and CAPABILITY[0] == 12 else "sm100"
QUERY_LENS, SEQ_LENS = (1, 1, 1, 3, 2), (300, 7, 129, 140, 3)
# (relative, absolute): FlashInfer's kernels round probabilities to FP8 on the FP8 and packed paths.
TOLERANCE = {"bf16": (2e-2, 2e-2), "fp8": (1e-1, 1e-1), "fp8_ds_mla": (5e-2, 5e-2)}


def gpu_case(name: str, heads: int, **options: Any) -> tuple[dict[str, Any], torch.Tensor]:
    """Arguments of `decode` on the GPU, and the reference's answer."""
    case = decode_case(FAMILY, name, heads, **options)
    arguments = {key: on_gpu(value) for key, value in case.arguments.items() if key != "step"}
    step = ck.StepMetadata.of(options.get("query_lens", QUERY_LENS), options.get("seq_lens", SEQ_LENS), "cuda")
    return {**arguments, "step": step}, case.run(backend="reference").float()


def agree(got: torch.Tensor, want: torch.Tensor, name: str) -> None:
    rtol, atol = TOLERANCE[name]
    torch.testing.assert_close(got.cpu().float(), want, rtol=rtol, atol=atol)


@pytest.mark.parametrize("name", FAMILY_FORMATS[FAMILY])
@pytest.mark.parametrize("heads", [4, 5, 8, 12, 16, 32, 64, 96, 128])
@pytest.mark.parametrize("strided", [True, False], ids=["strided", "tight"])
@pytest.mark.parametrize("ratio", [1, 4, 128])
def test_decode_and_prefill(name, heads, strided, ratio):
    arguments, want = gpu_case(name, heads, strided=strided, ratio=ratio)
    agree(ck.decode(**arguments), want, name)


@pytest.mark.parametrize("name", FAMILY_FORMATS[FAMILY])
def test_prefill_of_many_rows(name):
    lens = {"query_lens": (1, 200, 1), "seq_lens": (300, 200, 130)}
    arguments, want = gpu_case(name, 16, **lens)
    agree(ck.decode(**arguments), want, name)


@pytest.mark.parametrize("name", FAMILY_FORMATS[FAMILY])
def test_captured_decode_over_a_dirty_workspace(name):
    arguments, want = gpu_case(name, 16, query_lens=(1, 1, 1), seq_lens=(300, 7, 129))
    made = ck.allocate_workspace("cuda", max_requests=8, num_heads=16)
    made.workspace.fill_(0xFF)
    memory = {"workspace": made.workspace, "counters": made.counters}
    agree(ck.decode(**arguments, **memory), want, name)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = ck.decode(**arguments, **memory)
    for _ in range(3):
        made.workspace.fill_(0xFF)
        graph.replay()
        agree(got, want, name)
    assert not made.counters.any()
