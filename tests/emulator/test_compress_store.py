"""Every `compress_store` kernel of the support matrix, its SM100 and SM120 PTX executed and judged against float64.

The emulator is told which rows a case may write: a store anywhere else is a fault at its PTX line.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from cute_kernels import ops
from cute_kernels.compile.matrix import support_matrix
from cute_kernels.compile.spec import CompressStoreSpec
from cute_kernels.device.memory import EVICT_FIRST
from cute_kernels.kv_format import FORMATS as ROWS
from cute_kernels.save_policy import SavePolicy
from cute_kernels.scratch import COUNTERS, PART, TURNS, WORDS, compress_scratch
from cute_kernels.target import Target
from ptx_emulator import FOREIGN, UNWRITTEN, Memory, Result
from tests.emulator.emulated import Coverage, at_alignment, emulated, prepare, sparse
from tests.support.compress import MANY_REQUESTS, CompressCase, cancelling, lengthened, make_compress_case
from tests.support.compress_check import check_compress, expected
from tests.support.compress_plan import crowded, evenly, plan_of, row_of, split_of
from tests.support.pools import owned_bytes
from tests.support.steps import Request, mix

TARGETS = (Target("sm100", "sm_100a"), Target("sm120", "sm_120a"))
SPECS = [s for t in TARGETS for s in support_matrix(t) if isinstance(s, CompressStoreSpec)]
FORMATS = {"sm100": ("bf16", "fp8"), "sm120": ("fp8_ds_mla",)}
POLICY = SavePolicy(rollback=3, prefix_stride=64)
TICKET_ROWS = 4


def own(case: CompressCase, memory: Memory) -> None:
    """Declare the rows this case may write, and what must not be read: padding, and what an earlier launch left in the scratch memory."""
    want = expected(case)[0]
    if case.kv_score is not None:
        score, pitch = memory.find("kv_score"), 4 * case.kv_score.stride(0)
        rows = min(t.shape[0] for t in (case.state_slots, case.positions, case.token_to_req, case.kv_slots))
        for t in (t for t in range(case.kv_score.shape[0]) if t >= rows or case.state_slots[t] < 0):
            score.mark(UNWRITTEN, True, slice(t * pitch, t * pitch + 4 * case.kv_score.shape[1]))
    if any(buffer.name == "scratch" for buffer in memory.buffers):
        memory.find("scratch").mark(UNWRITTEN, True, slice(4 * COUNTERS, None))
    cache, state = memory.find("kv_cache"), memory.find("state")
    for buffer in (cache, state):
        buffer.mark(FOREIGN, True)
    owned = owned_bytes(case.pool, case.kv_storage.numel(), list(want.rows))[case.pool.base :][: cache.span]
    cache.mark(FOREIGN, False, owned)
    (_, _, width), (block_stride, row_stride, _), _ = case.state_layout
    for block, row in want.saved:
        first = 4 * (block * block_stride + row * row_stride)
        state.mark(FOREIGN, False, slice(first, first + 4 * width))


def run(case: CompressCase, target: Target, *, shared: bool = True, **options: Any) -> CompressCase:
    """The public call on a copy of the case; the copy. shared: blocks have a scratch to meet in."""
    after = case.clone()
    if shared:
        after.scratch = compress_scratch("cpu")

    def declare(name: str, memory: Memory, arguments: dict[str, Any]) -> None:
        prepare(name, memory, arguments)
        own(case, memory)

    with emulated(target, prepare=declare, **options):
        ops.compress_store(*after.args(), **after.kwargs())
    assert after.scratch is None or not after.scratch[:COUNTERS].any(), "the next launch counts from here"
    return after


def aligned(case: CompressCase, alignment: int) -> CompressCase:
    """The case with a `norm_weight` that allows accesses of exactly `alignment` bytes (pools and scores follow the case's own)."""
    return dataclasses.replace(case, norm_weight=at_alignment(case.norm_weight, alignment), cache=case.cache)


def long_step(spec: CompressStoreSpec, **options: Any) -> CompressCase:
    """A step whose teams take more than 32 rows: six of team 0 close a window, and six behind them, in the second look or by tickets,
    where there are some; at ratio 128 one in each other look of the first pass, and one in the second pass. The rest is padding."""
    plan, (_, deal) = plan_of(spec), split_of(spec, 4096, 4096)
    places = (*range(6), *range(40, 46), *((70, 100, 130) if spec.ratio == 128 else ()))
    rows = [row_of(plan, 0, i, deal, plan.unit.bit_length() - 1) for i in places]
    requests, at = [], 0
    for k, t in enumerate(sorted(rows)):
        requests += [Request(0, t - at)] * (t > at) + [Request(spec.ratio * (k % 3 + 1) - 1, 1)]
        at = t + 1
    case = make_compress_case(requests, seed=10, **options)
    assert plan.rows_of(evenly(spec, at), deal, plan.unit_bits(at, deal, at)) > 32 and split_of(spec, at, len(requests))[1] == deal
    case.state_slots[[t for t in range(at) if t not in rows]] = -1
    return case


def cases(spec: CompressStoreSpec) -> list[CompressCase]:
    ratio, scored = spec.ratio, spec.scores
    save = POLICY if spec.save == "policy" else SavePolicy.EVERY_ROW
    common: dict[str, Any] = {
        "ratio": ratio,
        "kv_format": spec.kv_format,
        "scored": scored,
        "save": save,
        "alignment": spec.vector_bytes,
        "kv_scale": 0.5 if spec.kv_format == "fp8" else None,
    }
    prefill = [Request(0, ratio + 7), Request(3 * ratio - 2, 9), Request(5 * ratio - 1, 1), Request(ratio - 1, 4)]
    decode = [Request(k * ratio - 1 + k % 2, 1) for k in range(1, 9 if ratio == 4 else 6)]
    made = [
        make_compress_case(prefill, padding=5, seed=1, **common),
        make_compress_case(decode, padding=2, unstored=0.2, seed=2, **common),
        make_compress_case(mix(40, 7, ratio=ratio), skipped=0.2, stale_blocks=True, padding=3, short="kv_slots", seed=3, **common),
        make_compress_case(decode[:2], value_scale=1e4, score_scale=20.0, seed=4, **{**common, "kv_scale": None}),
        make_compress_case(
            decode[:3], value_scale=1e-4, zero_group=True, strided=False, page_rows=4, seed=5, **common
        ),  # 4 * 584 % 32 == 0
        make_compress_case([Request(9 * ratio - 3, 6)], state_block=3, page_rows=5, seed=6, **common),
        crowded(spec, **common),
    ]
    one = make_compress_case(decode[1:2], seed=12, **common)
    shortest = {split_of(spec, count): count for count in (16385, 4097, 2049, 1)}
    made += [lengthened(one, count) for count in shortest.values() if count > 1]
    if ratio == 128:
        made.append(long_step(spec, **common))
    return [aligned(c, spec.vector_bytes) for c in made]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_every_spec(spec: CompressStoreSpec) -> None:
    coverage, made = Coverage(), cases(spec)
    for case in made:
        check_compress(case, run(case, spec.target, on_result=coverage.record))
    if spec.takes_scratch:
        check_compress(made[0], run(made[0], spec.target, shared=False, on_result=coverage.record))
    coverage.require(str(spec))


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("ratio", [4, 128])
@pytest.mark.parametrize("save", [POLICY, SavePolicy.EVERY_ROW], ids=["policy", "every_row"])
def test_blocks_of_many_rows(target: Target, ratio: int, save: SavePolicy) -> None:
    kv_format = FORMATS[target.family][0]
    spec = CompressStoreSpec(target, ratio=ratio, kv_format=kv_format, save="every_row" if save.every_row else "policy")
    case, seen = long_step(spec, ratio=ratio, kv_format=kv_format, save=save), []
    after = run(case, target, on_result=seen.append)
    report = check_compress(case, after)
    assert report.rows == (12 if ratio == 4 else 15)
    # Rows leave the L2 first, but where ratio 4 saves all of them.
    assert [set(result.policies) for result in seen] == [{None if ratio == 4 and save.every_row else EVICT_FIRST}]
    begin = after.ape.data_ptr()
    lines = range(begin, begin + after.ape.numel() * after.ape.element_size(), 128)
    assert seen[0].prefetched.issuperset(lines), "the blocks together prefetch all position embeddings"


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("save", [POLICY, SavePolicy.EVERY_ROW], ids=["policy", "every_row"])
def test_noted_rows_of_dense_steps(target: Target, save: SavePolicy) -> None:
    """Prompts that begin and end anywhere in a window, one of them where the one in front has ended; rows of it from the state pool in
    between, or without a place there; each width of a unit; rows that lie directly one behind another, which are copied together, and
    others."""
    requests = [Request(3 * 128 - 1, 1), Request(0, 300), Request(700, 180), Request(128 + 100, 29), Request(0, 61), Request(61, 200)]
    options: dict[str, Any] = {"ratio": 128, "kv_format": FORMATS[target.family][0], "save": save}
    spec = CompressStoreSpec(target, ratio=128, kv_format=options["kv_format"], save="every_row" if save.every_row else "policy")
    made = [make_compress_case(requests, padding=5, skipped=0.02, stale_blocks=True, seed=14, strided=s, **options) for s in (False, True)]
    for case in made:
        some = case.state_slots[100:300:7]
        some[some >= 0] = case.state.shape[0] * case.state.shape[1]
    seen = set()
    for i, count in enumerate((len(made[0].state_slots), 1025, 2049, 4097, 16385)):
        case = made[i % 2]
        seen.add(plan_of(spec).unit_bits(count, split_of(spec, count, len(requests))[1], len(requests)))
        assert check_compress(case, run(lengthened(case, count), target)).rows >= 6
    assert seen == {6, 7}


def live_rows(count: int, positions: dict[int, int], **options: Any) -> CompressCase:
    """A step of `count` rows, of which some are each a request of its own, at a position, and all others are padding."""
    requests, at = [], 0
    for t, position in sorted(positions.items()):
        requests += [Request(0, t - at), Request(position, 1)]
        at = t + 1
    case = make_compress_case([*requests, Request(0, count - at)], seed=12, **options)
    case.state_slots[[t for t in range(count) if t not in positions]] = -1
    return case


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("scratch", [True, False], ids=["late", "evenly"])
def test_the_last_rows_of_a_long_step(target: Target, scratch: bool) -> None:
    """Dealt by tickets, of which each block takes one too many, or, without a scratch, evenly: pooled and saved once each (twice would
    leave the same bytes, so those stored are counted)."""
    kv_format = FORMATS[target.family][0]
    spec = CompressStoreSpec(target, ratio=4, kv_format=kv_format, save="policy")
    count = 24 * plan_of(spec).deal + 2
    first = evenly(spec, count)
    assert count - first == 8 * plan_of(spec).deal
    pooled, saved = (first - 1, first, first + 3, first + 4, first + 7, count - 1), (5, first - 2, first + 1, count - 2)
    positions = dict.fromkeys(pooled, 7) | dict.fromkeys(saved, 5)
    case = live_rows(count, positions, ratio=4, kv_format=kv_format, save=POLICY)
    results: list[Result] = []
    report = check_compress(case, run(case, target, shared=scratch, on_result=results.append))
    assert (report.saved, report.rows) == (10, 6)
    rows = report.saved * case.kv_score.shape[1] * 4 + report.rows * ROWS[kv_format].row_bytes
    tickets = (count - first) // TICKET_ROWS + 264 if scratch else 0
    assert sum(result.stored for result in results) == rows + 4 * tickets


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("ratio", [4, 128])
def test_every_token_count(target: Target, ratio: int) -> None:
    for tokens in (0, 1, 3, 4, 5, 7, 127, 128, 129, 300):
        case = make_compress_case(
            mix(tokens, max(1, min(64, tokens // 3)), ratio=ratio), ratio=ratio, kv_format=FORMATS[target.family][-1], padding=tokens % 3
        )
        report = check_compress(case, run(case, target))
        assert report.saved == tokens


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("ratio", [4, 128])
def test_prompts_around_group_boundaries(target: Target, ratio: int) -> None:
    for kv_format in FORMATS[target.family]:
        lengths = range(1, 10) if ratio == 4 else range(126, 130)
        case = make_compress_case([Request(0, n) for n in lengths], ratio=ratio, kv_format=kv_format, save=SavePolicy(rollback=1))
        check_compress(case, run(case, target))


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("ratio", [4, 128])
def test_pools_beyond_two_gigabytes(target: Target, ratio: int) -> None:
    """State blocks and cache pages more than 2^31 bytes apart, over memory that exists only where it is touched."""
    kv_format = FORMATS[target.family][0]
    rows = [Request(ratio * 2 - 3, 6), Request(ratio - 1, 1)]
    case = make_compress_case(rows, ratio=ratio, kv_format=kv_format, strided=False, stale_blocks=False)
    state, cache = case.state, case.kv_cache
    pitch = state.shape[2]
    block = max((12 << 28) // state.shape[0] // pitch, 2 * state.shape[1]) * pitch  # the last block lies 12 GiB away
    far_state = sparse(*state.shape, strides=(block, pitch, 1), dtype=state.dtype).copy_(state)
    size, pitch = cache.element_size(), cache.stride(1)
    page = (2**31 // (size * pitch) + 5) * pitch if kv_format != "fp8_ds_mla" else 2**31 + 576
    far_cache = sparse(*cache.shape, strides=(page, pitch, 1), dtype=torch.uint8 if size == 1 else cache.dtype).view(cache.dtype)
    far_cache.copy_(cache)
    before = case.clone()
    arguments = [far_state if a is case.args()[2] else a for a in case.args()]
    arguments[2], arguments[-1] = far_state, far_cache
    with emulated(target):
        ops.compress_store(*arguments, **case.kwargs())
    case.state.copy_(far_state)
    case.kv_cache.view(torch.uint8).copy_(far_cache.view(torch.uint8))
    check_compress(before, case)


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("end", ["low", "high"])
def test_both_ends_of_the_approximate_functions(target: Target, end: str) -> None:
    """Whatever ex2, rcp and rsqrt give within their documented error, the rows stay admissible."""
    for ratio in (4, 128):
        case = make_compress_case([Request(3 * ratio - 2, 4)], ratio=ratio, kv_format=FORMATS[target.family][-1], seed=7)
        check_compress(case, run(case, target, approximation=end))


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_bytes_do_not_depend_on_the_length_of_the_step(target: Target) -> None:
    """However many blocks share a window: the sums have one order."""
    kv_format = FORMATS[target.family][0]
    spec = CompressStoreSpec(target, ratio=128, kv_format=kv_format, save="policy")
    requests = MANY_REQUESTS[:15]  # so few that 2049 rows are none of the steps in which few windows close
    case = make_compress_case(requests, ratio=128, kv_format=kv_format, save=POLICY, seed=11)
    check_compress(case, run(case, target))
    case = cancelling(case)
    want = run(case, target)
    if target.family == "sm120":
        assert torch.equal(run(case, target, shared=False).kv_storage, want.kv_storage)
    splits = {split_of(spec, len(case.state_slots))}
    for count in (2049, 2561, 4097, 8193, 16385):
        splits.add(split_of(spec, count, len(requests)))
        got = run(lengthened(case, count), target)
        assert torch.equal(got.kv_storage, want.kv_storage)
        assert np.array_equal(got.state_storage.numpy().view(np.int32), want.state_storage.numpy().view(np.int32))
    assert splits == {(8, 16), (4, 32), (4, 64), (2, 64), (2, 128), (1, 256)}


def test_launches_beside_others_leave_the_scratch_alone() -> None:
    """It may be in use: its counters count for somebody else."""
    target = TARGETS[1]
    case = make_compress_case([Request(0, 130), Request(250, 7)], ratio=128, kv_format="fp8_ds_mla", save=POLICY, seed=11)
    after = case.clone()
    scratch = torch.arange(3, 3 + WORDS, dtype=torch.int32)
    with emulated(target, prepare=lambda name, memory, arguments: setattr(memory.find("scratch"), "writable", False)):
        ops.compress_store(*after.args(), **after.kwargs(), scratch=scratch, independent=True)
    check_compress(case, after)


def test_a_team_shares_its_first_windows_only() -> None:
    """The teams' counters and parts lie side by side: as many windows as the memory has room for, and more, in one launch."""
    target = TARGETS[1]
    spec = CompressStoreSpec(target, ratio=128, kv_format="fp8_ds_mla", save="policy")
    case = long_step(spec, ratio=128, kv_format="fp8_ds_mla", save=POLICY)
    blocks, _ = split_of(spec, 1)
    after = run(case, target)
    check_compress(case, after)
    assert 0 < int((after.scratch[COUNTERS:] != 0).sum()) <= TURNS * blocks * PART


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_runs_are_bit_equal(target: Target) -> None:
    case = make_compress_case(mix(30, 4, ratio=4), ratio=4, kv_format=FORMATS[target.family][-1], seed=8)
    first, second = run(case, target), run(case, target)
    assert torch.equal(first.kv_storage, second.kv_storage)
    assert np.array_equal(first.state_storage.numpy().view(np.int32), second.state_storage.numpy().view(np.int32))
