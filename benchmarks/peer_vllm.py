"""The kernels that vLLM 0.33 runs for the same work, on the same tensors: what ours are measured against.

`Vllm()` needs an importable `vllm` (its pure Python files are enough) and its CUDA operations, either by an installed vLLM or as a
library file. Only its public functions are called; what each writes is compared with the reference before its time counts.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.calls import Call
from benchmarks.checking import Judge, Mismatch
from cute_kernels.errors import CuteKernelsError
from cute_kernels.kv_format import WINDOW, format_of
from cute_kernels.launching import reference_call
from cute_kernels.save_policy import SavePolicy

LIBRARY = Path.home() / "vllm_ops.so"
_OPS = "vllm.models.deepseek_v4"
# Its kernels exponentiate by approximations of their own.
_TOLERANCE: dict[str, Any] = {"steps": 2.0, "share": 0.2}


class PeerUnavailable(CuteKernelsError):
    """The peer, or one of its parts, cannot be imported here."""


@dataclass(frozen=True)
class PeerRun:
    """launch: the peer's launches for one call. check: raises `Mismatch` unless one launch writes what the reference writes."""

    launch: Callable[[], object]
    check: Callable[[], None]


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise PeerUnavailable(f"vLLM's {name} cannot be imported: {error}") from error


class Vllm:
    """vLLM's kernels by operation. `missing` says which parts could not be imported."""

    name = "vllm"

    def __init__(self, library: Path = LIBRARY) -> None:
        self.missing: list[str] = []
        self._compress = self._part(lambda: _module(f"{_OPS}.nvidia.ops.sparse_attn_compress_cutedsl"))
        self._save = self._part(lambda: _module(f"{_OPS}.common.ops.save_partial_states"))
        self._indices = self._part(lambda: _module(f"{_OPS}.common.ops.cache_utils"))
        self._loaded = self._part(lambda: _load(library))
        if len(self.missing) == 4:
            raise PeerUnavailable(
                "; ".join(self.missing), hint="install vLLM 0.33, or put its Python files on PYTHONPATH and its library at --peer-library"
            )

    def _part(self, get: Callable[[], Any]) -> Any:
        try:
            return get()
        except PeerUnavailable as error:
            self.missing.append(str(error))
            return None

    def run(self, call: Call, family: str) -> PeerRun | None:
        """The peer's launches for `call`, or None where it has none for this work."""
        if call.operation == "compress_store" and self._compress and self._save:
            return self._compress_store(call, family)
        if call.operation == "sparse_indices" and self._indices and family == "sm100":
            return self._sparse_indices(call)
        if call.operation == "qkv_insert" and self._loaded:
            return self._qkv_insert(call, family)
        if call.operation == "gather_upconvert" and self._loaded and call.arguments["cache"].shape[-1] == 656:
            return self._gather(call, family)
        return None

    def _compress_store(self, call: Call, family: str) -> PeerRun | None:
        """Save of the step's rows (unless they are saved), then compress and store, as two calls of its layer."""
        a = call.arguments
        if bool((a["state_slots"] < 0).any()):
            return None  # it has no launch whose grid is larger than the step
        ratio, state, cache = a["ratio"], a["state"], a["kv_cache"]
        fmt = format_of(cache)
        c4 = ratio == 4
        options: dict[str, Any] = {"compress_ratio": ratio, "state_width": state.shape[2] // 2, "overlap": c4}
        if not fmt.packed:
            scale = torch.full((1,), a.get("kv_scale") or 1.0, device=cache.device)
            options |= {"store_full_kv": True, "store_full_fp8": fmt.scaled, "fp8_scale": scale}
        if not c4:
            options["compressed_kv"] = torch.empty(a["state_slots"].shape[0], 512, device=cache.device)
        name = f"{'fused' if c4 else 'split'}_kv_compress_norm_rope_insert_sparse_attn_cutedsl"
        function = getattr(self._compress, name)
        save = self._save._SAVE_PARTIAL_STATES_KERNEL

        def launch() -> None:
            if a["kv_score"] is not None:
                kv, score = a["kv_score"].chunk(2, dim=1)
                save(kv, score, a["ape"], a["positions"], state, a["state_slots"], state.shape[1], state.shape[2] // 2, ratio)
            function(
                state_cache=state,
                token_to_req_indices=a["token_to_req"],
                positions=a["positions"],
                slot_mapping=a["state_slots"],
                block_table=a["state_block_table"],
                block_size=state.shape[1],
                rms_norm_weight=a["norm_weight"],
                rms_norm_eps=a["eps"],
                cos_sin_cache=a["cos_sin"],
                k_cache=cache,
                kv_slot_mapping=a["kv_slots"],
                kv_cache_block_size=cache.shape[1],
                kv_block_stride=cache.stride(0),
                **options,
            )

        every = Call(call.operation, {**a, **({} if a["kv_score"] is None else {"save": SavePolicy.EVERY_ROW})})
        return PeerRun(launch, _checked(every, family, launch))

    def _sparse_indices(self, call: Call) -> PeerRun:
        """Its one table of window and compressed entries; the window slots of decode rows come from another kernel, not timed."""
        a = call.arguments
        positions, owner, ids = a["positions"], a["token_to_req"], a["ids"]
        rows, requests, device = positions.shape[0], a["window_block_table"].shape[0], positions.device
        decode = rows == requests
        starts = torch.searchsorted(owner, torch.arange(requests + 1, device=device, dtype=torch.int32)).int()
        segments = Call(call.operation, {k: v for k, v in a.items() if k != "out"})
        slots = reference_call(segments.operation, segments.arguments, form="segments").window
        nothing = torch.empty(0, ids.shape[1], dtype=torch.int32, device=device)
        options: dict[str, Any] = {
            "decode_swa_indices": slots if decode else slots[:0],
            "decode_compressed_indices": ids if decode else None,
            "decode_compressed_topk_lens": None,
            "prefill_topk_indices": nothing if decode else ids,
            "query_start_loc": starts,
            "seq_lens": (positions[(starts[1:] - 1).long()] + 1).int(),
            "token_to_req_indices": owner,
            "swa_block_table": a["window_block_table"],
            "swa_block_size": a["window"].page_rows,
            "compressed_block_table": a["compressed_block_table"],
            "compressed_block_size": a["compressed"].page_rows,
            "window_size": WINDOW,
            "compress_ratio": a["ratio"],
            "topk": ids.shape[1],
            "swa_block_span": a["window"].span,
            "compressed_block_span": a["compressed"].span,
        }
        if decode:
            valid = torch.ones(rows, dtype=torch.bool, device=device)
            options |= {"decode_compressed_indices_are_local": True, "decode_is_valid_token": valid}
        build = self._indices.build_flashinfer_mixed_sparse_indices

        def launch() -> Any:
            return build(**options)

        def check() -> None:
            want = reference_call(segments.operation, segments.arguments, form="combined")
            table, lengths = launch()
            if not torch.equal(table.sort(dim=1).values, want.table.sort(dim=1).values):  # the order within a part is its own
                raise Mismatch("vLLM's index table has other entries than the reference's")
            if not torch.equal(lengths, want.lengths):
                raise Mismatch("vLLM's index lengths differ from the reference's")

        return PeerRun(launch, check)

    def _qkv_insert(self, call: Call, family: str) -> PeerRun:
        a = call.arguments
        cache, out = a["kv_cache"], a["out"]
        fmt = format_of(cache)
        inputs = (a["slots"], a["positions"], a["cos_sin"])
        prefix = "fused_deepseek_v4_qnorm_rope_kv_rope_"
        launch: Callable[[], Any]
        if fmt.packed:
            pages = cache.as_strided((cache.shape[0], cache.stride(0)), (cache.stride(0), 1))
            insert = _operator(f"{prefix}quant_insert")

            def launch() -> Any:
                return insert(a["q"], a["kv"], pages, *inputs, a["q"].shape[1], a["eps"], cache.shape[1])
        elif fmt.scaled:
            scale = torch.full((1,), a["kv_scale"], device=cache.device)
            inverse = torch.full((1,), 1 / a["q_scale"], device=cache.device)
            insert = _operator(f"{prefix}full_cache_fp8_insert")

            def launch() -> Any:
                insert(a["q"], a["kv"], out, cache, *inputs, scale, inverse, a["eps"], cache.shape[1])
                return out
        else:
            q = a["q"].clone()  # it normalises in place
            insert = _operator(f"{prefix}full_cache_bf16_insert")

            def launch() -> Any:
                insert(q, a["kv"], cache, *inputs, a["eps"], cache.shape[1])
                return q

        return PeerRun(launch, _checked(call, family, lambda: out.copy_(launch())))

    def _gather(self, call: Call, family: str) -> PeerRun:
        a = call.arguments
        gather = _operator("cp_gather_and_upconvert_fp8_kv_cache")
        requests = a["block_table"].shape[0]

        def launch() -> None:
            gather(a["cache"], a["out"], a["block_table"], a["workspace_starts"], requests, a["seq_starts"])

        return PeerRun(launch, _checked(call, family, launch))


def _checked(call: Call, family: str, launch: Callable[[], Any]) -> Callable[[], None]:
    """The comparison of one launch into poisoned outputs with the reference."""

    def check() -> None:
        judge = Judge(call, family, **_TOLERANCE)
        launch()
        judge.check()

    return check


def _load(library: Path) -> bool:
    """Makes the CUDA operations known to torch, or raises: what it returns says that they are."""
    if _find("fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert") is not None:
        return True
    try:
        if library.exists():
            torch.ops.load_library(str(library))
        else:
            importlib.import_module("vllm._C_stable_libtorch")
    except (ImportError, OSError) as error:
        raise PeerUnavailable(f"vLLM's CUDA operations cannot be loaded: no {library}, and {error}") from error
    return True


def _find(name: str) -> Any:
    for namespace in ("_C", "_C_cache_ops"):
        if hasattr(getattr(torch.ops, namespace), name):
            return getattr(getattr(torch.ops, namespace), name)
    return None


def _operator(name: str) -> Any:
    found = _find(name)
    if found is None:
        raise PeerUnavailable(f"vLLM's library has no operation {name}")
    return found
