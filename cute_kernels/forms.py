"""What calls with the same arguments have in common, and launches made ready for them.

A call's plan depends on a few facts about its arguments. A `Form` stands for calls that give the same arguments by name: it sees
just so much of their values that equal sights mean equal plans and equal new outputs, and keeps for each sight a function of these
values that launches. Both are written as source text, which is compiled once however many layers and lengths of steps there are: loops
over names would take longer than all that the compiled function does before it launches.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from cute_kernels import env, validate
from cute_kernels.compile import loader

if TYPE_CHECKING:
    from cute_kernels.compile.spec import KernelSpec
    from cute_kernels.launching import Operation, Plan

MOST_READY = 1024  # launches of a form; then all are forgotten, and made again as they are asked for
# What a call raises whose arguments are of another kind than the remembered ones, or are refused by the compiled function.
REFUSALS = (TypeError, ValueError, RuntimeError, AttributeError, KeyError)
_NOTHING: Mapping[str, Any] = {}
# What the code that torch.compile generates makes tensors of the current device with: it parses less than `new_empty`. Torch promises
# it to nobody, hence the other way where it is missing.
_new_cuda = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "_empty_strided_cuda", None)
Launch = Callable[..., Any]


class Launched(NamedTuple):
    """A launch that has been made: the compiled function, its plan and spec, outputs by its argument names, what the call returned."""

    kernel: Launch
    plan: Plan
    spec: KernelSpec
    outputs: Mapping[str, Any]
    result: Any


class Form:
    """The calls of one operation in which the arguments `names` vary.

    call   a call: a ready launch where there is one, else `slow`
    seen   from the arguments' values, in order, to all of them that a plan sees
    ready  launches, functions of the same values, by what was seen
    """

    def __init__(
        self,
        operation: Operation,
        names: Sequence[str],
        slow: Callable[..., Any],
        *,
        parameters: Sequence[str] = (),
        scope: Mapping[str, Any] = _NOTHING,
        skip: str = "False",
        more: str = "",
        anywhere: bool = False,
    ) -> None:
        """slow: takes the values in order.

        parameters  of `call` as source text, if other than the names; what they refer to is in `scope`
        skip, more  source texts: a condition under which `call` goes straight to `slow`, and what that gets besides
        anywhere    device, and executor of kernels, may differ from call to call
        """
        self.operation, self.names = operation, tuple(names)
        self.ready: dict[tuple[Any, ...], Launch] = {}
        looks = [f"{operation.anchor}.device", "executor()"] if anywhere else []
        looks += [look for name in names for look in _looks(operation, name)]
        sight, values = f"({''.join(f'{look}, ' for look in looks)})", "".join(f"{name}, " for name in names)
        body = (
            f"if not ({skip}):",
            "    try:",
            f"        launch = get({sight})",
            "        if launch is not None and not validating():",
            f"            return launch({values})",
            "    except REFUSALS:",
            "        pass",  # an argument of another kind than before, or one that the compiled function refuses: said or served below
            f"return slow({values}{more})",
        )
        own = {"get": self.ready.get, "executor": loader.executor, "validating": env.VALIDATE.flag, "REFUSALS": REFUSALS, "slow": slow}
        self.call = _function(operation.public.__name__, parameters or names, body, {**own, **scope})
        self.seen = _function("seen", names, [f"return {sight}"], own)

    def key(self, values: Sequence[Any]) -> tuple[Any, ...] | None:
        """What is seen of the values; None where one is of a kind that cannot be seen."""
        try:
            key: tuple[Any, ...] = self.seen(*values)
            hash(key)
        except REFUSALS:
            return None
        return key

    def remembering(self, values: Sequence[Any], given: Mapping[str, Any], kept: Mapping[str, Any]) -> Callable[[Launched], None] | None:
        """`remember` for a call with these values; None where they cannot be seen."""
        key = self.key(values)
        return None if key is None else functools.partial(self.remember, key, given, kept)

    def remember(self, key: tuple[Any, ...], given: Mapping[str, Any], kept: Mapping[str, Any], launched: Launched) -> None:
        """Makes a launch ready for calls that look the same.

        given  all arguments of the call
        kept   those that stay, as the compiled function takes them
        """
        if len(self.ready) >= MOST_READY:
            self.ready.clear()
        writer = _Writer(self, given, kept, launched)
        made = writer.launch()
        if len(launched.plan.specs) > 1:
            before = self.ready.get(key)
            if isinstance(before, _ByWidth):
                addresses, launches = before.addresses, before.launches
            else:
                text = f"return ({''.join(f'{x}, ' for x in writer.varying_vectors())})"
                addresses, launches = _function("addresses", self.names, [text], {}), {}
            width = validate.vector_bytes(addresses(*(given[name] for name in self.names)))
            made = _ByWidth(addresses, {**launches, width: made})
        self.ready[key] = made


@dataclasses.dataclass(frozen=True)
class _ByWidth:
    """Launches by the access width that the addresses of what varies allow; `KeyError` where there is none yet.

    Strides are left to the compiled function: one refusal, and the launch of the narrower kernel takes the place.
    """

    addresses: Callable[..., tuple[torch.Tensor | None, ...]]
    launches: Mapping[int, Launch]

    def __call__(self, *values: Any) -> Any:
        return self.launches[validate.vector_bytes(self.addresses(*values))](*values)


def _function(name: str, parameters: Sequence[str], body: Sequence[str], scope: Mapping[str, Any]) -> Launch:
    """A function of `parameters` from the lines of its body, which may use what is in `scope`."""
    found = dict(scope)
    exec(_code(f"def {name}({', '.join(parameters)}):\n" + "".join(f"    {line}\n" for line in body)), found)
    function: Launch = found[name]
    return function


@functools.lru_cache(maxsize=1024)
def _code(text: str) -> types.CodeType:
    """Compiled source: what differs from layer to layer and from step to step, shapes too, is in a function's scope, not in its text."""
    return compile(text, "<forms>", "exec")


# What is seen of arguments that are neither tensors nor numbers: their own hash is a function in Python, which takes longer.
_GEOMETRY = "({0}.pages, {0}.page_rows, {0}.span)"
_OBJECTS = {
    "save": ("save.rollback", "save.prefix_stride", "save.every_row"),
    "source": ("source._name_",),
    "target": ("target if target is None or target.__class__ is str else target.name",),
    "window": (_GEOMETRY.format("window"),),
    "compressed": (f"compressed and {_GEOMETRY.format('compressed')}",),
}


def _looks(operation: Operation, name: str) -> Iterator[str]:
    """Expressions of what plans see of an argument."""
    optional = {arg.name: arg.optional or name in operation.made for arg in operation.tensors}
    if name in operation.layouts:
        look = f"({name}.dtype, {name}.shape, {name}.stride())"
    elif name in operation.made and name in optional:
        look = f"({name}.shape, {name}.stride())"  # the compiled function knows the dtype
    elif name in operation.made:
        look = f"{name}.layout()"
    elif name in operation.shapes:
        look = f"{name}.shape"
    elif name in optional:
        if optional[name]:
            yield f"{name} is None"
        return
    else:
        yield from _OBJECTS.get(name, (f"{name}.__class__", name))  # the class, since True == 1 == 1.0
        return
    yield f"None if {name} is None else {look}" if optional.get(name, True) else look


class _Writer:
    """Writes the function that repeats a launch for other values of the arguments that vary.

    Each argument of the compiled function, and what the call returns, is an expression: a varying argument or a part of one, a new
    tensor, or what stays. A new tensor has the same shape for all calls that look the same.
    """

    def __init__(self, form: Form, given: Mapping[str, Any], kept: Mapping[str, Any], launched: Launched) -> None:
        self.form, self.given, self.kept, self.launched = form, given, kept, launched
        self.substitutes = form.operation.substitutes(given)
        self.scope: dict[str, Any] = {"kernel": launched.kernel}
        self.body: list[str] = []
        self.known = {id(v): e for name in form.names if name in form.operation.made for e, v in _parts(name, given[name])}
        stay = {id(v) for name in form.operation.made if name not in form.names for _, v in _parts(name, given[name])}
        outputs = {name: value for name, value in launched.outputs.items() if value is not None}  # None: the form of table has no such part
        self.outputs = {name: self.output(value, id(value) in stay) for name, value in outputs.items()}

    def constant(self, value: Any) -> str:
        name = f"c{len(self.scope)}"
        self.scope[name] = value
        return name

    def output(self, tensor: torch.Tensor, stays: bool) -> str:
        """An output of the compiled function: given on each call, kept, or made on each call."""
        if id(tensor) in self.known:
            return self.known[id(tensor)]
        if stays:
            import tvm_ffi

            return self.constant(tvm_ffi.from_dlpack(tensor))
        name = self.known[id(tensor)] = f"o{len(self.body)}"
        source = torch.empty(0, dtype=tensor.dtype, device=tensor.device)  # from which torch makes others faster than from nothing
        layout = f"{self.constant(tuple(tensor.shape))}, {self.constant(tensor.stride())}"
        new = f"{self.constant(source.new_empty_strided)}({layout})"
        if tensor.is_cuda and _new_cuda is not None:
            fast = f"{self.constant(_new_cuda)}({layout}, {self.constant(tensor.dtype)})"
            new = f"{fast} if {self.constant(torch._C._cuda_getDevice)}() == {tensor.get_device()} else {new}"
        self.body.append(f"{name} = {new}")
        return name

    def argument(self, name: str) -> str:
        """An argument of the compiled function."""
        constants = self.launched.plan.constants
        if name in constants:
            return self.constant(constants[name])
        if name in self.outputs:
            return self.outputs[name]
        if name in self.substitutes:
            import tvm_ffi

            return self.constant(tvm_ffi.from_dlpack(self.substitutes[name]))
        return name if name in self.form.names else self.constant(self.kept.get(name, self.given.get(name)))

    def varying_vectors(self) -> list[str]:
        """What is accessed by vectors and neither kept nor new."""
        names = [n for n in self.form.operation.vectors if n in self.launched.spec.argument_names]
        found = [self.argument(n) for n in names]
        return [e for e in found if e.partition(".")[0] in self.form.names]

    def result(self, value: Any) -> str:
        """What the call returns."""
        if id(value) in self.known:
            return self.known[id(value)]
        if isinstance(value, tuple):
            return f"({''.join(f'{self.result(part)}, ' for part in value)})"
        if dataclasses.is_dataclass(value) and any(id(part) in self.known for part in vars(value).values()):
            return f"{self.constant(type(value))}({', '.join(self.result(part) for part in vars(value).values())})"
        return self.constant(value)

    def launch(self) -> Launch:
        arguments = [self.argument(name) for name in self.launched.spec.argument_names]
        body = [*self.body, f"kernel({', '.join(arguments)})", f"return {self.result(self.launched.result)}"]
        return _function("launch", self.form.names, body, self.scope)


def _parts(expression: str, value: Any) -> Iterator[tuple[str, Any]]:
    """An argument and, where it holds several tensors, these."""
    if value is not None:
        yield expression, value
    if dataclasses.is_dataclass(value):
        yield from ((f"{expression}.{field}", part) for field, part in vars(value).items() if part is not None)
