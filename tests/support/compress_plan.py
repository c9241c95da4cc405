"""The plan of a `compress_store` spec, how many blocks share a window, which rows each team takes, and a crowded step."""

from __future__ import annotations

import importlib
from typing import Any

from cute_kernels.compile.spec import CompressStoreSpec
from tests.support.compress import CompressCase, make_compress_case
from tests.support.steps import Request


def plan_of(spec: CompressStoreSpec) -> Any:
    return importlib.import_module(spec.module).plan(spec)


def split_of(spec: CompressStoreSpec, count: int, requests: int = 0) -> tuple[int, int]:
    """Blocks that share a window, and the most teams, in a step of `count` rows."""
    if spec.ratio == 4:
        return 1, plan_of(spec).deal
    steps = importlib.import_module("cute_kernels.device.splitters").STEPS
    few = importlib.import_module(spec.module).FEW_WINDOWS if count < 128 * requests else ()
    return next((blocks, teams) for most, blocks, teams in (*few, *steps) if count <= most)


def with_one_room(shared: int) -> int:
    """Bytes of shared memory of a block whose team needs one room, from those of one that needs all (ratio 128)."""
    splitters = importlib.import_module("cute_kernels.device.splitters")
    return shared - (splitters.LEVELS - 1) * splitters.ROOM


def row_of(plan: Any, team: int, i: int, deal: int, bits: int) -> int:
    """The row that a team takes as its i-th, by the plain numbering of teams."""
    splitters = importlib.import_module("cute_kernels.device.splitters")
    return plan.row_of(team, i, deal, bits, splitters.OneBlock.unit_of)


def evenly(spec: CompressStoreSpec, count: int) -> int:
    """Rows of a step that are dealt evenly, where the launch has a scratch; those behind are dealt by tickets."""
    return count - plan_of(spec).late_rows(count)


def dealt(spec: CompressStoreSpec, count: int, requests: int = 1) -> list[list[int]]:
    """The rows of each team, of those of a step of `count` rows that are dealt evenly."""
    plan, (_, deal) = plan_of(spec), split_of(spec, count, requests)
    even, bits = evenly(spec, count), plan.unit_bits(count, deal, requests)
    own, teams = range(plan.rows_of(even, deal, bits)), range(plan.teams(even, deal))
    of = [[row_of(plan, team, i, deal, bits) for i in own] for team in teams]
    return [[t for t in rows if t < even] for rows in of]


def crowded(spec: CompressStoreSpec, **options: Any) -> CompressCase:
    """Three teams with nine rows each to pool, and one block with four to save; all these close a ratio-4 window. Other rows are padding.

    More windows than a ring has stages, and more rows than a saving warp has on their way (`compress_rows.AHEAD`). (None closes a window of
    ratio 128, which has many stages by itself: there rows are saved only.)
    """
    plan, (blocks, deal) = plan_of(spec), split_of(spec, 1)
    bits = plan.unit_bits(9 * deal, deal, 9 * deal)
    rows = {row_of(plan, team, i, deal, bits) for team in range(3) for i in range(9)} | {i * deal * blocks for i in range(4)}
    count = max(rows) + 1
    assert split_of(spec, count)[1] == deal and plan.unit_bits(count, deal, count) == bits
    case = make_compress_case([Request(4 * (k % 5) + 3, 1) for k in range(count)], seed=9, **options)
    case.state_slots[[t for t in range(count) if t not in rows]] = -1
    return case
