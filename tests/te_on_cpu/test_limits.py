"""What docs/te.md says does not work: it raises, or does what the page says."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from oracle import assert_equal

import actckpt
from actckpt.errors import RerunMismatchError, TransformerEngineError
from te_on_cpu import training
from te_on_cpu.programs import fused_ops
from te_on_cpu.training import Setting, train


def _run(te: Any, recipe: str, call: Any, *, is_training: bool = True, **options: Any) -> list[Any]:
    training.reset()
    torch.manual_seed(1)
    module, recipe_ = (
        training.make_layer(te, "LayerNormMLP", **options).train(is_training),
        training.make_recipe(recipe),
    )
    outputs = []
    for number in range(2):
        with te.autocast(True, recipe=recipe_):
            outputs.append(call(module, training.make_input(torch.float32, number)))
    for output in outputs:
        output.square().mean().backward()
    return [*outputs, *(parameter.grad for parameter in module.parameters()), training.scales(module)]


@pytest.mark.parametrize("number", ["first", "later"])
def test_fused_operations_with_delayed_scaling_raise_in_forward(te: Any, number: str) -> None:
    def later(module: Any, x: torch.Tensor) -> Any:
        module(x)  # outside of regions it is none of our business
        return actckpt.checkpoint(module, x)

    with pytest.raises(TransformerEngineError, match=r"te\.ops with delayed scaling .*inside a region"):
        fused_ops("delayed", te, actckpt.checkpoint if number == "first" else later)


def test_a_module_that_recomputes_itself_raises_with_delayed_scaling_only(te: Any) -> None:
    if "checkpoint" not in inspect.signature(te.LayerNormMLP).parameters:
        pytest.skip("this version has no LayerNormMLP(checkpoint=True)")
    with pytest.raises(TransformerEngineError, match=r"LayerNormMLP\(checkpoint=True\)"):
        _run(te, "delayed", actckpt.checkpoint, checkpoint=True)
    assert_equal(_run(te, "current", actckpt.checkpoint, checkpoint=True), _run(te, "current", training.plain))


def test_modules_in_eval_mode_are_rerun_or_say_why_not(te: Any) -> None:
    import transformer_engine

    expected = _run(te, "delayed", training.plain, is_training=False)
    if tuple(map(int, transformer_engine.__version__.split(".")[:2])) >= (2, 20):
        assert_equal(_run(te, "delayed", actckpt.checkpoint, is_training=False), expected)
        return
    with pytest.raises(TransformerEngineError, match="eval mode"):
        _run(te, "delayed", actckpt.checkpoint, is_training=False)


def test_a_tracker_of_bytes_that_is_neither_registered_nor_given_raises(te: Any) -> None:
    with pytest.raises(RerunMismatchError, match="rng_trackers="):
        train(te, Setting("none", tracker="unknown bytes"), actckpt.checkpoint)


def test_second_derivatives_through_wrapped_modules_raise(te: Any) -> None:
    layer = actckpt.te.wrap(training.make_layer(te, "Linear"), retain_graph=True)
    x = training.make_input(torch.float32, 1)
    with pytest.raises(TransformerEngineError, match="create_graph=True"):
        torch.autograd.grad(layer(x).sum(), x, create_graph=True)


@pytest.mark.usefixtures("anew")
def test_what_transformer_engine_offloads_itself_is_left_to_it(te: Any) -> None:
    """Its offloader needs pinned memory before 2.10, which the emulation has not."""
    from transformer_engine.pytorch import cpu_offload

    if not hasattr(cpu_offload, "OFFLOAD_SYNCHRONIZER"):
        pytest.skip("this version pins memory")

    def run(call: Any) -> list[Any]:
        training.reset()
        torch.manual_seed(1)
        layers = torch.nn.ModuleList(training.make_layer(te, "LayerNormMLP") for _ in range(3))
        context, synchronize = te.get_cpu_offload_context(True, 1, 3, True, False)
        h = training.make_input(torch.float32, 1)
        for layer in layers:
            with context:
                h = call(layer, h)
            h = synchronize(h)
        h.sum().backward()
        return [h, *(parameter.grad for parameter in layers.parameters())]

    def offload(layer: Any, x: torch.Tensor) -> Any:
        with actckpt.offload(min_bytes=0):
            return layer(x)

    before = actckpt.stats().offloaded_bytes
    with pytest.warns(UserWarning, match="two offloaders"):
        found = run(offload)
    assert_equal(found, run(training.plain))
    assert actckpt.stats().offloaded_bytes == before
