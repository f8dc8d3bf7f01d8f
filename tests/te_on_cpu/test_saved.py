"""What TransformerEngine's modules save, and which of it `offload` moves."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from internals.references import assert_references_flat
from oracle import Saves, leaf
from torch import Tensor

import actckpt
from te_on_cpu import training
from te_on_cpu.methods import METHODS
from te_on_cpu.training import HIDDEN


def _moved(run: Callable[[], Any]) -> int:
    actckpt.reset_stats()
    with actckpt.offload(min_bytes=0):
        y = run()
    del y
    return actckpt.stats().offloaded_bytes


def test_parameters_marked_tensors_and_casts_of_weights_stay(te: Any) -> None:
    class Saving(te.Linear):  # type: ignore[misc]
        def forward(self, x: Any, *saved: Any) -> Any:
            return torch.stack([Saves.apply(x, tensor) for tensor in saved])

    recipe, x = training.make_recipe("current"), leaf(3, 5)
    layer = Saving(HIDDEN, HIDDEN)
    cast = SimpleNamespace(_data=torch.randn(3, 5).to(torch.int8), _rowwise_scale_inv=torch.randn(7))
    layer._fp8_workspaces["weight"] = cast
    marked = torch.randn(3, 5)
    marked._TE_do_not_offload = True  # type: ignore[attr-defined]
    assert _moved(lambda: layer(x, torch.randn(3, 5), torch.randn(3, 5))) == 2 * 3 * 5 * 4
    for stays in (
        layer.weight[:3, :5],
        layer.weight.detach()[:3, :5],
        marked,
        cast._data,
        cast._data.view(5, 3).T,
        cast._rowwise_scale_inv[:5],
    ):
        assert _moved(lambda stays=stays: layer(x, stays)) == 0
    with training.quantized_parameters(te, recipe):
        layer = Saving(HIDDEN, HIDDEN)
    assert _moved(lambda: layer(x, layer.weight._data[:3, :5])) == 0


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_parts_of_quantized_inputs_are_moved_and_casts_of_weights_stay(te: Any, recipe: str) -> None:
    layer, recipe_, saved = te.Linear(HIDDEN, 8 * HIDDEN), training.make_recipe(recipe), []

    def run(**options: Any) -> Any:
        with te.autocast(True, recipe=recipe_):
            return layer(training.make_input(torch.float32, 1), **options)

    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append((type(t), t.dtype)) or t, lambda t: t):
        run()
    assert (Tensor, torch.uint8) in saved and (Tensor, torch.float32) in saved
    for options in ({}, {"is_first_microbatch": True}, {"is_first_microbatch": False}):
        moved = _moved(lambda options=options: run(**options))
        assert 16 * HIDDEN <= moved < 8 * HIDDEN * HIDDEN, "the quantized input, and scales: no cast of the weight"


@pytest.mark.usefixtures("anew")
def test_inside_of_transformer_engines_own_offloading_nothing_moves_and_one_warning_says_so(
    te: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = te.Linear(HIDDEN, HIDDEN)

    def run() -> Any:
        return layer(training.make_input(torch.float32, 1) * 1.0)

    with monkeypatch.context() as offloading, pytest.warns(UserWarning, match="two offloaders") as caught:
        offloading.setattr("transformer_engine.pytorch.cpu_offload.is_cpu_offload_enabled", lambda: True)
        assert _moved(run) == _moved(run) == 0
    assert len([one for one in caught if "two offloaders" in str(one.message)]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _moved(run) > 0


def test_a_tensor_with_a_ready_event_is_moved_after_it(te: Any) -> None:
    log: list[str] = []

    class Event:
        def wait(self) -> None:
            log.append("waited")

    def program() -> Any:
        saved = leaf(4, 8) * 1.0
        saved.start_reload_event = Event()
        y = saved.sin()
        assert log == ["waited"]
        return y

    assert _moved(program) == 4 * 8 * 4


def test_interleaved_views_of_one_base_are_moved_once(te: Any) -> None:
    def program() -> Any:
        qkv = leaf(16, 3, 8) * 1.0
        q, k, v = (qkv[:, i] for i in range(3))
        q.offload_base_tensor = k.offload_base_tensor = v.offload_base_tensor = True
        return q.sin().sum() + k.sin().sum() + v.sin().sum()

    assert _moved(program) == 16 * 3 * 8 * 4


@pytest.mark.parametrize("name", ["checkpoint", "offload", "region"])
def test_quantized_modules_give_every_reference_back(te: Any, name: str) -> None:
    layer, recipe = training.make_layer(te, "Linear"), training.make_recipe("delayed")
    x = training.make_input(torch.float32, 1)

    def step() -> None:
        with te.autocast(True, recipe=recipe):
            y = METHODS[name].method(layer, x)
        y.sum().backward()

    assert_references_flat(step)
