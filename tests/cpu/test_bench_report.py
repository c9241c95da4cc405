"""From a results file to plots and docs/performance.md, and the arithmetic of the prediction."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from benchmarks import cases, counters, plots, predict, report, results
from benchmarks.predict import Prediction
from benchmarks.results import Row
from cute_kernels.errors import CuteKernelsError, InvalidArgument


def rows() -> list[Row]:
    compress = {"bar_microseconds": 4.0, "scaled_bar_microseconds": 3.9}
    name = "ratio 4 {} decode 256 save read"
    return [
        Row(results.MACHINE, "", "GPU X: elementwise add over 2 GiB", terabytes_per_second=4.25),
        Row(results.MACHINE, "", "GPU X: empty graph node", 1.1),
        Row("compress_store", "sm100", name.format("bf16"), 5.41, 5.9, 6302720, 1.17, 27.5, "vllm", 14.3, 2.64, **compress, met="no"),
        Row("compress_store", "sm120", name.format("fp8_ds_mla"), 3.5, 3.9, 6271480, 1.79, 42.1, **compress, met="yes"),
        Row("qkv_insert", "sm100", "bf16 8192 rows, 64 heads", 271.0, 271.0, 1092747264, 4.03, 94.9, checked="4 sets equal"),
        Row(results.HOST, "sm100", "compress_store fp8, bound", 5.0, bar_microseconds=6.0, scaled_bar_microseconds=6.0, met="yes"),
    ]


def prediction(target: str = "sm100:sm_100f", issue_us: float = 105.5) -> Prediction:
    return Prediction(
        operation="qkv_insert",
        target=target,
        case="bf16 8192 rows, 64 heads",
        registers=96,
        spill_bytes=0,
        shared_bytes=0,
        threads=128,
        occupancy=0.3125,
        widest_load=32,
        widest_store=32,
        wide_share=0.94,
        sass_per_ptx=0.9,
        instructions_per_kilobyte=108.8,
        l1_bytes_per_byte=1.14,
        bytes=1092747264,
        dram_us=136.6,
        issue_us=issue_us,
        l1_us=35.3,
        pipe_us=11.6,
        binds="DRAM",
        expected_us=152.8,
    )


@pytest.fixture
def record(tmp_path: Path) -> Path:
    results.write(rows(), tmp_path / "bench.csv")
    predict.write([prediction(), prediction("sm100:sm_90a")], tmp_path / "prediction.csv")
    return tmp_path


# Plots -----------------------------------------------------------------------------------------------------------------


def test_plots_are_clean_and_the_same_each_time(record: Path) -> None:
    assert plots.main([str(record / "bench.csv")]) == 0
    texts = {}
    for name, wanted in (("roofline.svg", "compress_store"), ("speedup.svg", "ratio 4 bf16 decode 256")):
        texts[name] = (record / name).read_text()
        assert ElementTree.fromstring(texts[name]).tag.endswith("svg")
        assert wanted in texts[name] and len(texts[name]) < 120_000
    plots.main([str(record / "bench.csv"), "--out", str(record / "again")])
    assert {name: (record / "again" / name).read_text() for name in texts} == texts


def test_without_a_peer_there_is_one_plot(tmp_path: Path) -> None:
    alone = [row for row in rows() if row.ratio is None]
    assert [p.name for p in plots.write(alone, tmp_path)] == ["roofline.svg"]


def test_a_file_of_something_else_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.csv").write_text("a,b\n1,2\n")
    assert plots.main([str(tmp_path / "x.csv")]) == 1
    assert "columns" in capsys.readouterr().err


# The page --------------------------------------------------------------------------------------------------------------


def test_a_miss_without_a_cause_is_refused_by_name(record: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(record / "bench.csv"), "--prediction", str(record / "prediction.csv"), "--out", str(record / "page.md")]
    assert report.main(arguments) == 1
    assert "ratio 4 bf16 decode 256 save read" in capsys.readouterr().err and not (record / "page.md").exists()
    assert report.main([*arguments, "--draft"]) == 0
    assert "no cause written down" in (record / "page.md").read_text()
    (record / "causes.csv").write_text('pattern,cause\nratio 4 .* decode,"too few blocks, so the loads wait"\n')
    assert report.main(arguments) == 0
    text = (record / "page.md").read_text()
    assert "* too few blocks, so the loads wait" in text and "no cause" not in text


def test_a_case_slower_than_the_peer_needs_a_cause_too(record: Path) -> None:
    slow = Row("sparse_indices", "sm100", "decode 256 k=1024", 2.98, 3.7, 2232320, 0.75, 17.3, "vllm", 2.74, 0.92)
    results.write([*rows(), slow], record / "bench.csv")
    (record / "causes.csv").write_text("pattern,cause\nratio 4,known\n")
    with pytest.raises(report.Unexplained, match="sparse_indices sm100 decode 256 k=1024"):
        report.page(record / "bench.csv", record / "prediction.csv")
    assert report.aim(slow) == 2.74 and report.aim(rows()[2]) == 3.9
    assert "decode 256 k=1024: 2.98 of 2.74" in report.page(record / "bench.csv", record / "prediction.csv", draft=True)


def test_the_page_shows_every_figure_and_keeps_prediction_apart(record: Path) -> None:
    (record / "bench.txt").write_text("python -m cute_kernels bench\n2026-11-30T14:24Z, commit 0123abc\nNVIDIA H200, 580.1\n")
    text = report.page(record / "bench.csv", record / "prediction.csv", draft=True)
    measured, _, predicted = text.partition("## Predicted for Blackwell")
    line = next(x for x in measured.splitlines() if "decode 256" in x and x.startswith("|"))
    for cell in ("BF16 / packed", "5.41 / 3.50", "3.90", "**no** / yes", "28% / 42%", "5.90 / 3.90", "14.3", "5.20"):
        assert f" {cell} " in line, cell
    assert "(2026-11-30T14:24Z, commit 0123abc); its log" in measured
    assert "1 of 2 timed cases with a bar meet it" in measured and "4.25 TB/s" in measured and "1.10 µs" in measured
    assert "compress_store fp8, bound" in measured
    assert "B200" not in measured and "Nothing of this library has run on Blackwell" in predicted
    assert "1,092,747,264 bytes / 8 TB/s = 136.6 µs" in predicted and "77% of the DRAM time" in predicted
    assert next(x for x in predicted.splitlines() if "271" in x).endswith("| 1.77 |")  # measured over predicted, on the same object


def test_counters_beside_the_results_are_shown(record: Path) -> None:
    seen = counters.Counters(
        "compress_store", "sm100", "ratio 4 bf16 decode 256 save read", "compress_store", 6.1, 6206208, 24.5, 9, 31, 9, 8, 7, "barrier 75%"
    )
    assert "Counters of" not in report.page(record / "bench.csv", record / "prediction.csv", draft=True)
    counters.write([seen], record / "counters.csv")
    text = report.page(record / "bench.csv", record / "prediction.csv", draft=True)
    line = next(x for x in text.splitlines() if "barrier 75%" in x)
    assert "| 6.10 | 6.2 of 6.3 | 24% | 31% |" in line


def test_figures_of_kernels_that_have_changed_since_are_marked(record: Path) -> None:
    fresh = report.page(record / "bench.csv", record / "prediction.csv", draft=True)
    (record / "stale.csv").write_text('pattern,since\n^compress_store sm120,"another plan, since the run"\n^qkv_insert,a new writer\n')
    marked = report.page(record / "bench.csv", record / "prediction.csv", draft=True)
    assert "†" not in fresh and marked.count("\n† ") == 2 and "† another plan, since the run\n" in marked
    assert "| 5.41 / 3.50† |" in marked and "| 5.90 / 3.90† |" in marked and "| 28% / 42%† |" in marked and "271†" in marked
    assert "1 of 2 timed cases with a bar meet it, 1 of them by a kernel that has changed since (host" in marked
    assert next(x for x in marked.splitlines() if "271†" in x and x.endswith("| 1.77 |"))


@pytest.mark.parametrize(
    ("value", "beside", "wanted"),
    [(None, None, "–"), (260.2, None, "260"), (12.34, 13.0, "12.3"), (6.005, 6.0, "6.005"), (6.0, 6.0, "6.00"), (260.2, 259.9, "260.2")],
)
def test_a_figure_tells_a_miss_from_its_bar(value: float | None, beside: float | None, wanted: str) -> None:
    assert report.figure(value, beside) == wanted


def test_every_case_has_a_line_of_the_table(record: Path) -> None:
    found = [Row(c.operation, c.family, c.name, 1.0, 1.0, 1, 1.0, 1.0) for c in cases.cases()]
    text = report.measured([*rows()[:1], *found], report.Changed())
    titles = {report.kind(row)[:2] for row in found}
    lines = text.splitlines()[2:]
    assert len(lines) == len(titles) and sum(len(line.split("|")[4].split("/")) for line in lines) == len(found)
    known = [report.sglang(row) for row in found]
    assert {value for value in known if value is not None} == set(report.SGLANG.values())


# The prediction --------------------------------------------------------------------------------------------------------


def test_predictions_come_back_as_they_were_written(tmp_path: Path) -> None:
    predict.write([prediction()], tmp_path / "p.csv")
    assert predict.read(tmp_path / "p.csv") == [prediction()]


def test_a_prediction_above_the_share_is_a_fault() -> None:
    assert "FAULT" in predict.line(prediction()) and "FAULT" not in predict.line(prediction(issue_us=90.0))


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("ld.global.v8.b32 {%r1, %r2}, [%rd1]", 32),
        ("ld.global.L1::no_allocate.v4.b64 {%rd1}, [%rd2]", 32),
        ("st.global.v4.b32 [%rd1], {%r1}", 16),
        ("ld.global.nc.u8 %rs1, [%rd1]", 1),
        ("@%p1 st.global.b64 [%rd1], %rd2", 8),
        ("bar.sync 0", 0),
    ],
)
def test_access_widths(text: str, wanted: int) -> None:
    assert predict.access_bytes(text) == wanted


def test_a_wait_counts_as_often_as_it_ends() -> None:
    texts = {1: "mov.b32 %r1, 0", 2: "mbarrier.try_wait.parity.shared.b64 P1, [%r1], 0, 10000000", 3: "@P1 bra DONE", 4: "ret"}
    assert predict.issued({1: 8, 2: 500, 3: 8, 4: 8}, texts) == 32


def test_a_record_without_a_limit_or_no_record_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidArgument, match="limit"):
        results.limit(rows()[1:])
    monkeypatch.setattr(report, "ROOT", tmp_path)
    with pytest.raises(CuteKernelsError, match=r"no docs/results/\*/bench.csv"):
        report.record()


# Counters --------------------------------------------------------------------------------------------------------------


NCU = """==PROF== Connected to process 1
==PROF== Profiling "kernel_cutlass": 0%....50%....100% - 3 passes
"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","1","kernel_cutlass_a","gpu__time_duration.sum","ns","5,408"
"0","1","kernel_cutlass_a","dram__bytes_read.sum","byte","6,000,000"
"0","1","kernel_cutlass_a","dram__bytes_write.sum","byte","206208"
"0","1","kernel_cutlass_a","dram__throughput.avg.pct_of_peak_sustained_elapsed","%","24.50"
"0","1","kernel_cutlass_a","sm__inst_executed.sum","inst","123,456"
"0","1","kernel_cutlass_a","smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio","inst","6.0"
"0","1","kernel_cutlass_a","smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio","inst","2.0"
"1","1","kernel_cutlass_b","gpu__time_duration.sum","ns","n/a"
==PROF== Disconnected
"""


def test_counters_are_read_and_belong_to_their_cases(tmp_path: Path) -> None:
    launches = counters.parse(NCU)
    assert [x["kernel"] for x in launches] == ["kernel_cutlass_a", "kernel_cutlass_b"]
    chosen = [
        c
        for c in cases.cases()
        if c.label in ("compress_store sm100 ratio 4 bf16 decode 256 save read", "sparse_indices sm100 decode 256 k=512")
    ]
    found = counters.counters(chosen, launches)
    assert (found[0].microseconds, found[0].dram_bytes, found[0].instructions) == (5.408, 6206208, 123456)
    assert found[0].waits == "long_scoreboard 75%" and found[1].waits == "" and found[1].microseconds == 0
    counters.write(found, tmp_path / "c.csv")
    again = counters.read(tmp_path / "c.csv")
    (tmp_path / "other.csv").write_text("operation,family\na,b\n")
    for read in (counters.read, predict.read, results.read):
        with pytest.raises(InvalidArgument, match="columns"):
            read(tmp_path / "other.csv")
    assert again[0].dram_bytes == 6206208 and again[0].case == found[0].case and again[0].microseconds == 5.41
    with pytest.raises(counters.NoCounters, match="2 launches, 1 were expected"):
        counters.counters(chosen[:1], launches)


def test_no_profiler_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(counters.subprocess, "run", missing)
    with pytest.raises(counters.NoCounters, match="ncu is not installed"):
        counters.profile("", [])
