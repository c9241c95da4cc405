"""The calls of dense prefill as `torch.library` operators; see `torch_ops`."""

from __future__ import annotations

import torch

from cute_kernels.target import Target
from cute_kernels.torch_ops import nothing_made, register, target_name


def gather_upconvert(
    cache: torch.Tensor,
    out: torch.Tensor,
    block_table: torch.Tensor,
    workspace_starts: torch.Tensor,
    seq_starts: torch.Tensor | None,
    kv_scale: float | None,
    target: Target | str | None,
) -> torch.Tensor:
    """`ops.gather_upconvert` inside a traced function."""
    torch.ops.cute_kernels.gather_upconvert(cache, out, block_table, workspace_starts, seq_starts, kv_scale, target_name(target))
    return out


def _gather_upconvert(*arguments: object) -> None:
    from cute_kernels import ops

    *tensors, seq_starts, kv_scale, target = arguments
    ops.gather_upconvert(*tensors, seq_starts=seq_starts, kv_scale=kv_scale, target=target or None)  # type: ignore[arg-type]


register(
    "gather_upconvert(Tensor cache, Tensor(a!) out, Tensor block_table, Tensor workspace_starts, Tensor? seq_starts, float? kv_scale, "
    "str target) -> ()",
    _gather_upconvert,
    nothing_made,
)


def convert_indices(
    ids: torch.Tensor,
    token_to_req: torch.Tensor,
    block_table: torch.Tensor,
    workspace_starts: torch.Tensor | None,
    prefill_request_id: torch.Tensor | None,
    page_rows: int,
    block_stride_rows: int | None,
    pages: int | None,
    return_counts: bool,
    out: torch.Tensor | None,
    counts: torch.Tensor | None,
    target: Target | str | None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`ops.convert_indices` inside a traced function."""
    if out is None:
        rows, k = ids.shape
        out = torch.empty((rows, (k + 7) // 8 * 8), dtype=torch.int32, device=ids.device)[:, :k]
    if return_counts and counts is None:
        counts = torch.empty_like(token_to_req)
    tensors = (ids, token_to_req, block_table, workspace_starts, prefill_request_id)
    rest = (page_rows, block_stride_rows, pages, return_counts)
    torch.ops.cute_kernels.convert_indices(*tensors, *rest, out, counts, target_name(target))
    return out if counts is None else (out, counts)


def _convert_indices(*arguments: object) -> None:
    from cute_kernels import ops

    *tensors, workspace_starts, prefill_request_id, page_rows, block_stride_rows, pages, return_counts, out, counts, target = arguments
    ops.convert_indices(
        *tensors,  # type: ignore[arg-type]
        page_rows=page_rows,  # type: ignore[arg-type]
        block_stride_rows=block_stride_rows,  # type: ignore[arg-type]
        pages=pages,  # type: ignore[arg-type]
        workspace_starts=workspace_starts,  # type: ignore[arg-type]
        prefill_request_id=prefill_request_id,  # type: ignore[arg-type]
        return_counts=return_counts,  # type: ignore[arg-type]
        out=out,  # type: ignore[arg-type]
        counts=counts,  # type: ignore[arg-type]
        target=target or None,  # type: ignore[arg-type]
    )


register(
    "convert_indices(Tensor ids, Tensor token_to_req, Tensor block_table, Tensor? workspace_starts, Tensor? prefill_request_id, "
    "SymInt page_rows, SymInt? block_stride_rows, SymInt? pages, bool return_counts, Tensor(a!) out, Tensor(b!)? counts, str target) -> ()",
    _convert_indices,
    nothing_made,
)
