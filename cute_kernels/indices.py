"""What `sparse_indices` returns and decode reads: one table on SM100, two segments on SM120."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch


class IdSource(enum.Enum):
    """Where the compressed part of an index row comes from."""

    NONE = "none"  # window-only layer: no compressed part
    LOCAL = "local"  # ids count the compressed entries of the row's own request (an indexer's top-k)
    GLOBAL = "global"  # ids are slots of the compressed pool
    ALL_GROUPS = "all_groups"  # every closed group, in order (ratio 128)


@dataclass(frozen=True)
class CombinedIndices:
    """SM100: window and compressed entries in one table of storage rows.

    table    int32 [rows, 128 + width]: columns 0..127 window, then compressed; valid entries first in each part, then -1
    lengths  int32 [rows]: 128 + valid compressed entries
    """

    table: torch.Tensor
    lengths: torch.Tensor

    def layout(self) -> tuple[object, ...]:
        """The same for tables that fit the same calls; the compiled function knows the stride of lengths."""
        return CombinedIndices, self.table.dtype, self.table.shape, self.table.stride(), self.lengths.dtype, self.lengths.shape


@dataclass(frozen=True)
class SegmentIndices:
    """SM120: two tables of slots, valid entries first, then -1.

    window              int32 [rows, 128]
    window_lengths      int32 [rows]
    compressed          int32 [rows, width], or None for a window-only layer
    compressed_lengths  int32 [rows], or None
    """

    window: torch.Tensor
    window_lengths: torch.Tensor
    compressed: torch.Tensor | None = None
    compressed_lengths: torch.Tensor | None = None

    def layout(self) -> tuple[object, ...]:
        """All of it but addresses: the same for tables that fit the same calls."""
        return SegmentIndices, *(None if t is None else (t.dtype, t.shape, t.stride()) for t in vars(self).values())


Indices = CombinedIndices | SegmentIndices
