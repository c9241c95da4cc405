"""Every wrong argument behind the real compiled functions: refused before a launch, with a typed error, and nothing written.

The compiled function checks what it can see, the host path the rest; the emulated device would name any access that slips through.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import tvm_ffi

import cute_kernels as ck
from cute_kernels import ops
from cute_kernels.binding import Bound
from cute_kernels.target import Target
from ptx_emulator import device
from tests.cpu.test_validate import CALLS, behind_a_compiled_function, sweep, taken_by
from tests.emulator.emulated import at_alignment, emulated


def on_this_device(change: dict[str, Any]) -> bool:
    """Not a tensor of another device: here all tensors are host memory, relabelled."""
    tensors = [t for value in change.values() for t in (value, *getattr(value, "__dict__", {}).values()) if isinstance(t, torch.Tensor)]
    return all(t.device.type == "cpu" for t in tensors)


CASES = [c for c in sweep() if behind_a_compiled_function(*c.values) and on_this_device(c.values[1])]


@pytest.mark.parametrize(("name", "change", "blamed"), CASES)
def test_refused_before_the_launch(name, change, blamed):
    call, make, _ = CALLS[name]
    target, needed = taken_by(blamed)
    a = make(**{**needed, **change})
    before = {key: value.clone() for key, value in a.items() if isinstance(value, torch.Tensor) and value.device.type == "cpu"}
    launched = []
    with emulated(target, on_result=lambda result: launched.append(result.kernel)), pytest.raises(ck.CuteKernelsError) as caught:
        call(**a)
    assert isinstance(caught.value, ck.InvalidArgument | ck.UnsupportedRequest)
    if isinstance(caught.value, ck.InvalidArgument):
        assert caught.value.argument == blamed
    assert not launched
    for key, value in before.items():
        torch.testing.assert_close(a[key].float(), value.float(), rtol=0, atol=0, equal_nan=True)


@pytest.fixture
def nowhere(monkeypatch):
    """Compiled host functions as they are; launches go nowhere, and TVM-FFI's converted tensors stay torch's, to be relabelled."""
    launched: list[str] = []
    real = tvm_ffi.from_dlpack
    monkeypatch.setattr(device.EmulatedKernel, "_run", lambda self, kernel, config, arguments: launched.append(kernel))
    monkeypatch.setattr(tvm_ffi, "from_dlpack", lambda value: value if isinstance(value, torch.Tensor) else real(value))
    with emulated("sm_100a"):
        yield launched


def bind(call: Any, kept: dict[str, Any]) -> Any:
    """`ops.bind`, with host memory as the device's."""
    bound = Bound(call, ops._OPERATIONS[call], kept)
    bound._prepare(ops._OPERATIONS[call], {n: v for n, v in kept.items() if isinstance(v, torch.Tensor)})
    return bound.call


@pytest.mark.parametrize(("name", "change", "blamed"), CASES)
def test_a_right_call_promises_nothing_about_the_next_one(name, change, blamed, nowhere):
    """Plain and bound calls remember what an earlier call was; whatever changes after it is still refused, and named."""
    call, make, _ = CALLS[name]
    target, needed = taken_by(blamed)
    good = {**make(**needed), "target": target}
    bound = bind(call, {n: v for n, v in good.items() if n not in change})
    varying = {n: good[n] for n in change}
    for right, wrong in ((lambda: call(**good), lambda: call(**{**good, **change})), (lambda: bound(**varying), lambda: bound(**change))):
        right()
        before = len(nowhere)
        right()
        assert len(nowhere) == before + 1
        with pytest.raises(ck.CuteKernelsError) as caught:
            wrong()
        if isinstance(caught.value, ck.InvalidArgument):
            assert caught.value.argument == blamed
        assert len(nowhere) == before + 1
        right()
        assert len(nowhere) == before + 2


int32 = {"dtype": torch.int32}
SIX = ck.CombinedIndices(torch.zeros(6, 136, **int32), torch.zeros(6, **int32))
NARROW = ck.CombinedIndices(torch.zeros(7, 132, **int32), torch.zeros(7, **int32))
# Calls of other extents, each right or wrong by itself, that must not pass for the call before them.
LATER: list[tuple[str, dict[str, Any], dict[str, Any], str | None]] = [
    # operation, the earlier call, what is different in the later one, the argument that is wrong then
    ("sparse_indices", {"num_rows": None, "out": None}, dict.fromkeys(("positions", "token_to_req", "slots", "ids"), 5), None),
    ("sparse_indices", {"width": None, "out": None}, {"ids": torch.full((6, 12), -1, **int32)}, None),
    ("sparse_indices", {"width": None, "out": NARROW}, {"ids": torch.full((6, 12), -1, **int32)}, "out.table"),
    ("sparse_indices", {"num_rows": None, "out": SIX}, dict.fromkeys(("positions", "token_to_req", "slots"), 5), "out.table"),
    ("sparse_indices", {"num_rows": None, "out": None}, dict.fromkeys(("positions", "token_to_req", "slots"), 0), None),
    ("sparse_indices", {"out": None}, {"num_rows": 9}, None),
    ("sparse_indices", {"out": None}, {"slots": None}, None),
    ("qkv_insert", {"out": None}, dict.fromkeys(("q", "kv", "slots", "positions"), 4), None),
    ("qkv_insert", {"out": None, "padded_heads": None}, {"q": torch.zeros(6, 7, 512).bfloat16()}, None),
    ("qkv_insert", {"out": None}, dict.fromkeys(("q", "kv", "positions"), 0), None),
    ("qkv_insert", {}, dict.fromkeys(("q", "kv", "positions"), 4), "out"),
    ("qkv_insert", {}, {"cos_sin": torch.zeros(0, 64)}, "cos_sin"),
    ("qkv_insert", {}, {"kv_scale": 1.0}, None),
    ("gather_upconvert", {}, {"block_table": 1, "seq_starts": 1}, "workspace_starts"),
    ("gather_upconvert", {}, {"seq_starts": None}, None),
    ("gather_upconvert", {}, {"out": 0}, None),
    ("convert_indices", {"out": None, "counts": None}, dict.fromkeys(("ids", "token_to_req", "prefill_request_id"), 4), None),
    ("convert_indices", {"out": None, "counts": None}, {"prefill_request_id": None, "workspace_starts": None}, None),
    ("convert_indices", {"out": None, "counts": None}, dict.fromkeys(("ids", "token_to_req", "prefill_request_id"), 0), None),
    ("convert_indices", {"counts": None}, {"return_counts": False}, None),
    ("convert_indices", {}, {"token_to_req": 4}, "token_to_req"),
    ("compress_store", {}, dict.fromkeys(("state_slots", "positions", "kv_slots"), 4), None),
    ("compress_store", {}, {"state_slots": 0}, None),
    ("compress_store", {}, {"kv_score": None, "ape": None}, None),
    ("compress_store", {}, {"kv_score": 3}, "kv_score"),
    ("compress_store", {}, {"save": ck.SavePolicy.EVERY_ROW}, None),
]


@pytest.mark.parametrize(("name", "earlier", "change", "blamed"), LATER, ids=[f"{x[0]}-{'-'.join(x[2])}-{i}" for i, x in enumerate(LATER)])
def test_a_bound_call_launches_what_the_plain_call_launches(name, earlier, change, blamed, nowhere, monkeypatch):
    """Kernel, arguments and result of a bound call that follows another one are those of the plain call; so is its error."""
    call, make, _ = CALLS[name]
    aligned = {n: at_alignment(v, 32) if isinstance(v, torch.Tensor) else v for n, v in make(**earlier).items()}
    good = {**aligned, "target": Target.named("sm_100a")}
    later = {n: good[n][:new] if type(new) is int and isinstance(good[n], torch.Tensor) else new for n, new in change.items()}
    bound = bind(call, {n: v for n, v in good.items() if n not in change})
    seen: list[Any] = []
    before: set[int] = set()
    results: list[Any] = []  # kept, so that no address comes back
    plain = device.EmulatedKernel.__call__

    def recorded(self: device.EmulatedKernel, *arguments: Any) -> None:
        seen.append((self.name, [a.data_ptr() if isinstance(a, torch.Tensor) and a.numel() else a for a in arguments]))
        plain(self, *arguments)

    monkeypatch.setattr(device.EmulatedKernel, "__call__", recorded)

    def outcome(run: Any) -> Any:
        seen.clear()
        try:
            result = run()
        except ck.InvalidArgument as error:
            return "refused", error.argument
        results.append(result)
        tensors = list(vars(result).values()) if isinstance(result, ck.CombinedIndices) else result
        tensors = [] if tensors is None else [tensors] if isinstance(tensors, torch.Tensor) else tensors
        given = {t.data_ptr() for v in good.values() for t in (v, *getattr(v, "__dict__", {}).values()) if isinstance(t, torch.Tensor)}
        new = {t.data_ptr() for t in tensors if t.numel()} - given
        assert not new & before, "a new output is another one on each call"
        before.update(new)
        shapes = [(t.shape, t.stride(), t.dtype, t.data_ptr() in new) for t in tensors]
        return [(kernel, [None if a in new else a for a in arguments]) for kernel, arguments in seen], shapes

    varying = {n: good[n] for n in change}
    for _ in range(2):
        for given in (varying, later, varying):
            want = outcome(lambda given=given: call(**{**good, **given}))
            assert outcome(lambda given=given: bound(**given)) == want
            assert want == ("refused", blamed) if given is later and blamed else want[0] != "refused"
