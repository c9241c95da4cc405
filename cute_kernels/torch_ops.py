"""The public calls as `torch.library` operators, so that `torch.compile(fullgraph=True)` traces through them.

Eager calls do not come here: they go straight to the compiled function. A traced call becomes one opaque operator with the
same checks, run when the graph runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from cute_kernels import dispatch
from cute_kernels.errors import UnsupportedRequest
from cute_kernels.indices import CombinedIndices, IdSource, Indices, SegmentIndices
from cute_kernels.kv_format import HEAD_DIM, WINDOW, PoolGeometry
from cute_kernels.save_policy import SavePolicy
from cute_kernels.step import StepMetadata
from cute_kernels.target import Target

if TYPE_CHECKING:
    from collections.abc import Callable

_LIBRARY = torch.library.Library("cute_kernels", "DEF")
Tensors = list[torch.Tensor]


def register(schema: str, run: Callable[..., object], fake: Callable[..., object]) -> None:
    """Defines an operator of the library `cute_kernels`: `run` on CPU and CUDA tensors, `fake` while a graph is traced."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(name, run, key)
    torch.library.register_fake(f"cute_kernels::{name}", fake, lib=_LIBRARY)


def target_name(target: Target | str | None) -> str:
    """A target as an operator's argument; empty: the tensors' device decides."""
    return "" if target is None else str(target)


def nothing_made(*arguments: object) -> None:
    """The fake of operators that only write into arguments."""


# compress_store --------------------------------------------------------------------------------------------------------


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
    ratio: int,
    eps: float,
    kv_scale: float | None,
    save: SavePolicy,
    seq_lens: torch.Tensor | None,
    scratch: torch.Tensor | None,
    target: Target | str | None,
) -> None:
    """`ops.compress_store` inside a traced function."""
    tensors = (kv_score, ape, state, state_block_table, positions, token_to_req, state_slots, kv_slots, norm_weight, cos_sin, kv_cache)
    policy = (save.every_row, save.rollback, save.prefix_stride)
    torch.ops.cute_kernels.compress_store(*tensors, ratio, eps, kv_scale, *policy, seq_lens, scratch, target_name(target))


def _compress_store(*arguments: object) -> None:
    from cute_kernels import ops

    *tensors, ratio, eps, kv_scale, every_row, rollback, prefix_stride, seq_lens, scratch, target = arguments
    save = SavePolicy.EVERY_ROW if every_row else SavePolicy(rollback, prefix_stride)  # type: ignore[arg-type]
    more = {"ratio": ratio, "eps": eps, "kv_scale": kv_scale, "save": save, "seq_lens": seq_lens, "scratch": scratch}
    ops.compress_store(*tensors, **more, target=target or None)  # type: ignore[arg-type]


register(
    "compress_store(Tensor? kv_score, Tensor? ape, Tensor(a!) state, Tensor state_block_table, Tensor positions, Tensor token_to_req, "
    "Tensor state_slots, Tensor kv_slots, Tensor norm_weight, Tensor cos_sin, Tensor(b!) kv_cache, int ratio, float eps, float? kv_scale, "
    "bool every_row, int rollback, int prefix_stride, Tensor? seq_lens, Tensor(c!)? scratch, str target) -> ()",
    _compress_store,
    nothing_made,
)


# sparse_indices --------------------------------------------------------------------------------------------------------


def sparse_indices(
    positions: torch.Tensor,
    token_to_req: torch.Tensor,
    window_block_table: torch.Tensor,
    ids: torch.Tensor | None,
    compressed_block_table: torch.Tensor | None,
    window: PoolGeometry,
    compressed: PoolGeometry | None,
    source: IdSource,
    ratio: int,
    width: int | None,
    slots: torch.Tensor | None,
    num_rows: int | None,
    out: Indices | None,
    target: Target | str | None,
) -> Indices:
    """`ops.sparse_indices` inside a traced function."""
    combined = dispatch.combined_form(dispatch.resolve_target(positions.device, target))
    tensors = (positions, token_to_req, window_block_table, ids, compressed_block_table)
    pools = (
        [window.pages, window.page_rows, window.span],
        [] if compressed is None else [compressed.pages, compressed.page_rows, compressed.span],
    )
    rest = (*pools, source.value, ratio, width, slots, num_rows, target_name(target))
    if out is None:
        made = torch.ops.cute_kernels.sparse_indices(*tensors, *rest)
        return CombinedIndices(*made) if combined else SegmentIndices(*made)
    tables = [out.table, out.lengths] if isinstance(out, CombinedIndices) else [out.window, out.window_lengths]
    if isinstance(out, SegmentIndices) and out.compressed is not None and out.compressed_lengths is not None:
        tables += [out.compressed, out.compressed_lengths]
    torch.ops.cute_kernels.sparse_indices_out(*tensors, *rest, tables)
    return out


def _sparse_indices(*arguments: object) -> Tensors:
    from cute_kernels import ops

    *tensors, window, compressed, source, ratio, width, slots, num_rows, target, tables = arguments
    target = target or None
    out: Indices | None = None
    if tables is not None:
        combined = dispatch.combined_form(dispatch.resolve_target(tensors[0].device, target))  # type: ignore[attr-defined,arg-type]
        out = CombinedIndices(*tables) if combined else SegmentIndices(*tables)  # type: ignore[misc]
    result = ops.sparse_indices(
        *tensors,  # type: ignore[arg-type]
        window=PoolGeometry(*window),  # type: ignore[misc]
        compressed=PoolGeometry(*compressed) if compressed else None,  # type: ignore[misc]
        source=IdSource(source),
        ratio=ratio,  # type: ignore[arg-type]
        width=width,  # type: ignore[arg-type]
        slots=slots,  # type: ignore[arg-type]
        num_rows=num_rows,  # type: ignore[arg-type]
        out=out,
        target=target,  # type: ignore[arg-type]
    )
    return [t for t in vars(result).values() if t is not None]


def _fake_sparse_indices(
    positions: torch.Tensor,
    token_to_req: torch.Tensor,
    window_block_table: torch.Tensor,
    ids: torch.Tensor | None,
    compressed_block_table: torch.Tensor | None,
    window: list[int],
    compressed: list[int],
    source: str,
    ratio: int,
    width: int | None,
    slots: torch.Tensor | None,
    num_rows: int | None,
    target: str,
) -> Tensors:
    rows = positions.shape[0] if num_rows is None else num_rows
    columns = 0
    if source != IdSource.NONE.value:
        columns = width if width is not None else 0 if ids is None else ids.shape[1]
        columns = (columns + 3) // 4 * 4

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=positions.device)

    if dispatch.combined_form(dispatch.resolve_target(positions.device, target or None)):
        return [empty(rows, WINDOW + columns), empty(rows)]
    return [empty(rows, WINDOW), empty(rows), *([] if source == IdSource.NONE.value else [empty(rows, columns), empty(rows)])]


_INDEX_ARGUMENTS = (
    "Tensor positions, Tensor token_to_req, Tensor window_block_table, Tensor? ids, Tensor? compressed_block_table, SymInt[] window, "
    "SymInt[] compressed, str source, int ratio, SymInt? width, Tensor? slots, SymInt? num_rows, str target"
)
register(f"sparse_indices({_INDEX_ARGUMENTS}) -> Tensor[]", lambda *a: _sparse_indices(*a, None), _fake_sparse_indices)
register(f"sparse_indices_out({_INDEX_ARGUMENTS}, Tensor(a!)[] out) -> ()", lambda *a: _sparse_indices(*a) and None, nothing_made)


# qkv_insert ------------------------------------------------------------------------------------------------------------


def qkv_insert(
    q: torch.Tensor,
    kv: torch.Tensor,
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    eps: float,
    padded_heads: int | None,
    apply_q_norm: bool,
    q_scale: float | None,
    kv_scale: float | None,
    q_dtype: torch.dtype,
    out: torch.Tensor | None,
    backend: str,
    target: Target | str | None,
) -> torch.Tensor:
    """`ops.qkv_insert` inside a traced function."""
    if out is None:
        padded_heads = q.shape[1] if padded_heads is None else padded_heads
        out = torch.empty((q.shape[0], padded_heads, HEAD_DIM), dtype=q_dtype, device=q.device)
    scalars = (eps, padded_heads, apply_q_norm, q_scale, kv_scale, q_dtype)
    # A tensor that is an argument twice would be copied for the one that is written.
    source = None if out is q else q
    torch.ops.cute_kernels.qkv_insert(source, kv, kv_cache, slots, positions, cos_sin, *scalars, out, backend, target_name(target))
    return out


def _qkv_insert(*arguments: object) -> None:
    from cute_kernels import ops

    q, *tensors, eps, padded_heads, apply_q_norm, q_scale, kv_scale, q_dtype, out, backend, target = arguments
    ops.qkv_insert(
        out if q is None else q,  # type: ignore[arg-type]
        *tensors,  # type: ignore[arg-type]
        eps=eps,  # type: ignore[arg-type]
        padded_heads=padded_heads,  # type: ignore[arg-type]
        apply_q_norm=apply_q_norm,  # type: ignore[arg-type]
        q_scale=q_scale,  # type: ignore[arg-type]
        kv_scale=kv_scale,  # type: ignore[arg-type]
        q_dtype=q_dtype,  # type: ignore[arg-type]
        out=out,  # type: ignore[arg-type]
        backend=backend,  # type: ignore[arg-type]
        target=target or None,  # type: ignore[arg-type]
    )


register(
    "qkv_insert(Tensor? q, Tensor kv, Tensor(a!) kv_cache, Tensor slots, Tensor positions, Tensor cos_sin, float eps, "
    "SymInt? padded_heads, bool apply_q_norm, float? q_scale, float? kv_scale, ScalarType q_dtype, Tensor(b!) out, str backend, "
    "str target) -> ()",
    _qkv_insert,
    nothing_made,
)


# decode ----------------------------------------------------------------------------------------------------------------


def decode(
    q: torch.Tensor,
    swa_cache: torch.Tensor,
    kv_cache: torch.Tensor | None,
    step: StepMetadata,
    indices: Indices,
    num_heads: int | None,
    sinks: torch.Tensor | None,
    sm_scale: float,
    q_scale: float,
    kv_scale: float,
    out: torch.Tensor | None,
    workspace: torch.Tensor | None,
    counters: torch.Tensor | None,
    rope_cos_sin: torch.Tensor | None,
    backend: str,
    target: Target | str | None,
) -> torch.Tensor:
    """`ops.decode` inside a traced function."""
    if rope_cos_sin is not None:
        raise UnsupportedRequest(
            "RopeQuant", device="torch.compile", supported="eager calls", nearest="call decode outside the compiled region"
        )
    rows = step.num_tokens
    if out is None:
        out = torch.empty((rows, q.shape[1], HEAD_DIM), dtype=torch.bfloat16, device=q.device)
    tables = [indices.table, indices.lengths] if isinstance(indices, CombinedIndices) else [indices.window, indices.window_lengths]
    if isinstance(indices, SegmentIndices) and indices.compressed is not None and indices.compressed_lengths is not None:
        tables += [indices.compressed, indices.compressed_lengths]
    combined = isinstance(indices, CombinedIndices)
    offsets = (step.query_start_loc, step.prefill_query_start_loc, step.seq_lens, step.positions, step.token_to_req)
    counts = [step.num_decodes, step.num_decode_tokens, step.max_query_len, step.max_decode_query_len, step.decode_query_len]
    counts.append(step.call_policy.max_padded_rows)
    heads = q.shape[1] if num_heads is None else num_heads
    torch.ops.cute_kernels.decode(
        *(q, swa_cache, kv_cache, *offsets, counts, tables, combined, heads, sinks, sm_scale, q_scale, kv_scale, out, workspace, counters),
        *(backend, target_name(target)),
    )
    return out[:rows, :heads]


def _decode(*arguments: object) -> None:
    from cute_kernels import ops

    q, swa_cache, kv_cache, offsets, prefill_offsets, seq_lens, positions, token_to_req, counts, tables, combined, *rest = arguments
    heads, sinks, sm_scale, q_scale, kv_scale, out, workspace, counters, backend, target = rest
    step = StepMetadata.from_parts(offsets, prefill_offsets, seq_lens, positions, token_to_req, *counts)  # type: ignore[arg-type,misc]
    ops.decode(
        q,  # type: ignore[arg-type]
        swa_cache,  # type: ignore[arg-type]
        kv_cache,  # type: ignore[arg-type]
        step,
        CombinedIndices(*tables) if combined else SegmentIndices(*tables),  # type: ignore[misc]
        num_heads=heads,  # type: ignore[arg-type]
        sinks=sinks,  # type: ignore[arg-type]
        sm_scale=sm_scale,  # type: ignore[arg-type]
        q_scale=q_scale,  # type: ignore[arg-type]
        kv_scale=kv_scale,  # type: ignore[arg-type]
        out=out,  # type: ignore[arg-type]
        workspace=workspace,  # type: ignore[arg-type]
        counters=counters,  # type: ignore[arg-type]
        backend=backend,  # type: ignore[arg-type]
        target=target or None,  # type: ignore[arg-type]
    )


register(
    "decode(Tensor q, Tensor swa_cache, Tensor? kv_cache, Tensor query_start_loc, Tensor prefill_query_start_loc, Tensor seq_lens, "
    "Tensor positions, Tensor token_to_req, SymInt[] counts, Tensor[] tables, bool combined, int num_heads, Tensor? sinks, float sm_scale, "
    "float q_scale, float kv_scale, Tensor(a!) out, Tensor(b!)? workspace, Tensor(c!)? counters, str backend, str target) -> ()",
    _decode,
    nothing_made,
)
