"""Global memory as a sparse space of named buffers.

A buffer is host memory seen at a device address. Addresses outside all buffers do not exist, so a pool that spans gigabytes
costs only the pages that are touched. A buffer may be a strided view: bytes between its rows belong to nobody.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ptx_emulator.faults import LaunchError

if TYPE_CHECKING:
    from ptx_emulator.global_races import GlobalRaces

_DTYPES = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
FOREIGN = 1  # shadow bit: the kernel must not write this byte
UNWRITTEN = 2  # shadow bit: nobody has written this byte yet


class Manner(NamedTuple):
    """How an access of global memory is made.

    coherent          not by `ld.global.nc`
    strong            an atomic, or a load or store that is not weak
    wide              strong for threads of other clusters, too
    acquire, release  and it orders other accesses
    """

    coherent: bool = True
    strong: bool = False
    wide: bool = False
    acquire: bool = False
    release: bool = False

    @classmethod
    def of(cls, order: str, scope: str) -> Manner:
        """Of an access with this order and scope, which PTX takes for the GPU where none is given."""
        strong = order not in ("", "weak")
        wide = strong and scope in ("", "gpu", "sys")
        return cls(True, strong, wide, order in ("acquire", "acq_rel"), order in ("release", "acq_rel"))


WEAK = Manner()


class AccessFault(Exception):
    """A bad access of the lane at position `index` of a fragment; `lane` is its number, once somebody has said of which fragment."""

    lane: int | None = None

    def __init__(self, check: str, index: int, message: str, tensor: str = "") -> None:
        self.check, self.index, self.message, self.tensor = check, index, message, tensor
        super().__init__(message)


@dataclass
class Buffer:
    """One named buffer.

    name       what faults call it
    address    device address of its first byte
    host       address of the same byte in this process
    layout     ((stride, size), ...) in bytes, outermost first, of the dimensions that are not contiguous
    inner      contiguous bytes at each point of `layout`
    writable   False: any store is a fault
    """

    name: str
    address: int
    host: int
    inner: int
    layout: tuple[tuple[int, int], ...] = ()
    writable: bool = True
    description: str = ""
    keep: object = None
    shadow: np.ndarray | None = None
    declared: int = 0  # shadow bits ever set
    views: dict[int, np.ndarray] = field(default_factory=dict)
    shadow_views: dict[int, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.address - self.host) % 32:
            raise LaunchError(f"buffer {self.name!r}: device address {self.address:#x} and host memory differ in alignment modulo 32")
        if any(stride < 0 for stride, _ in self.layout):
            raise LaunchError(f"buffer {self.name!r}: negative strides")
        self.layout = tuple(sorted(((s, n) for s, n in self.layout if n > 1), reverse=True))
        self.span = self.inner + sum(stride * (size - 1) for stride, size in self.layout) if self.inner else 0
        self.end = self.address + self.span
        self.offset = self.host % 32  # bytes in front of the first one, so that views of any width are aligned
        self.origin = self.address - self.offset
        self.length = -(-(self.offset + self.span) // 32) * 32
        if self.span:
            raw = np.ctypeslib.as_array((ctypes.c_uint8 * self.length).from_address(self.host - self.offset))
            self.views = {w: raw.view(d) for w, d in _DTYPES.items()}

    def contains(self, address: np.ndarray, nbytes: int) -> np.ndarray:
        """Which accesses of `nbytes` at `address` lie inside, each within one contiguous piece."""
        inside = (address >= np.uint64(self.address)) & (address <= np.uint64(max(self.end - nbytes, 0)))
        if self.span < nbytes:
            return np.zeros(address.shape, bool)
        if not self.layout:
            return inside
        rest = np.where(inside, address - np.uint64(self.address), np.uint64(0))
        for stride, size in self.layout:
            count = rest // np.uint64(stride) if stride else np.zeros_like(rest)
            count = np.minimum(count, np.uint64(size - 1))
            rest = rest - count * np.uint64(stride)
        return inside & (rest + np.uint64(nbytes) <= np.uint64(self.inner))

    def fill(self, byte: int) -> None:
        """Set every byte of a buffer without gaps; one with gaps stays as it is, since they may be somebody's."""
        if self.span and not self.layout:
            self.views[1][self.offset : self.offset + self.span] = byte

    def mark(self, bit: int, value: bool, mask: np.ndarray | slice | None = None) -> None:
        """Set or clear a shadow bit; `mask` selects bytes of the span (all without it)."""
        if self.span == 0:
            return
        if self.shadow is None:
            self.shadow = np.zeros(self.length, np.uint8)
            self.shadow_views = {w: self.shadow.view(d) for w, d in _DTYPES.items()}
        part = self.shadow[self.offset : self.offset + self.span]
        where = slice(None) if mask is None else mask
        if value:
            self.declared |= bit
            part[where] |= np.uint8(bit)
        else:
            part[where] &= np.uint8(0xFF ^ bit)


class Memory:
    """All buffers of a launch. Use `add_array` / `add_tensor`, or hand in `Buffer`s."""

    def __init__(self, buffers: Sequence[Buffer] = ()) -> None:
        self.buffers: list[Buffer] = list(buffers)
        self.last: Buffer | None = None
        self._next = 0x0000_1000_0000_0000

    def invent(self, host: int, nbytes: int) -> int:
        """A free device address with the alignment of `host` modulo 256, a gigabyte away from any other."""
        address = self._next + host % 256
        self._next = -(-(address + nbytes + (1 << 30)) // (1 << 21)) * (1 << 21)
        return address

    def add_array(self, name: str, array: np.ndarray, *, address: int | None = None, writable: bool = True) -> int:
        """Map a NumPy array; returns its device address (invented unless given)."""
        return self._add(name, array.ctypes.data, array.itemsize, array.shape, array.strides, address, writable, array, array.dtype)

    def add_tensor(self, name: str, tensor: Any, *, address: int | None = None, writable: bool = True, at_own_address: bool = False) -> int:
        """Map a CPU torch tensor, strides respected; returns its device address."""
        size = tensor.element_size()
        strides = tuple(s * size for s in tensor.stride())
        host = tensor.data_ptr()
        if at_own_address:
            address = host
        shape, dtype = tuple(tensor.shape), tensor.dtype
        return self._add(name, host, size, shape, strides, address, writable, tensor, dtype)

    def _add(
        self,
        name: str,
        host: int,
        itemsize: int,
        shape: Sequence[int],
        strides: Sequence[int],
        address: int | None,
        writable: bool,
        keep: object,
        dtype: object,
    ) -> int:
        layout, inner = contiguous_part(itemsize, shape, strides)
        buffer = Buffer(name, 0 if address is None else address, host, inner, layout, writable, keep=keep) if address is not None else None
        if buffer is None:
            span = inner + sum(s * (n - 1) for s, n in layout)
            buffer = Buffer(name, self.invent(host, span), host, inner, layout, writable, keep=keep)
        buffer.description = f"{tuple(shape)} {dtype} strides {tuple(s // itemsize for s in strides)}"
        self.buffers.append(buffer)
        return buffer.address

    def find(self, name: str) -> Buffer:
        """The buffer of a name; `KeyError` without one."""
        for buffer in self.buffers:
            if buffer.name == name:
                return buffer
        raise KeyError(name)

    # ---- access

    def _resolve(self, address: np.ndarray, nbytes: int) -> list[tuple[Buffer, np.ndarray | None]]:
        bits = int(np.bitwise_or.reduce(address))
        if bits & (nbytes - 1):
            i = int(np.flatnonzero(address & np.uint64(nbytes - 1))[0])
            tensor = self.describe(int(address[i]))
            raise AccessFault("misaligned access", i, f"{nbytes} bytes at {tensor[1]}", tensor[0])
        low, high = int(address.min()), int(address.max()) + nbytes
        last = self.last
        if last is not None and last.address <= low and high <= last.end and (not last.layout or last.contains(address, nbytes).all()):
            return [(last, None)]
        for buffer in self.buffers:
            if buffer.address <= low and high <= buffer.end and (not buffer.layout or buffer.contains(address, nbytes).all()):
                self.last = buffer
                return [(buffer, None)]
        found: list[tuple[Buffer, np.ndarray | None]] = []
        rest = np.arange(address.shape[0])
        for buffer in self.buffers:
            if buffer.end <= low or buffer.address >= high:
                continue
            inside = buffer.contains(address[rest], nbytes)
            if inside.any():
                found.append((buffer, rest[inside]))
                rest = rest[~inside]
                if not rest.size:
                    return found
        i = int(rest[0])
        tensor = self.describe(int(address[i]))
        raise AccessFault("out of bounds", i, f"{nbytes} bytes at {tensor[1]}", tensor[0])

    def describe(self, address: int) -> tuple[str, str]:
        """Name of the buffer nearest to an address, and the address in words."""
        best: tuple[int, Buffer] | None = None
        for b in self.buffers:
            distance = max(b.address - address, address - (b.end - 1), 0)
            if best is None or distance < best[0]:
                best = (distance, b)
        if best is None:
            return "", f"{address:#x}; there are no buffers"
        distance, b = best
        offset = address - b.address
        if distance > 1 << 40:
            return "", f"{address:#x}, in no buffer"
        if 0 <= offset < b.span:
            rest, index = offset, []
            for stride, size in b.layout:
                count = min(rest // stride, size - 1) if stride else 0
                index.append(count)
                rest -= count * stride
            inner = f"byte {rest} of {b.inner}" + (f" at index {tuple(index)}" if index else "")
            return b.name, f"offset {offset} ({inner}) of {b.name!r} {b.description}"
        side = f"{-offset} bytes before the start" if offset < 0 else f"{offset - b.span} bytes past the end"
        return b.name, f"{address:#x}, {side} of {b.name!r} {b.description}, {b.span} bytes"

    def load(
        self,
        address: np.ndarray,
        width: int,
        count: int,
        watch: GlobalRaces | None = None,
        lanes: np.ndarray | None = None,
        manner: Manner = WEAK,
    ) -> list[np.ndarray]:
        """`count` consecutive elements of `width` bytes per address; `watch` is told who of `lanes` reads what may be written, and how."""
        parts = self._resolve(address, width * count)
        shift = np.uint64(width.bit_length() - 1)
        results: list[np.ndarray] = []
        for buffer, index in parts:
            mine = address if index is None else address[index]
            place = ((mine - np.uint64(buffer.origin)) >> shift).astype(np.int64)
            if buffer.shadow is not None:
                self._check_written(buffer, place, index, width, count, address)
            if watch is not None and buffer.writable:
                assert lanes is not None
                try:
                    watch.read(buffer, lanes if index is None else lanes[index], place, width, count, manner)
                except AccessFault as fault:
                    raise self._located(fault, index, address, width) from None
            view = buffer.views[width]
            loaded = [view[place + k] if k else view[place] for k in range(count)]
            if index is None:
                return loaded
            if not results:
                results = [np.empty(address.shape[0], v.dtype) for v in loaded]
            for out, v in zip(results, loaded, strict=True):
                out[index] = v
        return results

    def _check_written(
        self, buffer: Buffer, place: np.ndarray, index: np.ndarray | None, width: int, count: int, address: np.ndarray
    ) -> None:
        shadow = buffer.shadow_views[width]
        pattern = shadow.dtype.type(int.from_bytes(bytes([UNWRITTEN]) * width, "little"))
        for k in range(count):
            bad = shadow[place + k] & pattern
            if bad.any():
                i = int(np.flatnonzero(bad)[0])
                i = i if index is None else int(index[i])
                where = self.describe(int(address[i]) + k * width)[1]
                raise AccessFault("uninitialised read", i, f"nobody has written {where}", buffer.name)

    def _located(self, fault: AccessFault, index: np.ndarray | None, address: np.ndarray, width: int) -> AccessFault:
        """A fault of the lanes at positions `index`, with its place in words."""
        i = fault.index if index is None else int(index[fault.index])
        where = self.describe(int(address[min(i, address.size - 1)]))[1]
        return AccessFault(fault.check, i, f"{fault.message}: {where}", fault.tensor)

    def store(
        self,
        address: np.ndarray,
        width: int,
        values: list[np.ndarray],
        watch: GlobalRaces | None = None,
        lanes: np.ndarray | None = None,
        manner: Manner = WEAK,
    ) -> None:
        """Store one element of `width` bytes per entry of `values`, consecutive, at each address; `watch` is told which of `lanes` does."""
        shift = np.uint64(width.bit_length() - 1)
        count = len(values)
        for buffer, index in self._resolve(address, width * count):
            mine = address if index is None else address[index]
            place = ((mine - np.uint64(buffer.origin)) >> shift).astype(np.int64)
            if not buffer.writable:
                i = 0 if index is None else int(index[0])
                raise AccessFault("write to read-only tensor", i, self.describe(int(address[i]))[1], buffer.name)
            if buffer.shadow is not None:
                self._check_owned(buffer, place, index, width, count, address)
            mine_values = values if index is None else [v if v.shape[0] == 1 else v[index] for v in values]
            mine_lanes = lanes if index is None or lanes is None else lanes[index]
            met = None
            try:
                if watch is not None:
                    assert mine_lanes is not None
                    met = watch.write(buffer, mine_lanes, place, width, mine_values, manner)
                view = buffer.views[width]
                for k, value in enumerate(mine_values):
                    view[place + k] = value
                if watch is not None and met is not None:
                    watch.after(buffer, place, width, mine_values, met)
            except AccessFault as fault:
                raise self._located(fault, index, address, width) from None

    def _check_owned(
        self, buffer: Buffer, place: np.ndarray, index: np.ndarray | None, width: int, count: int, address: np.ndarray
    ) -> None:
        shadow = buffer.shadow_views[width]
        pattern = shadow.dtype.type(int.from_bytes(bytes([FOREIGN]) * width, "little"))
        clear = shadow.dtype.type(int.from_bytes(bytes([0xFF ^ UNWRITTEN]) * width, "little"))
        for k in range(count):
            now = shadow[place + k]
            bad = now & pattern
            if bad.any():
                i = int(np.flatnonzero(bad)[0])
                i = i if index is None else int(index[i])
                where = self.describe(int(address[i]) + k * width)[1]
                raise AccessFault("write outside the owned rows", i, where, buffer.name)
            shadow[place + k] = now & clear


def contiguous_part(itemsize: int, shape: Sequence[int], strides: Sequence[int]) -> tuple[tuple[tuple[int, int], ...], int]:
    """Split a strided shape into outer (stride, size) pairs and the bytes that are contiguous at each of their points."""
    if 0 in shape:
        return (), 0
    dims = sorted((s, n) for n, s in zip(shape, strides, strict=True) if n > 1 and s != 0)
    inner = itemsize
    outer: list[tuple[int, int]] = []
    for stride, size in dims:
        if stride == inner and not outer:
            inner *= size
        else:
            outer.append((stride, size))
    return tuple(sorted(outer, reverse=True)), inner
