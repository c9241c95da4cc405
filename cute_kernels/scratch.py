"""Memory in which blocks of one launch of `compress_store` share out rows (ratio 4), and through which they hand on partial results where
the hardware has no clusters (ratio 128, SM120)."""

from __future__ import annotations

import torch

TURNS = 2  # windows of a team of blocks that the blocks share
# Zero between launches; ratio 128: one a shared window, of blocks that have handed on what they pooled; ratio 4: the first, of tickets.
COUNTERS = 128 * TURNS
PART = 3 * 512  # words of what a block hands on: a peak, a weight and a product for each column
PARTS = 256 * TURNS  # blocks of all teams
WORDS = COUNTERS + PARTS * PART
_NONE: dict[torch.device, torch.Tensor] = {}


def compress_scratch(device: torch.device | str) -> torch.Tensor:
    """A `scratch` for `compress_store`: int32 [786,688], zeros (3 MiB).

    Launches that may run at the same time (streams, branches of a graph, graphs) need one each. Every launch leaves the counters in it
    zero; after a device error make a new one.
    """
    return torch.zeros(WORDS, dtype=torch.int32, device=device)


def no_scratch(device: torch.device) -> torch.Tensor:
    """What stands for a scratch where there is none: the same tensor for every call, but for those that trace with fake ones."""
    if (found := _NONE.get(device)) is None:
        found = torch.empty(0, dtype=torch.int32, device=device)
        if type(found) is torch.Tensor:
            _NONE[device] = found
    return found
