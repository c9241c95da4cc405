"""Adapter to the installed FlashInfer: one call per family, and everything in which FlashInfer's versions differ.

FlashInfer is imported on first use. Asking for its capabilities imports Python only: no cubin is downloaded, nothing is built.
Served: 0.7.0 and later. What changed since: 0.7.1 takes the counter buffer of multi-block attention from the caller.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from cute_kernels.errors import InvalidArgument, UnsupportedRequest
from cute_kernels.indices import CombinedIndices, SegmentIndices
from cute_kernels.step import SPLIT_ROWS
from cute_kernels.target import Target

OLDEST = "0.7.0"
# Head counts of q that the DeepSeek-V4 call accepts, on both paths, in every version served.
ACCEPTED_HEADS = (8, 16, 32, 64, 128)
# What FlashInfer asks for on SM100 whatever the sizes, and the least that is allocated for SM120.
LEAST_WORKSPACE_BYTES = 128 << 20
# FlashInfer asks for max(requests x heads, SMs) counters; no GPU of these families has more SMs than this.
_MOST_SMS = 1024


@dataclass(frozen=True)
class Capabilities:
    """What the installed FlashInfer can do for `decode`.

    version          its version, or None where it is not installed
    reason           why decode cannot use it; empty where it can
    accepted_heads   head counts of q
    takes_counters   the counter buffer can be handed over (0.7.1); without it a CUDA graph cannot be captured on SM100
    rope_quant       RopeQuant's arguments are taken
    """

    version: str | None
    reason: str = ""
    accepted_heads: tuple[int, ...] = ()
    takes_counters: bool = False
    rope_quant: bool = False


def capabilities() -> Capabilities:
    """The installed FlashInfer's capabilities; never downloads a cubin, builds a kernel or touches a GPU."""
    try:
        import flashinfer
        from flashinfer.mla import trtllm_batch_decode_sparse_mla_dsv4 as call
    except Exception as error:  # not only ImportError: 0.7.0 asks for a GPU while it is imported
        return Capabilities(None, f"FlashInfer cannot be imported ({type(error).__name__}: {error})")
    version = str(getattr(flashinfer, "__version__", "unknown"))
    parameters = inspect.signature(call).parameters
    if "sparse_indices_are_storage_offsets" not in parameters:
        return Capabilities(version, f"FlashInfer {version} is older than {OLDEST}: it cannot read strided pools by storage rows")
    return Capabilities(
        version,
        accepted_heads=ACCEPTED_HEADS,
        takes_counters="multi_ctas_kv_counter_buffer" in parameters,
        rope_quant="dsv4_inv_rope_cos_sin_cache" in parameters,
    )


def counter_bytes(requests: int, heads: int) -> int:
    """Bytes of a counter buffer that serves calls of up to `requests` requests with `heads` padded heads."""
    return (max(requests * heads, _MOST_SMS) + 7) // 8 * 8 * 4


def workspace_bytes(family: str, rows: int, heads: int, width: int) -> int:
    """Bytes of a workspace that serves calls of up to `rows` rows, `heads` padded heads, `width` compressed columns.

    SM100: 128 MiB whatever the sizes. SM120: at least as much; per row of a call of at most 64 rows, per 64 candidates and per head
    512 bf16 partial sums and a fp32 log-sum-exp; one more fp32 per row and head of any call.
    """
    if family == "sm100":
        return LEAST_WORKSPACE_BYTES
    scratch_heads = 8 if heads == 8 else (heads + 15) // 16 * 16
    chunks = 2 + (width + 63) // 64
    return max(LEAST_WORKSPACE_BYTES, min(rows, SPLIT_ROWS) * scratch_heads * chunks * (512 * 2 + 4) + rows * heads * 4 + 4096)


@dataclass(frozen=True)
class Rows:
    """One slice of a step, as FlashInfer sees it.

    rows           query rows; index tables, q and out are cut to them
    requests       requests
    offsets        int32 [requests + 1] row offsets into q as handed over
    max_query_len  longest query among them
    """

    rows: slice
    requests: slice
    offsets: torch.Tensor
    max_query_len: int


class FlashInfer:
    """The installed FlashInfer, checked once for being recent enough."""

    def __init__(self) -> None:
        self.capabilities = capabilities()
        if self.capabilities.reason:
            raise UnsupportedRequest(
                "decode through FlashInfer",
                device=self.capabilities.reason,
                supported=f"flashinfer-python >= {OLDEST}",
                nearest=f'pip install "flashinfer-python>={OLDEST}", or pass backend="reference"',
            )

    def require_device(self, device: torch.device, target: Target) -> None:
        """FlashInfer picks its path from the device alone, so the device has to be one of the target's."""
        from flashinfer import utils

        try:
            seen: Any = utils.get_compute_capability(device)
        except ValueError:
            seen = None
        if seen is None or tuple(seen) not in target.capabilities:
            raise UnsupportedRequest(
                f"decode through FlashInfer for {target}",
                device=device if seen is None else f"{device} (compute capability {seen[0]}.{seen[1]})",
                supported="devices of capability 10.0, 10.3, 12.0, 12.1",
                nearest='pass backend="reference"',
            )

    def combined(
        self,
        q: torch.Tensor,
        swa_cache: torch.Tensor,
        kv_cache: torch.Tensor,
        indices: CombinedIndices,
        seq_lens: torch.Tensor,
        part: Rows,
        *,
        workspace: torch.Tensor,
        counters: torch.Tensor | None,
        sinks: torch.Tensor | None,
        bmm1_scale: float,
        bmm2_scale: float,
        out: torch.Tensor | None,
        rope_cos_sin: torch.Tensor | None = None,
        output_scale: torch.Tensor | None = None,
    ) -> Any:
        """The SM100 family's call: one table of storage rows. `counters` is handed over where FlashInfer takes it."""
        more: dict[str, Any] = {}
        if counters is not None and self.capabilities.takes_counters:
            more["multi_ctas_kv_counter_buffer"] = counters
        if rope_cos_sin is not None:
            more |= {"dsv4_inv_rope_cos_sin_cache": rope_cos_sin, "dsv4_output_scale": output_scale}
        return _call(
            query=q[part.rows],
            swa_kv_cache=_nhd(swa_cache),
            workspace_buffer=workspace,
            sparse_indices=indices.table[part.rows],
            compressed_kv_cache=_nhd(kv_cache),
            sparse_topk_lens=indices.lengths[part.rows],
            seq_lens=seq_lens[part.requests],
            out=out if out is None or rope_cos_sin is not None else out[part.rows],
            bmm1_scale=bmm1_scale,
            bmm2_scale=bmm2_scale,
            sinks=sinks,
            kv_layout="NHD",
            cum_seq_lens_q=part.offsets,
            max_q_len=part.max_query_len,
            sparse_indices_are_storage_offsets=True,
            backend="trtllm-gen",
            **more,
        )

    def segments(
        self,
        q: torch.Tensor,
        swa_cache: torch.Tensor,
        kv_cache: torch.Tensor,
        indices: SegmentIndices,
        seq_lens: torch.Tensor,
        part: Rows,
        *,
        workspace: torch.Tensor,
        sinks: torch.Tensor | None,
        bmm1_scale: float,
        out: torch.Tensor,
    ) -> Any:
        """The SM120 family's call: two tables of slots with lengths."""
        extra: dict[str, Any] = {}
        if indices.compressed is not None and indices.compressed_lengths is not None:
            extra = {
                "extra_sparse_indices": indices.compressed[part.rows],
                "extra_sparse_topk_lens": indices.compressed_lengths[part.rows],
            }
        return _call(
            query=q[part.rows],
            swa_kv_cache=_nhd(swa_cache),
            workspace_buffer=workspace,
            sparse_indices=indices.window[part.rows],
            compressed_kv_cache=_nhd(kv_cache),
            swa_topk_lens=indices.window_lengths[part.rows],
            seq_lens=seq_lens[part.requests],
            out=out[part.rows],
            bmm1_scale=bmm1_scale,
            bmm2_scale=1.0,
            sinks=sinks,
            kv_layout="NHD",
            cum_seq_lens_q=part.offsets,
            max_q_len=part.max_query_len,
            backend="sparse",
            **extra,
        )


@functools.cache
def load() -> FlashInfer:
    """The adapter; `UnsupportedRequest` where FlashInfer is missing or too old."""
    return FlashInfer()


def _nhd(cache: torch.Tensor) -> torch.Tensor:
    """[pages, page rows, row] -> [pages, page rows, 1 head, row], FlashInfer's NHD view; strides stay."""
    return cache.unsqueeze(-2)


def _call(**arguments: Any) -> Any:
    from flashinfer.mla import trtllm_batch_decode_sparse_mla_dsv4

    with _typed_refusal():
        return trtllm_batch_decode_sparse_mla_dsv4(**arguments)


@contextlib.contextmanager
def _typed_refusal() -> Iterator[None]:
    """FlashInfer's refusals of arguments as `InvalidArgument`; launch failures pass through."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise InvalidArgument("decode", f"arguments that FlashInfer refuses: {error}", "arguments within FlashInfer's limits") from error
