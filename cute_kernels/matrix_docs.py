"""The support matrix as data and as a page, from what dispatch and the compile layer themselves consult.

`python -m cute_kernels matrix` prints it; `docs/support_matrix.md` is the page, and a test compares the two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cute_kernels import dispatch, flashinfer_backend
from cute_kernels.compile.matrix import support_matrix
from cute_kernels.compile.spec import SPEC_TYPES, KernelSpec
from cute_kernels.errors import CuteKernelsError, UnsupportedRequest
from cute_kernels.kv_format import HEAD_DIM, WINDOW, KVFormat, cache_dtypes, formats_of, resolve_format
from cute_kernels.target import Family, Target, all_targets

FAMILIES: tuple[Family, ...] = ("sm100", "sm120")
_NAMES = {(10, 0): "B200", (10, 3): "B300, GB300", (12, 0): "RTX", (12, 1): "GB10", (9, 0): "H100, H200"}
_ROWS = {"bf16": "BF16", "fp8": "E4M3", "fp8_ds_mla": "packed"}

# What stands behind each operation besides the compile tests, which build every kernel of this matrix: the test that executes its
# PTX on the CPU, and the test that runs its source on an SM90 GPU. A CPU test checks that they exist and call the operation.
EMULATED = {
    "compress_store": "tests/emulator/test_compress_store.py",
    "sparse_indices": "tests/emulator/test_sparse_indices.py",
    "qkv_insert": "tests/emulator/test_qkv_insert.py",
    "gather_upconvert": "tests/emulator/test_gather.py",
    "convert_indices": "tests/emulator/test_gather.py",
}
ON_SM90 = {
    "compress_store": "tests/gpu/test_compress_store.py",
    "sparse_indices": "tests/gpu/test_sparse_indices.py",
    "qkv_insert": "tests/gpu/test_qkv_insert.py",
    "gather_upconvert": "tests/gpu/test_gather.py",
    "convert_indices": "tests/gpu/test_gather.py",
}


def matrix() -> dict[str, Any]:
    """Devices, operations with their specialisations, formats, heads and refusals, as plain data."""
    return {
        "devices": _devices(),
        "operations": _operations(),
        "kv_cache_dtype": _formats(),
        "decode": {family: dispatch.decode_path(Target.named(family)) for family in FAMILIES},
        "index_form": {family: _form(family) for family in FAMILIES},
        "padded_heads": _padded_heads(),
        "packs": {name: len(support_matrix(Target.named(name))) for name in _family_architectures()},
        "flashinfer": f">= {flashinfer_backend.OLDEST}",
        "refused": _refusals(),
    }


def _devices() -> list[dict[str, Any]]:
    capabilities = sorted({c for target in all_targets() for c in target.capabilities if c != (9, 0)})
    rows = []
    for capability in capabilities:
        target = Target.from_capability(capability, "")
        packs = list(target.pack_architectures)
        rows.append({"capability": _dotted(capability), "family": target.family, "jit": target.gpu_arch, "packs": packs})
    return rows


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


def _family_architectures() -> list[str]:
    return [t.gpu_arch for t in all_targets() if t.gpu_arch.endswith("f")]


def _operations() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for operation in SPEC_TYPES:
        families: dict[str, Any] = {}
        for family in FAMILIES:
            specs = [s for s in support_matrix(Target.named(family)) if s.operation == operation]
            families[family] = {"kernels": len(specs), "choices": _choices(specs)} if specs else None
        found[operation] = {**families, "evidence": _evidence(operation, any(families.values()))}
    return found


def _choices(specs: list[KernelSpec]) -> dict[str, list[Any]]:
    """Every value that each specialisation field takes, in order."""
    hidden = ("operation", "family", "gpu_arch", "pdl")
    names = [name for name in specs[0].fields() if name not in hidden]
    return {name: list(dict.fromkeys(s.fields()[name] for s in specs)) for name in names}


def _evidence(operation: str, has_kernels: bool) -> list[str]:
    if not has_kernels:
        return ["reference"]
    kinds = ((True, "cross-compiled"), (operation in EMULATED, "emulated"), (operation in ON_SM90, "SM90"))
    return [kind for there, kind in kinds if there]


def _formats() -> dict[str, dict[str, Any]]:
    def one(name: str, family: str) -> dict[str, Any]:
        try:
            fmt = resolve_format(name, family)
        except UnsupportedRequest as refusal:
            return {"refused": str(refusal)}
        return {"format": fmt.name, "row_bytes": fmt.row_bytes, "scaled": fmt.scaled}

    return {name: {family: one(name, family) for family in FAMILIES} for name in cache_dtypes()}


def _form(family: str) -> str:
    return "combined" if dispatch.combined_form(Target.named(family)) else "segments"


def _padded_heads() -> dict[str, int]:
    """Ranges of head counts, each with what it is padded to."""
    ranges: dict[str, int] = {}
    first = 1
    for padded in sorted({dispatch.pad_q_heads(n) for n in range(1, 129)}):
        ranges[f"{first}-{padded}"] = padded
        first = padded + 1
    return ranges


def _refusals() -> dict[str, str]:
    """Requests that are refused before anything is launched, with the words of the refusal."""
    sm100, sm120 = Target.named("sm100"), Target.named("sm120")
    asked: dict[str, Callable[[], object]] = {
        "packed rows on the SM100 family": lambda: _why(dispatch.supports(sm100, kv_cache_dtype="fp8_ds_mla")),
        "BF16 rows on the SM120 family": lambda: _why(dispatch.supports(sm120, kv_cache_dtype="bfloat16")),
        "more than 128 heads on one GPU": lambda: _why(dispatch.supports(sm100, num_heads=129)),
        "another head size": lambda: _why(dispatch.supports(sm100, head_dim=128)),
        "a window that is not 128": lambda: _why(dispatch.supports(sm100, window=192)),
        "spans of vision tokens": lambda: _why(dispatch.supports(sm100, vision_spans=True)),
        "FlashInfer's decode on SM90": lambda: _why(dispatch.supports(Target("sm100", "sm_90a"))),
        "any other device": lambda: Target.from_capability((8, 0), "an 8.0 device"),
        "RopeQuant with BF16 q": lambda: dispatch.require_rope_quant(torch.bfloat16, 128, sm100, "flashinfer", sm100),
        "RopeQuant on the SM120 family": lambda: dispatch.require_rope_quant(torch.bfloat16, 128, sm120, "flashinfer", sm120),
    }
    return {what: _refusal(ask) for what, ask in asked.items()}


def _refusal(ask: Callable[[], object]) -> str:
    try:
        answer = ask()
    except CuteKernelsError as refusal:
        return str(refusal)
    assert isinstance(answer, str), f"served after all: {answer}"
    return answer


def _why(support: dispatch.Support) -> str | dispatch.Support:
    return support.reason or support


# The page -------------------------------------------------------------------------------------------------------------------


def markdown() -> str:
    """The text of docs/support_matrix.md."""
    data = matrix()
    packs = data["packs"]
    parts = [
        _HEAD,
        "## Devices\n",
        _table(("compute capability", "family", "architecture of a JIT build", "packs that serve it", "evidence"), _device_rows(data)),
        "\nAny other device is an `UnsupportedRequest`.\n",
        "## Operations\n",
        _table(("operation", "SM100 family", "SM120 family", "evidence"), _operation_rows(data)),
        f"\nA pack for sm_100f holds {packs['sm_100f']} kernels, one for sm_120f {packs['sm_120f']}: what the table counts. Which of them"
        "\na layer can need is `LayerSpec.specs(target)`.\n",
        "## Formats\n",
        _table(("`kv_cache_dtype`", "SM100 family", "SM120 family"), _format_rows(data)),
        f"\n{_scales_line()}\n",
        "## Heads\n",
        _table(("query heads on one GPU", "padded to"), [(span.replace("-", " to "), str(n)) for span, n in data["padded_heads"].items()]),
        f"\n1 to {max(data['padded_heads'].values())} in all. Padding is zero in q and -inf in the sinks; its output is cut off.\n",
        "## Shapes\n",
        _table(("", ""), _shape_rows()),
        "\n## Refused\n",
        "Before anything is launched, in these words:\n",
        _table(("request", "answer"), [(what, why.replace("\n  hint: ", "; hint: ")) for what, why in data["refused"].items()]),
        _FOOT,
    ]
    return "\n".join(parts)


_HEAD = """\
# Support matrix

Generated from the code that dispatch consults: `python -m cute_kernels matrix`, with `--format json` as data. What runs where, and on
what evidence. Three kinds of evidence, none of which is a run on Blackwell; nothing here has run there:

* **cross-compiled**: the kernel is built for the architecture on a machine without a GPU; machine code, registers, spills and shared
  memory are checked (`make test-compile`).
* **emulated**: the PTX built for sm_100a and sm_120a is executed on the CPU by `ptx_emulator`, behind the compiled host code, and
  compared with the reference (`make test-emulator`).
* **SM90**: the same source, built as sm_90a under an explicit target, executed on an SM90 GPU (H200) by `make test-gpu`; the
  last [record](results/README.md) names its commit.
"""

_FOOT = """
`supports(where, ...)` answers for one layer without launching, compiling or downloading anything.
"""


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def _device_rows(data: dict[str, Any]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for d in data["devices"]:
        major, minor = map(int, d["capability"].split("."))
        emulated = ", emulated" if d["jit"] in ("sm_100a", "sm_120a") else ""
        name = f"{d['capability']} ({_NAMES[major, minor]})"
        rows.append((name, d["family"].upper(), d["jit"], ", ".join(d["packs"]), f"cross-compiled{emulated}"))
    sm90 = 'for tests and benchmarks; no decode but `backend="reference"`'
    rows.append((f"9.0 ({_NAMES[9, 0]})", "either, when named", "sm_90a", "sm_90a", sm90))
    rows.append(("none: CPU tensors", "as the target given, else SM100", "–", "–", "the reference, against float64 oracles"))
    return rows


_DECODE_EVIDENCE = (
    "arguments and buffers checked by FlashInfer's own Python on CPU tensors for all four capabilities, and by a strict double of its "
    "launch; its kernels were not run"
)
_LAYER_EVIDENCE = (
    "emulated: the demo's layers with the kernels' PTX and the double of FlashInfer's launch; the reference against float64 (`make demo`)"
)
_WORDS = {"vector_bytes": "bytes an access", "kv_format": "rows"}


def _operation_rows(data: dict[str, Any]) -> list[tuple[str, ...]]:
    def cell(found: dict[str, Any] | None) -> str:
        if found is None:
            return 'plain PyTorch, `backend="reference"`'
        choices = "; ".join(f"{_WORDS.get(k, k)} {', '.join(map(_word, v))}" for k, v in found["choices"].items())
        return f"{found['kernels']} kernels: {choices}"

    rows: list[tuple[str, ...]] = []
    for name, found in data["operations"].items():
        evidence = ", ".join(found["evidence"]).replace("reference", "the reference, against float64 oracles")
        rows.append((f"`{name}`", *(cell(found[family]) for family in FAMILIES), evidence))
    forms = {"combined": "one table of storage rows", "segments": "two segments of slots"}
    decode = tuple(f"`{data['decode'][f]}`, {forms[data['index_form'][f]]}" for f in FAMILIES)
    rows.append(("`decode`", *decode, _DECODE_EVIDENCE))
    rows.append(("a layer of them, `SparseMLA`", "the calls in order", "the same", _LAYER_EVIDENCE))
    return rows


def _word(value: Any) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _format_rows(data: dict[str, Any]) -> list[tuple[str, ...]]:
    def cell(answer: dict[str, Any]) -> str:
        if "refused" in answer:
            return "refused"
        scale = ", one scale for each tensor" if answer["scaled"] else ""
        return f"{_ROWS[answer['format']]}, {answer['row_bytes']} B a row{scale}"

    return [(f"`{name}`", *(cell(answers[family]) for family in FAMILIES)) for name, answers in data["kv_cache_dtype"].items()]


def _scales_line() -> str:
    def names(formats: list[KVFormat]) -> str:
        return " or ".join(_ROWS[f.name] for f in formats)

    formats = list(dict.fromkeys(f for family in FAMILIES for f in formats_of(family)))
    scaled, others = [f for f in formats if f.scaled], [f for f in formats if not f.scaled]
    return (
        f"q is BF16, but E4M3 where the cache is full-row FP8. `q_scale` and `kv_scale` belong to {names(scaled)} rows only; with "
        f"{names(others)} rows\nanything but 1.0 is refused. `cute_kernels.scales` reads them from a checkpoint."
    )


def _shape_rows() -> list[tuple[str, ...]]:
    oldest = flashinfer_backend.OLDEST
    return [
        ("head size, window", f"{HEAD_DIM} and {WINDOW}"),
        ("rows and requests of a step", "any, none included; prefill, chunked prefill, decode and speculative rows in one step"),
        (
            "page rows, page strides",
            "any page rows; any page stride that is a multiple of 16 bytes and, for full rows, a whole number of rows; pools beyond "
            "2 GiB, up to 2^31 rows; see [KV layout](kv_layout.md)",
        ),
        ("state blocks", "any rows per block"),
        ("FlashInfer", f"{oldest} and later; on SM100 a CUDA graph needs 0.7.1, which takes the counter buffer from the caller"),
    ]
