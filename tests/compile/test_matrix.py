"""Each family's kernels for its own targets and for sm_90a: they build, spill nothing, fit, and hold the instructions they should.

The targets that packs are built for get every spec, the others a representative set: the wider and narrower access, each ratio,
format, saving rule and id source at least once.
"""

from __future__ import annotations

import re

import pytest

from cute_kernels.compile import build, cache
from cute_kernels.compile.inspect import Instructions, count_instructions, disassemble, multiprocessor, pdl_faults
from cute_kernels.compile.matrix import support_matrix
from cute_kernels.compile.spec import (
    CompressStoreSpec,
    ConvertIndicesSpec,
    GatherUpconvertSpec,
    KernelSpec,
    QkvInsertSpec,
    SparseIndicesSpec,
)
from cute_kernels.target import Target, all_targets
from tests.support.compress_plan import plan_of, with_one_room

FULL = ("sm_100f", "sm_120f")
# What the other targets build, as (narrow access, ...); where a target has one width only, that serves for both.
SAMPLE = {
    (False, 4, "bf16", "policy"),
    (True, 4, "bf16", "none"),
    (False, 128, "fp8", "every_row"),
    (False, 4, "fp8_ds_mla", "policy"),
    (True, 4, "fp8_ds_mla", "none"),
    (False, 128, "fp8_ds_mla", "every_row"),
    (False, "local"),
    (True, "all_groups"),
    (False, "none"),
    (True, "bf16", "bf16", True),
    (False, "fp8", "bf16", False),
    (False, "fp8", "e4m3", True),
    (False, "fp8_ds_mla", "bf16", True),
    (True, "fp8_ds_mla", "bf16", False),
    (False, "fp8_inline", True),
    (True, "fp8_ds_mla", False),
    (False, "fp8", True),
    (False, False, True),
    (True, True, False),
}
REGISTERS_OF_AN_SM, REGISTER_GRANULE = 65536, 8


def sampled(spec: KernelSpec) -> bool:
    if isinstance(spec, CompressStoreSpec):
        rest: tuple[object, ...] = (spec.ratio, spec.kv_format, spec.save)
    elif isinstance(spec, QkvInsertSpec):
        rest = (spec.kv_format, spec.q_dtype, spec.apply_q_norm)
    elif isinstance(spec, GatherUpconvertSpec):
        rest = (spec.kv_format, spec.seq_starts)
    elif isinstance(spec, ConvertIndicesSpec):
        rest = (spec.prefill, spec.compact)
    else:
        assert isinstance(spec, SparseIndicesSpec)
        if not spec.slots:
            return False
        rest = (spec.source,)
    widths = (True, False) if spec.target.vector_bytes == 16 else (spec.vector_bytes == 16,)
    return any((narrow, *rest) in SAMPLE for narrow in widths)


def specs() -> list[KernelSpec]:
    found = []
    for target in all_targets():
        matrix = support_matrix(target)
        found += matrix if target.gpu_arch in FULL else [s for s in matrix if sampled(s)]
    return found


def label(spec: KernelSpec) -> str:
    hidden = ("operation", "family", "gpu_arch", "pdl")
    return "-".join(
        [spec.operation, spec.target.family, spec.target.gpu_arch, *(str(v) for k, v in spec.fields().items() if k not in hidden)]
    )


@pytest.mark.parametrize("spec", specs(), ids=label)
def test_kernel(spec: KernelSpec) -> None:
    compiled, manifest = cache.ensure_with_manifest(spec)
    ptx = compiled.ptx.read_text()
    found = count_instructions(disassemble(compiled.object.with_name(build.CUBIN)))

    assert manifest["spill_bytes"] == 0 and found.counts.get("local memory", 0) == 0, "registers are spilled"
    assert manifest["shared_bytes"] <= spec.target.shared_bytes
    arrays = [int(size) for size in re.findall(r"^\s*\.shared \.align \d+ \.b8 \S+\[(\d+)\]", ptx, re.MULTILINE)]
    if ".extern .shared" not in ptx:
        assert sum(arrays) <= manifest["shared_bytes"] <= sum(arrays) + 16 * len(arrays), "what its arrays take, aligned, and no more"
    threads = block_threads(ptx)
    rounded = -(-manifest["registers"] // REGISTER_GRANULE) * REGISTER_GRANULE
    assert rounded * threads <= REGISTERS_OF_AN_SM, f"{manifest['registers']} registers x {threads} threads exceed an SM's"

    if isinstance(spec, CompressStoreSpec) and plan_of(spec).resident == 3:
        sm, shared = multiprocessor(spec.target.gpu_arch), with_one_room(manifest["shared_bytes"])
        blocks = sm.occupancy(threads, manifest["registers"], shared) * sm.threads / threads
        assert blocks == 3, "three blocks of a short step fit on an SM"

    assert re.search(r"^\.target (\w+)", ptx, re.MULTILINE)[1] == spec.target.gpu_arch
    assert pdl_faults(ptx) == []
    assert "griddepcontrol.launch_dependents" in ptx
    uses_clusters = re.search(r"barrier\.cluster|mapa\b|mapa\.|\.shared::cluster", ptx)
    split = isinstance(spec, CompressStoreSpec) and spec.ratio == 128 and spec.target.family == "sm100"
    assert bool(uses_clusters) == (found.counts.get("cluster", 0) > 0) == split, "clusters split ratio-128 windows of the SM100 family only"
    if isinstance(spec, CompressStoreSpec):
        check_compress_store(spec, ptx, found)
    elif isinstance(spec, QkvInsertSpec):
        check_qkv_insert(spec, ptx, found)
    elif isinstance(spec, GatherUpconvertSpec):
        check_gather_upconvert(spec, ptx, found)
    elif isinstance(spec, ConvertIndicesSpec):
        assert found.widest_load == found.widest_store == spec.vector_bytes, "ids and slots move as wide as their alignment allows"
    else:
        check_sparse_indices(spec, found)


def block_threads(ptx: str) -> int:
    """Threads of a block, from the PTX's .reqntid or .maxntid."""
    x, y, z = map(int, re.search(r"\.(?:req|max)ntid (\d+), (\d+), (\d+)", ptx).groups())
    return x * y * z


def check_compress_store(spec: CompressStoreSpec, ptx: str, found: Instructions) -> None:
    sizes = re.findall(r"cp\.async\.bulk\.shared::cta\.global\S+ \[\S+\], \[\S+\], (\S+),", ptx)
    chosen = [re.findall(rf"selp\.b32\s+{size}, (\d+), (\d+),", ptx)[0] if size.startswith("%") else (size,) for size in sizes]
    largest = {2048} if spec.ratio == 4 else {4096, 4096 * plan_of(spec).batch}
    assert {int(n) for some in chosen for n in some} == largest, "window rows travel by bulk copies, in the largest pieces there are"
    if spec.scores:
        assert found.widest_load == found.widest_store == spec.vector_bytes, "saved rows move in accesses as wide as their alignment allows"
    assert ("e4m3x2" in ptx) == (spec.kv_format != "bf16"), "E4M3 conversions belong to FP8 rows, and to no others"
    assert "bf16x2" in ptx or "cvt.rn.bf16" in ptx, "every format rounds to BF16 first"
    assert "ex2.approx" in ptx, "the softmax over the window uses exp2"
    prefetches = [m.start() for m in re.finditer("prefetch.global.L2", ptx)]
    assert len(prefetches) == 1 + spec.scores, "the step's first rows are prefetched while windows are looked up"
    assert not spec.scores or "griddepcontrol.wait" in ptx[slice(*prefetches)], "position embeddings are prefetched before the wait"


def check_qkv_insert(spec: QkvInsertSpec, ptx: str, found: Instructions) -> None:
    assert found.widest_load == spec.vector_bytes, "rows are read with accesses narrower than their alignment allows"
    stored = spec.vector_bytes if spec.q_dtype == "bf16" else spec.vector_bytes // 2
    assert found.widest_store == stored
    assert ("e4m3x2" in ptx) == (spec.kv_format != "bf16"), "E4M3 conversions belong to FP8 rows, and to no others"
    assert ("rsqrt.approx" in ptx) == spec.apply_q_norm
    assert block_threads(ptx) == 32 and not re.findall(r"\b(?:bar\.sync|barrier)\b", ptx), "warps work on their own"
    pieces = re.findall(r"cp\.async\.bulk\.shared::cta\.global\S+ \[\S+\], \[\S+\], (\d+),", ptx)
    assert pieces == ["1024"] * 4, "a block's four heads are all under way at once"
    if spec.apply_q_norm and spec.target.gpu_arch != "sm_90a":
        assert "fma.rn.f32x2" in ptx and "mul.f32x2" in ptx, "squares and scaled values come in pairs"
    # Each of the four products of a rotated pair is rounded by itself, or KV rows would differ from the reference.
    assert len(re.findall(r"mul\.rn\.f32", ptx)) >= 2 * spec.vector_bytes // 2


def check_gather_upconvert(spec: GatherUpconvertSpec, ptx: str, found: Instructions) -> None:
    assert found.widest_store == spec.vector_bytes, "the workspace is written in the widest accesses its alignment allows"
    # A lane's codes are half as wide as what it stores; BF16 values that are copied come 16 bytes at a time.
    assert found.widest_load == (8 if spec.kv_format == "fp8" and spec.vector_bytes == 16 else 16)
    assert "e4m3x2" in ptx and "bf16x2" in ptx


def check_sparse_indices(spec: SparseIndicesSpec, found: Instructions) -> None:
    assert found.widest_store >= 16, "table rows are written in vectors"
    if spec.source in ("local", "global"):
        assert found.widest_load >= 16, "ids are read in vectors"


@pytest.mark.parametrize("target", [Target.named(name) for name in FULL], ids=str)
@pytest.mark.parametrize("operation", [CompressStoreSpec, SparseIndicesSpec])
def test_without_pdl_a_kernel_neither_waits_nor_triggers(target: Target, operation: type[KernelSpec]) -> None:
    spec = next(s for s in support_matrix(target, pdl=False) if isinstance(s, operation))
    assert "griddepcontrol" not in cache.ensure(spec).ptx.read_text()


@pytest.mark.parametrize("family", ["sm100", "sm120"])
def test_one_spec_gives_the_same_code_for_each_target_twice(family: str, tmp_path) -> None:
    """What the cache serves is what a compile would give: building again, in another process state, changes no byte of PTX."""
    target = Target.named(family)
    spec = SparseIndicesSpec(target, target.vector_bytes, source="all_groups")
    compiled, _ = cache.ensure_with_manifest(spec)
    build.build(spec, tmp_path, "again")
    assert (tmp_path / build.PTX).read_text() == compiled.ptx.read_text()
    assert (tmp_path / build.CUBIN).read_bytes() == compiled.object.with_name(build.CUBIN).read_bytes()
