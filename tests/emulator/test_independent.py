"""Launches whose first block waits at its end: the kernels of a layer as `independent` calls, and what is said when it does not wait."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import pytest

from cute_kernels import ops
from cute_kernels.compile import loader
from cute_kernels.compile.spec import KernelSpec
from cute_kernels.indices import IdSource
from cute_kernels.target import Target
from ptx_emulator import KernelFault, device
from tests.emulator import emulated
from tests.support.compress import make_compress_case
from tests.support.compress_check import check_compress
from tests.support.index_case import check_indices, make_index_case
from tests.support.insert import check_insert, make_insert_case
from tests.support.steps import Request, mix

TARGETS = (Target("sm100", "sm_100a"), Target("sm120", "sm_120a"))
_LAST_WAIT = re.compile(r"griddepcontrol\.wait;(?=(?:(?!griddepcontrol).)*\Z)", re.DOTALL)
_FIRST_GUARD = re.compile(r"setp\.ne(\.\w+\s+%p\d+, %r\d+, 0;\s*@%p\d+ bra\s+\$\w+;\s*(?://.*\s*)?griddepcontrol\.wait;)")


def compress_store(target: Target, independent: bool) -> None:
    """Rows that close windows, and blocks without any."""
    kv_format = "bf16" if target.family == "sm100" else "fp8_ds_mla"
    case = make_compress_case([Request(0, 9), Request(30, 1)], ratio=4, kv_format=kv_format, padding=3)
    after = case.clone()
    ops.compress_store(*after.args(), **after.kwargs(), independent=independent)
    check_compress(case, after)


def sparse_indices(target: Target, independent: bool) -> None:
    case = make_index_case(mix(20, 4, ratio=4), source=IdSource.LOCAL, ratio=4, k=40, padding=3)
    check_indices(case, ops.sparse_indices(*case.args(), **case.kwargs(), independent=independent))


def qkv_insert(target: Target, independent: bool) -> None:
    """Seven tokens of nine units: the last block has a warp without work."""
    case = make_insert_case(7, heads=8, padded_heads=8, kv_format="bf16" if target.family == "sm100" else "fp8_ds_mla")
    after = case.clone()
    check_insert(case, after, ops.qkv_insert(*after.args(), **after.kwargs(), independent=independent))


CALLS = (compress_store, sparse_indices, qkv_insert)


def edited(edit: Callable[[str], str]) -> loader.Executor:
    """The emulator's executor with a kernel's PTX changed."""

    def executor(compiled: loader.CompiledObject, spec: KernelSpec) -> device.EmulatedKernel:
        kernel = emulated.executor(compiled, spec)
        return dataclasses.replace(kernel, ptx=edit(kernel.ptx))

    return executor


def without_last_wait(ptx: str) -> str:
    text, count = _LAST_WAIT.subn("", ptx)
    assert count == 1
    return text


def never_waiting_first(ptx: str) -> str:
    """The waits at the start, one of each role, are taken by the launches that should skip them."""
    text, count = _FIRST_GUARD.subn(r"setp.eq\1", ptx)
    assert count >= 1
    return text


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("call", CALLS, ids=lambda c: c.__name__)
def test_independent_call(target: Target, call: Callable[[Target, bool], None]) -> None:
    with emulated.emulated(target):
        call(target, True)


@pytest.mark.parametrize("call", CALLS, ids=lambda c: c.__name__)
def test_a_kernel_that_leaves_without_the_late_wait(call: Callable[[Target, bool], None]) -> None:
    target = TARGETS[0]
    with emulated.emulated(target), loader.use_executor(edited(without_last_wait)):
        call(target, False)
        with pytest.raises(KernelFault) as caught:
            call(target, True)
    assert caught.value.check == "missing griddepcontrol.wait"
    with emulated.emulated(target):
        call(target, True)  # the kernel itself: it shares a library with the edited one, whose launches are not its own


@pytest.mark.parametrize("call", CALLS, ids=lambda c: c.__name__)
def test_a_dependent_launch_that_waits_late(call: Callable[[Target, bool], None]) -> None:
    target = TARGETS[0]
    with emulated.emulated(target), loader.use_executor(edited(never_waiting_first)), pytest.raises(KernelFault, match="before griddep"):
        call(target, False)
