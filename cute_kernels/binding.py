"""A public call with some arguments fixed: what stays between calls is checked and converted once. `ops.bind` makes them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.compiler import is_compiling

from cute_kernels import dispatch, validate
from cute_kernels.errors import InvalidArgument
from cute_kernels.forms import Form
from cute_kernels.launching import Operation
from cute_kernels.target import Target

_ABSENT = object()


class Bound:
    """A public call with some arguments fixed; see `ops.bind`.

    call  the call with the kept arguments and others, all by name
    """

    def __init__(self, call: Callable[..., Any], operation: Operation | None, kept: Mapping[str, Any]) -> None:
        self._public = call
        signature = inspect.signature(call)
        for name in kept:
            if name not in signature.parameters:
                raise InvalidArgument(name, "a value to bind", f"an argument of {call.__name__}: {', '.join(signature.parameters)}")
        self._names = tuple(name for name in signature.parameters if name not in kept)
        defaults = {name: signature.parameters[name].default for name in self._names}
        self._defaults = {n: _ABSENT if v is inspect.Parameter.empty else v for n, v in defaults.items()}
        self._kept = dict(kept)
        self._operation: Operation | None = None
        self._target: Target | None = None
        self._prepared: dict[str, Any] = {}
        self._form: Form | None = None
        self.call: Callable[..., Any] = self._plain
        tensors = {n: v for n, v in kept.items() if isinstance(v, torch.Tensor)}
        devices = {str(t.device) for t in tensors.values()}
        if len(devices) > 1:
            raise InvalidArgument(next(iter(tensors)), f"devices {', '.join(sorted(devices))}", "one device for all tensors of a call")
        on_gpu = not tensors or next(iter(tensors.values())).is_cuda
        if operation is not None and kept.get("backend") != "reference" and on_gpu:
            self._prepare(operation, tensors)

    def _prepare(self, operation: Operation, tensors: Mapping[str, torch.Tensor]) -> None:
        """Checks the kept tensors one by one and converts them for the compiled function. Without any, a call's own device counts."""
        self._operation = operation
        if tensors:
            import tvm_ffi

            device = next(iter(tensors.values())).device
            self._target = dispatch.resolve_target(device, self._kept.get("target"))
            table = {arg.name: arg for arg in operation.tensors}
            validate.check(tuple(table[n] for n in tensors), tensors, {}, device)
            tensors = validate.with_regular_empties(operation.tensors, tensors)
            # The anchor stays a torch tensor: from it TVM-FFI learns torch's current stream on each call.
            self._prepared = {n: tvm_ffi.from_dlpack(t) for n, t in tensors.items() if n != operation.anchor}
        named = [f"{name}=default_{name}" for name in self._names]
        parameters = (*(("*", *named) if named else ()), "**others")
        scope = {"compiling": is_compiling, **{f"default_{name}": value for name, value in self._defaults.items()}}
        self._form = Form(
            operation,
            self._names,
            self._slow,
            parameters=parameters,
            scope=scope,
            skip="others or compiling()",
            more="others",
            anywhere=not tensors,
        )
        self.call = self._form.call

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy is made anew from copies of what this one keeps: `call` is a function of the originals."""
        return _again, (self._public, self._kept)

    def _plain(self, **varying: Any) -> Any:
        """The public call."""
        self._require_names(varying)
        return self._public(**self._kept, **varying)

    def _require_names(self, varying: Mapping[str, Any]) -> None:
        for name in sorted(n for n, default in self._defaults.items() if default is _ABSENT and n not in varying):
            raise InvalidArgument(name, "nothing", f"a value: it is neither bound nor given to {self._public.__name__}")
        for name in sorted(varying.keys() - self._defaults.keys()):
            if name in self._kept:
                raise InvalidArgument(name, "a value", "nothing: it is bound already")
            raise InvalidArgument(name, "a value", f"an argument of {self._public.__name__}: {', '.join(self._defaults)}")

    def _slow(self, *values: Any) -> Any:
        """A call that nothing is ready for: the plain one; the next one that looks the same is ready."""
        *given, others = values
        varying = {n: v for n, v in zip(self._names, given, strict=True) if v is not _ABSENT} | others
        elsewhere = varying.get("backend") == "reference" or varying.get("target") is not None
        if is_compiling() or elsewhere:
            return self._plain(**varying)
        self._require_names(varying)
        assert self._operation is not None and self._form is not None
        a, target = {**self._kept, **varying}, self._target
        if target is None:
            anchor = a[self._operation.anchor]
            if not isinstance(anchor, torch.Tensor) or not anchor.is_cuda:
                return self._plain(**varying)
            target = dispatch.cuda_target(anchor, a.get("target"))
        return self._operation.launch(a, target, self._prepared, self._form.remembering(given, a, self._prepared))


def _again(call: Callable[..., Any], kept: Mapping[str, Any]) -> Bound:
    from cute_kernels.ops import bound

    return bound(call, **kept)
