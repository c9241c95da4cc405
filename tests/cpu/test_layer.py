"""A layer's four calls in order, tables built once where they can be, every kernel enumerated, bytes independent of chunking."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch

import cute_kernels as ck
from cute_kernels import launching
from cute_kernels import layer as layer_module
from cute_kernels.compile import cache
from cute_kernels.compile.matrix import support_matrix
from cute_kernels.kv_format import formats_of
from cute_kernels.layer import LayerSpec, SparseMLA, StepTables
from cute_kernels.reference import cos_sin_table
from cute_kernels.target import Target, all_targets

PAGE_ROWS, HEADS, TOPK = 16, 5, 8
COMPRESSED_ROWS = {4: 16, 128: 2}
STATE_ROWS = {4: 4, 128: 8}
KINDS = [("sm100", "auto"), ("sm100", "fp8"), ("sm120", "auto")]
COS_SIN = cos_sin_table(512)


def zeros(spec: LayerSpec, target: Target, pages: int, rows: int) -> torch.Tensor:
    fmt = spec.kv_format(target)
    return torch.zeros(pages, rows, fmt.row_elements * fmt.dtype.itemsize, dtype=torch.uint8).view(fmt.dtype)


class Model:
    """One layer with random weights and the block tables of `requests` requests of up to 384 tokens."""

    def __init__(self, ratio: int, family: str, dtype: str, requests: int = 2, **changes: Any) -> None:
        gen = torch.Generator().manual_seed(ratio)
        self.ratio, self.target = ratio, Target.named(family)
        scales = {"kv_scale": 0.5, "q_scale": 0.25} if dtype == "fp8" else {}
        self.spec = LayerSpec(ratio, HEADS, dtype, max_seq_len=384, index_topk=TOPK, **{**scales, **changes})
        self.width = 1024 if ratio == 4 else 512

        def table(rows: int) -> torch.Tensor:
            columns = -(-384 // rows)
            return torch.randperm(requests * columns, generator=gen).int().view(requests, columns)

        self.window_table = table(PAGE_ROWS)
        tensors: dict[str, Any] = {"swa_cache": zeros(self.spec, self.target, self.window_table.numel(), PAGE_ROWS)}
        self.compressed_table = self.state_table = None
        if ratio > 1:
            rows = COMPRESSED_ROWS[ratio]
            self.compressed_table, self.state_table = table(ratio * rows), table(STATE_ROWS[ratio])
            tensors["kv_cache"] = zeros(self.spec, self.target, self.compressed_table.numel(), rows)
            tensors["state"] = torch.zeros(self.state_table.numel(), STATE_ROWS[ratio], 2 * self.width)
            tensors["ape"] = torch.randn(ratio, self.width, generator=gen)
            tensors["norm_weight"] = torch.rand(512, generator=gen).bfloat16()
        self.tensors = tensors
        self.layer = SparseMLA(self.spec, cos_sin=COS_SIN, sinks=torch.randn(HEADS, generator=gen), target=self.target, **tensors)

    def tables(self, step: ck.StepMetadata) -> StepTables:
        more: dict[str, Any] = {}
        if self.ratio > 1:
            more = {"compressed_block_table": self.compressed_table, "compressed_page_rows": COMPRESSED_ROWS[self.ratio]}
            more |= {"state_block_table": self.state_table, "state_block_rows": STATE_ROWS[self.ratio], "ratio": self.ratio}
        return StepTables.of(step, self.window_table, PAGE_ROWS, **more)

    def tables_once(self, step: ck.StepMetadata) -> StepTables:
        """As an engine does: one set of tables per step for all layers of this kind."""
        return step.once(("tables", id(self)), lambda: self.tables(step))


class Prompt:
    """What a model would feed a layer, by position, for two requests."""

    def __init__(self, ratio: int, tokens: int) -> None:
        gen = torch.Generator().manual_seed(7)
        width = 1024 if ratio == 4 else 512
        self.q = torch.randn(2, tokens, HEADS, 512, generator=gen).bfloat16()
        self.kv = torch.randn(2, tokens, 512, generator=gen).bfloat16()
        self.kv_score = torch.randn(2, tokens, 2 * width, generator=gen) if ratio > 1 else None
        order = torch.rand(2, tokens, tokens // 4 + TOPK, generator=gen)  # which closed entries the indexer prefers
        visible = (torch.arange(tokens) + 1)[:, None] // 4
        preferred = order.masked_fill(torch.arange(order.shape[2]) >= visible, 2.0).argsort(dim=2)[..., :TOPK].int()
        self.ids = torch.where(torch.arange(TOPK) < visible, preferred, -1).int() if ratio == 4 else None

    def rows(self, spans: list[tuple[int, int]]) -> dict[str, Any]:
        def cut(x: torch.Tensor | None) -> torch.Tensor | None:
            return None if x is None else torch.cat([x[r, begin:end] for r, (begin, end) in enumerate(spans)])

        return {"q": cut(self.q), "kv": cut(self.kv), "kv_score": cut(self.kv_score), "ids": cut(self.ids)}


def serve(model: Model, prompt: Prompt, steps: list[list[tuple[int, int]]]) -> list[torch.Tensor]:
    """Runs both requests through steps of (begin, end) spans; the attention output of each request by position."""
    got: list[list[torch.Tensor]] = [[], []]
    for spans in steps:
        step = ck.StepMetadata.of([end - begin for begin, end in spans], [end for _, end in spans])
        out = model.layer(step, model.tables(step), **prompt.rows(spans))
        for r, part in enumerate(out.split([end - begin for begin, end in spans])):
            got[r].append(part.clone())
    return [torch.cat(parts) for parts in got]


@pytest.mark.parametrize(("family", "dtype"), KINDS)
@pytest.mark.parametrize("ratio", [1, 4, 128])
def test_any_chunking_gives_the_same_bytes(ratio, family, dtype):
    tokens = 140 if ratio == 128 else 40
    prompt = Prompt(ratio, tokens)
    whole, chunked = Model(ratio, family, dtype), Model(ratio, family, dtype)
    expected = serve(whole, prompt, [[(0, tokens), (0, tokens)]])
    cuts = [0, 1, 4, 9, 17, 38, tokens - 1, tokens]  # starts in mid-group, one-token decode steps, several closed groups at once
    got = serve(chunked, prompt, [[span, span] for span in itertools.pairwise(cuts)])
    for name in whole.tensors:
        one, other = whole.tensors[name], chunked.tensors[name]
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)), name
    for one, other in zip(expected, got, strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=2**-7, atol=2**-9)  # sums of another order, one bf16 ulp
        assert one.isfinite().all() and one.any()


@pytest.mark.parametrize("save", [ck.SavePolicy.EVERY_ROW, ck.SavePolicy(rollback=2)], ids=str)
@pytest.mark.parametrize("ratio", [4, 128])
def test_tables_may_have_more_requests_than_the_step(ratio, save):
    prompt = Prompt(ratio, 140)
    more, exact = (Model(ratio, "sm100", "auto", requests=5, save=save) for _ in range(2))
    exact.window_table, exact.compressed_table, exact.state_table = (
        table[:2] for table in (exact.window_table, exact.compressed_table, exact.state_table)
    )
    steps = [[(0, 130), (0, 9)], [(130, 140), (9, 140)]]
    for one, other in zip(serve(more, prompt, steps), serve(exact, prompt, steps), strict=True):
        assert torch.equal(one, other)
    for name, tensor in more.tensors.items():
        assert torch.equal(tensor.view(torch.uint8), exact.tensors[name].view(torch.uint8)), name


@pytest.mark.parametrize(("family", "dtype"), KINDS)
def test_a_layer_is_its_four_calls(family, dtype):
    prompt, model, twin = Prompt(4, 40), Model(4, family, dtype), Model(4, family, dtype)
    step = ck.StepMetadata.of([40, 3], [40, 3])
    tables, rows = model.tables(step), prompt.rows([(0, 40), (0, 3)])
    got = model.layer(step, tables, **rows)
    t, spec = twin.tensors, twin.spec
    scale = {"kv_scale": spec.kv_scale}
    common = (step.positions, step.token_to_req)
    slots = (tables.state_slots, tables.kv_slots)
    weights = (t["norm_weight"], COS_SIN, t["kv_cache"])
    ck.compress_store(rows["kv_score"], t["ape"], t["state"], twin.state_table, *common, *slots, *weights, ratio=4, eps=1e-6, **scale)
    indices = ck.sparse_indices(
        *(*common, twin.window_table, rows["ids"], twin.compressed_table),
        window=ck.PoolGeometry.of(t["swa_cache"]),
        compressed=ck.PoolGeometry.of(t["kv_cache"]),
        source=ck.IdSource.LOCAL,
        ratio=4,
        slots=tables.window_slots,
        target=family,
    )
    q = ck.qkv_insert(
        *(rows["q"], rows["kv"], t["swa_cache"], tables.window_slots, step.positions, COS_SIN),
        eps=1e-6,
        padded_heads=8,
        q_dtype=spec.q_dtype(twin.target),
        q_scale=spec.q_scale,
        **scale,
        target=family,
    )
    sinks = model.layer.sinks[:HEADS]
    want = ck.decode(q, t["swa_cache"], t["kv_cache"], step, indices, num_heads=HEADS, sinks=sinks, q_scale=spec.q_scale, **scale)
    assert torch.equal(got, want) and got.shape == (43, HEADS, 512)
    for name in t:
        assert torch.equal(model.tensors[name].view(torch.uint8), t[name].view(torch.uint8)), name


@pytest.fixture
def served(monkeypatch):
    """The calls of operations: name, arguments."""
    calls: list[tuple[str, dict[str, Any]]] = []
    real = launching.Operation.serve

    def serve(operation: launching.Operation, *values: Any) -> Any:
        calls.append((operation.public.__name__, dict(zip(operation.form.names, values, strict=True))))
        return real(operation, *values)

    monkeypatch.setattr(launching.Operation, "serve", serve)
    return calls


def test_layers_of_a_step_share_one_scratch(served):
    """But those of the SM100 family at ratio 128, step after step; prefill rows by themselves have another one."""
    step = ck.StepMetadata.of([20, 3], [20, 3])
    for family, ratio in (("sm100", 128), ("sm100", 4), ("sm120", 4), ("sm120", 128)):
        model, score = Model(ratio, family, "auto"), Prompt(ratio, 40).rows([(0, 20), (0, 3)])["kv_score"]
        for _ in range(2):
            model.layer.compress(step, model.tables(step), score)
            given = served.pop()[1]["scratch"]
            assert given is (None if (family, ratio) == ("sm100", 128) else step.scratch())
    assert step.prefill_only().scratch() is not step.scratch()


def test_which_launches_run_beside_the_one_in_front(served):
    """The compressor's launch waits for what is in front of it, the others do not wait for the compressor's, if there is one."""

    def seen() -> list[tuple[str, bool]]:
        found = [(name, a["independent"]) for name, a in served]
        served.clear()
        return found

    step = ck.StepMetadata.of([20, 3], [20, 3])
    for ratio in (1, 4, 128):
        model, rows = Model(ratio, "sm100", "auto"), Prompt(ratio, 40).rows([(0, 20), (0, 3)])
        tables, beside = model.tables(step), ratio > 1
        compressor = [("compress_store", False)] * beside
        model.layer(step, tables, **rows)
        assert seen() == [*compressor, ("sparse_indices", beside), ("qkv_insert", beside)]
        model.layer(step, tables, **rows)
        built = [("sparse_indices", beside)] * (ratio == 4)
        assert seen() == [*compressor, *built, ("qkv_insert", beside)], "tables of ratio 1 and 128 are built once per step"
        if ratio > 1:
            torch.use_deterministic_algorithms(True)
            try:
                model.layer(step, tables, **rows)
            finally:
                torch.use_deterministic_algorithms(False)
            assert seen()[-1] == ("qkv_insert", False), "new tensors are filled by a launch of torch's"
            tables.state_slots = tables.state_slots[:0]
            model.layer(step, tables, **rows)
            assert seen()[-1] == ("qkv_insert", False), "an empty call launches nothing"


def test_tables_are_built_once_per_step_where_layers_can_share_them(served):
    step = ck.StepMetadata(2, 50, "cpu")
    models = {ratio: Model(ratio, "sm100", "auto") for ratio in (1, 4, 128)}
    first: list[int] = []
    for number in range(2):
        step.update([20, 3], [20 + number, 3 + number])
        served.clear()
        for ratio in (1, 1, 128, 4, 128, 4, 1):
            model, prompt = models[ratio], Prompt(ratio, 40)
            model.layer(step, model.tables_once(step), **prompt.rows([(number, 20 + number), (number, 3 + number)]))
        built = [(a["source"], a["out"].table.data_ptr()) for name, a in served if name == "sparse_indices"]
        sources = [source for source, _ in built]
        assert sources.count(ck.IdSource.NONE) == 1 and sources.count(ck.IdSource.ALL_GROUPS) == 1
        assert sources.count(ck.IdSource.LOCAL) == 2
        if number:
            assert [address for _, address in built] == first, "buffers that a captured graph uses stay where they are"
        first = [address for _, address in built]


def test_layers_of_another_geometry_have_tables_of_their_own(served):
    step = ck.StepMetadata.of([20, 3], [20, 3])
    model = Model(1, "sm100", "auto")
    storage = torch.zeros(model.window_table.numel(), PAGE_ROWS + 3, 512, dtype=torch.bfloat16)
    other = SparseMLA(model.spec, swa_cache=storage[:, :PAGE_ROWS], cos_sin=COS_SIN, target="sm100")
    tables = model.tables(step)
    first, second = model.layer.indices(step, tables, None), other.indices(step, tables, None)
    assert len(served) == 2 and not torch.equal(first.table, second.table)
    assert model.layer.indices(step, tables, None) is first and len(served) == 2
    model.layer.indices(step, model.tables(step), None)
    assert len(served) == 3, "other slots mark other padding rows"


def test_all_groups_stand_for_an_indexer_that_selects_everything():
    step = ck.StepMetadata.of([30, 3], [30, 3])
    for family in ("sm100", "sm120"):
        model = Model(4, family, "auto")
        tables = model.tables(step)
        chosen = torch.where(torch.arange(TOPK) < ((step.positions + 1) // 4)[:, None], torch.arange(TOPK), -1).int()
        by_ids, by_groups = model.layer.indices(step, tables, chosen), model.layer.indices(step, tables, ck.IdSource.ALL_GROUPS)
        assert all(torch.equal(a, b) for a, b in zip(vars(by_ids).values(), vars(by_groups).values(), strict=True))


# Warm-up ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "dtype"), KINDS)
@pytest.mark.parametrize("ratio", [1, 4, 128])
@pytest.mark.parametrize("save", [ck.SavePolicy.EVERY_ROW, ck.SavePolicy(rollback=3)], ids=["every-row", "policy"])
def test_warm_up_names_every_kernel_a_call_can_need(ratio, family, dtype, save, monkeypatch):
    model = Model(ratio, family, dtype, save=save)
    warmed: list[Any] = []
    monkeypatch.setattr(cache, "get", lambda spec: warmed.append(spec) or (lambda *arguments: None))
    seen: list[Any] = []
    assert model.layer.warm_up(seen.append) == len(warmed) and seen == warmed
    assert len(set(warmed)) == len(warmed)

    def on_gpu(operation: launching.Operation, *values: Any) -> Any:
        return operation.launch(dict(zip(operation.form.names, values, strict=True)), model.target)

    monkeypatch.setattr(launching.Operation, "serve", on_gpu)
    monkeypatch.setattr(layer_module, "decode", lambda q, *arguments, **named: q)  # the tables stay unwritten here
    enumerated = set(warmed)
    warmed.clear()
    prompt = Prompt(ratio, 40)
    step = ck.StepMetadata.of([20, 3], [20, 3])
    for shift in (0, 4):  # kv_score 16 and 32 bytes past an aligned address
        rows = prompt.rows([(0, 20), (0, 3)])
        if rows["kv_score"] is not None:
            storage = torch.zeros(rows["kv_score"].numel() + 16)
            start = (-storage.data_ptr() % 64) // 4 + shift
            rows["kv_score"] = storage[start : start + rows["kv_score"].numel()].view(rows["kv_score"].shape)
        model.layer(step, model.tables(step), **rows)
        if ratio == 4:
            model.layer(step, model.tables(step), **{**rows, "ids": ck.IdSource.ALL_GROUPS})
    assert warmed and set(warmed) <= enumerated
    assert {spec.vector_bytes for spec in enumerated} == {16, 32}


@pytest.mark.parametrize("target", all_targets(), ids=str)
def test_packs_hold_every_kernel_a_layer_can_need(target):
    matrix = set(support_matrix(target))
    for ratio, name, save in itertools.product((1, 4, 128), formats_of(target.family), (ck.SavePolicy.EVERY_ROW, ck.SavePolicy(3, 256))):
        spec = LayerSpec(ratio, 8, {"bf16": "bfloat16", "fp8": "fp8", "fp8_ds_mla": "fp8_ds_mla"}[name.name], save=save)
        for scores in (True, False):
            specs = list(spec.specs(target, scores=scores))
            assert specs and set(specs) <= matrix


def test_a_layer_without_a_target_has_nothing_to_warm_up():
    spec = LayerSpec(1, 8)
    layer = SparseMLA(spec, swa_cache=torch.zeros(2, 16, 512, dtype=torch.bfloat16), cos_sin=COS_SIN)
    assert layer.warm_up() == 0


# Errors ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        *(("ratio", 2), ("ratio", "4"), ("num_heads", 0), ("num_heads", 8.0), ("eps", 0.0), ("eps", float("nan")), ("sm_scale", -1.0)),
        *(("q_scale", float("inf")), ("kv_scale", 0.0), ("max_seq_len", 0), ("index_topk", 0), ("save", "none")),
    ],
)
def test_wrong_specs(name, wrong):
    with pytest.raises(ck.InvalidArgument, match=name):
        LayerSpec(**{"ratio": 4, "num_heads": 8, name: wrong})


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        ({"ratio": 0}, "window-only layer, 0 in a model's compress_ratios, has ratio 1"),
        ({"kv_scale": torch.ones(1)}, r"kv_scale.item\(\)"),
        ({"num_heads": 0}, "1 <= value <= 128"),
    ],
)
def test_wrong_specs_are_told_the_right_one(wrong, hint):
    with pytest.raises(ck.InvalidArgument, match=hint):
        LayerSpec(**{"ratio": 4, "num_heads": 8, **wrong})


def test_more_heads_than_a_gpu_can_hold_are_refused():
    with pytest.raises(ck.UnsupportedRequest, match="129"):
        LayerSpec(4, 129)


def test_wrong_tensors():
    model = Model(4, "sm100", "auto")
    good = {**model.tensors, "cos_sin": COS_SIN, "target": "sm100"}
    packed = torch.zeros(2, 16, 584, dtype=torch.uint8)
    changes = {
        "swa_cache": (None, packed),
        "kv_cache": (None, packed),
        "state": (None, [1]),
        "norm_weight": (None,),
        "target": ("sm_80", 3),
    }
    changes |= {"sinks": (torch.zeros(HEADS + 1), torch.zeros(HEADS).double(), [0.0] * HEADS)}
    for name, wrongs in changes.items():
        for wrong in wrongs:
            with pytest.raises(ck.InvalidArgument, match=name):
                SparseMLA(model.spec, **{**good, name: wrong})
    window_only = {"swa_cache": good["swa_cache"], "cos_sin": COS_SIN, "target": "sm100"}
    for name in ("kv_cache", "state", "ape", "norm_weight"):
        with pytest.raises(ck.InvalidArgument, match=name):
            SparseMLA(LayerSpec(1, HEADS), **window_only, **{name: good[name]})
    with pytest.raises(ck.InvalidArgument, match="kv_scale"):
        SparseMLA(LayerSpec(1, HEADS, kv_scale=2.0), **window_only)
    with pytest.raises(ck.UnsupportedRequest, match="fp8_ds_mla"):
        SparseMLA(LayerSpec(1, HEADS, "fp8_ds_mla"), **window_only)
    for swa_cache, target, hint in (
        (packed, None, "these rows are the SM120 family's, on CPU tensors with target='sm120'"),
        (good["swa_cache"], "sm120", "these rows are the SM100 family's, on CPU tensors with target='sm100'"),
        (good["swa_cache"].to(torch.float8_e4m3fn), "sm100", "kv_cache_dtype chooses"),
        (good["swa_cache"].unsqueeze(-2), "sm100", r"squeeze\(-2\)"),
    ):
        with pytest.raises(ck.InvalidArgument, match=f"(?s)swa_cache.*{hint}"):
            SparseMLA(LayerSpec(1, HEADS), swa_cache=swa_cache, cos_sin=COS_SIN, target=target)


def test_wrong_calls():
    step = ck.StepMetadata.of([20, 3], [20, 3])
    rows = Prompt(4, 40).rows([(0, 20), (0, 3)])
    four, one = Model(4, "sm100", "auto"), Model(1, "sm100", "auto")
    for changes, named in (
        ({"ids": None}, "ids"),
        ({"ids": ck.IdSource.GLOBAL}, "ids"),
        ({"kv_score": None}, "kv_score"),
        ({"q": rows["q"][:5]}, "kv"),
    ):
        with pytest.raises(ck.InvalidArgument, match=named):
            four.layer(step, four.tables(step), **{**rows, **changes})
    for changes, named in (({"kv_score": None}, "ids"), ({"ids": None}, "kv_score")):
        with pytest.raises(ck.InvalidArgument, match=named):
            one.layer(step, one.tables(step), **{**rows, **changes})
    with pytest.raises(ck.InvalidArgument, match="state_block_table"):
        StepTables.of(step, four.window_table, PAGE_ROWS, ratio=4, compressed_block_table=four.compressed_table, compressed_page_rows=16)
    with pytest.raises(ck.InvalidArgument, match=r"tables.state_slots(?s:.*)StepTables.of\(..., ratio=4"):
        four.layer(step, one.tables(step), **rows)
    tables = four.tables(step)
    for place, name in enumerate(("window_page_rows", "compressed_page_rows", "state_block_rows")):
        sizes = list(tables.page_rows)
        sizes[place] *= 2
        wrong = dataclasses.replace(tables, page_rows=tuple(sizes))
        with pytest.raises(ck.InvalidArgument, match=f"^tables.page_rows: got {name}={sizes[place]}, expected {name}={sizes[place] // 2}"):
            four.layer(step, wrong, **rows)
        for part, given in ((four.layer.compress, rows["kv_score"]), (four.layer.indices, rows["ids"])):
            with pytest.raises(ck.InvalidArgument, match=f"{name}="):
                part(step, wrong, given)
    one.layer(step, tables, **{**rows, "kv_score": None, "ids": None})  # its window pool alone has to fit


def test_wrong_tables():
    step, table = ck.StepMetadata.of([20, 3], [20, 3]), torch.zeros((2, 8), dtype=torch.int32)
    tables = {f"{kind}_block_table": table for kind in ("window", "compressed", "state")}
    numbers = {"window_page_rows": 16, "compressed_page_rows": 16, "state_block_rows": 4, "ratio": 4}
    assert StepTables.of(step, **tables, **numbers).state_slots is not None
    for wrong in (*({name: table.long()} for name in tables), *({name: 0} for name in numbers)):
        with pytest.raises(ck.InvalidArgument, match=f"^{next(iter(wrong))}: got"):
            StepTables.of(step, **{**tables, **numbers, **wrong})
