"""The plans of `compress_store`: every row of a step goes to one team of blocks, and closing rows spread evenly."""

from __future__ import annotations

import collections

import pytest

from cute_kernels.compile.spec import CompressStoreSpec
from cute_kernels.target import Target
from tests.support.compress_plan import dealt, evenly, plan_of, split_of

FORMATS = {"sm100": "bf16", "sm120": "fp8_ds_mla"}
COUNTS = [1, 2, 3, 4, 5, 127, 128, 255, 256, 257, 263, 264, 265, 1000, 1055, 1056, 1057, 2048, 4223, 4224, 8191, 8192, 8193, 32768]


def specs() -> list:
    found = []
    for family, kv_format in FORMATS.items():
        for ratio in (4, 128):
            for save in ("policy", "every_row"):
                spec = CompressStoreSpec(Target.named(family), ratio=ratio, kv_format=kv_format, save=save)
                found.append(pytest.param(spec, id=f"{family}-{ratio}-{save}"))
    return found


@pytest.mark.parametrize("spec", specs())
@pytest.mark.parametrize("count", COUNTS)
def test_every_row_is_dealt_once(spec: CompressStoreSpec, count: int) -> None:
    found = collections.Counter(t for rows in dealt(spec, count) for t in rows)
    assert sorted(found) == list(range(evenly(spec, count))) and set(found.values()) == {1}


@pytest.mark.parametrize("spec", specs())
@pytest.mark.parametrize("count", COUNTS)
def test_steps_fill_one_wave(spec: CompressStoreSpec, count: int) -> None:
    """Of some 130 SMs. Small steps with few windows are spread over many blocks."""
    plan, (blocks, _), teams = plan_of(spec), split_of(spec, count), len(dealt(spec, count))
    assert teams * blocks <= plan.resident * 132
    assert spec.ratio == 4 or teams * blocks >= min(2 * count, 128)


@pytest.mark.parametrize("spec", specs())
@pytest.mark.parametrize("count", [1, 264, 3167, 3168, 6335, 6336, 8192, 16895, 16896, 32768, 100_001])
def test_the_last_rows_of_long_steps_are_dealt_late(spec: CompressStoreSpec, count: int) -> None:
    rows, every = (count - evenly(spec, count)) / 264, spec.save == "every_row"
    assert rows == (0 if spec.ratio == 128 or count < 3168 else 12 if count >= 16896 else 8 if count >= 6336 else 0 if every else 4)


@pytest.mark.parametrize("spec", specs())
@pytest.mark.parametrize("count", COUNTS)
def test_neighbours_are_saved_by_different_blocks(spec: CompressStoreSpec, count: int) -> None:
    """Of n blocks that save, any n rows in a row fall on different ones; and every row falls on one."""
    plan, (blocks, deal) = plan_of(spec), split_of(spec, count)
    teams = plan.teams(evenly(spec, count), deal)
    n, by = teams * blocks, {}
    for team in range(teams):
        for rank in range(blocks):
            own = (plan.saved_row(team, rank, i, teams, blocks.bit_length() - 1) for i in range(-(-count // n)))
            by |= {t: (team, rank) for t in own if t < count}
    assert sorted(by) == list(range(count))
    assert all(by[t] == by[t - n] for t in range(n, count)) and len({by[t] for t in range(min(n, count))}) == min(n, count)


@pytest.mark.parametrize("spec", specs())
def test_closing_rows_of_a_long_prompt_spread_evenly(spec: CompressStoreSpec) -> None:
    (_, deal), of = split_of(spec, 8192), dealt(spec, 8192)
    for first in range(0, spec.ratio, max(1, spec.ratio // 8)):
        closing = [sum((first + t + 1) % spec.ratio == 0 for t in rows) for rows in of]
        assert max(closing) <= -(-8192 // spec.ratio // deal) + 1


@pytest.mark.parametrize("spec", [s for s in specs() if s.values[0].ratio == 4])
@pytest.mark.parametrize("count", [1056, 2048, 4208, 6000])
def test_no_block_of_a_middle_step_has_more_windows_than_need_be(spec: CompressStoreSpec, count: int) -> None:
    """Four prompts, which begin at different places of a group: dealt singly, some block would have one more than another."""
    (_, deal), each, starts = split_of(spec, count), count // 4, (0, 1026, 515, 2048)
    closing = [sum((starts[t // each] + t % each + 1) % spec.ratio == 0 for t in rows) for rows in dealt(spec, count)]
    assert max(closing) == -(-evenly(spec, count) // (spec.ratio * deal))


@pytest.mark.parametrize("spec", specs())
def test_leading_rows_of_a_padded_step_spread_over_the_teams(spec: CompressStoreSpec) -> None:
    """A step of many requests, at least; else those rows are a prompt's, and few of them close a window of ratio 128."""
    plan, (_, deal) = plan_of(spec), split_of(spec, 8192, 256)
    live = [sum(t < 256 for t in rows) for rows in dealt(spec, 8192, 256)]
    assert max(live) <= max(plan.unit, -(-256 // deal // plan.unit) * plan.unit)


@pytest.mark.parametrize("spec", [s for s in specs() if s.values[0].ratio == 128])
def test_a_team_of_a_dense_step_has_one_unit(spec: CompressStoreSpec) -> None:
    """As long as its rows fit into one; and the pooling threads can note all rows that a window closing there takes from the step."""
    plan = plan_of(spec)
    for count in range(128, 40_000, 100):
        for requests in (1, count // 128, count // 128 + 1):
            blocks, deal = split_of(spec, count, requests)
            bits = plan.unit_bits(count, deal, requests)
            dense = requests <= count // 128
            assert bits <= 7 and (1 << bits) + plan.window // blocks - 1 <= plan.pooling
            assert bits == 2 or deal << (bits - 1) < count
            assert not dense or bits == 7 or plan.rows_of(count, deal, bits) == 1 << bits
            assert dense or bits == 2


@pytest.mark.parametrize("spec", specs())
def test_sizes_agree(spec: CompressStoreSpec) -> None:
    """What the kernel divides leaves no rest, however many blocks share a window."""
    plan = plan_of(spec)
    assert plan.ratio == 4 or plan.window // 8 // plan.batch >= plan.slots, "two turns rest on it"
    assert plan.window % plan.batch == 0 and min(32, plan.window) % plan.batch == 0
    assert 1 <= plan.slots <= plan.pooling and plan.threads <= 1024
    assert not plan.late or plan.looks == 1, "a ticket's rows are looked at by themselves"
    assert plan.width % (32 * plan.vector) == 0, "the saving warp reads whole vectors"
    for count in COUNTS:
        blocks, _ = split_of(spec, count)
        assert blocks in (1, 2, 4, 8) and plan.window // blocks % plan.batch == 0
