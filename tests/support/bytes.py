"""Number formats and cache bytes straight from their definitions, in numpy float64. No code of the library."""

from __future__ import annotations

import numpy as np

F64 = np.ndarray
NOPE = 448
GROUP = 64
ROW_BYTES = {"bf16": 1024, "fp8": 512, "fp8_ds_mla": 584}


def _e4m3_value(code: int) -> float:
    exponent, mantissa = (code >> 3) & 15, code & 7
    if code & 0x7F == 0x7F:
        return float("nan")
    magnitude = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return -magnitude if code & 0x80 else magnitude


E4M3 = np.array([_e4m3_value(c) for c in range(256)])
_GRID = E4M3[:127]
_MIDDLES = (_GRID[1:] + _GRID[:-1]) / 2


def round_e4m3(x: F64) -> F64:
    """The E4M3 value nearest to each x (ties to the even code), saturating at +-448."""
    magnitude = np.abs(x)
    code = np.searchsorted(_MIDDLES, magnitude, side="left")
    tie = (code < 126) & (magnitude == _MIDDLES[np.minimum(code, 125)]) & (code % 2 == 1)
    return np.copysign(_GRID[code + tie], x)


def encode_e4m3(x: F64) -> np.ndarray:
    """Codes uint8 of the E4M3 values nearest to finite x, the sign of zero kept."""
    rounded = round_e4m3(x)
    return (np.searchsorted(_GRID, np.abs(rounded)) | np.where(np.signbit(rounded), 0x80, 0)).astype(np.uint8)


def encode_bf16(x: F64) -> np.ndarray:
    """Little-endian bytes uint8 [..., 2n] of the bf16 values nearest to x [..., n]."""
    words = round_bf16(x).astype(np.float32).view(np.uint32) >> 16
    return np.stack([words & 0xFF, words >> 8], axis=-1).astype(np.uint8).reshape(*x.shape[:-1], -1)


def round_bf16(x: F64) -> F64:
    """The bf16 value nearest to each finite x, ties to even; infinity beyond the largest."""
    x = np.asarray(x, dtype=np.float64)
    _, exponent = np.frexp(x)
    quantum = np.exp2(np.maximum(exponent - 8, -133).astype(np.float64))
    rounded = np.round(x / quantum) * quantum
    return np.where(np.abs(rounded) > 3.3895313892515355e38, np.copysign(np.inf, x), rounded)


def scale_byte(amax: F64, clamp: str) -> np.ndarray:
    """UE8M0 byte: 127 + ceil(log2(amax / 448)), the scale ("scale") or amax ("amax") being at least 1e-4."""
    scale = np.maximum(amax / 448, 1e-4) if clamp == "scale" else np.maximum(amax, 1e-4) / 448
    mantissa, exponent = np.frexp(scale)
    return np.where(mantissa == 0.5, exponent - 1, exponent) + 127


def bf16_values(raw: np.ndarray) -> F64:
    """bf16 little-endian bytes uint8 [..., 2n] -> float64 [..., n]."""
    words = raw[..., 0::2].astype(np.uint32) | raw[..., 1::2].astype(np.uint32) << 8
    return (words << 16).view(np.float32).astype(np.float64)


class Pool:
    """Byte addresses of a pool's rows inside a flat uint8 storage."""

    def __init__(self, kv_format: str, base: int, pages: int, page_rows: int, page_stride: int):
        self.kv_format, self.base, self.pages, self.page_rows, self.page_stride = kv_format, base, pages, page_rows, page_stride

    def spans(self, slot: int) -> list[tuple[int, int]]:
        """(first byte, byte count) of each piece of the row at `slot`: one, or data and footer of a packed row."""
        page, offset = divmod(slot, self.page_rows)
        start = self.base + page * self.page_stride
        if self.kv_format != "fp8_ds_mla":
            size = ROW_BYTES[self.kv_format]
            return [(start + offset * size, size)]
        return [(start + offset * 576, 576), (start + self.page_rows * 576 + offset * 8, 8)]

    def raw(self, storage: np.ndarray, slot: int) -> np.ndarray:
        """The bytes of one row, its pieces joined."""
        return np.concatenate([storage[a : a + n] for a, n in self.spans(slot)])

    def values(self, storage: np.ndarray, slot: int) -> F64:
        """float64 [512] of one row, per-tensor scale not applied."""
        raw = self.raw(storage, slot)
        if self.kv_format == "bf16":
            return bf16_values(raw)
        if self.kv_format == "fp8":
            return E4M3[raw]
        scales = np.exp2(raw[576:583].astype(np.float64) - 127)
        return np.concatenate([E4M3[raw[:NOPE]] * np.repeat(scales, GROUP), bf16_values(raw[NOPE:576])])
