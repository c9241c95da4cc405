"""A public call with some arguments fixed: what stays between calls is checked and converted once. `ops.bind` makes them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.compiler import is_compiling

from cute_kernels import dispatch, env, validate
from cute_kernels.compile.spec import KernelSpec
from cute_kernels.errors import InvalidArgument
from cute_kernels.kv_format import ALIGNMENT
from cute_kernels.launching import Operation, Plan
from cute_kernels.target import Target

MOST_FORMS, MOST_READY = 64, 1024
_validating = env.VALIDATE.flag


class Ready(NamedTuple):
    """A launch of which only the varying arguments are missing.

    kernel     the compiled function
    arguments  its arguments in order; what stays is converted but for the anchor
    places     where varying arguments go among them: (place, name)
    result     what the call returns, where outputs stay
    outputs    None where they stay
    """

    kernel: Callable[..., Any]
    arguments: list[Any]
    places: tuple[tuple[int, str], ...]
    result: Any
    outputs: Outputs | None


class Outputs(NamedTuple):
    """Outputs that are new, or varying, on each call.

    places  where they go among the compiled function's arguments: (place, name)
    plan    of the call
    given   what stays, by the public call's names
    """

    places: tuple[tuple[int, str], ...]
    plan: Plan
    given: Mapping[str, Any]


@dataclass(frozen=True)
class Form:
    """Calls that vary the same arguments.

    shapes    of these a plan sees the shape; optional: of these, whether they are None
    looks     what else it sees, as functions of the varying arguments
    ready     launches by what was seen, in this order: the same for two calls means the same plan for both
    """

    shapes: tuple[str, ...]
    optional: tuple[str, ...]
    looks: tuple[Callable[[Mapping[str, Any]], Any], ...]
    ready: dict[tuple[Any, ...], Ready] = field(default_factory=dict)


def _layout(name: str) -> Callable[[Mapping[str, Any]], Any]:
    """Sees all of a tensor but its address."""

    def look(varying: Mapping[str, Any]) -> Any:
        value = varying[name]
        return None if value is None else (value.dtype, value.shape, value.stride())

    return look


def _value(name: str) -> Callable[[Mapping[str, Any]], Any]:
    """Sees a scalar."""
    return lambda varying: (type(varying[name]), varying[name])


class Bound:
    """A public call with some arguments fixed; see `ops.bind`.

    operation  the kernel behind the call, None without one
    """

    def __init__(self, call: Callable[..., Any], operation: Operation | None, kept: Mapping[str, Any]) -> None:
        self._public = call
        signature = inspect.signature(call)
        for name in kept:
            if name not in signature.parameters:
                raise InvalidArgument(name, "a value to bind", f"an argument of {call.__name__}: {', '.join(signature.parameters)}")
        defaults = {n: p.default for n, p in signature.parameters.items() if p.default is not inspect.Parameter.empty}
        self._names = frozenset(signature.parameters)
        self._bound = frozenset(kept)
        self._given = {**defaults, **kept}
        self._forms: dict[tuple[str, ...], Form] = {}
        self._operation: Operation | None = None
        self._target: Target | None = None
        self._prepared: dict[str, Any] = {}
        tensors = {n: v for n, v in kept.items() if isinstance(v, torch.Tensor)}
        devices = {str(t.device) for t in tensors.values()}
        if len(devices) > 1:
            raise InvalidArgument(next(iter(tensors)), f"devices {', '.join(sorted(devices))}", "one device for all tensors of a call")
        if operation is not None and kept.get("backend") != "reference" and devices and next(iter(tensors.values())).device.type == "cuda":
            self._prepare(operation, tensors)

    def _prepare(self, operation: Operation, tensors: Mapping[str, torch.Tensor]) -> None:
        """Checks the kept tensors one by one and converts them for the compiled function."""
        import tvm_ffi

        device = next(iter(tensors.values())).device
        self._operation, self._target = operation, dispatch.resolve_target(device, self._given.get("target"))
        table = {arg.name: arg for arg in operation.tensors}
        validate.check(tuple(table[n] for n in tensors), tensors, {}, device)
        tensors = validate.with_regular_empties(operation.tensors, tensors)
        # The anchor stays a torch tensor: from it TVM-FFI learns torch's current stream on each call.
        self._prepared = {n: tvm_ffi.from_dlpack(t) for n, t in tensors.items() if n != operation.anchor}

    def call(self, **varying: Any) -> Any:
        """The call with the kept arguments and these, all by name."""
        operation, key = self._operation, None
        if operation is None or is_compiling():
            self._require_names(varying)
            return self._public(**{**self._given, **varying})
        form = self._forms.get(tuple(varying)) or self._form(operation, varying)
        try:
            seen: list[Any] = [varying[name].shape for name in form.shapes]
            if form.optional:
                seen += [varying[name] is None for name in form.optional]
            if form.looks:
                seen += [look(varying) for look in form.looks]
            ready = form.ready.get(key := tuple(seen))
            if ready is not None and not _validating():
                kernel, arguments, places, result, outputs = ready
                arguments = arguments.copy()
                for place, name in places:
                    arguments[place] = varying[name]
                if outputs is not None and operation.outputs is not None:
                    made, result = operation.outputs({**outputs.given, **varying}, outputs.plan)
                    for place, name in outputs.places:
                        arguments[place] = made[name]
                kernel(*arguments)
                return result
        except (TypeError, ValueError, RuntimeError, AttributeError):
            pass  # an argument of another kind than before, or one that the compiled function refuses: said or served below
        return self._launch(operation, form, key, varying)

    def _require_names(self, varying: Mapping[str, Any]) -> None:
        for name in sorted(self._names - self._given.keys() - varying.keys()):
            raise InvalidArgument(name, "nothing", f"a value: it is neither bound nor given to {self._public.__name__}")
        for name in sorted(varying.keys() - self._names):
            raise InvalidArgument(name, "a value", f"an argument of {self._public.__name__}")
        for name in sorted(varying.keys() & self._bound):
            raise InvalidArgument(name, "a value", "nothing: it is bound already")

    def _form(self, operation: Operation, varying: Mapping[str, Any]) -> Form:
        """The form of a call, after a check of its arguments' names."""
        self._require_names(varying)
        rules = {arg.name: arg.optional for arg in operation.tensors}
        shapes = [n for n in varying if n in operation.shapes and isinstance(varying[n], torch.Tensor)]
        rest = [n for n in varying if n not in shapes]
        layouts = [n for n in rest if n in operation.shapes or n in operation.layouts]
        scalars = [n for n in rest if n not in rules and n not in operation.made]
        optional = [n for n in rest if n not in layouts and n not in scalars and rules.get(n, True)]
        looks = [*map(_layout, layouts), *map(_value, scalars)]
        vectors = [n for n in operation.vectors if n in varying]
        if vectors and self._target is not None and self._target.vector_bytes > ALIGNMENT:
            # Strides are left to the compiled function: one refusal, and the narrower kernel is remembered instead.
            looks.append(lambda varying: validate.vector_bytes([varying[n] for n in vectors]))
        if len(self._forms) >= MOST_FORMS:
            self._forms.clear()
        form = self._forms[tuple(varying)] = Form(tuple(shapes), tuple(optional), tuple(looks))
        return form

    def _launch(self, operation: Operation, form: Form, key: tuple[Any, ...] | None, varying: Mapping[str, Any]) -> Any:
        """The plain call; the next one that looks the same is ready."""
        a = {**self._given, **varying}
        if a.get("backend") == "reference" or "target" in varying:
            return self._public(**a)
        assert self._target is not None

        def remember(kernel: Callable[..., Any], plan: Plan, spec: KernelSpec, outputs: Mapping[str, Any], result: Any) -> None:
            import tvm_ffi

            assert key is not None
            stay = all(name in self._bound and a[name] is not None for name in operation.made)
            known = {**a, **self._prepared, **plan.constants, **outputs}
            if stay:
                known |= {n: tvm_ffi.from_dlpack(v) for n, v in outputs.items() if isinstance(v, torch.Tensor)}
            new = () if stay else outputs.keys()
            names = list(enumerate(spec.argument_names))
            places = tuple((i, n) for i, n in names if n in varying and n not in plan.constants and n not in new)
            made = tuple((i, n) for i, n in names if n in new)
            missing = {i for i, _ in (*places, *made)}
            arguments = [None if i in missing else known[n] for i, n in names]
            if len(form.ready) >= MOST_READY:
                form.ready.clear()
            kept = (result, None) if stay else (None, Outputs(made, plan, self._given))
            form.ready[key] = Ready(kernel, arguments, places, *kept)

        return operation.launch(a, self._target, self._prepared, None if key is None else remember)
