"""`gather_upconvert` and `convert_indices` on a GPU, both families' source: every bit exact, nothing else written."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from cute_kernels import InvalidArgument, bind, ops, reference
from cute_kernels.compile import cache
from cute_kernels.compile.spec import ConvertIndicesSpec, GatherUpconvertSpec
from cute_kernels.target import Target
from tests.support.gather import (
    FORMATS,
    POISON,
    ROW_BYTES,
    ConvertCase,
    GatherCase,
    check_converted,
    check_gathered,
    make_convert_case,
    make_gather_case,
    require_same_bits,
)

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="executes both families' source on an SM90 GPU (H100, H200), and there is none",
)

families = pytest.mark.parametrize("family", ["sm100", "sm120"])
formats = pytest.mark.parametrize("kv_format", FORMATS)


def target(family: str) -> Target:
    return Target(family, "sm_90a")


def gather(case: GatherCase, family: str, pitch: int = 16) -> torch.Tensor:
    """The public call into a guarded, poisoned workspace."""
    guarded = case.guarded_out(pitch)
    result = ops.gather_upconvert(*case.args(guarded.out), **case.kwargs(), target=target(family))
    assert result is guarded.out
    guarded.check()
    return result


def expected(case: GatherCase) -> torch.Tensor:
    out = case.guarded_out().out
    return reference.gather_upconvert(*case.args(out), **case.kwargs())


def launch(case: GatherCase, family: str, out: torch.Tensor, **fields: object) -> None:
    """The compiled kernel itself, for spec fields that the public call chooses by itself."""
    spec = GatherUpconvertSpec(target(family), kv_format=case.kv_format, seq_starts=case.seq_starts is not None, **fields)
    given = dict(zip(("cache", "out", "block_table", "workspace_starts"), case.args(out), strict=True)) | case.kwargs()
    cache.get(spec)(*(given[name] for name in spec.argument_names))


@families
@formats
@pytest.mark.parametrize("page_rows", [1, 2, 3, 64])
@pytest.mark.parametrize("seq_starts", [True, False])
def test_rows_against_the_definition(family: str, kv_format: str, page_rows: int, seq_starts: bool) -> None:
    more = {"kv_format": kv_format, "page_rows": page_rows, "seq_starts": seq_starts}
    for lengths in ([5, 0, 0, 70, 1, 0], [1], [0, 0, 300], [3] * 40):
        case = make_gather_case(lengths, **more).to("cuda")
        check_gathered(case, gather(case, family))
    case = make_gather_case([9, 40, 0, 3], stale=True, lead=6, one_more_start=True, awkward=True, **more).to("cuda")
    check_gathered(case, gather(case, family))


@families
@formats
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5, 15, 16, 17, 127, 128, 129, 2048, 8192])
def test_every_number_of_rows(family: str, kv_format: str, rows: int) -> None:
    for lengths in ([rows], [0, rows // 3, 0, rows - rows // 3, 0]):
        case = make_gather_case(lengths, kv_format=kv_format, awkward=True, stale=rows % 2 == 1).to("cuda")
        require_same_bits(kv_format, gather(case, family, pitch=8), expected(case))


@families
@formats
def test_no_request_writes_nothing(family: str, kv_format: str) -> None:
    case = make_gather_case([], kv_format=kv_format, lead=5).to("cuda")
    assert bool((gather(case, family).contiguous().view(torch.int16) == POISON).all())


@families
@formats
def test_starts_of_any_value_are_safe(family: str, kv_format: str) -> None:
    case = make_gather_case([40, 40, 40], kv_format=kv_format, page_rows=4).to("cuda")
    for starts in ([9, -(2**31), 3], [2**31 - 1] * 3, [-(2**31)] * 3, [0, 2**31 - 1, -1]):
        for seq in (None, torch.tensor([2**31 - 1, -(2**31), 7], dtype=torch.int32, device="cuda")):
            wild = torch.tensor(starts, dtype=torch.int32, device="cuda")
            gather(dataclasses.replace(case, workspace_starts=wild, seq_starts=seq), family)
    torch.cuda.synchronize()


@families
@formats
def test_wide_accesses(family: str, kv_format: str) -> None:
    case = make_gather_case([300, 2, 800], kv_format=kv_format, awkward=True).to("cuda")
    guarded = case.guarded_out()
    launch(case, family, guarded.out, vector_bytes=32)
    guarded.check()
    require_same_bits(kv_format, guarded.out, expected(case))


@families
@formats
def test_pages_beyond_four_gigabytes(family: str, kv_format: str) -> None:
    if torch.cuda.mem_get_info()[0] < 16 << 30:
        pytest.skip("needs 16 GiB of free GPU memory")
    row, pages = ROW_BYTES[kv_format], 9
    near = make_gather_case([70, 30], kv_format=kv_format, page_rows=16).to("cuda")
    assert near.cache.shape[0] >= pages
    stride = (1 << 30) // row // 16 * 16 * row if kv_format != "fp8_ds_mla" else 1 << 30
    storage = torch.empty((near.cache.shape[0] - 1) * stride + 16 * row, dtype=torch.uint8, device="cuda")
    far = storage.as_strided((near.cache.shape[0], 16, row), (stride, row, 1))
    far.copy_(near.cache.view(torch.uint8))
    case = dataclasses.replace(near, cache=far.view(near.cache.dtype))
    require_same_bits(kv_format, gather(case, family), expected(near))


@families
def test_a_workspace_beyond_four_gigabytes(family: str) -> None:
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB of free GPU memory")
    case = make_gather_case([2000, 2200], kv_format="fp8_inline").to("cuda")
    out = torch.empty((case.rows, 2**20 + 8), dtype=torch.bfloat16, device="cuda")[:, :576]
    ops.gather_upconvert(*case.args(out), **case.kwargs(), target=target(family))
    require_same_bits("fp8_inline", out, expected(case))


@families
@formats
def test_captured_graph_follows_its_inputs(family: str, kv_format: str) -> None:
    """Captured once; replayed with other starts, positions, tables and codes."""
    static = make_gather_case([100, 0, 156], kv_format=kv_format).to("cuda")
    guarded = static.guarded_out()
    call = {**static.kwargs(), "target": target(family)}
    ops.gather_upconvert(*static.args(guarded.out), **call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.gather_upconvert(*static.args(guarded.out), **call)
    generator = torch.Generator(device="cuda").manual_seed(3)
    for starts in ([0, 100, 100], [0, 0, 0], [10, 20, 256], [256, 256, 256]):
        static.workspace_starts.copy_(torch.tensor(starts, dtype=torch.int32))
        static.seq_starts.copy_(torch.randint(0, 60, (3,), generator=generator, device="cuda", dtype=torch.int32))
        static.block_table.copy_(static.block_table.flip(0).clone())
        guarded.out.copy_(static.guarded_out().out)
        graph.replay()
        guarded.check()
        require_same_bits(kv_format, guarded.out, expected(static))


@pytest.mark.parametrize("pdl", [True, False])
@formats
def test_behind_a_slow_producer(kv_format: str, pdl: bool) -> None:
    """What one launch writes, the next reads: slots from `convert_indices` as a block table, while the inputs arrive late."""
    case = make_gather_case([500, 700], kv_format=kv_format, page_rows=16).to("cuda")
    wanted = expected(case)
    staged = {n: getattr(case, n).clone() for n in ("workspace_starts", "seq_starts")}
    table, width = case.block_table.clone(), -(-case.block_table.shape[1] // 4) * 4
    ids = torch.full((2, width), -1, dtype=torch.int32, device="cuda")
    ids[:, : table.shape[1]] = table
    identity = torch.arange(case.cache.shape[0], dtype=torch.int32, device="cuda")[None]
    requests = torch.zeros(2, dtype=torch.int32, device="cuda")
    made = torch.empty_like(ids)
    producer = ConvertIndicesSpec(target("sm100"), pdl=pdl, compact=False)
    given = {"ids": ids, "token_to_req": requests, "block_table": identity, "out": made}
    given |= {"pages": case.cache.shape[0], "page_rows": 1, "block_stride_rows": 1}
    consumer = dataclasses.replace(case, block_table=made[:, : table.shape[1]])
    out = case.guarded_out()
    for _ in range(50):
        made.fill_(-1)
        for name in staged:
            getattr(case, name).fill_(2**31 - 1)
        torch.cuda._sleep(20_000)
        for name, value in staged.items():
            getattr(case, name).copy_(value)
        cache.get(producer)(*(given[name] for name in producer.argument_names))
        launch(consumer, "sm100", out.out, pdl=pdl)
        require_same_bits(kv_format, out.out, wanted)
    out.check()


@families
def test_two_streams_and_fifty_equal_runs(family: str) -> None:
    cases = [make_gather_case([n, n + 1], kv_format="fp8_inline", awkward=True).to("cuda") for n in (300, 4000)]
    wanted, outs = [expected(c) for c in cases], [c.guarded_out() for c in cases]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    for _ in range(50):
        for case, out, stream in zip(cases, outs, streams, strict=True):
            with torch.cuda.stream(stream):
                out.out.fill_(7)
                ops.gather_upconvert(*case.args(out.out), **case.kwargs(), target=target(family))
        torch.cuda.synchronize()
        for out, want in zip(outs, wanted, strict=True):
            require_same_bits("fp8_inline", out.out, want)
            out.check()


@families
def test_bound_calls_and_refusals(family: str) -> None:
    case = make_gather_case([50, 60], kv_format="fp8_inline").to("cuda")
    out = case.guarded_out()
    bound = bind(ops.gather_upconvert, cache=case.cache, out=out.out, target=target(family))
    bound(block_table=case.block_table, workspace_starts=case.workspace_starts, seq_starts=case.seq_starts)
    require_same_bits("fp8_inline", out.out, expected(case))
    with pytest.raises(InvalidArgument, match="workspace_starts: got 1 entries, expected 2 or 3"):
        bound(block_table=case.block_table, workspace_starts=case.workspace_starts[:1], seq_starts=case.seq_starts)
    with pytest.raises(InvalidArgument, match="out: got shape"):
        ops.gather_upconvert(case.cache, out.out[:, :512], case.block_table, case.workspace_starts, target=target(family))
    ids = make_convert_case(6, 2, 16).to("cuda")
    for more in (5, 7):
        with pytest.raises(InvalidArgument, match=f"token_to_req: got {more} entries, expected 6"):
            ops.convert_indices(
                ids.ids, torch.zeros(more, dtype=torch.int32, device="cuda"), ids.block_table, page_rows=64, target=target(family)
            )


# convert_indices -------------------------------------------------------------------------------------------------------


def convert(case: ConvertCase, family: str, counts: bool) -> tuple[torch.Tensor, ...]:
    """The public call into guarded buffers."""
    out, number = case.guarded()
    kwargs = {**case.kwargs(), "return_counts": counts, "out": out.out, "counts": number.out if counts else None}
    result = ops.convert_indices(*case.args(), **kwargs, target=target(family))
    out.check()
    number.check()
    return result if counts else (result,)


def require_reference(case: ConvertCase, got: tuple[torch.Tensor, ...]) -> None:
    want = reference.convert_indices(*case.args(), **case.kwargs(), return_counts=len(got) == 2)
    for have, table in zip(got, want if len(got) == 2 else (want,), strict=True):
        assert torch.equal(have, table), f"{int((have != table).sum())} differ"


@families
@pytest.mark.parametrize("counts", [True, False])
@pytest.mark.parametrize("prefill", [True, False])
@pytest.mark.parametrize("k", [1, 3, 4, 37, 128, 512, 516, 1024, 2047, 2048, 2500])
def test_conversions(family: str, k: int, prefill: bool, counts: bool) -> None:
    for rows, garbage in ((9, 0.0), (9, 0.3), (700, 0.05)):
        for page_rows, span, pages in ((64, None, True), (64, 100, False), (1, 3, True)):
            options = {"page_rows": page_rows, "span": span, "pages": pages, "prefill": prefill, "columns": 50}
            case = make_convert_case(rows, 5, k, garbage=garbage, stale=garbage > 0, **options).to("cuda")
            got = convert(case, family, counts)
            if rows < 100:
                check_converted(case, *got)
            require_reference(case, got)


@families
@pytest.mark.parametrize("compact", [True, False])
def test_conversions_by_wide_accesses(family: str, compact: bool) -> None:
    for k, garbage in ((2048, 0.1), (2048, 0.0), (37, 0.2)):
        case = make_convert_case(33, 4, k, garbage=garbage).to("cuda")
        out, number = case.guarded()
        spec = ConvertIndicesSpec(target(family), 32, compact=compact)
        given = {"ids": case.ids, "token_to_req": case.token_to_req, "block_table": case.block_table, "out": out.out, "counts": number.out}
        given |= {"pages": case.pages, "page_rows": case.page_rows, "block_stride_rows": case.page_rows}
        cache.get(spec)(*(given[name] for name in spec.argument_names))
        out.check()
        number.check()
        require_reference(case, (out.out, number.out) if compact else (out.out,))


@families
def test_conversions_beyond_two_giga_elements(family: str) -> None:
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB of free GPU memory")
    case = make_convert_case(2100, 5, 512).to("cuda")
    far = torch.empty((2100, 2**20 + 8), dtype=torch.int32, device="cuda")[:, :512].copy_(case.ids)
    out = torch.empty((2100, 2**20 + 8), dtype=torch.int32, device="cuda")[:, :512]
    got = ops.convert_indices(far, *case.args()[1:], **case.kwargs(), return_counts=True, out=out, target=target(family))
    require_reference(case, got)


@families
def test_conversions_in_a_graph_and_again(family: str) -> None:
    case = make_convert_case(300, 6, 512, prefill=True).to("cuda")
    out, counts = case.guarded()
    call = {**case.kwargs(), "return_counts": True, "out": out.out, "counts": counts.out, "target": target(family)}
    ops.convert_indices(*case.args(), **call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.convert_indices(*case.args(), **call)
    for seed in range(20):
        other = make_convert_case(300, 6, 512, prefill=True, seed=seed).to("cuda")
        for name in ("ids", "token_to_req", "block_table", "workspace_starts", "prefill_request_id"):
            getattr(case, name).copy_(getattr(other, name))
        out.out.fill_(3)
        graph.replay()
        require_reference(case, (out.out, counts.out))
    out.check()
    counts.check()
