"""PTX text → kernels, with every instruction's line kept.

The grammar covered is what NVVM and inline assembly emit: one module of entries, `.reg`, `.shared`, `.local` and `.global`
declarations, nested `{ }` scopes, labels, predicated instructions and jump tables. Anything else is a `PtxSyntaxError`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from ptx_emulator.faults import PtxSyntaxError

WIDTHS = {
    "pred": 1,
    **{f"{k}{bits}": bits for k in "bus" for bits in (8, 16, 32, 64)},
    **{"b128": 128, "f16": 16, "bf16": 16, "f16x2": 32, "bf16x2": 32, "f32": 32, "f64": 64, "f32x2": 64},
}

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_LABEL = re.compile(r"([$\w%.]+)\s*:(?!:)")
_REGISTERS = re.compile(r"(%?[\w$]+?)<(\d+)>$")
_MEMORY = re.compile(r"([%$\w.]+)\s*(?:\+\s*(-?\d+|-?0[xX][0-9a-fA-F]+))?$")
_NUMBER = re.compile(r"[-+]?(0[xX][0-9a-fA-F]+|0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}|\d+(\.\d*)?([eE][-+]?\d+)?)U?$")
_HEADER = {  # what is executed
    "version": re.compile(r"[789]\.\d+$"),
    "target": re.compile(r"sm_\d+[af]?(\s*,\s*debug)?$"),
    "address_size": re.compile("64$"),
    "file": re.compile(""),
}
_DIRECTIVES = {  # of an entry
    *("maxntid", "reqntid", "minnctapersm", "maxnctapersm", "maxnreg", "reqnctapercluster", "maxclusterrank", "explicitcluster"),
    *("noreturn", "pragma"),
}
_ARRAY = re.compile(r"(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([%$\w.]+)\s*(?:\[\s*(\d*)\s*\])?\s*(?:=\s*(.*))?$", re.S)


@dataclass(frozen=True)
class Register:
    """A virtual register; `name` is unique in its kernel, `bits` 1 for a predicate."""

    name: str
    bits: int


@dataclass(frozen=True)
class Special:
    """A read-only special register such as `%tid.x`."""

    name: str


@dataclass(frozen=True)
class Immediate:
    """A literal as written."""

    text: str


@dataclass(frozen=True)
class Symbol:
    """The name of a variable, parameter or label."""

    name: str


@dataclass(frozen=True)
class Address:
    """`[base + offset]`."""

    base: Register | Symbol | Immediate
    offset: int


@dataclass(frozen=True)
class Vector:
    """`{a, b, ...}`."""

    items: tuple[Operand, ...]


@dataclass(frozen=True)
class Pair:
    """`a|b`, two destinations."""

    first: Operand
    second: Operand


@dataclass(frozen=True)
class Negated:
    """`!p`."""

    of: Operand


Operand = Register | Special | Immediate | Symbol | Address | Vector | Pair | Negated


@dataclass(frozen=True)
class Instruction:
    """One instruction. `guard` is its predicate, `negated` whether it runs where the predicate is false."""

    line: int
    text: str
    opcode: str
    operands: tuple[Operand, ...]
    guard: Register | None = None
    negated: bool = False

    @property
    def base(self) -> str:
        """The opcode without modifiers."""
        return self.opcode.split(".", 1)[0]

    @property
    def modifiers(self) -> tuple[str, ...]:
        """Modifiers of the opcode in order, without dots."""
        return tuple(self.opcode.split(".")[1:])


@dataclass(frozen=True)
class Variable:
    """A `.shared`, `.local`, `.const` or `.global` variable; `size` is None for dynamic shared memory."""

    name: str
    space: str
    size: int | None
    align: int
    data: bytes = b""


@dataclass(frozen=True)
class Parameter:
    """One kernel parameter: its place in the parameter buffer, in bytes."""

    name: str
    offset: int
    size: int


@dataclass
class Kernel:
    """One `.entry`: parameters, directives, variables and a flat list of instructions; `labels` maps to indices into it."""

    name: str
    parameters: list[Parameter]
    directives: dict[str, tuple[int, ...]]
    variables: list[Variable] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    tables: dict[str, list[str]] = field(default_factory=dict)
    source: str = ""

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the parameter buffer."""
        return max((p.offset + p.size for p in self.parameters), default=0)


@dataclass
class Module:
    """A parsed PTX file."""

    version: str
    target: str
    kernels: dict[str, Kernel]
    variables: list[Variable]


def parse(text: str) -> Module:
    """Parse a whole PTX file; raises `PtxSyntaxError` naming the line of the first thing it does not know."""
    parser = _Parser(text)
    try:
        return parser.module()
    except (AttributeError, IndexError, KeyError, ValueError) as error:
        raise parser.fail(f"not understood ({error})") from error


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = _COMMENT.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), text.replace("\x00", ""))
        self.lines = text.split("\n")
        self.at = 0
        self.line_starts = [0, *(m.end() for m in re.finditer("\n", self.text))]

    # ---- positions and small scanners

    def line(self, at: int | None = None) -> int:
        import bisect

        return bisect.bisect_right(self.line_starts, self.at if at is None else at)

    def fail(self, message: str, at: int | None = None) -> PtxSyntaxError:
        line = self.line(at)
        return PtxSyntaxError(message, line, self.lines[line - 1])

    def skip(self) -> None:
        while self.at < len(self.text) and self.text[self.at].isspace():
            self.at += 1

    def until(self, stop: str) -> str:
        end = self.text.find(stop, self.at)
        if end < 0:
            raise self.fail(f"{stop!r} expected")
        piece, self.at = self.text[self.at : end], end + len(stop)
        return piece

    # ---- module level

    def module(self) -> Module:
        header = {"version": "", "target": ""}
        kernels: dict[str, Kernel] = {}
        variables: list[Variable] = []
        while True:
            self.skip()
            if self.at >= len(self.text):
                return Module(header["version"], header["target"], kernels, variables)
            match = re.compile(r"\.(version|target|address_size|file)\b([^\n]*)").match(self.text, self.at)
            if match:
                name, value = match.group(1), match.group(2).strip()
                if not _HEADER[name].match(value):
                    raise self.fail(f".{name} {value} is not executed")
                header[name] = value
                self.at = match.end()
                continue
            if self.text.startswith(".section", self.at):
                self.until("{")
                self.until("}")
                continue
            match = re.compile(r"(?:\.(?:visible|weak|extern)\s+)*\.(entry|func)\b").match(self.text, self.at)
            if match:
                start = self.at
                self.at = match.end()
                if match.group(1) == "func":
                    raise self.fail("device functions (.func) are not executed", start)
                kernel = self.entry()
                kernels[kernel.name] = kernel
                continue
            start = self.at
            statement = self.until(";")
            variables.append(self.variable(statement, start))

    def variable(self, statement: str, start: int) -> Variable:
        words = re.sub(r"^\s*(?:\.(?:visible|weak|extern|common)\s+)*", "", statement)
        match = re.match(r"\.(shared|local|global|const)\b\s*(?:\.attribute\([^)]*\)\s*)?(.*)", words, re.S)
        body = _ARRAY.match(match.group(2).strip()) if match else None
        if match is None or body is None:
            raise self.fail("declaration not understood", start)
        align, kind, name, length, initial = body.groups()
        width = WIDTHS[kind] // 8
        size = None if length == "" else width * int(length or 1)
        data = b""
        if initial:
            values = [int(v, 0) for v in initial.strip(" {}\n").replace("{", "").replace("}", "").split(",") if v.strip()]
            data = b"".join((v % (1 << 8 * width)).to_bytes(width, "little") for v in values)
        return Variable(name, match.group(1), size, int(align or width), data)

    def entry(self) -> Kernel:
        match = re.compile(r"\s*([$\w.]+)\s*").match(self.text, self.at)
        if match is None:
            raise self.fail("kernel name expected")
        self.at = match.end()
        parameters: list[Parameter] = []
        if self.text[self.at] == "(":
            self.at += 1
            offset = 0
            for declaration in filter(None, (d.strip() for d in self.until(")").split(","))):
                body = _ARRAY.match(
                    re.sub(r"^\.param\s+", "", re.sub(r"\.ptr(\s*\.\w+)*?(\s+\.align\s+\d+)?(?=\s+[%$\w])", "", declaration))
                )
                if body is None:
                    raise self.fail(f"parameter not understood: {declaration}")
                align, kind, name, length, _ = body.groups()
                width = WIDTHS[kind] // 8
                alignment = int(align or width)
                offset = -(-offset // alignment) * alignment
                parameters.append(Parameter(name, offset, width * int(length or 1)))
                offset += parameters[-1].size
        directives: dict[str, tuple[int, ...]] = {}
        head = self.until("{")
        for name, values in re.findall(r"\.(\w+)([^.{]*)", head):
            if name not in _DIRECTIVES:
                raise self.fail(f"directive .{name} of a kernel not understood")
            directives[name] = tuple(int(v, 0) for v in re.findall(r"\d+", values))
        kernel = Kernel(match.group(1), parameters, directives)
        _Body(self, kernel).parse()
        return kernel


class _Body:
    """Parses the statements of one entry."""

    def __init__(self, parser: _Parser, kernel: Kernel) -> None:
        self.p, self.kernel = parser, kernel
        self.scopes: list[tuple[int, dict[str, tuple[str, int]], dict[str, int]]] = [(0, {}, {})]
        self.scope_count = 0
        self.label_scopes: list[dict[str, str]] = [{}]
        self.pending: list[tuple[int, list[dict[str, str]]]] = []

    def parse(self) -> None:
        p = self.p
        while True:
            p.skip()
            if p.at >= len(p.text):
                raise p.fail("'}' expected")
            char = p.text[p.at]
            if char == "{":
                p.at += 1
                self.scope_count += 1
                self.scopes.append((self.scope_count, {}, {}))
                self.label_scopes.append(self._labels_ahead())
                continue
            if char == "}":
                p.at += 1
                self.scopes.pop()
                self.label_scopes.pop()
                if not self.scopes:
                    return
                continue
            if char == ";":
                p.at += 1
                continue
            label = _LABEL.match(p.text, p.at)
            if label:
                p.at = label.end()
                name = self.label(label.group(1))
                p.skip()
                if p.text.startswith(".branchtargets", p.at):
                    self.kernel.tables[name] = [t.strip() for t in p.until(";").split(None, 1)[1].split(",")]
                else:
                    if name in self.kernel.labels:
                        raise p.fail(f"label {label.group(1)} stands twice", label.start())
                    self.kernel.labels[name] = len(self.kernel.instructions)
                continue
            start = p.at
            if p.text.startswith((".loc ", ".loc\t", ".file "), p.at):
                p.at = p.text.find("\n", p.at)
                continue
            statement = p.until(";").strip()
            if statement.startswith("."):
                self.directive(statement, start)
            else:
                self.kernel.instructions.append(self.instruction(statement, start))

    def _labels_ahead(self) -> dict[str, str]:
        """Labels declared in the scope just opened, renamed so that two copies of one inline assembly do not collide."""
        p, depth, at, found = self.p, 1, self.p.at, {}
        for token in re.compile(r"[{}]|(?:(?<=[;{}\s])([$\w%.]+)\s*:(?!:))").finditer(p.text, at):
            if token.group() == "{":
                depth += 1
            elif token.group() == "}":
                depth -= 1
                if depth == 0:
                    break
            elif depth == 1:
                found[token.group(1)] = f"{token.group(1)}@{self.scope_count}"
        return found

    def label(self, name: str) -> str:
        for scope in reversed(self.label_scopes):
            if name in scope:
                return scope[name]
        return name

    def directive(self, statement: str, start: int) -> None:
        if statement.startswith(".reg"):
            match = re.match(r"\.reg\s*\.(\w+)\s+(.*)", statement, re.S)
            if match is None or match.group(1) not in WIDTHS:
                raise self.p.fail("register declaration not understood", start)
            bits = WIDTHS[match.group(1)]
            scope, names, ranges = self.scopes[-1]
            for name in (n.strip() for n in match.group(2).split(",")):
                many = _REGISTERS.match(name)
                if many:
                    ranges[many.group(1)] = bits
                else:
                    names[name] = (f"{name}@{scope}" if scope else name, bits)
        elif statement.startswith(".pragma"):
            return
        elif statement.startswith((".shared", ".local", ".global", ".const", ".extern")):
            self.kernel.variables.append(self.p.variable(statement, start))
        else:
            raise self.p.fail("directive not understood", start)

    def instruction(self, statement: str, start: int) -> Instruction:
        line = self.p.line(start)
        text = " ".join(statement.split())
        guard, negated, rest = None, False, text
        if rest.startswith("@"):
            word, _, rest = rest[1:].partition(" ")
            negated = word.startswith("!")
            found = self.operand(word.lstrip("!"), line)
            if not isinstance(found, Register):
                raise PtxSyntaxError("predicate expected after '@'", line, text)
            guard, rest = found, rest.strip()
        match = re.match(r"([\w.:]+)\s*(.*)", rest)
        if match is None:
            raise PtxSyntaxError("statement not understood", line, text)
        operands = tuple(self.operand(o, line) for o in _split(match.group(2)))
        return Instruction(line, text, match.group(1), operands, guard, negated)

    def operand(self, text: str, line: int) -> Operand:
        text = text.strip()
        if text.startswith("{") and text.endswith("}"):
            return Vector(tuple(self.operand(o, line) for o in _split(text[1:-1])))
        if text.startswith("[") and text.endswith("]"):
            match = _MEMORY.match(text[1:-1].strip())
            if match is None:
                raise PtxSyntaxError(f"address not understood: {text}", line)
            base = self.operand(match.group(1), line)
            if not isinstance(base, (Register, Symbol, Immediate)):
                raise PtxSyntaxError(f"address not understood: {text}", line)
            return Address(base, int(match.group(2) or "0", 0))
        if text.startswith("!"):
            return Negated(self.operand(text[1:], line))
        if "|" in text:
            first, second = text.split("|", 1)
            return Pair(self.operand(first, line), self.operand(second, line))
        if _NUMBER.match(text):
            return Immediate(text)
        found = self.register(text)
        if found is not None:
            return found
        if text.startswith("%"):
            return Special(text)
        if re.match(r"[$\w.]+$", text):
            return Symbol(self.label(text))
        raise PtxSyntaxError(f"operand not understood: {text!r}", line)

    def register(self, name: str) -> Register | None:
        prefix = name.rstrip("0123456789")
        for scope, names, ranges in reversed(self.scopes):
            if name in names:
                return Register(*names[name])
            if prefix != name and prefix in ranges:
                return Register(f"{name}@{scope}" if scope else name, ranges[prefix])
        return None


def _split(text: str) -> list[str]:
    """Split at commas outside brackets and braces."""
    parts, depth, start = [], 0, 0
    for i, char in enumerate(text):
        if char in "[{(":
            depth += 1
        elif char in "]})":
            depth -= 1
        elif char == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    tail = text[start:].strip()
    return [p.strip() for p in parts] + ([tail] if tail else [])
