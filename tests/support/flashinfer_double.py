"""A strict double of FlashInfer's last step: what its C++ launchers check, enforced in Python, and the attention computed from them.

FlashInfer's own Python runs in front of it unchanged, on CPU tensors. The rules are those of docs/spec.md ("The decode call on ..."): the
SM100 launcher addresses rows of 512 elements from a pool's base; the SM120 launcher addresses packed pages.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from cute_kernels.reference.quant import read_rows

SMS = 148
SM100_ARGUMENTS = (
    *("out", "query", "compressed_kv_cache", "swa_kv_cache", "workspace", "counters", "indices", "remapped", "storage_offsets", "seq_lens"),
    *("lengths", "bmm1_scale", "bmm2_scale", "batch_size", "max_q_len", "sm_count", "enable_pdl", "workspace_bytes", "sinks", "offsets"),
    *("rope_cos_sin", "output_scale"),
)


class Refused(ValueError):
    """What the C++ launcher would refuse."""


def refuse(name: str, got: object, expected: object) -> None:
    raise Refused(f"{name}: got {got}, expected {expected}")


@dataclass
class Launches:
    """The launches FlashInfer made: each a dict of the arguments its launcher got."""

    calls: list[dict[str, Any]] = field(default_factory=list)


@contextlib.contextmanager
def flashinfer_on(capability: tuple[int, int], monkeypatch: Any, *, value_checks: bool = True) -> Iterator[Launches]:
    """FlashInfer as it behaves on a GPU of this capability, with CPU tensors and the double in place of the launch.

    value_checks  FlashInfer's own debugging checks; they refuse the padding requests of a captured graph, which its kernel serves
    """
    from flashinfer import utils
    from flashinfer.mla import _core
    from flashinfer.mla._sparse_mla_sm120 import _prepared

    def clear_caches() -> None:
        for module in (utils, _core):
            for value in vars(module).values():
                if hasattr(value, "cache_clear"):
                    value.cache_clear()

    seen = Launches()

    def sm100(*arguments: Any) -> None:
        call = dict(zip(SM100_ARGUMENTS, arguments, strict=True))
        seen.calls.append(call)
        check_sm100(call)
        attend_sm100(call)

    def sm120(q: Any, cache: Any, indices: Any, output: Any, workspace: Any, scale: Any, **more: Any) -> None:
        call = {"query": q, "swa_kv_cache": cache, "indices": indices, "out": output, "workspace": workspace, "scale": scale, **more}
        seen.calls.append(call)
        check_sm120(call)
        attend_sm120(call)

    monkeypatch.setenv("FLASHINFER_VALIDATE_INPUTS", "1" if value_checks else "0")
    with contextlib.ExitStack() as stack:
        for module in (_core, utils):
            stack.enter_context(mock.patch.object(module, "get_compute_capability", lambda device: capability))
        if capability[0] == 10:
            launcher = SimpleNamespace(trtllm_paged_attention_decode_sparse_mla_dsv4=sm100)
            stack.enter_context(mock.patch.object(_core, "get_device_sm_count", lambda device: SMS))
            stack.enter_context(mock.patch.object(_core, "get_trtllm_gen_fmha_module", lambda: launcher))
        else:
            stack.enter_context(mock.patch.object(_prepared, "functional_run", sm120))
            stack.enter_context(mock.patch.object(torch.version, "cuda", "13.0"))
        clear_caches()
        yield seen
    clear_caches()


# SM100 -----------------------------------------------------------------------------------------------------------------


def check_sm100(c: dict[str, Any]) -> None:
    """The launcher's checks, and the promises that our tables make besides."""
    q, table, lengths, offsets = c["query"], c["indices"], c["lengths"], c["offsets"]
    rope = c["rope_cos_sin"] is not None
    rows, heads, _ = q.shape
    _dense("query", q)
    if heads not in (8, 16, 32, 64, 128):
        refuse("query", f"{heads} heads", "8, 16, 32, 64 or 128")
    for name in ("compressed_kv_cache", "swa_kv_cache"):
        cache = c[name]
        if cache.dtype != q.dtype:
            refuse(name, cache.dtype, q.dtype)
        _aligned(name, cache)
        page_stride, _, row_stride, unit = cache.stride()
        if (row_stride, unit) != (512, 1):
            refuse(name, f"row pitch {row_stride}", 512)
        if cache.shape[0] > 1 and (page_stride % 512 or page_stride < 512 * cache.shape[2]):
            refuse(name, f"page stride {page_stride}", "a multiple of 512 that holds a page")
        if _storage_rows(cache) > 2**31:
            refuse(name, f"{_storage_rows(cache)} rows", "at most 2^31")
    for name, value, shape in (
        ("indices", table, (rows, table.shape[1])),
        ("lengths", lengths, (rows,)),
        ("seq_lens", c["seq_lens"], (c["batch_size"],)),
    ):
        if value.dtype != torch.int32 or tuple(value.shape) != shape or not value.is_contiguous():
            refuse(name, f"{value.dtype} {tuple(value.shape)} {value.stride()}", f"int32 {shape}, contiguous")
    _aligned("indices", table)
    if table.shape[1] % 4 or table.shape[1] < 128:
        refuse("indices", f"{table.shape[1]} columns", "128 and a multiple of 4 more")
    if c["storage_offsets"] is not True or c["remapped"].data_ptr() != table.data_ptr():
        refuse("storage_offsets", c["storage_offsets"], "True: entries are storage rows already, no second remap")
    if c["sinks"] is not None and (tuple(c["sinks"].shape) != (heads,) or not c["sinks"].is_contiguous()):
        refuse("sinks", tuple(c["sinks"].shape), (heads,))
    if not isinstance(c["bmm1_scale"], float) or not isinstance(c["bmm2_scale"], float):
        refuse("bmm1_scale", type(c["bmm1_scale"]), "floats")
    _dense("workspace", c["workspace"])
    if c["workspace_bytes"] != c["workspace"].numel() or c["workspace_bytes"] < 128 << 20:
        refuse("workspace", c["workspace_bytes"], "its size, at least 128 MiB")
    _dense("counters", c["counters"])
    needed = (max(c["batch_size"] * heads, SMS) + 7) // 8 * 8 * 4
    if c["counters"].numel() < needed or bool(c["counters"].any()):
        refuse("counters", f"{c['counters'].numel()} bytes, zero: {not bool(c['counters'].any())}", f"{needed} zero bytes")
    query_lens = offsets.diff()
    if tuple(offsets.shape) != (c["batch_size"] + 1,) or bool((query_lens < 0).any()):
        refuse("offsets", offsets.tolist(), "ascending offsets, one more than requests")
    if not rope and (int(offsets[0]) != 0 or int(offsets[-1]) != rows):
        refuse("offsets", offsets.tolist(), f"offsets from 0 to the {rows} rows handed over")
    if c["max_q_len"] != int(query_lens.max()):
        refuse("max_q_len", c["max_q_len"], int(query_lens.max()))
    if not rope:
        _dense("out", c["out"])
        if tuple(c["out"].shape) != (rows, heads, 512) or c["out"].dtype != torch.bfloat16:
            refuse("out", tuple(c["out"].shape), (rows, heads, 512))
    _check_active(c)


def _check_active(c: dict[str, Any]) -> None:
    """No -1 and no row outside the pool among the columns the kernel reads."""
    for row, window, compressed in _active(c):
        for name, cache, entries in (("window", c["swa_kv_cache"], window), ("compressed", c["compressed_kv_cache"], compressed)):
            if not len(entries):
                continue
            pitch = _pitch(cache)
            inside = (entries >= 0) & (entries < _storage_rows(cache)) & (entries % pitch < cache.shape[2])
            if not bool(inside.all()):
                refuse("indices", f"{name} entry {int(entries[~inside][0])} in row {row}", "a row of the pool in every active column")


def _active(c: dict[str, Any]) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """(row, active window entries, active compressed entries) of every query row, as the kernel derives them."""
    offsets, seq_lens, table = c["offsets"].tolist(), c["seq_lens"].tolist(), c["indices"].long()
    for r, (begin, end) in enumerate(itertools.pairwise(offsets)):
        for row in range(begin, end):
            count = min(max(seq_lens[r] - (end - begin) + (row - begin) + 1, 0), 128)
            yield row, table[row, :count], table[row, 128 : int(c["lengths"][row])]


def _pitch(cache: torch.Tensor) -> int:
    return cache.stride(0) // 512 if cache.shape[0] > 1 else cache.shape[2]


def _storage_rows(cache: torch.Tensor) -> int:
    return (cache.shape[0] - 1) * _pitch(cache) + cache.shape[2]


def attend_sm100(c: dict[str, Any]) -> None:
    if c["rope_cos_sin"] is not None:
        return
    pools = {
        n: torch.as_strided(c[n], (_storage_rows(c[n]), 512), (512, 1), c[n].storage_offset())
        for n in ("swa_kv_cache", "compressed_kv_cache")
    }
    for row, window, compressed in _active(c):
        keys = torch.cat([pools["swa_kv_cache"][window].float(), pools["compressed_kv_cache"][compressed].float()])
        c["out"][row] = attend(c["query"][row].float(), keys, c["bmm1_scale"], c["bmm2_scale"], c["sinks"])


def attend(q: torch.Tensor, keys: torch.Tensor, bmm1: float, bmm2: float, sinks: torch.Tensor | None) -> torch.Tensor:
    """q [H, 512], keys [n, 512], fp32: softmax over the keys, each head's sink in the denominator; zero without a key."""
    if not len(keys):
        return torch.zeros_like(q)
    logits = q @ keys.T * bmm1
    sink = torch.full((len(q),), -torch.inf, dtype=torch.float32) if sinks is None else sinks.float()
    peak = torch.maximum(logits.amax(1), sink)
    weights = (logits - peak[:, None]).exp()
    return weights @ keys / (weights.sum(1) + (sink - peak).exp())[:, None] * bmm2


# SM120 -----------------------------------------------------------------------------------------------------------------


def check_sm120(c: dict[str, Any]) -> None:
    q = c["query"]
    rows, heads, _ = q.shape
    if q.dtype != torch.bfloat16 or heads not in (8, 16, 32, 64, 128):
        refuse("query", f"{q.dtype}, {heads} heads", "bfloat16 with 8, 16, 32, 64 or 128 heads")
    _dense("query", q)
    _dense("out", c["out"])
    if tuple(c["out"].shape) != (rows, heads, 512) or c["out"].dtype != torch.bfloat16:
        refuse("out", tuple(c["out"].shape), (rows, heads, 512))
    for name in ("swa_kv_cache", "extra"):
        cache = c[name]
        if cache is None:
            continue
        _aligned(name, cache)
        if cache.dtype != torch.uint8 or cache.shape[-1] != 584 or cache.shape[2] != 1:
            refuse(name, f"{cache.dtype} {tuple(cache.shape)}", "uint8 [pages, rows, 1, 584]")
        if (cache.stride(1), cache.stride(-1)) != (584, 1):
            refuse(name, f"row pitch {cache.stride(1)}", 584)
        if cache.shape[0] > 1 and (cache.stride(0) % 16 or cache.stride(0) < 584 * cache.shape[1]):
            refuse(name, f"page stride {cache.stride(0)}", "a multiple of 16 that holds a page")
        if cache.shape[0] * cache.shape[1] > 2**31:
            refuse(name, f"{cache.shape[0] * cache.shape[1]} slots", "at most 2^31")
    if (c["extra"] is None) != (c["extra_indices"] is None) or (c["extra"] is None) != (c["extra_lengths"] is None):
        refuse("extra", "a part of the segment", "cache, indices and lengths, or none of them")
    for table_name, lengths_name in (("indices", "lengths"), ("extra_indices", "extra_lengths")):
        table, lengths = c[table_name], c[lengths_name]
        if table is None:
            continue
        if table.dtype != torch.int32 or table.shape[0] != rows or table.stride(1) != 1:
            refuse(table_name, f"{table.dtype} {tuple(table.shape)} {table.stride()}", f"int32 [{rows}, width] with unit columns")
        if rows > 64 and table.stride(0) != table.shape[1]:
            refuse(table_name, f"row stride {table.stride(0)}", f"dense rows of {table.shape[1]} above 64 rows")
        if lengths.dtype != torch.int32 or tuple(lengths.shape) != (rows,) or not lengths.is_contiguous():
            refuse(lengths_name, f"{lengths.dtype} {tuple(lengths.shape)}", f"int32 [{rows}]")
    if rows > 64 and c["indices"].shape[1] % 64:
        refuse("indices", f"{c['indices'].shape[1]} columns", "a multiple of 64 above 64 rows")
    if c["sink"] is not None and (tuple(c["sink"].shape) != (heads,) or not c["sink"].is_contiguous()):
        refuse("sink", tuple(c["sink"].shape), (heads,))
    if not isinstance(c["scale"], float) or c["lse_scale"] != 1.0:
        refuse("scale", (type(c["scale"]), c["lse_scale"]), "a float, and 1.0")
    if c["kv_scale_format"] != "auto" or c["is_dsv4_nvfp4"] or c["extra_fp4"]:
        refuse("kv_scale_format", c["kv_scale_format"], "the 584-byte format")
    _dense("workspace", c["workspace"])
    for cache, table, lengths in _segments(c):
        if table is None:
            continue
        active = torch.arange(table.shape[1]) < lengths[:, None].clamp(0, table.shape[1])
        wrong = active & (table >= cache.shape[0] * cache.shape[1])
        if bool(wrong.any()) or bool((lengths > table.shape[1]).any()):
            refuse("indices", "a slot past the pool, or a length past the table", "slots of the pool, lengths within the table")


def _segments(c: dict[str, Any]) -> tuple[tuple[Any, Any, Any], ...]:
    return (c["swa_kv_cache"], c["indices"], c["lengths"]), (c["extra"], c["extra_indices"], c["extra_lengths"])


def attend_sm120(c: dict[str, Any]) -> None:
    for row in range(len(c["query"])):
        keys = []
        for cache, table, lengths in (
            (c["swa_kv_cache"], c["indices"], c["lengths"]),
            (c["extra"], c["extra_indices"], c["extra_lengths"]),
        ):
            if table is not None:
                slots = table[row, : int(lengths[row])].long()
                slots = slots[slots >= 0]
                keys.append(read_rows(cache.squeeze(2), slots // cache.shape[1], slots % cache.shape[1]).float())
        c["out"][row] = attend(c["query"][row].float(), torch.cat(keys), c["scale"], 1.0, c["sink"])


def _aligned(name: str, value: torch.Tensor) -> None:
    if value.data_ptr() % 16:
        refuse(name, f"address {value.data_ptr():#x}", "a multiple of 16 bytes")


def _dense(name: str, value: torch.Tensor) -> None:
    if not value.is_contiguous():
        refuse(name, f"strides {value.stride()}", "a contiguous tensor")
    _aligned(name, value)
