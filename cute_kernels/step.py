"""What one engine step is: which rows belong to which request, where decode ends and prefill begins, what layers share."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from cute_kernels.errors import InvalidArgument
from cute_kernels.handles import Held
from cute_kernels.scratch import compress_scratch

Value = TypeVar("Value")


@dataclass(frozen=True)
class CallPolicy:
    """Whether decode rows and prefill rows of a step go to FlashInfer in two calls or in one.

    SM100: its kernel lays a grid of (longest query) x (requests), so in one call every decode request is padded to the longest
    prefill: with 256 decode rows beside one prefill of 2048, half a million blocks of queries that find nothing to do. Two calls
    pad nothing across the two kinds and cost one more launch, a few microseconds; that pays off only where the padding is small.
    SM120: there is no such grid, but the number of rows in a call chooses its kernels: up to 64 rows split the keys among blocks,
    more do not. One call is taken only where both kinds would get the same kernels apart, so that no row computes otherwise.

    max_padded_rows   query rows of padding that one call may add; 0: always two calls
    """

    max_padded_rows: int = 0

    def __post_init__(self) -> None:
        value = self.max_padded_rows
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise InvalidArgument("max_padded_rows", repr(value), "an int >= 0")

    def one_call(self, step: StepMetadata, combined: bool) -> bool:
        """True where decode and prefill rows of `step` go together; `combined` is the SM100 family's form of index tables."""
        decodes, prefills = step.num_decode_tokens, step.num_prefill_tokens
        if not (self.max_padded_rows and decodes and prefills):
            return False
        if combined:
            return step.num_decodes * (step.max_query_len - step.max_decode_query_len) <= self.max_padded_rows
        return step.num_tokens <= SPLIT_ROWS or min(decodes, prefills) > SPLIT_ROWS


# Most rows of an SM120 call that FlashInfer serves with kernels that split the keys among blocks (docs/spec.md).
SPLIT_ROWS = 64


class StepMetadata(Held):
    """The rows of one step, computed once and read by every layer.

    Rows are ordered by request. Decode rows are those of the leading requests with at most `decode_query_len` query rows;
    all later rows are prefill rows. With `uniform_decodes` the leading requests must also have one and the same query length,
    that of the first of them; requests without a row, which pad a captured batch, count as decodes. Every device tensor lives
    in a buffer allocated once, and `update` writes into these buffers without synchronising, so a CUDA graph captured over
    them stays valid. Exact sequence lengths are kept on the device only.

    num_requests, num_tokens              requests R and rows T of this step
    query_start_loc                       int32 [R + 1] on the device: request r owns rows [r], [r + 1)
    query_start_loc_cpu                   the same, on the CPU
    prefill_query_start_loc               int32 [num_prefills + 1] on the device, rebased to start at 0
    seq_lens                              int32 [R] on the device: tokens of each request, this step's rows included;
                                          0 marks a padding request of a captured graph
    max_query_len, max_decode_query_len   longest query of the step, and of its decode requests
    decode_query_len                      longest query that counts as decode
    num_decodes, num_decode_tokens        leading requests with short queries, and their rows
    num_prefills, num_prefill_tokens      the rest
    call_policy                           whether `decode` attends to both kinds in one call or in two
    positions                             int64 [T] on the device, 0 where a padding request has none
    token_to_req                          int32 [T] on the device
    """

    def __init__(
        self,
        max_requests: int,
        max_tokens: int,
        device: torch.device | str,
        *,
        decode_query_len: int = 1,
        uniform_decodes: bool = False,
        call_policy: CallPolicy | None = None,
    ) -> None:
        """Allocates buffers for steps of up to `max_requests` requests and `max_tokens` rows on `device`; `InvalidArgument`."""
        for name, value in (("max_requests", max_requests), ("max_tokens", max_tokens), ("decode_query_len", decode_query_len)):
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
                raise InvalidArgument(name, repr(value), "an int, 1 <= value < 2^31")
        if not isinstance(uniform_decodes, bool):
            raise InvalidArgument("uniform_decodes", repr(uniform_decodes), "True or False")
        if call_policy is not None and not isinstance(call_policy, CallPolicy):
            raise InvalidArgument("call_policy", repr(call_policy), "a CallPolicy, or None for two calls")
        self.device = _device(device)
        self.max_requests, self.max_tokens, self.decode_query_len = max_requests, max_tokens, decode_query_len
        self.uniform_decodes, self.call_policy = uniform_decodes, call_policy or CallPolicy()

        def buffer(size: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=self.device)

        self._query_start_loc = buffer(max_requests + 1, torch.int32)
        self._prefill_query_start_loc = buffer(max_requests + 1, torch.int32)
        self._seq_lens = buffer(max_requests, torch.int32)
        self._positions = buffer(max_tokens, torch.int64)
        self._token_to_req = buffer(max_tokens, torch.int32)
        self._kept: dict[Hashable, Any] = {}
        self._once: dict[Hashable, tuple[bool, Any]] = {}
        self._set_shape(torch.zeros(1, dtype=torch.int32))

    @classmethod
    def of(
        cls,
        query_lens: Sequence[int] | torch.Tensor,
        seq_lens: Sequence[int] | torch.Tensor,
        device: torch.device | str = "cpu",
        *,
        decode_query_len: int = 1,
        uniform_decodes: bool = False,
        call_policy: CallPolicy | None = None,
    ) -> StepMetadata:
        """A step with buffers of exactly its own size, from the query length and the sequence length of each request, as for `update`."""
        rules: dict[str, Any] = {"uniform_decodes": uniform_decodes, "call_policy": call_policy}
        lens = _query_lens(query_lens)
        step = cls(max(len(lens), 1), max(int(lens.sum()), 1), device, decode_query_len=decode_query_len, **rules)
        return step.update(lens, seq_lens)

    @classmethod
    def from_parts(
        cls,
        query_start_loc: torch.Tensor,
        prefill_query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        positions: torch.Tensor,
        token_to_req: torch.Tensor,
        num_decodes: int,
        num_decode_tokens: int,
        max_query_len: int,
        max_decode_query_len: int,
        decode_query_len: int,
        max_padded_rows: int = 0,
    ) -> StepMetadata:
        """A step over tensors that exist already, as a traced graph hands them over: nothing is allocated or copied.

        It has no `query_start_loc_cpu` and cannot be updated; `decode` reads neither. `max_padded_rows` as for `CallPolicy`.
        """
        step = cls.__new__(cls)
        step.device = positions.device
        step.query_start_loc, step.prefill_query_start_loc = query_start_loc, prefill_query_start_loc
        step.seq_lens, step.positions, step.token_to_req = seq_lens, positions, token_to_req
        step.num_requests, step.num_tokens = seq_lens.shape[0], positions.shape[0]
        step.num_decodes, step.num_decode_tokens = num_decodes, num_decode_tokens
        step.num_prefills, step.num_prefill_tokens = step.num_requests - num_decodes, step.num_tokens - num_decode_tokens
        step.max_query_len, step.max_decode_query_len, step.decode_query_len = max_query_len, max_decode_query_len, decode_query_len
        step.call_policy = CallPolicy(max_padded_rows)
        step._kept, step._once = {}, {}
        return step

    def update(
        self,
        query_lens: Sequence[int] | torch.Tensor,
        seq_lens: Sequence[int] | torch.Tensor,
        *,
        positions: torch.Tensor | None = None,
        token_to_req: torch.Tensor | None = None,
    ) -> StepMetadata:
        """Describes the next step and forgets what layers shared in the last one. Returns itself.

        query_lens    query rows of each request: ints, or a CPU tensor int32 [R]
        seq_lens      tokens of each request including this step's rows: ints, or a tensor int32 [R] on any device
        positions     int64 [T] on the device, where the engine has them already; else they are computed
        token_to_req  int32 [T] on the device, likewise

        `InvalidArgument` where a length is negative, the buffers are too small, or shapes, dtypes or devices disagree; and, where
        `seq_lens` comes from the CPU, where a sequence is shorter than its query (0 marks a padding request).
        """
        if not hasattr(self, "_query_start_loc"):
            raise InvalidArgument("update", "a step over tensors of another", "a step with buffers of its own")
        lens = _query_lens(query_lens)
        if len(lens) > self.max_requests:
            raise InvalidArgument("query_lens", f"{len(lens)} requests", f"at most max_requests={self.max_requests}")
        if len(lens) and not 0 <= int(lens.min()) <= int(lens.max()) < 2**31:
            wrong = int(lens.min()) if int(lens.min()) < 0 else int(lens.max())
            raise InvalidArgument("query_lens", wrong, "lengths >= 0" if wrong < 0 else "lengths < 2^31")
        if int(lens.sum()) > self.max_tokens:
            raise InvalidArgument("query_lens", f"{int(lens.sum())} rows", f"at most max_tokens={self.max_tokens}")
        seq = seq_lens if isinstance(seq_lens, torch.Tensor) else _lengths("seq_lens", seq_lens, torch.int32)
        if seq.dtype != torch.int32 or tuple(seq.shape) != tuple(lens.shape):
            raise InvalidArgument("seq_lens", f"{seq.dtype} {list(seq.shape)}", f"torch.int32 [{len(lens)}], one entry per query length")
        short = ((seq < lens) & (seq != 0)).nonzero().flatten().tolist() if seq.device.type == "cpu" else []
        if short:
            r = short[0]
            raise InvalidArgument("seq_lens", f"{int(seq[r])} for request {r}", f"0, or at least its {int(lens[r])} query rows")
        total = int(lens.sum())
        for name, value, dtype in (("positions", positions, torch.int64), ("token_to_req", token_to_req, torch.int32)):
            if value is not None and not isinstance(value, torch.Tensor):
                raise InvalidArgument(name, f"a {type(value).__name__}", f"{dtype} [{total}] on {self.device}")
            if value is not None and (value.dtype != dtype or tuple(value.shape) != (total,) or value.device.type != self.device.type):
                raise InvalidArgument(name, f"{value.dtype} {list(value.shape)} on {value.device}", f"{dtype} [{total}] on {self.device}")

        offsets = torch.zeros(len(lens) + 1, dtype=torch.int32)
        torch.cumsum(lens, 0, out=offsets[1:])
        self._set_shape(offsets)
        self.query_start_loc.copy_(offsets, non_blocking=True)
        self.prefill_query_start_loc.copy_(offsets[self.num_decodes :] - self.num_decode_tokens, non_blocking=True)
        self.seq_lens.copy_(seq, non_blocking=True)
        if token_to_req is None:
            token_to_req = torch.repeat_interleave(torch.arange(len(lens), dtype=torch.int32), lens)
        self.token_to_req.copy_(token_to_req, non_blocking=True)
        if positions is None:
            starts = self.seq_lens - self.query_start_loc[1:]  # position = starts[r] + t
            owners = self.token_to_req.long().clamp(0, max(len(lens) - 1, 0))  # a padding row may name any request
            positions = torch.arange(total, device=self.device) + starts[owners]
        self.positions.copy_(positions.clamp(min=0), non_blocking=True)
        self._once.clear()
        return self

    def _set_shape(self, offsets: torch.Tensor) -> None:
        lens = offsets.diff()
        prefill = lens > self.decode_query_len
        if self.uniform_decodes:
            rows = lens[lens > 0]
            prefill |= (lens > 0) & (lens != (rows[0] if len(rows) else 0))
        long = prefill.nonzero()
        self.query_start_loc_cpu = offsets
        self.num_requests, self.num_tokens = len(lens), int(offsets[-1])
        self.num_decodes = int(long[0]) if len(long) else self.num_requests
        self.num_decode_tokens = int(offsets[self.num_decodes])
        self.num_prefills = self.num_requests - self.num_decodes
        self.num_prefill_tokens = self.num_tokens - self.num_decode_tokens
        self.max_query_len = int(lens.max()) if len(lens) else 0
        self.max_decode_query_len = int(lens[: self.num_decodes].max()) if self.num_decodes else 0
        self.query_start_loc = self._query_start_loc[: self.num_requests + 1]
        self.prefill_query_start_loc = self._prefill_query_start_loc[: self.num_prefills + 1]
        self.seq_lens = self._seq_lens[: self.num_requests]
        self.positions = self._positions[: self.num_tokens]
        self.token_to_req = self._token_to_req[: self.num_tokens]

    # Where prefill is attended to elsewhere ----------------------------------------------------------------------------

    def decode_only(self) -> StepMetadata:
        """The decode requests of this step as a step of their own, for when prefill rows are attended to densely.

        Taken from the counts that this step has; its tensors are views of this step's, so what a graph captured over it stays
        valid. Index tables and `decode` then cover the first `num_decode_tokens` rows of q. `compress_store` and `qkv_insert`
        still take the whole step: prefill rows are stored too. It lasts until the next `update`.
        """
        return self.once("decode only", self._decode_part)

    def prefill_only(self) -> StepMetadata:
        """The prefill requests as a step of their own: offsets and request numbers begin at 0. Otherwise as `decode_only`."""
        return self.once("prefill only", self._prefill_part)

    def _decode_part(self) -> StepMetadata:
        requests, rows = self.num_decodes, self.num_decode_tokens
        part = StepMetadata.from_parts(
            self.query_start_loc[: requests + 1],
            self.prefill_query_start_loc[:1],
            self.seq_lens[:requests],
            self.positions[:rows],
            self.token_to_req[:rows],
            num_decodes=requests,
            num_decode_tokens=rows,
            max_query_len=self.max_decode_query_len,
            max_decode_query_len=self.max_decode_query_len,
            decode_query_len=self.decode_query_len,
        )
        return self._adopt(part, "decode only", self.query_start_loc_cpu[: requests + 1])

    def _prefill_part(self) -> StepMetadata:
        requests, rows = self.num_decodes, self.num_decode_tokens
        part = StepMetadata.from_parts(
            self.prefill_query_start_loc,
            self.prefill_query_start_loc,
            self.seq_lens[requests:],
            self.positions[rows:],
            self.token_to_req[rows:] - requests,
            num_decodes=0,
            num_decode_tokens=0,
            max_query_len=self.max_query_len,
            max_decode_query_len=0,
            decode_query_len=self.decode_query_len,
        )
        return self._adopt(part, "prefill only", self.query_start_loc_cpu[requests:] - rows)

    def _adopt(self, part: StepMetadata, name: str, offsets: torch.Tensor) -> StepMetadata:
        part.query_start_loc_cpu, part.call_policy = offsets, self.call_policy
        part.max_tokens = self.max_tokens
        part._kept, part._once = self.keep(name, dict), {}
        return part

    # What layers share -------------------------------------------------------------------------------------------------

    def once(self, key: Hashable, build: Callable[..., Value], *arguments: object) -> Value:
        """The value of `key` in this step: built of `arguments` by the first layer that asks, handed to the others.

        A value built outside a CUDA graph is not handed to a capture, nor the other way round: the graph must hold the
        launches that build what it reads. Call `update` before each capture.
        """
        capturing = self._capturing()
        found = self._once.get(key)
        if found is None or found[0] != capturing:
            found = self._once[key] = (capturing, build(*arguments))
        return found[1]

    def keep(self, key: Hashable, make: Callable[..., Value], *arguments: object) -> Value:
        """The value of `key` for the life of this object, made of `arguments` on first use: buffers that captured graphs go on using."""
        if key not in self._kept:
            self._kept[key] = make(*arguments)
        return self._kept[key]

    def scratch(self) -> torch.Tensor:
        """The `compress_scratch` of this object's launches, which therefore have to run one after another: on one stream.

        One that is first asked for while a graph is captured is the graph's own: its zeros are there only once the graph has run.
        """
        key = "compress scratch"
        make = self.once if self._capturing() and key not in self._kept else self.keep
        return make(key, compress_scratch, self.positions.device)

    def _capturing(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _device(device: torch.device | str) -> torch.device:
    try:
        if isinstance(device, str | torch.device):
            return torch.device(device)
    except RuntimeError:  # a name of none
        pass
    raise InvalidArgument("device", repr(device), 'a torch.device or its name, such as "cuda"')


def _query_lens(values: Sequence[int] | torch.Tensor) -> torch.Tensor:
    lens = _lengths("query_lens", values, torch.int64)
    if lens.dim() != 1 or lens.device.type != "cpu":
        raise InvalidArgument("query_lens", f"shape {list(lens.shape)} on {lens.device}", "one int per request, on the CPU")
    return lens


def _lengths(name: str, values: Sequence[int] | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Whole numbers as a tensor; nothing is rounded to one."""
    wanted = f"ints that {dtype} holds"
    try:
        given = values if isinstance(values, torch.Tensor) else torch.as_tensor(values if len(values) else torch.empty(0, dtype=dtype))
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidArgument(name, repr(values), wanted) from error
    if given.dtype.is_floating_point or given.dtype.is_complex or given.dtype == torch.bool:
        raise InvalidArgument(name, f"{given.dtype} numbers", wanted)
    converted = given.to(dtype)
    if given.device.type == "cpu" and not torch.equal(converted.to(given.dtype), given):
        raise InvalidArgument(name, f"{given.dtype} numbers", wanted)
    return converted


def slot_mapping(
    step: StepMetadata, block_table: torch.Tensor, page_rows: int, *, ratio: int = 1, name: str = "block_table"
) -> torch.Tensor:
    """Slots of this step's rows in a paged pool, from its block table.

    step         the step
    block_table  int32 [R, n] on the step's device: page of each `page_rows` entries of a request
    page_rows    rows of one page of that pool
    ratio        1: every row has a slot (window cache, state pool); 4 or 128: the compressed cache, where row t has a slot
                 iff it closes a group, (position + 1) % ratio == 0
    name         of the table, in errors

    Returns int64 [T]; -1 for rows without a slot, for rows of padding requests (sequence length 0) and of requests that the step
    does not have, for negative table entries and past the end of the table. Does not synchronise. Slots are defined in docs/spec.md:
    entry e of a request lies in page block_table[request, e // page_rows]. Raises `InvalidArgument`.
    """
    if not isinstance(block_table, torch.Tensor):
        raise InvalidArgument(name, f"a {type(block_table).__name__}", f"torch.int32 [>={step.num_requests}, n]")
    if block_table.dim() != 2 or block_table.dtype != torch.int32 or block_table.shape[0] < step.num_requests:
        raise InvalidArgument(name, f"{block_table.dtype} {list(block_table.shape)}", f"torch.int32 [>={step.num_requests}, n]")
    if block_table.device != step.positions.device:
        raise InvalidArgument(name, f"device {block_table.device}", f"{step.positions.device}, where the step is")
    for number, value in (("page_rows", page_rows), ("ratio", ratio)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InvalidArgument(number, repr(value), "an int >= 1")
    if block_table.shape[1] == 0 or step.num_tokens == 0 or step.num_requests == 0:
        return torch.full((step.num_tokens,), -1, dtype=torch.int64, device=step.positions.device)
    owner = step.token_to_req.long()
    request = owner.clamp(0, step.num_requests - 1)
    entry = step.positions // ratio
    column = entry // page_rows
    page = block_table[request, column.clamp(max=block_table.shape[1] - 1)].long()
    real = (
        (owner == request)
        & (step.seq_lens[request] > 0)
        & ((step.positions + 1) % ratio == 0)
        & (column < block_table.shape[1])
        & (page >= 0)
    )
    return torch.where(real, page * page_rows + entry % page_rows, -1)
