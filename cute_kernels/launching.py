"""What stands behind every public call that has a kernel: the path by device, checks, plan, launch.

A call's plan depends on a few facts (scalars, formats, which extents agree), never on how many rows a step has; so it is made once
for each combination of them and remembered. All else that could be wrong the compiled function refuses, on every call.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from cute_kernels import dispatch, env, validate
from cute_kernels.compile import cache
from cute_kernels.compile.spec import KernelSpec
from cute_kernels.forms import Form, Launched
from cute_kernels.target import Target

_NOTHING: Mapping[str, Any] = {}
_validating = env.VALIDATE.flag


class Refused(Exception):
    """Facts that no kernel serves: `Operation.check` says which argument is at fault."""


@dataclass(frozen=True)
class Plan:
    """What all calls of the same facts launch.

    target     what it is for
    specs      the kernel by access width: 16 bytes and, where target and facts allow it, 32; empty: there is nothing to launch
    constants  scalar arguments of the compiled function by name
    size       of the outputs, where the operation makes them: compressed columns, padded heads
    ordered    picks the compiled function's arguments, in order, from arguments by name
    """

    target: Target
    specs: tuple[KernelSpec, ...]
    constants: Mapping[str, Any]
    size: int
    ordered: Callable[[Mapping[str, Any]], tuple[Any, ...]]

    @staticmethod
    def of(spec: KernelSpec, constants: Mapping[str, Any], *, rows: bool, size: int = 0, widest: int = 32) -> Plan:
        """The plan around `spec`, whose access width is a call's to choose, up to `widest`; rows False: nothing to launch."""
        widths = (16, 32) if min(widest, spec.target.vector_bytes) == 32 else (16,)
        specs = tuple(replace(spec, vector_bytes=width) for width in widths)
        return Plan(spec.target, specs if rows else (), constants, size, operator.itemgetter(*spec.argument_names))


@dataclass(frozen=True)
class Operation:
    """One kernel behind a public call.

    public     the call itself, whose signature names the arguments
    anchor     argument whose device decides, and through which TVM-FFI learns torch's current stream
    tensors    what each tensor argument must be
    vectors    arguments of the compiled function that are accessed by vectors: where a plan has two widths, their addresses choose;
    strided    those of them whose strides choose too, as `facts` does not see them
    check      all checks; value_check: those that read tensors
    facts      all that planning looks at, as the arguments of `plan` after the target; the same for steps of any size
    shapes     tensors of which `facts` sees the shape at most; layouts: those of which it sees dtype and strides too. Of other
               tensors it sees whether they are None
    plan       (target's name, *facts) -> Plan, remembered; makes the checks that the compiled function cannot
    made       arguments that the call returns, or makes where they are None
    outputs    (arguments, plan) -> those of them that the compiled function takes, by its names, and what the call returns; None: nothing
    reference  the same call in plain PyTorch
    absent     optional arguments for which the compiled function takes something else, by device, and always the same
    """

    public: Callable[..., Any]
    anchor: str
    tensors: tuple[validate.Arg, ...]
    vectors: tuple[str, ...]
    strided: tuple[str, ...]
    check: Callable[[Mapping[str, Any], Target | None], None]
    value_check: Callable[[Mapping[str, Any]], None]
    facts: Callable[[Mapping[str, Any]], tuple[Any, ...]]
    shapes: tuple[str, ...]
    layouts: tuple[str, ...]
    plan: Callable[..., Plan]
    made: tuple[str, ...]
    outputs: Callable[[Mapping[str, Any], Plan], tuple[Mapping[str, Any], Any]] | None
    reference: Callable[[Mapping[str, Any], Target | None], Any]
    absent: Mapping[str, Callable[[torch.device], torch.Tensor]] = field(default_factory=dict)

    @functools.cached_property
    def form(self) -> Form:
        """The public call itself, all of whose arguments vary. `serve` is looked up on each call, so that it can be replaced."""
        return Form(self, tuple(inspect.signature(self.public).parameters), lambda *values: self.serve(*values), anywhere=True)

    @functools.cached_property
    def run(self) -> Callable[..., Any]:
        """The public call's body, given its arguments in order: a ready launch, or `serve`."""
        return self.form.call

    def serve(self, *values: Any) -> Any:
        """Checks, then runs on the device of the anchor; with backend="reference" plain PyTorch there. The next launch is ready."""
        a = dict(zip(self.form.names, values, strict=True))
        anchor, plain = a[self.anchor], a.get("backend") == "reference"
        if isinstance(anchor, torch.Tensor) and anchor.is_cuda and not plain:
            return self.launch(a, dispatch.cuda_target(anchor, a["target"]), _NOTHING, self.form.remembering(values, a, _NOTHING))
        validate.on_cpu_or_cuda(self.anchor, anchor)
        target = dispatch.named_target(a["target"]) if plain else dispatch.resolve_target(anchor.device, a["target"])
        self.check(a, target)
        if _validating():
            self.value_check(a)
        return self.reference(a, target)

    def launch(
        self,
        a: Mapping[str, Any],
        target: Target,
        prepared: Mapping[str, Any] = _NOTHING,
        remember: Callable[[Launched], None] | None = None,
    ) -> Any:
        """Runs the kernel; `prepared` overrides arguments by their TVM-FFI tensors, `remember` is told what was launched."""
        if _validating():
            self.check(a, target)
            self.value_check(a)
        try:
            plan = self.plan(target.name, *self.facts(a))
            outputs, result = _NOTHING, None
            if self.outputs is not None:
                outputs, result = self.outputs(a, plan)
            arguments = {**a, **plan.constants, **outputs, **self.substitutes(a)}
            # Where there is one access width the compiled function checks the alignment.
            spec = plan.specs[0] if len(plan.specs) == 1 else self._widest(plan, arguments)
        except Exception:
            if (regular := self._regular(a, target)) is None:
                raise
            return self.launch(regular, target, prepared)
        if spec is None:
            self.check(a, target)
            return result
        kernel = cache.get(spec)
        try:
            kernel(*plan.ordered({**arguments, **prepared} if prepared else arguments))
        except (TypeError, ValueError, RuntimeError):
            if (regular := self._regular(a, target)) is None:
                raise
            return self.launch(regular, target, prepared)
        if remember is not None:
            remember(Launched(kernel, plan, spec, outputs, result))
        return result

    def substitutes(self, a: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
        """What the compiled function gets for arguments that are absent."""
        return {name: make(a[self.anchor].device) for name, make in self.absent.items() if a[name] is None}

    def _widest(self, plan: Plan, arguments: Mapping[str, Any]) -> KernelSpec | None:
        """The kernel of the widest access that the arguments' alignment allows; None where there is nothing to launch."""
        if not plan.specs:
            return None
        addresses, strided = ([arguments[n] for n in names if n in arguments] for names in (self.vectors, self.strided))
        return plan.specs[validate.vector_bytes(addresses, strided) // 32]

    def _regular(self, a: Mapping[str, Any], target: Target) -> Mapping[str, Any] | None:
        """After a refusal: the typed error of the argument at fault, else `a` with regular strides for empty tables, if it has others."""
        self.check(a, target)
        regular = validate.with_regular_empties(self.tensors, a)
        return None if regular is a else regular


def reference_call(name: str, a: Mapping[str, Any], **more: Any) -> Any:
    """The reference's function `name` with a public call's arguments."""
    from cute_kernels import reference

    function = getattr(reference, name)
    given = {key: value for key, value in a.items() if key not in ("target", "backend", "independent", "scratch")}
    return function(**given, **more)
