"""Shared memory of a chunk of blocks, distributed shared memory of clusters included, and thread-local memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ptx_emulator.memory import AccessFault
from ptx_emulator.program import RANK_SHIFT, SHARED_START

if TYPE_CHECKING:
    from ptx_emulator.fragment import Fragment

_DTYPES = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_OFFSET = np.uint64((1 << RANK_SHIFT) - 1)


class SharedMemory:
    """One row of `size` bytes per block; addresses below `SHARED_START` do not exist.

    `written` holds one flag byte per byte: 0 nobody has written it, 1 written, 2 an asynchronous copy that nobody has waited for.
    """

    def __init__(self, blocks: int, size: int, cluster: int) -> None:
        self.size, self.cluster = size, cluster
        self.row = max(-(-size // 64) * 64, 64)
        self.data = np.zeros(blocks * self.row, np.uint8)
        self.written = np.zeros(blocks * self.row, np.uint8)
        self.views = {w: self.data.view(d) for w, d in _DTYPES.items()}
        self.written_views = {w: self.written.view(d) for w, d in _DTYPES.items()}

    def place(self, f: Fragment, address: np.ndarray, nbytes: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Byte positions in `data`, one per lane, and the blocks addressed (None: everybody its own)."""
        address = address.astype(np.uint64)
        if int(np.bitwise_or.reduce(address)) & (nbytes - 1):
            i = int(np.flatnonzero(address & np.uint64(nbytes - 1))[0])
            raise AccessFault("misaligned access", i, f"{nbytes} bytes at shared address {int(address[i]):#x}", "shared memory")
        rank = address >> np.uint64(RANK_SHIFT)
        owner: np.ndarray | None = None
        if rank.any():
            own = f.blocks if address.shape[0] == f.n else np.broadcast_to(f.blocks, (f.n,))
            remote = np.broadcast_to(rank, (f.n,)).astype(np.int64)
            if (remote > self.cluster).any():
                i = int(np.flatnonzero(remote > self.cluster)[0])
                raise AccessFault(
                    "out of bounds",
                    i,
                    f"shared address {int(np.broadcast_to(address, (f.n,))[i]):#x} names no block of the cluster",
                    "shared memory",
                )
            owner = np.where(remote > 0, own // self.cluster * self.cluster + remote - 1, own)
            address = address & _OFFSET
        bad = (address < np.uint64(SHARED_START)) | (address + np.uint64(nbytes) > np.uint64(self.size))
        if bad.any():
            i = int(np.flatnonzero(bad)[0])
            raise AccessFault(
                "out of bounds",
                i,
                f"{nbytes} bytes at shared offset {int(address[i]) - SHARED_START} of {max(self.size - SHARED_START, 0)}",
                "shared memory",
            )
        base = (f.blocks if owner is None else owner) * np.int64(self.row)
        return base + address.astype(np.int64), owner

    def load(self, f: Fragment, address: np.ndarray, width: int, count: int) -> tuple[list[np.ndarray], np.ndarray]:
        """(`count` elements of `width` bytes from each address, places); `AccessFault` for bytes that nobody has written."""
        place, _ = self.place(f, address, width * count)
        index = place >> (width.bit_length() - 1)
        flags, view = self.written_views[width], self.views[width]
        expected = flags.dtype.type(int.from_bytes(b"\1" * width, "little"))
        values = []
        for k in range(count):
            bad = flags[index + k] != expected
            if bad.any():
                i = int(np.flatnonzero(bad)[0])
                self.explain(int(place[i]) + k * width, width, i)
            values.append(view[index + k])
        return values, place

    def explain(self, place: int, width: int, index: int) -> None:
        """Raise the fault of a read of unwritten bytes."""
        offset = place % self.row - SHARED_START
        pending = (self.written[place : place + width] == 2).any()
        reason = "an asynchronous copy there has not been waited for" if pending else "nobody has written"
        raise AccessFault("uninitialised read", index, f"{reason}: {width} bytes at shared offset {offset}", "shared memory")

    def store(self, f: Fragment, address: np.ndarray, width: int, values: list[np.ndarray]) -> np.ndarray:
        """Store elements of `width` bytes, one after the other, at each address; returns the places."""
        place, _ = self.place(f, address, width * len(values))
        index = place >> (width.bit_length() - 1)
        flags, view = self.written_views[width], self.views[width]
        ones = flags.dtype.type(int.from_bytes(b"\1" * width, "little"))
        for k, value in enumerate(values):
            view[index + k] = value
            flags[index + k] = ones
        return place


class LocalMemory:
    """`size` bytes per lane of the chunk."""

    def __init__(self, lanes: int, size: int) -> None:
        self.size = size
        self.row = max(-(-size // 16) * 16, 16)
        self.data = np.zeros(lanes * self.row if size else 0, np.uint8)
        self.written = np.zeros(lanes * self.row if size else 0, np.uint8)
        self.views = {w: self.data.view(d) for w, d in _DTYPES.items()}
        self.written_views = {w: self.written.view(d) for w, d in _DTYPES.items()}

    def place(self, f: Fragment, address: np.ndarray, nbytes: int) -> np.ndarray:
        """Places of the addresses of each thread; `AccessFault` out of bounds or off alignment."""
        address = address.astype(np.uint64)
        bad = (address > np.uint64(max(self.size - nbytes, 0))) | np.full(address.shape, self.size < nbytes)
        if bad.any():
            i = int(np.flatnonzero(bad)[0])
            raise AccessFault("out of bounds", i, f"{nbytes} bytes at local offset {int(address[i])} of {self.size}", "local memory")
        if (address & np.uint64(nbytes - 1)).any():
            i = int(np.flatnonzero(address & np.uint64(nbytes - 1))[0])
            raise AccessFault("misaligned access", i, f"{nbytes} bytes at local offset {int(address[i])}", "local memory")
        return f.lanes.astype(np.int64) * self.row + address.astype(np.int64)

    def load(self, f: Fragment, address: np.ndarray, width: int, count: int) -> list[np.ndarray]:
        """`count` elements of `width` bytes from each address; `AccessFault` for bytes that nobody has written."""
        place = self.place(f, address, width * count)
        index = place >> (width.bit_length() - 1)
        flags = self.written_views[width]
        expected = flags.dtype.type(int.from_bytes(b"\1" * width, "little"))
        for k in range(count):
            bad = flags[index + k] != expected
            if bad.any():
                i = int(np.flatnonzero(bad)[0])
                raise AccessFault(
                    "uninitialised read", i, f"{width} bytes at local offset {int(place[i]) % self.row + k * width}", "local memory"
                )
        return [self.views[width][index + k] for k in range(count)]

    def store(self, f: Fragment, address: np.ndarray, width: int, values: list[np.ndarray]) -> None:
        """Store elements of `width` bytes, one after the other, at each address."""
        index = self.place(f, address, width * len(values)) >> (width.bit_length() - 1)
        ones = self.written_views[width].dtype.type(int.from_bytes(b"\1" * width, "little"))
        for k, value in enumerate(values):
            self.views[width][index + k] = value
            self.written_views[width][index + k] = ones
