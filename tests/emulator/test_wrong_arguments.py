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
from tests.cpu.test_validate import CALLS, behind_a_compiled_function, sweep
from tests.emulator.emulated import emulated


def on_this_device(change: dict[str, Any]) -> bool:
    """Not a tensor of another device: here all tensors are host memory, relabelled."""
    tensors = [t for value in change.values() for t in (value, *getattr(value, "__dict__", {}).values()) if isinstance(t, torch.Tensor)]
    return all(t.device.type == "cpu" for t in tensors)


CASES = [c for c in sweep() if behind_a_compiled_function(*c.values) and on_this_device(c.values[1])]


@pytest.mark.parametrize(("name", "change", "blamed"), CASES)
def test_refused_before_the_launch(name, change, blamed):
    call, make, _ = CALLS[name]
    a = make(**change)
    before = {key: value.clone() for key, value in a.items() if isinstance(value, torch.Tensor) and value.device.type == "cpu"}
    launched = []
    with emulated("sm_100a", on_result=lambda kernel, result: launched.append(kernel)), pytest.raises(ck.CuteKernelsError) as caught:
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


def bind(call: Any, kept: dict[str, Any]) -> Bound:
    """`ops.bind`, with host memory as the device's."""
    bound = ck.bind(call, **kept)
    bound._prepare(ops._OPERATIONS[call], {n: v for n, v in kept.items() if isinstance(v, torch.Tensor)})
    return bound


@pytest.mark.parametrize(("name", "change", "blamed"), CASES)
def test_a_right_call_promises_nothing_about_the_next_one(name, change, blamed, nowhere):
    """Plain and bound calls remember what an earlier call was; whatever changes after it is still refused, and named."""
    call, make, _ = CALLS[name]
    good = {**make(), "target": Target.named("sm_100a")}
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
