"""compress_store, reference: against the float64 oracle, and the same bytes however a sequence is cut into steps."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from cute_kernels.errors import InvalidArgument
from cute_kernels.reference import compress_store
from cute_kernels.reference.compressor import saved_mask
from cute_kernels.save_policy import SavePolicy, is_saved
from tests.support import Request, check_compress, make_compress_case, mix
from tests.support.compress import saved_positions
from tests.support.serving import ServedSequence

FORMATS = ("bf16", "fp8", "fp8_ds_mla")
POLICIES = (SavePolicy.EVERY_ROW, SavePolicy(), SavePolicy(rollback=3), SavePolicy(rollback=5, prefix_stride=256))


def run(requests: list[Request], **options: object) -> None:
    case = make_compress_case(requests, **options)
    before = case.clone()
    compress_store(*case.args(), **case.kwargs())
    check_compress(before, case)


@pytest.mark.parametrize("ratio", [4, 128])
@pytest.mark.parametrize("tokens", [0, 1, 3, 4, 5, 7, 127, 128, 129, 300, 2048, 8192])
def test_token_counts(tokens: int, ratio: int) -> None:
    turn = tokens % 3
    requests = mix(tokens, max(1, min(64, tokens // 20)), ratio=ratio, seed=tokens)
    run(requests, ratio=ratio, kv_format=FORMATS[turn], save=POLICIES[tokens % 4], padding=5, skipped=0.03, unstored=0.1, seed=tokens)


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("save", POLICIES, ids=str)
@pytest.mark.parametrize("ratio", [4, 128])
def test_policies_and_formats(ratio: int, save: SavePolicy, kv_format: str) -> None:
    kv_scale = 0.25 if kv_format == "fp8" else None
    run(mix(400, 12, ratio=ratio, seed=3), ratio=ratio, kv_format=kv_format, save=save, kv_scale=kv_scale, padding=4, alignment=16)


@pytest.mark.parametrize("ratio", [4, 128])
@pytest.mark.parametrize(
    "options",
    [
        {"scored": False},
        {"stale_blocks": True, "scored": False},
        {"stale_blocks": True},
        {"short": "positions", "padding": 3},
        {"short": "token_to_req", "padding": 3},
        {"short": "kv_slots", "padding": 3},
        {"strided": False},
        {"page_rows": 1},
        {"page_rows": 7, "state_block": 3},
        {"state_block": 64},
        {"skipped": 0.5},
        {"unstored": 1.0},
        {"cos_rows": 600},
        {"zero_group": True, "value_scale": 1e-3},
        {"value_scale": 1e4, "score_scale": 30.0},
        {"value_scale": 1e-6, "eps": 1e-12},
    ],
    ids=lambda o: ",".join(f"{k}={v}" for k, v in o.items()),
)
def test_awkward_inputs(ratio: int, options: dict[str, object]) -> None:
    run(mix(520, 6, ratio=ratio, seed=8), ratio=ratio, kv_format="fp8_ds_mla", **options)


@pytest.mark.parametrize("ratio", [4, 128])
def test_nothing_but_padding_writes_nothing(ratio: int) -> None:
    run([Request(100, 0)], ratio=ratio, kv_format="fp8_ds_mla", padding=32)


@pytest.mark.parametrize("save", POLICIES, ids=str)
def test_a_captured_step_without_a_request_writes_nothing(save: SavePolicy) -> None:
    case = make_compress_case([Request(3, 1)], ratio=4, save=save, padding=3)
    tables = {"state_block_table": case.state_block_table[:0], "seq_lens": case.seq_lens[:0]}
    case = dataclasses.replace(case, requests=[], **tables, cache={})
    before = case.clone()
    compress_store(*case.args(), **case.kwargs())
    check_compress(before, case)


@pytest.mark.parametrize("ratio", [4, 128])
def test_requests_side_by_side_do_not_mix(ratio: int) -> None:
    """Neighbouring requests at touching positions: the row before a chunk's first belongs to somebody else."""
    run([Request(64, 64), Request(128, 130), Request(2, 6), Request(8, 120), Request(127, 1), Request(3, 1)], ratio=ratio)


@pytest.mark.parametrize("ratio", [4, 128])
def test_save_rule_in_closed_form_equals_its_definition(ratio: int) -> None:
    rng = np.random.default_rng(ratio)
    for _ in range(300):
        policy = SavePolicy(rollback=int(rng.integers(0, 12)), prefix_stride=int(rng.choice([0, 1, 3, 16, 64, 100, 128, 256])))
        start = int(rng.integers(0, 600))
        request = Request(start, int(rng.integers(1, 300)))
        positions = torch.arange(request.start, request.seq_len)
        kept = saved_positions(request, ratio, policy)
        assert {p for p in positions.tolist() if is_saved(p, request.seq_len, ratio, policy)} == kept
        mask = saved_mask(positions, torch.full_like(positions, request.seq_len), ratio, policy)
        assert set(positions[mask].tolist()) == kept


def chunks(tokens: int, sizes: list[int]) -> list[tuple[int, int]]:
    """(start, rows) of steps with these sizes, the last size repeated to the end."""
    out, start = [], 0
    while start < tokens:
        rows = min(sizes[min(len(out), len(sizes) - 1)], tokens - start)
        out.append((start, rows))
        start += rows
    return out


@pytest.mark.parametrize("save", [SavePolicy.EVERY_ROW, SavePolicy()], ids=str)
@pytest.mark.parametrize("ratio", [4, 128])
@pytest.mark.parametrize("tokens", [*range(1, 10), 126, 127, 128, 129, 131, 260, 391])
def test_any_chunking_gives_the_same_bytes(tokens: int, ratio: int, save: SavePolicy) -> None:
    kv_format = FORMATS[tokens % 3]

    def served(sizes: list[int], policy: SavePolicy) -> ServedSequence:
        sequence = ServedSequence(compress_store, tokens, ratio=ratio, kv_format=kv_format, save=policy, seed=tokens)
        for start, rows in chunks(tokens, sizes):
            sequence.step(start, rows)
        return sequence

    whole = served([tokens], SavePolicy.EVERY_ROW)
    rng = np.random.default_rng(tokens)
    for sizes in ([1], [2], [3, 5], [tokens // 2 + 1], rng.integers(1, 40, 30).tolist()):
        other = served(sizes, save)
        assert torch.equal(other.kv_storage, whole.kv_storage), sizes
        if save.every_row:
            assert torch.equal(other.state.view(torch.int32), whole.state.view(torch.int32)), sizes
    low = max(0, ratio * (tokens // ratio) - (4 if ratio == 4 else 0))
    assert torch.equal(other.state_rows(range(low, tokens)), whole.state_rows(range(low, tokens)))


@pytest.mark.parametrize("rollback", [None, 7])
@pytest.mark.parametrize("ratio", [4, 128])
def test_speculative_steps_equal_one_token_at_a_time(ratio: int, rollback: int | None) -> None:
    """Steps of 8 rows close one or more windows; any number of rows is accepted; what was rejected leaves no trace."""
    tokens, prompt, drafted = 270, 117, 8
    save = SavePolicy.EVERY_ROW if rollback is None else SavePolicy(rollback=rollback)
    for seed in range(3):
        rng = np.random.default_rng(seed)
        kv_format = FORMATS[seed % 3]
        serial = ServedSequence(compress_store, tokens + drafted, ratio=ratio, kv_format=kv_format, seed=seed)
        for position in range(tokens):
            serial.step(position, 1)
        other = ServedSequence(compress_store, tokens + drafted, ratio=ratio, kv_format=kv_format, save=save, seed=seed)
        other.step(0, prompt)
        at = prompt
        while at < tokens:
            accepted = int(rng.integers(1, drafted + 1))
            rows = other.rows[at : at + drafted].clone()
            rows[accepted:] = torch.from_numpy(rng.standard_normal(rows[accepted:].shape, dtype=np.float32)) * 100
            other.step(at, rows)
            at += accepted
            low = max(0, ratio * (at // ratio) - (4 if ratio == 4 else 0))
            upto = min(at, tokens)
            assert torch.equal(other.state_rows(range(low, upto)), serial.state_rows(range(low, upto))), (seed, at)
        for e in range(tokens // ratio):
            slot = int(serial.kv_table[e // serial.page_rows]) * serial.page_rows + e % serial.page_rows
            a, b = (s.pool.raw(s.kv_storage.numpy(), slot) for s in (serial, other))
            assert np.array_equal(a, b), (seed, e)


@pytest.mark.parametrize("ratio", [4, 128])
def test_a_prefix_hit_starts_in_mid_group(ratio: int) -> None:
    """With prefix_stride=100 any later step may begin at a multiple of 100: the rows it reads were kept, whatever came before."""
    tokens = 430
    whole = ServedSequence(compress_store, tokens, ratio=ratio, kv_format="bf16", seed=5)
    whole.step(0, tokens)
    for begin in (100, 200, 300, 400):
        other = ServedSequence(compress_store, tokens, ratio=ratio, kv_format="bf16", seed=5, save=SavePolicy(prefix_stride=100))
        other.step(0, 177)
        other.step(177, tokens - 177)
        low = max(0, ratio * (begin // ratio) - (4 if ratio == 4 else 0))
        kept = other.state_rows(range(low, begin)).clone()
        assert torch.equal(kept, whole.state_rows(range(low, begin)))
        other.step(begin, tokens - begin)
        assert torch.equal(other.kv_storage, whole.kv_storage)


def test_column_of_minus_infinity_and_nan_reach_only_their_row() -> None:
    case = make_compress_case([Request(0, 8), Request(0, 8)], ratio=4, kv_format="fp8_ds_mla", strided=False)
    assert case.kv_score is not None
    case.kv_score[4:8, 1024:] = -torch.inf  # every logit of the second window's own half
    case.kv_score[0:4, 1024:1536] = -torch.inf
    compress_store(*case.args(), **case.kwargs())
    raw = case.pool.raw(case.kv_storage.numpy(), int(case.kv_slots[7]))
    assert (raw[:448] == 0x7F).all()
    assert (raw[576:583] == 114).all() and raw[583] == 0
    assert np.isnan(case.pool.values(case.kv_storage.numpy(), int(case.kv_slots[7]))).all()
    for t in (11, 15):
        assert np.isfinite(case.pool.values(case.kv_storage.numpy(), int(case.kv_slots[t]))).all()


def test_wrong_calls_are_typed_errors() -> None:
    case = make_compress_case([Request(0, 8)], ratio=4, save=SavePolicy(rollback=1))
    before = case.clone()
    for change, name in (({"seq_lens": None}, "seq_lens"), ({}, "ape")):
        args = list(case.args())
        if name == "ape":
            args[1] = None
        with pytest.raises(InvalidArgument) as error:
            compress_store(*args, **{**case.kwargs(), **change})
        assert error.value.argument == name
    assert torch.equal(before.kv_storage, case.kv_storage)
