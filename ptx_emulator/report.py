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


def checked(results: Sequence[Result]) -> list[str]:
    """What the emulator had to judge in these launches."""
    opcodes = {name for r in results for name, count in r.opcodes.items() if count}
    texts = [text for r in results for line, text in r.texts.items() if r.lines[line][0]]

    def executed(*parts: str) -> bool:
        return any(part in text for text in texts for part in parts)

    races = all(r.races for r in results)
    made = {
        "bounds and alignment": True,
        "uninitialised reads": True,
        "read-only tensors": any(r.read_only for r in results),
        "owned rows": any(r.owned for r in results),
        "outputs read before they are written": any(r.unwritten for r in results),
        "shared-memory races": races and executed("shared"),
        "proxy fences": races and executed("cp.async.bulk.shared", "cp.async.bulk.global.shared"),
        "mbarriers": "mbarrier" in opcodes,
        "conflicts in global memory": races and any(r.stored for r in results),
        "barriers": bool(opcodes & {"bar", "barrier"}),
        "remote shared memory": executed("shared::cluster", "mapa"),
        "member masks": bool(opcodes & {"shfl", "vote", "match", "redux", "elect"}),
        "griddepcontrol.wait": all(r.pdl and not r.independent for r in results),
        "griddepcontrol.wait before the grid ends": all(r.pdl for r in results) and any(r.independent for r in results),
    }
    return [what for what, done in made.items() if done]


def report(results: Sequence[Result], *, never: bool = False) -> str:
    """Lines for people: one section per fact, for all launches together; with `never`, instructions that nobody executed are listed."""
    lines = [f"{len(results)} launch{'es' if len(results) != 1 else ''} of {', '.join(sorted({r.kernel for r in results}))}"]
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
            used = nbytes / (32 * sectors) if sectors else 0  # above 100%: several threads of a warp use the same bytes
            lines.append(f"  {line:>6}{warps:>10,}{sectors:>10,}{nbytes:>12,}  {used:>4.0%}  {texts[line][:70]}")
    executed: dict[int, int] = {}
    for result in results:
        for line, (runs, _) in result.lines.items():
            executed[line] = executed.get(line, 0) + runs
    unreached = sorted(line for line, runs in executed.items() if not runs)
    lines += ["", f"PTX instructions: {len(executed):,}, never executed in this case: {len(unreached):,}"]
    if never:
        lines += [f"  {line:>6}  {texts[line][:100]}" for line in unreached]
    lines.append(f"checks: {', '.join(checked(results))}: no fault")
    return "\n".join(lines)
