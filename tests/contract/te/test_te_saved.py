"""What TransformerEngine's modules save, and offloading it: checklist items 14 to 20, on fakes (te_fakes.py)."""

from __future__ import annotations

import functools
import gc
import warnings
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from offload_oracle import flush, store_of_kind
from oracle import Saves, SavingSquare, assert_equal, leaf
from te_fakes import VERSIONS, Quantized, QuantizedPair, clear_tensor_data, installed, quantize
from te_oracle import RECIPES, assert_trains_as_plain

import actckpt


@pytest.fixture(params=VERSIONS)
def te(request: pytest.FixtureRequest) -> Iterator[Any]:
    with installed(request.param) as found:
        yield found


def _offloaded(layer: Any, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    with actckpt.offload(min_bytes=0):
        return layer(x, **kwargs)


def _both(layer: Any, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    return actckpt.checkpoint(layer, x, offload_inputs=True, **kwargs)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("method", [_offloaded, _both], ids=["offload", "checkpoint with offloaded inputs"])
def test_gradients_and_fp8_state_are_those_without_offloading(te: Any, recipe: str, method: Any) -> None:
    assert_trains_as_plain(te.version, method, RECIPES[recipe])


def test_item_14_parts_of_storages_are_saved_as_plain_tensors_and_moved(te: Any) -> None:
    layer, saved = te.Linear(16), []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append((type(t), t.dtype)) or t, lambda t: t)
    with te.autocast(True, RECIPES["delayed"]), hooks:
        layer(leaf(4, 16))
    assert set(saved) == {(torch.Tensor, torch.int8), (torch.Tensor, torch.float32)}
    actckpt.reset_stats()
    with te.autocast(True, RECIPES["delayed"]):
        y = _offloaded(layer, leaf(4, 16))
    assert actckpt.stats().offloaded_bytes == 4 * 16 + 2 * 4, "the input and both scales; the cast weight stays"
    y.sum().backward()


class _Clears(Saves):
    """Saves a tensor, or a quantized one, and empties what it gets back."""

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (saved,) = ctx.saved_tensors
        value = saved._data.float() * saved._scale_inv if isinstance(saved, QuantizedPair) else saved.clone()
        clear_tensor_data(saved)
        return grad * value, None


@pytest.mark.parametrize("is_quantized", [False, True], ids=["plain", "quantized"])
@pytest.mark.parametrize("kind", ["disk", "memory"])
def test_item_15_clearing_what_was_unpacked_does_not_reach_the_store(kind: str, is_quantized: bool) -> None:
    x, data = leaf(4, 8), torch.randn(4, 8)
    expected = (data * 10).to(torch.int8).float() * 0.1 if is_quantized else data.clone()
    with store_of_kind(kind), actckpt.offload(min_bytes=0):
        pair = QuantizedPair((data * 10).to(torch.int8), torch.tensor(0.1))
        # Twice, as two operators save one input: neither must empty the other's.
        saved = pair if is_quantized else data * 1.0
        y = _Clears.apply(x, saved).sum() + _Clears.apply(x, saved).sum()
        del pair, saved
        flush()
        for _ in range(3):
            (grad,) = torch.autograd.grad(y, x, retain_graph=True)
            torch.testing.assert_close(grad, expected + expected, rtol=0, atol=0)


def test_item_15_the_fakes_destroy_a_stash_behind_identity_hooks() -> None:
    x, data = leaf(4, 8), torch.randn(4, 8)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        y = _Clears.apply(x, data * 1.0).sum()
    torch.autograd.grad(y, x, retain_graph=True)
    with pytest.raises(RuntimeError, match="size"):
        torch.autograd.grad(y, x)


def test_item_15_clearing_does_not_reach_a_reruns_values() -> None:
    x, data = leaf(4, 8), torch.randn(4, 8)
    y = actckpt.checkpoint(lambda x: _Clears.apply(x, data * 1.0).exp(), x).sum()
    first = torch.autograd.grad(y, x, retain_graph=True)
    assert_equal(torch.autograd.grad(y, x), first)


def test_item_16_saved_tensors_are_unpacked_several_times_per_backward() -> None:
    class Twice(SavingSquare):
        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad * ctx.saved_tensors[0] + grad * ctx.saved_tensors[0]

    for method in (actckpt.te.checkpoint, _offloaded):
        x = leaf(4, 8)
        method(lambda x: Twice.apply(x * 1.0), x).sum().backward()
        assert_equal(x.grad, x.detach() + x.detach())


def _moved(run: Any) -> int:
    actckpt.reset_stats()
    with actckpt.offload(min_bytes=0):
        y = run()
    del y
    return actckpt.stats().offloaded_bytes


def test_item_17_parameters_marked_tensors_and_weight_workspaces_stay(te: Any) -> None:
    class Saves(te.Linear):
        def forward(self, x: Any, *saved: Any) -> Any:
            return torch.stack([_Clears.apply(x, tensor) for tensor in saved])

    layer, x = Saves(), leaf(3, 5)
    cast = SimpleNamespace(_data=torch.randn(3, 5).to(torch.int8), _rowwise_scale_inv=torch.randn(7))
    layer._fp8_workspaces["weight"] = cast
    marked = torch.randn(3, 5)
    marked._TE_do_not_offload = True
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
    quantized = torch.nn.Parameter(
        QuantizedPair(torch.ones(3, 5, dtype=torch.int8), torch.ones(1)), requires_grad=False
    )
    layer.quantized_weight = quantized
    assert _moved(lambda: layer(x, quantized._data)) == 0


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_item_17_casts_of_weights_stay_between_and_within_microbatches(te: Any, recipe: str) -> None:
    layer, x = te.Linear(16), leaf(4, 16)

    def run(**kwargs: Any) -> Any:
        with te.autocast(True, RECIPES[recipe]):
            return layer(x, **kwargs)

    for kwargs in ({}, {"is_first_microbatch": True}, {"is_first_microbatch": False}):
        moved = _moved(lambda kwargs=kwargs: run(**kwargs))
        assert 4 * 16 <= moved <= 4 * 16 + 8, "the quantized input, and scales: a cast weight has 256 bytes"


def test_item_17_transformer_engines_own_offloading_is_left_alone(te: Any) -> None:
    layer = te.Linear(16)
    with te.offload_context(), pytest.warns(UserWarning, match="two offloaders") as caught:
        assert _moved(lambda: layer(leaf(4, 16))) == 0
        assert _moved(lambda: layer(leaf(4, 16))) == 0
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _moved(lambda: layer(leaf(4, 16))) > 0
        with te.offload_context(), actckpt.offload(min_bytes=0):
            x = leaf(4, 16)
            layer(x).sum().backward()  # warned already


def test_item_18_a_tensor_with_a_ready_event_is_moved_after_it(te: Any) -> None:
    log: list[str] = []

    class Event:
        def wait(self) -> None:
            log.append("waited")

    def program() -> Any:
        x = leaf(4, 8)
        saved = x * 1.0
        saved.start_reload_event = Event()
        y = saved.sin()
        assert log == ["waited"]
        return y

    assert _moved(program) == 4 * 8 * 4


def test_item_18_interleaved_views_of_one_base_are_moved_once(te: Any) -> None:
    def program() -> Any:
        qkv = leaf(16, 3, 8) * 1.0
        q, k, v = (qkv[:, i] for i in range(3))
        q.offload_base_tensor = k.offload_base_tensor = v.offload_base_tensor = True
        return q.sin().sum() + k.sin().sum() + v.sin().sum()

    assert _moved(program) == 16 * 3 * 8 * 4


@pytest.mark.parametrize("is_flushed", [False, True], ids=["in flight", "written"])
def test_item_19_a_reload_gives_the_bytes_before_and_after_the_write_has_ended(te: Any, is_flushed: bool) -> None:
    """The source lives until then, no longer. The order of device events is tested in tests/unit/engine."""
    layer, x = te.Linear(64), leaf(64, 64)
    with store_of_kind("memory"):
        h = x * 1.0
        source = weakref.ref(h.untyped_storage())
        with actckpt.offload(min_bytes=0):
            y = layer(h).sum() + h.sin().sum()
        expected = torch.autograd.grad(layer(x).sum() + x.sin().sum(), [x, layer.weight])
        del h
        if is_flushed:
            flush()
            gc.collect()
            assert source() is None
        assert_equal(torch.autograd.grad(y, [x, layer.weight]), expected)


def test_item_20_a_regions_own_inputs_are_offloaded_on_request(te: Any) -> None:
    layer = te.TransformerLayer(p=0.0)
    actckpt.reset_stats()
    x = leaf(512, 64, 8)  # 1 MiB
    h = x * 1.0
    y = actckpt.checkpoint(layer, h, offload_inputs=True)
    assert actckpt.stats().offloaded_bytes == 512 * 64 * 8 * 4
    held = weakref.ref(h)
    del h
    flush()
    gc.collect()
    assert held() is None, "the region keeps the input on the device"
    expected = torch.autograd.grad(layer(x * 1.0).sum(), x)
    assert_equal(torch.autograd.grad(y.sum(), x), expected)


class _QuantizedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any) -> Any:
        ctx.save_for_backward(x, weight)
        return x @ weight.value().T

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, weight = ctx.saved_tensors
        return grad @ weight.value(), grad.T @ x


class _Quantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, kind: type[Quantized]) -> Any:
        storage = quantize(x, 50 / x.detach().abs().max())
        return kind(storage.data, storage.scale_inv)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad, None


def _region(policy: Any) -> Any:
    def method(function: Any, *args: Any) -> Any:
        with actckpt.region(policy):
            return function(*args)

    return method


def _in_offload(method: Any) -> Any:
    return lambda *args: _offloaded(functools.partial(method, *args[:-1]), args[-1])


METHODS: dict[str, Any] = {
    "rerun": actckpt.checkpoint,
    "te.checkpoint": actckpt.te.checkpoint,
    "offload": _in_offload(lambda function, *args: function(*args)),
    "offloaded inputs": functools.partial(actckpt.checkpoint, offload_inputs=True),
    "recompute": _region("recompute"),
    "list": _region([torch.ops.aten.mm.default]),
    "offload policy": _region("offload"),
    "region in offload": _in_offload(_region("recompute")),
    "rerun in offload": _in_offload(actckpt.checkpoint),
    "rerun in rerun": lambda function, *args: actckpt.checkpoint(actckpt.checkpoint, function, *args),
}


@pytest.mark.parametrize("kind", [Quantized, QuantizedPair])
@pytest.mark.parametrize("name", METHODS)
def test_quantized_weights_that_an_optimizer_changed_are_saved(name: str, kind: type[Quantized]) -> None:
    def program(method: Any) -> Any:
        torch.manual_seed(3)
        storage = quantize(torch.randn(8, 8), torch.tensor(40.0))
        weight = torch.nn.Parameter(kind(storage.data, storage.scale_inv, True))
        found = []
        for _ in range(3):
            x = leaf(4, 8)
            method(lambda x: _QuantizedLinear.apply(x.sin(), weight).exp(), x).sum().backward()
            found += [x.grad, weight.grad.clone()]
            with torch.no_grad():
                weight.mul_(0.5)
        assert weight._version == 3
        return found

    assert_equal(program(METHODS[name]), program(lambda function, *args: function(*args)))


@pytest.mark.parametrize("kind", [Quantized, QuantizedPair])
@pytest.mark.parametrize("name", METHODS)
def test_quantized_activations_that_were_changed_before_they_were_saved_come_back(
    name: str, kind: type[Quantized]
) -> None:
    def function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        quantized = _Quantize.apply(weight.sin(), kind)
        with torch.no_grad():
            quantized.mul_(0.5)
        return _QuantizedLinear.apply(x, quantized).exp()

    def program(method: Any) -> Any:
        torch.manual_seed(3)
        x, weight = leaf(4, 8), leaf(8, 8)
        return torch.autograd.grad(method(function, x * 1.0, weight * 1.0).sum(), [x, weight])

    assert_equal(program(METHODS[name]), program(lambda function, *args: function(*args)))


@pytest.mark.parametrize("kind", [Quantized, QuantizedPair])
@pytest.mark.parametrize("name", ["offload", "recompute", "list", "offload policy"])
def test_quantized_weights_that_are_changed_after_they_were_saved_raise(name: str, kind: type[Quantized]) -> None:
    storage = quantize(torch.randn(8, 8), torch.tensor(40.0))
    weight = torch.nn.Parameter(kind(storage.data, storage.scale_inv, True))
    y = METHODS[name](lambda x: _QuantizedLinear.apply(x, weight), leaf(4, 8))
    with torch.no_grad():
        weight.mul_(0.5)
    with pytest.raises(actckpt.errors.SavedTensorChangedError, match="modified by an inplace operation"):
        y.sum().backward()
