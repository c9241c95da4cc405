"""Step metadata against brute force, updates in place, what layers share."""

from __future__ import annotations

import pytest
import torch

import cute_kernels as ck
from cute_kernels.step import StepMetadata, slot_mapping


def brute_force(query_lens: list[int], seq_lens: list[int], decode_query_len: int):
    rows = [(r, s - q + i if s else 0) for r, (q, s) in enumerate(zip(query_lens, seq_lens, strict=True)) for i in range(q)]
    decodes = 0
    while decodes < len(query_lens) and query_lens[decodes] <= decode_query_len:
        decodes += 1
    return rows, decodes


@pytest.mark.parametrize("decode_query_len", [1, 4])
@pytest.mark.parametrize("seed", range(12))
def test_against_brute_force(seed, decode_query_len):
    gen = torch.Generator().manual_seed(seed)
    requests = int(torch.randint(1, 9, (), generator=gen))
    query_lens = [int(torch.randint(0, 9 if seed % 3 else 5, (), generator=gen)) for _ in range(requests)]
    seq_lens = [q + int(torch.randint(0, 300, (), generator=gen)) for q in query_lens]
    if seed % 4 == 0:
        seq_lens[-1] = 0  # a padding request: rows, but no sequence
    step = StepMetadata.of(query_lens, seq_lens, decode_query_len=decode_query_len)
    rows, decodes = brute_force(query_lens, seq_lens, decode_query_len)
    assert step.token_to_req.tolist() == [r for r, _ in rows] and step.positions.tolist() == [p for _, p in rows]
    starts = [sum(query_lens[:r]) for r in range(requests + 1)]
    assert step.query_start_loc.tolist() == step.query_start_loc_cpu.tolist() == starts
    assert (step.num_requests, step.num_tokens) == (requests, len(rows))
    assert (step.num_decodes, step.num_prefills) == (decodes, requests - decodes)
    assert (step.num_decode_tokens, step.num_prefill_tokens) == (starts[decodes], len(rows) - starts[decodes])
    assert step.prefill_query_start_loc.tolist() == [s - starts[decodes] for s in starts[decodes:]]
    assert step.max_query_len == max(query_lens) and step.max_decode_query_len == max(query_lens[:decodes], default=0)
    assert step.seq_lens.tolist() == seq_lens

    for ratio, page_rows in ((1, 16), (4, 16), (128, 2)):
        table = torch.randint(-1, 50, (requests, 3), dtype=torch.int32, generator=gen)
        expected = []
        for r, p in rows:
            entry = p // ratio
            column = entry // page_rows
            closes = seq_lens[r] > 0 and (p + 1) % ratio == 0 and column < 3 and int(table[r, column]) >= 0
            expected.append(int(table[r, column]) * page_rows + entry % page_rows if closes else -1)
        assert slot_mapping(step, table, page_rows, ratio=ratio).tolist() == expected


def test_updates_write_into_the_same_buffers():
    step = StepMetadata(4, 16, "cpu", decode_query_len=2)
    step.update([1, 2, 7], [5, 9, 7])
    names = ("query_start_loc", "prefill_query_start_loc", "seq_lens", "positions", "token_to_req")
    addresses = {n: getattr(step, n).data_ptr() for n in names}
    step.update(torch.tensor([2, 2], dtype=torch.int32), torch.tensor([40, 30], dtype=torch.int32))
    assert {n: getattr(step, n).data_ptr() for n in names} == addresses
    assert step.positions.tolist() == [38, 39, 28, 29] and step.num_decodes == 2 and step.num_prefills == 0
    given = step.update([1, 1], [9, 4], positions=torch.tensor([7, 3]), token_to_req=torch.tensor([1, 0], dtype=torch.int32))
    assert given is step and step.positions.tolist() == [7, 3] and step.token_to_req.tolist() == [1, 0]
    step.update([], [])
    assert step.num_tokens == step.num_requests == step.max_query_len == 0 and step.query_start_loc.tolist() == [0]


def test_what_layers_share_lasts_one_step_and_what_graphs_use_lasts():
    step = StepMetadata.of([1], [1])
    built = []

    def build(name):
        return lambda: built.append(name) or name

    assert [step.once("a", build("a")), step.once("a", build("again")), step.once("b", build("b"))] == ["a", "a", "b"]
    assert step.keep("buffer", lambda: 1) == step.keep("buffer", lambda: 2) == 1
    step.update([1], [2])
    assert step.once("a", build("new")) == "new" and built == ["a", "b", "new"]
    assert step.keep("buffer", lambda: 3) == 1


def test_a_capture_builds_its_own_tables(monkeypatch):
    """A graph has to hold the launches that build what it reads, and must not leak its tables to eager calls."""
    step = StepMetadata.of([1], [1])
    step.device = torch.device("cuda", 0)
    capturing = False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    values = iter(range(9))
    first = step.once("a", lambda: next(values))
    capturing = True
    second = step.once("a", lambda: next(values))
    assert second != first and step.once("a", lambda: next(values)) == second
    capturing = False
    assert step.once("a", lambda: next(values)) not in (first, second)


def test_a_scratch_of_a_capture_is_the_graphs_own(monkeypatch):
    """Its zeros are written when the graph runs, so eager launches must not find it; the kept one is written before any capture."""
    step, capturing = StepMetadata.of([1], [1]), True
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    step.device = torch.device("cuda", 0)
    first = step.scratch()
    assert step.scratch() is first, "the layers of a captured step share one"
    capturing = False
    kept = step.scratch()
    assert kept is not first and step.scratch() is kept and not kept.any()
    capturing = True
    assert step.scratch() is kept


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (([1, -1], [3, 3]), "query_lens: got -1"),
        (([1, 1, 1], [3, 3, 3]), "query_lens: got 3 requests, expected at most max_requests=2"),
        (([5, 4], [5, 4]), "query_lens: got 9 rows, expected at most max_tokens=8"),
        (([[1]], [3]), "query_lens: got shape"),
        (([1, 1], [3]), "seq_lens: got"),
        (([1, 4], [3, 3]), "seq_lens: got 3 for request 1, expected 0, or at least its 4 query rows"),
        (([1], [-1]), "seq_lens: got -1"),
        (([1], torch.tensor([3])), r"seq_lens: got torch.int64"),
        (([1.5], [3]), "query_lens: got torch.float32 numbers"),
        ((torch.tensor([1.0]), [3]), "query_lens: got torch.float32 numbers"),
        (([True], [3]), "query_lens: got torch.bool numbers"),
        ((["1"], [3]), "query_lens: got"),
        ((None, [3]), "query_lens: got None"),
        (([2**62, 2**62], [3, 3]), "query_lens: got 4611686018427387904, expected lengths < 2"),
        (([2**63], [3]), "query_lens: got"),
        (([1], [3.7]), "seq_lens: got torch.float32 numbers"),
        (([1], [2**31]), "seq_lens: got torch.int64 numbers"),
    ],
)
def test_wrong_updates(arguments, named):
    step = StepMetadata(2, 8, "cpu").update([1], [4])
    with pytest.raises(ck.InvalidArgument, match=named):
        step.update(*arguments)
    assert step.positions.tolist() == [3] and step.num_requests == 1


def test_wrong_arguments():
    for name in ("max_requests", "max_tokens", "decode_query_len"):
        for wrong in (0, -1, 1.5, True, 2**31):
            with pytest.raises(ck.InvalidArgument, match=name):
                StepMetadata(**{"max_requests": 1, "max_tokens": 1, "device": "cpu", name: wrong})
    step = StepMetadata(2, 8, "cpu")
    for name, wrong in (("positions", torch.zeros(2)), ("token_to_req", torch.zeros(1, dtype=torch.int64)), ("positions", torch.arange(3))):
        with pytest.raises(ck.InvalidArgument, match=name):
            step.update([1], [1], **{name: wrong})
    step.update([1, 1], [1, 1])
    table = torch.zeros(2, 2, dtype=torch.int32)
    for wrong in (table[:1], table.long(), table[0], table.to("meta")):
        with pytest.raises(ck.InvalidArgument, match="block_table"):
            slot_mapping(step, wrong, 4)
    with pytest.raises(ck.InvalidArgument, match="page_rows"):
        slot_mapping(step, table, 0)
    with pytest.raises(ck.InvalidArgument, match="page_rows"):
        slot_mapping(step, table, 4.0)
    with pytest.raises(ck.InvalidArgument, match="block_table"):
        slot_mapping(step, None, 4)
    with pytest.raises(ck.InvalidArgument, match="ratio"):
        slot_mapping(step, table, 4, ratio=0)
    assert slot_mapping(step, table[:, :0], 4).tolist() == [-1, -1]


@pytest.mark.parametrize("nobody", [-1, 2, 2**31 - 1, -(2**31)])
def test_padding_rows_of_no_request_have_no_slot(nobody):
    """An engine's own request map may name anything in a padding row: it reads nothing out of range, and gets nobody's slot."""
    step = StepMetadata(2, 8, "cpu")
    step.update([1, 2], [5, 4], token_to_req=torch.tensor([0, 1, nobody], dtype=torch.int32))
    assert step.positions[:2].tolist() == [4, 2]
    assert slot_mapping(step, torch.tensor([[7, 8], [5, 6]], dtype=torch.int32), 4).tolist() == [32, 22, -1]
