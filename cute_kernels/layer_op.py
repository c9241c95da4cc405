"""A layer's whole call as one `torch.library` operator, which is what `torch.compile` sees of `SparseMLA`.

The caches are no arguments of it: those of one pool are views of one memory with different dtypes, and AOTAutograd refuses to
write to such graph inputs. The operator finds layer, step and tables by handle and takes from a graph what a graph computes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from cute_kernels.handles import handle_of, held
from cute_kernels.indices import IdSource
from cute_kernels.kv_format import HEAD_DIM
from cute_kernels.step import StepMetadata
from cute_kernels.torch_ops import nothing_made, register

if TYPE_CHECKING:
    from cute_kernels.layer import SparseMLA, StepTables


def call(
    layer: SparseMLA,
    step: StepMetadata,
    tables: StepTables,
    q: torch.Tensor,
    kv: torch.Tensor,
    kv_score: torch.Tensor | None,
    ids: torch.Tensor | IdSource | None,
    out: torch.Tensor | None,
    workspace: torch.Tensor | None,
    counters: torch.Tensor | None,
) -> torch.Tensor:
    """`SparseMLA.__call__` inside a traced function."""
    if out is None:
        out = torch.empty((q.shape[0], layer.spec.padded_heads, HEAD_DIM), dtype=torch.bfloat16, device=q.device)
    all_groups = ids is IdSource.ALL_GROUPS
    handles = (handle_of("layer", layer), handle_of("step", step), handle_of("tables", tables))
    memory = (out, workspace, counters)
    torch.ops.cute_kernels.sparse_mla(*handles, q, kv, kv_score, None if all_groups else ids, all_groups, *memory)
    return out[: q.shape[0], : layer.spec.num_heads]


def _run(
    layer: torch.Tensor,
    step: torch.Tensor,
    tables: torch.Tensor,
    q: torch.Tensor,
    kv: torch.Tensor,
    kv_score: torch.Tensor | None,
    ids: torch.Tensor | None,
    all_groups: bool,
    out: torch.Tensor,
    workspace: torch.Tensor | None,
    counters: torch.Tensor | None,
) -> None:
    from cute_kernels.layer import SparseMLA, StepTables

    found = held("layer", layer, SparseMLA)
    arguments = (held("step", step, StepMetadata), held("tables", tables, StepTables), q, kv, kv_score)
    found(*arguments, IdSource.ALL_GROUPS if all_groups else ids, out=out, workspace=workspace, counters=counters)


register(
    "sparse_mla(Tensor layer, Tensor step, Tensor tables, Tensor q, Tensor kv, Tensor? kv_score, Tensor? ids, bool all_groups, "
    "Tensor(a!) out, Tensor(b!)? workspace, Tensor(c!)? counters) -> ()",
    _run,
    nothing_made,
)
