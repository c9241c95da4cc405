"""Timing on a GPU: medians over replays of a CUDA graph that holds many launches over rotating input sets.

One launch is too short to time by events, and a loop over one set would measure the L2 cache: so a graph holds LAUNCHES launches,
which walk through several sets of inputs, and a figure is the median of REPLAYS replays divided by the launches.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

LAUNCHES, REPLAYS, WARMUP = 24, 15, 3
Launch = Callable[[], object]


def graph_of(launches: Sequence[Launch], count: int = LAUNCHES) -> torch.cuda.CUDAGraph:
    """A CUDA graph of `count` launches that rotates through `launches`."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for launch in launches:
            launch()  # whatever is loaded or allocated once
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(count):
            launches[i % len(launches)]()
    return graph


def replayed(graph: torch.cuda.CUDAGraph, count: int = LAUNCHES) -> float:
    """Median time of one of a graph's `count` launches in µs."""
    for _ in range(WARMUP):
        graph.replay()
    times = []
    for _ in range(REPLAYS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times) / count * 1e3


def microseconds(launches: Sequence[Launch], count: int = LAUNCHES) -> float:
    """Median time of one launch in µs."""
    return replayed(graph_of(launches, count), count)


def bandwidth_limit() -> float:
    """Bytes per second that an elementwise add reaches over 2 GiB: the limit that other figures are compared with."""
    a, b = (torch.randn(1 << 28, device="cuda") for _ in range(2))
    out = torch.empty_like(a)
    microsecond = microseconds([lambda: torch.add(a, b, out=out)], 4)
    return 3 * a.nbytes / microsecond * 1e6


def empty_node() -> float:
    """Time of a graph node that does nothing worth mentioning (one 4-byte fill), in µs."""
    word = torch.zeros(1, device="cuda")
    return microseconds([word.zero_])
