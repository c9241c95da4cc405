"""`sparse_indices` on a GPU, both families' source: every lane and every length exact, nothing else written."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

from cute_kernels import ops, reference
from cute_kernels.compile import cache
from cute_kernels.compile.spec import SparseIndicesSpec
from cute_kernels.indices import CombinedIndices, IdSource, SegmentIndices
from cute_kernels.kv_format import PoolGeometry
from cute_kernels.target import Target
from tests.support.index_case import Form, IndexCase, check_indices, make_index_case
from tests.support.steps import Request, mix

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="executes both families' source on an SM90 GPU (H100, H200), and there is none",
)

FORMS: dict[str, Form] = {"sm100": "combined", "sm120": "segments"}
families = pytest.mark.parametrize("family", ["sm100", "sm120"])
sources = pytest.mark.parametrize("source", list(IdSource), ids=lambda s: s.value)


def target(family: str) -> Target:
    return Target(family, "sm_90a")


def expected(case: IndexCase, family: str) -> CombinedIndices | SegmentIndices:
    """The reference's tables, computed on the case's device."""
    return reference.sparse_indices(*case.args(), **case.kwargs(), form=FORMS[family])


def require_equal(got: CombinedIndices | SegmentIndices, want: CombinedIndices | SegmentIndices) -> None:
    for name, table in vars(want).items():
        have = getattr(got, name)
        assert (have is None) == (table is None), name
        if table is not None and not torch.equal(have, table):
            at = (have != table).nonzero()
            first = tuple(at[0].tolist())
            raise AssertionError(f"{name}: {len(at)} of {table.numel()} differ, first at {first}: {have[first]}, expected {table[first]}")


def run(case: IndexCase, family: str) -> CombinedIndices | SegmentIndices:
    """The public call into guarded, poisoned buffers."""
    guarded = case.guarded_out(FORMS[family])
    result = ops.sparse_indices(*case.args(), **case.kwargs(), out=guarded.out, target=target(family))
    guarded.check()
    return result


def launch(case: IndexCase, family: str, out: CombinedIndices | SegmentIndices, **spec_fields: object) -> None:
    """The compiled kernel itself, for spec fields that the public call chooses by itself."""
    spec = SparseIndicesSpec(target(family), source=case.source.value, slots=case.slots is not None, **spec_fields)
    given = dict(zip(("positions", "token_to_req", "window_block_table", "ids", "compressed_block_table"), case.args(), strict=True))
    given |= {"slots": case.slots, "ratio": case.ratio, "independent": 0}
    for name, pool in (("window", case.window), ("compressed", case.compressed)):
        if pool is not None:
            given |= {f"{name}_pages": pool.pages, f"{name}_page_rows": pool.page_rows, f"{name}_span": pool.span}
    if isinstance(out, CombinedIndices):
        given |= {"table": out.table, "lengths": out.lengths}
    else:
        given |= {"window_table": out.window, "window_lengths": out.window_lengths}
        given |= {"compressed_table": out.compressed, "compressed_lengths": out.compressed_lengths}
    cache.get(spec)(*(given[name] for name in spec.argument_names))


def step(tokens: int, requests: int, source: IdSource, **options: object) -> IndexCase:
    """A mixed step on the GPU."""
    return _step(tokens, requests, source, tuple(options.items())).to("cuda")


@functools.cache
def _step(tokens: int, requests: int, source: IdSource, options: tuple[tuple[str, object], ...]) -> IndexCase:
    """The same for both families, with the oracle's answer once it has been asked for."""
    given = {"ratio": 128 if source is IdSource.ALL_GROUPS else 4, "longest_start": 9000, "id_pitch": 8, **dict(options)}
    rows = mix(tokens, requests, ratio=given["ratio"], longest_start=given.pop("longest_start"))
    return make_index_case(rows, source=source, **given)


@families
@sources
@pytest.mark.parametrize("tokens", [0, 1, 3, 4, 5, 7, 127, 128, 129, 300, 2048, 8192])
def test_every_token_count(family: str, source: IdSource, tokens: int) -> None:
    case = step(tokens, requests=max(1, min(64, tokens // 4)), source=source, stale_blocks=tokens % 2 == 1, padding=tokens % 3)
    got = run(case, family)
    require_equal(got, expected(case, family))
    if tokens <= 300:
        check_indices(case, got)


@families
@sources
@pytest.mark.parametrize("requests", [1, 2, 7, 64])
def test_padding_rows_stale_tables_and_garbage_ids(family: str, source: IdSource, requests: int) -> None:
    for short in (None, "token_to_req", "slots", "ids"):
        if short == "ids" and source not in (IdSource.LOCAL, IdSource.GLOBAL):
            continue
        case = step(150, requests, source, padding=9, extra_rows=5, short=short, garbage=0.4, stale_blocks=True, seed=requests)
        check_indices(case, run(case, family))


@families
@pytest.mark.parametrize("source", [IdSource.LOCAL, IdSource.GLOBAL], ids=lambda s: s.value)
@pytest.mark.parametrize("k", [1, 3, 4, 100, 127, 128, 129, 508, 512, 516, 1024, 2048])
def test_widths_of_ids(family: str, source: IdSource, k: int) -> None:
    """Ids that fill no whole vector, chunk or batch, with tables as narrow as they come and wider ones."""
    pitch = -k % 8 + 8  # rows of ids start at whole vectors
    for rows, width in ((9, None), (1100, k + 37)):
        for garbage in (0.0, 0.1):
            case = step(rows, 5, source, k=k, width=width, id_pitch=pitch, garbage=garbage, extra_rows=2)
            require_equal(run(case, family), expected(case, family))


@families
@pytest.mark.parametrize(
    ("page_rows", "ratio", "longest"), [(1, 4, 500), (2, 128, 9000), (3, 4, 700), (64, 4, 40_000), (256, 1, 3000), (1000, 7, 9000)]
)
def test_page_rows_and_ratios_are_run_time_values(family: str, page_rows: int, ratio: int, longest: int) -> None:
    for source in (IdSource.LOCAL, IdSource.GLOBAL, IdSource.ALL_GROUPS):
        case = step(70, 4, source, ratio=ratio, longest_start=longest, window_rows=page_rows, compressed_rows=page_rows, stale_blocks=True)
        check_indices(case, run(case, family))


@families
@pytest.mark.parametrize("width", [1, 4, 20, 128, 516])
def test_more_groups_than_columns(family: str, width: int) -> None:
    for rows in (9, 1100):
        case = step(rows, 3, IdSource.ALL_GROUPS, ratio=4, width=width, extra_rows=2)
        require_equal(run(case, family), expected(case, family))


@families
def test_every_group_of_a_million_tokens(family: str) -> None:
    requests = [Request(2**20 - 40, 40), Request(2**20 - 1, 1), Request(5, 3)]
    case = make_index_case(requests, source=IdSource.ALL_GROUPS, ratio=128, width=8192, garbage=0).to("cuda")
    got = run(case, family)
    require_equal(got, expected(case, family))
    lengths = got.lengths - 128 if isinstance(got, CombinedIndices) else got.compressed_lengths
    assert lengths is not None and lengths[40] == 8192


@families
def test_positions_outside_int32_are_safe(family: str) -> None:
    case = step(8, 2, IdSource.LOCAL, garbage=0)
    case.positions[:4] = torch.tensor([-1, -(2**62), 2**31 - 1, 2**62], device="cuda")
    require_equal(run(case, family), expected(case, family))


@families
def test_without_slots_and_by_wide_vectors(family: str) -> None:
    for rows in (200, 1500):
        without = step(rows, 6, IdSource.LOCAL, with_slots=False, padding=4, extra_rows=3)
        require_equal(run(without, family), expected(without, family))
        for source in (IdSource.LOCAL, IdSource.ALL_GROUPS):
            case = step(rows, 6, source, width=1032 if source is IdSource.LOCAL else 80, stale_blocks=True)
            out = case.guarded_out(FORMS[family])
            launch(case, family, out.out, vector_bytes=32)
            out.check()
            require_equal(out.out, expected(case, family))


@families
def test_captured_graph_follows_its_inputs(family: str) -> None:
    """Captured for full batches, replayed with other rows, many of them padding."""
    cases = [step(256, 32, IdSource.LOCAL, padding=0, seed=0, stale_blocks=False)]
    cases += [step(n, 8, IdSource.LOCAL, padding=256 - n, seed=n) for n in (255, 200, 1)]
    static = cases[0].clone()
    roomy = {"window": 0, "compressed": 0}
    for name in roomy:  # block tables of one size and pools of one geometry for every step
        attribute = f"{name}_block_table"
        shape = [max(getattr(c, attribute).shape[i] for c in cases) for i in (0, 1)]
        geometry = max((getattr(c, name) for c in cases), key=lambda g: g.pages)
        for case in (*cases, static):
            table = torch.full(shape, -1, dtype=torch.int32, device="cuda")
            old = getattr(case, attribute)
            table[: old.shape[0], : old.shape[1]] = old
            setattr(case, attribute, table)
            setattr(case, name, geometry)
    out = static.guarded_out(FORMS[family])
    call = {**static.kwargs(), "out": out.out, "target": target(family)}
    ops.sparse_indices(*static.args(), **call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.sparse_indices(*static.args(), **call)
    for case in (*cases, cases[0]):
        for name in ("positions", "token_to_req", "slots", "ids", "window_block_table", "compressed_block_table"):
            getattr(static, name).copy_(getattr(case, name))
        for table in vars(out.out).values():
            table.fill_(0x5A5A5A5A)
        graph.replay()
        require_equal(out.out, expected(case, family))
    out.check()


@families
def test_two_streams(family: str) -> None:
    cases = [step(n, 9, IdSource.LOCAL, seed=n) for n in (300, 2048)]
    wanted = [expected(case, family) for case in cases]
    outs = [case.guarded_out(FORMS[family]) for case in cases]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    for _ in range(20):
        for case, out, stream in zip(cases, outs, streams, strict=True):
            with torch.cuda.stream(stream):
                for table in vars(out.out).values():
                    table.fill_(7)
                ops.sparse_indices(*case.args(), **case.kwargs(), out=out.out, target=target(family))
    torch.cuda.synchronize()
    for out, want in zip(outs, wanted, strict=True):
        out.check()
        require_equal(out.out, want)


@pytest.mark.parametrize("pdl", [True, False])
def test_behind_a_slow_producer(pdl: bool) -> None:
    """The slots that one launch writes are the ids of the next, which is scheduled before the first has ended."""
    producer = step(8192, 16, IdSource.LOCAL, k=1024, garbage=0.05)
    first = producer.guarded_out("segments")
    assert producer.compressed is not None
    consumer = dataclasses.replace(producer, source=IdSource.GLOBAL, ids=first.out.compressed, compressed_block_table=None, ratio=1)
    second = consumer.guarded_out("segments")
    wanted_slots = expected(producer, "sm120")
    wanted = expected(dataclasses.replace(consumer, ids=wanted_slots.compressed), "sm120")
    staged = [t.clone() for t in (producer.ids, producer.positions, producer.slots)]
    for _ in range(50):
        for table in (*vars(first.out).values(), *vars(second.out).values()):
            table.fill_(3)
        for tensor in (producer.ids, producer.positions, producer.slots):
            tensor.fill_(-1)
        torch.cuda._sleep(20_000)
        for tensor, values in zip((producer.ids, producer.positions, producer.slots), staged, strict=True):
            tensor.copy_(values)
        launch(producer, "sm120", first.out, pdl=pdl)
        launch(consumer, "sm120", second.out, pdl=pdl)
        require_equal(second.out, wanted)
    require_equal(first.out, wanted_slots)


@families
def test_fifty_runs_are_bit_equal(family: str) -> None:
    for rows in (256, 3000):
        case = step(rows, 16, IdSource.LOCAL, garbage=0.3, stale_blocks=True)
        once = run(case, family)
        for _ in range(50):
            require_equal(run(case, family), once)


@families
def test_beyond_two_giga_elements(family: str) -> None:
    """Rows of `ids` and of the table that begin past element 2^31."""
    rows, pitch = 2100, 2**20 + 8
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB of free GPU memory")
    case = step(rows, 8, IdSource.LOCAL)
    far = torch.empty((rows, pitch), dtype=torch.int32, device="cuda")[:, : case.ids.shape[1]]
    case.ids = far.copy_(case.ids)
    require_equal(run(case, family), expected(case, family))
    del far, case

    rows, width = 265_000, 8192
    every = IndexCase(
        requests=[],
        positions=torch.arange(rows, device="cuda") * 3,
        token_to_req=torch.zeros(rows, dtype=torch.int32, device="cuda"),
        window_block_table=torch.arange(20_000, dtype=torch.int32, device="cuda").flip(0)[None],
        ids=None,
        compressed_block_table=torch.arange(8_000, dtype=torch.int32, device="cuda")[None],
        window=PoolGeometry(20_000, 64, 100),
        compressed=PoolGeometry(8_000, 2, 3),
        source=IdSource.ALL_GROUPS,
        ratio=128,
        width=width,
        slots=None,
        num_rows=None,
    )
    got = ops.sparse_indices(*every.args(), **every.kwargs(), target=target(family))
    for part in (slice(0, 500), slice(rows - 500, rows)):
        some = dataclasses.replace(every, positions=every.positions[part], token_to_req=every.token_to_req[part])
        have = type(got)(**{name: table[part] for name, table in vars(got).items()})
        require_equal(have, expected(some, family))
