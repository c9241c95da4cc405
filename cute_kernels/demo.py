"""`python -m cute_kernels demo`: runs the example's DeepSeek-V4 layer step by step and has every row judged.

Two requests share the steps: one prefills a long prompt in chunks while the other, already prefilled, decodes beside it; then
both decode, verify speculative tokens of which some are rejected, and decode on. All layers live in one pool, which starts as NaN:
a row that nobody wrote shows wherever it is read. The judge (demo_judge.py) gets the outputs of the layer's projections and the ids
its indexer chose, and nothing else.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor

from cute_kernels import demo_judge as judge
from cute_kernels.target import Family, Target

DECODE_STEPS, DRAFT_TOKENS = 3, 3
FULL_TOKENS, FULL_CHUNK, FULL_TOPK = 2600, 1024, 512
# Of q and of KV rows, full-row FP8 only; layers take them in turn. Any scales that keep values of about +-6 inside E4M3's +-448 would do,
# as long as no BF16 value divided by one lies half-way between two E4M3 values, where the last bit of the division would decide.
SCALES = ((0.05, 0.037), (0.046, 0.033), (0.053, 0.041))
RATIOS = (1, 4, 128)
# wrong-page, wrong-compressed-page   a page of the other request in a block table, in the last step
# wrong-state-block                   a block that nobody wrote in the compressor's block table, in the speculative step
# wrong-rope, dropped-sink            one row of the rotation table, one head's sink
# wrong-scale                         FP8 rows are read with q's scale; rows of other formats have no scale to get wrong
FAULTS = ("wrong-page", "wrong-compressed-page", "wrong-state-block", "wrong-rope", "dropped-sink", "wrong-scale")


@dataclass(frozen=True)
class Work:
    """One step: tokens that each request appends, and how many of those turn out to be rejected afterwards."""

    query_lens: dict[int, int]
    rejected: dict[int, int] = dataclasses.field(default_factory=dict)


def schedule(tokens: int) -> list[Work]:
    """Steps of a prompt of `tokens` tokens (request 0) beside a short one (request 1)."""
    chunk = -(-tokens * FULL_CHUNK // FULL_TOKENS)
    chunks = [min(chunk, tokens - begin) for begin in range(0, tokens, chunk)]
    # So long that the second of its four speculative rows closes a group of 128.
    short = 128 * max(1, tokens // 1024) - 2 - (len(chunks) - 1) - DECODE_STEPS
    return [
        Work({0: chunks[0], 1: short}),
        *(Work({0: chunk, 1: 1}) for chunk in chunks[1:]),
        *[Work({0: 1, 1: 1})] * DECODE_STEPS,
        Work({0: 1 + DRAFT_TOKENS, 1: 1 + DRAFT_TOKENS}, rejected={0: 2, 1: 1}),
        *[Work({0: 1, 1: 1})] * DECODE_STEPS,
    ]


@dataclass(frozen=True)
class Format:
    """One way to run: a KV format, the target it belongs to, the device and the path it takes here, and what it rounds.

    rounding  by the scales of q and of KV rows
    scaled    whether those are other than 1.0
    """

    label: str
    kv_cache_dtype: str
    target: Target
    device: str
    path: str
    rounding: Callable[[float, float], judge.Rounding]
    scaled: bool = False

    def scales(self, layers: int) -> list[tuple[float, float]]:
        """Of each layer: the scales of q and of KV rows."""
        return [SCALES[i % len(SCALES)] if self.scaled else (1.0, 1.0) for i in range(layers)]

    def checkpoint(self, layers: int) -> dict[str, Tensor]:
        """The same, as a checkpoint has them."""
        found: dict[str, Tensor] = {}
        for i, (q, kv) in enumerate(self.scales(layers)):
            found |= {f"model.layers.{i}.self_attn.attn.{name}": torch.tensor(x) for name, x in (("q_scale", q), ("k_scale", kv))}
        return found


def formats(*, sm90: bool = False) -> list[Format]:
    """BF16 and FP8 rows (SM100 family), packed rows (SM120 family): on this GPU where it belongs to that family, else on the CPU.

    sm90  on an SM90 GPU instead: both families' kernels, built for it; attention itself by the reference
    """
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    if sm90 and capability != (9, 0):
        raise click.UsageError(f"--sm90 needs an SM90 GPU (H100, H200); found {capability or 'none'}")

    def place(family: Family, flashinfer_path: str) -> tuple[Target, str, str]:
        if sm90:
            return Target(family, "sm_90a"), "cuda", "kernels as sm_90a"
        if capability in ((10, 0), (10, 3), (12, 0), (12, 1)) and Target.from_capability(capability).family == family:
            return Target.from_capability(capability), "cuda", flashinfer_path
        return Target.named(family), "cpu", "reference (CPU)"

    sm100, sm120 = place("sm100", "FlashInfer trtllm-gen"), place("sm120", "FlashInfer sparse")
    packed = judge.packed(quantized_query=sm120[1] == "cuda" and not sm90)
    return [
        Format("bf16 (SM100)", "bfloat16", *sm100, lambda q, kv: judge.BF16),
        Format("fp8 (SM100)", "fp8", *sm100, judge.fp8, scaled=True),
        Format("packed (SM120)", "fp8_ds_mla", *sm120, lambda q, kv: packed),
    ]


@dataclass
class Outcome:
    """One line of the table: the layers of one ratio in one format. `seconds`: one layer, all steps, without the judge."""

    ratio: int
    kind: str
    format: Format
    verdict: judge.Verdict
    seconds: float = 0.0


def load_example() -> ModuleType:
    """examples/attention_layer.py of this source checkout, as a module."""
    path = Path(__file__).resolve().parents[1] / "examples" / "attention_layer.py"
    name = "cute_kernels_example_attention_layer"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        if not path.is_file() or spec is None or spec.loader is None:
            raise click.ClickException(
                f"the demo runs {path}, which is part of a source checkout: clone the repository, run `make demo` there"
            )
        sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(sys.modules[name])
        except BaseException:
            del sys.modules[name]  # half a module helps nobody
            raise
    return sys.modules[name]


class Run:
    """The layers in one format: with their caches, their judges, and the lines of the table that they fill."""

    def __init__(self, fmt: Format, layers: Sequence[Any], weights: Sequence[judge.Weights], tokens: int) -> None:
        config = layers[0].config
        self.format, self.hidden_size = fmt, config.hidden_size
        self.layers = [layer.to(fmt.device) for layer in layers]
        self.engine = load_example().Engine(
            [layer.ratio for layer in layers],
            fmt.target,
            max_requests=2,
            max_tokens=layers[0].max_positions,
            max_batch_tokens=max(sum(work.query_lens.values()) for work in schedule(tokens)),
            draft_tokens=DRAFT_TOKENS,
            kv_cache_dtype=fmt.kv_cache_dtype,
            checkpoint=fmt.checkpoint(len(layers)),
            decode_backend="reference" if fmt.target.gpu_arch == "sm_90a" else "auto",
            device=fmt.device,
        )
        self.engine.pool.storage.fill_(0xFF)  # NaN in every format
        self.engine.attach(self.layers)
        kinds = {1: "window only", 4: f"ratio 4, best {config.index_topk}", 128: "ratio 128, all"}
        self.lines = {layer.ratio: Outcome(layer.ratio, kinds[layer.ratio], fmt, judge.Verdict()) for layer in layers}
        self.judges = [
            judge.LayerJudge(layer.ratio, fmt.rounding(*scales), own, self.lines[layer.ratio].verdict)
            for layer, own, scales in zip(layers, weights, fmt.scales(len(layers)), strict=True)
        ]

    def plant(self, fault: str, batch: Any) -> None:
        """Puts one wrong entry into block tables of `batch`, if that is the fault."""
        first, second = batch.step.positions[batch.step.query_start_loc_cpu[:-1]].tolist()
        if fault == "wrong-page":  # where the first request's last full window page belongs stands one of the other request's
            table = batch.tables[1].window_block_table
            table[0, max(first // 64 - 1, 0)] = table[1, 0]
        for ratio, tables in batch.tables.items():
            if fault == "wrong-compressed-page" and ratio > 1:
                tables.compressed_block_table[1, 0] = tables.compressed_block_table[0, 0]
            if fault == "wrong-state-block" and ratio > 1:  # a block in which the compressor expects rows of earlier steps
                rows = self.engine.tables[f"state_{ratio}"].group.tokens_per_block
                tables.state_block_table[1, second // rows - 1] = self.engine.free[0]

    def step(self, work: Work, hidden: Tensor, *, fault: str | None, tick: Callable[[str], None]) -> None:
        """Appends `work`'s tokens in every layer and judges their rows. `hidden` bf16 [T, hidden size]."""
        batch = self.engine.step(work.query_lens)
        if fault:
            self.plant(fault, batch)
        for layer, layer_judge in zip(self.layers, self.judges, strict=True):
            line = self.lines[layer.ratio]
            tick(f"{line.format.label}, {line.kind}")
            begin = self._clock()
            projected = layer.project(hidden, batch)
            attention = layer.attend(projected, batch)
            layer.output(attention, batch)
            line.seconds += (self._clock() - begin) / sum(other.ratio == layer.ratio for other in self.layers)
            for request, rows in batch.rows():
                kv_score, ids = (None if x is None else x[rows] for x in (projected.kv_score, projected.ids))
                layer_judge.step(request, projected.q[rows], projected.kv[rows], kv_score, ids, attention[rows])
                layer_judge.reject(request, work.rejected.get(request, 0))
        for request, count in work.rejected.items():
            self.engine.reject(request, count)

    def _clock(self) -> float:
        if self.format.device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter()


def run(tokens: int, heads: int, layers: int, plant: str | None = None, *, sm90: bool = False) -> list[Outcome]:
    """Runs `layers` layers in every format through `schedule(tokens)`; every row is judged.

    plant  one of `FAULTS`, or None;  sm90  as for `formats`
    """
    example, steps, ways = load_example(), schedule(tokens), formats(sm90=sm90)
    # Scaled so that every size chooses as at full size: 512 of 650.
    topk = min(FULL_TOPK, max(4, tokens * FULL_TOPK // FULL_TOKENS // 4 * 4))
    config = dataclasses.replace(example.V4_FLASH, num_heads=heads, o_groups=max(1, heads // 8), index_topk=topk)
    positions = max(sum(work.query_lens[request] for work in steps) for request in (0, 1))
    outcomes: list[Outcome] = []
    columns = (TextColumn("{task.description:<32}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with torch.random.fork_rng(devices=[]), Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        torch.manual_seed(0)
        task = progress.add_task("random weights", total=len(ways) * len(steps) * layers)
        modules = [example.DeepseekV4Attention(config, RATIOS[i % len(RATIOS)], max_positions=positions) for i in range(layers)]
        weights = [judge.Weights.of(layer) for layer in modules]
        for layer in modules:
            if plant == "wrong-rope":  # the first row that request 0 decodes is rotated as if it stood elsewhere
                layer.cos_sin[tokens] = layer.cos_sin[tokens // 2]
            if plant == "dropped-sink":
                layer.sinks[heads // 2] = -torch.inf
        hidden = [torch.randn(sum(work.query_lens.values()), config.hidden_size, dtype=torch.bfloat16) for work in steps]
        for fmt in ways:
            current = Run(fmt, modules, weights, tokens)
            for layer in modules if plant == "wrong-scale" else ():
                layer.mla.spec = dataclasses.replace(layer.mla.spec, kv_scale=layer.mla.spec.q_scale)
            for number, (work, rows) in enumerate(zip(steps, hidden, strict=True), 1):
                # The compressor looks for earlier rows where a window closes, as one does in the speculative step.
                planted = work.rejected if plant == "wrong-state-block" else number == len(steps)
                current.step(
                    work,
                    rows.to(fmt.device),
                    fault=plant if planted else None,
                    tick=lambda text: progress.update(task, advance=1, description=text),
                )
            outcomes += current.lines.values()
    return sorted(outcomes, key=lambda line: line.ratio)


def table_of(outcomes: list[Outcome]) -> Table:
    """The report: one line per layer kind and format."""
    table = Table(
        title="attention output against its definition in float64",
        caption="bound: twice the error of the definition itself with q, K rows and output rounded to the format; "
        "each row has to keep it, in its maximum and its mean (worst row: its largest error / bound). ms: one layer, all steps.",
        box=box.SIMPLE_HEAD,
        padding=(0, 1),
        pad_edge=False,
    )
    for name in ("layer", "format", "path"):
        table.add_column(name, no_wrap=True)
    for name in ("tokens", "max error / bound", "mean error / bound", "worst row", "ms"):
        table.add_column(name, justify="right", no_wrap=True)
    for line in outcomes:
        v = line.verdict
        table.add_row(
            line.kind,
            line.format.label,
            line.format.path,
            f"{v.rows:,}",
            f"{v.max_error:.1e} / {v.max_bound:.1e}",
            f"{v.mean_error:.1e} / {v.mean_bound:.1e}",
            f"{v.worst:.2f}",
            f"{line.seconds * 1e3:,.0f}",
            style=None if v.passed else "red",
        )
    return table


@click.command(name="demo", context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--tokens", type=click.IntRange(32), default=FULL_TOKENS, show_default=True, help="Tokens of the long prompt.")
@click.option("--heads", type=click.IntRange(1, 128), default=64, show_default=True, help="Query heads of each layer.")
@click.option("--layers", type=click.IntRange(1), default=3, show_default=True, help="Layers; their ratios cycle through 1, 4, 128.")
@click.option("--sm90", is_flag=True, help="On an SM90 GPU: both families' kernels, built as sm_90a; attention by the reference.")
@click.option("--plant", type=click.Choice(FAULTS), hidden=True, help="Plant one fault, which the judge has to find.")
def main(tokens: int, heads: int, layers: int, sm90: bool, plant: str | None) -> None:
    """Run a DeepSeek-V4 attention layer end to end and compare every row with its definition in float64."""
    if heads > 8 and heads % (heads // 8):
        raise click.BadParameter(f"{heads} heads do not divide into {heads // 8} groups", param_hint="--heads")
    console = Console()
    console.width = max(console.width, 132)  # a narrow terminal wraps; numbers are not cut
    if tokens * heads < 1 << 15:  # over tensors this small, threads mostly wait for one another
        torch.set_num_threads(1)
    begin = time.perf_counter()
    outcomes = run(tokens, heads, layers, plant, sm90=sm90)
    console.print(table_of(outcomes))
    console.print(f"prompt of {tokens:,} tokens, {heads} heads, {layers} layers in {time.perf_counter() - begin:.0f} s")
    failed = sum(not line.verdict.passed for line in outcomes)
    if failed:
        console.print(f"demo: FAILED, {failed} of {len(outcomes)} lines exceed their bound")
        sys.exit(1)
    console.print("demo: ok")
