"""The one place that knows both families and FlashInfer: targets, head padding, formats, and the decode call."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from cute_kernels import env, flashinfer_backend, validate, value_checks
from cute_kernels.errors import InvalidArgument, UnsupportedRequest
from cute_kernels.indices import CombinedIndices, Indices, SegmentIndices
from cute_kernels.kv_format import HEAD_DIM, WINDOW, KVFormat, format_of, formats_of, resolve_format
from cute_kernels.step import SPLIT_ROWS, StepMetadata
from cute_kernels.target import Target


def named_target(target: Target | str | None) -> Target | None:
    """An explicit target, from a `Target` or its name."""
    if target is None or isinstance(target, Target):
        return target
    if not isinstance(target, str):
        raise InvalidArgument("target", repr(target), 'a Target, or a name such as "sm100" or "sm_120f"')
    return Target.named(target)


def resolve_target(device: torch.device, target: Target | str | None = None) -> Target | None:
    """The target of a call whose tensors lie on `device`; None for CPU tensors without an explicit one.

    A CUDA device decides by its compute capability; an explicit target must be able to run there. SM90 needs an explicit
    target, and every other capability is an `UnsupportedRequest`.
    """
    explicit = named_target(target)
    if device.type == "cpu":
        return explicit
    if device.type != "cuda" or not torch.cuda.is_available():
        raise UnsupportedRequest(
            f"device {device}", device="this machine", supported="cpu, and cuda where torch finds a GPU", nearest="run on one of these"
        )
    index = torch.cuda.current_device() if device.index is None else device.index
    return _device_target(index, None if explicit is None else str(explicit))


def cuda_target(tensor: torch.Tensor, target: Target | str | None) -> Target:
    """`resolve_target` for a tensor that is known to be on a CUDA device."""
    if isinstance(target, Target):
        target = target.name
    elif target is not None:
        named_target(target)
    return _device_target(tensor.get_device(), target)


@functools.lru_cache(maxsize=64)
def _device_target(index: int, target: str | None) -> Target:
    explicit = named_target(target)
    capability = torch.cuda.get_device_capability(index)
    if explicit is None:
        return Target.from_capability(capability, f"cuda:{index} ({torch.cuda.get_device_name(index)})")
    if capability not in explicit.capabilities:
        runs_on = ", ".join(f"{major}.{minor}" for major, minor in explicit.capabilities)
        raise UnsupportedRequest(
            f"target {explicit}",
            device=f"cuda:{index}, compute capability {capability[0]}.{capability[1]}",
            supported=f"devices of capability {runs_on}",
            nearest="leave target out to build for the device",
        )
    return explicit


def combined_form(target: Target | None) -> bool:
    """Whether index tables take the SM100 family's form (also that of CPU calls without a target)."""
    return target is None or target.family == "sm100"


def require_format(fmt: KVFormat, target: Target | None) -> None:
    """`UnsupportedRequest` where a family's kernels do not read or write `fmt`."""
    if target is not None and fmt not in formats_of(target.family):
        names = ", ".join(f.name for f in formats_of(target.family))
        raise UnsupportedRequest(f"KV format {fmt.name}", device=target, supported=names, nearest=f"allocate the cache as {names}")


def pad_q_heads(num_heads: int) -> int:
    """The smallest head count FlashInfer accepts that holds `num_heads` heads: 8, 16, 32, 64 or 128.

    Heads up to it are zero in q, -inf in sinks, and cut off the output. `UnsupportedRequest` for more than 128 heads, `InvalidArgument`
    for what is no head count.
    """
    most = flashinfer_backend.ACCEPTED_HEADS[-1]
    if type(num_heads) is not int or num_heads <= most:
        validate.integer("num_heads", num_heads, 1, most)
    for accepted in flashinfer_backend.ACCEPTED_HEADS:
        if num_heads <= accepted:
            return accepted
    raise UnsupportedRequest(
        f"{num_heads} query heads", device="one GPU", supported="1 to 128", nearest="split the heads over more GPUs (tensor parallelism)"
    )


def pad_sinks(sinks: torch.Tensor, padded_heads: int) -> torch.Tensor:
    """Sinks fp32 [n] padded with -inf to [padded_heads] (docs/spec.md, "Attention"); returned as they are where nothing is missing."""
    missing = padded_heads - sinks.shape[0]
    if missing <= 0:
        return sinks
    return torch.cat([sinks, sinks.new_full((missing,), -torch.inf)])


def require_model(*, head_dim: int = HEAD_DIM, window: int = WINDOW, vision_spans: bool = False, device: object = "any device") -> None:
    """Refuses by name what DeepSeek-V4 variants may ask and this package does not serve."""
    if head_dim != HEAD_DIM:
        raise UnsupportedRequest(
            f"head size {head_dim}",
            device=device,
            supported=str(HEAD_DIM),
            nearest="the indexer (head size 128) stays with the engine's kernels",
        )
    if window != WINDOW:
        raise UnsupportedRequest(
            f"a window of {window} columns (DSpark)",
            device=device,
            supported=str(WINDOW),
            nearest=f"windows of {WINDOW}, one row per draft token",
        )
    if vision_spans:
        raise UnsupportedRequest(
            "vision spans in the window",
            device=device,
            supported="causal windows of text rows",
            nearest="split image tokens off to another path",
        )


# Workspace -------------------------------------------------------------------------------------------------------------


@dataclass
class Workspace:
    """FlashInfer's scratch memory for one device and stream.

    workspace  uint8 [bytes], any contents
    counters   uint8 [bytes], zero before first use; kernels leave it zero
    """

    workspace: torch.Tensor
    counters: torch.Tensor


_workspaces: dict[tuple[torch.device, int], Workspace] = {}
_retired: list[Workspace] = []  # captured graphs may still use them


def _stream_key(device: torch.device) -> tuple[torch.device, int]:
    if device.type != "cuda":
        return device, 0
    device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    return device, torch.cuda.current_stream(device).cuda_stream


def allocate_workspace(
    device: torch.device | str,
    *,
    max_requests: int = 1024,
    max_rows: int = 8192,
    num_heads: int = 128,
    width: int = 1024,
    target: Target | str | None = None,
) -> Workspace:
    """Allocates the workspace that `decode` uses by default on this device and current stream, and returns it.

    Call it before capturing a CUDA graph, on the stream of the capture; or hand the result's tensors to `decode`. Sizes grow
    only: an existing workspace that is large enough is returned as it is.

    max_requests, max_rows  largest call; num_heads real heads; width compressed columns of the index table
    Bytes: 128 MiB, or what an SM120 decode of min(max_rows, 64) rows needs where that is more; counters: 4 bytes for each
    request and padded head, at least 4 KiB.

    Raises `InvalidArgument`; `UnsupportedRequest` where it would have to allocate while a graph is captured.
    """
    device = torch.device(device)
    for name, value in (("max_requests", max_requests), ("max_rows", max_rows)):
        validate.integer(name, value, 1)
    validate.integer("width", width, 0)
    resolved = resolve_target(device, target)
    heads = pad_q_heads(num_heads)
    family = "sm100" if resolved is None else resolved.family
    return _workspace(
        device,
        flashinfer_backend.workspace_bytes(family, max_rows, heads, width),
        flashinfer_backend.counter_bytes(max_requests, heads),
    )


def _workspace(device: torch.device, workspace_bytes: int, counter_bytes: int) -> Workspace:
    key = _stream_key(device)
    found = _workspaces.get(key)
    if found is not None and found.workspace.numel() >= workspace_bytes and found.counters.numel() >= counter_bytes:
        return found
    if _capturing(device):
        raise UnsupportedRequest(
            "allocating decode's workspace",
            device=f"{device}, stream {key[1]:#x}, while a CUDA graph is being captured",
            supported="a workspace allocated before the capture",
            nearest="call allocate_workspace(...) on the capture's stream first, or pass workspace= and counters=",
        )
    if found is not None:
        _retired.append(found)
        workspace_bytes = max(workspace_bytes, found.workspace.numel())
        counter_bytes = max(counter_bytes, found.counters.numel())
    made = Workspace(
        torch.empty(workspace_bytes, dtype=torch.uint8, device=device), torch.zeros(counter_bytes, dtype=torch.uint8, device=device)
    )
    _workspaces[key] = made
    return made


# Capabilities ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Support:
    """The answer of `supports`; true in a condition iff the request is served.

    reason        why not, with the way out; empty where it is served
    path          what decode runs on: "flashinfer trtllm-gen", "flashinfer sparse" or "reference"
    kv_format     row format of the caches; padded_heads: heads of q and out buffers
    index_form    form of the index tables: "combined" or "segments"
    """

    reason: str = ""
    path: str = ""
    kv_format: str = ""
    padded_heads: int = 0
    index_form: str = ""

    def __bool__(self) -> bool:
        return not self.reason


def supports(
    where: torch.device | Target | str,
    *,
    kv_cache_dtype: str = "auto",
    num_heads: int = 64,
    ratio: int = 4,
    head_dim: int = HEAD_DIM,
    window: int = WINDOW,
    vision_spans: bool = False,
    rope_quant: bool = False,
) -> Support:
    """Whether a layer is served on a device ("cuda", torch.device("cpu"), ...) or for a target ("sm100", Target(...)), and how.

    Launches nothing, compiles nothing, downloads nothing. Arguments as those of `LayerSpec`; rope_quant asks for FlashInfer's
    RopeQuant epilogue. A request of the wrong type or out of range is an `InvalidArgument`; one that is not served, an answer.
    """
    validate.layer_ratio(ratio)
    try:
        device_name = isinstance(where, str) and where.partition(":")[0] in ("cpu", "cuda")
        device = torch.device(where) if device_name else where  # type: ignore[arg-type]
        target = resolve_target(device) if isinstance(device, torch.device) else named_target(device)
        require_model(head_dim=head_dim, window=window, vision_spans=vision_spans, device=where)
        fmt = resolve_format(kv_cache_dtype, "sm100" if target is None else target.family)
        padded = pad_q_heads(num_heads)
        path = decode_path(target)
        if path != "reference":
            flashinfer_backend.load()
        if rope_quant:
            require_rope_quant(torch.float8_e4m3fn if fmt.scaled else torch.bfloat16, padded, target, path.partition(" ")[0], where)
    except UnsupportedRequest as refusal:
        return Support(reason=str(refusal))
    return Support("", path, fmt.name, padded, "combined" if combined_form(target) else "segments")


def decode_path(target: Target | None) -> str:
    """What decode runs on for a target; `UnsupportedRequest` for SM90, which only has the reference."""
    if target is None:
        return "reference"
    if target.gpu_arch == "sm_90a":
        raise _no_decode_on_sm90(target)
    return "flashinfer trtllm-gen" if target.family == "sm100" else "flashinfer sparse"


def _no_decode_on_sm90(target: Target) -> UnsupportedRequest:
    return UnsupportedRequest(
        "decode through FlashInfer",
        device=target,
        supported="devices of capability 10.0, 10.3, 12.0, 12.1",
        nearest='pass backend="reference" to decode',
    )


# Decode ----------------------------------------------------------------------------------------------------------------


def decode(
    q: torch.Tensor,
    swa_cache: torch.Tensor,
    kv_cache: torch.Tensor | None,
    step: StepMetadata,
    indices: Indices,
    *,
    num_heads: int | None,
    sinks: torch.Tensor | None,
    sm_scale: float,
    q_scale: float,
    kv_scale: float,
    out: torch.Tensor | None,
    workspace: torch.Tensor | None,
    counters: torch.Tensor | None,
    rope_cos_sin: torch.Tensor | None,
    output_scale: torch.Tensor | None,
    backend: str,
    target: Target | str | None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`ops.decode`: checks, chooses the path, and runs decode rows and prefill rows as two calls."""
    a = locals()
    _check_decode(a)
    device, heads = q.device, q.shape[1]
    num_heads = heads if num_heads is None else num_heads
    resolved = named_target(target) if backend == "reference" else resolve_target(device, target)
    _require_family(indices, format_of(swa_cache, "swa_cache"), resolved)
    use_reference = backend == "reference" or (backend == "auto" and device.type == "cpu")
    if rope_cos_sin is not None:
        require_rope_quant(q.dtype, heads, resolved, "reference" if use_reference else "flashinfer", device)
    if env.VALIDATE.flag():
        value_checks.decode(step, indices)
    if use_reference:
        return _reference_decode(a, num_heads)
    if resolved is None:
        hint = 'backend="auto" takes the reference on CPU tensors'
        raise InvalidArgument("target", None, "a Target, without which CPU tensors have no FlashInfer path", hint=hint)
    if resolved.gpu_arch == "sm_90a":
        raise _no_decode_on_sm90(resolved)
    adapter = flashinfer_backend.load()
    adapter.require_device(device, resolved)

    rows = step.num_tokens
    if rope_cos_sin is None:
        out = torch.empty((rows, heads, HEAD_DIM), dtype=torch.bfloat16, device=device) if out is None else out[:rows]
    if rows == 0:
        return _empty_rope_quant(out, output_scale, device) if rope_cos_sin is not None else out[:, :num_heads]  # type: ignore[index]
    if sinks is not None:
        sinks = pad_sinks(sinks, heads)
    caches = (swa_cache, swa_cache if kv_cache is None else kv_cache)
    combined = isinstance(indices, CombinedIndices)
    if combined and not adapter.capabilities.takes_counters and _capturing(device):
        raise UnsupportedRequest(
            "capturing decode into a CUDA graph",
            device=f"{device} with FlashInfer {adapter.capabilities.version}, which allocates its counters on each call",
            supported="FlashInfer >= 0.7.1",
            nearest="upgrade flashinfer-python, or leave attention out of the graph",
        )
    parts = _parts(step, combined, whole_buffers=rope_cos_sin is not None)
    if workspace is None or (combined and counters is None):
        needed = 0 if workspace is not None else max(_workspace_need(indices, part, heads, resolved.family) for part in parts)
        longest = max(part.requests.stop - part.requests.start for part in parts)
        shared = _workspace(device, needed, flashinfer_backend.counter_bytes(longest, heads))
        workspace = shared.workspace if workspace is None else workspace
        counters = shared.counters if counters is None else counters

    bmm1, bmm2 = float(sm_scale * q_scale * kv_scale), float(kv_scale)
    if rope_cos_sin is not None:
        assert isinstance(indices, CombinedIndices)
        for part in parts:
            out, output_scale = adapter.combined(
                q, *caches, indices, step.seq_lens, part, workspace=workspace, counters=counters, sinks=sinks,
                bmm1_scale=bmm1, bmm2_scale=bmm2, out=out, rope_cos_sin=rope_cos_sin, output_scale=output_scale,
            )  # fmt: skip
        assert out is not None and output_scale is not None
        return out, output_scale
    assert out is not None
    for part in parts:
        if isinstance(indices, CombinedIndices):
            adapter.combined(
                q, *caches, indices, step.seq_lens, part, workspace=workspace, counters=counters, sinks=sinks,
                bmm1_scale=bmm1, bmm2_scale=bmm2, out=out,
            )  # fmt: skip
        else:
            adapter.segments(q, *caches, indices, step.seq_lens, part, workspace=workspace, sinks=sinks, bmm1_scale=bmm1, out=out)
    return out[:, :num_heads]


_checked: set[tuple[object, ...]] = set()


def _check_decode(a: dict[str, object]) -> None:
    """All checks of `decode`, once for each combination of dtypes, shapes, strides, alignments, devices and scalars."""
    step, indices = a["step"], a["indices"]
    scalars = (a["num_heads"], a["sm_scale"], a["q_scale"], a["kv_scale"], a["backend"])
    tensors = [a[name] for name in ("q", "swa_cache", "kv_cache", "sinks", "out", "workspace", "counters", "rope_cos_sin")]
    try:
        tensors += [step.positions, *vars(indices).values()]  # type: ignore[attr-defined]
        key = (type(step), type(indices), *scalars, *map(type, scalars), *map(_signature, tensors))
        known = key in _checked
    except (AttributeError, TypeError):  # something is of another type altogether: the checks say what
        key, known = (), False
    if known:
        return
    validate.one_of("backend", a["backend"], ("auto", "flashinfer", "reference"))
    validate.on_cpu_or_cuda("q", a["q"])
    validate.decode(a, flashinfer_backend.ACCEPTED_HEADS)
    if len(_checked) >= 4096:
        _checked.clear()
    _checked.add(key)


def _signature(tensor: Any) -> tuple[object, ...] | None:
    return None if tensor is None else (tensor.dtype, tensor.shape, tensor.stride(), tensor.data_ptr() & 31, tensor.device)


def _workspace_need(indices: Indices, part: flashinfer_backend.Rows, heads: int, family: str) -> int:
    """Bytes of workspace for one call; a call of many rows splits no keys, so that its width does not count."""
    rows = part.rows.stop - part.rows.start
    width = 0
    if isinstance(indices, SegmentIndices) and indices.compressed is not None and rows <= SPLIT_ROWS:
        width = indices.compressed.shape[1]
    return flashinfer_backend.workspace_bytes(family, rows, heads, width)


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _parts(step: StepMetadata, combined: bool, whole_buffers: bool) -> list[flashinfer_backend.Rows]:
    """Decode rows and prefill rows as the calls FlashInfer gets, two or (`StepMetadata.call_policy`) one; a slice without rows is no call.

    Offsets of the prefill call are rebased to the slice, except for RopeQuant, which takes whole buffers with offsets as they are.
    """
    decodes, tokens, rows = step.num_decodes, step.num_decode_tokens, step.num_tokens
    if step.call_policy.one_call(step, combined):
        return [flashinfer_backend.Rows(slice(0, rows), slice(0, step.num_requests), step.query_start_loc, step.max_query_len)]
    parts = []
    if tokens:
        rows_of_q = slice(0, rows if whole_buffers else tokens)
        parts.append(flashinfer_backend.Rows(rows_of_q, slice(0, decodes), step.query_start_loc[: decodes + 1], step.max_decode_query_len))
    if step.num_prefill_tokens:
        rows_of_q = slice(0 if whole_buffers else tokens, rows)
        offsets = step.query_start_loc[decodes:] if whole_buffers else step.prefill_query_start_loc
        parts.append(flashinfer_backend.Rows(rows_of_q, slice(decodes, step.num_requests), offsets, step.max_query_len))
    return parts


def _require_family(indices: Indices, fmt: KVFormat, target: Target | None) -> None:
    """The form of the tables, the format of the caches and the target belong to one family."""
    combined = isinstance(indices, CombinedIndices)
    if target is not None and combined != combined_form(target):
        wanted = "CombinedIndices" if combined_form(target) else "SegmentIndices"
        raise InvalidArgument("indices", f"a {type(indices).__name__}", f"{wanted}, the form of {target}")
    family = "sm100" if combined else "sm120"
    if fmt not in formats_of(family):
        names = " or ".join(f.name for f in formats_of(family))
        raise InvalidArgument("swa_cache", f"{fmt.name} rows", f"{names} with {type(indices).__name__}")


def require_rope_quant(q_dtype: torch.dtype, heads: int, target: Target | None, path: str, device: object) -> None:
    """`UnsupportedRequest` unless `path` ("flashinfer" or "reference") has FlashInfer's RopeQuant epilogue for such a call."""
    served = path == "flashinfer" and q_dtype == torch.float8_e4m3fn and heads == 128 and target is not None and target.family == "sm100"
    if not served or not flashinfer_backend.load().capabilities.rope_quant:
        raise UnsupportedRequest(
            "RopeQuant (rope_cos_sin)",
            device=f"{device} with {q_dtype} q, {heads} heads, target {target}",
            supported="the SM100 family through FlashInfer, FP8 q and caches, 128 heads",
            nearest="leave rope_cos_sin out and quantise the output yourself",
        )


def _empty_rope_quant(
    out: torch.Tensor | None, output_scale: torch.Tensor | None, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    values = torch.empty((0, 16, 4096), dtype=torch.float8_e4m3fn, device=device) if out is None else out
    return values, torch.empty((0, 16, 8), dtype=torch.int32, device=device) if output_scale is None else output_scale


def _reference_decode(a: dict[str, object], num_heads: int) -> torch.Tensor:
    from cute_kernels import reference

    step = a["step"]
    assert isinstance(step, StepMetadata)
    q, out = a["q"], a["out"]
    assert isinstance(q, torch.Tensor)
    names = ("swa_cache", "kv_cache", "indices", "sinks", "sm_scale", "q_scale", "kv_scale")
    given = {name: a[name] for name in names}
    out = torch.zeros((step.num_tokens, q.shape[1], HEAD_DIM), dtype=torch.bfloat16, device=q.device) if out is None else out
    return reference.decode(q[: step.num_tokens], step=step, out=out[: step.num_tokens], num_heads=num_heads, **given)  # type: ignore[index,arg-type]
