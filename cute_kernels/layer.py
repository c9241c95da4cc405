"""What a model's attention layer holds and calls: one object per layer, one call per step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field

import torch

from cute_kernels import dispatch, layer_op, validate
from cute_kernels.compile.spec import CompressStoreSpec, KernelSpec, QkvInsertSpec, SparseIndicesSpec
from cute_kernels.errors import InvalidArgument
from cute_kernels.handles import Held
from cute_kernels.indices import IdSource, Indices
from cute_kernels.kv_format import HEAD_DIM, WINDOW, KVFormat, PoolGeometry, format_of, formats_of, resolve_format
from cute_kernels.ops import bound, compress_store, decode, new_tables, qkv_insert, sparse_indices
from cute_kernels.save_policy import SavePolicy
from cute_kernels.step import StepMetadata, slot_mapping
from cute_kernels.target import Target


@dataclass(frozen=True)
class LayerSpec:
    """What a layer is, apart from its tensors.

    ratio            1 (window only, 0 in a model's `compress_ratios`), 4 or 128: tokens per compressed entry
    num_heads        query heads on this GPU, 1 to 128
    kv_cache_dtype   "auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_ds_mla"; what it means depends on the family
    eps              of both RMS norms
    max_seq_len      longest sequence; ratio 128 sizes its tables by it
    index_topk       ratio 4: ids per row of the indexer
    sm_scale         softmax scale
    q_scale, kv_scale   per-tensor FP8 scales; 1.0 with other formats
    apply_q_norm     False: q comes normalised
    save             which state rows are kept
    head_dim, window, vision_spans   512, 128 and False; anything else is refused by name

    Raises `InvalidArgument`, `UnsupportedRequest`.
    """

    ratio: int
    num_heads: int
    kv_cache_dtype: str = "auto"
    eps: float = 1e-6
    max_seq_len: int = 1 << 20
    index_topk: int = 512
    sm_scale: float = HEAD_DIM**-0.5
    q_scale: float = 1.0
    kv_scale: float = 1.0
    apply_q_norm: bool = True
    save: SavePolicy = field(default=SavePolicy.EVERY_ROW)
    head_dim: int = HEAD_DIM
    window: int = WINDOW
    vision_spans: bool = False

    def __post_init__(self) -> None:
        validate.layer_ratio(self.ratio)
        dispatch.pad_q_heads(self.num_heads)
        for name in ("eps", "sm_scale", "q_scale", "kv_scale"):
            validate.positive(name, getattr(self, name))
        for name in ("max_seq_len", "index_topk"):
            validate.integer(name, getattr(self, name), 1)
        validate.save_policy(self.save)
        dispatch.require_model(head_dim=self.head_dim, window=self.window, vision_spans=self.vision_spans)

    @property
    def padded_heads(self) -> int:
        """Heads of q and out buffers: the smallest count FlashInfer accepts."""
        return dispatch.pad_q_heads(self.num_heads)

    @property
    def width(self) -> int:
        """Columns of the compressed part of the layer's index tables."""
        columns = {1: 0, 4: self.index_topk, 128: max(self.max_seq_len // 128, 1)}[self.ratio]
        return (columns + 3) // 4 * 4

    @property
    def sources(self) -> tuple[IdSource, ...]:
        """Where compressed entries can come from."""
        return {1: (IdSource.NONE,), 4: (IdSource.LOCAL, IdSource.ALL_GROUPS), 128: (IdSource.ALL_GROUPS,)}[self.ratio]

    def kv_format(self, target: Target | None) -> KVFormat:
        """The row format of both caches; CPU layers without a target follow the SM100 family. `UnsupportedRequest` where it has none."""
        return resolve_format(self.kv_cache_dtype, "sm100" if target is None else target.family)

    def q_dtype(self, target: Target | None) -> torch.dtype:
        """FP8 where the caches are full FP8 rows, else BF16."""
        return torch.float8_e4m3fn if self.kv_format(target).scaled else torch.bfloat16

    def specs(self, target: Target, *, scores: bool = True, pdl: bool = True) -> Iterator[KernelSpec]:
        """Every kernel the layer can need on `target`: all access widths that arguments may allow, all id sources.

        scores  False: the engine saves state rows itself and `kv_score` is None
        """
        for width in (16, 32):
            if width > target.vector_bytes:
                continue
            name = self.kv_format(target).name
            q_dtype = "e4m3" if self.kv_format(target).scaled else "bf16"
            yield QkvInsertSpec(target, width, pdl, kv_format=name, q_dtype=q_dtype, apply_q_norm=self.apply_q_norm)
            if self.ratio > 1:
                save = "none" if not scores else "every_row" if self.save.every_row else "policy"
                yield CompressStoreSpec(target, width, pdl, ratio=self.ratio, kv_format=name, scores=scores, save=save)
            for source in self.sources:
                yield SparseIndicesSpec(target, width, pdl, source=source.value, slots=True)


@dataclass
class StepTables(Held):
    """Block tables and slots of one step for one kind of layer. R requests, T rows.

    window_block_table      int32 [R, columns]     pages of the window cache
    window_slots            int64 [T]              where this step's rows go there; negative: padding row
    compressed_block_table  int32 [R, columns]     pages of the compressed cache (ratio 4 and 128)
    kv_slots                int64 [T]              where a row's compressed entry goes; negative where it closes no group
    state_block_table       int32 [R, columns]     blocks of the compressor's state pool
    state_slots             int64 [T]              where a row is saved there; negative: padding row
    width                   columns of the compressed part where fewer than `LayerSpec.width` are enough for this step
    page_rows               rows of a window page, of a compressed page and of a state block that the slots were made for, 0 where none
                            were; a layer refuses others than its pools have. None: not known
    """

    window_block_table: torch.Tensor
    window_slots: torch.Tensor
    compressed_block_table: torch.Tensor | None = None
    kv_slots: torch.Tensor | None = None
    state_block_table: torch.Tensor | None = None
    state_slots: torch.Tensor | None = None
    width: int | None = None
    page_rows: tuple[int, int, int] | None = None

    @staticmethod
    def of(
        step: StepMetadata,
        window_block_table: torch.Tensor,
        window_page_rows: int,
        *,
        ratio: int = 1,
        compressed_block_table: torch.Tensor | None = None,
        compressed_page_rows: int = 0,
        state_block_table: torch.Tensor | None = None,
        state_block_rows: int = 0,
        width: int | None = None,
    ) -> StepTables:
        """The tables of a step whose slots follow from its block tables (`slot_mapping`).

        window_block_table, compressed_block_table, state_block_table, width   as the class has them, for this step's requests or more
        window_page_rows, compressed_page_rows, state_block_rows   rows of a page of each pool
        ratio   of the layers: 1 needs the window's alone

        Raises `InvalidArgument`.
        """
        validate.layer_ratio(ratio)
        validate.integer("window_page_rows", window_page_rows, 1)
        slots = slot_mapping(step, window_block_table, window_page_rows, name="window_block_table")
        page_rows = (window_page_rows, compressed_page_rows, state_block_rows)
        tables = StepTables(window_block_table, slots, width=width, page_rows=page_rows)
        if ratio == 1:
            return tables
        if compressed_block_table is None or state_block_table is None:
            name = "compressed_block_table" if compressed_block_table is None else "state_block_table"
            raise InvalidArgument(name, None, f"int32 [R, columns], which ratio {ratio} needs")
        validate.integer("compressed_page_rows", compressed_page_rows, 1)
        validate.integer("state_block_rows", state_block_rows, 1)
        tables.compressed_block_table = compressed_block_table
        tables.state_block_table = state_block_table[: step.num_requests]  # as many as `seq_lens`
        tables.kv_slots = slot_mapping(step, compressed_block_table, compressed_page_rows, ratio=ratio, name="compressed_block_table")
        tables.state_slots = slot_mapping(step, state_block_table, state_block_rows, name="state_block_table")
        return tables


class SparseMLA(Held):
    """One sparse-MLA layer: its caches and weights, and the four calls of a step in order."""

    def __init__(
        self,
        spec: LayerSpec,
        *,
        swa_cache: torch.Tensor,
        cos_sin: torch.Tensor,
        kv_cache: torch.Tensor | None = None,
        state: torch.Tensor | None = None,
        ape: torch.Tensor | None = None,
        norm_weight: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
        target: Target | str | None = None,
        insert_backend: str = "auto",
        decode_backend: str = "auto",
    ) -> None:
        """Holds the layer's tensors; all on one device.

        swa_cache    [pages, page rows, 512 or 584] window cache in the format of `spec.kv_cache_dtype`, any page stride
        cos_sin      [P, 64] fp32, the table that q, KV rows and compressor share
        kv_cache     likewise, compressed cache (ratio 4 and 128)
        state        [blocks, block rows, 2W] fp32 state pool (ratio 4 and 128); W = 1024 or 512
        ape          [ratio, W] fp32, finite; None where the engine saves state rows itself and calls without kv_score
        norm_weight  [512] bf16 of the compressor's norm
        sinks        [num_heads] fp32 attention sinks
        target       Target or name; default: the tensors' device
        insert_backend, decode_backend   backend of `qkv_insert` and of `decode`

        Raises `InvalidArgument`, `UnsupportedRequest`.
        """
        self.spec, self.insert_backend, self.decode_backend = spec, insert_backend, decode_backend
        self.target = dispatch.resolve_target(validate.tensor("swa_cache", swa_cache).device, target)
        self.format = spec.kv_format(self.target)
        self._require_format("swa_cache", swa_cache)
        if spec.ratio > 1:
            for name, value in (("kv_cache", kv_cache), ("state", state), ("norm_weight", norm_weight)):
                validate.tensor(name, value)
            self._require_format("kv_cache", kv_cache)
        else:
            for name, value in (("kv_cache", kv_cache), ("state", state), ("ape", ape), ("norm_weight", norm_weight)):
                if value is not None:
                    raise InvalidArgument(name, f"a {type(value).__name__}", "None for a window-only layer (ratio 1)")
        for name in ("kv_scale", "q_scale"):
            validate.scale(name, getattr(spec, name), self.format)
        self.swa_cache, self.kv_cache, self.state, self.ape = swa_cache, kv_cache, state, ape
        self.window = PoolGeometry.of(swa_cache, "swa_cache")
        self.compressed = None if kv_cache is None else PoolGeometry.of(kv_cache)
        self._page_rows = tuple(0 if pool is None else pool.shape[1] for pool in (swa_cache, kv_cache, state))
        self.sinks = None if sinks is None else self._padded_sinks(sinks)
        self._compress = None
        self._takes_scratch = self.target is not None and any(kernel.takes_scratch for kernel in spec.specs(self.target))
        if spec.ratio > 1:
            self._compress = bound(
                compress_store,
                ape=ape,
                state=state,
                norm_weight=norm_weight,
                cos_sin=cos_sin,
                kv_cache=kv_cache,
                ratio=spec.ratio,
                eps=spec.eps,
                kv_scale=spec.kv_scale,
                save=spec.save,
                target=self.target,
            )
        self._insert = bound(
            qkv_insert,
            kv_cache=swa_cache,
            cos_sin=cos_sin,
            eps=spec.eps,
            q_scale=spec.q_scale,
            kv_scale=spec.kv_scale,
            padded_heads=spec.padded_heads,
            apply_q_norm=spec.apply_q_norm,
            q_dtype=spec.q_dtype(self.target),
            backend=insert_backend,
            target=self.target,
        )
        self._indices = bound(sparse_indices, window=self.window, compressed=self.compressed, ratio=spec.ratio, target=self.target)

    def _require_format(self, name: str, cache: torch.Tensor | None) -> None:
        found = format_of(validate.tensor(name, cache), name)
        if found is not self.format:
            mine = "sm100" if self.target is None else self.target.family
            wanted = f"{self.format.name} rows, which {self.spec.kv_cache_dtype!r} means on the {mine.upper()} family"
            hint = "the spec's kv_cache_dtype chooses among them"
            if found not in formats_of(mine):
                other = "sm120" if mine == "sm100" else "sm100"
                hint = f"these rows are the {other.upper()} family's, on CPU tensors with target={other!r}; here caches are "
                hint += " or ".join(f"{kind.dtype} [pages, rows, {kind.row_elements}]" for kind in formats_of(mine))
            raise InvalidArgument(name, f"{found.name} rows", wanted, hint=hint)

    def _require_page_rows(self, tables: StepTables) -> None:
        """Slots that were made for pages of another size would name other rows."""
        if tables.page_rows is None or tables.page_rows == self._page_rows:
            return
        names = ("window_page_rows", "compressed_page_rows", "state_block_rows")
        for name, given, mine in zip(names, tables.page_rows, self._page_rows, strict=True):
            if mine and given and given != mine:
                hint = f"StepTables.of(..., {name}={mine}), as this layer's pool has"
                raise InvalidArgument("tables.page_rows", f"{name}={given}", f"{name}={mine}", hint=hint)

    def _padded_sinks(self, sinks: torch.Tensor) -> torch.Tensor:
        device = self.swa_cache.device
        validate.check((validate.Arg("sinks", (torch.float32,), (self.spec.num_heads,)),), {"sinks": sinks}, {}, device)
        return dispatch.pad_sinks(sinks, self.spec.padded_heads)

    def warm_up(self, progress: Callable[[KernelSpec], None] | None = None) -> int:
        """Loads, and compiles where needed, every kernel this layer can call. Returns how many; 0 without a target."""
        if self.target is None:
            return 0
        from cute_kernels.compile import cache

        return cache.warm_up(self.spec.specs(self.target, scores=self.ape is not None), progress)

    def __call__(
        self,
        step: StepMetadata,
        tables: StepTables,
        q: torch.Tensor,
        kv: torch.Tensor,
        kv_score: torch.Tensor | None = None,
        ids: torch.Tensor | IdSource | None = None,
        *,
        out: torch.Tensor | None = None,
        workspace: torch.Tensor | None = None,
        counters: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One step: saves and compresses, builds index tables, inserts this step's rows, attends.

        step      rows and lengths of the step (T rows)
        tables    block tables and slots for this kind of layer
        q         [T, num_heads, 512] bf16, before norm and RoPE
        kv        [T, 512] bf16, normalised, before RoPE
        kv_score  [>= T, 2W] fp32 of the compressor (ratio 4 and 128); None where state rows are saved already
        ids       ratio 4: int32 [T, k], the indexer's entries by number in the request; or IdSource.ALL_GROUPS where no request
                  has more than `index_topk` entries, so that all are selected
        out       [>= T, padded heads, 512] bf16; default: a new tensor
        workspace, counters   as for `decode`

        Returns [T, num_heads, 512] bf16, a view; its last 64 columns are sums of rotated values, which the model rotates back by each
        row's position. `torch.compile` sees one operator (`layer_op`), which runs this when the graph runs; step and tables must live
        until then. Source of the mathematics: docs/spec.md. Raises `InvalidArgument`, `UnsupportedRequest`, `MissingKernel`.
        """
        if torch.compiler.is_compiling():
            return layer_op.call(self, step, tables, q, kv, kv_score, ids, out, workspace, counters)
        if validate.tensor("q", q).dim() != 3 or q.shape[1] != self.spec.num_heads:
            raise InvalidArgument("q", f"shape {list(q.shape)}", f"[{step.num_tokens}, {self.spec.num_heads}, {HEAD_DIM}]")
        # The compressor's launch waits for all in front of it; the others touch other memory than it and each other, so they run
        # beside it: state pool and compressed rows, index tables, window rows and q.
        beside = self.compress(step, tables, kv_score)
        indices = self.indices(step, tables, ids, independent=beside)
        padded = self._insert.call(q=q, kv=kv, slots=tables.window_slots, positions=step.positions, independent=beside)
        attended = decode(
            padded,
            self.swa_cache,
            self.kv_cache,
            step,
            indices,
            num_heads=self.spec.num_heads,
            sinks=self.sinks,
            sm_scale=self.spec.sm_scale,
            q_scale=self.spec.q_scale,
            kv_scale=self.spec.kv_scale,
            out=out,
            workspace=workspace,
            counters=counters,
            backend=self.decode_backend,
            target=self.target,
        )
        assert isinstance(attended, torch.Tensor)
        return attended

    def compress(self, step: StepMetadata, tables: StepTables, kv_score: torch.Tensor | None) -> bool:
        """The layer's `compress_store`; nothing for a window-only layer. Returns whether launches may run beside its own."""
        self._require_page_rows(tables)
        if self._compress is None:
            if kv_score is not None:
                raise InvalidArgument("kv_score", f"a {type(kv_score).__name__}", "None for a window-only layer (ratio 1)")
            return False
        if tables.state_slots is None or tables.kv_slots is None:
            name = "tables.state_slots" if tables.state_slots is None else "tables.kv_slots"
            ratio = self.spec.ratio
            raise InvalidArgument(name, None, f"int64 [T], which ratio {ratio} needs", hint=f"StepTables.of(..., ratio={ratio}, ...)")
        self._compress.call(
            kv_score=kv_score,
            state_block_table=tables.state_block_table,
            positions=step.positions,
            token_to_req=step.token_to_req,
            state_slots=tables.state_slots,
            kv_slots=tables.kv_slots,
            seq_lens=None if self.spec.save.every_row else step.seq_lens,
            scratch=step.scratch() if self._takes_scratch else None,
        )
        # An empty step launches nothing; and a deterministic torch fills what is new by launches of its own.
        return tables.state_slots.shape[0] > 0 and not torch.are_deterministic_algorithms_enabled()

    def indices(self, step: StepMetadata, tables: StepTables, ids: torch.Tensor | IdSource | None, *, independent: bool = False) -> Indices:
        """The layer's index tables: per layer where the indexer chose, else once per step for all layers of one geometry.

        independent  as for `sparse_indices`
        """
        self._require_page_rows(tables)
        source = self._source(ids)
        if isinstance(ids, torch.Tensor):
            return self._build(step, tables, ids, source, (max(ids.shape[-1], 1) + 3) // 4 * 4, "per layer", independent)
        width = self.spec.width if tables.width is None or source is IdSource.NONE else (tables.width + 3) // 4 * 4
        addresses = tuple(None if t is None else (t.data_ptr(), t.shape, t.stride()) for t in self._read(tables))
        form, geometry = dispatch.combined_form(self.target), (self.spec.ratio, self.window, self.compressed)
        key = ("shared tables", form, width, source, geometry, addresses)
        return step.once(key, self._build_shared, step, tables, source, width, independent)[0]

    def _read(self, tables: StepTables) -> tuple[torch.Tensor | None, ...]:
        """What index tables are built from, besides the step and ids."""
        compressed = None if self.spec.ratio == 1 else tables.compressed_block_table
        return tables.window_block_table, tables.window_slots, compressed

    def _build_shared(
        self, step: StepMetadata, tables: StepTables, source: IdSource, width: int, independent: bool
    ) -> tuple[Indices, object]:
        """New tables of this step, and the tensors they were built from: held, no other tensor can come to lie at their addresses within
        the step. The n-th shared tables of a form and width use its n-th buffers, step after step."""
        number = next(step.once(("number of tables", dispatch.combined_form(self.target), width), itertools.count))
        return self._build(step, tables, None, source, width, number, independent), self._read(tables)

    def _build(
        self,
        step: StepMetadata,
        tables: StepTables,
        ids: torch.Tensor | None,
        source: IdSource,
        width: int,
        number: object,
        independent: bool,
    ) -> Indices:
        """One launch, into those buffers of the step that this form, width and number name."""
        window_block_table, slots, compressed_block_table = self._read(tables)
        buffers = ("tables", dispatch.combined_form(self.target), width, number)
        built: Indices = self._indices.call(
            positions=step.positions,
            token_to_req=step.token_to_req,
            window_block_table=window_block_table,
            ids=ids,
            compressed_block_table=compressed_block_table,
            source=source,
            width=None if source is IdSource.NONE else width,
            slots=slots,
            out=step.once(buffers, self._buffers, step, width, buffers),
            independent=independent,
        )
        return built

    def _buffers(self, step: StepMetadata, width: int, name: Hashable) -> Indices:
        """As many rows as this step has of buffers that live as long as the step object."""
        form = dispatch.combined_form(self.target)
        return first_rows(step.keep(name, new_tables, step.max_tokens, width, form, step.positions.device), step.num_tokens)

    def _source(self, ids: torch.Tensor | IdSource | None) -> IdSource:
        if self.spec.ratio != 4:
            if ids is not None and ids is not IdSource.ALL_GROUPS:
                raise InvalidArgument("ids", f"a {type(ids).__name__}", f"None for a layer of ratio {self.spec.ratio}")
            return self.spec.sources[0]
        if isinstance(ids, torch.Tensor):
            return IdSource.LOCAL
        if ids is not IdSource.ALL_GROUPS:
            raise InvalidArgument("ids", repr(ids), "int32 [T, k] from the indexer, or IdSource.ALL_GROUPS")
        return IdSource.ALL_GROUPS


def first_rows(tables: Indices, rows: int) -> Indices:
    """Views of the first `rows` rows."""
    return type(tables)(*(None if t is None else t[:rows] for t in vars(tables).values()))  # type: ignore[arg-type]
