"""What a caller builds before a call: an argument of another type is a typed error that names it, what it was and what it should be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import cute_kernels as ck
from cute_kernels.target import Target

CACHE = torch.zeros(2, 4, 512, dtype=torch.bfloat16)
WRONG: list[tuple[Callable[[Any], object], str, tuple[Any, ...]]] = [
    (Target.named, "target", (5, None, ["sm100"], b"sm100")),
    (lambda x: Target(x, "sm_90a"), "family", (5, None, ["sm100"])),
    (lambda x: Target("sm100", x), "gpu_arch", (90, None, ["sm_90a"])),
    (Target.from_capability, "capability", (9, [10, 0], ("10", "0"), (10,), None)),
    (lambda x: ck.SavePolicy(x), "save.rollback", ("2", 1.0, None, True)),
    (lambda x: ck.SavePolicy(prefix_stride=x), "save.prefix_stride", ("2", 1.0, None, True)),
    (lambda x: ck.SavePolicy(every_row=x), "save.every_row", ("yes", 1, None)),
    (lambda x: ck.PoolGeometry(x, 16, 16), "geometry.pages", ("2", 2.0, None, True, torch.tensor(2))),
    (lambda x: ck.PoolGeometry(2, x, 16), "geometry.page_rows", ("2", 2.0, None, True, torch.tensor(2))),
    (lambda x: ck.PoolGeometry(2, 16, x), "geometry.span", ("16", 16.0, None, True, torch.tensor(16))),
    (ck.PoolGeometry.of, "kv_cache", (3, None, CACHE.tolist(), CACHE.shape)),
    (lambda x: ck.StepMetadata(x, 4, "cpu"), "max_requests", ("2", 2.0, None, True)),
    (lambda x: ck.StepMetadata(2, x, "cpu"), "max_tokens", ("4", 4.0, None, True)),
    (lambda x: ck.StepMetadata(2, 4, x), "device", ("gpu", 0, None, ["cpu"])),
    (lambda x: ck.StepMetadata(2, 4, "cpu", decode_query_len=x), "decode_query_len", ("1", 1.0, None, True)),
    (lambda x: ck.StepMetadata(2, 4, "cpu", uniform_decodes=x), "uniform_decodes", ("no", 1, None)),
    (lambda x: ck.StepMetadata(2, 4, "cpu", call_policy=x), "call_policy", (4, "one")),
    (lambda x: ck.StepMetadata.of(x, [9]), "query_lens", (1, None, "1", [None], [1.5], [[1]], {1: 1}, torch.ones(1))),
    (lambda x: ck.StepMetadata.of([1], x), "seq_lens", (9, None, "9", [None], [9.5], [[9]], {1: 9}, torch.ones(1))),
    (lambda x: ck.StepMetadata.of([1], [9]).update([1], [9], positions=x), "positions", (8, [8], torch.ones(1))),
    (lambda x: ck.StepMetadata.of([1], [9]).update([1], [9], token_to_req=x), "token_to_req", (0, [0], torch.ones(1))),
]


@pytest.mark.parametrize(("build", "blamed", "wrong"), [pytest.param(b, n, x, id=f"{n}-{x!r}"[:60]) for b, n, xs in WRONG for x in xs])
def test_an_argument_of_another_type_is_named(build, blamed, wrong):
    with pytest.raises(ck.InvalidArgument) as caught:
        build(wrong)
    assert caught.value.argument == blamed
    assert str(caught.value.got) in str(caught.value) and str(caught.value.got) != str(caught.value.expected)


def test_right_ones_are_taken():
    assert Target.named("sm100:sm_90a") == Target("sm100", "sm_90a") and Target.from_capability((10, 0)) == Target.named("sm_100a")
    assert ck.PoolGeometry.of(CACHE) == ck.PoolGeometry(2, 4, 4)
    step = ck.StepMetadata.of(torch.tensor([1, 2], dtype=torch.int32), (5, 6), torch.device("cpu"))
    assert step.num_tokens == 3 and ck.StepMetadata.of([], []).num_requests == 0
