"""A public call with some arguments fixed: what stays between calls is checked and converted once. `ops.bind` makes them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from cute_kernels import dispatch, env, validate
from cute_kernels.compile.spec import KernelSpec
from cute_kernels.errors import InvalidArgument
from cute_kernels.kv_format import ALIGNMENT
from cute_kernels.launching import Operation, Plan
from cute_kernels.target import Target

MOST_READY = 1024


@dataclass(frozen=True)
class Ready:
    """A launch of which only the varying arguments are missing.

    kernel     the compiled function
    arguments  its arguments in order; what stays is converted but for the anchor
    places     where varying arguments go among them: (place, name)
    made       where outputs go, by the compiled function's names, if they are new or varying; None: they stay, and so does `result`
    plan       of the call; given: what stays, by the public call's names
    """

    kernel: Callable[..., Any]
    arguments: list[Any]
    places: tuple[tuple[int, str], ...]
    made: tuple[tuple[int, str], ...] | None
    plan: Plan
    given: Mapping[str, Any]
    result: Any


@dataclass(frozen=True)
class Form:
    """Calls that vary the same arguments.

    shapes  of these a plan sees the shape
    looks   what else it sees, as functions of the varying arguments
    ready   launches by what was seen, shapes first: the same for two calls means the same plan for both
    """

    shapes: tuple[str, ...]
    looks: tuple[Callable[[Mapping[str, Any]], Any], ...]
    ready: dict[tuple[Any, ...], Ready] = field(default_factory=dict)


def _shape(value: Any) -> Any:
    return None if value is None else value.shape


def _layout(value: Any) -> Any:
    return None if value is None else (value.dtype, value.shape, value.stride())


def _absent(value: Any) -> bool:
    return value is None


def _value(value: Any) -> tuple[type, Any]:
    return type(value), value


def _look(how: Callable[[Any], Any], name: str) -> Callable[[Mapping[str, Any]], Any]:
    return lambda varying: how(varying[name])


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
        if operation is None or torch.compiler.is_compiling():
            self._require_names(varying)
            return self._public(**{**self._given, **varying})
        form = self._forms.get(tuple(varying)) or self._form(operation, varying)
        try:
            seen = [varying[name].shape for name in form.shapes]
            if form.looks:
                seen += [look(varying) for look in form.looks]
            ready = form.ready.get(key := tuple(seen))
            if ready is not None and not env.VALIDATE.flag():
                arguments, result = ready.arguments.copy(), ready.result
                for place, name in ready.places:
                    arguments[place] = varying[name]
                if ready.made is not None:
                    outputs, result = operation.outputs({**ready.given, **varying}, ready.plan)
                    for place, name in ready.made:
                        arguments[place] = outputs[name]
                ready.kernel(*arguments)
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
        optional = {arg.name: arg.optional for arg in operation.tensors}
        shapes = [n for n in varying if n in operation.shapes and isinstance(varying[n], torch.Tensor)]
        looks = []
        for name in (n for n in varying if n not in shapes):
            if name in operation.shapes or name in operation.layouts:
                looks.append(_look(_shape if name in operation.shapes else _layout, name))
            elif name not in optional and name not in operation.made:
                looks.append(_look(_value, name))
            elif optional.get(name, True):
                looks.append(_look(_absent, name))
        vectors = [name for name in operation.vectors if name in varying]
        if vectors and self._target is not None and self._target.vector_bytes > ALIGNMENT:
            looks.append(lambda varying: validate.vector_bytes([varying[name] for name in vectors]))
        form = Form(tuple(shapes), tuple(looks))
        self._forms[tuple(varying)] = form
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
            names = spec.argument_names
            new = () if stay else outputs.keys()
            places = [(i, n) for i, n in enumerate(names) if n in varying and n not in plan.constants and n not in new]
            made = None if stay else tuple((i, n) for i, n in enumerate(names) if n in new)
            missing = {i for i, _ in (*places, *(made or ()))}
            arguments = [None if i in missing else known[n] for i, n in enumerate(names)]
            if len(form.ready) >= MOST_READY:
                form.ready.clear()
            given = {} if stay else self._given
            form.ready[key] = Ready(kernel, arguments, tuple(places), made, plan, given, result if stay else None)

        return operation.launch(a, self._target, self._prepared, None if key is None else remember)
