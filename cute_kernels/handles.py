"""Numbers under which an operator finds Python objects: torch's operators take tensors and numbers only."""

from __future__ import annotations

import itertools
import weakref
from typing import Any, TypeVar

import torch

from cute_kernels.errors import InvalidArgument

Kind = TypeVar("Kind", bound="Held")

_numbers = itertools.count(1)
_objects: weakref.WeakValueDictionary[int, Held] = weakref.WeakValueDictionary()


class Held:
    """An object with a handle, which `held` turns back into the object for as long as it lives.

    handle   int64 [] on the CPU, however the object came to be; a copy has one of its own. A tensor, since a traced graph takes
             it as an input: a Python int would be compared or built in, and make a graph of its own for each layer or step.
             None where the object is made inside a traced function: there is no object yet.
    """

    handle: torch.Tensor | None = None

    def __new__(cls: type[Kind], *arguments: object, **keywords: object) -> Kind:
        self = super().__new__(cls)
        if not torch.compiler.is_compiling():
            number = next(_numbers)
            self.handle = torch.tensor(number, dtype=torch.int64, device="cpu")
            _objects[number] = self
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({**state, "handle": self.handle})


def handle_of(name: str, value: Held) -> torch.Tensor:
    """The handle to give to an operator; `InvalidArgument` that names the argument where there is none."""
    if value.handle is None:
        raise InvalidArgument(name, f"a {type(value).__name__} made inside the traced function", "one made before it is called")
    return value.handle


def held(name: str, handle: torch.Tensor, kind: type[Kind]) -> Kind:
    """The object of a handle; `InvalidArgument` that names the argument where it is gone or is no `kind`."""
    found = _objects.get(int(handle))
    if not isinstance(found, kind):
        got = f"handle {int(handle)}, of " + ("an object that is gone" if found is None else f"a {type(found).__name__}")
        hint = "keep the layer, step and tables of a traced call alive until it has run"
        raise InvalidArgument(name, got, f"the handle of a live {kind.__name__}", hint=hint)
    return found
