"""Named cases of every kernel for `python -m ptx_emulator KERNEL CASE --target T`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from cute_kernels import ops
from cute_kernels.compile.spec import CompressStoreSpec
from cute_kernels.device.sparse_indices import FEW_ROWS
from cute_kernels.indices import IdSource
from cute_kernels.save_policy import SavePolicy
from cute_kernels.scratch import compress_scratch
from cute_kernels.target import Target, all_targets
from ptx_emulator.device import Settings
from tests.emulator.emulated import emulated
from tests.support.compress import make_compress_case
from tests.support.compress_check import check_compress
from tests.support.compress_plan import crowded
from tests.support.gather import check_converted, check_gathered, make_convert_case, make_gather_case
from tests.support.index_case import check_indices, make_index_case
from tests.support.insert import check_insert, make_insert_case
from tests.support.steps import Request, mix

Run = Callable[[str, Settings], str]
TARGETS = tuple(str(t) if t.gpu_arch == "sm_90a" else t.gpu_arch for t in all_targets())


def _device(target: Target, given: Settings) -> Any:
    changes = {"on_result": given.on_result, "approximation": given.approximation, "statistics": given.statistics}
    return emulated(target, **changes)


def _kv_format(target: Target) -> str:
    """The format that the family's cases use."""
    return "bf16" if target.family == "sm100" else "fp8_ds_mla"


def _compress(ratio: int, rows: list[Request] | None, *, independent: bool = False, **options: Any) -> Run:
    """Steps of these rows; None: crowded ones."""

    def run(name: str, settings: Settings) -> str:
        target = Target.named(name)
        kv_format = _kv_format(target)
        if rows is None:
            case = crowded(CompressStoreSpec(target, ratio=ratio, kv_format=kv_format), ratio=ratio, kv_format=kv_format)
        else:
            case = make_compress_case(rows, ratio=ratio, kv_format=kv_format, **options)
        after = dataclasses.replace(case.clone(), scratch=compress_scratch("cpu"))
        with _device(target, settings):
            ops.compress_store(*after.args(), **after.kwargs(), independent=independent)
        found = check_compress(case, after)
        return f"{found.rows} rows stored, {found.saved} saved; largest error {found.max_error:.3g}, allowed {found.bound:.3g}"

    return run


def _indices(source: IdSource, rows: list[Request], *, independent: bool = False, **options: Any) -> Run:
    def run(name: str, settings: Settings) -> str:
        target = Target.named(name)
        case = make_index_case(rows, source=source, ratio=128 if source is IdSource.ALL_GROUPS else 4, **options)
        with _device(target, settings):
            tables = ops.sparse_indices(*case.args(), **case.kwargs(), independent=independent)
        check_indices(case, tables)
        return f"{case.rows} rows, every lane and length exact"

    return run


def _insert(rows: int, heads: int, *, independent: bool = False) -> Run:
    def run(name: str, settings: Settings) -> str:
        target = Target.named(name)
        case = make_insert_case(rows, heads=heads, padded_heads=max(heads, 8), kv_format=_kv_format(target))
        after = case.clone()
        with _device(target, settings):
            q = ops.qkv_insert(*after.args(), **after.kwargs(), independent=independent)
        check_insert(case, after, q)
        return f"{rows} rows of {heads} heads; KV rows exact, q within one step ({torch.isfinite(q.float()).all().item() and 'finite'})"

    return run


def _gather(kv_format: str, lengths: list[int]) -> Run:
    def run(name: str, settings: Settings) -> str:
        target = Target.named(name)
        case = make_gather_case(lengths, kv_format=kv_format)
        guarded = case.guarded_out()
        with _device(target, settings):
            ops.gather_upconvert(*case.args(guarded.out), **case.kwargs(), target=target)
        guarded.check()
        check_gathered(case, guarded.out)
        return f"{case.rows} rows of {len(lengths)} requests, every bit exact, nothing else written"

    return run


def _convert(rows: int, k: int, *, compact: bool, prefill: bool) -> Run:
    def run(name: str, settings: Settings) -> str:
        target = Target.named(name)
        case = make_convert_case(rows, 5, k, prefill=prefill)
        out, counts = case.guarded()
        with _device(target, settings):
            kwargs = {**case.kwargs(), "return_counts": compact, "out": out.out, "counts": counts.out if compact else None}
            result = ops.convert_indices(*case.args(), **kwargs, target=target)
        out.check()
        counts.check()
        check_converted(case, *(result if compact else (result,)))
        return f"{rows} rows of {k} ids, every lane exact, nothing else written"

    return run


def _of_ratio(ratio: int) -> dict[str, Run]:
    decode = [Request(k * ratio - 1 + k % 2, 1) for k in range(1, 33)]
    crowd = {"crowded": _compress(4, None)} if ratio == 4 else {}
    return {
        **crowd,
        "prefill": _compress(ratio, [Request(0, 2 * ratio + 40), Request(3 * ratio - 2, 60)]),
        "decode": _compress(ratio, decode),
        "speculative": _compress(ratio, [Request(k * ratio - 2, 4) for k in range(1, 13)], save=SavePolicy(rollback=3)),
        "padded": _compress(ratio, decode[:9], padding=23),
        "independent": _compress(ratio, decode[:9], padding=3, independent=True),
    }


CASES: dict[str, dict[str, Run]] = {
    "compress_store-4": _of_ratio(4),
    "compress_store-128": _of_ratio(128),
    "sparse_indices": {
        "prefill": _indices(IdSource.LOCAL, mix(300, 4, ratio=4), k=512),
        "decode": _indices(IdSource.LOCAL, [Request(500 + 37 * k, 1) for k in range(32)], k=512, garbage=0.0),
        "many-rows": _indices(IdSource.LOCAL, mix(FEW_ROWS + 8, 4, ratio=4), k=64),
        "window-only": _indices(IdSource.NONE, mix(64, 5, ratio=4)),
        "all-groups": _indices(IdSource.ALL_GROUPS, [Request(3000 + 100 * k, 1) for k in range(16)], width=64),
        "padded": _indices(IdSource.GLOBAL, mix(20, 5, ratio=4), k=512, padding=12, stale_blocks=True),
        "independent": _indices(IdSource.LOCAL, mix(20, 4, ratio=4), k=40, padding=3, independent=True),
    },
    "qkv_insert": {"decode": _insert(32, 8), "prefill": _insert(100, 16), "independent": _insert(7, 8, independent=True)},
    "gather_upconvert": {name: _gather(name, [40, 0, 133, 1]) for name in ("fp8_inline", "fp8_ds_mla", "fp8")},
    "convert_indices": {
        "compact": _convert(40, 520, compact=True, prefill=False),
        "in-place": _convert(40, 520, compact=False, prefill=False),
        "prefill": _convert(40, 520, compact=True, prefill=True),
    },
}
