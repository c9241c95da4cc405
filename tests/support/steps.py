"""The rows of one step: which requests take part, from which position, with how many rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Request:
    """One request's share of a step: rows at positions start .. start + rows - 1. Its sequence length afterwards is `seq_len`."""

    start: int
    rows: int

    @property
    def seq_len(self) -> int:
        return self.start + self.rows


def mix(tokens: int, requests: int, *, ratio: int, seed: int = 0, longest_start: int = 1200) -> list[Request]:
    """`tokens` rows spread over at most `requests` requests: decode rows, speculative rows, chunks that start in mid-group, whole prompts.

    Starts are drawn near group boundaries half of the time, at 0 a quarter of the time.
    """
    rng = np.random.default_rng([seed, tokens, requests, ratio])
    count = min(requests, tokens)
    if count == 0:
        return []
    rows = np.ones(count, dtype=np.int64)
    left = tokens - count
    for i in range(count):  # a third of the requests verify speculative rows
        if left and rng.random() < 0.34:
            extra = int(min(left, rng.integers(1, 8)))
            rows[i] += extra
            left -= extra
    if left:  # the rest is prefill, in a few long chunks
        chunks = rng.choice(count, size=min(count, int(rng.integers(1, 4))), replace=False)
        shares = rng.multinomial(left, np.full(len(chunks), 1 / len(chunks)))
        rows[chunks] += shares
    out = []
    for n in rows:
        kind = rng.random()
        if kind < 0.25:
            start = 0
        elif kind < 0.75:
            start = max(0, ratio * int(rng.integers(1, max(2, longest_start // ratio))) - int(rng.integers(0, 4)))
        else:
            start = int(rng.integers(0, longest_start))
        out.append(Request(start, int(n)))
    return out
