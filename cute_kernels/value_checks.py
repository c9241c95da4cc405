"""Checks that read what tensors hold, and therefore synchronise with the device: `CUTE_KERNELS_VALIDATE=1` turns them on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from cute_kernels.errors import InvalidArgument
from cute_kernels.indices import CombinedIndices, IdSource, SegmentIndices
from cute_kernels.kv_format import WINDOW, PoolGeometry
from cute_kernels.scratch import COUNTERS
from cute_kernels.step import StepMetadata


def require_values(name: str, values: torch.Tensor, where: torch.Tensor, low: int | torch.Tensor, high: int | torch.Tensor) -> None:
    """Refuses the first of `values[where]` outside [low, high)."""
    if (at := _first(where & ((values < low) | (values >= high)))) is not None:
        least, limit = (bound if isinstance(bound, int) else int(bound.expand_as(values)[at]) for bound in (low, high))
        raise InvalidArgument(name, f"{int(values[at])} at {list(at)}", f"a value in [{least}, {limit})")


def _first(bad: torch.Tensor) -> tuple[int, ...] | None:
    """Where `bad` first holds."""
    return tuple(bad.nonzero()[0].tolist()) if bool(bad.any()) else None


def compress_store(a: Mapping[str, Any]) -> None:
    """Slots, positions and requests of real rows lie inside their pools and tables; position embeddings are finite."""
    slots, state = a["state_slots"], a["state"]
    rows = min(t.shape[0] for t in (slots, a["positions"], a["token_to_req"], a["kv_slots"]))
    real = slots[:rows] >= 0
    geometry = PoolGeometry.of(a["kv_cache"])
    if a["kv_score"] is not None and a["save"].every_row:  # a row that a policy skips may carry any slot
        require_values("state_slots", slots[:rows], real, 0, state.shape[0] * state.shape[1])
    require_values("positions", a["positions"][:rows], real, 0, a["cos_sin"].shape[0])
    require_values("token_to_req", a["token_to_req"][:rows], real, 0, a["state_block_table"].shape[0])
    require_values("kv_slots", a["kv_slots"][:rows], real & (a["kv_slots"][:rows] != -1), 0, geometry.slots)
    ape = a["ape"]
    if ape is not None and (at := _first(~ape.isfinite())) is not None:
        raise InvalidArgument("ape", f"{float(ape[at])} at {list(at)}", "finite values", hint="kernels multiply them by 0 for older rows")
    if a["seq_lens"] is not None:
        require_values("seq_lens", a["seq_lens"], torch.ones_like(a["seq_lens"], dtype=torch.bool), 0, 2**31 - 1)
    if a["scratch"] is not None and not a["independent"]:  # other launches do not look at it
        counters = a["scratch"][:COUNTERS]
        require_values("scratch", counters, torch.ones_like(counters, dtype=torch.bool), 0, 1)


def sparse_indices(a: Mapping[str, Any]) -> None:
    """Positions and requests of real rows are in range; ids are -1 or valid."""
    positions, requests = a["positions"], a["token_to_req"]
    rows = min(positions.shape[0], requests.shape[0], *([a["slots"].shape[0]] if a["slots"] is not None else []))
    real = torch.ones(rows, dtype=torch.bool, device=positions.device) if a["slots"] is None else a["slots"][:rows] >= 0
    require_values("positions", positions[:rows], real, 0, 2**31 - 1)
    require_values("token_to_req", requests[:rows], real, 0, a["window_block_table"].shape[0])
    if a["ids"] is not None:
        ids = a["ids"][:rows]
        limit: int | torch.Tensor = a["compressed"].slots
        if a["source"] is IdSource.LOCAL:
            limit = ((positions[:rows] + 1) // a["ratio"])[:, None]
        require_values("ids", ids, real[:, None] & (ids != -1), 0, limit)


def qkv_insert(a: Mapping[str, Any]) -> None:
    """Positions have a row in `cos_sin`, slots lie inside the pool."""
    everything = torch.ones_like(a["positions"], dtype=torch.bool)
    require_values("positions", a["positions"], everything, 0, a["cos_sin"].shape[0])
    require_values("slots", a["slots"], a["slots"] >= 0, 0, PoolGeometry.of(a["kv_cache"]).slots)


def decode(step: StepMetadata, indices: CombinedIndices | SegmentIndices) -> None:
    """Sequence lengths cover their queries; lengths fit their tables; no -1 lies inside an active range."""
    offsets = step.query_start_loc[: step.num_requests + 1]
    lens = step.seq_lens[: step.num_requests]
    short = (lens < offsets.diff()) & (lens > 0)
    if bool(short.any()):
        r = int(short.nonzero()[0])
        raise InvalidArgument("step.seq_lens", f"{int(lens[r])} for request {r}", f"at least its {int(offsets.diff()[r])} query rows")
    rows = step.num_tokens
    if isinstance(indices, CombinedIndices):
        parts = [("indices.table", indices.table[:rows], "indices.lengths", indices.lengths[:rows], WINDOW)]
    else:
        parts = [("indices.window", indices.window[:rows], "indices.window_lengths", indices.window_lengths[:rows], 0)]
        if indices.compressed is not None and indices.compressed_lengths is not None:
            parts.append(
                ("indices.compressed", indices.compressed[:rows], "indices.compressed_lengths", indices.compressed_lengths[:rows], 0)
            )
    for table_name, table, lengths_name, lengths, fixed in parts:
        require_values(lengths_name, lengths, torch.ones_like(lengths, dtype=torch.bool), fixed, table.shape[1] + 1)
        columns = torch.arange(table.shape[1], device=table.device)
        require_values(table_name, table, (columns >= fixed) & (columns < lengths[:, None]), 0, 2**31 - 1)
