"""The attention layer of `attention_layer.py` on several GPUs or CPU processes, its query heads split over them.

    torchrun --nproc-per-node 4 examples/tensor_parallel.py            # NCCL where there are GPUs, else gloo and the reference
    torchrun --nproc-per-node 2 examples/tensor_parallel.py --compile sm120     # no GPU: also make that target's kernels

With N ranks a rank owns num_heads / N heads: their rows of the query projection, their sinks, and their inputs of the output
projection, whose result is summed over the ranks. All else is on every rank: caches, compressor, indexer. A rank with fewer heads
than an output group shares the group with its neighbours; the projections are linear, so the sum is the same. FlashInfer takes
8 heads or more, so 4 are padded to 8 (`LayerSpec.padded_heads`), here as on one GPU.

The ranks of a host share one folder of compiled kernels (CUTE_KERNELS_CACHE_DIR): one compiles a kernel, the others wait for it.

Run as a program it makes a small layer, runs prompts, single tokens and speculative rows through it, whole and split, and says how
far both are from the output projection in float64.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from attention_layer import HEAD_DIM, Batch, DeepseekV4Attention, Engine, V4Config
from torch import Tensor, nn

from cute_kernels import InvalidArgument, Target, UnsupportedRequest
from cute_kernels.compile import cache
from cute_kernels.compile.spec import KernelSpec

SMALL = V4Config(hidden_size=128, num_heads=128, q_lora_rank=64, o_groups=16, index_topk=16, o_lora_rank=32, index_heads=4, index_dim=32)
STEPS = ({0: 40, 1: 9}, {0: 1, 1: 1}, {0: 4, 1: 4}, {0: 17, 1: 1})  # tokens that each request appends


@dataclass(frozen=True)
class Shard:
    """What rank `rank` of `ranks` owns of a layer.

    Ranks must divide the heads, and a rank's heads be whole output groups or divide one; `InvalidArgument` otherwise.
    """

    whole: V4Config
    rank: int
    ranks: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.ranks:
            raise InvalidArgument("rank", self.rank, f"0 <= rank < ranks={self.ranks}")
        if self.whole.num_heads % self.ranks:
            raise InvalidArgument("ranks", self.ranks, f"a divisor of {self.whole.num_heads} heads")
        if self.heads % self.group_heads and self.group_heads % self.heads:
            raise InvalidArgument(
                "ranks", f"{self.ranks}: {self.heads} heads each", f"whole groups of {self.group_heads}, or a part of one"
            )

    @property
    def heads(self) -> int:
        """Heads of a rank."""
        return self.whole.num_heads // self.ranks

    @property
    def group_heads(self) -> int:
        """Heads of an output group."""
        return self.whole.num_heads // self.whole.o_groups

    @property
    def first_head(self) -> int:
        return self.rank * self.heads

    @property
    def config(self) -> V4Config:
        """The rank's layer as a layer: its heads, and the groups they lie in."""
        return dataclasses.replace(self.whole, num_heads=self.heads, o_groups=max(1, self.heads // self.group_heads))

    def weights(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """The rank's part of the whole layer's state dict (views)."""
        heads = slice(self.first_head, self.first_head + self.heads)
        rows = slice(heads.start * HEAD_DIM, heads.stop * HEAD_DIM)
        first_group = self.first_head // self.group_heads
        groups = range(first_group, first_group + self.config.o_groups)
        inputs = self.heads // self.config.o_groups * HEAD_DIM  # columns of a group that the rank has
        begin = self.first_head % self.group_heads * HEAD_DIM
        latents = slice(groups.start * self.whole.o_lora_rank, groups.stop * self.whole.o_lora_rank)
        part = {name: value for name, value in state.items() if not name.startswith("o_down.")}
        part["q_up.weight"] = state["q_up.weight"][rows]
        part["sinks"] = state["sinks"][heads]
        part["o_up.weight"] = state["o_up.weight"][:, latents]
        for mine, group in enumerate(groups):
            part[f"o_down.{mine}.weight"] = state[f"o_down.{group}.weight"][:, begin : begin + inputs]
        return part


def all_reduce(partial: Tensor) -> Tensor:
    """The sum of a tensor over all ranks."""
    dist.all_reduce(partial)
    return partial


class TensorParallelAttention(DeepseekV4Attention):
    """A rank's part of the layer: `num_heads / ranks` heads in, the whole hidden size out.

    reduce  sums fp32 [T, hidden_size] over the ranks
    """

    def __init__(self, shard: Shard, ratio: int, *, max_positions: int, reduce: Callable[[Tensor], Tensor] = all_reduce) -> None:
        super().__init__(shard.config, ratio, max_positions=max_positions)
        self.shard, self.reduce = shard, reduce

    def load_whole(self, state: dict[str, Tensor]) -> TensorParallelAttention:
        """Takes the rank's weights from the whole layer's state dict."""
        self.load_state_dict(self.shard.weights(state))
        return self

    def output(self, attention: Tensor, batch: Batch) -> Tensor:
        partial = super().output(attention, batch)
        return self.reduce(partial.float()).to(partial.dtype)


def exact_output(layer: DeepseekV4Attention, attention: Tensor, batch: Batch) -> Tensor:
    """`layer.output` of all heads with every step in float64: fp64 [T, hidden_size]."""
    a, b = attention[..., -64:].double().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = layer.cos_sin[batch.step.positions].double()[:, None].chunk(2, -1)
    turned_back = torch.stack([a * cos + b * sin, b * cos - a * sin], -1).flatten(-2)
    x = torch.cat([attention[..., :-64].double(), turned_back], -1).flatten(1)
    downs = [
        nn.functional.linear(part, down.get_parameter("weight").double())
        for down, part in zip(layer.o_down, x.chunk(len(layer.o_down), -1), strict=True)
    ]
    return nn.functional.linear(torch.cat(downs, -1), layer.o_up.weight.double())


def rms_error(out: Tensor, exact: Tensor) -> float:
    """Root mean square of the difference."""
    return float((out.double() - exact).square().mean().sqrt())


# ---------------------------------------------------------------- the program


def kernels(layer: DeepseekV4Attention, target: Target) -> list[KernelSpec]:
    """The kernels that an attached layer can need on `target`, each once."""
    return sorted(set(layer.mla.spec.specs(target)), key=str)


def engine(ratios: Sequence[int], target: Target, device: torch.device, decode_backend: str) -> Engine:
    """Caches and steps; the same pages on every rank that has the same seed."""
    torch.manual_seed(1)
    return Engine(
        ratios,
        target,
        max_requests=2,
        max_tokens=96,
        max_batch_tokens=96,
        draft_tokens=3,
        decode_backend=decode_backend,
        device=device,
    )


def errors(
    shard: Shard, ratio: int, target: Target, device: torch.device, decode_backend: str, compile_only: bool
) -> Iterator[tuple[float, float]]:
    """Runs the steps whole and split. Per step: root mean square errors of the whole and of the split layer, against float64.

    compile_only  there is no GPU: have the kernels in the disk cache, loaded by none
    """
    torch.manual_seed(0)
    whole = DeepseekV4Attention(shard.whole, ratio, max_positions=96).to(device)
    split = TensorParallelAttention(shard, ratio, max_positions=96).to(device).load_whole(whole.state_dict())
    compiled, engines = cache.stats.compiled, []
    for layer in (whole, split):
        engines.append(engine([ratio], target, device, decode_backend))
        engines[-1].attach([layer])  # on a GPU this loads or compiles the layer's kernels
    if compile_only:
        for spec in kernels(split, target):
            cache.ensure(spec)
    if compile_only or device.type == "cuda":
        total = int(all_reduce(torch.tensor([cache.stats.compiled - compiled], device=device)))
        if shard.rank == 0:
            print(
                f"ratio {ratio}: {len(kernels(split, target))} kernels for {target}, compiled {total} times by {shard.ranks} ranks",
                flush=True,
            )
    generator = torch.Generator().manual_seed(2)
    for lens in STEPS:
        rows = torch.randn(sum(lens.values()), shard.whole.hidden_size, generator=generator).bfloat16().to(device)
        mine, theirs = (e.step(lens) for e in engines)
        attention = whole.attend(whole.project(rows, mine), mine)
        exact = exact_output(whole, attention, mine)
        yield rms_error(whole.output(attention, mine), exact), rms_error(split(rows, theirs), exact)


def main() -> None:
    parser = argparse.ArgumentParser(description="A DeepSeek-V4 attention layer, its heads split over the ranks of torchrun.")
    parser.add_argument("--ratios", type=int, nargs="+", default=[1, 4, 128], choices=(1, 4, 128))
    parser.add_argument("--heads", type=int, default=128, help="query heads of the whole layer, 8 to an output group")
    parser.add_argument("--target", help='"sm100", "sm120", "sm100:sm_90a", ...; default: the GPU\'s, on CPUs sm100')
    parser.add_argument("--compile", metavar="TARGET", help="on CPUs: have the kernels for TARGET compiled too, and take its formats")
    options = parser.parse_args()
    gpu = torch.cuda.is_available()
    rank, ranks, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    device = torch.device("cuda", local) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    if gpu and options.compile:
        parser.error("--compile is for machines without a GPU; a GPU's kernels are compiled where they are missing")
    name = options.compile or options.target
    target = Target.named(name or "sm100") if name or not gpu else Target.from_capability(torch.cuda.get_device_capability())
    backend = "reference" if target.gpu_arch == "sm_90a" else "auto"
    config = dataclasses.replace(SMALL, num_heads=options.heads, o_groups=options.heads // 8)
    dist.init_process_group("nccl" if gpu else "gloo", device_id=device if gpu else None)
    try:
        shard = Shard(config, rank, ranks)
        if rank == 0:
            print(f"{ranks} ranks of {shard.heads} heads on {device.type}, {target}", flush=True)
        for ratio in options.ratios:
            found = torch.tensor(list(errors(shard, ratio, target, device, backend, bool(options.compile))))
            worst = float((found[:, 1] / found[:, 0]).max())
            if rank == 0:
                print(f"ratio {ratio}: error of the split layer {worst:.2f} times that of the whole one", flush=True)
            if worst > 2:
                raise SystemExit(f"rank {rank}: ratio {ratio}: the split layer is {worst:.1f} times as far from float64 as the whole one")
        if rank == 0:
            print("tensor parallel: ok", flush=True)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except (InvalidArgument, UnsupportedRequest) as refusal:
        raise SystemExit(str(refusal)) from None
