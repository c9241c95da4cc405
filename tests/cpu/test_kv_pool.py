"""kv_pool: plans of whole models against arithmetic of their own, views written by the operations, and every refusal."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

import cute_kernels as ck
from cute_kernels import reference, validate
from cute_kernels.errors import InvalidArgument
from cute_kernels.kv_format import BF16, FORMATS, FP8, INLINE, PACKED, KVFormat, PoolGeometry
from cute_kernels.kv_pool import INDEX_KEYS, KVPool, LayerPage, PoolPlan
from tests.support.bytes import ROW_BYTES, Pool
from tests.support.pools import cache_view

# compress_ratios of the two models' configurations, the layer of multi-token prediction last.
FLASH = [0, 0, *[4, 128] * 20, 4, 0]
PRO = [128, 128, *[4, 128] * 29, 4, 0]
MODELS = {"flash": FLASH, "pro": PRO}
INDEX_PAGE = {"fp8": 64 * 132, "mxfp4": 64 * 68, "bf16": 64 * 256}
ALL_FORMATS = pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)


def up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def counts(model: str) -> tuple[int, int, int]:
    """Layers in all, of ratio 4, of ratio 128 (the models' own numbers, with the layer of multi-token prediction)."""
    return {"flash": (44, 21, 20), "pro": (62, 30, 31)}[model]


def packed_page(rows: int) -> int:
    return up(584 * rows, 32)


@ALL_FORMATS
@pytest.mark.parametrize("index_keys", ["fp8", "mxfp4", "bf16", None])
@pytest.mark.parametrize("model", MODELS)
def test_whole_models(model: str, index_keys: str | None, fmt: KVFormat) -> None:
    layers, four, heavy = counts(model)
    plan = PoolPlan.of(MODELS[model], fmt, index_keys=index_keys)
    page = {rows: packed_page(rows) if fmt is PACKED else ROW_BYTES[fmt.name] * rows for rows in (64, 2)}
    sums = {
        "ratio_4": four * (page[64] + INDEX_PAGE.get(index_keys or "", 0)),
        "ratio_128": heavy * page[2],
        "window": layers * page[64],
        "state_4": four * 32768,
        "state_128": heavy * 32768,
        "index_state": four * 8192 if index_keys else 0,
    }
    assert {name: bool(n) for name, n in sums.items()} == {name: name in plan.groups for name in sums}
    unit = {"bf16": 1024, "fp8": 512, "fp8_ds_mla": 576}[fmt.name]
    assert plan.block_bytes % unit == 0
    assert max(sums.values()) - 31 <= plan.block_bytes < max(sums.values()) + unit, "the largest group's sum, rounded up once"
    for name, group in plan.groups.items():
        rows_only = sums[name] if name != "ratio_128" or fmt is not PACKED else heavy * 2 * 584
        assert (group.used_bytes, group.waste_bytes) == (rows_only, plan.block_bytes - rows_only)
        expected = 0
        for p in group.pages:  # back to back from byte 0
            assert p.offset == expected
            expected += up(p.payload_bytes, 32)
        assert {p.layer for p in group.pages} == {
            i for i, r in enumerate(MODELS[model]) if name == "window" or ((r == 128) == name.endswith("128") and r > 1)
        }
    assert plan.groups["window"].blocks(65) == 2 and plan.groups["ratio_4"].blocks(256) == 1 and plan.groups["state_4"].blocks(9) == 3
    text = str(plan)
    assert all(name in text for name in plan.groups) and f"{plan.block_bytes:,}" in text


@ALL_FORMATS
@pytest.mark.parametrize("model", MODELS)
def test_every_view_of_a_whole_model_is_what_kernels_take(model: str, fmt: KVFormat) -> None:
    """On the meta device, with as many blocks as indices can name: strides, spans, alignment, and not one block more."""
    plan = PoolPlan.of(MODELS[model], fmt)
    blocks = plan.max_blocks
    pool = KVPool(plan, torch.empty((blocks, plan.block_bytes), dtype=torch.uint8, device="meta"))
    for p in plan.pages:
        view = pool.view(p.layer, p.part)
        size = view.element_size()
        assert view.shape == (blocks, p.rows, p.layout.elements) and view.stride() == (plan.block_bytes // size, p.layout.elements, 1)
        assert view.storage_offset() * size == p.offset and p.offset % 32 == 0 and plan.block_bytes % 32 == 0
        if p.part in ("window", "compressed"):
            geometry = PoolGeometry.of(view)
            assert geometry.pages == blocks and geometry.page_rows == p.rows
            assert geometry.span == (p.rows if fmt.packed else plan.block_bytes // ROW_BYTES[fmt.name])
    beyond = torch.empty((blocks + 1, plan.block_bytes), dtype=torch.uint8, device="meta")
    with pytest.raises(
        InvalidArgument, match=rf"blocks: got {blocks + 1} blocks of {plan.block_bytes} bytes.*layer \d+ \(\w+, {fmt.name}\)"
    ):
        KVPool(plan, beyond)
    tightest = max(64, 256 // 4)
    if fmt.packed:
        assert blocks == 2**31 // tightest
    else:
        with pytest.raises(InvalidArgument, match=r"2\^31"):
            PoolGeometry(blocks + 1, tightest, plan.block_bytes // ROW_BYTES[fmt.name])


def test_pages_padded_as_an_engine_pads_them() -> None:
    """The page bytes of today's engines: 576 for packed rows, 512 for full rows (docs/kv_layout.md)."""

    def size(fmt: KVFormat, part: str, layer: int, alignment: int, index_keys: str = "fp8") -> int:
        plan = PoolPlan.of([layer, layer], fmt, page_alignment=alignment, index_keys=index_keys)
        first = plan.page(0, part)
        second = plan.page(1, part)
        return (second.offset - first.offset) - (plan.page(0, "index_keys").offset if part == "compressed" and layer == 4 else 0)

    assert size(PACKED, "window", 0, 576) == 37440 and size(PACKED, "compressed", 128, 576) == 1728
    assert size(PACKED, "state", 4, 576) == size(PACKED, "state", 128, 576) == 32832 and size(PACKED, "index_state", 4, 576) == 8640
    assert size(PACKED, "compressed", 4, 576) == 8640 and size(PACKED, "compressed", 4, 576, "mxfp4") == 4608  # the index page
    assert size(BF16, "compressed", 4, 512) == 8704 and size(FP8, "compressed", 4, 512, "mxfp4") == 4608
    assert size(BF16, "window", 0, 512) == 65536 and size(FP8, "compressed", 128, 512) == 1024
    assert PoolPlan.of(FLASH, PACKED, page_alignment=576).block_bytes == 44 * 37440


@pytest.mark.parametrize("layers", [1, 3, 5, 125])
def test_an_odd_number_of_512_bytes(layers: int) -> None:
    """Index pages padded to 8704 = 17 x 512 bytes make blocks that 512-byte rows fit and 1024-byte rows do not."""
    ratios = [4] * layers
    options = {"page_alignment": 512, "window_rows": 8}
    fp8 = PoolPlan.of(ratios, FP8, **options)
    odd = layers * (32768 + 8704)
    assert fp8.block_bytes == odd and odd // 512 % 2 == 1
    bf16 = PoolPlan.of(ratios, BF16, **options)
    assert bf16.block_bytes == up(layers * (65536 + 8704), 1024) == layers * (65536 + 8704) + 512
    with pytest.raises(InvalidArgument) as caught:
        PoolPlan.of(ratios, BF16, **options, block_bytes=bf16.block_bytes + 512)
    assert f"block_bytes: got {bf16.block_bytes + 512}" in str(caught.value)
    assert "whole number of 1024 bytes, which layer 0 (compressed, bf16) needs" in str(caught.value)
    assert f"round the block up to {bf16.block_bytes + 1024} bytes" in str(caught.value)
    given = PoolPlan.of(ratios, BF16, **options, block_bytes=bf16.block_bytes + 3072)
    assert given.block_bytes == bf16.block_bytes + 3072 and given.groups["ratio_4"].waste_bytes == 3584 + layers * 256


def test_the_block_that_an_engine_would_have_had_refused() -> None:
    """1,600,000 bytes = 3125 x 512: the span of BF16 rows is no integer, that of FP8 rows is."""
    with pytest.raises(InvalidArgument, match=r"1600000 = 1562 x 1024 \+ 512"):
        PoolPlan.of([4, 4], BF16, block_bytes=1_600_000)
    plan = PoolPlan.of([4, 4], FP8, block_bytes=1_600_000)
    assert PoolGeometry.of(plan.allocate(2).view(1, "compressed")).span == 3125


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (([4, 8], BF16), {}, r"ratios\[1\]: got 8, expected 0 or 1"),
        (([4], INLINE), {}, "kv_format: got fp8_inline, expected the KVFormat of bf16, fp8, fp8_ds_mla"),
        (([4], "fp8"), {}, "kv_format: got 'fp8', expected the KVFormat of .*\n  hint: resolve_format"),
        (([], BF16), {}, "ratios: got no layers"),
        (([1], BF16), {"window_rows": 0}, "window_rows: got 0"),
        (([1], BF16), {"window_rows": True}, "window_rows: got True"),
        (([4], BF16), {"compressed_tokens": {4: 6}}, r"compressed_tokens\[4\]: got 6, expected a multiple of 4, the ratio of layer 0"),
        (([1, 128], BF16), {"compressed_tokens": {128: 64}}, r"compressed_tokens\[128\]: got 64, .* layer 1"),
        (([128], BF16), {"state_rows": {128: 0}}, r"state_rows\[128\]: got 0"),
        (([4], BF16), {"index_state_rows": -1}, "index_state_rows: got -1"),
        (([4], BF16), {"index_keys": "fp4"}, "index_keys: got 'fp4'"),
        (([4], BF16), {"page_alignment": 24}, "page_alignment: got 24"),
        (([4], BF16), {"page_alignment": 32.0}, "page_alignment: got 32.0"),
        (([4], BF16), {"index_keys": ["fp8"]}, r"index_keys: got \['fp8'\]"),
        (([4], BF16), {"compressed_tokens": {8: 256}}, r"compressed_tokens: got \{8: 256\}, expected numbers by ratio, 4 or 128"),
        (([4], BF16), {"state_rows": [4, 8]}, r"state_rows: got \[4, 8\], expected numbers by ratio"),
        (([4.0], BF16), {}, r"ratios\[0\]: got 4.0, expected 0 or 1"),
        (([True], BF16), {}, r"ratios\[0\]: got True, expected 0 or 1"),
        (
            ([4, 1], BF16),
            {"block_bytes": 131071},
            r"block_bytes: got 131071, expected at least 131072: layer 1 \(window, bf16\) ends there",
        ),
        (([4, 1], PACKED), {"block_bytes": 74752}, r"whole number of 576 bytes, which layer 0 \(compressed, fp8_ds_mla\) needs"),
        (([4], FP8), {"block_bytes": 1e6}, "block_bytes: got 1000000.0"),
    ],
)
def test_refusals_of_plans(arguments: tuple, options: dict, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        PoolPlan.of(*arguments, **options)


def test_refusals_of_pools() -> None:
    plan = PoolPlan.of([1, 4], BF16)
    width = plan.block_bytes
    for storage in (
        torch.zeros(2, width),
        torch.zeros(2 * width, dtype=torch.uint8),
        torch.zeros(2, width + 1024, dtype=torch.uint8),
        torch.zeros(2, width + 1024, dtype=torch.uint8)[:, :width],
        torch.zeros(width + 8, dtype=torch.uint8)[8:].view(1, width),
    ):
        with pytest.raises(InvalidArgument, match="storage"):
            KVPool(plan, storage)
    for blocks in (0, -1, True, 2.0):
        with pytest.raises(InvalidArgument, match="blocks"):
            plan.allocate(blocks)
    pool = plan.allocate(1)
    with pytest.raises(InvalidArgument, match=r"part: got 'state' of layer 0, expected one of \['window'\]"):
        pool.view(0, "state")
    with pytest.raises(InvalidArgument, match="part: got 'window' of layer 2"):
        pool.view(2, "window")
    with pytest.raises(InvalidArgument, match="layer: got 2"):
        pool.layer(2)
    assert pool.layer(0).compressed is None and pool.layer(1).index_keys is not None and PoolPlan.of([4], BF16, index_keys=None).pages


def test_an_engine_s_own_memory_at_an_offset() -> None:
    plan = PoolPlan.of([1, 4], PACKED)
    memory = torch.zeros(64 + 3 * plan.block_bytes, dtype=torch.uint8)
    pool = KVPool(plan, memory[64:].view(3, plan.block_bytes))
    for page in plan.pages:
        view = pool.view(page.layer, page.part)
        assert view.data_ptr() == memory.data_ptr() + 64 + page.offset
        view[2, -1, -1] = 1
    assert not memory[:64].any() and memory[64 + 2 * plan.block_bytes :].any() and not memory[: 64 + 2 * plan.block_bytes].any()


@ALL_FORMATS
def test_the_nhd_contract(fmt: KVFormat) -> None:
    """With a head axis of one: rows of 512 elements (584 nominal) at stride(-2), pages at any stride: what FlashInfer takes."""
    pool = PoolPlan.of([4, 128], fmt).allocate(3)
    for layer, part, rows in ((0, "window", 64), (0, "compressed", 64), (1, "compressed", 2)):
        view = pool.view(layer, part)
        nhd, hnd = view.unsqueeze(-2), view.unsqueeze(1)
        width = 584 if fmt.packed else 512
        assert nhd.shape == (3, rows, 1, width) and hnd.shape == (3, 1, rows, width)
        assert nhd.stride(-1) == 1 and nhd.stride(1) == hnd.stride(2) == width
        assert nhd.stride(0) * view.element_size() == pool.plan.block_bytes
        if fmt.packed:
            assert nhd.stride(0) % 576 == 0 and nhd.stride(0) >= rows * 584
        else:
            assert nhd.stride(0) % 512 == 0
        assert validate.alignment(view) == 32, "the widest accesses"


# Written by the operations ------------------------------------------------------------------------------------------------


def owned(plan: PoolPlan, blocks: int, page: LayerPage, slots: list[int]) -> np.ndarray:
    """bool [blocks * block_bytes]: bytes of the rows at `slots`, by the description alone."""
    described = next(p for p in plan.describe()["pages"] if (p["layer"], p["part"]) == (page.layer, page.part))
    mask = np.zeros(blocks * plan.block_bytes, dtype=bool)
    for slot in slots:
        block, row = divmod(slot, described["rows"])
        base = block * described["page_stride"] + described["offset"]
        mask[base + row * described["data_bytes"] :][: described["data_bytes"]] = True
        if described["footer_offset"] is not None:
            mask[base + described["footer_offset"] + row * described["footer_bytes"] :][: described["footer_bytes"]] = True
    return mask


def angles(positions: int) -> torch.Tensor:
    return reference.cos_sin_table(positions, ratio=4)


@ALL_FORMATS
@pytest.mark.parametrize(("layer", "ratio"), [(1, 4), (2, 128), (3, 4)])
def test_compress_store_into_the_pool(layer: int, ratio: int, fmt: KVFormat) -> None:
    """Rows written through the pool's views equal rows written to pools of their own, and no other byte of the pool changes."""
    gen = torch.Generator().manual_seed(layer)
    plan = PoolPlan.of([0, 4, 128, 4], fmt)
    blocks, tokens = 100, 300
    pool = KVPool(plan, torch.randint(0, 256, (blocks, plan.block_bytes), dtype=torch.uint8, generator=gen))
    before = pool.storage.clone()
    width, bs, page_rows = (1024, 4, 64) if ratio == 4 else (512, 8, 2)
    order = torch.randperm(blocks, generator=gen)
    state_blocks, kv_blocks = order[: -(-tokens // bs)], order[-2:]
    position = torch.arange(tokens)
    state_slots = state_blocks[position // bs] * bs + position % bs
    entry = position // ratio
    kv_slots = torch.where((position + 1) % ratio == 0, kv_blocks[entry // page_rows] * page_rows + entry % page_rows, -1)
    inputs = {
        "kv_score": torch.randn(tokens, 2 * width, generator=gen),
        "ape": torch.randn(ratio, width, generator=gen),
        "state_block_table": state_blocks[None].int(),
        "positions": position,
        "token_to_req": torch.zeros(tokens, dtype=torch.int32),
        "state_slots": state_slots,
        "kv_slots": kv_slots,
        "norm_weight": torch.rand(512, generator=gen).bfloat16(),
        "cos_sin": angles(tokens),
    }
    scale = {"kv_scale": 0.25} if fmt.scaled else {}
    views = pool.layer(layer)
    own_state = torch.zeros(blocks, bs, 2 * width)
    own_cache = torch.zeros(blocks, page_rows, fmt.row_elements, dtype=fmt.dtype)
    for state, cache in ((views.state, views.compressed), (own_state, own_cache)):
        ck.compress_store(state=state, kv_cache=cache, ratio=ratio, eps=1e-6, **scale, **inputs)

    assert torch.equal(views.state.reshape(-1, 2 * width)[state_slots], own_state.view(-1, 2 * width)[state_slots])
    written = kv_slots[kv_slots >= 0]
    got, want = (reference.quant.read_rows(c, written // page_rows, written % page_rows) for c in (views.compressed, own_cache))
    assert torch.equal(got, want) and got.any()
    changed = (pool.storage != before).flatten().numpy()
    mine = owned(plan, blocks, plan.page(layer, "state"), state_slots.tolist())
    mine |= owned(plan, blocks, plan.page(layer, "compressed"), written.tolist())
    assert not changed[~mine].any(), "bytes outside the rows written changed"
    assert changed[mine].mean() > 0.9


@ALL_FORMATS
def test_qkv_insert_into_the_pool(fmt: KVFormat) -> None:
    """Window rows of one layer, at addresses that the tests compute on their own."""
    gen = torch.Generator().manual_seed(3)
    plan = PoolPlan.of([0, 4, 128], fmt, window_rows=16)
    pool = KVPool(plan, torch.randint(0, 256, (7, plan.block_bytes), dtype=torch.uint8, generator=gen))
    before, layer, rows = pool.storage.clone(), 2, 40
    slots = torch.randperm(7 * 16, generator=gen)[:rows]
    slots[5] = -1
    q, kv = torch.randn(rows, 8, 512, generator=gen).bfloat16(), torch.randn(rows, 512, generator=gen).bfloat16()
    page_bytes = packed_page(16) if fmt.packed else 16 * ROW_BYTES[fmt.name]
    mirror = Pool(fmt.name, layer * page_bytes, 7, 16, plan.block_bytes)
    twin = before.clone()
    for cache in (pool.view(layer, "window"), cache_view(mirror, twin.flatten())):
        ck.qkv_insert(q, kv, cache, slots, torch.arange(rows), angles(rows), eps=1e-6, **({"kv_scale": 2.0} if fmt.scaled else {}))
    assert torch.equal(pool.storage, twin)
    changed = (pool.storage != before).flatten().numpy()
    mine = owned(plan, 7, plan.page(layer, "window"), slots[slots >= 0].tolist())
    assert not changed[~mine].any() and changed[mine].mean() > 0.9


@ALL_FORMATS
def test_the_description_finds_every_row(fmt: KVFormat) -> None:
    """A transfer tool that knows nothing but the (JSON) description moves rows into a pool of another plan, and they read the same."""
    gen = torch.Generator().manual_seed(9)
    source_plan, target_plan = PoolPlan.of([4, 128], fmt), PoolPlan.of([0, 4, 128, 128], fmt, page_alignment=576 if fmt.packed else 512)
    source, target = source_plan.allocate(3), target_plan.allocate(3)
    source.storage.copy_(torch.randint(0, 120, source.storage.shape, dtype=torch.uint8, generator=gen))
    described = [json.loads(json.dumps(plan.describe())) for plan in (source_plan, target_plan)]
    assert [d["block_bytes"] for d in described] == [source_plan.block_bytes, target_plan.block_bytes]
    flat = [pool.storage.flatten() for pool in (source, target)]

    def pieces(page: dict, block: int, row: int) -> list[tuple[int, int]]:
        base = block * page["page_stride"] + page["offset"]
        found = [(base + row * page["data_bytes"], page["data_bytes"])]
        return found + ([(base + page["footer_offset"] + row * page["footer_bytes"], page["footer_bytes"])] if page["footer_bytes"] else [])

    for part, rows in (("compressed", 64), ("index_keys", 64), ("window", 64), ("state", 4)):
        one, other = (next(p for p in d["pages"] if (p["layer"], p["part"]) == (n, part)) for n, d in enumerate(described))
        assert one["payload_bytes"] == rows * (one["data_bytes"] + one["footer_bytes"]) and one["rows"] == rows
        assert one["tokens_per_row"] == (1 if part in ("window", "state") else 4)
        for row in range(rows):
            for (a, n), (b, m) in zip(pieces(one, 2, row), pieces(other, 0, row), strict=True):
                assert n == m
                flat[1][b : b + n] = flat[0][a : a + n]
        if part in ("compressed", "window"):
            at = torch.arange(rows)
            got = reference.quant.read_rows(target.view(1, part), torch.zeros_like(at), at)
            assert torch.equal(got, reference.quant.read_rows(source.view(0, part), torch.full_like(at, 2), at)) and got.any()
        elif part == "state":
            assert torch.equal(target.view(1, part)[0], source.view(0, part)[2])


def test_layouts_of_index_keys() -> None:
    for name, layout in INDEX_KEYS.items():
        assert layout.row_bytes == {"fp8": 132, "mxfp4": 68, "bf16": 256}[name]
        page = PoolPlan.of([4], FP8, index_keys=name).page(0, "index_keys")
        assert page.footer_offset == {"fp8": 8192, "mxfp4": 4096, "bf16": None}[name]
    assert math.lcm(576, 32) == 576  # packed blocks keep 32-byte accesses
