"""KV cache formats as data, and the geometry of a pool of pages. No CUDA, no kernels.

Kinds of rows (facts and byte diagrams: docs/spec.md):

* full rows: 512 values in a row, BF16 (1024 bytes) or FP8 E4M3 with one scale per tensor (512 bytes);
* packed rows (`fp8_ds_mla`): a page holds `rows` data rows of 576 bytes (448 E4M3 values, then 64 BF16 values), then
  `rows` footers of 8 bytes (7 UE8M0 scales, one per 64 values, and a zero). The tensor's last dimension, 584, is nominal;
* inline rows, of DeepSeek-V3.2's caches, which are only gathered from: 656 bytes, 512 E4M3 values, 4 fp32 scales (one per 128
  values) and 64 BF16 values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from cute_kernels.errors import InvalidArgument, UnsupportedRequest

HEAD_DIM = 512
NOPE_DIM = 448
ROPE_DIM = 64
WINDOW = 128
E4M3_MAX = 448.0
# A page's base and stride must be multiples of this many bytes: the widest access that every kernel is built for.
ALIGNMENT = 16


@dataclass(frozen=True)
class KVFormat:
    """One row format.

    name         the spelling used in specs, tables and log lines
    dtype        dtype of the cache tensor [pages, page_rows, row_elements]
    row_elements last dimension of that tensor
    row_bytes    bytes of one row, footer included
    scaled       one scale per tensor applies (full-row FP8 only)
    """

    name: str
    dtype: torch.dtype
    row_elements: int
    row_bytes: int
    scaled: bool

    @property
    def packed(self) -> bool:
        """Rows are stored as data and footers."""
        return self.name == "fp8_ds_mla"


BF16 = KVFormat("bf16", torch.bfloat16, HEAD_DIM, 2 * HEAD_DIM, scaled=False)
FP8 = KVFormat("fp8", torch.float8_e4m3fn, HEAD_DIM, HEAD_DIM, scaled=True)
PACKED = KVFormat("fp8_ds_mla", torch.uint8, 584, 584, scaled=False)
FORMATS = {f.name: f for f in (BF16, FP8, PACKED)}
INLINE = KVFormat("fp8_inline", torch.uint8, 656, 656, scaled=False)
# What `gather_upconvert` reads.
GATHERED = {f.name: f for f in (INLINE, PACKED, FP8)}

# Layout of a packed page.
PACKED_DATA_BYTES = 576
PACKED_FOOTER_BYTES = 8
SCALE_GROUP = 64
# Layout of an inline row: scales and rotated values after the codes.
INLINE_SCALES = 512
INLINE_ROPE = 528
INLINE_GROUP = 128

_BY_FAMILY: dict[str, dict[str, KVFormat]] = {
    "sm100": {"auto": BF16, "bfloat16": BF16, "fp8": FP8, "fp8_e4m3": FP8},
    "sm120": {"auto": PACKED, "fp8": PACKED, "fp8_e4m3": PACKED, "fp8_ds_mla": PACKED},
}


def resolve_format(kv_cache_dtype: str, family: str) -> KVFormat:
    """The row format that `kv_cache_dtype` ("auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_ds_mla") means for a family.

    family  "sm100" or "sm120": `Target.family`
    """
    if not isinstance(family, str) or family not in _BY_FAMILY:
        raise InvalidArgument("family", repr(family), " or ".join(map(repr, _BY_FAMILY)), hint="pass target.family")
    known = _BY_FAMILY[family]
    if kv_cache_dtype not in known:
        hint = f'"auto" means {known["auto"].name} here'
        if others := [name for name, theirs in _BY_FAMILY.items() if kv_cache_dtype in theirs]:
            hint += f"; these rows are the {others[0].upper()} family's, on CPU tensors with target={others[0]!r}"
        raise UnsupportedRequest(
            f"kv_cache_dtype={kv_cache_dtype!r}",
            device=f"the {family.upper()} family",
            supported=", ".join(known),
            nearest=hint,
        )
    return known[kv_cache_dtype]


def cache_dtypes() -> tuple[str, ...]:
    """Every spelling of `kv_cache_dtype` that some family knows."""
    return tuple(dict.fromkeys(name for known in _BY_FAMILY.values() for name in known))


def formats_of(family: str) -> tuple[KVFormat, ...]:
    """The row formats of a family, each once."""
    return tuple(dict.fromkeys(_BY_FAMILY[family].values()))


def format_of(cache: torch.Tensor, argument: str = "kv_cache") -> KVFormat:
    """The format that a cache tensor's dtype and last dimension spell."""
    wanted = "[pages, rows, 512] bfloat16 or float8_e4m3fn, or [pages, rows, 584] uint8 (packed fp8_ds_mla)"
    return _spelled(cache, argument, FORMATS, wanted)


def gathered_format(cache: torch.Tensor, argument: str = "cache") -> KVFormat:
    """The format of a cache that `gather_upconvert` reads."""
    wanted = "[pages, rows, 656] uint8 (V3.2), [pages, rows, 584] uint8 (packed fp8_ds_mla) or [pages, rows, 512] float8_e4m3fn"
    return _spelled(cache, argument, GATHERED, wanted)


def _spelled(cache: torch.Tensor, argument: str, formats: Mapping[str, KVFormat], wanted: str) -> KVFormat:
    """The one of `formats` that dtype and last dimension of [pages, rows, elements] spell."""
    for fmt in formats.values():
        if cache.dtype == fmt.dtype and cache.dim() == 3 and cache.shape[-1] == fmt.row_elements:
            return fmt
    hint = "cache.squeeze(-2) drops the head axis" if cache.dim() == 4 and cache.shape[-2] == 1 else ""
    raise InvalidArgument(argument, f"{cache.dtype} {list(cache.shape)}", wanted, hint=hint)


def check_pages(cache: torch.Tensor, argument: str) -> None:
    """`InvalidArgument` unless rows lie back to back within a page, and pages apart by a multiple of 16 bytes that holds one."""
    page_stride, row_stride, unit = cache.stride()
    pages, page_rows, width = cache.shape
    if unit != 1 or row_stride != width:
        raise InvalidArgument(
            argument,
            f"strides {list(cache.stride())}",
            f"[any, {width}, 1]: rows lie back to back within a page",
            hint="stride only the page dimension (kv_pool hands out such views)",
        )
    if pages > 1 and page_stride < page_rows * width:
        raise InvalidArgument(argument, f"page stride {page_stride}", f"at least {page_rows} rows x {width} = {page_rows * width}")
    size = cache.element_size()
    if pages > 1 and page_stride * size % ALIGNMENT:
        raise InvalidArgument(argument, f"page stride {page_stride * size} bytes", f"a multiple of {ALIGNMENT} bytes")


@dataclass(frozen=True)
class PoolGeometry:
    """How slots of a pool map to storage rows: slot = page * page_rows + offset; storage row = page * span + offset.

    pages      pages in the pool
    page_rows  rows of one page
    span       rows from the start of one page to the start of the next (== page_rows where pages lie back to back).
               Index tables of the SM100 family hold storage rows, those of the SM120 family slots.
    """

    pages: int
    page_rows: int
    span: int

    def __post_init__(self) -> None:
        for name in ("pages", "page_rows", "span"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | torch.SymInt):
                raise InvalidArgument(f"geometry.{name}", repr(value), "an int", hint="PoolGeometry.of(cache) reads them from a cache")
        if self.pages < 0 or self.page_rows < 1 or self.span < self.page_rows:
            raise InvalidArgument(
                "geometry", f"pages={self.pages}, page_rows={self.page_rows}, span={self.span}", "pages >= 0, 1 <= page_rows <= span"
            )
        if self.storage_rows > 2**31:
            raise InvalidArgument(
                "geometry",
                f"{self.storage_rows} storage rows (pages={self.pages}, span={self.span})",
                "at most 2^31, since an index is an int32",
                hint="use fewer pages, or a smaller block span",
            )

    _hash = 0

    def __hash__(self) -> int:
        """Kept: two geometries are part of what every call of `sparse_indices` is remembered by."""
        if not self._hash:
            object.__setattr__(self, "_hash", hash((self.pages, self.page_rows, self.span)))
        return self._hash

    @property
    def slots(self) -> int:
        """pages * page_rows: every slot is below it."""
        return self.pages * self.page_rows

    @property
    def storage_rows(self) -> int:
        """Storage rows from the first page's start to the last page's end, gaps between pages included."""
        return (self.pages - 1) * self.span + self.page_rows if self.pages else 0

    @staticmethod
    def of(cache: torch.Tensor, argument: str = "kv_cache") -> PoolGeometry:
        """The geometry of a cache tensor [pages, page_rows, row]; `InvalidArgument` for strides no kernel can address."""
        if not isinstance(cache, torch.Tensor):
            raise InvalidArgument(argument, "None" if cache is None else f"a {type(cache).__name__}", "a torch.Tensor [pages, rows, row]")
        fmt = format_of(cache, argument)
        check_pages(cache, argument)
        page_stride, (pages, page_rows, width) = cache.stride(0), cache.shape
        if pages <= 1:
            return PoolGeometry(pages, page_rows, page_rows)
        size = cache.element_size()
        if fmt.packed:
            return PoolGeometry(pages, page_rows, page_rows)
        if page_stride % width:
            raise InvalidArgument(
                argument,
                f"page stride {page_stride * size} bytes",
                f"a whole number of rows of {width * size} bytes",
                hint="round the block's size up so that every layer's span is a whole number of its rows",
            )
        return PoolGeometry(pages, page_rows, page_stride // width)
