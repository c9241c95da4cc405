"""The benchmark without a GPU: its command, what it takes for bytes, bars and results, and that it judges what it times."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from benchmarks import cases, checking, harness, kernels, peer_vllm, results, serving
from benchmarks.calls import Call, storage
from benchmarks.cases import Case
from benchmarks.checking import Judge, Mismatch
from benchmarks.results import Row
from cute_kernels import cli, ops
from cute_kernels.errors import InvalidArgument
from cute_kernels.kv_format import FORMATS
from cute_kernels.reference.quant import packed_views
from cute_kernels.save_policy import SavePolicy
from cute_kernels.target import Target

LIMIT = 4.25e12


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs on the CPU, where the public calls run the reference."""
    monkeypatch.setattr(serving, "DEVICE", "cpu")
    monkeypatch.setattr(serving, "COS_ROWS", 4096)


def launched(launches: Sequence[harness.Launch], count: int, between: Callable[[], None]) -> float:
    """A timer that launches everything once and says 10 µs."""
    between()
    for launch in launches:
        launch()
    return 10.0


def idle(launches: Sequence[harness.Launch], count: int, between: Callable[[], None]) -> float:
    """A timer whose graph writes nothing."""
    between()
    return 10.0


def small(operation: str, part: cases.Part, family: str = "sm100", bar: float | None = None) -> Case:
    return Case(operation, family, "small", 12, bar, (part,), lambda i: ((510 + i, 1), (126, 4), (1023, 7)))


def small_cases() -> list[Case]:
    bf16 = torch.bfloat16
    save = SavePolicy(prefix_stride=256)
    return [
        small("compress_store", cases.compress_part({"ratio": 4, "kv_format": "bf16", "save": save})),
        small("compress_store", cases.compress_part({"ratio": 4, "kv_format": "fp8_ds_mla", "save": None}), "sm120"),
        small("compress_store", cases.compress_part({"ratio": 128, "kv_format": "fp8", "save": SavePolicy.EVERY_ROW}, padding=5)),
        small("sparse_indices", cases.index_part(64, "sm100")),
        small("sparse_indices", cases.index_part(64, "sm120"), "sm120"),
        small("qkv_insert", cases.insert_part(2, "bf16", bf16)),
        small("qkv_insert", cases.insert_part(2, "fp8", torch.float8_e4m3fn)),
        small("qkv_insert", cases.insert_part(2, "fp8_ds_mla", bf16), "sm120"),
        small("gather_upconvert", cases.gather_part("fp8_inline")),
        small("gather_upconvert", cases.gather_part("fp8_ds_mla"), "sm120"),
        small("convert_indices", cases.convert_part(True)),
        small("convert_indices", cases.convert_part(False), "sm120"),
    ]


every_operation = pytest.mark.parametrize("case", small_cases(), ids=lambda c: f"{c.operation}-{c.family}")


# The command -----------------------------------------------------------------------------------------------------------


def test_without_a_gpu_the_command_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(cli.main, ["bench", "--peer", "vllm"])
    assert result.exit_code == 2
    assert "needs an NVIDIA GPU" in result.output


def test_another_gpu_is_refused_with_what_is_needed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A100")
    assert kernels.main([]) == 2
    text = capsys.readouterr().err
    assert "needs an NVIDIA GPU" in text and "8.0" in text


def test_an_installed_package_says_where_the_benchmarks_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cli, "__file__", str(tmp_path / "cute_kernels" / "cli.py"))
    result = CliRunner().invoke(cli.main, ["bench"])
    assert result.exit_code == 1
    assert "in the repository" in result.output and "make bench" in result.output


def test_no_case_is_said_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(kernels, "targets", lambda: {"sm100": Target.named("sm_100a")})
    assert kernels.main(["--only", "nothing like this"]) == 2
    assert "no case matches" in capsys.readouterr().err


def test_an_sm90_runs_both_families_and_a_blackwell_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    for capability, wanted in (((9, 0), {"sm100:sm_90a", "sm120:sm_90a"}), ((10, 0), {"sm100:sm_100a"}), ((12, 1), {"sm120:sm_121a"})):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        found = kernels.targets()
        assert {str(t) for t in found.values()} == wanted
        assert all(t.family == family for family, t in found.items())


def test_a_failing_case_costs_no_other_and_fails_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run_case(case: Case, *arguments: Any, **options: Any) -> Row:
        if "k=1024" in case.name:
            raise Mismatch("before the timing: sparse_indices: out.table: 3 of 12 bytes differ")
        return Row(case.operation, case.family, case.name, 10.0, 10.0, 1000, 0.1, 2.0, checked="8 sets equal")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: type("Properties", (), {"L2_cache_size": 1 << 20}))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(kernels, "targets", lambda: {"sm100": Target.named("sm_100a")})
    monkeypatch.setattr(kernels, "compile_ahead", lambda *_: None)
    monkeypatch.setattr(kernels, "run_case", run_case)
    monkeypatch.setattr(harness, "bandwidth_limit", lambda: LIMIT)
    monkeypatch.setattr(harness, "empty_node", lambda: 1.0)
    out = tmp_path / "bench.csv"
    assert kernels.main(["--only", "sparse_indices .*decode 256", "--out", str(out)]) == 1
    rows = [row for row in results.read(out) if row.operation != results.MACHINE]
    assert [(row.case, bool(row.microseconds)) for row in rows] == [("decode 256 k=512", True), ("decode 256 k=1024", False)]
    assert rows[1].checked.startswith("FAILED: Mismatch: before the timing")
    assert kernels.main(["--only", "decode 256 k=512", "--out", str(out)]) == 0
    assert (tmp_path / "roofline.svg").exists()


# Cases and bytes -------------------------------------------------------------------------------------------------------


def test_cases_are_distinct_and_cover_every_operation_and_bar() -> None:
    found = list(cases.cases())
    assert len({c.label for c in found}) == len(found)
    assert {c.operation for c in found} == {"glue", *checking_operations()}
    bars = {c.label: c.bar for c in found}
    for label, bar in (
        ("compress_store sm100 ratio 4 bf16 decode 256 save read", 4),
        ("compress_store sm120 ratio 128 fp8_ds_mla prefill 32768 save read", 36),
        ("compress_store sm100 ratio 128 fp8 decode 256 of 8192 save read", 7),
        ("sparse_indices sm100 prefill 32768 k=1024", 74),
        ("qkv_insert sm100 fp8 256 rows, 8 heads", 2.4),
        ("qkv_insert sm120 fp8_ds_mla 8192 rows, 16 heads", 72),
        ("gather_upconvert sm100 fp8_inline 64 x 2048 rows", 60),
        ("glue sm100 fp8 decode 256, 8 heads, k=512", 7),
    ):
        assert bars[label] == bar
    sets = {c.label: c.sets for c in found}
    assert sets["sparse_indices sm100 prefill 32768 k=1024"] == 3 and sets["sparse_indices sm100 prefill 8192 k=512"] == 4
    assert sets["sparse_indices sm100 decode 256 k=512"] == 8


def test_what_both_families_share_is_marked_once() -> None:
    found = [c for c in cases.cases() if c.repeats]
    assert {c.operation for c in found} == {"gather_upconvert", "convert_indices"} and {c.family for c in found} == {"sm120"}
    others = {(c.operation, c.name): c.family for c in cases.cases() if not c.repeats}
    assert all(others[c.operation, c.name] == "sm100" for c in found)


def checking_operations() -> set[str]:
    from benchmarks.calls import WRITTEN

    return set(WRITTEN)


def test_bars_scale_with_the_limit_of_the_run() -> None:
    assert cases.scaled(20, 4.25e12) == 20
    assert cases.scaled(20, 8.5e12) == 10


def tensor_bytes(call: Call, *names: str) -> int:
    return sum(x.numel() * x.element_size() for n in names for x in [call.arguments[n]])


def test_bytes_are_those_of_the_tensors_that_must_move() -> None:
    step = ((0, 40), (3, 60))
    index = Call.of("sparse_indices", *serving.index_arguments(step, k=64, family="sm100"))
    out = index.arguments["out"]
    moved = tensor_bytes(index, "positions", "token_to_req", "ids") + out.table.nbytes + out.lengths.nbytes
    assert serving.index_bytes(100, 64) == moved

    insert = Call.of("qkv_insert", *serving.insert_arguments(step, heads=3, kv_format="fp8", q_dtype=torch.float8_e4m3fn))
    moved = tensor_bytes(insert, "q", "kv", "out", "positions", "slots") + 100 * (512 + 64 * 4)
    assert serving.insert_bytes(100, heads=3, kv_format="fp8", q_bytes=1) == moved

    gather = Call.of("gather_upconvert", *serving.gather_arguments(step, kv_format="fp8_inline"))
    assert serving.gather_bytes(100, kv_format="fp8_inline") == tensor_bytes(gather, "out") + 100 * 656

    convert = Call.of("convert_indices", *serving.convert_arguments(step, k=32))
    assert serving.convert_bytes(100, 32) == tensor_bytes(convert, "ids", "out", "counts", "token_to_req")


@pytest.mark.parametrize("kv_format", ["bf16", "fp8", "fp8_ds_mla"])
def test_bytes_of_the_compressor(kv_format: str) -> None:
    row, stored = 4 * 2 * 1024, FORMATS[kv_format].row_bytes
    every, none = SavePolicy.EVERY_ROW, None
    # One row that closes a group of 4: three rows of its own group and four of the one before are read by half, itself is saved whole.
    assert serving.compress_bytes(((7, 1),), ratio=4, kv_format=kv_format, save=every) == 7 * row // 2 + 2 * row + stored
    assert serving.compress_bytes(((7, 1),), ratio=4, kv_format=kv_format, save=none) == 8 * row // 2 + stored
    # A row that closes nothing is only saved.
    assert serving.compress_bytes(((6, 1),), ratio=4, kv_format=kv_format, save=every) == 2 * row
    # Eight rows from the start: each is saved, two groups close, and rows read for both purposes count once.
    assert serving.compress_bytes(((0, 8),), ratio=4, kv_format=kv_format, save=every) == 8 * 2 * row + 2 * stored
    # The same without saving: rows 0..3 serve both windows, by either half; rows 4..7 one.
    assert serving.compress_bytes(((0, 8),), ratio=4, kv_format=kv_format, save=none) == (8 + 4) * row // 2 + 2 * stored
    half = row // 2
    assert serving.compress_bytes(((0, 128),), ratio=128, kv_format=kv_format, save=none) == 128 * half + stored


# What is timed is judged ------------------------------------------------------------------------------------------------


@every_operation
def test_a_right_kernel_gets_its_row(case: Case) -> None:
    case = dataclasses.replace(case, bar=12.0)
    row = kernels.run_case(case, Target.named(case.family), LIMIT, timer=launched, cold_bytes=3 * case.bytes)
    assert row.microseconds == 10.0 and row.cold_microseconds == 10.0 and row.met == "yes" and row.checked == "8 sets equal"
    assert row.bytes == case.bytes and row.terabytes_per_second == pytest.approx(case.bytes / 10 / 1e6)
    assert row.percent_of_limit == pytest.approx(100 * case.bytes / 10e-6 / LIMIT)
    late = kernels.run_case(dataclasses.replace(case, bar=9.0), Target.named(case.family), LIMIT, timer=launched)
    assert late.met == "no" and late.cold_microseconds is None


@every_operation
def test_a_kernel_that_writes_nothing_fails(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, case.operation, nothing_like(getattr(ops, case.operation)))
    with pytest.raises(Mismatch, match="before the timing"):
        kernels.run_case(case, Target.named(case.family), LIMIT, timer=launched)


@every_operation
def test_launches_that_write_nothing_while_timed_fail(case: Case) -> None:
    with pytest.raises(Mismatch, match="after the timing"):
        kernels.run_case(case, Target.named(case.family), LIMIT, timer=idle)


@every_operation
def test_one_wrong_byte_fails(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each output in turn, the last byte that the reference writes is wrong in its top two bits."""
    real = getattr(ops, case.operation)
    first = Call.of(case.operation, *case.parts[0][1](case.step(0)))
    for name in first.outputs():
        if name == "state" and first.arguments["kv_score"] is None:
            continue

        def wrong(name: str = name, **a: Any) -> None:
            call = Call(case.operation, {k: v for k, v in a.items() if k != "target"})
            before = storage(call.outputs()[name]).clone()
            real(**a)
            after = storage(call.outputs()[name])
            at = int((after != before).nonzero()[-1])
            after[at] ^= 0xC0  # the sign and an exponent bit, or the top of a number

        wrong.__signature__ = signature(real)  # type: ignore[attr-defined]
        monkeypatch.setattr(ops, case.operation, wrong)
        with pytest.raises(Mismatch, match=name.partition(".")[0]):
            kernels.run_case(case, Target.named(case.family), LIMIT, timer=launched)


def signature(call: Callable[..., Any]) -> Any:
    import inspect

    return inspect.signature(call)


def nothing_like(call: Callable[..., Any]) -> Callable[..., None]:
    """A function with the signature of `call` that does nothing."""

    def nothing(**arguments: Any) -> None:
        return None

    nothing.__signature__ = signature(call)  # type: ignore[attr-defined]
    return nothing


def test_rounding_steps_are_allowed_one_at_a_time_and_to_few() -> None:
    case = small("qkv_insert", cases.insert_part(2, "bf16", torch.bfloat16))
    call = case.make(0)[0]
    judge = Judge(call, "sm100")
    call.launch(Target.named("sm100"))()
    assert judge.check() == 0.0
    out = call.arguments["out"]
    bits = out.view(torch.int16).view(-1)
    bits[5] += 1
    assert 0 < judge.check() < checking.SHARE
    bits[5] += 8
    with pytest.raises(Mismatch, match="rounding steps"):
        judge.check()
    bits[5] -= 9
    bits[: bits.numel() // 50] += 1
    with pytest.raises(Mismatch, match="more than 1%"):
        judge.check()
    bits[: bits.numel() // 50] -= 1
    out.view(-1)[7] = torch.nan
    with pytest.raises(Mismatch):
        judge.check()


@pytest.mark.parametrize("kv_format", ["bf16", "fp8", "fp8_ds_mla"])
def test_bytes_between_pages_and_scales_are_judged(kv_format: str) -> None:
    family = cases.family_of(kv_format)
    call = small("compress_store", cases.compress_part({"ratio": 128, "kv_format": kv_format, "save": None}), family).make(0)[0]
    cache = call.arguments["kv_cache"]
    pages, rows, width = cache.shape
    apart = torch.empty(pages * (rows + 2) * width * 2, dtype=cache.dtype).as_strided(cache.shape, ((rows + 2) * width, width, 1))
    call.arguments["kv_cache"] = apart
    judge = Judge(call, family)
    call.launch(Target.named(family))()
    assert judge.check() == 0.0
    storage(apart)[-1] += 1
    with pytest.raises(Mismatch, match="outside its rows"):
        judge.check()
    storage(apart)[-1] -= 1
    if kv_format != "fp8_ds_mla":
        return
    footers = packed_views(apart)[1]
    page, row = (footers[..., 7] == 0).nonzero()[0].tolist()
    footers[page, row, 3] += 2
    with pytest.raises(Mismatch, match="scale bytes"):
        judge.check()


def test_copies_of_a_call_share_no_memory_and_keep_their_strides() -> None:
    call = small("qkv_insert", cases.insert_part(2, "fp8_ds_mla", torch.bfloat16), "sm120").make(0)[0]
    copy = call.clone()
    for name, tensor in call.arguments.items():
        if isinstance(tensor, torch.Tensor):
            other = copy.arguments[name]
            assert other.stride() == tensor.stride() and torch.equal(storage(other), storage(tensor))
            assert other.data_ptr() != tensor.data_ptr()


def test_the_cold_column_has_sets_for_three_caches() -> None:
    case = small("sparse_indices", cases.index_part(64, "sm100"))
    counts: list[int] = []

    def counting(launches: Sequence[harness.Launch], count: int, between: Callable[[], None]) -> float:
        counts.append(len(launches))
        return launched(launches, count, between)

    kernels.run_case(case, None, LIMIT, timer=counting, cold_bytes=30 * case.bytes)
    assert counts == [8, 30]


# The peer --------------------------------------------------------------------------------------------------------------


class Peer(peer_vllm.Vllm):
    """A peer that runs our own calls; `wrong` breaks its check."""

    def __init__(self, wrong: bool = False, broken: bool = False) -> None:
        self.wrong, self.broken = wrong, broken

    def run(self, call: Call, family: str) -> peer_vllm.PeerRun | None:
        if self.broken:
            raise RuntimeError("no such kernel\nmore")

        def check() -> None:
            if self.wrong:
                raise Mismatch("other bytes")

        return peer_vllm.PeerRun(call.launch(Target.named(family)), check)


def test_the_peer_is_timed_beside_ours_and_has_to_be_beaten() -> None:
    case = small("sparse_indices", cases.index_part(64, "sm100"), bar=12.0)
    times = iter((10.0, 8.0))

    def timer(launches: Sequence[harness.Launch], count: int, between: Callable[[], None]) -> float:
        launched(launches, count, between)
        return next(times)

    row = kernels.run_case(case, Target.named("sm100"), LIMIT, timer=timer, peer=Peer())
    assert (row.peer, row.peer_microseconds, row.ratio, row.met) == ("vllm", 8.0, 0.8, "no")


@pytest.mark.parametrize(
    ("peer", "said"), [(Peer(wrong=True), "called wrongly: other bytes"), (Peer(broken=True), "RuntimeError: no such")]
)
def test_a_peer_that_is_wrong_or_fails_has_no_time(peer: Peer, said: str) -> None:
    case = small("sparse_indices", cases.index_part(64, "sm100"), bar=12.0)
    row = kernels.run_case(case, Target.named("sm100"), LIMIT, timer=launched, peer=peer)
    assert row.peer_microseconds is None and row.ratio is None and row.met == "yes" and said in row.peer


def test_a_peer_that_is_not_there_is_said_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(peer_vllm.PeerUnavailable, match="--peer-library"):
        peer_vllm.Vllm(tmp_path / "none.so")
    assert kernels._find_peer("vllm", tmp_path / "none.so") is None
    assert "not importable" in capsys.readouterr().out
    assert kernels._find_peer(None, tmp_path) is None


def test_a_loaded_library_serves_its_operations(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(peer_vllm, "_find", lambda name: object())
    peer = peer_vllm.Vllm(tmp_path / "none.so")
    assert len(peer.missing) == 3  # the parts in Python
    monkeypatch.setattr(peer, "_qkv_insert", lambda call, family: "insert")
    monkeypatch.setattr(peer, "_gather", lambda call, family: "gather")
    assert peer.run(Call("qkv_insert", {}), "sm100") == "insert"
    assert peer.run(Call("gather_upconvert", {"cache": torch.empty(2, 64, 656)}), "sm100") == "gather"


def test_host_times_have_a_row_bound_and_unbound(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import host

    case = host.Case("qkv_insert", "own q", "sm100", {}, ("q",))
    quiet = iter((9.0, 7.0, *[8.0] * (2 * host.ROUNDS)))
    monkeypatch.setattr(host, "yardsticks", lambda: {"nothing": lambda: None})
    monkeypatch.setattr(host, "cases", lambda: iter([case]))
    monkeypatch.setattr(host, "calls_of", lambda _: [lambda: None] * len(host.Times._fields))
    monkeypatch.setattr(host, "microseconds", lambda *calls: [next(quiet)] * len(calls))
    monkeypatch.setattr(host, "in_own_process", host.measure)
    rows = list(kernels.host_rows())
    assert [(r.case, r.microseconds, r.met) for r in rows] == [
        ("for comparison: nothing", 8.0, ""),
        ("qkv_insert own q, bound", 7.0, "no"),
        ("qkv_insert own q, unbound", 7.0, "yes"),
    ]


# Results ---------------------------------------------------------------------------------------------------------------


def sample() -> list[Row]:
    machine = Row(results.MACHINE, "", "a GPU: elementwise add over 2 GiB", terabytes_per_second=4.25)
    bar = {"bar_microseconds": 4.0, "scaled_bar_microseconds": 4.0, "met": "no"}
    return [
        machine,
        Row(results.MACHINE, "", "a GPU: empty graph node", 1.1),
        Row("compress_store", "sm100", "ratio 4 bf16 decode 256 save read", 5.4, 5.9, 6302720, 1.171, 27.5, "vllm", 14.3, 2.65, **bar),
        Row("qkv_insert", "sm100", "bf16 256 rows, 8 heads", 2.27, 2.5, 4788224, 2.11, 49.6, checked="8 sets equal"),
        Row(results.HOST, "sm100", "compress_store ratio 4 fp8, bound", 5.0, bar_microseconds=6.0, scaled_bar_microseconds=6.0, met="yes"),
    ]


def test_results_come_back_as_they_were_written(tmp_path: Path) -> None:
    results.write(sample(), tmp_path / "sub" / "r.csv")
    assert results.read(tmp_path / "sub" / "r.csv") == sample()
    assert results.limit(sample()) == 4.25e12
    with pytest.raises(InvalidArgument, match="limit"):
        results.limit(sample()[1:])
    (tmp_path / "old.csv").write_text("operation,microseconds\nx,1\n")
    with pytest.raises(InvalidArgument, match="columns"):
        results.read(tmp_path / "old.csv")
