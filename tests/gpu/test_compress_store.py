"""`compress_store` on a GPU, both families' source: KV rows within the bound of the data, state rows exact, nothing else written."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from cute_kernels import ops, reference
from cute_kernels.compile import cache
from cute_kernels.compile.spec import CompressStoreSpec
from cute_kernels.reference import quant
from cute_kernels.save_policy import SavePolicy
from cute_kernels.scratch import COUNTERS, compress_scratch
from cute_kernels.target import Target
from tests.support.compress import MANY_REQUESTS, CompressCase, cancelling, lengthened, make_compress_case
from tests.support.compress_check import check_compress
from tests.support.pools import owned_bytes
from tests.support.steps import Request, mix

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="executes both families' source on an SM90 GPU (H100, H200), and there is none",
)

FORMATS = [("sm100", "bf16"), ("sm100", "fp8"), ("sm120", "fp8_ds_mla")]
POLICIES = [
    SavePolicy.EVERY_ROW,
    SavePolicy(),
    SavePolicy(rollback=3),
    SavePolicy(prefix_stride=256),
    SavePolicy(rollback=7, prefix_stride=10),
]
formats = pytest.mark.parametrize(("family", "kv_format"), FORMATS, ids=[f"{f}-{k}" for f, k in FORMATS])
ratios = pytest.mark.parametrize("ratio", [4, 128])


def make(requests: list[Request], ratio: int, kv_format: str, **options: object) -> CompressCase:
    """A case with a scratch of its own: so have its copies."""
    options.setdefault("kv_scale", 0.37 if kv_format == "fp8" else None)
    return dataclasses.replace(make_compress_case(requests, ratio=ratio, kv_format=kv_format, **options), scratch=compress_scratch("cpu"))


def run(case: CompressCase, family: str) -> CompressCase:
    """The public call on a copy of the case on the GPU."""
    after = case.to("cuda").clone()
    ops.compress_store(*after.args(), **after.kwargs(), target=Target(family, "sm_90a"))
    assert not after.scratch[:COUNTERS].any()
    return after


def launch(case: CompressCase, family: str, **fields: object) -> None:
    """The compiled kernel itself, for spec fields that the public call chooses by itself."""
    save = "none" if case.kv_score is None else "every_row" if case.save.every_row else "policy"
    scores = case.kv_score is not None
    spec = CompressStoreSpec(Target(family, "sm_90a"), ratio=case.ratio, kv_format=case.kv_format, scores=scores, save=save, **fields)
    names = ("kv_score", "ape", "state", "state_block_table", "positions", "token_to_req", "state_slots", "kv_slots")
    given = dict(zip((*names, "norm_weight", "cos_sin", "kv_cache"), case.args(), strict=True))
    given |= {"seq_lens": case.seq_lens, "eps": case.eps, "inverse_kv_scale": 1 / (case.kv_scale or 1.0)}
    given |= {"rollback": case.save.rollback, "prefix_stride": case.save.prefix_stride, "scratch": case.scratch, "independent": 0}
    cache.get(spec)(*(given[name] for name in spec.argument_names))


def same_storages(one: CompressCase, other: CompressCase) -> bool:
    state = torch.equal(one.state_storage.view(torch.int32), other.state_storage.view(torch.int32))
    return state and torch.equal(one.kv_storage, other.kv_storage)


@formats
@ratios
@pytest.mark.parametrize("tokens", [0, 1, 3, 4, 5, 7, 127, 128, 129, 300])
def test_every_token_count(family: str, kv_format: str, ratio: int, tokens: int) -> None:
    """A mix of decode, speculative and chunked rows, with padding rows, skipped rows and rows without a KV slot."""
    for seed, policy in enumerate(POLICIES[tokens % 2 :: 2]):
        requests = mix(tokens, max(1, min(64, tokens // 4)), ratio=ratio, seed=seed)
        extra = {"padding": tokens % 5, "unstored": 0.1, "skipped": 0.02 if seed else 0.0, "stale_blocks": seed == 1}
        case = make(requests, ratio, kv_format, save=policy, seed=seed, scored=seed != 2, **extra)
        check_compress(case, run(case, family))


@formats
@ratios
@pytest.mark.parametrize("tokens", [2048, 8192])
def test_large_steps_equal_the_reference(family: str, kv_format: str, ratio: int, tokens: int) -> None:
    """Prefill-sized steps, judged by the reference on the GPU, which the CPU tests judge by the definition."""
    policy = POLICIES[3] if tokens == 8192 else POLICIES[0]
    case = make(mix(tokens, 64 if tokens == 2048 else 9, ratio=ratio, seed=tokens), ratio, kv_format, save=policy, padding=13).to("cuda")
    want = case.clone()
    reference.compress_store(*want.args(), **dataclasses.replace(want, scratch=None).kwargs())
    got = case.clone()
    ops.compress_store(*got.args(), **got.kwargs(), target=Target(family, "sm_90a"))
    assert torch.equal(got.state_storage.view(torch.int32), want.state_storage.view(torch.int32))
    slots = closing_slots(case)
    owned = torch.from_numpy(owned_bytes(case.pool, len(case.kv_storage), slots.tolist())).to(slots.device)
    differ = got.kv_storage != want.kv_storage
    assert not (differ & ~owned).any()
    # A value next to a rounding boundary may fall on either side of it, and takes the neighbouring value of its format then.
    assert differ.sum().item() <= 0.002 * owned.sum().item()
    place = (slots // case.pool.page_rows, slots % case.pool.page_rows)
    one, other = (quant.read_rows(x.kv_cache, *place) for x in (got, want))
    step = 2**-7 if kv_format == "bf16" else 2**-2
    assert bool(((one - other).abs() <= step * torch.maximum(one.abs(), other.abs()) + 2**-9).all())


def closing_slots(case: CompressCase) -> torch.Tensor:
    """KV slots of the rows that a case without skipped or short rows writes."""
    live = sum(q.rows for q in case.requests)
    slots = case.kv_slots[:live][(case.positions[:live] + 1) % case.ratio == 0]
    return slots[slots >= 0]


@formats
@ratios
@pytest.mark.parametrize("requests", [1, 2, 7, 64])
def test_padding_rows_and_short_tensors(family: str, kv_format: str, ratio: int, requests: int) -> None:
    for short in (None, "positions", "token_to_req", "kv_slots"):
        case = make(mix(150, requests, ratio=ratio, seed=requests), ratio, kv_format, padding=21, short=short, save=POLICIES[4])
        check_compress(case, run(case, family))


@formats
@ratios
def test_all_policies_with_speculative_rows(family: str, kv_format: str, ratio: int) -> None:
    """Several rows per request that close one or more windows in one step."""
    requests = [Request(ratio * (3 + i) - 1 - i % 5, 5 + i % 4) for i in range(12)] + [Request(ratio - 2, 2 * ratio + 3), Request(0, 3)]
    for policy in POLICIES:
        case = make(requests, ratio, kv_format, save=policy, skipped=0.05)
        check_compress(case, run(case, family))


@formats
@ratios
@pytest.mark.parametrize(("state_block", "page_rows"), [(1, 1), (3, 5), (8, 64), (128, 2)])
def test_block_and_page_rows_are_run_time_values(family: str, kv_format: str, ratio: int, state_block: int, page_rows: int) -> None:
    if kv_format == "fp8_ds_mla" and page_rows * 584 % 8:
        pytest.skip("no such page")
    case = make(mix(140, 6, ratio=ratio), ratio, kv_format, state_block=state_block, page_rows=page_rows, save=POLICIES[1])
    check_compress(case, run(case, family))


@formats
@ratios
@pytest.mark.parametrize("alignment", [16, 32])
@pytest.mark.parametrize("vector_bytes", [16, 32])
def test_vector_widths(family: str, kv_format: str, ratio: int, alignment: int, vector_bytes: int) -> None:
    if vector_bytes > alignment:
        pytest.skip("wide vectors need wide alignment")
    case = make(mix(140, 6, ratio=ratio), ratio, kv_format, alignment=alignment, save=POLICIES[2])
    after = case.to("cuda").clone()
    launch(after, family, vector_bytes=vector_bytes)
    check_compress(case, after)


@formats
@ratios
@pytest.mark.parametrize("kind", ["tiny", "huge", "zero group", "sharp"])
def test_awkward_values(family: str, kv_format: str, ratio: int, kind: str) -> None:
    options = {
        "tiny": {"value_scale": 1e-6, "eps": 1e-6},
        "huge": {"value_scale": 1e6, "score_scale": 30.0},
        "zero group": {"zero_group": True},
        "sharp": {"score_scale": 100.0},
    }[kind]
    case = make(mix(130, 5, ratio=ratio, seed=3), ratio, kv_format, **options)
    check_compress(case, run(case, family))


@formats
@ratios
def test_rows_of_the_rotation_table_end(family: str, kv_format: str, ratio: int) -> None:
    """A position past the rotation table closes no window, and is saved."""
    case = make([Request(0, 2 * ratio + 1)], ratio, kv_format, cos_rows=2 * ratio - 1)
    report = check_compress(case, run(case, family))
    assert (report.rows, report.saved) == (1, 2 * ratio + 1)


@formats
@ratios
def test_repeated_runs_are_bit_equal(family: str, kv_format: str, ratio: int) -> None:
    case = make(mix(1500, 11, ratio=ratio, seed=5), ratio, kv_format, padding=36).to("cuda")
    first = run(case, family)
    for _ in range(50):
        assert same_storages(run(case, family), first)


@formats
@ratios
def test_bytes_do_not_depend_on_the_length_of_the_step(family: str, kv_format: str, ratio: int) -> None:
    """However many blocks share a window: the sums have one order."""
    if ratio == 4:
        case = make(mix(900, 30, ratio=ratio, seed=6), ratio, kv_format).to("cuda")
    else:
        case = cancelling(make(MANY_REQUESTS, ratio, kv_format)).to("cuda")
    want = run(case, family)
    for count in (4096, 4097, 16384, 16385, 40000):
        assert same_storages(run(lengthened(case, count), family), want), count
    alone = dataclasses.replace(case.clone(), scratch=None)
    ops.compress_store(*alone.args(), **alone.kwargs(), target=Target(family, "sm_90a"))
    assert same_storages(alone, want)


@formats
@ratios
@pytest.mark.parametrize("tokens", [256, 2048, 8192, 12000])
def test_windows_under_load(family: str, kv_format: str, ratio: int, tokens: int) -> None:
    """Launches on each other's heels, every row saved, over rotating inputs: bit for bit what launches by themselves give."""
    requests = mix(tokens, 200, ratio=ratio, seed=1) if tokens == 256 else [Request(37 * i, tokens // 4) for i in range(4)]
    cases = [make(requests, ratio, kv_format).to("cuda").clone() for _ in range(3)]
    for case in cases[1:]:
        case.kv_score.normal_()
        case.state.normal_()
    wanted = []
    for case in cases:
        wanted.append(run(case, family))
        torch.cuda.synchronize()
    got = [dataclasses.replace(case.clone(), scratch=cases[0].scratch) for case in cases]  # one for all launches of the stream
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(24):
            one = got[i % len(got)]
            ops.compress_store(*one.args(), **one.kwargs(), target=Target(family, "sm_90a"))
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(60):
        for one, case in zip(got, cases, strict=True):
            one.kv_storage.copy_(case.kv_storage)
        graph.replay()
        for one, want in zip(got, wanted, strict=True):
            wrong += (one.kv_storage != want.kv_storage).sum() + (
                one.state_storage.view(torch.int32) != want.state_storage.view(torch.int32)
            ).sum()
    assert wrong.item() == 0


@formats
@ratios
def test_captured_graph_follows_its_inputs(family: str, kv_format: str, ratio: int) -> None:
    """Captured for a full batch, replayed with fewer live rows: the rest are padding rows with stale fields."""
    case = make(mix(256, 40, ratio=ratio, seed=1), ratio, kv_format, save=POLICIES[2]).to("cuda")
    static = case.clone()
    call = {**static.kwargs(), "target": Target(family, "sm_90a")}
    ops.compress_store(*static.args(), **call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.compress_store(*static.args(), **call)
    for live in (256, 255, 130, 1, 0, 256):
        wanted = case.clone()
        wanted.state_slots[live:] = -1
        for storage in ("state_storage", "kv_storage", "state_slots"):
            getattr(static, storage).copy_(getattr(wanted, storage))
        graph.replay()
        fresh = wanted.clone()
        ops.compress_store(*fresh.args(), **fresh.kwargs(), target=Target(family, "sm_90a"))
        assert same_storages(static, fresh)
        if live in (256, 130):
            check_compress(dataclasses.replace(wanted.to("cpu"), cache={}), static)


@formats
@ratios
def test_two_streams(family: str, kv_format: str, ratio: int) -> None:
    cases = [make(mix(n, 9, ratio=ratio, seed=n), ratio, kv_format).to("cuda") for n in (300, 1024)]
    wanted = [run(case, family) for case in cases]
    got = [case.clone() for case in cases]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    for _ in range(20):
        for case, stream in zip(got, streams, strict=True):
            with torch.cuda.stream(stream):
                ops.compress_store(*case.args(), **case.kwargs(), target=Target(family, "sm_90a"))
    torch.cuda.synchronize()
    for case, want in zip(got, wanted, strict=True):
        assert same_storages(case, want)


@formats
@ratios
@pytest.mark.parametrize("pdl", [True, False])
def test_behind_a_slow_producer(family: str, kv_format: str, ratio: int, pdl: bool) -> None:
    """Inputs arrive late, by ordinary kernels; and state rows arrive late, by a launch that lets its successor start early."""
    case = make(mix(2048, 20, ratio=ratio, seed=2), ratio, kv_format).to("cuda")
    want = run(case, family)
    saving, pooling = case.clone(), case.clone()
    pooling.kv_score = pooling.ape = None
    pooling.state_storage = saving.state_storage  # written by `saving`, read by `pooling`
    inputs = ("kv_score", "positions", "token_to_req", "state_slots", "kv_slots", "state_storage", "kv_storage")
    poison = {name: torch.full_like(getattr(case, name), -1) for name in inputs}
    for _ in range(25):
        for name in inputs:
            getattr(saving, name).copy_(poison[name])
        for name in inputs:
            getattr(saving, name).copy_(getattr(case, name))
        pooling.kv_storage.copy_(case.kv_storage)
        launch(saving, family, pdl=pdl)
        launch(pooling, family, pdl=pdl)
        assert same_storages(saving, want)
        assert same_storages(pooling, want)


@formats
@ratios
def test_pools_beyond_two_gigabytes(family: str, kv_format: str, ratio: int) -> None:
    """The same step with its last state block and its last page more than 2^31 bytes (and fp32 elements) away."""
    small = make([Request(ratio, ratio), Request(0, ratio + 2)], ratio, kv_format, strided=False)
    case = small.to("cuda").clone()
    blocks, bs, row = small.state.shape
    far = 9 * 2**30 // (bs * row * 4)
    state = torch.empty((far, bs, row), dtype=torch.float32, device="cuda")
    moved = torch.arange(blocks, device="cuda") + far - blocks
    moved[0] = 0
    state[moved] = case.state
    pages, page_rows, width = small.kv_cache.shape
    stride = small.kv_cache.stride(0) * small.kv_cache.element_size()
    far_pages = 9 * 2**29 // stride
    kv_storage = torch.empty(far_pages * stride, dtype=torch.uint8, device="cuda")
    kv = kv_storage.view(small.kv_cache.dtype).as_strided((far_pages, page_rows, width), small.kv_cache.stride(), 0)
    kv_storage[-pages * stride :] = case.kv_storage[: pages * stride]
    table = case.state_block_table.clone()
    inside = (table > 0) & (table < blocks)
    table[inside] += far - blocks
    slots = case.state_slots + (far - blocks) * bs
    arguments = list(case.args())
    arguments[2], arguments[3], arguments[6] = state, table, slots
    arguments[7] = torch.where(case.kv_slots >= 0, case.kv_slots + (far_pages - pages) * page_rows, -1)
    arguments[10] = kv
    ops.compress_store(*arguments, **case.kwargs(), target=Target(family, "sm_90a"))
    case.state.copy_(state[moved])
    case.kv_storage[: pages * stride] = kv_storage[-pages * stride :]
    check_compress(small, case)
