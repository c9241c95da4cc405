"""Independent launches on a GPU: what follows a chain of them sees all its results, and none of them reads what is not there yet."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from cute_kernels import ops
from cute_kernels.indices import IdSource
from cute_kernels.save_policy import SavePolicy
from cute_kernels.target import Target
from tests.support.compress import make_compress_case
from tests.support.index_case import make_index_case
from tests.support.insert import make_insert_case
from tests.support.pools import cache_view, layout, storage_bytes
from tests.support.steps import Request, mix

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="executes both families' source on an SM90 GPU (H100, H200), and there is none",
)

REPEATS, PAGE_ROWS, POISON = 300, 64, 0x55
formats = pytest.mark.parametrize(("family", "kv_format"), [("sm100", "fp8"), ("sm120", "fp8_ds_mla")])
how = pytest.mark.parametrize("graph", [True, False], ids=["graph", "stream"])


class Layer:
    """Three calls that share one pool: compressed rows in its first pages, window rows in its last ones.

    rows_compress, rows_insert   rows of either call: the larger one is the slower. The compressor has at most as many blocks as the
                                 GPU holds, so that all have triggered long before its end, and saves next to nothing
    """

    def __init__(self, family: str, kv_format: str, rows_compress: int, rows_insert: int) -> None:
        self.target = Target(family, "sm_90a")
        scale = 0.5 if kv_format == "fp8" else None
        compress = make_compress_case(
            mix(rows_compress, 16, ratio=4),
            ratio=4,
            kv_format=kv_format,
            page_rows=PAGE_ROWS,
            strided=False,
            kv_scale=scale,
            save=SavePolicy(),
        ).to("cuda")
        insert = make_insert_case(rows_insert, kv_format=kv_format, kv_scale=scale, slotless=0.0)
        pages = compress.pool.pages + insert.pool.pages
        self.pool = layout(kv_format, pages, PAGE_ROWS)
        self.storage = torch.empty(storage_bytes(self.pool), dtype=torch.uint8, device="cuda")
        self.cache = cache_view(self.pool, self.storage)
        index = make_index_case([Request(400 + i, 1) for i in range(200)], source=IdSource.LOCAL, k=512).to("cuda")
        arguments = [*compress.args()[:10], self.cache]
        self.state, self.state_before = compress.state_storage, compress.state_storage.clone()
        self.q = torch.empty(rows_insert, 8, 512, dtype=torch.bfloat16, device="cuda")
        self.tables = ops.new_tables(index.rows, index.compressed_width, family == "sm100", torch.device("cuda"))
        slots = (insert.slots + compress.pool.pages * PAGE_ROWS).cuda()
        inputs = [insert.q.cuda(), insert.kv.cuda(), self.cache, slots, insert.positions.cuda(), insert.cos_sin.cuda()]
        self.inputs = {"insert": inputs[0], "compress": arguments[0], "indices": index.ids}
        self.positions = inputs[4]
        self.calls: dict[str, Callable[[bool], object]] = {
            "compress": lambda independent: ops.compress_store(
                *arguments, **compress.kwargs(), independent=independent, target=self.target
            ),
            "indices": lambda independent: ops.sparse_indices(
                *index.args(), **index.kwargs(), out=self.tables, independent=independent, target=self.target
            ),
            "insert": lambda independent: ops.qkv_insert(
                *inputs, **insert.options, out=self.q, independent=independent, target=self.target
            ),
        }
        self.gathered = torch.empty(pages * PAGE_ROWS, 512, dtype=torch.bfloat16, device="cuda")
        table, starts = (torch.arange(n, dtype=torch.int32, device="cuda") for n in (pages, 1))
        self.gather = lambda: ops.gather_upconvert(self.cache, self.gathered, table[None], starts, kv_scale=scale, target=self.target)

    def poison(self) -> None:
        for x in (self.storage, self.q, self.gathered, *vars(self.tables).values()):
            x.view(torch.uint8).fill_(POISON)
        self.state.copy_(self.state_before)

    def results(self) -> list[torch.Tensor]:
        """Bytes of all that the calls write, what the last one made of the pool first."""
        return [x.view(torch.uint8) for x in (self.gathered, self.storage, self.q, self.state, *vars(self.tables).values())]

    def expected(self, order: tuple[str, ...]) -> list[torch.Tensor]:
        """The same calls, each complete before the next."""
        self.poison()
        for name in order:
            self.calls[name](False)
            torch.cuda.synchronize()
        self.gather()
        torch.cuda.synchronize()
        return [x.clone() for x in self.results()]

    def check(self, chain: Callable[[], None], graph: bool, want: list[torch.Tensor]) -> None:
        """`chain`, launched again and again or as a graph of it, leaves `want` each time."""
        run = repeated(chain, graph)
        for _ in range(REPEATS):
            run()
            for got, wanted in zip(self.results(), want, strict=True):
                assert torch.equal(got, wanted)


def repeated(run: Callable[[], None], graph: bool) -> Callable[[], None]:
    """`run`, or replays of a graph of it."""
    if not graph:
        return run
    run()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        run()
    return captured.replay


ORDERS = [
    ((8192, 100), ("compress", "insert")),
    ((64, 4000), ("insert", "compress")),
    ((8192, 100), ("compress", "indices", "insert")),
    ((64, 4000), ("insert", "indices", "compress")),
]


@formats
@how
@pytest.mark.parametrize(("rows", "order"), ORDERS, ids=[">".join(order) for _, order in ORDERS])
def test_a_dependent_launch_sees_the_whole_chain(
    family: str, kv_format: str, graph: bool, rows: tuple[int, int], order: tuple[str, ...]
) -> None:
    """A slow call, short ones that do not wait for it, and a launch that reads what the slow one and the last one wrote."""
    layer = Layer(family, kv_format, *rows)
    want = layer.expected(order)

    def chain() -> None:
        layer.poison()
        for name in order:
            layer.calls[name](name != order[0])
        layer.gather()

    layer.check(chain, graph, want)


@formats
@how
@pytest.mark.parametrize("order", [("compress", "indices", "insert"), ("insert", "compress", "indices")], ids=">".join)
def test_inputs_that_arrive_right_in_front_of_the_chain(family: str, kv_format: str, graph: bool, order: tuple[str, ...]) -> None:
    """The independent launches read the other inputs first, so that caches of all SMs hold old lines, then the late ones."""
    layer = Layer(family, kv_format, 300, 1200)
    want = layer.expected(order)
    late = {name: x.clone() for name, x in layer.inputs.items()}
    old = {name: x.flip(0).contiguous() for name, x in late.items()}

    def chain() -> None:
        for name, x in old.items():
            layer.inputs[name].copy_(x)
        for name in order:
            layer.calls[name](False)
        layer.poison()
        for name, x in late.items():
            layer.inputs[name].copy_(x)
        for name in order:
            layer.calls[name](name != order[0])
        layer.gather()

    layer.check(chain, graph, want)


@formats
@how
def test_small_inputs_that_one_block_brings(family: str, kv_format: str, graph: bool) -> None:
    """All SMs have read the old positions; one block brings others, one block runs in front; then all SMs read the new ones."""
    layer = Layer(family, kv_format, 64, 1200)
    ids = torch.zeros(1, 8, dtype=torch.int32, device="cuda")
    slots = torch.empty_like(ids)
    want = layer.expected(("insert",))
    late = layer.positions.clone()
    old = late.flip(0).contiguous()

    def chain() -> None:
        layer.poison()
        layer.positions.copy_(old)
        layer.calls["insert"](False)
        layer.positions.copy_(late)
        ops.convert_indices(ids, ids[0, :1], ids, page_rows=64, out=slots, target=layer.target)
        layer.calls["insert"](True)
        layer.gather()

    layer.check(chain, graph, want)
