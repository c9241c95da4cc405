"""Which rows of a step the compressor keeps in its state pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cute_kernels.errors import InvalidArgument


@dataclass(frozen=True)
class SavePolicy:
    """Which real rows are saved, by where a later step may begin.

    A later step may begin at a position b in [seq_len - rollback, seq_len] (seq_len counts this step's rows), or at any
    multiple of `prefix_stride` (0: none). It then reads the state rows lo(b) .. b-1, with
    lo(b) = max(0, ratio * (b // ratio) - overlap), overlap = 4 for ratio 4 and 0 for ratio 128.
    Exactly the union of these rows is saved. `SavePolicy.EVERY_ROW` saves all of them.

    rollback       how many of this step's tokens may be rejected later (speculative decoding), >= 0
    prefix_stride  prefix-cache granularity in tokens, >= 0
    """

    rollback: int = 0
    prefix_stride: int = 0
    every_row: bool = False

    EVERY_ROW: ClassVar[SavePolicy]

    def __post_init__(self) -> None:
        for name in ("rollback", "prefix_stride"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
                raise InvalidArgument(f"save.{name}", repr(value), "an int, 0 <= value < 2^31")
        if not isinstance(self.every_row, bool):
            raise InvalidArgument("save.every_row", repr(self.every_row), "True or False")


SavePolicy.EVERY_ROW = SavePolicy(every_row=True)


def overlap(ratio: int) -> int:
    """Rows of the previous group that a window reads besides its own group."""
    return 4 if ratio == 4 else 0


def is_saved(position: int, seq_len: int, ratio: int, policy: SavePolicy) -> bool:
    """The rule of `SavePolicy` in closed form, as the kernels evaluate it.

    Row p is read by a step that begins at b iff p < b <= last, with last the largest b whose lo(b) is still <= p.
    """
    if policy.every_row:
        return True
    last = ratio * ((position + overlap(ratio)) // ratio) + ratio - 1
    if max(position + 1, seq_len - policy.rollback) <= min(last, seq_len):
        return True
    stride = policy.prefix_stride
    return stride > 0 and last // stride * stride > position
