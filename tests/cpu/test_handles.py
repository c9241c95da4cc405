"""Handles by which operators find layers, steps and tables: one for each object, for as long as it lives."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch

import cute_kernels as ck
from cute_kernels import handles
from cute_kernels.handles import held
from tests.cpu.test_layer import Model, Prompt


def step_of(rows: int) -> ck.StepMetadata:
    return ck.StepMetadata.of([rows, rows], [rows, rows])


def made() -> list[handles.Held]:
    """A layer, a step, its parts and its tables; a copy of each."""
    model, step = Model(4, "sm100", "auto"), ck.StepMetadata.of([1, 6], [9, 6])
    objects = [model.layer, step, step.decode_only(), step.prefill_only(), model.tables(step)]
    return [*objects, *map(copy.copy, objects), copy.deepcopy(model.layer), pickle.loads(pickle.dumps(objects[-1]))]


def test_each_object_has_a_handle_of_its_own():
    objects = made()
    for one in objects:
        assert one.handle.dtype == torch.int64 and one.handle.shape == () and held("layer", one.handle, type(one)) is one
    assert len({int(one.handle) for one in objects}) == len(objects)


def test_nothing_is_kept_alive():
    gc.collect()
    before = set(handles._objects)
    objects = made()
    assert len(set(handles._objects) - before) == len(objects)
    del objects
    gc.collect()
    assert set(handles._objects) <= before


def test_handles_follow_no_default_device():
    with torch.device("meta"):
        tables = ck.StepTables(torch.empty(1, 1), torch.empty(1))
    assert held("tables", tables.handle, ck.StepTables) is tables


@pytest.mark.parametrize("name", ["layer", "step", "tables"])
def test_a_dead_handle_and_one_of_another_kind_are_named(name):
    model, step = Model(1, "sm100", "auto"), step_of(3)
    alive = {"layer": model.layer, "step": step, "tables": model.tables(step)}
    given = Prompt(1, 3).rows([(0, 3), (0, 3)])
    out = torch.full((6, model.spec.padded_heads, 512), 7.0, dtype=torch.bfloat16)

    def call(**changed: torch.Tensor) -> None:
        found = {**{n: o.handle for n, o in alive.items()}, **changed}
        torch.ops.cute_kernels.sparse_mla(*found.values(), *given.values(), False, out, None, None)

    dead = step_of(1).handle
    gc.collect()
    with pytest.raises(ck.InvalidArgument, match=rf"{name}: got handle {int(dead)}, of an object that is gone, expected .*\n.*hint"):
        call(**{name: dead})
    other = alive["step" if name != "step" else "layer"]
    with pytest.raises(ck.InvalidArgument, match=f"{name}: got handle {int(other.handle)}, of a {type(other).__name__}, expected"):
        call(**{name: other.handle})
    assert bool((out == 7.0).all()) and not model.tensors["swa_cache"].any()
    call()
    assert torch.equal(out[:, : model.spec.num_heads], model.layer(step, alive["tables"], **given))


def test_tables_made_inside_a_traced_function_are_refused_there():
    model, step = Model(1, "sm100", "auto"), step_of(3)
    given = Prompt(1, 3).rows([(0, 3), (0, 3)])

    def traced(q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        return model.layer(step, model.tables(step), q, kv)

    with pytest.raises(torch._dynamo.exc.Unsupported, match="made inside the traced function"):
        torch.compile(traced, fullgraph=True, backend="aot_eager")(given["q"], given["kv"])
