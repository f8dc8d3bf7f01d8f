"""Real models of Transformers, with the key-value cache that they make by default."""

from __future__ import annotations

import contextlib
import gc
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers as hf
from transformers_models import MODELS, batch, cached_tensors, make

import actckpt
from actckpt._core import sites
from actckpt.memory import LiveStorages

Step = tuple[Any, list[torch.Tensor | None]]

#: What plain training runs with where the blocks of ours are left without a cache: keys that a cache has joined lie
#: elsewhere in memory than those that are used as they are, and kernels of some processors round differently.
WITHOUT_CACHE = {"use_cache": False}


@pytest.fixture(autouse=True)
def _warns_anew() -> Iterator[None]:
    sites._shown.clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="apply: .* is given a key-value cache")
        yield


def _step(model: Any, name: str, **options: Any) -> Step:
    torch.manual_seed(2)
    model.zero_grad()
    output = model(**batch(name), **options)
    output.loss.backward()
    return output, [parameter.grad for parameter in model.parameters()]


def _assert_same(actual: list[Any], expected: list[Any]) -> None:
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other), f"largest difference {(one - other).abs().max()}"


def _library_checkpointing(model: Any, function: Callable[..., Any] | None = None) -> None:
    model.activation_checkpointing_enable({"use_reentrant": False})
    if function is not None:
        model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=function)


@pytest.mark.parametrize("options", [{}, {"use_cache": True}, {"use_cache": False}], ids=["default", "on", "off"])
@pytest.mark.parametrize("is_training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_an_applied_model_are_equal_to_plain(
    name: str, is_training: bool, options: dict[str, Any]
) -> None:
    plain, applied = make(name).train(is_training), make(name).train(is_training)
    actckpt.apply(applied)
    expected = _step(plain, name, **(WITHOUT_CACHE if is_training else options))
    actual = _step(applied, name, **options)
    assert torch.equal(actual[0].loss, expected[0].loss)
    _assert_same(actual[1], expected[1])


@pytest.mark.parametrize("name", ["llama", "gemma 2", "gpt 2", "t5"])
def test_the_function_takes_the_place_of_torchs_in_the_library(name: str) -> None:
    plain, ours = make(name), make(name)
    _library_checkpointing(ours, actckpt.checkpoint)
    _assert_same(_step(ours, name)[1], _step(plain, name, **WITHOUT_CACHE)[1])


@pytest.mark.parametrize("name", ["llama", "gemma 2", "gpt 2", "qwen3 next", "t5", "whisper"])
def test_an_applied_model_holds_no_more_than_the_librarys_own_checkpointing(name: str) -> None:
    held = []
    for prepare in (_library_checkpointing, actckpt.apply):
        model = make(name)
        prepare(model)
        with LiveStorages(parameters=model.parameters()) as live:
            output = model(**batch(name))
            held.append(live.live_bytes)
            output.loss.backward()
        held.append(live.peak_bytes)
    # An empty cache that the model returns has a few numbers of its own.
    assert held[2] <= held[0] + 64 and held[3] <= held[1] + 64


def test_taking_the_cache_away_is_said_once_with_the_ways_out() -> None:
    model = make("llama")
    actckpt.apply(model)
    with pytest.warns(UserWarning, match=r"LlamaDecoderLayer.*use_cache=False.*any policy") as caught:
        output, _ = _step(model, "llama")
        _step(model, "llama")
    assert len([one for one in caught if "key-value cache" in str(one.message)]) == 1
    assert cached_tensors(output.past_key_values) == []


def test_nothing_is_said_where_no_cache_is_asked_for() -> None:
    model = make("llama")
    actckpt.apply(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _step(model, "llama", use_cache=False)
        model.config.use_cache = False
        _step(model, "llama")


@pytest.mark.parametrize("is_training", [True, False])
def test_generation_keeps_its_cache(is_training: bool) -> None:
    plain, applied = make("llama").train(is_training), make("llama").train(is_training)
    actckpt.apply(applied)
    found = []
    for model in (plain, applied):
        torch.manual_seed(0)  # dropout is on in training
        found.append(model.generate(batch("llama")["input_ids"], max_new_tokens=4, do_sample=False))
    assert torch.equal(*found)


def _two_calls(model: Any, name: str) -> Step:
    """Train through the cache: the second call reads what the first one wrote."""
    torch.manual_seed(2)
    ids = batch(name)["input_ids"]
    model.zero_grad()
    first = model(input_ids=ids[:, :8], use_cache=True)
    second = model(input_ids=ids[:, 8:], past_key_values=first.past_key_values, use_cache=True)
    (first.logits.square().mean() + second.logits.square().mean()).backward()
    return second, [parameter.grad for parameter in model.parameters()]


TRAINED_THROUGH = ["llama", "mistral", "gemma 2", "gpt oss"]


@pytest.mark.parametrize("name", TRAINED_THROUGH)
def test_training_through_the_cache_of_an_applied_model_says_how(name: str) -> None:
    model = make(name)
    actckpt.apply(model)
    with pytest.raises(actckpt.errors.BlocksError, match=r"(?s)second time.*removed.*any policy"):
        _two_calls(model, name)


@pytest.mark.parametrize("name", TRAINED_THROUGH)
def test_training_through_the_cache_is_right_in_evaluation_and_with_a_policy(name: str) -> None:
    expected = _two_calls(make(name).eval(), name)
    for policy in ("recompute", ["aten.mm", "aten.addmm"]):
        model = make(name).eval()
        actckpt.apply(model, policy=policy)
        actual = _two_calls(model, name)
        _assert_same(actual[1], expected[1])
        _assert_same(cached_tensors(actual[0].past_key_values), cached_tensors(expected[0].past_key_values))


class Checkpointed(torch.nn.Module):
    """A layer whose calls go to `checkpoint` with everything that they are given, the cache among it."""

    def __init__(self, layer: torch.nn.Module, wrap: Any) -> None:
        super().__init__()
        self.layer, self.wrap = layer, wrap

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self.wrap():
            return actckpt.checkpoint(self.layer, *args, **kwargs)


def _checkpointed(name: str, wrap: Any = contextlib.nullcontext) -> Any:
    model = make(name)
    for stack in [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]:
        for i, layer in enumerate(stack):
            if isinstance(layer, hf.modeling_layers.GradientCheckpointingLayer):
                stack[i] = Checkpointed(layer, wrap)
    return model


@pytest.mark.parametrize("name", [name for name in MODELS if name != "recurrent gemma"])
def test_gradients_with_a_cache_that_checkpoint_is_given_are_right_or_raise(name: str) -> None:
    """A rerun fills it again, as with torch's checkpoint: keys and values have twice the length."""
    try:
        _, actual = _step(_checkpointed(name), name)
    except RuntimeError as error:
        assert re.search("is different from its forward's|must match the size of tensor", str(error))
    else:  # some models cut keys to the length of queries
        _assert_same(actual, _step(make(name), name)[1])


def test_state_that_a_module_hands_from_call_to_call_is_named_by_the_error() -> None:
    with pytest.raises(actckpt.errors.RerunMismatchError, match="attribute of a module"):
        _step(_checkpointed("recurrent gemma"), "recurrent gemma")


@pytest.mark.parametrize("how", ["apply", "checkpoint", "checkpoint and offload"])
def test_steps_with_a_cache_leave_nothing_behind(how: str) -> None:
    wrap = (lambda: actckpt.offload(min_bytes=0)) if how == "checkpoint and offload" else contextlib.nullcontext
    model = make("llama") if how == "apply" else _checkpointed("llama", wrap)
    if how == "apply":
        actckpt.apply(model)

    def objects_after(steps: int) -> int:
        for _ in range(steps):
            _step(model, "llama", use_cache=True)
        gc.collect()
        return len(gc.get_objects())

    before = objects_after(5)
    stored = actckpt.stats().store_bytes
    assert objects_after(40) <= before + 20
    assert actckpt.stats().store_bytes == stored
    with LiveStorages(parameters=model.parameters()) as live:
        _step(model, "llama", use_cache=True)
        model.zero_grad()
        gc.collect()
        assert live.live_bytes == 0


def test_forwards_in_evaluation_that_nobody_differentiates_leave_nothing_behind() -> None:
    model = make("llama").eval()
    actckpt.apply(model)
    with LiveStorages() as live:
        for _ in range(3):
            model(**batch("llama"))
        gc.collect()
        assert live.live_bytes == 0
