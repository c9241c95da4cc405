"""The plans of `compress_store`: every row of a step goes to one block, and closing rows spread evenly."""

from __future__ import annotations

import collections

import pytest

from cute_kernels.compile.spec import CompressStoreSpec
from cute_kernels.device.compress import plan_of
from cute_kernels.target import Target


def plans() -> list:
    target = Target.named("sm100")
    found = []
    for ratio in (4, 128):
        for save in ("policy", "every_row"):
            found.append(pytest.param(plan_of(CompressStoreSpec(target, ratio=ratio, save=save)), id=f"{ratio}-{save}"))
    return found


def dealt(plan, count: int) -> list[list[int]]:
    """The rows of each block that lie in the step."""
    evenly = plan.evenly(count)
    of = [[plan.row_of(c, i) for i in range(plan.rows_of(count))] for c in range(min(plan.blocks(count), plan.deal))]
    even = [[t for t in rows if t < evenly] for rows in of]
    return even + [list(range(first, first + plan.short)) for first in range(evenly, count, plan.short or 1)]


@pytest.mark.parametrize("plan", plans())
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 127, 128, 255, 256, 257, 263, 264, 265, 1000, 2048, 8191, 8192, 8193, 32768])
def test_every_row_is_dealt_once(plan, count: int) -> None:
    found = collections.Counter(t for rows in dealt(plan, count) for t in rows)
    assert sorted(found) == list(range(count)) and set(found.values()) == {1}


@pytest.mark.parametrize("plan", plans())
@pytest.mark.parametrize("count", [1, 264, 8192, 12671, 12672, 12700, 32768, 100_001])
def test_long_steps_end_in_short_blocks(plan, count: int) -> None:
    left = count - plan.evenly(count)
    assert left == (plan.short * (plan.blocks(count) - plan.deal) if left else 0)
    assert (left > 0) == (plan.ratio == 4 and count >= 48 * plan.deal) and left <= count / 16


@pytest.mark.parametrize("plan", plans())
def test_closing_rows_of_a_long_prompt_spread_evenly(plan) -> None:
    for first in range(0, plan.ratio, max(1, plan.ratio // 8)):
        closing = [sum((first + t + 1) % plan.ratio == 0 for t in rows) for rows in dealt(plan, 8192)]
        assert max(closing) <= -(-8192 // plan.ratio // plan.deal) + 1


@pytest.mark.parametrize("plan", plans())
def test_leading_rows_of_a_padded_step_spread_over_the_blocks(plan) -> None:
    live = [sum(t < 256 for t in rows) for rows in dealt(plan, 8192)]
    assert max(live) <= max(plan.unit, -(-256 // plan.deal // plan.unit) * plan.unit)


@pytest.mark.parametrize("plan", plans())
def test_sizes_agree(plan) -> None:
    """What the kernel divides leaves no rest."""
    stage = plan.groups * plan.batch
    assert plan.window % stage == 0 and min(32, plan.window) % stage == 0
    assert 1 <= plan.slots <= plan.pooling and plan.threads <= 1024
