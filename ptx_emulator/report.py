"""What launches did, as text: instructions by class, bytes, and how well every global access coalesces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ptx_emulator.launch import Result

_CLASSES = {
    "memory": "ld ldu st atom red cp prefetch prefetchu",
    "synchronisation": "bar barrier mbarrier fence membar griddepcontrol nanosleep",
    "warp": "shfl vote match redux elect activemask",
    "control": "bra brx ret exit trap",
    "conversion": "cvt cvta",
    "move": "mov selp slct mapa",
    "comparison": "setp set",
    "fp32": "fma rcp rsqrt sqrt ex2 lg2 sin cos tanh",
}
_CLASS_OF = {name: group for group, names in _CLASSES.items() for name in names.split()}


def instruction_classes(results: Sequence[Result]) -> Counter[str]:
    """Executed thread instructions by class; add, mul, min and the like are told apart by their type."""
    counts: Counter[str] = Counter()
    for result in results:
        for line, (_, threads) in result.lines.items():
            text = result.texts[line].split(None, 1)[-1] if result.texts[line].startswith("@") else result.texts[line]
            opcode = text.split()[0].rstrip(";")
            base = opcode.split(".")[0]
            floating = any(part in opcode for part in (".f32", ".bf16", ".f16", ".f64"))
            counts[_CLASS_OF.get(base, "fp32" if floating else "integer")] += threads
    return counts


def report(results: Sequence[Result]) -> str:
    """Lines for people: one section per fact, for all launches together."""
    lines = [f"{len(results)} launch{'es' if len(results) != 1 else ''} of {', '.join(sorted({r.kernel[:60] for r in results}))}"]
    classes = instruction_classes(results)
    total = sum(classes.values())
    issued = sum(sum(r.warps.values()) for r in results)
    lines += ["", f"thread instructions: {total:,}" + (f"; warp instructions: {issued:,}" if issued else "")]
    lines += [f"  {name:<16}{count:>14,}  {count / max(total, 1):>6.1%}" for name, count in classes.most_common()]
    loaded, stored = sum(r.loaded for r in results), sum(r.stored for r in results)
    lines += ["", f"global memory: {loaded:,} bytes loaded, {stored:,} bytes stored"]
    accesses: dict[int, list[int]] = {}
    texts: dict[int, str] = {}
    for result in results:
        texts.update(result.texts)
        for line, row in result.accesses.items():
            total_row = accesses.setdefault(line, [0, 0, 0])
            for i, value in enumerate(row):
                total_row[i] += value
    if accesses:
        lines += [f"  {'line':>6}{'warps':>10}{'sectors':>10}{'bytes':>12}  used  access"]
        for line, (warps, sectors, nbytes) in sorted(accesses.items(), key=lambda item: -item[1][1]):
            used = min(nbytes / (32 * sectors), 1) if sectors else 0
            lines.append(f"  {line:>6}{warps:>10,}{sectors:>10,}{nbytes:>12,}  {used:>4.0%}  {texts[line][:70]}")
    executed: dict[int, int] = {}
    for result in results:
        for line, (runs, _) in result.lines.items():
            executed[line] = executed.get(line, 0) + runs
    never = [line for line, runs in executed.items() if not runs]
    lines += ["", f"PTX lines: {len(executed):,}, never executed in this case: {len(never):,}"]
    lines.append("checks: bounds, alignment, uninitialised reads, shared-memory races, barriers, launch order: no fault")
    return "\n".join(lines)
