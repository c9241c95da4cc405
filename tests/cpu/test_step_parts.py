"""Decode-only and prefill-only metadata, the uniform decode prefix, one call or two, and dense prefill beside sparse decode."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cute_kernels as ck
from cute_kernels import dispatch, torch_ops
from cute_kernels.errors import InvalidArgument
from cute_kernels.step import SPLIT_ROWS, CallPolicy
from tests.support.decode_case import decode_case, pool
from tests.support.flashinfer_double import flashinfer_on


@pytest.mark.parametrize(
    ("query_lens", "decode_query_len", "decodes"),
    [
        ((1, 1, 1, 7), 1, 3),
        ((2, 2, 1, 2), 4, 2),  # the third is short enough, but not uniform
        ((2, 0, 2, 0, 0), 4, 5),
        ((0, 0, 3, 0, 3, 1), 4, 5),
        ((0, 0), 1, 2),
        ((5, 1, 1), 4, 0),
        ((0, 5), 4, 1),
        ((4, 4, 4), 4, 3),
        ((), 4, 0),
    ],
)
def test_the_uniform_prefix(query_lens: tuple[int, ...], decode_query_len: int, decodes: int) -> None:
    step = ck.StepMetadata.of(query_lens, [9] * len(query_lens), decode_query_len=decode_query_len, uniform_decodes=True)
    assert (step.num_decodes, step.num_prefills) == (decodes, len(query_lens) - decodes)
    rows = query_lens[:decodes]
    assert step.num_decode_tokens == sum(rows) and step.num_prefill_tokens == sum(query_lens[decodes:])
    # What engines reckon with: every decode that has rows has the longest one's.
    assert step.num_decode_tokens == step.max_decode_query_len * sum(n > 0 for n in rows)


def same(part: ck.StepMetadata, query_lens: list[int], seq_lens: list[int], decode: bool) -> None:
    want = ck.StepMetadata.of(query_lens, seq_lens, decode_query_len=max([*query_lens, 1]) if decode else 1)
    for name in ("query_start_loc", "query_start_loc_cpu", "seq_lens", "positions", "token_to_req"):
        assert torch.equal(getattr(part, name), getattr(want, name)) and getattr(part, name).dtype == getattr(want, name).dtype, name
    assert (part.num_requests, part.num_tokens) == (len(query_lens), sum(query_lens))
    counts = (part.num_decodes, part.num_decode_tokens, part.num_prefills, part.num_prefill_tokens)
    assert counts == ((len(query_lens), sum(query_lens), 0, 0) if decode else (0, 0, len(query_lens), sum(query_lens)))
    prefill = query_lens if not decode else []
    assert part.prefill_query_start_loc.tolist() == [sum(prefill[:i]) for i in range(len(prefill) + 1)]


@pytest.mark.parametrize("uniform", [True, False])
@pytest.mark.parametrize("seed", range(10))
def test_parts_are_the_steps_that_their_requests_make(seed: int, uniform: bool) -> None:
    gen = torch.Generator().manual_seed(seed)
    requests = int(torch.randint(0, 9, (), generator=gen))
    query_lens = sorted(torch.randint(0, 6, (requests,), generator=gen).tolist())
    seq_lens = [0 if n == 0 else n + int(torch.randint(0, 99, (), generator=gen)) for n in query_lens]
    step = ck.StepMetadata.of(query_lens, seq_lens, decode_query_len=(1, 3, 9)[seed % 3], uniform_decodes=uniform)
    cut = step.num_decodes
    decode, prefill = step.decode_only(), step.prefill_only()
    same(decode, query_lens[:cut], seq_lens[:cut], True)
    same(prefill, query_lens[cut:], seq_lens[cut:], False)
    assert decode.max_query_len == decode.max_decode_query_len == max(query_lens[:cut], default=0)
    assert prefill.max_query_len == max(query_lens, default=0) and prefill.max_decode_query_len == 0
    assert (decode.decode_query_len, decode.call_policy) == (step.decode_query_len, step.call_policy)


def test_parts_last_a_step_and_their_buffers_longer() -> None:
    step = ck.StepMetadata(4, 32, "cpu", decode_query_len=2).update([1, 2, 9], [5, 9, 9])
    first = step.decode_only()
    assert step.decode_only() is first and step.prefill_only() is step.prefill_only() is not first
    for name in ("query_start_loc", "seq_lens", "positions", "token_to_req"):
        assert getattr(first, name).data_ptr() == getattr(step, name).data_ptr(), "a captured graph reads these"
    buffer = first.keep("buffer", lambda: [1])
    first.once("table", lambda: 1)
    step.once("table", lambda: 2)
    assert first.once("table", lambda: 3) == 1 and first.max_tokens == 32
    step.update([2, 2], [8, 8])
    second = step.decode_only()
    assert second is not first and second.num_tokens == 4 and step.prefill_only().num_tokens == 0
    assert second.keep("buffer", lambda: [2]) is buffer and second.once("table", lambda: 4) == 4
    assert step.keep("buffer", lambda: [3]) is not buffer
    for part in (second, step.prefill_only()):
        with pytest.raises(InvalidArgument, match="update: got a step over tensors of another"):
            part.update([1], [1])


# One call or two --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query_lens", "padding", "combined", "one"),
    [
        ((1, 1, 1, 9), 0, True, False),  # the default
        ((1, 1, 1, 9), 0, False, False),
        ((1, 1, 1, 9), 24, True, True),  # three decodes of 1 row padded to 9
        ((1, 1, 1, 9), 23, True, False),
        ((1, 1, 1), 100, True, False),  # nothing to join
        ((9, 9), 100, True, False),
        ((1, 9, 9), 8, True, True),
        ((1, 62), 1, False, True),  # 63 rows: split kernels either way
        ((1, 63), 1, False, True),
        ((1, 64), 10**6, False, False),  # 65: one call would take the decode row to other kernels
        ((1,) * 65 + (64,), 10**6, False, False),
        ((1,) * 65 + (65,), 1, False, True),
    ],
)
def test_call_policy(query_lens: tuple[int, ...], padding: int, combined: bool, one: bool) -> None:
    policy = CallPolicy(max_padded_rows=padding)
    step = ck.StepMetadata.of(query_lens, [100] * len(query_lens), call_policy=policy)
    assert SPLIT_ROWS == 64 and step.call_policy.one_call(step, combined) is one


@pytest.mark.parametrize("wrong", [-1, True, 1.5, None])
def test_a_policy_that_is_none(wrong: Any) -> None:
    with pytest.raises(InvalidArgument, match="max_padded_rows"):
        CallPolicy(wrong)


@pytest.mark.parametrize("capability", [(10, 0), (12, 0)])
def test_one_call_answers_as_two(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    family, name = ("sm100", "fp8") if capability[0] == 10 else ("sm120", "fp8_ds_mla")
    case = decode_case(family, name, 16, query_lens=(1, 1, 0, 1, 5, 2), seq_lens=(300, 7, 9, 129, 140, 3))
    run: dict[str, Any] = {"backend": "flashinfer", "target": ck.Target.from_capability(capability)}
    with flashinfer_on(capability, monkeypatch) as two:
        apart = case.run(**run)
    case.arguments["step"].call_policy = CallPolicy(max_padded_rows=1000)
    with flashinfer_on(capability, monkeypatch) as one:
        together = case.run(**run)
    assert [len(c["query"]) for c in two.calls] == [3, 7] and [len(c["query"]) for c in one.calls] == [10]
    torch.testing.assert_close(together.float(), apart.float(), rtol=2**-7, atol=2**-12)
    if family == "sm100":
        (call,) = one.calls
        assert call["max_q_len"] == 5 and call["batch_size"] == 6 and call["counters"].numel() >= 6 * 16 * 4


@pytest.mark.parametrize("rows", [0, 7])
def test_a_traced_call_keeps_the_policy(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = decode_case("sm100", "bf16", 8)
    case.arguments["step"].call_policy = CallPolicy(rows)
    seen = []
    monkeypatch.setattr(dispatch, "decode", lambda **a: seen.append(a["step"]))
    settings = {"out": None, "workspace": None, "counters": None, "rope_cos_sin": None, "backend": "reference", "target": None}
    torch_ops.decode(**{**case.arguments, "sm_scale": 1.0, "q_scale": 1.0, "kv_scale": 1.0, **settings})
    assert [s.call_policy for s in seen] == [CallPolicy(rows)] and seen[0].num_decodes == 3


# Dense prefill beside sparse decode ---------------------------------------------------------------------------------------------


def dense_attention(
    q: torch.Tensor, keys: torch.Tensor, mask: torch.Tensor, sinks: torch.Tensor, logit_scale: float, value_scale: float
) -> torch.Tensor:
    """q [T, H, 512], keys [n, 512], mask bool [T, n], sinks [H] -> float64 [T, H, 512], from the definition."""
    logits = torch.einsum("thd,nd->thn", q.double(), keys.double()) * logit_scale
    logits = logits.masked_fill(~mask[:, None], -torch.inf)
    weights = torch.softmax(torch.cat([logits, sinks.double()[None, :, None].expand(len(q), -1, 1)], -1), -1)[..., :-1]
    return torch.einsum("thn,nd->thd", weights, keys.double()) * value_scale


@pytest.mark.parametrize(("family", "name"), [("sm100", "fp8"), ("sm120", "fp8_ds_mla")])
@pytest.mark.parametrize("ratio", [4, 128])
def test_dense_prefill_and_sparse_decode_equal_all_sparse(ratio: int, family: str, name: str) -> None:
    """A mixed batch: decodes through decode-only metadata and index tables, prefill rows densely over gathered BF16 rows."""
    query_lens, seq_lens, heads = (1, 1, 0, 1, 70, 33), (300, 7, 0, 129, 270, 33), 8
    step = ck.StepMetadata.of(query_lens, seq_lens, uniform_decodes=True)
    gen = torch.Generator().manual_seed(ratio)
    requests, longest, page_rows = len(query_lens), max(seq_lens), 64 if ratio == 4 else 2

    def table(entries: int, rows: int) -> torch.Tensor:
        columns = -(-entries // rows)
        return torch.randperm(requests * columns, generator=gen).int().view(requests, columns)

    window_table, compressed_table = table(longest, 16), table(longest // ratio, page_rows)
    swa = pool(name, window_table.numel(), 16, strided=True)
    kv = pool(name, compressed_table.numel(), page_rows, strided=True, seed=1)
    q = torch.randn(step.num_tokens, heads, 512, generator=gen).to(torch.float8_e4m3fn if name == "fp8" else torch.bfloat16)
    sinks = torch.linspace(-2, 3, heads)
    scales = {"q_scale": 0.5, "kv_scale": 2.0} if name == "fp8" else {}

    def sparse(part: ck.StepMetadata, q: torch.Tensor, first: int) -> torch.Tensor:
        rows = slice(first, first + part.num_requests)
        indices = ck.sparse_indices(
            part.positions,
            part.token_to_req,
            window_table[rows],
            compressed_block_table=compressed_table[rows],
            window=ck.PoolGeometry.of(swa),
            compressed=ck.PoolGeometry.of(kv),
            source=ck.IdSource.ALL_GROUPS,
            ratio=ratio,
            width=longest // ratio,
            slots=ck.slot_mapping(part, window_table[rows], 16),
            target=family,
        )
        return ck.decode(q, swa, kv, part, indices, sinks=sinks, **scales)

    everything = sparse(step, q, 0)
    decode, prefill = step.decode_only(), step.prefill_only()
    assert (decode.num_requests, prefill.num_requests) == (4, 2), "the padding request decodes"
    cut = step.num_decode_tokens
    got = [sparse(decode, q[:cut], 0).double()]

    ends = prefill.seq_lens.tolist()
    starts = [max(0, int(prefill.positions[begin]) - 127) for begin in prefill.query_start_loc_cpu[:-1]]  # mid-page

    def gathered(cache: torch.Tensor, block_table: torch.Tensor, first: list[int], last: list[int]) -> list[torch.Tensor]:
        lengths = [b - a for a, b in zip(first, last, strict=True)]
        out = torch.full((sum(lengths), 512), torch.nan, dtype=torch.bfloat16)
        offsets = torch.tensor([0, *lengths]).cumsum(0).int()
        ck.gather_upconvert(cache, out, block_table, offsets, seq_starts=torch.tensor(first, dtype=torch.int32))
        return list(out.split(lengths))

    windows = gathered(swa, window_table[step.num_decodes :], starts, ends)
    groups = gathered(kv, compressed_table[step.num_decodes :], [0] * len(ends), [end // ratio for end in ends])
    q_scale, kv_scale = scales.get("q_scale", 1.0), scales.get("kv_scale", 1.0)
    for r, (window, compressed) in enumerate(zip(windows, groups, strict=True)):
        rows = slice(*prefill.query_start_loc_cpu[r : r + 2].tolist())
        pos = prefill.positions[rows][:, None]
        key_pos = starts[r] + torch.arange(len(window))
        mask = torch.cat([(key_pos <= pos) & (key_pos > pos - 128), torch.arange(len(compressed)) < (pos + 1) // ratio], 1)
        keys = torch.cat([window, compressed])
        got.append(dense_attention(q[cut:][rows], keys, mask, sinks, 512**-0.5 * q_scale * kv_scale, kv_scale))

    # Both round once to BF16; the sparse reference computes in fp32, the dense one in float64.
    torch.testing.assert_close(torch.cat(got).float(), everything.float(), rtol=2**-7, atol=2**-12)
    assert everything.abs().amax((1, 2)).gt(0).all()
