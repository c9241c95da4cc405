"""What stands behind every public call that has a kernel: the path by device, checks, plan, launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cute_kernels import dispatch, env, validate
from cute_kernels.compile.spec import KernelSpec
from cute_kernels.target import Target

# The spec of a launch (None: nothing to do), its arguments by name, and what the call returns.
Plan = tuple[KernelSpec | None, Mapping[str, Any], Any]


@dataclass(frozen=True)
class Operation:
    """One kernel behind a public call.

    public     the call itself, whose signature names the arguments
    anchor     argument whose device decides, and through which TVM-FFI learns torch's current stream
    tensors    what each tensor argument must be
    vectors    those, outputs included, whose alignment chooses the access width
    check      all checks; value_check: those that read tensors
    plan       (arguments, target, vector-accessed table, widest access) -> Plan; makes the checks that the compiled function cannot
    reference  the same call in plain PyTorch
    """

    public: Callable[..., Any]
    anchor: str
    tensors: tuple[validate.Arg, ...]
    vectors: tuple[validate.Arg, ...]
    check: Callable[[Mapping[str, Any], Target | None], None]
    value_check: Callable[[Mapping[str, Any]], None]
    plan: Callable[[Mapping[str, Any], Target, tuple[validate.Arg, ...], int], Plan]
    reference: Callable[[Mapping[str, Any], Target | None], Any]

    def run(self, a: Mapping[str, Any]) -> Any:
        """Checks, then runs on the device of the anchor; with backend="reference" plain PyTorch there."""
        anchor = validate.on_cpu_or_cuda(self.anchor, a[self.anchor])
        plain = a.get("backend") == "reference"
        target = dispatch.named_target(a["target"]) if plain else dispatch.resolve_target(anchor.device, a["target"])
        if plain or anchor.device.type == "cpu":
            self.check(a, target)
            if env.VALIDATE.flag():
                self.value_check(a)
            return self.reference(a, target)
        assert target is not None
        return self.launch(a, target, self.vectors, target.vector_bytes, {})

    def launch(
        self, a: Mapping[str, Any], target: Target, vectors: tuple[validate.Arg, ...], widest: int, prepared: Mapping[str, Any]
    ) -> Any:
        """Runs the kernel; `prepared` overrides arguments by their TVM-FFI tensors."""
        from cute_kernels.compile import cache

        if env.VALIDATE.flag():
            self.check(a, target)
            self.value_check(a)
        try:
            spec, arguments, result = self.plan(a, target, vectors, widest)
        except Exception:
            self.check(a, target)  # names the argument that planning stumbled over
            if (regular := validate.with_regular_empties(self.tensors, a)) is not a:
                return self.launch(regular, target, vectors, widest, prepared)
            raise
        if spec is None:
            self.check(a, target)
            return result
        kernel = cache.get(spec)
        ordered = [prepared[n] if n in prepared else arguments[n] for n in spec.argument_names]
        try:
            kernel(*ordered)
        except (TypeError, ValueError, RuntimeError):
            self.check(a, target)
            if (regular := validate.with_regular_empties(self.tensors, a)) is not a:
                return self.launch(regular, target, vectors, widest, prepared)
            raise
        return result


def reference_call(name: str, a: Mapping[str, Any], **more: Any) -> Any:
    """The reference's function `name` with a public call's arguments."""
    from cute_kernels import reference

    function = getattr(reference, name)
    given = {key: value for key, value in a.items() if key not in ("target", "backend")}
    return function(**given, **more)
