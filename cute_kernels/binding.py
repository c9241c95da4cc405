"""A public call with some arguments fixed: what stays between calls is checked and converted once. `ops.bind` makes them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from cute_kernels import dispatch, env, validate
from cute_kernels.errors import InvalidArgument
from cute_kernels.kv_format import ALIGNMENT
from cute_kernels.launching import Operation, Plan
from cute_kernels.target import Target

MOST_READY = 1024


@dataclass(frozen=True)
class Ready:
    """A launch of which only the varying arguments are missing.

    kernel     the compiled function; plan: of the call
    arguments  what stays, by the compiled function's names, converted but for the anchor
    given      what stays, by the public call's names, where the call's outputs are new or varying; None: they stay, and so does `result`
    """

    kernel: Callable[..., Any]
    plan: Plan
    arguments: Mapping[str, Any]
    given: Mapping[str, Any] | None
    result: Any

    def launch(self, operation: Operation, varying: Mapping[str, Any]) -> Any:
        if self.given is None:
            self.kernel(*self.plan.ordered({**self.arguments, **varying}))
            return self.result
        outputs, result = operation.outputs({**self.given, **varying}, self.plan)
        self.kernel(*self.plan.ordered({**self.arguments, **varying, **self.plan.constants, **outputs}))
        return result


@dataclass(frozen=True)
class Form:
    """Calls that vary the same arguments.

    looks    what a plan sees of them: (argument, how to look at it)
    vectors  those whose alignment chooses the access width, where the target has more than one
    ready    launches by what was seen
    """

    looks: tuple[tuple[str, Callable[[Any], Any]], ...]
    vectors: tuple[str, ...]
    ready: dict[tuple[Any, ...], Ready] = field(default_factory=dict)

    def seen(self, varying: Mapping[str, Any]) -> tuple[Any, ...]:
        """What a plan depends on: the same for two calls means the same plan for both."""
        seen = [look(varying[name]) for name, look in self.looks]
        if self.vectors:
            seen.append(validate.vector_bytes([varying[name] for name in self.vectors]))
        return tuple(seen)


def _shape(value: Any) -> Any:
    return None if value is None else value.shape


def _layout(value: Any) -> Any:
    return None if value is None else (value.dtype, value.shape, value.stride())


def _absent(value: Any) -> bool:
    return value is None


def _value(value: Any) -> tuple[type, Any]:
    return type(value), value


class Bound:
    """A public call with some arguments fixed; see `ops.bind`.

    operation  the kernel behind the call, None without one
    """

    def __init__(self, call: Callable[..., Any], operation: Operation | None, kept: Mapping[str, Any]) -> None:
        self._call = call
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

    def __call__(self, **varying: Any) -> Any:
        """The call with the kept arguments and these, all by name."""
        form = self._forms.get(tuple(varying))
        if form is None:
            form = self._form(varying)
        operation = self._operation
        if operation is None or torch.compiler.is_compiling():
            return self._call(**{**self._given, **varying})
        try:
            ready = form.ready.get(form.seen(varying))
            if ready is not None and not env.VALIDATE.flag():
                return ready.launch(operation, varying)
        except (TypeError, ValueError, RuntimeError, AttributeError):
            pass  # an argument of another kind than before, or one that the compiled function refuses: said or served below
        return self._launch(operation, form, varying)

    def _form(self, varying: Mapping[str, Any]) -> Form:
        """The form of a call, after a check of its arguments' names."""
        for name in sorted(self._names - self._given.keys() - varying.keys()):
            raise InvalidArgument(name, "nothing", f"a value: it is neither bound nor given to {self._call.__name__}")
        for name in sorted(varying.keys() - self._names):
            raise InvalidArgument(name, "a value", f"an argument of {self._call.__name__}")
        for name in sorted(varying.keys() & self._bound):
            raise InvalidArgument(name, "a value", "nothing: it is bound already")
        looks: list[tuple[str, Callable[[Any], Any]]] = []
        vectors: tuple[str, ...] = ()
        if (operation := self._operation) is not None:
            optional = {arg.name: arg.optional for arg in operation.tensors}
            for name in varying:
                if name in operation.shapes or name in operation.layouts:
                    looks.append((name, _shape if name in operation.shapes else _layout))
                elif name not in optional and name not in operation.made:
                    looks.append((name, _value))
                elif optional.get(name, True):
                    looks.append((name, _absent))
            if self._target is not None and self._target.vector_bytes > ALIGNMENT:
                vectors = tuple(name for name in operation.vectors if name in varying)
        form = Form(tuple(looks), vectors)
        self._forms[tuple(varying)] = form
        return form

    def _launch(self, operation: Operation, form: Form, varying: Mapping[str, Any]) -> Any:
        """The plain call; the next one that looks the same is ready."""
        a = {**self._given, **varying}
        if a.get("backend") == "reference" or "target" in varying:
            return self._call(**a)
        assert self._target is not None

        def remember(kernel: Callable[..., Any], plan: Plan, outputs: Mapping[str, Any], result: Any) -> None:
            import tvm_ffi

            stay = all(name in self._bound and a[name] is not None for name in operation.made)
            arguments = {**self._given, **self._prepared, **plan.constants}
            if stay:
                arguments |= {n: tvm_ffi.from_dlpack(v) for n, v in outputs.items() if isinstance(v, torch.Tensor)}
            if len(form.ready) >= MOST_READY:
                form.ready.clear()
            again = stay and not varying.keys() & plan.constants.keys()
            form.ready[form.seen(varying)] = Ready(kernel, plan, arguments, None if again else self._given, result if stay else None)

        return operation.launch(a, self._target, self._prepared, remember)
