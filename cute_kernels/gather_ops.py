"""The public calls of dense prefill, `gather_upconvert` and `convert_indices`, their checks and their plans. `ops` hands them out."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch.compiler import is_compiling

from cute_kernels import torch_gather, validate
from cute_kernels.compile.spec import ConvertIndicesSpec, GatherUpconvertSpec
from cute_kernels.errors import InvalidArgument
from cute_kernels.kv_format import GATHERED, HEAD_DIM, INLINE, ROPE_DIM, check_pages, gathered_format
from cute_kernels.launching import Operation, Plan, Refused, reference_call
from cute_kernels.target import Target
from cute_kernels.validate import Arg, Layout
from cute_kernels.value_checks import require_values


def gather_upconvert(
    cache: torch.Tensor,
    out: torch.Tensor,
    block_table: torch.Tensor,
    workspace_starts: torch.Tensor,
    *,
    seq_starts: torch.Tensor | None = None,
    kv_scale: float | None = None,
    target: Target | str | None = None,
) -> torch.Tensor:
    """Rows of a paged FP8 cache as BF16 rows of a workspace, request after request: what dense prefill attends to.

    With R requests:

    cache             [pages, page rows, 656] uint8 (V3.2: 512 codes, 4 fp32 scales, 64 bf16 values), [pages, page rows, 584] uint8
                      (V4, packed) or [pages, page rows, 512] e4m3; any page stride that is a multiple of 16 bytes
    out               [total, 576] (V3.2) or [total, 512] bf16, unit column stride; written, and never past `total`
    block_table       [R, columns] int32, unit column stride: page of each `page rows` positions of a request
    workspace_starts  [R] or [R + 1] int32, not decreasing: the first row in `out` of each request. Row i belongs to the last request that
                      starts at i or before; the last request's rows end with `out`, whatever an entry R says. Equal starts: no rows
    seq_starts        [R] int32            position of each request's first row, any; default 0
    kv_scale          the cache's FP8 scale; None or 1.0 with other formats
    target            Target or name; default: the tensors' device

    Returns `out`. Values are code times scale in fp32, rounded to bf16; bf16 values are copied. Rows before the first start are left
    alone. A row whose position is negative or 2^31 - 1 and more, or whose page lies past the block table or outside the cache, becomes
    zeros; starts that decrease give some request's row or zeros, never an access outside. Nothing is read on the host.
    Source of the rules: docs/spec.md, "Dense prefill". Raises `InvalidArgument`, `UnsupportedRequest`, `MissingKernel`.
    """
    if is_compiling():
        return torch_gather.gather_upconvert(cache, out, block_table, workspace_starts, seq_starts, kv_scale, target)
    return GATHER_UPCONVERT.run(cache, out, block_table, workspace_starts, seq_starts, kv_scale, target)


def convert_indices(
    ids: torch.Tensor,
    token_to_req: torch.Tensor,
    block_table: torch.Tensor,
    *,
    page_rows: int,
    block_stride_rows: int | None = None,
    pages: int | None = None,
    workspace_starts: torch.Tensor | None = None,
    prefill_request_id: torch.Tensor | None = None,
    return_counts: bool = False,
    out: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    target: Target | str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Positions within a request as slots of a paged cache: block_table[request, id // page_rows] * block_stride_rows + id % page_rows.

    ids                 [N, k] int32, unit column stride, rows at multiples of 16 bytes; any bit pattern is safe
    token_to_req        [N] int32        request of each row; a row of a request outside the table has no valid id
    block_table         [R, columns] int32, unit column stride: page of each `page_rows` positions of a request
    page_rows           rows of a page
    block_stride_rows   rows from one page to the next, at least page_rows; default page_rows. More in a packed pool
    pages               pages of the cache; default: as many as int32 slots allow
    prefill_request_id  [N] int32        where it is >= 0 the row reads a dense workspace instead: workspace_starts[it] + id
    workspace_starts    [any] int32      first workspace row of each prefill request; given with prefill_request_id, or not at all
    return_counts       True: valid slots first, in order, -1 in every lane after, and how many there are. False: each in its lane
    out                 [N, k] int32, unit column stride, rows at multiples of 16 bytes; default: a new tensor, whose rows may be
                        padded apart. It may be `ids`, but not overlap them otherwise
    counts              [N] int32, with return_counts only; default: a new tensor
    target              Target or name; default: the tensors' device

    Returns the slots [N, k], or (slots, counts). An id that is negative or 2^31 - 1, lies past the block table or on a page outside
    [0, pages) becomes -1; so does one of a workspace row whose sum lies outside [0, 2^31), or whose request has no start.
    Source of the rules: docs/spec.md, "Dense prefill". Raises `InvalidArgument` (also for a request map of another length than the ids'),
    `UnsupportedRequest`, `MissingKernel`.
    """
    if is_compiling():
        tensors = (ids, token_to_req, block_table, workspace_starts, prefill_request_id)
        return torch_gather.convert_indices(*tensors, page_rows, block_stride_rows, pages, return_counts, out, counts, target)
    return CONVERT_INDICES.run(
        ids, token_to_req, block_table, page_rows, block_stride_rows, pages, workspace_starts, prefill_request_id,
        return_counts, out, counts, target,
    )  # fmt: skip


# gather_upconvert ------------------------------------------------------------------------------------------------------


GATHER_TENSORS = (
    Arg("cache", tuple(dict.fromkeys(f.dtype for f in GATHERED.values())), (None, None, None), Layout.PAGES, vector=True),
    Arg("out", (validate.BF,), (None, None), Layout.ROWS, vector=True, written=True),
    Arg("block_table", (validate.I32,), ("R", None), Layout.ROWS),
    Arg("workspace_starts", (validate.I32,), (None,)),
    Arg("seq_starts", (validate.I32,), ("R",), optional=True),
)


def _check_gather(a: Mapping[str, Any], target: Target | None) -> None:
    sizes: dict[str, int] = {}
    validate.check(GATHER_TENSORS, a, sizes, validate.tensor("cache", a["cache"]).device)
    fmt = gathered_format(a["cache"])
    validate.scale("kv_scale", a["kv_scale"], fmt)
    columns = HEAD_DIM + (ROPE_DIM if fmt is INLINE else 0)
    if a["out"].shape[1] != columns:
        raise InvalidArgument("out", f"shape {list(a['out'].shape)}", f"[total, {columns}] with {fmt.name} rows")
    _check_starts(a["workspace_starts"], sizes["R"])


def _check_starts(starts: torch.Tensor, requests: int) -> None:
    if starts.shape[0] not in (requests, requests + 1):
        raise InvalidArgument("workspace_starts", f"{starts.shape[0]} entries", f"{requests} or {requests + 1}, as block_table's rows")


def _gather_facts(a: Mapping[str, Any]) -> tuple[Any, ...]:
    cache, out, requests = a["cache"], a["out"], a["block_table"].shape[0]
    rows, columns = out.shape
    return (
        rows > 0 and requests > 0,
        0 <= a["workspace_starts"].shape[0] - requests <= 1,
        rows == 1 or out.stride(0) >= columns,
        a["seq_starts"] is not None,
        a["kv_scale"],
        cache.dtype,
        cache.shape,
        cache.stride(),
    )


@functools.lru_cache(maxsize=4096, typed=True)
def _plan_gather(
    target: str,
    rows: bool,
    starts: bool,
    apart: bool,
    seq_starts: bool,
    kv_scale: float | None,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
) -> Plan:
    """starts: as many as requests; apart: rows of `out` do not overlap."""
    if not starts or not apart:
        raise Refused
    cache = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    fmt = gathered_format(cache)
    check_pages(cache, "cache")
    scale = validate.scale("kv_scale", kv_scale, fmt)
    return Plan.of(GatherUpconvertSpec(Target.named(target), kv_format=fmt.name, seq_starts=seq_starts), {"kv_scale": scale}, rows=rows)


def _gather_values(a: Mapping[str, Any]) -> None:
    """Starts ascend from 0 to the workspace's rows; requests begin at positions >= 0."""
    starts = a["workspace_starts"][: a["block_table"].shape[0]]
    low = torch.cat([torch.zeros_like(starts[:1]), starts[:-1]])
    everything = torch.ones_like(starts, dtype=torch.bool)
    require_values("workspace_starts", starts, everything, low, a["out"].shape[0] + 1)
    if a["seq_starts"] is not None:
        require_values("seq_starts", a["seq_starts"], torch.ones_like(a["seq_starts"], dtype=torch.bool), 0, 2**31 - 1)


GATHER_UPCONVERT = Operation(
    public=gather_upconvert,
    anchor="cache",
    tensors=GATHER_TENSORS,
    vectors=("out",),
    strided=("out",),
    check=_check_gather,
    value_check=_gather_values,
    facts=_gather_facts,
    shapes=("block_table", "workspace_starts"),
    layouts=("cache", "out"),
    plan=_plan_gather,
    made=("out",),
    outputs=lambda a, plan: ({}, a["out"]),
    reference=lambda a, target: reference_call("gather_upconvert", a),
)


# convert_indices -------------------------------------------------------------------------------------------------------


CONVERT_TENSORS = (
    Arg("ids", (validate.I32,), ("N", "k"), Layout.ROWS, vector=True),
    Arg("token_to_req", (validate.I32,), (None,)),
    Arg("block_table", (validate.I32,), (None, None), Layout.ROWS),
    Arg("workspace_starts", (validate.I32,), (None,), optional=True),
    Arg("prefill_request_id", (validate.I32,), (None,), optional=True),
    Arg("out", (validate.I32,), ("N", "k"), Layout.ROWS, vector=True, optional=True, written=True),
    Arg("counts", (validate.I32,), ("N",), optional=True),
)


def _check_convert(a: Mapping[str, Any], target: Target | None) -> None:
    sizes: dict[str, int] = {}
    validate.check(CONVERT_TENSORS, a, sizes, validate.tensor("ids", a["ids"]).device)
    _check_maps(a, sizes["N"])
    _convert_sizes(a["page_rows"], a["block_stride_rows"], a["pages"])


def _check_maps(a: Mapping[str, Any], rows: int) -> None:
    """A request, and where given a prefill request, for each row of ids; what belongs together is given together."""
    for name in ("token_to_req", "prefill_request_id"):
        if a[name] is not None and a[name].shape[0] != rows:
            raise InvalidArgument(
                name, f"{a[name].shape[0]} entries", f"{rows}, one for each row of ids", hint="slice both to the same rows"
            )
    if (a["workspace_starts"] is None) != (a["prefill_request_id"] is None):
        names = ("workspace_starts", "prefill_request_id")
        missing, given = names if a["workspace_starts"] is None else reversed(names)
        raise InvalidArgument(missing, None, f"a tensor, since {given} is given")
    if not isinstance(a["return_counts"], bool):
        raise InvalidArgument("return_counts", repr(a["return_counts"]), "True or False")
    if a["counts"] is not None and not a["return_counts"]:
        raise InvalidArgument("counts", "a tensor", "None without return_counts=True")


def _convert_sizes(page_rows: int, block_stride_rows: int | None, pages: int | None) -> dict[str, int]:
    """Scalar arguments of the kernel, checked."""
    validate.integer("page_rows", page_rows, 1)
    span = page_rows if block_stride_rows is None else validate.integer("block_stride_rows", block_stride_rows, page_rows)
    most = (2**31 - page_rows) // span + 1
    if pages is not None and validate.integer("pages", pages, 0) > most:
        raise InvalidArgument("pages", pages, f"at most {most}, whose slots of {span} rows a page fit int32")
    return {"pages": min(most, 2**31 - 1) if pages is None else pages, "page_rows": page_rows, "block_stride_rows": span}


def _convert_facts(a: Mapping[str, Any]) -> tuple[Any, ...]:
    (rows, k), out = a["ids"].shape, a["out"]
    return (
        rows > 0,
        out is None or rows == 1 or out.stride(0) >= k,
        a["prefill_request_id"] is not None,
        a["workspace_starts"] is not None,
        a["counts"] is not None,
        a["return_counts"],
        a["page_rows"],
        a["block_stride_rows"],
        a["pages"],
    )


@functools.lru_cache(maxsize=1024, typed=True)
def _plan_convert(
    target: str,
    rows: bool,
    apart: bool,
    prefill: bool,
    starts: bool,
    counts: bool,
    return_counts: bool,
    page_rows: int,
    block_stride_rows: int | None,
    pages: int | None,
) -> Plan:
    """apart: rows of `out` do not overlap. The compiled function itself ties the number of rows of all tensors."""
    if not apart or prefill != starts or not isinstance(return_counts, bool) or (counts and not return_counts):
        raise Refused
    spec = ConvertIndicesSpec(Target.named(target), prefill=prefill, compact=return_counts)
    return Plan.of(spec, _convert_sizes(page_rows, block_stride_rows, pages), rows=rows)


def _convert_outputs(a: Mapping[str, Any], plan: Plan) -> tuple[Mapping[str, Any], Any]:
    ids, out, counts = a["ids"], a["out"], a["counts"]
    rows, k = ids.shape
    if out is None:
        out = ids.new_empty_strided((rows, k), (-(-max(k, 1) // 8) * 8, 1))
    if not a["return_counts"]:
        return {"out": out}, out
    if counts is None:
        counts = ids.new_empty(rows)
    return {"out": out, "counts": counts}, (out, counts)


def _convert_values(a: Mapping[str, Any]) -> None:
    """Requests are in the table, ids -1 or on one of its pages; prefill requests have a start."""
    ids, requests, table = a["ids"], a["token_to_req"], a["block_table"]
    paged = torch.ones_like(requests, dtype=torch.bool)
    if a["prefill_request_id"] is not None:
        paged = a["prefill_request_id"] < 0
        require_values("prefill_request_id", a["prefill_request_id"], ~paged, 0, a["workspace_starts"].shape[0])
    require_values("token_to_req", requests, paged, 0, table.shape[0])
    limit = min(table.shape[1] * a["page_rows"], 2**31)
    require_values("ids", ids, paged[:, None] & (ids != -1), 0, limit)


CONVERT_INDICES = Operation(
    public=convert_indices,
    anchor="ids",
    tensors=CONVERT_TENSORS,
    vectors=("ids", "out"),
    strided=("ids", "out"),
    check=_check_convert,
    value_check=_convert_values,
    facts=_convert_facts,
    shapes=("ids",),
    layouts=("out",),
    plan=_plan_convert,
    made=("out", "counts"),
    outputs=_convert_outputs,
    reference=lambda a, target: reference_call("convert_indices", a),
)
