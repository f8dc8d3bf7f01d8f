"""`actckpt.te.wrap`: a policy per module, and with `retain_graph=True` any number of backwards."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import Log, assert_equal, leaf
from torch import Tensor

import actckpt
from actckpt.errors import BlocksError, InputChangedError, RerunMismatchError, TransformerEngineError
from actckpt.memory import LiveStorages
from te_on_cpu import training
from te_on_cpu.training import HIDDEN, RECIPES, Setting, differing, train

Expected = Callable[[Setting], dict[str, Any]]

POLICIES: dict[str, Any] = {
    "by name": {"self_attention": "offload", "layernorm_mlp": "recompute"},
    "by the name of a type": {"MultiheadAttention": "recompute", "LayerNormMLP": "keep"},
    "wildcards and inner modules": {"*.core_attention": "recompute", "1.self_attention.proj": "offload"},
    "keep inside offload": {"TransformerLayer": "offload", "core_attention": "keep"},
    "recompute inside offload": {"TransformerLayer": "offload", "layernorm_mlp": "recompute"},
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_per_module_gives_the_bits_of_plain_training(
    te: Any, expected: Expected, policy: str, recipe: str
) -> None:
    setting = Setting(recipe, tracker="generators")
    found = train(te, setting, prepare=lambda model: actckpt.te.wrap(model, POLICIES[policy], min_bytes=0))
    assert differing(found, expected(setting)) == []


def test_a_reentrant_checkpoint_inside_a_retained_module_raises(te: Any) -> None:
    layer = _retained(training.make_layer(te, "TransformerLayer"))
    y = layer(leaf(8, 2, HIDDEN), checkpoint_core_attention=True)
    with pytest.raises(RuntimeError, match=r"not compatible with \.grad\(\)"):
        y.sum().backward()


@pytest.mark.parametrize("retain_graph", [False, True])
def test_models_that_mix_in_torchs_modules(te: Any, retain_graph: bool) -> None:
    def run(wrapped: bool) -> list[Any]:
        torch.manual_seed(1)
        layers = (training.make_layer(te, "TransformerLayer"), torch.nn.Linear(HIDDEN, HIDDEN), _linear(te))
        parts = {"embed": torch.nn.Linear(HIDDEN, HIDDEN), "layers": torch.nn.Sequential(*layers)}
        # Its last part has the name of one of TransformerEngine's.
        model = torch.nn.Sequential(OrderedDict(parts, self_attention=torch.nn.Linear(HIDDEN, HIDDEN)))
        x = leaf(8, 2, HIDDEN)
        keys = list(model.state_dict())
        if wrapped:
            assert actckpt.te.wrap(model, retain_graph=retain_graph) is model
            wrapped_names = [name for name, part in model.named_modules() if "forward" in part.__dict__]
            assert wrapped_names == ["layers.0", "layers.2"]
            assert list(model.state_dict()) == keys
        model(x).sum().backward()
        return [x.grad, *(p.grad for p in model.parameters())]

    assert_equal(run(True), run(False))


def _linear(te: Any) -> Any:
    return te.Linear(HIDDEN, HIDDEN)


def _retained(model: Any, policy: Any = "recompute") -> Any:
    return actckpt.te.wrap(model, policy, retain_graph=True, min_bytes=0)


def _x(rows: int = 4) -> Tensor:
    return leaf(rows, HIDDEN)


def _retained_with(te: Any, forward: Callable[..., Any]) -> Any:
    """Return a retained layer whose forward is this function of Linear's forward and the arguments."""

    class Layer(te.Linear):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return forward(super().forward, *args, **kwargs)

    return _retained(Layer(HIDDEN, HIDDEN))


def test_unwrap_copies_and_forwards_that_instances_had(te: Any) -> None:
    layer, calls = _linear(te), Log()
    own = layer.forward
    layer.forward = lambda x: calls.append(1) or own(x)
    actckpt.te.wrap(layer)
    layer(_x()).sum().backward()
    assert len(calls) == 2
    twin = copy.deepcopy(actckpt.te.wrap(_linear(te)))
    assert twin.forward.module is twin
    assert actckpt.te.unwrap(layer) is layer
    layer(_x()).sum().backward()
    assert len(calls) == 3
    with pytest.raises(BlocksError, match="nothing in Linear"):
        actckpt.te.unwrap(layer)


#: A policy and options that a layer does not take, and what the error says.
WRONG: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    ("save", {}, ValueError, "'keep', 'recompute', 'offload'"),
    ({"self_attention": "drop"}, {}, ValueError, "'keep', 'recompute', 'offload'"),
    ({}, {}, ValueError, "empty"),
    ({"self_atention": "offload"}, {}, BlocksError, "Nearest: self_attention"),
    ({torch.nn.Conv2d: "offload"}, {}, BlocksError, "of type"),
    (
        {"self_attention": "recompute", "proj": "keep"},
        {},
        ValueError,
        r"'self_attention.proj' \(keep\) is inside 'self",
    ),
    ({"self_attention": "keep"}, {"retain_graph": True}, ValueError, "one backward only"),
]


def test_what_cannot_be_wrapped_says_why(te: Any) -> None:
    layer = training.make_layer(te, "TransformerLayer")
    for policy, options, error, match in WRONG:
        with pytest.raises(error, match=match):
            actckpt.te.wrap(layer, policy, **options)
    with pytest.raises(BlocksError, match=r"actckpt\.apply"):
        actckpt.te.wrap(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    actckpt.te.wrap(layer, {torch.nn.Module: "offload"})
    with pytest.raises(BlocksError, match="wrapped already"):
        actckpt.te.wrap(layer)
    assert len([part for part in layer.modules() if "forward" in part.__dict__]) == len(list(layer.modules()))


def test_without_grad_mode_nothing_is_held(te: Any) -> None:
    modes: list[bool] = []
    layer = _retained_with(te, lambda linear, x: (modes.append(torch.is_grad_enabled()), linear(x))[1])
    with torch.no_grad():
        assert not layer(_x()).requires_grad
    layer.requires_grad_(False)
    assert not layer(torch.randn(4, HIDDEN)).requires_grad
    assert modes == [False, True]


def test_the_policy_acts_per_module_and_per_saved_tensor(te: Any) -> None:
    layer = training.make_layer(te, "TransformerLayer")
    actckpt.te.wrap(layer, {"self_attention": "offload", "layernorm_mlp": "recompute"}, min_bytes=4 * 64)
    runs: list[str] = []
    for name in ("self_attention.proj", "self_attention.core_attention"):
        layer.get_submodule(name).register_forward_hook(lambda *_, name=name: runs.append(name))
    actckpt.reset_stats()
    layer(leaf(8, 2, HIDDEN)).sum().backward()
    stats = actckpt.stats()
    assert sorted(runs) == ["self_attention.core_attention", "self_attention.proj"]
    assert stats.offloaded_bytes > 0 and stats.rerun_regions == 1

    def moved(policy: dict[str, Any], min_bytes: int) -> int:
        actckpt.te.wrap(actckpt.te.unwrap(layer), policy, min_bytes=min_bytes)
        actckpt.reset_stats()
        layer(leaf(8, 2, HIDDEN)).sum().backward()
        return actckpt.stats().offloaded_bytes

    assert moved({"self_attention": "offload"}, 1 << 20) == 0
    whole = {"TransformerLayer": "offload"}
    assert 0 < moved({**whole, "self_attention": "keep"}, 0) < moved(whole, 0)


def test_hooks_run_once_per_call_and_those_of_parameters_once_per_backward(te: Any) -> None:
    layer, calls = _linear(te), []
    layer.register_forward_hook(lambda *_: calls.append("forward"))
    layer.weight.register_hook(lambda grad: calls.append("hook") or grad * 2)
    layer.weight.register_post_accumulate_grad_hook(lambda _: calls.append("post"))
    x = _x()
    layer(x).sum().backward()
    expected, layer.weight.grad = layer.weight.grad, None
    calls.clear()
    _retained(layer)(x).sum().backward()
    assert calls == ["forward", "hook", "post"]
    assert_equal(layer.weight.grad, expected)


def test_a_te_checkpoint_inside_of_which_nothing_is_needed_leaves_no_flag(te: Any) -> None:
    x, y = _x(), _x()
    first, _ = _retained_with(te, lambda linear, x, y: (linear(x) * 2, te.checkpoint(torch.exp, y)))(x, y)
    for _ in range(2):
        torch.autograd.grad(first.sum(), x, retain_graph=True)
        assert training.process_state()["process: first modules"] == []


@pytest.mark.parametrize("frozen", ["parameters", "input", "neither"])
def test_only_what_is_needed_gets_a_gradient(te: Any, frozen: str) -> None:
    layer, x = training.make_layer(te, "TransformerLayer", dropout=0.0), leaf(8, 2, HIDDEN)
    layer.layernorm_mlp.requires_grad_(frozen != "parameters")
    x.requires_grad_(frozen != "input")
    inputs = [t for t in (x, *layer.parameters()) if t.requires_grad]
    expected = torch.autograd.grad(layer(x).square().sum(), inputs)
    y = _retained(layer)(x).square().sum()
    assert_equal(torch.autograd.grad(y, inputs, retain_graph=True), expected)
    for tensor, grad in zip(inputs, expected, strict=True):
        assert_equal(torch.autograd.grad(y, tensor, retain_graph=True)[0], grad)


def test_arguments_and_results_of_any_structure(te: Any) -> None:
    class Attention(te.Linear):  # type: ignore[misc]
        def forward(self, q: Any, *, kv: Any, scale: Any = None, mask: Any = None) -> Any:
            y = super().forward(q) * kv["k"] + kv["v"][0] * scale + kv["v"][1]
            return {"y": y, "same": q, "none": None, "index": y.argmax(-1), "parts": (y.exp(), 3), "constant": mask}

    def run(wrapped: bool) -> Any:
        torch.manual_seed(1)
        layer, q, k, v = Attention(HIDDEN, HIDDEN), _x(), _x(), _x()
        if wrapped:
            _retained(layer)
        out = layer(q, kv={"k": k, "v": [v, k]}, scale=2.0, mask=torch.ones(2))
        assert out["none"] is None and out["parts"][1] == 3 and not out["index"].requires_grad
        assert not out["constant"].requires_grad
        loss = out["y"].sum() + out["parts"][0].sum() + (out["same"] * 2).sum()
        return [out["index"], *torch.autograd.grad(loss, [q, k, v, layer.weight])]

    assert_equal(run(True), run(False))


def test_a_gradient_that_would_be_lost_raises(te: Any) -> None:
    class Holder:
        def __init__(self, value: Tensor) -> None:
            self.value = value

    outside = Holder(leaf(HIDDEN))
    layer = _retained_with(te, lambda linear, x, other=None: linear(x) * (outside if other is None else other).value)
    with pytest.raises(TransformerEngineError, match=rf"tensor of shape \({HIDDEN},\)"):
        layer(_x())
    outside.value = leaf(HIDDEN) * 2
    with pytest.raises(TransformerEngineError, match="its gradient would be lost"):
        layer(_x())
    with pytest.raises(TransformerEngineError, match="its gradient would be lost"):
        layer(_x(), Holder(leaf(HIDDEN)))
    layer(_x(), Holder(torch.randn(HIDDEN))).sum().backward()


@pytest.mark.parametrize("is_patched", [False, True], ids=["", "forward of another library"])
@pytest.mark.parametrize(("change", "error"), [("input", InputChangedError), ("parameter", RerunMismatchError)])
def test_changes_between_forward_and_backward_raise(te: Any, change: str, error: Any, is_patched: bool) -> None:
    layer, h = _linear(te), _x() * 1.0
    if is_patched:
        own = layer.forward
        layer.forward = lambda x: own(x)
    y = _retained(layer)(h).sum()
    with torch.no_grad():
        (h if change == "input" else layer.weight).add_(1.0)
    with pytest.raises(error):
        y.backward()


def test_a_forward_that_does_not_repeat_itself_raises(te: Any) -> None:
    counts = itertools.count(1)
    y = _retained_with(te, lambda linear, x: linear(x)[: next(counts)])(_x())
    with pytest.raises(RerunMismatchError, match=r"Forward: \(1, 32\) .* Rerun: \(2, 32\)"):
        y.sum().backward()

    def in_place(linear: Any, x: Any, cache: Any) -> Any:
        with torch.no_grad():
            cache.add_(1)
        return linear(x + cache)

    y = _retained_with(te, in_place)(_x(), torch.zeros(4, HIDDEN))
    with pytest.raises(InputChangedError):
        y.sum().backward()
    with pytest.raises(InputChangedError, match="changes an argument in place"):
        _retained_with(te, in_place)(_x(), _x())


def test_inside_other_regions_and_offloading(te: Any) -> None:
    def run(method: str) -> Any:
        torch.manual_seed(1)
        layer, x = training.make_layer(te, "TransformerLayer", dropout=0.2), leaf(8, 2, HIDDEN)
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
    for method in ("checkpoint", "offload", "wrapped"):
        for grads in run(method):
            assert_equal(grads, expected)


def test_a_backward_inside_the_forward_raises(te: Any) -> None:
    layer = _retained_with(te, lambda linear, x: linear(x) * torch.autograd.grad(x.exp().sum(), x)[0])
    with pytest.raises(TransformerEngineError, match="a backward inside its forward"):
        layer(_x())


def test_the_inputs_are_freed_with_the_graph(te: Any) -> None:
    layer, x = _retained(_linear(te)), _x()

    def forward() -> tuple[Tensor, Any]:
        h = x * 1.0
        return layer(h).sum(), weakref.ref(h)

    y, held = forward()
    y.backward(retain_graph=True)
    assert held() is not None
    y.backward()
    gc.collect()
    assert held() is None
    y, held = forward()
    del y
    gc.collect()
    assert held() is None, "also where no backward ran"


@pytest.mark.parametrize("retain_graph", [False, True])
def test_saved_tensors_are_freed_at_their_last_use_in_backward(te: Any, retain_graph: bool) -> None:
    """After forward a layer holds its input only; backward holds one layer's tensors at a time."""
    depth, rows = 6, 256

    class Layer(te.Linear):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:  # torch's operators: kernels of TransformerEngine are hidden from modes
            for _ in range(4):
                x = (x @ self.weight).sin().exp()
            return x

    model = torch.nn.Sequential(*(Layer(HIDDEN, HIDDEN, bias=False) for _ in range(depth)))
    parameters = list(model.parameters())
    peaks = {}
    for method in ("plain", "wrapped"):
        if method == "wrapped":
            actckpt.te.wrap(model, retain_graph=retain_graph)
        x = torch.randn(rows, HIDDEN, requires_grad=True)
        with LiveStorages(parameters=parameters) as live:
            loss = model(x).sum()
            held = live.live_bytes
            loss.backward()
            peaks[method] = held, live.peak_bytes
            del loss
            gc.collect()
            assert live.live_bytes <= rows * HIDDEN * 4 * 2, "x.grad, and at most one more"
        for parameter in parameters:
            parameter.grad = None
    size = rows * HIDDEN * 4
    one_layer = peaks["plain"][0] / depth
    assert peaks["wrapped"][0] <= (depth + 1) * size
    assert peaks["wrapped"][1] <= depth * size + 2.5 * one_layer < peaks["plain"][1]
