"""Whether a call wrote what it should: every output byte compared with the reference, on the buffers that are timed.

A `Judge` fills the outputs of a call with poison, lets the plain PyTorch reference write copies of them, and compares whole storages
afterwards: so a kernel that writes nothing, or outside its rows, is found out. It is used before and after a timing, with fresh poison
between the capture of the graph and its replays.

Index tables, gathered rows and state rows must be equal in every byte. Stored KV rows and q differ from the reference where another
order of summation or an approximate exponential meets a rounding boundary: a value may be one rounding step of its format off, and at
most `SHARE` of them may differ at all. (The bounds against float64 are the tests' business.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from benchmarks.calls import Call, storage
from cute_kernels.kv_format import HEAD_DIM, NOPE_DIM, SCALE_GROUP, format_of
from cute_kernels.launching import reference_call
from cute_kernels.reference.quant import packed_views, scale_values

POISON = 0x7F  # as bf16 and fp32 a huge number, as E4M3 a NaN, as an index no row of any pool
SHARE = 0.01
_CHUNK = 1 << 26  # values compared at a time


class Mismatch(AssertionError):
    """An output is not what the reference writes."""


@dataclass(frozen=True)
class _Values:
    """Stored values as fp32 and their resolution: one step is `relative * |value| + floor`."""

    value: torch.Tensor
    relative: float
    floor: torch.Tensor | float


def reference(call: Call, family: str) -> None:
    """The same call by the plain PyTorch reference, on the device of its tensors."""
    more = {"form": "combined" if family == "sm100" else "segments"} if call.operation == "sparse_indices" else {}
    reference_call(call.operation, call.arguments, **more)


def poison(call: Call) -> None:
    """Fills whatever the call is to write; of a state pool the rows of this step, which nothing may read from there."""
    for name, out in call.outputs().items():
        if name != "state":
            storage(out).fill_(POISON)
            continue
        if call.arguments["kv_score"] is None:
            continue
        slots = call.arguments["state_slots"]
        slots = slots[slots >= 0]
        value = torch.full((), POISON * 0x01010101, dtype=torch.int32, device=out.device)
        out.view(torch.int32)[slots // out.shape[1], slots % out.shape[1]] = value


class Judge:
    """What one call has to write, and whether it did.

    steps  how many rounding steps off a stored value may be (1; more for kernels with approximations of their own)
    share  how many of the stored values may differ at all
    """

    def __init__(
        self,
        call: Call,
        family: str,
        *,
        steps: float = 1.0,
        share: float = SHARE,
    ) -> None:
        self.call, self.steps, self.share = call, steps, share
        poison(call)
        self.expected = call.clone(*{name.partition(".")[0] for name in call.outputs()})
        reference(self.expected, family)

    def poison(self) -> None:
        poison(self.call)

    def check(self) -> float:
        """The largest share of an output's values that differ from the reference; `Mismatch` if any is off by more than it may."""
        worst = 0.0
        for name, want in self.expected.outputs().items():
            worst = max(worst, self._check(name, self.call.outputs()[name], want))
        return worst

    def _check(self, name: str, got: torch.Tensor, want: torch.Tensor) -> float:
        one, other = storage(got), storage(want)
        where = f"{self.call.operation}: {name}"
        rounded = name == "kv_cache" or (name == "out" and self.call.operation == "qkv_insert")
        if not rounded or torch.equal(one, other):
            if not torch.equal(one, other):
                wrong = (one != other).sum().item()
                raise Mismatch(f"{where}: {wrong} of {one.numel()} bytes differ from the reference")
            return 0.0
        if name == "kv_cache":
            self._check_exact_bytes(where, got, want)
        differ, total = 0, 0
        for a, b in zip(_values(got), _values(want), strict=True):
            same = (a.value == b.value) | (a.value.isnan() & b.value.isnan())
            step = a.relative * torch.maximum(a.value.abs(), b.value.abs()) + torch.maximum(
                torch.as_tensor(a.floor, device=got.device), torch.as_tensor(b.floor, device=got.device)
            )
            off = ~same & ~((a.value - b.value).abs() <= self.steps * step)  # NaN against a number is off, too
            if bool(off.any()):
                at = off.nonzero()[0].tolist()
                raise Mismatch(
                    f"{where}: {off.sum().item()} values are off by more than {self.steps:g} rounding steps, the first at {at}: "
                    f"{a.value[tuple(at)].item():g}, expected {b.value[tuple(at)].item():g}"
                )
            differ, total = differ + int((~same).sum().item()), total + same.numel()
        if differ > self.share * total:
            raise Mismatch(f"{where}: {differ} of {total} values differ from the reference, more than {self.share:.0%}")
        return differ / max(total, 1)

    @staticmethod
    def _check_exact_bytes(where: str, got: torch.Tensor, want: torch.Tensor) -> None:
        """Bytes of a cache that hold no rounded value: between the pages, and scales of packed rows, which may be one power of two off."""
        values = torch.zeros_like(storage(got))
        view = values.view(got.dtype).as_strided(got.shape, got.stride(), got.storage_offset())
        packed = got.dtype == torch.uint8
        if packed:
            for part in packed_views(view):
                part.fill_(1)
            ours, theirs = packed_views(got)[1], packed_views(want)[1]
            if not torch.equal(ours[..., -1], theirs[..., -1]) or bool(((ours.int() - theirs.int()).abs() > 1).any()):
                raise Mismatch(f"{where}: scale bytes differ from the reference")
        else:
            view.view(torch.uint8).fill_(1)
        if bool(((storage(got) != storage(want)) & (values == 0)).any()):
            raise Mismatch(f"{where}: bytes outside its rows changed")


def _values(x: torch.Tensor) -> Iterator[_Values]:
    """The values of q [n, heads, 512] or of a cache [pages, rows, 512 or 584], in parts."""
    width = max(1, _CHUNK // max(x[:1].numel(), 1))
    for begin in range(0, x.shape[0], width):
        part = x[begin : begin + width]
        if part.dtype == torch.uint8 and format_of(part).packed:
            data, footers = packed_views(part)
            scale = scale_values(footers[..., : NOPE_DIM // SCALE_GROUP].clamp(1, 254)).repeat_interleave(SCALE_GROUP, dim=-1)
            codes = data[..., :NOPE_DIM].contiguous().view(torch.float8_e4m3fn).float()
            yield _Values(codes * scale, 2.0**-3, scale * 2.0**-9)
            yield _bf16(data[..., NOPE_DIM:].contiguous().view(torch.bfloat16))
        elif part.dtype == torch.float8_e4m3fn:
            yield _Values(part.contiguous().float(), 2.0**-3, 2.0**-9)
        else:
            yield _bf16(part)


def _bf16(x: torch.Tensor) -> _Values:
    """A small value beside large ones is what rotation leaves of a difference: its step is 2^-18 of the row's largest value at least."""
    value = x.float()
    return _Values(value, 2.0**-7, value.abs().amax(-1, keepdim=True) * (2.0**-18 if x.shape[-1] == HEAD_DIM else 2.0**-16))
