"""The checks behind every typed error of the public calls: one table per call, one function that reads the tables.

CPU calls are checked before they run. CUDA calls are guarded by the compiled function's own checks; when it refuses, the
same table is walked to name the argument and both values. Nothing here reads a tensor's values: `value_checks` does.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from cute_kernels.errors import InvalidArgument, UnsupportedRequest
from cute_kernels.indices import CombinedIndices, IdSource, SegmentIndices
from cute_kernels.kv_format import (
    ALIGNMENT,
    FORMATS,
    HEAD_DIM,
    PACKED,
    ROPE_DIM,
    WINDOW,
    KVFormat,
    PoolGeometry,
    check_pages,
    format_of,
    gathered_format,
)
from cute_kernels.save_policy import SavePolicy
from cute_kernels.scratch import WORDS
from cute_kernels.step import StepMetadata

F32, BF, I32, I64, U8 = torch.float32, torch.bfloat16, torch.int32, torch.int64, torch.uint8


class Layout(enum.Enum):
    """Which strides an argument may have."""

    DENSE = "contiguous"
    ROWS = "unit stride in the last dimension, any stride between rows"
    POOL = "rows back to back within a page, any page stride that holds a page"
    PAGES = "as POOL, of a cache that is gathered from: pages need not be a whole number of rows apart"


@dataclass(frozen=True)
class Arg:
    """What one tensor argument must be.

    shape   per dimension: an exact extent, the name of a size (all uses must agree), ">=NAME", or None (any extent)
    vector  accessed 16 or 32 bytes at a time: address and strides must be multiples of 16 bytes
    written the call writes it: its rows must not overlap (an input may be an expanded view)
    """

    name: str
    dtypes: tuple[torch.dtype, ...]
    shape: tuple[int | str | None, ...]
    layout: Layout = Layout.DENSE
    vector: bool = False
    optional: bool = False
    written: bool = False


CACHE_DTYPES = tuple(f.dtype for f in FORMATS.values())

COMPRESS_STORE = (
    Arg("state_slots", (I64,), ("T",)),
    Arg("kv_score", (F32,), (">=T", "2W"), Layout.ROWS, vector=True, optional=True),
    Arg("ape", (F32,), ("ratio", "W"), vector=True, optional=True),
    Arg("state", (F32,), (None, None, "2W"), Layout.ROWS, vector=True, written=True),
    Arg("state_block_table", (I32,), ("R", None), Layout.ROWS),
    Arg("positions", (I64,), (None,)),
    Arg("token_to_req", (I32,), (None,)),
    Arg("kv_slots", (I64,), (None,)),
    Arg("norm_weight", (BF,), (HEAD_DIM,), vector=True),
    Arg("cos_sin", (F32,), (None, ROPE_DIM), Layout.ROWS),
    Arg("kv_cache", CACHE_DTYPES, (None, None, None), Layout.POOL, vector=True),
    Arg("seq_lens", (I32,), ("R",), optional=True),
    Arg("scratch", (I32,), (">=words",), vector=True, optional=True, written=True),
)

STATE = tuple(arg for arg in COMPRESS_STORE if arg.name == "state")

SPARSE_INDICES = (
    Arg("positions", (I64,), ("T",)),
    Arg("token_to_req", (I32,), (None,)),
    Arg("window_block_table", (I32,), ("R", None), Layout.ROWS),
    Arg("ids", (I32,), (None, None), Layout.ROWS, vector=True, optional=True),
    Arg("compressed_block_table", (I32,), ("R", None), Layout.ROWS, optional=True),
    Arg("slots", (I64,), (None,), optional=True),
)
COMBINED_OUT = (
    Arg("out.table", (I32,), ("rows", "columns"), vector=True),
    Arg("out.lengths", (I32,), ("rows",)),
)
SEGMENT_WINDOW_OUT = (
    Arg("out.window", (I32,), ("rows", WINDOW), vector=True),
    Arg("out.window_lengths", (I32,), ("rows",)),
)
SEGMENT_COMPRESSED_OUT = (
    Arg("out.compressed", (I32,), ("rows", "width"), vector=True),
    Arg("out.compressed_lengths", (I32,), ("rows",)),
)

QKV_INSERT = (
    Arg("q", (BF,), ("N", "H", HEAD_DIM), Layout.ROWS, vector=True),
    Arg("kv", (BF,), ("N", HEAD_DIM), Layout.ROWS, vector=True),
    Arg("kv_cache", CACHE_DTYPES, (None, None, None), Layout.POOL, vector=True),
    Arg("slots", (I64,), (None,)),
    Arg("positions", (I64,), ("N",)),
    Arg("cos_sin", (F32,), (None, ROPE_DIM), vector=True),
)
QKV_INSERT_OUT = (Arg("out", (BF, torch.float8_e4m3fn), ("N", "padded_heads", HEAD_DIM), vector=True, optional=True),)

DECODE = (
    Arg("q", (BF, torch.float8_e4m3fn), (">=T", "H", HEAD_DIM), vector=True),
    Arg("swa_cache", CACHE_DTYPES, (None, None, None), Layout.POOL, vector=True),
    Arg("kv_cache", CACHE_DTYPES, (None, None, None), Layout.POOL, vector=True, optional=True),
    Arg("sinks", (F32,), (None,), optional=True),
    Arg("workspace", (U8,), (None,), vector=True, optional=True),
    Arg("counters", (U8,), (None,), vector=True, optional=True),
)


def check(arguments: tuple[Arg, ...], values: Mapping[str, Any], sizes: dict[str, int], device: torch.device) -> None:
    """Walks a table; the first argument that does not fit raises. `sizes` holds known sizes and collects the others."""
    for arg in arguments:
        value = values[arg.name]
        if value is None:
            if not arg.optional:
                raise InvalidArgument(arg.name, None, _described(arg, sizes))
            continue
        if not isinstance(value, torch.Tensor):
            raise InvalidArgument(arg.name, f"a {type(value).__name__}", _described(arg, sizes))
        _check_tensor(arg, value, sizes, device)


def _check_tensor(arg: Arg, value: torch.Tensor, sizes: dict[str, int], device: torch.device) -> None:
    name = arg.name
    if value.device != device:
        raise InvalidArgument(name, f"device {value.device}", f"{device}, where the other tensors are")
    if value.dtype not in arg.dtypes:
        raise InvalidArgument(name, f"dtype {value.dtype}", " or ".join(map(str, arg.dtypes)))
    if value.dim() != len(arg.shape):
        raise InvalidArgument(name, f"rank {value.dim()}, shape {list(value.shape)}", _described(arg, sizes))
    for got, want in zip(value.shape, arg.shape, strict=True):
        if not _extent_fits(got, want, sizes):
            raise InvalidArgument(name, f"shape {list(value.shape)}", _described(arg, sizes))
    if arg.layout is Layout.POOL:
        PoolGeometry.of(value, name)
    elif arg.layout is Layout.PAGES:
        gathered_format(value, name)
        check_pages(value, name)
    elif arg.layout is Layout.DENSE and not value.is_contiguous():
        raise InvalidArgument(name, f"strides {list(value.stride())}", f"{list(_dense_strides(value))}, contiguous")
    elif arg.layout is Layout.ROWS:
        _check_rows(name, value, arg.written)
    if arg.vector and value.numel():
        _require_alignment(name, value)


def _extent_fits(got: int, want: int | str | None, sizes: dict[str, int]) -> bool:
    if want is None:
        return True
    if isinstance(want, int):
        return got == want
    if want.startswith(">="):
        return got >= sizes.get(want[2:], 0)
    return sizes.setdefault(want, got) == got


def _check_rows(name: str, value: torch.Tensor, written: bool) -> None:
    """Unit last stride; where written, every outer stride at least the extent it steps over (dimensions of one entry aside)."""
    if value.numel() == 0:
        return
    if value.shape[-1] > 1 and value.stride(-1) != 1:
        raise InvalidArgument(name, f"strides {list(value.stride())}", "a last stride of 1")
    if not written:
        return
    span = value.shape[-1]
    for dim in range(value.dim() - 2, -1, -1):
        if value.shape[dim] > 1 and value.stride(dim) < span:
            raise InvalidArgument(name, f"stride {value.stride(dim)} in dimension {dim}", f"at least {span}: rows must not overlap")
        span += (value.shape[dim] - 1) * value.stride(dim)


def with_regular_empties(arguments: tuple[Arg, ...], values: Mapping[str, Any]) -> Mapping[str, Any]:
    """`values` with usable strides for empty tensors, which `check` lets have any; `values` itself where nothing changes."""
    changed = {}
    for arg in arguments:
        value = values.get(arg.name)
        if arg.layout not in (Layout.ROWS, Layout.DENSE) or not isinstance(value, torch.Tensor) or value.numel():
            continue
        strides = (ALIGNMENT, 1) if arg.layout is Layout.ROWS and value.dim() == 2 else _dense_strides(value)
        if value.stride() != strides:
            changed[arg.name] = value.as_strided(value.shape, strides)
    return {**values, **changed} if changed else values


def _dense_strides(value: torch.Tensor) -> tuple[int, ...]:
    return torch.empty(value.shape, device="meta").stride()


def _described(arg: Arg, sizes: Mapping[str, int]) -> str:
    """`[T, 2W] torch.float32 (T=5, 2W=2048)`: the rule, and the sizes it stands on."""
    dims = ["any" if want is None else str(want) for want in arg.shape]
    known = [f"{n}={sizes[n]}" for n in dict.fromkeys(d.removeprefix(">=") for d in dims) if n in sizes]
    return f"[{', '.join(dims)}] {' or '.join(map(str, arg.dtypes))}" + (f" ({', '.join(known)})" if known else "")


def _address_bits(value: torch.Tensor) -> int:
    """Address and byte strides but the last, or-ed: its lowest set bit is what all of them are multiples of.

    The row stride of a packed pool is nominal (data rows lie 576 bytes apart) and does not count.
    """
    strides = value.stride()
    steps = 0
    for stride in strides[:1] if len(strides) == 3 and value.dtype is PACKED.dtype else strides[:-1]:
        steps |= stride
    return value.data_ptr() | steps * value.element_size()


def alignment(value: torch.Tensor) -> int:
    """The largest of 32, 16, 8, ... bytes that divides the address and every stride but the last."""
    bits = _address_bits(value) | 32
    return bits & -bits


def vector_bytes(addresses: Iterable[torch.Tensor | None], strided: Iterable[torch.Tensor | None] = ()) -> int:
    """The access width, 16 or 32 bytes, that the addresses of some tensors and the strides of others allow; None: not given."""
    bits = 32
    for value in addresses:
        if value is not None:
            bits |= value.data_ptr()
    for value in strided:
        if value is not None:
            bits |= _address_bits(value)
    width = bits & -bits
    if width < ALIGNMENT:
        raise InvalidArgument("a vector-accessed tensor", f"alignment {width}", f"multiples of {ALIGNMENT} bytes")
    return width


def _require_alignment(name: str, value: torch.Tensor) -> None:
    if alignment(value) < ALIGNMENT:
        raise InvalidArgument(
            name,
            f"address {value.data_ptr():#x}, strides of {[s * value.element_size() for s in value.stride()[:-1]]} bytes",
            f"multiples of {ALIGNMENT} bytes",
            hint=f"start views at multiples of 16 bytes and pad their rows to a multiple of {ALIGNMENT // value.element_size()} elements",
        )


# Scalars ---------------------------------------------------------------------------------------------------------------


# What kernels multiply by is fp32: below its smallest normal number an inverse overflows, above its largest a scale becomes infinite.
_FP32 = torch.finfo(torch.float32)


def positive(name: str, value: Any) -> float:
    """A number above zero that fp32 holds as a normal number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not _FP32.tiny <= value <= _FP32.max:
        hint = f"{name}.item(), once: it synchronises" if isinstance(value, torch.Tensor) else ""
        raise InvalidArgument(name, repr(value), "a finite number > 0 that fp32 holds", hint=hint)
    return float(value)


def flag(name: str, value: Any) -> None:
    """True or False and nothing else."""
    if not isinstance(value, bool):
        raise InvalidArgument(name, repr(value), "True or False")


def integer(name: str, value: Any, least: int, most: int = 2**31 - 1) -> int:
    """An int in [least, most]."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise InvalidArgument(name, repr(value), f"an int, {least} <= value <= {most}")
    return value


def one_of(name: str, value: Any, allowed: tuple[Any, ...], *, hint: str = "") -> None:
    """A value among `allowed`, of their type: 4.0 is no ratio, though it equals one."""
    if type(value) is not type(allowed[0]) or value not in allowed:
        raise InvalidArgument(name, repr(value), " or ".join(map(repr, allowed)), hint=hint)


def layer_ratio(value: Any) -> None:
    """The compression ratio of a layer: 1, 4 or 128."""
    zero = type(value) is int and value == 0
    one_of("ratio", value, (1, 4, 128), hint="a window-only layer, 0 in a model's compress_ratios, has ratio 1" if zero else "")


def save_policy(value: Any) -> SavePolicy:
    """A `SavePolicy`."""
    if not isinstance(value, SavePolicy):
        raise InvalidArgument("save", repr(value), "a SavePolicy", hint="SavePolicy.EVERY_ROW, or SavePolicy(...) to save fewer rows")
    return value


def _moderate(name: str, value: Any) -> float:
    """A scale far enough from fp32's ends that neither it, nor its inverse, times a rotated row overflows."""
    if not 2.0**-100 <= (number := positive(name, value)) <= 2.0**100:
        raise InvalidArgument(name, repr(value), "a scale between 2^-100 and 2^100")
    return number


def scale(name: str, value: Any, fmt: KVFormat) -> float:
    """A per-tensor scale: finite and positive, and anything but 1.0 only with full-row FP8."""
    if value is None:
        return 1.0
    number = _moderate(name, value)
    if number != 1.0 and not fmt.scaled:
        raise InvalidArgument(name, number, f"1.0 with {fmt.name} rows", hint="per-tensor scales apply to full-row FP8 only")
    return number


# One function per public call -------------------------------------------------------------------------------------------


def compress_store_scalars(a: Mapping[str, Any]) -> None:
    """What the compiled function cannot see, in constant time: ratio, eps, policy, scale, format."""
    one_of("ratio", a["ratio"], (4, 128))
    positive("eps", a["eps"])
    flag("independent", a["independent"])
    save = save_policy(a["save"])
    if (a["kv_score"] is None) != (a["ape"] is None):
        missing, given = ("ape", "kv_score") if a["ape"] is None else ("kv_score", "ape")
        raise InvalidArgument(missing, None, f"a tensor, since {given} is given", hint="pass both, or neither where rows are saved already")
    if a["kv_score"] is not None and not save.every_row and a["seq_lens"] is None:
        raise InvalidArgument("seq_lens", None, f"an int32 tensor [R], which {save} needs")
    scale("kv_scale", a["kv_scale"], format_of(tensor("kv_cache", a["kv_cache"])))


def compress_store(a: Mapping[str, Any]) -> None:
    """All checks of `compress_store`."""
    compress_store_scalars(a)
    width = 1024 if a["ratio"] == 4 else 512
    sizes = {"ratio": a["ratio"], "W": width, "2W": 2 * width, "words": WORDS}
    device = tensor("state_slots", a["state_slots"]).device
    check(COMPRESS_STORE, a, sizes, device)
    if a["state"].shape[1] < 1:
        raise InvalidArgument("state", f"shape {list(a['state'].shape)}", "at least one row per block")
    if a["state"].shape[0] < 1:
        raise InvalidArgument("state", f"shape {list(a['state'].shape)}", "at least one block")
    if a["state_block_table"].shape[1] < 1:
        raise InvalidArgument("state_block_table", f"shape {list(a['state_block_table'].shape)}", "at least one column")


def sparse_indices_width(a: Mapping[str, Any]) -> int:
    """Columns of the compressed part: `width` rounded up to 4, or k rounded up to 4, or 0."""
    width, source, ids = a["width"], a["source"], a["ids"]
    if source is IdSource.NONE:
        if width not in (None, 0) or isinstance(width, bool):
            raise InvalidArgument("width", repr(width), "None or 0 without a compressed part")
        return 0
    if source is IdSource.ALL_GROUPS:
        if width is None:
            raise InvalidArgument("width", None, "the table's width, which IdSource.ALL_GROUPS needs")
        return (integer("width", width, 1, 2**31 - 1 - WINDOW - 4) + 3) // 4 * 4
    k = max(tensor("ids", ids).shape[-1], 1)
    columns = k if width is None else integer("width", width, k, 2**31 - 1 - WINDOW - 4)
    return (columns + 3) // 4 * 4


def sparse_indices_scalars(a: Mapping[str, Any]) -> None:
    """What the compiled function cannot see, in constant time: source against arguments, geometries, width, rows."""
    source = a["source"]
    if not isinstance(source, IdSource):
        raise InvalidArgument("source", repr(source), f"one of {', '.join(f'IdSource.{s.name}' for s in IdSource)}")
    _geometry("window", a["window"])
    flag("independent", a["independent"])
    needs = {
        "compressed": source is not IdSource.NONE,
        "ids": source in (IdSource.LOCAL, IdSource.GLOBAL),
        "compressed_block_table": source in (IdSource.LOCAL, IdSource.ALL_GROUPS),
    }
    for name, needed in needs.items():
        if needed and a[name] is None:
            raise InvalidArgument(name, None, f"a value, which {source} needs")
        if not needed and a[name] is not None:
            raise InvalidArgument(name, f"a {type(a[name]).__name__}", f"None, since {source} has no use for it")
    if source is not IdSource.NONE:
        _geometry("compressed", a["compressed"])
    if source in (IdSource.LOCAL, IdSource.ALL_GROUPS):
        integer("ratio", a["ratio"], 1)
    tokens = tensor("positions", a["positions"]).shape[0] if tensor("positions", a["positions"]).dim() else 0
    if a["num_rows"] is not None:
        integer("num_rows", a["num_rows"], tokens)


def sparse_indices(a: Mapping[str, Any], combined: bool) -> None:
    """All checks of `sparse_indices`; `a["out"]` may be None."""
    sparse_indices_scalars(a)
    device = tensor("positions", a["positions"]).device
    sizes: dict[str, int] = {}
    check(SPARSE_INDICES, a, sizes, device)
    width = sparse_indices_width(a)
    rows = sizes["T"] if a["num_rows"] is None else a["num_rows"]
    out = a["out"]
    if out is not None:
        check_indices(out, combined, {"rows": rows, "width": width, "columns": WINDOW + width}, width > 0, device)


def check_indices(
    out: CombinedIndices | SegmentIndices, combined: bool, sizes: dict[str, int], compressed: bool, device: torch.device, name: str = "out"
) -> None:
    """The tables a caller hands over, to write into (`out`) or to read from (`indices`)."""
    wanted = CombinedIndices if combined else SegmentIndices
    if not isinstance(out, wanted):
        raise InvalidArgument(
            name, f"a {type(out).__name__}", f"{wanted.__name__}, the form of the {'SM100' if combined else 'SM120'} family"
        )
    arguments = COMBINED_OUT if combined else SEGMENT_WINDOW_OUT + (SEGMENT_COMPRESSED_OUT if compressed else ())
    values = {arg.name: getattr(out, arg.name.removeprefix("out.")) for arg in arguments}
    if name != "out":
        arguments = tuple(Arg(a.name.replace("out", name, 1), a.dtypes, a.shape, a.layout, a.vector, a.optional) for a in arguments)
        values = {key.replace("out", name, 1): value for key, value in values.items()}
    check(arguments, values, sizes, device)


def qkv_insert_scalars(a: Mapping[str, Any]) -> None:
    """What the compiled function cannot see, in constant time: eps, scales, dtype of q, format, the rotation table's length."""
    one_of("backend", a["backend"], ("auto", "reference"))
    positive("eps", a["eps"])
    one_of("q_dtype", a["q_dtype"], (BF, torch.float8_e4m3fn))
    flag("apply_q_norm", a["apply_q_norm"])
    flag("independent", a["independent"])
    fmt = format_of(tensor("kv_cache", a["kv_cache"]))
    scale("kv_scale", a["kv_scale"], fmt)
    if a["q_scale"] is not None and _moderate("q_scale", a["q_scale"]) != 1.0 and a["q_dtype"] is BF:
        raise InvalidArgument("q_scale", a["q_scale"], "1.0 with bfloat16 q", hint="a q scale applies to q_dtype=torch.float8_e4m3fn only")
    if a["q_dtype"] is not BF and not fmt.scaled:
        raise InvalidArgument("q_dtype", a["q_dtype"], f"{BF} with {fmt.name} rows", hint="FP8 q goes with full-row FP8 caches")
    if tensor("cos_sin", a["cos_sin"]).dim() == 2 and a["cos_sin"].shape[0] < 1:
        raise InvalidArgument("cos_sin", f"shape {list(a['cos_sin'].shape)}", "at least one row")


def insert_heads(heads: int, padded_heads: int | None) -> int:
    """Heads of `qkv_insert`'s result."""
    if not 1 <= heads <= 128:
        raise InvalidArgument("q", f"{heads} heads", "1 to 128 heads", hint="split the heads over more GPUs (tensor parallelism)")
    return heads if padded_heads is None else integer("padded_heads", padded_heads, heads, 128)


def qkv_insert(a: Mapping[str, Any]) -> None:
    """All checks of `qkv_insert`."""
    qkv_insert_scalars(a)
    sizes: dict[str, int] = {}
    device = tensor("q", a["q"]).device
    check(QKV_INSERT, a, sizes, device)
    padded = insert_heads(sizes["H"], a["padded_heads"])
    check(QKV_INSERT_OUT, a, {**sizes, "padded_heads": padded}, device)
    if a["out"] is not None and a["out"].dtype != a["q_dtype"]:
        raise InvalidArgument("out", f"dtype {a['out'].dtype}", f"{a['q_dtype']}, which q_dtype says")


COMBINED_IN = (
    Arg("indices.table", (I32,), (">=T", "columns"), vector=True),
    Arg("indices.lengths", (I32,), (">=T",)),
)
SEGMENTS_IN = (
    Arg("indices.window", (I32,), (">=T", WINDOW), vector=True),
    Arg("indices.window_lengths", (I32,), (">=T",)),
    Arg("indices.compressed", (I32,), (">=T", "width"), vector=True, optional=True),
    Arg("indices.compressed_lengths", (I32,), (">=T",), optional=True),
)


def decode(a: Mapping[str, Any], accepted_heads: tuple[int, ...]) -> None:
    """All checks of `decode` that need no target."""
    step, indices = a["step"], a["indices"]
    if not isinstance(step, StepMetadata):
        raise InvalidArgument("step", f"a {type(step).__name__}", "a StepMetadata")
    device = tensor("q", a["q"]).device
    if step.positions.device != device:
        raise InvalidArgument("step", f"device {step.positions.device}", f"{device}, where q is")
    sizes = {"T": step.num_tokens}
    check(DECODE, a, sizes, device)
    heads = sizes["H"]
    if heads not in accepted_heads:
        raise InvalidArgument(
            "q", f"{heads} heads", f"a padded count, {', '.join(map(str, accepted_heads))}", hint="pad with pad_q_heads(n)"
        )
    num_heads = heads if a["num_heads"] is None else integer("num_heads", a["num_heads"], 1, heads)
    swa = format_of(a["swa_cache"], "swa_cache")
    if a["kv_cache"] is not None and format_of(a["kv_cache"]) is not swa:
        raise InvalidArgument("kv_cache", f"{format_of(a['kv_cache']).name} rows", f"{swa.name} rows, as swa_cache")
    if a["q"].dtype != (wanted := torch.float8_e4m3fn if swa.scaled else BF):
        raise InvalidArgument("q", f"dtype {a['q'].dtype}", f"{wanted} with {swa.name} caches")
    if a["sinks"] is not None and a["sinks"].shape[0] not in (num_heads, heads):
        raise InvalidArgument("sinks", f"shape {list(a['sinks'].shape)}", f"[{num_heads}] (heads) or [{heads}] (padded heads)")
    scales = positive("sm_scale", a["sm_scale"]), scale("q_scale", a["q_scale"], swa), scale("kv_scale", a["kv_scale"], swa)
    positive("sm_scale * q_scale * kv_scale", math.prod(scales))
    if a["out"] is not None and a["rope_cos_sin"] is None:
        check((Arg("out", (BF,), (">=T", "H", HEAD_DIM), vector=True),), a, sizes, device)
    _decode_indices(indices, a["kv_cache"], sizes, device)


def _decode_indices(indices: Any, kv_cache: torch.Tensor | None, sizes: dict[str, int], device: torch.device) -> None:
    if not isinstance(indices, CombinedIndices | SegmentIndices):
        raise InvalidArgument("indices", f"a {type(indices).__name__}", "CombinedIndices or SegmentIndices")
    values = {f"indices.{name}": value for name, value in vars(indices).items()}
    if isinstance(indices, CombinedIndices):
        check(COMBINED_IN, values, sizes, device)
        if sizes["columns"] < WINDOW or sizes["columns"] % 4:
            raise InvalidArgument("indices.table", f"{sizes['columns']} columns", f"{WINDOW} and a multiple of 4 more")
        compressed = sizes["columns"] > WINDOW
    else:
        window = tensor("indices.window", indices.window)
        if window.dim() == 2 and window.shape[1] > WINDOW:
            raise UnsupportedRequest(
                f"a window of {window.shape[1]} columns (DSpark)",
                device=device,
                supported=f"{WINDOW} columns",
                nearest="tables of sparse_indices, one row per draft token",
            )
        check(SEGMENTS_IN, values, sizes, device)
        if (indices.compressed is None) != (indices.compressed_lengths is None):
            missing = "compressed" if indices.compressed is None else "compressed_lengths"
            raise InvalidArgument(f"indices.{missing}", None, "a tensor, since the other half of the compressed part is given")
        compressed = indices.compressed is not None
    if compressed and kv_cache is None:
        raise InvalidArgument("kv_cache", None, "the compressed pool that the tables point into", hint="None is for window-only layers")


def tensor(name: str, value: Any) -> torch.Tensor:
    """A tensor, of any kind."""
    if not isinstance(value, torch.Tensor):
        raise InvalidArgument(name, "None" if value is None else f"a {type(value).__name__}", "a torch.Tensor")
    return value


def on_cpu_or_cuda(name: str, value: Any) -> torch.Tensor:
    """A tensor on a device that some path serves."""
    if tensor(name, value).device.type not in ("cpu", "cuda"):
        raise InvalidArgument(name, f"device {value.device}", "cpu or cuda")
    return value


def _geometry(name: str, value: Any) -> None:
    if not isinstance(value, PoolGeometry):
        raise InvalidArgument(
            name, "None" if value is None else f"a {type(value).__name__}", "a PoolGeometry", hint="PoolGeometry.of(cache)"
        )
