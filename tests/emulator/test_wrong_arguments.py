"""Every wrong argument behind the real compiled functions: refused before a launch, with a typed error, and nothing written.

The compiled function checks what it can see, the host path the rest; the emulated device would name any access that slips through.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cute_kernels as ck
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
