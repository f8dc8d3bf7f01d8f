"""`actckpt.te.wrap(retain_graph=True)`: backward any number of times, on fakes (te_fakes.py)."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from oracle import assert_equal, leaf
from te_fakes import VERSIONS, FakeTracker, installed
from te_oracle import RECIPES, assert_trains_as_plain, make_model, plain, queued

import actckpt
from actckpt.errors import InputChangedError, RerunMismatchError, TransformerEngineError
from actckpt.memory import LiveStorages


def _retained(model: Any, policy: Any = "recompute") -> Any:
    return actckpt.te.wrap(model, policy, retain_graph=True, min_bytes=0)


def test_the_fakes_fail_at_a_second_backward_as_transformer_engine_does(te: Any) -> None:
    for method in (plain, actckpt.checkpoint, te.checkpoint):
        y = method(te.Linear(), leaf(4, 8)).sum()
        y.backward(retain_graph=True)
        with pytest.raises((AttributeError, IndexError)):
            y.backward()


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("policy", ["recompute", "offload", {"core_attention": "recompute", "fc2": "offload"}], ids=str)
@pytest.mark.parametrize("core", [False, True], ids=["", "checkpoint_core_attention"])
def test_training_is_bit_equal_to_plain_training(version: str, recipe: str, policy: Any, core: bool) -> None:
    options: dict[str, Any] = {"tracker": None if core else FakeTracker, "checkpoint_core_attention": core}
    assert_trains_as_plain(version, plain, RECIPES[recipe], prepare=lambda model: _retained(model, policy), **options)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_backward_gives_the_same_gradients(version: str, recipe: str) -> None:
    """Under delayed scaling, each backward moves the scales of the next; they are put back in between here."""

    def run(te: Any, times: int) -> list[Any]:
        model, _ = make_model(te, tracker=FakeTracker)
        if times > 1:
            _retained(model)
        torch.manual_seed(5)
        x = leaf(2, 4, 8)
        with te.autocast(RECIPES[recipe] is not None, RECIPES[recipe]):
            h = x * 1.0
            for layer in model:
                h = layer(h)
        loss, found = h.square().sum(), []
        scalings = te.manager_state().global_amax_buffer.get("backward", [])
        for index in range(times):
            before = [(s.scale.clone(), s.amax_history.clone()) for s in scalings]
            is_last = index == times - 1
            found.append(torch.autograd.grad(loss, [x, *model.parameters()], retain_graph=not is_last))
            for scaling, (scale, history) in zip(scalings, before, strict=True):
                scaling.scale.copy_(scale)
                scaling.amax_history.copy_(history)
        assert queued(te) == 0 and te.flags() == (False, False)
        return found

    with installed(version) as te:
        expected = run(te, 1)
    with installed(version) as te:
        found = run(te, 3)
        assert te.updates.count("backward") == (3 if recipe == "delayed" else 0)
    for grads in found:
        assert_equal(grads, expected[0])


def test_gradients_accumulate_as_autograd_does(te: Any) -> None:
    layer, x = _retained(te.Linear()), leaf(4, 8)
    y = layer(x).square().sum()
    y.backward(retain_graph=True)
    first = x.grad.clone(), layer.weight.grad.clone()
    y.backward()
    assert_equal((x.grad, layer.weight.grad), (first[0] + first[0], first[1] + first[1]))
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()


def test_a_parameter_of_several_wrapped_calls_gets_all_its_gradients(te: Any) -> None:
    layer = te.Linear()

    def grads() -> Any:
        torch.manual_seed(1)
        x = leaf(4, 8)
        return torch.autograd.grad(layer(layer(layer(x))).square().sum(), [x, layer.weight])

    expected = grads()
    _retained(layer)
    torch.testing.assert_close(grads(), expected)


def test_create_graph_says_what_to_do(te: Any) -> None:
    layer, x = _retained(te.Linear()), leaf(4, 8)
    with pytest.raises(TransformerEngineError, match="create_graph=True"):
        torch.autograd.grad(layer(x).sum(), x, create_graph=True)


def test_hooks_of_parameters_run_once_per_backward(te: Any) -> None:
    layer, calls = te.Linear(), []
    layer.weight.register_hook(lambda grad: calls.append("hook") or grad * 2)
    layer.weight.register_post_accumulate_grad_hook(lambda _: calls.append("post"))
    x = leaf(4, 8)
    layer(x).sum().backward()
    expected, layer.weight.grad = layer.weight.grad, None
    calls.clear()
    _retained(layer)(x).sum().backward()
    assert calls == ["hook", "post"]
    assert_equal(layer.weight.grad, expected)


def test_a_te_checkpoint_inside_of_which_nothing_is_needed_leaves_no_flag(te: Any) -> None:
    class Two(te.Linear):
        def forward(self, x: Any, y: Any) -> Any:
            return super().forward(x) * 2, te.checkpoint(torch.exp, y)

    x, y = leaf(4, 8), leaf(4, 8)
    first, _ = _retained(Two())(x, y)
    for _ in range(2):
        torch.autograd.grad(first.sum(), x, retain_graph=True)
        assert te.distributed.activation_recompute_forward._is_first_fp8_module == []


@pytest.mark.parametrize("frozen", ["parameters", "input", "neither"])
def test_only_what_is_needed_gets_a_gradient(te: Any, frozen: str) -> None:
    layer, x = te.TransformerLayer(p=0.0), leaf(2, 4, 8)
    layer.layernorm_mlp.requires_grad_(frozen != "parameters")
    x.requires_grad_(frozen != "input")
    wanted = [t for t in (x, *layer.parameters()) if t.requires_grad]
    expected = torch.autograd.grad(layer(x).square().sum(), wanted)
    y = _retained(layer)(x).square().sum()
    assert_equal(torch.autograd.grad(y, wanted, retain_graph=True), expected)
    for tensor, grad in zip(wanted, expected, strict=True):
        assert_equal(torch.autograd.grad(y, tensor, retain_graph=True)[0], grad)


def test_arguments_and_results_of_any_structure(te: Any) -> None:
    class Attention(te.Linear):
        def forward(self, q: Any, *, kv: Any, scale: Any = None, mask: Any = None) -> Any:
            y = super().forward(q) * kv["k"] + kv["v"][0] * scale
            return {"y": y, "same": q, "none": None, "index": y.argmax(-1), "parts": (y.exp(), 3), "constant": mask}

    def run(wrapped: bool) -> Any:
        torch.manual_seed(1)
        layer, q, k, v = Attention(), leaf(4, 8), leaf(4, 8), leaf(4, 8)
        if wrapped:
            _retained(layer)
        out = layer(q, kv={"k": k, "v": [v, 1]}, scale=2.0, mask=torch.ones(2))
        assert out["none"] is None and out["parts"][1] == 3 and not out["index"].requires_grad
        assert not out["constant"].requires_grad
        loss = out["y"].sum() + out["parts"][0].sum() + (out["same"] * 2).sum()
        return [out["index"], *torch.autograd.grad(loss, [q, k, v, layer.weight])]

    assert_equal(run(True), run(False))


def test_a_gradient_that_would_be_lost_raises(te: Any) -> None:
    class Holder:
        def __init__(self, value: torch.Tensor) -> None:
            self.value = value

    class Reads(te.Linear):
        def forward(self, x: Any, other: Any = None) -> Any:
            return super().forward(x) * (other.value if other is not None else self.outside)

    layer = _retained(Reads())
    object.__setattr__(layer, "outside", leaf(8))
    with pytest.raises(TransformerEngineError, match=r"tensor of shape \(8,\)"):
        layer(leaf(4, 8))
    object.__setattr__(layer, "outside", leaf(8) * 2)
    with pytest.raises(TransformerEngineError, match="its gradient would be lost"):
        layer(leaf(4, 8))
    with pytest.raises(TransformerEngineError, match="its gradient would be lost"):
        layer(leaf(4, 8), Holder(leaf(8)))
    layer(leaf(4, 8), Holder(torch.randn(8))).sum().backward()


@pytest.mark.parametrize("is_patched", [False, True], ids=["", "forward of another library"])
def test_changes_between_forward_and_backward_raise(te: Any, is_patched: bool) -> None:
    layer, x = te.Linear(), leaf(4, 8)
    if is_patched:
        own = layer.forward
        layer.forward = lambda x: own(x)
    _retained(layer)
    for change, error in (("input", InputChangedError), ("parameter", RerunMismatchError)):
        h = x * 1.0
        y = layer(h).sum()
        with torch.no_grad():
            (h if change == "input" else layer.weight).add_(1.0)
        with pytest.raises(error):
            y.backward()


def test_a_forward_that_does_not_repeat_itself_raises(te: Any) -> None:
    class Counts(te.Linear):
        def forward(self, x: Any) -> Any:
            self.count = getattr(self, "count", 0) + 1
            return super().forward(x)[: self.count]

    y = _retained(Counts())(leaf(4, 8))
    with pytest.raises(RerunMismatchError, match=r"Forward: \(1, 8\) .* Rerun: \(2, 8\)"):
        y.sum().backward()

    class InPlace(te.Linear):
        def forward(self, x: Any, cache: Any) -> Any:
            cache.add_(1)
            return super().forward(x + cache)

    y = _retained(InPlace())(leaf(4, 8), torch.zeros(4, 8))
    with pytest.raises(InputChangedError):
        y.sum().backward()


def test_inside_other_regions_and_offloading(te: Any) -> None:
    def run(method: str) -> Any:
        torch.manual_seed(1)
        layer, x = te.TransformerLayer(p=0.2), leaf(2, 4, 8)
        if method != "plain":
            _retained(layer)
        h = x * 1.5
        if method == "checkpoint":
            y = actckpt.checkpoint(lambda h: layer(h * 2), h)
        elif method == "offload":
            with actckpt.offload(min_bytes=0):
                y = layer(h * 2)
        else:
            y = layer(h * 2)
        loss = y.square().sum()
        grads = [torch.autograd.grad(loss, [x, *layer.parameters()], retain_graph=method != "plain")]
        if method != "plain":
            grads.append(torch.autograd.grad(loss, [x, *layer.parameters()]))
        return grads

    (expected,) = run("plain")
    for method in ("checkpoint", "offload", "alone"):
        for grads in run(method):
            assert_equal(grads, expected)


def test_a_backward_inside_the_forward_raises(te: Any) -> None:
    class Differentiates(te.Linear):
        def forward(self, x: Any) -> Any:
            (grad,) = torch.autograd.grad(x.exp().sum(), x)
            return super().forward(x) * grad

    with pytest.raises(TransformerEngineError, match="a backward inside its forward"):
        _retained(Differentiates())(leaf(4, 8))


def test_the_forward_keeps_nothing_of_what_its_operators_save(te: Any) -> None:
    alive, packed = [], []

    class Looks(te.Linear):
        def forward(self, x: Any) -> Any:
            h = super().forward(x) * 1.0
            held = weakref.ref(h)
            y = h.sin()  # saves h
            del h
            alive.append(held() is not None)
            return y

    layer = _retained(Looks())
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.shape) or t, lambda t: t):
        y = layer(leaf(4, 8))
    assert alive == [False]
    assert packed == [(4, 8)], "the input only"
    y.sum().backward()


def test_the_inputs_are_freed_with_the_graph(te: Any) -> None:
    layer, x = _retained(te.Linear()), leaf(4, 8)
    h = x * 1.0
    held = weakref.ref(h)
    y = layer(h).sum()
    del h
    y.backward(retain_graph=True)
    assert held() is not None
    y.backward()
    gc.collect()
    assert held() is None
    h = x * 1.0
    held = weakref.ref(h)
    y = layer(h).sum()
    del h, y
    gc.collect()
    assert held() is None, "also where no backward ran"


@pytest.mark.parametrize("retain_graph", [False, True])
def test_saved_tensors_are_freed_at_their_last_use_in_backward(te: Any, retain_graph: bool) -> None:
    """After forward a layer holds its input only; backward holds one layer's tensors at a time."""
    depth, rows = 6, 256
    model, _ = make_model(te, depth=depth)
    for layer in model:
        layer.p = 0.0
    parameters = list(model.parameters())
    peaks = {}
    for method in ("plain", "wrapped"):
        if method == "wrapped":
            actckpt.te.wrap(model, retain_graph=retain_graph)
        x = torch.randn(1, rows, 8, requires_grad=True)
        with LiveStorages(parameters=parameters) as live:
            h = x
            for layer in model:
                h = layer(h)
            loss = h.sum()
            del h
            held = live.live_bytes
            loss.backward()
            peaks[method] = held, live.peak_bytes
            del loss
            gc.collect()
            assert live.live_bytes <= rows * 8 * 4 * 2, "x.grad, and at most one more"
        for parameter in parameters:
            parameter.grad = None
    size = rows * 8 * 4
    one_layer = peaks["plain"][0] / depth
    assert peaks["wrapped"][0] <= (depth + 1) * size
    assert peaks["wrapped"][1] <= depth * size + 2.5 * one_layer < peaks["plain"][1]
