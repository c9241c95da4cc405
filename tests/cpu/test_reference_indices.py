"""sparse_indices, reference: every lane and every length, both forms, all sources."""

from __future__ import annotations

import pytest
import torch

from cute_kernels.errors import InvalidArgument
from cute_kernels.indices import CombinedIndices, IdSource, SegmentIndices
from cute_kernels.kv_format import PoolGeometry
from cute_kernels.reference import sparse_indices
from tests.support import Request, check_indices, make_index_case, mix

FORMS = ("combined", "segments")


def run(requests: list[Request], **options: object) -> None:
    case = make_index_case(requests, **options)
    for form in FORMS:
        check_indices(case, sparse_indices(*case.args(), **case.kwargs(), form=form))
        guarded = case.guarded_out(form)
        assert sparse_indices(*case.args(), **case.kwargs(), form=form, out=guarded.out) is guarded.out
        check_indices(case, guarded.out)
        guarded.check()


@pytest.mark.parametrize("source", IdSource, ids=lambda s: s.value)
@pytest.mark.parametrize("tokens", [0, 1, 3, 4, 5, 7, 127, 128, 129, 300])
def test_token_counts(tokens: int, source: IdSource) -> None:
    ratio = 128 if source is IdSource.ALL_GROUPS else 4
    run(mix(tokens, max(1, tokens // 9), ratio=ratio, seed=tokens), source=source, ratio=ratio, k=64, padding=3, seed=tokens)


@pytest.mark.parametrize("source", IdSource, ids=lambda s: s.value)
@pytest.mark.parametrize(
    "options",
    [
        {"stale_blocks": True},
        {"window_rows": 2, "compressed_rows": 2},
        {"window_rows": 256, "compressed_rows": 256, "span_factor": 1.0},
        {"window_rows": 64, "compressed_rows": 3, "span_factor": 2.34},
        {"extra_rows": 29, "padding": 5},
        {"with_slots": False, "padding": 5},
        {"short": "token_to_req", "padding": 5},
        {"short": "slots", "padding": 5},
        {"short": "ids", "padding": 5},
        {"garbage": 1.0},
        {"garbage": 0.6, "k": 33, "id_pitch": 7},
        {"garbage": 0.0, "k": 512, "width": 600},
        {"k": 1},
    ],
    ids=lambda o: ",".join(f"{k}={v}" for k, v in o.items()),
)
def test_awkward_inputs(source: IdSource, options: dict[str, object]) -> None:
    options = {"k": 48, **options}
    if source is IdSource.NONE:
        options.pop("width", None)
    for ratio in (4, 128):
        run(mix(90, 7, ratio=ratio, seed=ratio), source=source, ratio=ratio, **options)


@pytest.mark.parametrize("ratio", [4, 128])
def test_an_entry_is_visible_iff_its_group_is_closed(ratio: int) -> None:
    """Every id from -2 to the number of groups + 2, at every position: valid iff 0 <= id < (position + 1) // ratio."""
    positions = torch.arange(300)
    ids = torch.arange(-2, 300 // ratio + 2, dtype=torch.int32).repeat(300, 1)
    table = torch.arange(1, 301, dtype=torch.int32)[None]
    pool = PoolGeometry(400, 2, 2)
    got = sparse_indices(
        positions, torch.zeros(300, dtype=torch.int32), table, ids, table, window=pool, compressed=pool, source=IdSource.LOCAL, ratio=ratio
    )
    assert isinstance(got, CombinedIndices)
    for p in range(300):
        closed = (p + 1) // ratio
        assert got.lengths[p] == 128 + closed
        assert got.table[p, 128 : 128 + closed].tolist() == [2 + e for e in range(closed)]
        assert (got.table[p, 128 + closed :] == -1).all()


def test_all_groups_stop_at_the_width() -> None:
    run([Request(4000, 3)], source=IdSource.ALL_GROUPS, ratio=128, width=10)
    run([Request(4000, 3)], source=IdSource.ALL_GROUPS, ratio=4, width=64)


def test_padding_rows_of_a_captured_graph() -> None:
    case = make_index_case([], source=IdSource.LOCAL, k=16, padding=32, extra_rows=32)
    for form in FORMS:
        got = sparse_indices(*case.args(), **case.kwargs(), form=form)
        tables, lengths = list(vars(got).values())[0::2], list(vars(got).values())[1::2]
        assert all((t == -1).all() for t in tables) and all(len(t) == 64 for t in tables)
        assert all((n == (128 if form == "combined" else 0)).all() for n in lengths)


def test_wrong_calls_are_typed_errors() -> None:
    case = make_index_case([Request(10, 3)], source=IdSource.LOCAL, k=8)
    wrong_out = SegmentIndices(torch.empty((3, 128), dtype=torch.int32), torch.empty(3, dtype=torch.int32))
    for change, name in (
        ({"width": 7}, "width"),
        ({"num_rows": 2}, "num_rows"),
        ({"compressed": None}, "compressed"),
        ({"out": wrong_out}, "out"),
        ({"out": wrong_out, "form": "segments"}, "out.compressed"),
    ):
        with pytest.raises(InvalidArgument) as error:
            sparse_indices(*case.args(), **{**case.kwargs(), **change})
        assert error.value.argument == name
    for missing, name in ((3, "ids"), (4, "compressed_block_table")):
        args = list(case.args())
        args[missing] = None
        with pytest.raises(InvalidArgument) as error:
            sparse_indices(*args, **case.kwargs())
        assert error.value.argument == name
