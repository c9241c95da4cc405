"""Every `sparse_indices` kernel of the support matrix, its SM100 and SM120 PTX executed: all lanes and lengths exact."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from cute_kernels import ops, reference
from cute_kernels.compile.matrix import support_matrix
from cute_kernels.compile.spec import SparseIndicesSpec
from cute_kernels.indices import CombinedIndices, IdSource, SegmentIndices
from cute_kernels.kv_format import PoolGeometry
from cute_kernels.target import Target
from tests.emulator.emulated import Coverage, at_alignment, emulated, sparse
from tests.support.index_case import IndexCase, check_indices, make_index_case
from tests.support.steps import Request, mix

TARGETS = (Target("sm100", "sm_100a"), Target("sm120", "sm_120a"))
SPECS = [s for t in TARGETS for s in support_matrix(t) if isinstance(s, SparseIndicesSpec)]
MANY = 1100  # rows, above the limit up to which a block serves one row


def launch(case: IndexCase, spec: SparseIndicesSpec) -> CombinedIndices | SegmentIndices:
    """The public call into poisoned tables, arguments aligned so that it picks `spec`."""
    alignment = spec.vector_bytes
    out = ops.new_tables(case.rows, case.compressed_width, spec.target.family == "sm100", torch.device("cpu"))
    tables = {name: None if t is None else at_alignment(t.fill_(0x5A5A5A5A), alignment) for name, t in vars(out).items()}
    if case.ids is not None:
        case = dataclasses.replace(case, ids=at_alignment(case.ids, alignment))
    return ops.sparse_indices(*case.args(), **case.kwargs(), out=type(out)(**tables), target=spec.target)


def require_reference(case: IndexCase, got: CombinedIndices | SegmentIndices) -> None:
    form = "combined" if isinstance(got, CombinedIndices) else "segments"
    for name, want in vars(reference.sparse_indices(*case.args(), **case.kwargs(), form=form)).items():
        have = getattr(got, name)
        assert (have is None) == (want is None), name
        assert want is None or torch.equal(have, want), f"{name} differs at {(have != want).nonzero()[:5].tolist()}"


def step(spec: SparseIndicesSpec, tokens: int, requests: int, **options: Any) -> IndexCase:
    source = IdSource(spec.source)
    ratio = options.pop("ratio", 128 if source is IdSource.ALL_GROUPS else 4)
    longest = options.pop("longest_start", 3000)
    rows = options.pop("rows", None) or mix(tokens, requests, ratio=ratio, longest_start=longest) or [Request(9, 0)]
    if "k" in options and source in (IdSource.LOCAL, IdSource.GLOBAL):
        options.setdefault("width", -(-options["k"] // 8) * 8)
        options.setdefault("id_pitch", 8 + -options["k"] % 8)
    elif source is IdSource.ALL_GROUPS:
        options.setdefault("width", 48)
    if source is IdSource.GLOBAL and options.get("short") == "ids":
        options["short"] = "token_to_req"
    return make_index_case(rows, source=source, ratio=ratio, with_slots=spec.slots, **options)


def cases(spec: SparseIndicesSpec) -> list[tuple[IndexCase, bool]]:
    """(case, whether few enough rows to judge by the definition itself)."""
    has_ids = spec.source in ("local", "global")
    odd = {"garbage": 0.3, "stale_blocks": True}
    small = [
        step(spec, 40, 6, k=512, padding=5, extra_rows=3, **odd),
        step(spec, 9, 3, k=100, garbage=0.0),
        step(spec, 12, 4, k=1100, garbage=0.02, compressed_rows=2, longest_start=9000, **({"width": 1200} if has_ids else {})),
        step(spec, 14, 5, k=36, padding=4, short="token_to_req", **odd),
        step(spec, 0, 0, k=64, padding=3),  # nothing but padding rows
    ]
    if spec.slots:
        small.append(step(spec, 14, 5, k=36, padding=4, short="slots", **odd))
    large = [step(spec, MANY, 7, k=136, padding=5, **odd)]
    if has_ids:
        small.append(step(spec, 14, 5, k=40, padding=4, short="ids", **odd))
        # The last ids fill no whole vector: in the first batch or in a later one, in the first vector of a lane or in its second.
        small += [step(spec, 9, 3, k=k, garbage=0.0) for k in (7, 135, 519, 647, 1031, 1159)]
        large += [step(spec, MANY, 7, k=k, garbage=0.0) for k in (7, 135, 263, 391)]
    if spec.source != "none":
        some = [Request(9000, 3), Request(5000, 2), Request(300, 2)]  # rows whose ids are all valid, or some
        most = [Request(4300, MANY - 70), Request(1400, 40), Request(0, 30)]
        for k, garbage in ((2056, 0.0), (850, 0.003)):
            # Whole vectors, so that 32-byte accesses are allowed.
            width = {"k": k} if has_ids else {"width": -(-k // 8) * 8, "stale_blocks": garbage > 0}
            small.append(step(spec, 0, 0, rows=some, ratio=4, garbage=garbage, **width))
        for garbage in (0.0, 0.003):
            width = {"k": 850} if has_ids else {"width": 856, "stale_blocks": garbage > 0}
            large.append(step(spec, 0, 0, rows=most, ratio=4, garbage=garbage, **width))
    return [(c, True) for c in small] + [(c, False) for c in large]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_every_spec(spec: SparseIndicesSpec) -> None:
    coverage = Coverage()
    with emulated(spec.target, on_result=coverage.record):
        for case, few in cases(spec):
            got = launch(case, spec)
            if few:
                check_indices(case, got)
            else:
                require_reference(case, got)
    coverage.require(str(spec))


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 3, 4, 5, 7, 127, 128, 129, 300])
def test_every_token_count(target: Target, tokens: int) -> None:
    spec = SparseIndicesSpec(target, 32, source="local")
    with emulated(target):
        for requests in (1, max(1, min(64, tokens))):
            case = step(spec, tokens, requests, k=64, garbage=0.1, stale_blocks=tokens % 2 == 1, padding=tokens % 3)
            require_reference(case, launch(case, spec))


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_group_boundaries(target: Target) -> None:
    """An entry is visible iff it is below (position + 1) // ratio, at every position around a boundary."""
    with emulated(target):
        for ratio, positions in ((4, range(10)), (128, (*range(125, 131), *range(254, 258)))):
            spec = SparseIndicesSpec(target, 32, source="all_groups")
            case = make_index_case([Request(p, 1) for p in positions], source=IdSource.ALL_GROUPS, ratio=ratio, width=8)
            check_indices(case, launch(case, spec))


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_rows_beyond_two_gigabytes(target: Target) -> None:
    """Row pitches of ids and block tables beyond 2^31 bytes, slots beyond 2^31 never formed."""
    pitch = 2**29 + 8
    spec = SparseIndicesSpec(target, 32, source="local")
    case = make_index_case([Request(700, 1), Request(1000, 1), Request(3, 1)], source=IdSource.LOCAL, k=64, garbage=0.1)
    assert case.ids is not None and case.compressed_block_table is not None
    changes = {}
    for name in ("ids", "window_block_table", "compressed_block_table"):
        x = getattr(case, name)
        changes[name] = sparse(*x.shape, strides=(pitch, 1), dtype=x.dtype).copy_(x)
    with emulated(target):
        out = ops.sparse_indices(*(far := dataclasses.replace(case, **changes)).args(), **far.kwargs(), target=target)
        check_indices(case, out)
    assert spec.target == target


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_large_pools(target: Target) -> None:
    """Storage rows near the top of int32: the last one that a table entry can name."""
    spec = SparseIndicesSpec(target, 32, source="global")
    case = make_index_case([Request(500, 2)], source=IdSource.GLOBAL, k=64, garbage=0.0)
    pages = 2**31 // 112 - 1
    compressed = PoolGeometry(pages, 64, 112)
    ids = torch.randint(0, pages * 64, (2, 64), dtype=torch.int64).to(torch.int32)
    ids[:, 0] = pages * 64 - 1
    case = dataclasses.replace(case, compressed=compressed, ids=ids)
    with emulated(target):
        check_indices(case, launch(case, spec))


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("source", IdSource, ids=lambda s: s.value)
def test_positions_no_sequence_has(target: Target, source: IdSource) -> None:
    """Any int64 is safe as a position, and means the same to kernel and reference."""
    case = make_index_case([Request(300, 8)], source=source, ratio=4, k=32, width=32 if source is IdSource.ALL_GROUPS else None)
    positions = torch.tensor([-(2**63), -2, 2**31 - 2, 2**31 - 1, 2**31, 2**32 + 5, 2**63 - 1, 300])
    case = dataclasses.replace(case, positions=positions)
    with emulated(target):
        require_reference(case, ops.sparse_indices(*case.args(), **case.kwargs()))


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("shape", [(0, 8), (8, 0)])
def test_empty_tables_may_have_any_strides(target: Target, shape: tuple[int, int]) -> None:
    """No ids at all, or none a row; block tables without a column. The compiled function asks for strides that these lack."""
    case = make_index_case([Request(300, 8)], source=IdSource.LOCAL, ratio=4, k=8)
    assert case.compressed_block_table is not None
    for strides in ((1, 1), (0, 0), (3, 2)):
        ids = torch.empty(shape, dtype=torch.int32).as_strided(shape, strides)
        nothing = case.compressed_block_table[:, :0].as_strided((1, 0), strides)
        no_request = torch.empty(0, dtype=torch.int32).as_strided((0,), strides[:1])
        no_slot, tables = no_request.long().as_strided((0,), strides[:1]), {"ids": ids, "compressed_block_table": nothing}
        padding: list[dict[str, Any]] = [{"token_to_req": no_request}, {"slots": no_slot}, {"positions": no_slot, "num_rows": 8}]
        for changes in ({"ids": ids}, tables, {"window_block_table": nothing}, *padding):
            odd = dataclasses.replace(case, **changes)
            with emulated(target):
                require_reference(odd, ops.sparse_indices(*odd.args(), **odd.kwargs()))
