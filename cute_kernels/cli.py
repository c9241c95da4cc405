"""The command line: info, matrix, compile, cache, inspect, demo, bench."""

from __future__ import annotations

import collections
import contextlib
import logging
import platform
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.logging import RichHandler
from rich.table import Column, Table

from cute_kernels import __version__
from cute_kernels.errors import CuteKernelsError
from cute_kernels.target import Target, all_targets

if TYPE_CHECKING:
    from cute_kernels.compile.spec import KernelSpec

PACKAGES = ("nvidia-cutlass-dsl", "apache-tvm-ffi", "torch", "flashinfer-python", "cuda-python")
console = Console()


class _Group(click.Group):
    """Errors of this package end a command with their message and hint, without a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except CuteKernelsError as error:
            raise click.ClickException(str(error)) from error


def _targets(_context: click.Context, _parameter: click.Parameter, names: tuple[str, ...]) -> list[Target]:
    try:
        return [Target.named(name) for name in names]
    except CuteKernelsError as error:
        raise click.BadParameter(str(error)) from error


arch_option = click.option(
    "--arch",
    "targets",
    multiple=True,
    required=True,
    callback=_targets,
    help=f"One of {', '.join(str(t) if t.gpu_arch == 'sm_90a' else t.gpu_arch for t in all_targets())}; may be repeated.",
)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("-v", "--verbose", is_flag=True, help="Show the log, one line for each kernel compiled.")
def main(verbose: bool) -> None:
    """CuTe DSL kernels for DeepSeek-V4 sparse MLA on Blackwell."""
    handler = RichHandler(console=Console(stderr=True), show_path=False)
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, format="%(message)s", handlers=[handler])


@main.command()
def info() -> None:
    """Versions, devices, targets, cache and packs, and what the installed FlashInfer can do."""
    from cute_kernels.compile import loader, packs
    from cute_kernels.compile.store import Store, default_root

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    table.add_row("cute-kernels", f"{__version__} in {Path(__file__).parent}")
    for package in PACKAGES:
        table.add_row(package, _version(package))
    for name, meaning in _devices():
        table.add_row(name, meaning)
    disk = Store(default_root())
    usage = disk.usage()
    table.add_row("kernel cache", f"{disk.root}: {usage.entries} kernels, {usage.bytes / 1e6:.1f} MB")
    table.add_row("C compiler", loader.c_compiler() or "none: objects are loaded through the DSL, packs cannot be built")
    for folder in packs.folders():
        try:
            pack = packs.Pack(folder)
            text = f"{len(pack.manifest['kernels'])} kernels for {pack.gpu_arch}"
        except CuteKernelsError as error:
            text = str(error)
        table.add_row("pack", f"{folder}: {text}")
    for name, meaning in _flashinfer():
        table.add_row(name, meaning)
    console.print(table)


@main.command()
@click.option("--format", "form", type=click.Choice(["md", "json"]), default="md", show_default=True, help="Page or plain data.")
def matrix(form: str) -> None:
    """What is supported where, and on what evidence: docs/support_matrix.md."""
    import json

    from cute_kernels import matrix_docs

    click.echo(matrix_docs.markdown() if form == "md" else json.dumps(matrix_docs.matrix(), indent=2) + "\n", nl=False)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _devices() -> list[tuple[str, str]]:
    import torch

    if not torch.cuda.is_available():
        return [("devices", "no CUDA device: operations on CPU tensors take the reference")]
    rows = []
    for index in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(index)
        name = torch.cuda.get_device_name(index)
        try:
            target = str(Target.from_capability(capability, name))
        except CuteKernelsError as error:
            target = f"not supported ({error})"
        rows.append((f"cuda:{index}", f"{name}, compute capability {capability[0]}.{capability[1]}: {target}"))
    return rows


def _flashinfer() -> list[tuple[str, str]]:
    if _version("flashinfer-python") == "not installed":
        return [("flashinfer", "not installed: every operation but decode works without it")]
    from cute_kernels import flashinfer_backend

    capabilities = flashinfer_backend.capabilities()
    return [(f"flashinfer {name}", str(value)) for name, value in vars(capabilities).items() if value != ""]


@main.command(name="compile")
@arch_option
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), required=True, help="Folder of the pack; with several --arch, of the packs."
)
@click.option("--jobs", type=click.IntRange(1), default=2, show_default=True, help="Processes that compile.")
def compile_command(targets: list[Target], out: Path, jobs: int) -> None:
    """Build AOT packs: every kernel of the support matrix, without a GPU."""
    from cute_kernels.compile.aot import compile_pack
    from cute_kernels.compile.matrix import support_matrix

    for target in targets:
        specs = support_matrix(target)
        folder = out if len(targets) == 1 else out / str(target).replace(":", "-")
        with _bar(target, len(specs)) as advance:
            manifest = compile_pack(specs, folder, workers=jobs, progress=advance)
        spilled = [k for k in manifest["kernels"] if k["spill_bytes"]]
        size = (folder / manifest["library"]).stat().st_size
        console.print(
            f"{folder}: {len(specs)} kernels for {target}, {size / 1e6:.1f} MB, {manifest['seconds']} s, {len(spilled)} of them spill",
            highlight=False,
            soft_wrap=True,
        )


@contextlib.contextmanager
def _bar(target: Target, total: int) -> Iterator[Callable[[KernelSpec, dict[str, Any]], None]]:
    """A progress bar of `total` kernels; yields the callback that is told of each one done."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(f"compiling for {target}", total=total)
        yield lambda _spec, _manifest: progress.advance(task)


@main.group()
def cache() -> None:
    """The disk cache of compiled kernels."""


@cache.command(name="info")
def cache_info() -> None:
    """Where the cache lies and what it holds."""
    from cute_kernels.compile.store import Store, default_root

    disk = Store(default_root())
    usage = disk.usage()
    console.print(
        f"{disk.root}: {usage.entries} kernels, {usage.bytes / 1e6:.1f} MB, {usage.quarantined} quarantined",
        highlight=False,
        soft_wrap=True,
    )
    table = Table("operation", "target", "kernels", box=None, pad_edge=False)
    groups = collections.Counter(disk.kinds())
    for (operation, target), count in sorted(groups.items()):
        table.add_row(operation, target, str(count))
    if groups:
        console.print(table)


@cache.command(name="gc")
@click.option("--max-age-days", type=click.FloatRange(min=0), help="Also remove kernels that were not used for so long.")
def cache_gc(max_age_days: float | None) -> None:
    """Apply the size bound, remove what is old, empty the quarantine."""
    from cute_kernels.compile.store import Store, default_root

    console.print(f"{Store(default_root()).gc(max_age_days)} kernels removed")


@cache.command(name="clear")
def cache_clear() -> None:
    """Remove every kernel. Running processes keep what they have loaded."""
    from cute_kernels.compile.store import Store, default_root

    console.print(f"{Store(default_root()).clear()} kernels removed")


@main.command()
@arch_option
@click.option("--only", default="", help="Only kernels whose spec contains this text, an operation's name for instance.")
@click.option("--counts/--no-counts", default=True, help="Also print instruction counts by class.")
@click.option("--jobs", type=click.IntRange(1), default=2, show_default=True, help="Processes that compile.")
def inspect(targets: list[Target], only: str, counts: bool, jobs: int) -> None:
    """Registers, spills, shared memory, occupancy, access widths and instruction counts of each kernel.

    Shared memory is the most that a launch asks for, of which occupancy follows: a short step may ask for less.
    """
    import tempfile

    from cute_kernels.compile import cache as kernels
    from cute_kernels.compile.aot import compile_objects
    from cute_kernels.compile.build import CUBIN
    from cute_kernels.compile.inspect import block_threads, count_instructions, disassemble, multiprocessor
    from cute_kernels.compile.matrix import support_matrix

    wide = Console(width=console.width if console.is_terminal else 250)
    for target in targets:
        matrix = support_matrix(target)
        specs = [s for s in matrix if only in str(s)]
        if not specs:
            operations = ", ".join(sorted({s.operation for s in matrix}))
            raise click.BadParameter(f"no kernel for {target} has {only!r} in its spec; operations: {operations}", param_hint="--only")
        with tempfile.TemporaryDirectory() as scratch, _bar(target, len(specs)) as advance:
            compile_objects(specs, Path(scratch), workers=jobs, progress=advance)
        columns = ("registers", "spill B", "shared B", "code B", "threads", "occupancy", "load B", "store B", "instructions", "per byte")
        table = Table(Column("kernel", max_width=120), *columns, title=str(target), title_justify="left", box=None, pad_edge=False)
        for spec in specs:
            compiled, manifest = kernels.ensure_with_manifest(spec)
            found = count_instructions(disassemble(compiled.object.with_name(CUBIN)))
            numbers = [manifest[k] for k in ("registers", "spill_bytes", "shared_bytes", "cubin_bytes")]
            threads = block_threads(compiled.ptx.read_text())
            resident = multiprocessor(target.gpu_arch).occupancy(threads, manifest["registers"], manifest["shared_bytes"])
            widths = (found.widest_load, found.widest_store, found.total)
            per_byte = "-" if found.per_byte is None else f"{found.per_byte:.2f}"
            table.add_row(_label(spec), *map(str, (*numbers, threads, f"{resident:.0%}", *widths)), per_byte)
            if counts:
                table.add_row("  " + ", ".join(f"{name} {n}" for name, n in sorted(found.counts.items(), key=lambda c: -c[1])), style="dim")
        wide.print(table)


def _label(spec: KernelSpec) -> str:
    hidden = ("operation", "family", "gpu_arch")
    return f"{spec.operation} " + " ".join(f"{k}={v}" for k, v in spec.fields().items() if k not in hidden)


@main.command(context_settings={"ignore_unknown_options": True, "help_option_names": []}, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def demo(context: click.Context, arguments: tuple[str, ...]) -> None:
    """Run DeepSeek-V4 attention layers end to end and compare them with their definition."""
    from cute_kernels import demo as demonstration

    sys.exit(demonstration.main(list(arguments), prog_name=context.command_path))


@main.command(context_settings={"ignore_unknown_options": True, "help_option_names": []}, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def bench(context: click.Context, arguments: tuple[str, ...]) -> None:
    """Time every kernel on this GPU, beside its bandwidth limit and a peer's kernels (in a checkout)."""
    import importlib

    checkout = Path(__file__).resolve().parents[1]
    if not (checkout / "benchmarks" / "kernels.py").exists():
        raise click.ClickException(
            f"the benchmarks are in the repository, not in the installed package ({Path(__file__).parent}): "
            "run `python -m cute_kernels bench` or `make bench` in a checkout"
        )
    if str(checkout) not in sys.path:
        sys.path.insert(0, str(checkout))
    sys.exit(importlib.import_module("benchmarks.kernels").main(list(arguments), prog_name=context.command_path))
