"""One pool for a whole model: equal blocks, shared by all groups of layers, and strided views of each layer's pages.

A model's layers fall into groups that fill their pages at the same pace: compressed rows of ratio 4 with the indexer's keys,
compressed rows of ratio 128, window rows, and the compressors' open windows ("state") of ratio 4, of ratio 128 and of the
indexer. Each group has a block table of its own, and all of them draw from one array of equal blocks:

    block b, owned by the ratio-4 group:   | rows of layer 2 | its index keys | rows of layer 4 | its index keys | ... | waste |
    block c, owned by the window group:    | rows of layer 0 | rows of layer 1 | rows of layer 2 | ...                 | waste |
                                           byte 0                                                                     block_bytes

So page p of a layer is block p: its bytes start at `p * block_bytes + offset`, where the offset is the layer's own. Block
bytes are the largest group's sum, rounded up until every layer can be addressed: full rows by storage row, so that the block
is a whole number of their 512 or 1024 bytes; packed rows by a stride of whole 576-byte rows, which is what kernels ask that
reach data rows through a tensor map. Sources of sizes and rules: docs/kv_layout.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cute_kernels.errors import InvalidArgument
from cute_kernels.kv_format import ALIGNMENT, FORMATS, HEAD_DIM, PACKED_DATA_BYTES, PACKED_FOOTER_BYTES, KVFormat

# Offsets of pages inside a block: the widest access any kernel is built for.
PAGE_ALIGNMENT = 32
_INDEX_ROWS = 2**31


@dataclass(frozen=True)
class RowLayout:
    """The bytes of a page's rows: `rows` pieces of `data_bytes`, then `rows` footers of `footer_bytes`.

    name          row format
    dtype         dtype of the view [blocks, rows, elements]
    elements      last dimension of that view; nominal where rows have footers
    stride_bytes  the block must be a multiple of this, so that kernels can address the rows
    """

    name: str
    dtype: torch.dtype
    elements: int
    data_bytes: int
    stride_bytes: int
    footer_bytes: int = 0

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, data and footer."""
        return self.data_bytes + self.footer_bytes


# What an engine's indexer keeps for each group of 4 tokens (head size 128): 128 E4M3 values and an fp32 scale, 64 bytes of
# E2M1 pairs and 4 UE8M0 scales, or BF16.
INDEX_KEYS: Mapping[str, RowLayout] = {
    "fp8": RowLayout("index_fp8", torch.uint8, 132, 128, PAGE_ALIGNMENT, 4),
    "mxfp4": RowLayout("index_mxfp4", torch.uint8, 68, 64, PAGE_ALIGNMENT, 4),
    "bf16": RowLayout("index_bf16", torch.bfloat16, 128, 256, 256),
}
# Values and scores of one token, fp32: 2 x W columns. Addressed by the stride in elements, so 32 bytes are enough.
_STATE = {name: RowLayout(name, torch.float32, 2 * w, 8 * w, PAGE_ALIGNMENT) for name, w in (("state_4", 1024), ("state_128", 512))}
_INDEX_STATE = RowLayout("index_state", torch.float32, 512, 2048, PAGE_ALIGNMENT)


def kv_rows(fmt: KVFormat) -> RowLayout:
    """The layout of a KV format's rows."""
    if fmt.packed:
        return RowLayout(fmt.name, fmt.dtype, fmt.row_elements, PACKED_DATA_BYTES, PACKED_DATA_BYTES, PACKED_FOOTER_BYTES)
    return RowLayout(fmt.name, fmt.dtype, HEAD_DIM, fmt.row_bytes, fmt.row_bytes)


@dataclass(frozen=True)
class LayerPage:
    """The page of one layer in each block of its group.

    layer   number of the layer
    part    "compressed", "index_keys", "window", "state" or "index_state"
    group   name of the group whose block table names the pages
    rows    rows of a page
    offset  bytes from the start of a block to the page
    """

    layer: int
    part: str
    group: str
    layout: RowLayout
    rows: int
    offset: int

    @property
    def payload_bytes(self) -> int:
        """Bytes of the page that hold rows and footers."""
        return self.rows * self.layout.row_bytes

    @property
    def footer_offset(self) -> int | None:
        """Bytes from the start of the page to its first footer; None where rows have none."""
        return self.rows * self.layout.data_bytes if self.layout.footer_bytes else None

    def max_blocks(self, block_bytes: int) -> int:
        """The most blocks whose rows an int32 index can name: storage rows for full rows, slots for rows with footers."""
        if self.layout.dtype == torch.float32:  # state slots are int64, block tables int32
            return _INDEX_ROWS
        if self.layout.footer_bytes:
            return _INDEX_ROWS // self.rows
        return (_INDEX_ROWS - self.rows) // (block_bytes // self.layout.row_bytes) + 1

    def __str__(self) -> str:
        return f"layer {self.layer} ({self.part}, {self.layout.name})"


@dataclass(frozen=True)
class Group:
    """Layers that share a block table.

    name              "ratio_4", "ratio_128", "window", "state_4", "state_128" or "index_state"
    tokens_per_block  tokens of one request that a block holds
    pages             the pages of a block, in order
    used_bytes        bytes of a block that hold rows; waste_bytes: the others
    """

    name: str
    tokens_per_block: int
    pages: tuple[LayerPage, ...]
    used_bytes: int
    waste_bytes: int

    def blocks(self, tokens: int) -> int:
        """Blocks that `tokens` tokens of one request take."""
        return -(-tokens // self.tokens_per_block)


@dataclass(frozen=True)
class PoolPlan:
    """Where every layer's pages lie in a block; made by `PoolPlan.of`.

    kv_format    of window and compressed rows
    block_bytes  bytes of a block, of every group
    groups       by name, those that have layers
    """

    kv_format: KVFormat
    block_bytes: int
    groups: Mapping[str, Group]

    @staticmethod
    def of(
        ratios: Sequence[int],
        kv_format: KVFormat,
        *,
        window_rows: int = 64,
        compressed_tokens: Mapping[int, int] | None = None,
        state_rows: Mapping[int, int] | None = None,
        index_keys: str | None = "fp8",
        index_state_rows: int = 4,
        page_alignment: int = PAGE_ALIGNMENT,
        block_bytes: int | None = None,
    ) -> PoolPlan:
        """Plans a pool for the layers of a model.

        ratios             compression ratio of each layer in order: 0 or 1 (window only), 4 or 128, as in `compress_ratios`
        kv_format          row format of window and compressed caches (`resolve_format`)
        window_rows        rows of a window page
        compressed_tokens  tokens of a compressed page by ratio, a multiple of it; default {4: 256, 128: 256}, 64 and 2 rows
        state_rows         rows of a state block by ratio; default {4: 4, 128: 8}
        index_keys         "fp8", "mxfp4" or "bf16": row format of the indexer's keys; None: they and their state lie elsewhere
        index_state_rows   rows of a block of the indexer's own compressor state
        page_alignment     bytes that offsets of pages are multiples of, a multiple of 16; 512 or 576 pads every page as vLLM does
        block_bytes        bytes of a block, where an engine has fixed them; default: the smallest that serves

        `InvalidArgument` names the layer and the numbers where a page cannot be represented.
        """
        for name, by_ratio in (("compressed_tokens", compressed_tokens), ("state_rows", state_rows)):
            if by_ratio is not None and not (isinstance(by_ratio, Mapping) and by_ratio.keys() <= {4, 128}):
                raise InvalidArgument(name, repr(by_ratio), "numbers by ratio, 4 or 128")
        compressed_tokens = {4: 256, 128: 256, **(compressed_tokens or {})}
        state_rows = {4: 4, 128: 8, **(state_rows or {})}
        for name, value in (
            ("window_rows", window_rows),
            ("index_state_rows", index_state_rows),
            *((f"compressed_tokens[{r}]", n) for r, n in compressed_tokens.items()),
            *((f"state_rows[{r}]", n) for r, n in state_rows.items()),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
                raise InvalidArgument(name, repr(value), "an int, 1 <= value < 2^31")
        if not isinstance(page_alignment, int) or page_alignment < ALIGNMENT or page_alignment % ALIGNMENT:
            raise InvalidArgument("page_alignment", repr(page_alignment), f"a multiple of {ALIGNMENT} bytes, at least {ALIGNMENT}")
        if index_keys is not None and index_keys not in tuple(INDEX_KEYS):
            raise InvalidArgument("index_keys", repr(index_keys), ", ".join(map(repr, (*INDEX_KEYS, None))))
        if not len(ratios):
            raise InvalidArgument("ratios", "no layers", "the compression ratio of each layer")

        if kv_format not in FORMATS.values():
            got = kv_format.name if isinstance(kv_format, KVFormat) else repr(kv_format)
            hint = "resolve_format(kv_cache_dtype, target.family) gives it"
            raise InvalidArgument("kv_format", got, f"the KVFormat of {', '.join(FORMATS)}", hint=hint)

        rows = kv_rows(kv_format)
        parts: dict[str, list[tuple[int, str, RowLayout, int]]] = {name: [] for name in _GROUPS}
        for layer, ratio in enumerate(ratios):
            if type(ratio) is not int or ratio not in (0, 1, 4, 128):
                raise InvalidArgument(f"ratios[{layer}]", repr(ratio), "0 or 1 (window only), 4 or 128")
            parts["window"].append((layer, "window", rows, window_rows))
            if ratio < 4:
                continue
            tokens = compressed_tokens[ratio]
            if tokens % ratio:
                raise InvalidArgument(f"compressed_tokens[{ratio}]", tokens, f"a multiple of {ratio}, the ratio of layer {layer}")
            parts[f"ratio_{ratio}"].append((layer, "compressed", rows, tokens // ratio))
            parts[f"state_{ratio}"].append((layer, "state", _STATE[f"state_{ratio}"], state_rows[ratio]))
            if ratio == 4 and index_keys is not None:
                parts["ratio_4"].append((layer, "index_keys", INDEX_KEYS[index_keys], tokens // 4))
                parts["index_state"].append((layer, "index_state", _INDEX_STATE, index_state_rows))
        pages = {name: _back_to_back(name, group, page_alignment) for name, group in parts.items() if group}
        block_bytes = _block_bytes(pages, block_bytes, page_alignment)

        per_block = {"window": window_rows, "index_state": index_state_rows}
        per_block |= {f"ratio_{r}": n for r, n in compressed_tokens.items()} | {f"state_{r}": n for r, n in state_rows.items()}
        used = {name: sum(p.payload_bytes for p in group) for name, group in pages.items()}
        groups = {n: Group(n, per_block[n], tuple(group), used[n], block_bytes - used[n]) for n, group in pages.items()}
        return PoolPlan(kv_format, block_bytes, groups)

    @property
    def pages(self) -> tuple[LayerPage, ...]:
        """The pages of all groups."""
        return tuple(page for group in self.groups.values() for page in group.pages)

    def page(self, layer: int, part: str) -> LayerPage:
        """The page of a layer's part; `InvalidArgument` where it has none."""
        for page in self.pages:
            if (page.layer, page.part) == (layer, part):
                return page
        found = [p.part for p in self.pages if p.layer == layer]
        raise InvalidArgument("part", f"{part!r} of layer {layer}", f"one of {found}" if found else "a layer of the plan")

    @property
    def max_blocks(self) -> int:
        """The most blocks that an int32 index can address in every layer."""
        return min(page.max_blocks(self.block_bytes) for page in self.pages)

    def require_blocks(self, blocks: int) -> None:
        """`InvalidArgument`, naming the layer, where a pool of `blocks` blocks has rows that no int32 index can name."""
        if isinstance(blocks, bool) or not isinstance(blocks, int) or blocks < 1:
            raise InvalidArgument("blocks", repr(blocks), "an int >= 1")
        page = min(self.pages, key=lambda p: p.max_blocks(self.block_bytes))
        most = page.max_blocks(self.block_bytes)
        if blocks > most:
            raise InvalidArgument(
                "blocks",
                f"{blocks} blocks of {self.block_bytes} bytes",
                f"at most {most}: {page} has {page.rows} rows per page, and an index is an int32",
                hint="split the model's layers over two pools",
            )

    def allocate(self, blocks: int, device: torch.device | str = "cpu") -> KVPool:
        """A pool of `blocks` blocks on `device`, zeroed; `InvalidArgument` for more than an int32 index can name."""
        self.require_blocks(blocks)
        return KVPool(self, torch.zeros((blocks, self.block_bytes), dtype=torch.uint8, device=device))

    def describe(self) -> dict[str, Any]:
        """The layout as plain data, for tools that move KV pages between pools, hosts or files.

        Row r of page p of an entry: `data_bytes` at p * page_stride + offset + r * data_bytes, and `footer_bytes` at
        p * page_stride + offset + footer_offset + r * footer_bytes. Every other byte of a block is waste. JSON can hold it.
        """
        return {
            "version": 1,
            "kv_format": self.kv_format.name,
            "block_bytes": self.block_bytes,
            "groups": [
                {"group": g.name, "tokens_per_block": g.tokens_per_block, "used_bytes": g.used_bytes, "waste_bytes": g.waste_bytes}
                for g in self.groups.values()
            ],
            "pages": [
                {
                    "layer": page.layer,
                    "part": page.part,
                    "group": page.group,
                    "format": page.layout.name,
                    "rows": page.rows,
                    "tokens_per_row": self.groups[page.group].tokens_per_block // page.rows,
                    "offset": page.offset,
                    "page_stride": self.block_bytes,
                    "payload_bytes": page.payload_bytes,
                    "data_bytes": page.layout.data_bytes,
                    "footer_bytes": page.layout.footer_bytes,
                    "footer_offset": page.footer_offset,
                }
                for page in self.pages
            ],
        }

    def __str__(self) -> str:
        lines = [f"{self.kv_format.name} pool: blocks of {self.block_bytes:,} bytes, at most {self.max_blocks:,}"]
        for g in self.groups.values():
            share = 100 * g.waste_bytes / self.block_bytes
            lines.append(
                f"  {g.name:<12}{len(g.pages):>4} pages, {g.tokens_per_block:>4} tokens a block, "
                f"{g.used_bytes:>10,} bytes used, {g.waste_bytes:>10,} wasted ({share:.1f}%)"
            )
        return "\n".join(lines)


_GROUPS = ("ratio_4", "ratio_128", "window", "state_4", "state_128", "index_state")


def _back_to_back(group: str, parts: list[tuple[int, str, RowLayout, int]], alignment: int) -> list[LayerPage]:
    pages, end = [], 0
    for layer, part, layout, rows in parts:
        pages.append(LayerPage(layer, part, group, layout, rows, offset=end))
        end += -(-pages[-1].payload_bytes // alignment) * alignment
    return pages


def _block_bytes(pages: Mapping[str, list[LayerPage]], given: int | None, alignment: int) -> int:
    """The smallest block that holds every group and that every page can be addressed in; or `given`, if it is such a block."""
    everything = [page for group in pages.values() for page in group]
    ends = {page: page.offset + page.payload_bytes for page in everything}
    largest = max(everything, key=ends.__getitem__)
    unit = math.lcm(alignment, *(page.layout.stride_bytes for page in everything))
    if given is None:
        return -(-ends[largest] // unit) * unit
    if isinstance(given, bool) or not isinstance(given, int) or given < ends[largest]:
        raise InvalidArgument(
            "block_bytes", repr(given), f"at least {ends[largest]}: {largest} ends there, the last of group {largest.group!r}"
        )
    for page in everything:
        step = page.layout.stride_bytes
        if given % step:
            raise InvalidArgument(
                "block_bytes",
                given,
                f"a whole number of {step} bytes, which {page} needs: {given} = {given // step} x {step} + {given % step}",
                hint=f"round the block up to {-(-given // unit) * unit} bytes",
            )
    if given % ALIGNMENT:
        raise InvalidArgument("block_bytes", given, f"a multiple of {ALIGNMENT} bytes")
    return given


@dataclass(frozen=True)
class LayerViews:
    """The pages of one layer: `SparseMLA`'s `swa_cache`, `kv_cache` and `state`, and what the engine's indexer keeps.

    window       [blocks, rows, 512 or 584]
    compressed   likewise; None for a window-only layer
    state        fp32 [blocks, rows, 2W]; None likewise
    index_keys   [blocks, rows, elements] of the plan's `index_keys`; None but for ratio 4
    index_state  fp32 [blocks, rows, 512]; None likewise
    """

    window: torch.Tensor
    compressed: torch.Tensor | None = None
    state: torch.Tensor | None = None
    index_keys: torch.Tensor | None = None
    index_state: torch.Tensor | None = None


class KVPool:
    """A plan over memory: uint8 [blocks, block_bytes], and strided views into it. Views of different groups share bytes.

    A block belongs to one group at a time: whoever hands out blocks draws all groups' block tables from one free list.
    """

    def __init__(self, plan: PoolPlan, storage: torch.Tensor) -> None:
        """plan     where pages lie
        storage  uint8 [blocks, plan.block_bytes], contiguous, at an address that is a multiple of 16 (32 for the widest accesses)

        `InvalidArgument` for other storage, and for more blocks than an int32 index can name.
        """
        shape = tuple(storage.shape)
        if storage.dtype != torch.uint8 or len(shape) != 2 or shape[1] != plan.block_bytes:
            raise InvalidArgument("storage", f"{storage.dtype} {list(shape)}", f"torch.uint8 [blocks, {plan.block_bytes}]")
        if not storage.is_contiguous():
            raise InvalidArgument("storage", f"strides {list(storage.stride())}", f"[{plan.block_bytes}, 1], contiguous")
        address, first = storage.data_ptr(), storage.storage_offset()
        if address % ALIGNMENT or first % ALIGNMENT:
            raise InvalidArgument("storage", f"address {address:#x}, storage offset {first}", f"multiples of {ALIGNMENT} bytes")
        plan.require_blocks(shape[0])
        self.plan, self.storage, self.blocks = plan, storage, shape[0]

    def view(self, layer: int, part: str) -> torch.Tensor:
        """[blocks, rows, elements] of a layer's part, in its dtype: rows back to back, blocks `plan.block_bytes` apart (NHD with one head).

        `InvalidArgument` where the layer has no such part.
        """
        page = self.plan.page(layer, part)
        size, width = page.layout.dtype.itemsize, page.layout.elements
        rows = self.storage.view(page.layout.dtype)
        strides = (self.plan.block_bytes // size, width, 1)
        return rows.as_strided((self.blocks, page.rows, width), strides, rows.storage_offset() + page.offset // size)

    def layer(self, layer: int) -> LayerViews:
        """All views of one layer; `InvalidArgument` for a layer that the plan does not have."""
        parts = [page.part for page in self.plan.pages if page.layer == layer]
        if not parts:
            raise InvalidArgument("layer", layer, "a layer of the plan")
        return LayerViews(**{part: self.view(layer, part) for part in parts})
