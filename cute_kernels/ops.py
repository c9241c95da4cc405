"""The public calls. Tensors come first, everything else by keyword; every tensor's shape and dtype stands in the docstring.

CPU tensors run the reference, CUDA tensors a compiled kernel, and nothing on a GPU falls back silently. A call's arguments are
guarded by the compiled function itself; when it refuses, `validate` names the argument, what it was and what it should be.
`bind` turns the arguments that stay between calls into prepared ones, once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.compiler import is_compiling

from cute_kernels import dispatch, torch_ops, validate, value_checks
from cute_kernels.binding import Bound
from cute_kernels.compile.spec import CompressStoreSpec, QkvInsertSpec, SparseIndicesSpec
from cute_kernels.errors import InvalidArgument
from cute_kernels.gather_ops import CONVERT_INDICES, GATHER_UPCONVERT
from cute_kernels.gather_ops import convert_indices as convert_indices
from cute_kernels.gather_ops import gather_upconvert as gather_upconvert
from cute_kernels.indices import CombinedIndices, IdSource, Indices, SegmentIndices
from cute_kernels.kv_format import HEAD_DIM, WINDOW, PoolGeometry, format_of
from cute_kernels.launching import Operation, Plan, Refused, reference_call
from cute_kernels.save_policy import SavePolicy
from cute_kernels.scratch import WORDS, no_scratch
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
    scratch: torch.Tensor | None = None,
    independent: bool = False,
    target: Target | str | None = None,
) -> None:
    """One step of a layer's compressor: saves this step's rows and stores one KV row for every group that a row closes.

    With W = 1024 (ratio 4) or 512 (ratio 128), T rows, R requests:

    kv_score           [>= T, 2W] fp32     W values, then W scores of each row; None: every row lies in `state` already
    ape                [ratio, W] fp32     added to the scores by position modulo ratio; finite; None with kv_score=None
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
    scratch            [>= 786688] int32   from `compress_scratch`, zeros before its first use: where blocks share out a step's last rows
                       (ratio 4), and meet that share a window (ratio 128 on the SM120 family; SM100's kernel does not look at it).
                       None, or `independent`: the same bytes, later. Launches that may run at the same time need one each
    independent        True: runs beside the launch in front of it. The caller promises what docs/design.md asks, "Independent launches"
    target             Target or name; default: the tensors' device

    Rows past the end of positions, token_to_req or kv_slots are padding too. A request's rows are consecutive in the step and
    ascending, and no state row that this step saves is one that a window of it reads from the pool: the launch has no order
    between the two. Source of the mathematics: docs/spec.md, "Compressor". Raises `InvalidArgument`, `UnsupportedRequest`,
    `MissingKernel` (frozen or capturing, and not warmed up).
    """
    if is_compiling():
        tensors = (kv_score, ape, state, state_block_table, positions, token_to_req, state_slots, kv_slots, norm_weight, cos_sin, kv_cache)
        return torch_ops.compress_store(*tensors, ratio, eps, kv_scale, save, seq_lens, scratch, target)
    _COMPRESS_STORE.run(
        kv_score, ape, state, state_block_table, positions, token_to_req, state_slots, kv_slots, norm_weight, cos_sin, kv_cache,
        ratio, eps, kv_scale, save, seq_lens, scratch, independent, target,
    )  # fmt: skip


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
    independent: bool = False,
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
    independent             as for `compress_store`
    target                  Target or name; default: the tensors' device. CPU tensors without one give the SM100 form

    Returns `CombinedIndices` (SM100 family: storage rows, lengths count the 128 window columns) or `SegmentIndices` (SM120
    family: slots). Valid entries keep their order; -1 in every lane after. An id outside its range, its block table or its
    pool is dropped. Rows past the end of token_to_req or slots are padding: all -1, length 128 or 0.
    Source of the rules: docs/spec.md, "Index tables". Raises `InvalidArgument`, `UnsupportedRequest`, `MissingKernel`.
    """
    if is_compiling():
        tensors = (positions, token_to_req, window_block_table, ids, compressed_block_table)
        return torch_ops.sparse_indices(*tensors, window, compressed, source, ratio, width, slots, num_rows, out, target)
    return _SPARSE_INDICES.run(
        positions, token_to_req, window_block_table, ids, compressed_block_table, window, compressed, source, ratio, width,
        slots, num_rows, out, independent, target,
    )  # fmt: skip


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
    independent: bool = False,
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
    independent   as for `compress_store`
    backend       "auto" or "reference" (plain PyTorch, on any device)
    target        Target or name; default: the tensors' device

    Returns q_out [N, padded_heads, 512]; a row whose position has no row in `cos_sin` has q zero and stores nothing. Source of the
    mathematics: docs/spec.md, "Insert". Raises `InvalidArgument`, `UnsupportedRequest`, `MissingKernel`.
    """
    if is_compiling():
        tensors = (q, kv, kv_cache, slots, positions, cos_sin)
        return torch_ops.qkv_insert(*tensors, eps, padded_heads, apply_q_norm, q_scale, kv_scale, q_dtype, out, backend, target)
    return _QKV_INSERT.run(
        q, kv, kv_cache, slots, positions, cos_sin, eps, padded_heads, apply_q_norm, q_scale, kv_scale, q_dtype, out,
        independent, backend, target,
    )  # fmt: skip


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
    if is_compiling():
        scales = (sm_scale, q_scale, kv_scale)
        memory = (out, workspace, counters, rope_cos_sin)
        return torch_ops.decode(q, swa_cache, kv_cache, step, indices, num_heads, sinks, *scales, *memory, backend, target)
    return dispatch.decode(**locals())


# Launching -------------------------------------------------------------------------------------------------------------


def _check_compress_store(a: Mapping[str, Any], target: Target | None) -> None:
    validate.compress_store(a)
    dispatch.require_format(format_of(a["kv_cache"]), target)


def _compress_facts(a: Mapping[str, Any]) -> tuple[Any, ...]:
    rows = a["state_slots"].shape[0]
    requests, columns = a["state_block_table"].shape
    score, seq_lens, state, cache = a["kv_score"], a["seq_lens"], a["state"], a["kv_cache"]
    return (
        rows > 0,
        columns > 0,
        None if score is None else score.shape[0] >= rows,
        a["ape"] is not None,
        None if seq_lens is None else seq_lens.shape[0] == requests,
        a["scratch"] is None or a["scratch"].shape[0] >= WORDS,
        a["ratio"],
        a["eps"],
        a["kv_scale"],
        a["save"],
        a["independent"],
        cache.dtype,
        cache.shape,
        cache.stride(),
        state.shape,
        state.stride(),
    )


@functools.lru_cache(maxsize=4096, typed=True)
def _plan_compress_store(
    target: str,
    rows: bool,
    columns: bool,
    scores: bool | None,
    ape: bool,
    seq_lens: bool | None,
    scratch: bool,
    ratio: int,
    eps: float,
    kv_scale: float | None,
    save: SavePolicy,
    independent: bool,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    state_shape: tuple[int, ...],
    state_strides: tuple[int, ...],
) -> Plan:
    """scores, seq_lens: None without the tensor, False where it is too short; scratch likewise, True without."""
    from cute_kernels.reference.quant import inverse_scale

    cache = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    state = torch.empty_strided(state_shape, state_strides, device="meta")
    tensors = {"kv_score": scores, "ape": ape or None, "seq_lens": seq_lens, "kv_cache": cache}
    validate.compress_store_scalars({"ratio": ratio, "eps": eps, "kv_scale": kv_scale, "save": save, "independent": independent, **tensors})
    if not columns or scores is False or seq_lens is False or not scratch or 0 in state_shape:
        raise Refused
    validate.check(validate.STATE, {"state": state}, {}, state.device)
    fmt = format_of(cache)
    dispatch.require_format(fmt, Target.named(target))
    PoolGeometry.of(cache)
    kind = "none" if scores is None else "every_row" if save.every_row else "policy"
    spec = CompressStoreSpec(Target.named(target), ratio=ratio, kv_format=fmt.name, scores=scores is not None, save=kind)
    numbers = {"eps": float(eps), "inverse_kv_scale": inverse_scale(kv_scale)}
    numbers |= {"rollback": save.rollback, "prefix_stride": save.prefix_stride, "independent": int(independent)}
    return Plan.of(spec, numbers, rows=rows, widest=min(validate.alignment(cache), validate.alignment(state)))


def _check_sparse_indices(a: Mapping[str, Any], target: Target | None) -> None:
    validate.sparse_indices(a, dispatch.combined_form(target))


def _index_facts(a: Mapping[str, Any]) -> tuple[Any, ...]:
    ids, num_rows, tokens = a["ids"], a["num_rows"], a["positions"].shape[0]
    return (
        (tokens if num_rows is None else validate.integer("num_rows", num_rows, tokens)) > 0,
        None if ids is None else ids.shape[1],
        a["compressed_block_table"] is not None,
        a["slots"] is not None,
        a["source"],
        a["ratio"],
        a["width"],
        a["window"],
        a["compressed"],
        a["independent"],
    )


@functools.lru_cache(maxsize=4096, typed=True)
def _plan_sparse_indices(
    target: str,
    rows: bool,
    k: int | None,
    compressed_block_table: bool,
    slots: bool,
    source: IdSource,
    ratio: int,
    width: int | None,
    window: PoolGeometry,
    compressed: PoolGeometry | None,
    independent: bool,
) -> Plan:
    ids = None if k is None else torch.empty((0, k), device="meta")
    a = {"source": source, "ratio": ratio, "width": width, "ids": ids, "window": window, "compressed": compressed}
    tensors = {"compressed_block_table": compressed_block_table or None, "positions": torch.empty(0, device="meta")}
    validate.sparse_indices_scalars({**a, **tensors, "num_rows": None, "independent": independent})
    sizes = {"window_pages": window.pages, "window_page_rows": window.page_rows, "window_span": window.span, "ratio": ratio}
    sizes["independent"] = int(independent)
    if compressed is not None:
        sizes |= {"compressed_pages": compressed.pages, "compressed_page_rows": compressed.page_rows, "compressed_span": compressed.span}
    spec, columns = SparseIndicesSpec(Target.named(target), source=source.value, slots=slots), validate.sparse_indices_width(a)
    return Plan.of(spec, sizes, rows=rows, size=columns, widest=32 if columns % 8 == 0 else 16)


def _index_outputs(a: Mapping[str, Any], plan: Plan) -> tuple[Mapping[str, Any], Indices]:
    out, width, combined = a["out"], plan.size, plan.target.family == "sm100"
    rows = a["positions"].shape[0] if a["num_rows"] is None else a["num_rows"]
    device = a["positions"].device
    if out is None:
        out = new_tables(rows, width, combined, device)
    else:  # no symbol of the compiled function ties their extents to other arguments
        validate.check_indices(out, combined, {"rows": rows, "width": width, "columns": WINDOW + width}, width > 0, device)
    if combined:
        return {"table": out.table, "lengths": out.lengths}, out
    parts = {"compressed_table": out.compressed, "compressed_lengths": out.compressed_lengths}
    return {"window_table": out.window, "window_lengths": out.window_lengths, **parts}, out


def new_tables(rows: int, width: int, combined: bool, device: torch.device) -> Indices:
    """Unfilled index tables of `rows` rows and `width` compressed columns, in a family's form."""
    new = functools.partial(torch.empty, dtype=torch.int32, device=device)
    if combined:
        return CombinedIndices(new(rows, WINDOW + width), new(rows))
    return SegmentIndices(new(rows, WINDOW), new(rows), *((new(rows, width), new(rows)) if width else ()))


def _check_qkv_insert(a: Mapping[str, Any], target: Target | None) -> None:
    validate.qkv_insert(a)
    dispatch.require_format(format_of(a["kv_cache"]), target)


def _insert_facts(a: Mapping[str, Any]) -> tuple[Any, ...]:
    rows, heads, _ = a["q"].shape
    cache = a["kv_cache"]
    return (
        rows > 0,
        heads,
        a["cos_sin"].shape[0] > 0,
        a["padded_heads"],
        a["eps"],
        a["q_scale"],
        a["kv_scale"],
        a["q_dtype"],
        a["apply_q_norm"],
        a["independent"],
        a["backend"],
        cache.dtype,
        cache.shape,
        cache.stride(),
    )


@functools.lru_cache(maxsize=4096, typed=True)
def _plan_qkv_insert(
    target: str,
    rows: bool,
    heads: int,
    positions: bool,
    padded_heads: int | None,
    eps: float,
    q_scale: float | None,
    kv_scale: float | None,
    q_dtype: torch.dtype,
    apply_q_norm: bool,
    independent: bool,
    backend: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
) -> Plan:
    from cute_kernels.reference.quant import inverse_scale

    cache = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    table = torch.empty((int(positions), 0), device="meta")
    scalars = {"eps": eps, "q_scale": q_scale, "kv_scale": kv_scale, "q_dtype": q_dtype, "apply_q_norm": apply_q_norm, "backend": backend}
    scalars["independent"] = independent
    validate.qkv_insert_scalars({**scalars, "kv_cache": cache, "cos_sin": table})
    fmt = format_of(cache)
    dispatch.require_format(fmt, Target.named(target))
    PoolGeometry.of(cache)
    name = "bf16" if q_dtype is torch.bfloat16 else "e4m3"
    spec = QkvInsertSpec(Target.named(target), kv_format=fmt.name, q_dtype=name, apply_q_norm=apply_q_norm)
    numbers = {"eps": float(eps), "inverse_q_scale": inverse_scale(q_scale), "inverse_kv_scale": inverse_scale(kv_scale)}
    numbers["independent"] = int(independent)
    return Plan.of(spec, numbers, rows=rows, size=validate.insert_heads(heads, padded_heads), widest=validate.alignment(cache))


def _insert_outputs(a: Mapping[str, Any], plan: Plan) -> tuple[Mapping[str, Any], torch.Tensor]:
    q, out = a["q"], a["out"]
    rows = q.shape[0]
    if out is None:
        out = q.new_empty(rows, plan.size, HEAD_DIM, dtype=a["q_dtype"])
    # No symbol of the compiled function ties its extents to other arguments.
    elif out.shape != (rows, plan.size, HEAD_DIM) or not out.is_contiguous():
        validate.qkv_insert(a)
    return {"out": out}, out


_COMPRESS_STORE = Operation(
    public=compress_store,
    anchor="state_slots",
    tensors=validate.COMPRESS_STORE,
    vectors=("kv_score", "ape", "state", "norm_weight", "kv_cache"),
    strided=("kv_score",),
    check=_check_compress_store,
    value_check=value_checks.compress_store,
    facts=_compress_facts,
    shapes=("state_slots", "state_block_table", "kv_score", "seq_lens", "scratch"),
    layouts=("kv_cache", "state"),
    plan=_plan_compress_store,
    made=(),
    outputs=None,
    reference=lambda a, target: reference_call("compress_store", a),
    absent={"scratch": no_scratch},
)
_SPARSE_INDICES = Operation(
    public=sparse_indices,
    anchor="positions",
    tensors=validate.SPARSE_INDICES,
    vectors=("ids", "table", "window_table", "compressed_table"),
    strided=("ids",),
    check=_check_sparse_indices,
    value_check=value_checks.sparse_indices,
    facts=_index_facts,
    shapes=("positions", "ids"),
    layouts=(),
    plan=_plan_sparse_indices,
    made=("out",),
    outputs=_index_outputs,
    reference=lambda a, target: reference_call("sparse_indices", a, form="combined" if dispatch.combined_form(target) else "segments"),
)
_QKV_INSERT = Operation(
    public=qkv_insert,
    anchor="q",
    tensors=validate.QKV_INSERT + validate.QKV_INSERT_OUT,
    vectors=("q", "kv", "kv_cache", "cos_sin", "out"),
    strided=("q", "kv"),
    check=_check_qkv_insert,
    value_check=value_checks.qkv_insert,
    facts=_insert_facts,
    shapes=("q", "cos_sin"),
    layouts=("kv_cache",),
    plan=_plan_qkv_insert,
    made=("out",),
    outputs=_insert_outputs,
    reference=lambda a, target: reference_call("qkv_insert", a),
)
_OPERATIONS = {op.public: op for op in (GATHER_UPCONVERT, CONVERT_INDICES, _COMPRESS_STORE, _SPARSE_INDICES, _QKV_INSERT)}


# Prepared arguments ----------------------------------------------------------------------------------------------------


def bind(call: Callable[..., Any], **kept: Any) -> Callable[..., Any]:
    """`call` (any public call with tensors) with the arguments that stay between calls prepared once.

    Weights, tables, caches and step buffers that keep their address are checked and converted here; the result takes the
    remaining arguments by name. A tensor bound here must not be reallocated; its contents may change.

    Raises what `call` raises of the kept arguments; `InvalidArgument` for any other function.
    """
    return bound(call, **kept).call


def bound(call: Callable[..., Any], **kept: Any) -> Bound:
    """`bind` for a holder that may be copied: its attribute `call` is what `bind` returns."""
    known = (*_OPERATIONS, decode)
    if call not in known:
        raise InvalidArgument("call", getattr(call, "__name__", repr(call)), "one of " + ", ".join(k.__name__ for k in known))
    return Bound(call, _OPERATIONS.get(call), kept)
