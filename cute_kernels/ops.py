"""The public calls. Tensors come first, everything else by keyword; every tensor's shape and dtype stands in the docstring.

CPU tensors run the reference, CUDA tensors a compiled kernel, and nothing on a GPU falls back silently. A call's arguments are
guarded by the compiled function itself; when it refuses, `validate` names the argument, what it was and what it should be.
`bind` turns the arguments that stay between calls into prepared ones, once.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from cute_kernels import dispatch, torch_ops, validate, value_checks
from cute_kernels.compile.spec import CompressStoreSpec, KernelSpec, QkvInsertSpec, SparseIndicesSpec
from cute_kernels.errors import InvalidArgument
from cute_kernels.gather_ops import CONVERT_INDICES, GATHER_UPCONVERT
from cute_kernels.gather_ops import convert_indices as convert_indices
from cute_kernels.gather_ops import gather_upconvert as gather_upconvert
from cute_kernels.indices import CombinedIndices, IdSource, Indices, SegmentIndices
from cute_kernels.kv_format import HEAD_DIM, WINDOW, PoolGeometry, format_of
from cute_kernels.launching import Operation as _Operation
from cute_kernels.launching import Plan as _Plan
from cute_kernels.launching import reference_call
from cute_kernels.save_policy import SavePolicy
from cute_kernels.step import StepMetadata
from cute_kernels.target import Target


def compress_store(
    kv_score: torch.Tensor | None,
    ape: torch.Tensor | None,
    state: torch.Tensor,
    state_block_table: torch.Tensor,
    positions: torch.Tensor,
    token_to_req: torch.Tensor,
    state_slots: torch.Tensor,
    kv_slots: torch.Tensor,
    norm_weight: torch.Tensor,
    cos_sin: torch.Tensor,
    kv_cache: torch.Tensor,
    *,
    ratio: int,
    eps: float,
    kv_scale: float | None = None,
    save: SavePolicy = SavePolicy.EVERY_ROW,
    seq_lens: torch.Tensor | None = None,
    target: Target | str | None = None,
) -> None:
    """One step of a layer's compressor: saves this step's rows and stores one KV row for every group that a row closes.

    With W = 1024 (ratio 4) or 512 (ratio 128), T rows, R requests:

    kv_score           [>= T, 2W] fp32     W values, then W scores of each row; None: every row lies in `state` already
    ape                [ratio, W] fp32     added to the scores by position modulo ratio; None with kv_score=None
    state              [blocks, block rows, 2W] fp32, any block stride: rows of earlier steps, scores with ape added; written
    state_block_table  [R, columns] int32  state block of each `block rows` tokens of a request
    positions          [any] int64         position of each row in its request
    token_to_req       [any] int32         request of each row
    state_slots        [T] int64           where the row is saved in `state`; negative: padding row
    kv_slots           [any] int64         where the compressed row goes in `kv_cache`; negative: no compressed row
    norm_weight        [512] bf16
    cos_sin            [P, 64] fp32        cosines, then sines, of each position
    kv_cache           [pages, page rows, 512] bf16 or e4m3, or [pages, page rows, 584] uint8 (packed), any page stride; written
    ratio              4 or 128
    eps                of the RMS norm
    kv_scale           the cache's FP8 scale; None or 1.0 with other formats
    save               which rows are saved
    seq_lens           [R] int32           tokens of each request, this step's included; needed unless every row is saved
    target             Target or name; default: the tensors' device

    Rows past the end of positions, token_to_req or kv_slots are padding too. Source of the mathematics: docs/spec.md,
    "Compressor". Raises `InvalidArgument`, `UnsupportedRequest`, `MissingKernel` (frozen or capturing, and not warmed up).
    """
    if torch.compiler.is_compiling():
        tensors = (kv_score, ape, state, state_block_table, positions, token_to_req, state_slots, kv_slots, norm_weight, cos_sin, kv_cache)
        return torch_ops.compress_store(*tensors, ratio, eps, kv_scale, save, seq_lens, target)
    _COMPRESS_STORE.run(locals())


def sparse_indices(
    positions: torch.Tensor,
    token_to_req: torch.Tensor,
    window_block_table: torch.Tensor,
    ids: torch.Tensor | None = None,
    compressed_block_table: torch.Tensor | None = None,
    *,
    window: PoolGeometry,
    compressed: PoolGeometry | None = None,
    source: IdSource = IdSource.NONE,
    ratio: int = 1,
    width: int | None = None,
    slots: torch.Tensor | None = None,
    num_rows: int | None = None,
    out: Indices | None = None,
    target: Target | str | None = None,
) -> Indices:
    """Which cache rows each query row attends to: its window, and its selected compressed entries.

    positions               [T] int64         position of each row in its request
    token_to_req            [any] int32       request of each row
    window_block_table      [R, columns] int32, unit column stride: page of each page_rows tokens in the window cache
    ids                     [any, k] int32, unit column stride: compressed entries, by number in the request (LOCAL) or as slots
                            (GLOBAL); None for the other sources
    compressed_block_table  [R, columns] int32, unit column stride: page of each page_rows entries (LOCAL, ALL_GROUPS)
    window, compressed      geometry of the two pools: `PoolGeometry.of(cache)`
    source                  where compressed entries come from
    ratio                   tokens per compressed entry (LOCAL, ALL_GROUPS)
    width                   columns of the compressed part, rounded up to 4; default k; needed for ALL_GROUPS
    slots                   [any] int64       a negative slot marks a padding row; None: no row is marked
    num_rows                rows of the tables, at least T (default T); rows past T are padding rows
    out                     tables to write into, of exactly the result's shapes; default: new ones
    target                  Target or name; default: the tensors' device. CPU tensors without one give the SM100 form

    Returns `CombinedIndices` (SM100 family: storage rows, lengths count the 128 window columns) or `SegmentIndices` (SM120
    family: slots). Valid entries keep their order; -1 in every lane after. An id outside its range, its block table or its
    pool is dropped. Rows past the end of token_to_req or slots are padding: all -1, length 128 or 0.
    Source of the rules: docs/spec.md, "Index tables". Raises `InvalidArgument`, `UnsupportedRequest`, `MissingKernel`.
    """
    if torch.compiler.is_compiling():
        tensors = (positions, token_to_req, window_block_table, ids, compressed_block_table)
        return torch_ops.sparse_indices(*tensors, window, compressed, source, ratio, width, slots, num_rows, out, target)
    return _SPARSE_INDICES.run(locals())


def qkv_insert(
    q: torch.Tensor,
    kv: torch.Tensor,
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    *,
    eps: float,
    padded_heads: int | None = None,
    apply_q_norm: bool = True,
    q_scale: float | None = None,
    kv_scale: float | None = None,
    q_dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
    backend: str = "auto",
    target: Target | str | None = None,
) -> torch.Tensor:
    """Norm and RoPE of q into a buffer of padded heads, and RoPE and store of this step's KV rows in the window cache.

    q          [N, H, 512] bf16, unit last stride; each head is RMS-normalised (no weight) and rotated at its row's position
    kv         [N, 512] bf16, unit last stride, normalised already; rotated, then stored
    kv_cache   [pages, page rows, 512] bf16 or e4m3, or [pages, page rows, 584] uint8 (packed), any page stride; written
    slots      [any] int64    row of `kv_cache` for each row; negative or past the end: nothing is stored
    positions  [N] int64
    cos_sin    [P, 64] fp32   cosines, then sines, of each position; P >= 1
    eps           of the RMS norm
    padded_heads  heads of the result, H <= padded_heads <= 128 (`pad_q_heads(H)`); default H; the heads past H are zero
    apply_q_norm  False: q is normalised already
    q_scale       divides FP8 q; None or 1.0 with bf16 q
    kv_scale      the cache's FP8 scale; None or 1.0 with other formats
    q_dtype       torch.bfloat16, or torch.float8_e4m3fn with an FP8 cache
    out           [N, padded_heads, 512] of q_dtype, contiguous; default: a new tensor. `q` itself where dtype and heads agree
    backend       "auto" or "reference" (plain PyTorch, on any device)
    target        Target or name; default: the tensors' device

    Returns q_out [N, padded_heads, 512]; a row whose position has no row in `cos_sin` has q zero and stores nothing. Source of the
    mathematics: docs/spec.md, "Insert". Raises `InvalidArgument`, `UnsupportedRequest`, `MissingKernel`.
    """
    if torch.compiler.is_compiling():
        tensors = (q, kv, kv_cache, slots, positions, cos_sin)
        return torch_ops.qkv_insert(*tensors, eps, padded_heads, apply_q_norm, q_scale, kv_scale, q_dtype, out, backend, target)
    return _QKV_INSERT.run(locals())


def decode(
    q: torch.Tensor,
    swa_cache: torch.Tensor,
    kv_cache: torch.Tensor | None,
    step: StepMetadata,
    indices: Indices,
    *,
    num_heads: int | None = None,
    sinks: torch.Tensor | None = None,
    sm_scale: float = HEAD_DIM**-0.5,
    q_scale: float = 1.0,
    kv_scale: float = 1.0,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    counters: torch.Tensor | None = None,
    rope_cos_sin: torch.Tensor | None = None,
    output_scale: torch.Tensor | None = None,
    backend: str = "auto",
    target: Target | str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Sparse MLA attention of this step's rows, decode and prefill rows alike, through FlashInfer or the reference.

    With T = step.num_tokens:

    q          [>= T, padded heads, 512] bf16 or e4m3, contiguous; padded heads is a count FlashInfer accepts (`pad_q_heads`).
               The dtype is the cache's; bf16 with packed rows. Rows past T and heads past num_heads are never read into real ones
    swa_cache  [pages, page rows, 512] bf16 or e4m3, or [pages, page rows, 584] uint8 (packed), any page stride
    kv_cache   likewise, compressed rows; None (or swa_cache) for a window-only layer
    step       the step's rows, requests and lengths
    indices    of `sparse_indices`, at least T rows
    num_heads  real heads; default: all of q's
    sinks      [num_heads] or [padded heads] fp32, natural-log logits that enlarge the denominator only. A tensor of fewer than
               padded heads is padded with -inf on each call
    sm_scale, q_scale, kv_scale   finite and positive; the latter two are 1.0 unless q and caches are FP8
    out        [>= T, padded heads, 512] bf16, contiguous; default: a new tensor of T rows
    workspace  [bytes] uint8, contiguous; default: one per device and stream (`allocate_workspace`)
    counters   [bytes] uint8, contiguous, zero before first use; default: one per device and stream
    rope_cos_sin, output_scale    FlashInfer's RopeQuant arguments, passed through (SM100, FP8, 128 heads): fp32 [P, 64], and
               an optional int32 scale tensor; the call then returns FlashInfer's pair (e4m3 output, scales)
    backend    "auto" (CPU: reference, 10.x and 12.x: FlashInfer), "flashinfer", or "reference" on any device
    target     Target or name; default: the tensors' device

    Returns out[:T, :num_heads], a view. Source of the mathematics: docs/spec.md, "Attention". Raises `InvalidArgument`,
    `UnsupportedRequest`.
    """
    if torch.compiler.is_compiling():
        scales = (sm_scale, q_scale, kv_scale)
        memory = (out, workspace, counters, rope_cos_sin)
        return torch_ops.decode(q, swa_cache, kv_cache, step, indices, num_heads, sinks, *scales, *memory, backend, target)
    return dispatch.decode(**locals())


# Launching -------------------------------------------------------------------------------------------------------------


def _check_compress_store(a: Mapping[str, Any], target: Target | None) -> None:
    validate.compress_store(a)
    dispatch.require_format(format_of(a["kv_cache"]), target)


def _plan_compress_store(a: Mapping[str, Any], target: Target, vectors: tuple[validate.Arg, ...], widest: int) -> _Plan:
    rows = a["state_slots"].shape[0]
    if rows == 0:
        return None, {}, None
    cache, score, seq_lens, state = a["kv_cache"], a["kv_score"], a["seq_lens"], a["state"]
    # What no symbol of the compiled function ties to another argument.
    if (
        (score is not None and score.shape[0] < rows)
        or (seq_lens is not None and seq_lens.shape[0] != a["state_block_table"].shape[0])
        or state.stride(1) < state.shape[2]
        or state.stride(0) < state.stride(1) * state.shape[1]
        or 0 in state.shape
        or 0 in a["state_block_table"].shape
    ):
        validate.compress_store(a)
    given = (score is not None, a["ape"] is not None, seq_lens is not None)
    scalars = (a["ratio"], a["eps"], a["kv_scale"], a["save"])
    width = validate.vector_bytes(vectors, a, widest)
    spec, more = _compress_store_spec(target, width, *scalars, *given, cache.dtype, cache.shape, cache.stride())
    return spec, {**a, **more}, None


@functools.lru_cache(maxsize=4096, typed=True)
def _compress_store_spec(
    target: Target,
    vector_bytes: int,
    ratio: int,
    eps: float,
    kv_scale: float | None,
    save: SavePolicy,
    scores: bool,
    ape: bool,
    seq_lens: bool,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
) -> tuple[KernelSpec, dict[str, Any]]:
    """The spec and scalar arguments of a call, checked; remembered, because a layer asks for the same ones on every step."""
    from cute_kernels.reference.quant import inverse_scale

    cache = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    tensors = {"kv_score": scores or None, "ape": ape or None, "seq_lens": seq_lens or None, "kv_cache": cache}
    validate.compress_store_scalars({"ratio": ratio, "eps": eps, "kv_scale": kv_scale, "save": save, **tensors})
    fmt = format_of(cache)
    dispatch.require_format(fmt, target)
    PoolGeometry.of(cache)
    kind = "none" if not scores else "every_row" if save.every_row else "policy"
    spec = CompressStoreSpec(target, vector_bytes, ratio=ratio, kv_format=fmt.name, scores=scores, save=kind)
    numbers = {"eps": float(eps), "inverse_kv_scale": inverse_scale(kv_scale)}
    return spec, {**numbers, "rollback": save.rollback, "prefix_stride": save.prefix_stride}


def _check_sparse_indices(a: Mapping[str, Any], target: Target | None) -> None:
    validate.sparse_indices(a, dispatch.combined_form(target))


def new_tables(rows: int, width: int, combined: bool, device: torch.device) -> Indices:
    """Unfilled index tables of `rows` rows and `width` compressed columns, in a family's form."""

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    if combined:
        return CombinedIndices(empty(rows, WINDOW + width), empty(rows))
    return SegmentIndices(empty(rows, WINDOW), empty(rows), *((empty(rows, width), empty(rows)) if width else ()))


def _plan_sparse_indices(a: Mapping[str, Any], target: Target, vectors: tuple[validate.Arg, ...], widest: int) -> _Plan:
    positions, ids, num_rows, out = a["positions"], a["ids"], a["num_rows"], a["out"]
    k = None if ids is None else ids.shape[1]
    given = (a["compressed_block_table"] is not None, a["slots"] is not None)
    width, sizes = _sparse_indices_sizes(a["source"], a["ratio"], a["width"], k, a["window"], a["compressed"], given[0])
    tokens = positions.shape[0]
    rows = tokens if num_rows is None else validate.integer("num_rows", num_rows, tokens)
    combined = dispatch.combined_form(target)
    if out is None:
        out = new_tables(rows, width, combined, positions.device)
    elif not _has_shape(out, combined, rows, width):  # no symbol of the compiled function ties them to other arguments
        validate.check_indices(out, combined, {"rows": rows, "width": width, "columns": WINDOW + width}, width > 0, positions.device)
    if rows == 0:
        return None, {}, out
    if combined:
        written = {"table": out.table, "lengths": out.lengths}
        accessed = {"ids": ids, "out.table": out.table}
    else:
        written = {"window_table": out.window, "window_lengths": out.window_lengths}
        written |= {"compressed_table": out.compressed, "compressed_lengths": out.compressed_lengths}
        accessed = {"ids": ids, "out.window": out.window, "out.compressed": out.compressed}
    spec = _sparse_indices_spec(target, validate.vector_bytes(vectors, accessed, widest), a["source"], given[1])
    return spec, {**a, **written, **sizes}, out


def _has_shape(out: Any, combined: bool, rows: int, width: int) -> bool:
    """Whether tables have the result's form, extents and dense rows; the compiled function checks the rest."""
    if not all(table is None or table.is_contiguous() for table in vars(out).values()):
        return False
    if combined:
        return type(out) is CombinedIndices and out.table.shape == (rows, WINDOW + width) and out.lengths.shape == (rows,)
    if type(out) is not SegmentIndices or out.window.shape != (rows, WINDOW) or out.window_lengths.shape != (rows,):
        return False
    if not width or out.compressed is None or out.compressed_lengths is None:
        return not width
    return out.compressed.shape == (rows, width) and out.compressed_lengths.shape == (rows,)


@functools.lru_cache(maxsize=4096, typed=True)
def _sparse_indices_sizes(
    source: IdSource,
    ratio: int,
    width: int | None,
    k: int | None,
    window: PoolGeometry,
    compressed: PoolGeometry | None,
    compressed_block_table: bool,
) -> tuple[int, dict[str, int]]:
    """Width of the compressed part and scalar arguments of a call, checked; remembered like `_compress_store_spec`."""
    ids = None if k is None else torch.empty((0, k), device="meta")
    table = compressed_block_table or None
    a = {"source": source, "ratio": ratio, "width": width, "ids": ids, "window": window, "compressed": compressed}
    validate.sparse_indices_scalars({**a, "compressed_block_table": table, "positions": torch.empty(0, device="meta"), "num_rows": None})
    sizes = {"window_pages": window.pages, "window_page_rows": window.page_rows, "window_span": window.span, "ratio": ratio}
    if compressed is not None:
        sizes |= {"compressed_pages": compressed.pages, "compressed_page_rows": compressed.page_rows, "compressed_span": compressed.span}
    return validate.sparse_indices_width(a), sizes


@functools.lru_cache(maxsize=256)
def _sparse_indices_spec(target: Target, vector_bytes: int, source: IdSource, slots: bool) -> KernelSpec:
    return SparseIndicesSpec(target, vector_bytes, source=source.value, slots=slots)


def _check_qkv_insert(a: Mapping[str, Any], target: Target | None) -> None:
    validate.qkv_insert(a)
    dispatch.require_format(format_of(a["kv_cache"]), target)


def _plan_qkv_insert(a: Mapping[str, Any], target: Target, vectors: tuple[validate.Arg, ...], widest: int) -> _Plan:
    q, out, cache = a["q"], a["out"], a["kv_cache"]
    padded = _insert_heads(q.shape[1], a["padded_heads"])
    shape = (q.shape[0], padded, HEAD_DIM)
    if out is None:
        out = torch.empty(shape, dtype=a["q_dtype"], device=q.device)
    elif out.shape != shape or not out.is_contiguous():  # no symbol of the compiled function ties its extents to other arguments
        validate.qkv_insert(a)
    if shape[0] == 0:
        return None, {}, out
    scalars = (a["eps"], a["q_scale"], a["kv_scale"], a["q_dtype"], a["apply_q_norm"], a["backend"], a["cos_sin"].shape[0])
    width = validate.vector_bytes(vectors, {**a, "out": out}, widest)
    spec, more = _qkv_insert_spec(target, width, *scalars, cache.dtype, cache.shape, cache.stride())
    return spec, {**a, **more, "out": out}, out


_insert_heads = functools.lru_cache(maxsize=256, typed=True)(validate.insert_heads)


@functools.lru_cache(maxsize=4096, typed=True)
def _qkv_insert_spec(
    target: Target,
    vector_bytes: int,
    eps: float,
    q_scale: float | None,
    kv_scale: float | None,
    q_dtype: torch.dtype,
    apply_q_norm: bool,
    backend: str,
    positions: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
) -> tuple[KernelSpec, dict[str, Any]]:
    """The spec and scalar arguments of a call, checked; remembered like `_compress_store_spec`."""
    from cute_kernels.reference.quant import inverse_scale

    cache = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    table = torch.empty((positions, 0), device="meta")
    scalars = {"eps": eps, "q_scale": q_scale, "kv_scale": kv_scale, "q_dtype": q_dtype, "apply_q_norm": apply_q_norm, "backend": backend}
    validate.qkv_insert_scalars({**scalars, "kv_cache": cache, "cos_sin": table})
    fmt = format_of(cache)
    dispatch.require_format(fmt, target)
    PoolGeometry.of(cache)
    name = "bf16" if q_dtype is torch.bfloat16 else "e4m3"
    spec = QkvInsertSpec(target, vector_bytes, kv_format=fmt.name, q_dtype=name, apply_q_norm=apply_q_norm)
    return spec, {"eps": float(eps), "inverse_q_scale": inverse_scale(q_scale), "inverse_kv_scale": inverse_scale(kv_scale)}


_COMPRESS_STORE = _Operation(
    public=compress_store,
    anchor="state_slots",
    tensors=validate.COMPRESS_STORE,
    vectors=tuple(arg for arg in validate.COMPRESS_STORE if arg.vector),
    check=_check_compress_store,
    value_check=value_checks.compress_store,
    plan=_plan_compress_store,
    reference=lambda a, target: reference_call("compress_store", a),
)
_SPARSE_INDICES = _Operation(
    public=sparse_indices,
    anchor="positions",
    tensors=validate.SPARSE_INDICES,
    vectors=tuple(
        arg
        for arg in validate.SPARSE_INDICES + validate.COMBINED_OUT + validate.SEGMENT_WINDOW_OUT + validate.SEGMENT_COMPRESSED_OUT
        if arg.vector
    ),
    check=_check_sparse_indices,
    value_check=value_checks.sparse_indices,
    plan=_plan_sparse_indices,
    reference=lambda a, target: reference_call("sparse_indices", a, form="combined" if dispatch.combined_form(target) else "segments"),
)
_QKV_INSERT = _Operation(
    public=qkv_insert,
    anchor="q",
    tensors=validate.QKV_INSERT + validate.QKV_INSERT_OUT,
    vectors=tuple(arg for arg in validate.QKV_INSERT + validate.QKV_INSERT_OUT if arg.vector),
    check=_check_qkv_insert,
    value_check=value_checks.qkv_insert,
    plan=_plan_qkv_insert,
    reference=lambda a, target: reference_call("qkv_insert", a),
)
_OPERATIONS = {op.public: op for op in (GATHER_UPCONVERT, CONVERT_INDICES, _COMPRESS_STORE, _SPARSE_INDICES, _QKV_INSERT)}


# Prepared arguments ----------------------------------------------------------------------------------------------------


class Bound:
    """A public call with some arguments fixed; see `bind`."""

    def __init__(self, call: Callable[..., Any], kept: Mapping[str, Any]) -> None:
        self._call = call
        signature = inspect.signature(call)
        for name in kept:
            if name not in signature.parameters:
                raise InvalidArgument(name, "a value to bind", f"an argument of {call.__name__}: {', '.join(signature.parameters)}")
        self._defaults = {n: p.default for n, p in signature.parameters.items() if p.default is not inspect.Parameter.empty}
        self._names = frozenset(signature.parameters)
        self._kept = dict(kept)
        self._required = self._names - self._defaults.keys() - self._kept.keys()
        self._accepted: set[tuple[str, ...]] = set()
        self._operation = _OPERATIONS.get(call)
        self._target: Target | None = None
        self._prepared: dict[str, Any] = {}
        tensors = {n: v for n, v in self._kept.items() if isinstance(v, torch.Tensor)}
        devices = {str(t.device) for t in tensors.values()}
        if len(devices) > 1:
            raise InvalidArgument(next(iter(tensors)), f"devices {', '.join(sorted(devices))}", "one device for all tensors of a call")
        if kept.get("backend") == "reference":
            self._operation = None
        if self._operation is not None and tensors and next(iter(tensors.values())).device.type == "cuda":
            self._prepare(self._operation, tensors)

    def _prepare(self, operation: _Operation, tensors: Mapping[str, torch.Tensor]) -> None:
        """Checks the kept tensors one by one and converts them for the compiled function."""
        import tvm_ffi

        device = next(iter(tensors.values())).device
        self._target = dispatch.resolve_target(device, self._kept.get("target"))
        assert self._target is not None
        table = {arg.name: arg for arg in operation.tensors}
        validate.check(tuple(table[n] for n in tensors), tensors, {}, device)
        tensors = validate.with_regular_empties(operation.tensors, tensors)
        self._widest = validate.vector_bytes(operation.vectors, tensors, self._target.vector_bytes)
        self._vectors = tuple(arg for arg in operation.vectors if arg.name not in tensors)
        # The anchor stays a torch tensor: from it TVM-FFI learns torch's current stream on each call.
        self._prepared = {n: tvm_ffi.from_dlpack(t) for n, t in tensors.items() if n != operation.anchor}

    def __call__(self, **varying: Any) -> Any:
        """The call with the kept arguments and these, all by name."""
        names = tuple(varying)
        if names not in self._accepted:
            self._require_names(varying)
            self._accepted.add(names)
        a = {**self._defaults, **self._kept, **varying}
        if self._operation is None or self._target is None or a.get("backend") == "reference" or torch.compiler.is_compiling():
            return self._call(**a)
        return self._operation.launch(a, self._target, self._vectors, self._widest, self._prepared)

    def _require_names(self, varying: Mapping[str, Any]) -> None:
        for name in sorted(self._required - varying.keys()):
            raise InvalidArgument(name, "nothing", f"a value: it is neither bound nor given to {self._call.__name__}")
        for name in sorted(varying.keys() - self._names):
            raise InvalidArgument(name, "a value", f"an argument of {self._call.__name__}")
        for name in sorted(varying.keys() & self._kept.keys()):
            raise InvalidArgument(name, "a value", "nothing: it is bound already")


def bind(call: Callable[..., Any], **kept: Any) -> Bound:
    """`call` (any public call with tensors) with the arguments that stay between calls prepared once.

    Weights, tables, caches and step buffers that keep their address are checked and converted here; the result takes the
    remaining arguments by name. A tensor bound here must not be reallocated; its contents may change.
    """
    known = (compress_store, sparse_indices, qkv_insert, gather_upconvert, convert_indices, decode)
    if call not in known:
        raise InvalidArgument("call", getattr(call, "__name__", repr(call)), "one of " + ", ".join(k.__name__ for k in known))
    return Bound(call, kept)
