"""What once was wrong, one test each."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from oracle import Log, assert_equal, leaf, ours, plain, soon, theirs
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import actckpt

GLOBAL_HIDDEN = torch.ones(3)
GLOBAL_LAYER: Any = None


def test_variable_that_a_called_sibling_function_assigns_is_seen_by_the_rerun() -> None:
    def run(method: Any) -> list[torch.Tensor]:
        hidden = torch.ones(3, requires_grad=True)

        def step(x: torch.Tensor) -> None:
            nonlocal hidden
            hidden = x.sin()

        def region(x: torch.Tensor) -> torch.Tensor:
            step(x)
            return (hidden * x).exp()

        grads = []
        for scale in (1.0, 5.0):
            x = torch.tensor([0.1, 0.2, 0.3], requires_grad=True)
            method(region, x * scale).sum().backward()
            grads.append(x.grad)
        return grads

    expected = run(plain)
    assert_equal(run(theirs), expected)
    assert_equal(run(ours), expected)


def test_global_tensor_that_the_function_itself_binds_anew_works_as_in_torch() -> None:
    def region(x: torch.Tensor) -> torch.Tensor:
        global GLOBAL_HIDDEN
        GLOBAL_HIDDEN = x.sin()
        return (GLOBAL_HIDDEN * x).exp()

    def run(method: Any) -> torch.Tensor | None:
        x = torch.tensor([0.1, 0.2, 0.3], requires_grad=True)
        method(region, x).sum().backward()
        return x.grad

    expected = run(plain)
    assert_equal(run(theirs), expected)
    assert_equal(run(ours), expected)


@pytest.mark.parametrize("kind", ["first linear", "bias", "autocast"])
def test_parameter_that_no_operator_saves_changed_before_backward_raises_or_is_right(kind: str) -> None:
    class Shift(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = torch.nn.Parameter(torch.tensor([0.1, 0.2, 0.3]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x + self.bias).exp()

    def run(method: Any) -> torch.Tensor | None:
        torch.manual_seed(0)
        model = Shift() if kind == "bias" else torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh())
        x = torch.randn(2, 3, requires_grad=kind != "first linear")
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
            y = method(model, x)
        parameter = next(model.parameters())
        with torch.no_grad():
            parameter.mul_(-1)
        y.float().sum().backward()
        return parameter.grad if kind == "first linear" else x.grad

    try:
        actual = run(ours)
    except actckpt.CheckpointError:
        return
    assert_equal(actual, run(plain))


def test_keyword_tensor_of_a_nested_region_changed_in_place_raises_or_is_right() -> None:
    class Config:
        mask = torch.tensor([1.0, 2.0, 3.0])

    def inner(x: torch.Tensor, *, mask: torch.Tensor) -> torch.Tensor:
        return (x * mask).exp()

    def run(method: Any, *, change: bool) -> torch.Tensor | None:
        config = Config()
        config.mask = config.mask.clone()
        x = torch.tensor([0.1, 0.2, 0.3], requires_grad=True)
        y = method(lambda x: method(inner, x, mask=config.mask).sin(), x)
        if change:
            config.mask.add_(1)
        y.sum().backward()
        return x.grad

    try:
        actual = run(ours, change=True)
    except actckpt.CheckpointError:
        return
    assert_equal(actual, run(plain, change=False))


def test_tensor_tracker_beside_a_context_fn_that_saves_every_operator() -> None:
    # The tracker's clone() runs inside the rerun context, which looks for it among the forward's operators.
    class Tracker:
        def __init__(self) -> None:
            self.states = {"a": torch.zeros(8, dtype=torch.uint8)}

        def get_states(self) -> dict[str, Any]:
            return self.states

        def set_states(self, states: dict[str, Any]) -> None:
            self.states = states

    tracker = Tracker()
    contexts = partial(create_selective_checkpoint_contexts, lambda *_, **__: CheckpointPolicy.MUST_SAVE)
    x = leaf(3)
    y = ours(lambda x: x.sin().exp(), x, context_fn=contexts, rng_trackers=[lambda: tracker])
    y.sum().backward()
    assert_equal(x.grad, torch.autograd.grad(x.sin().exp().sum(), x)[0])


def test_gradient_taken_inside_towards_a_tensor_upstream_of_the_input_works_as_in_torch() -> None:
    def run(method: Any) -> torch.Tensor | None:
        upstream = torch.tensor([0.1, 0.2, 0.3], requires_grad=True)

        def region(x: torch.Tensor) -> torch.Tensor:
            (grad,) = torch.autograd.grad(x.exp().sum(), upstream, create_graph=True, retain_graph=True)
            return (grad * x).exp()

        method(region, upstream * 2).sum().backward()
        return upstream.grad

    expected = run(plain)
    assert_equal(run(theirs), expected)
    assert_equal(run(ours), expected)


def test_global_tensor_bound_anew_under_outer_hooks_is_that_of_the_forward() -> None:
    # AttributeError: 'tuple' object has no attribute '_version', while wording the error.
    global GLOBAL_HIDDEN
    GLOBAL_HIDDEN = torch.full((3,), 2.0)

    def region(x: torch.Tensor) -> torch.Tensor:
        return (x * GLOBAL_HIDDEN).exp()

    x = leaf(3)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (t,), lambda packed: packed[0]):
        y = ours(region, x)
    GLOBAL_HIDDEN = torch.zeros(3)
    y.sum().backward()
    assert_equal(x.grad, (x.detach() * 2).exp() * 2)


def test_loop_variable_at_module_level_that_is_a_module_is_held_by_value() -> None:
    def run(method: Any) -> torch.Tensor | None:
        global GLOBAL_LAYER
        torch.manual_seed(0)
        layers = [torch.nn.Linear(3, 3) for _ in range(3)]
        x = h = torch.ones(2, 3, requires_grad=True)
        for GLOBAL_LAYER in layers:
            h = method(lambda h: GLOBAL_LAYER(h).tanh(), h)  # noqa: B023 - the point
        h.sum().backward()
        return x.grad

    try:
        actual = run(ours)
    except actckpt.CheckpointError:
        return
    assert_equal(actual, run(plain))


def test_wording_a_mismatch_keeps_no_local_variables_of_the_callers_alive() -> None:
    # Until Python 3.13 reading `frame.f_locals` (messages._in_module) leaves a copy of all locals in the frame: a
    # training loop that catches the error and goes on keeps its graph and activations until it returns.
    runs = Log()

    def function(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return x.sin().exp() if len(runs) == 1 else x[1:].sin().exp()

    middle = leaf(3) * 2
    storage = weakref.ref(middle.untyped_storage())
    y = ours(function, middle).sum()
    del middle
    with pytest.raises(actckpt.errors.RerunMismatchError):
        y.backward()
    del y
    gc.collect()
    assert soon(lambda: storage() is None)


def test_unknown_options_of_apply_raise_at_apply() -> None:
    # A misspelt keyword goes to the block's forward: TypeError in the first step, or lost in its **kwargs.
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    with pytest.raises((TypeError, ValueError), match="earlystop"):
        actckpt.apply(model, blocks=torch.nn.Linear, earlystop=False)


def test_a_parameter_that_goes_while_it_is_copied_is_held() -> None:
    # One of inference mode has no version, so it is copied, and code of the user runs then: "make sanitize" sees more.
    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            with torch.inference_mode():
                self.spare: torch.nn.Parameter | None = torch.nn.Parameter(torch.randn(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sin().exp()

    class Removes(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func is torch.Tensor.clone:
                module.spare = None
            return result

    module, x = Module(), leaf(3)
    spare = weakref.ref(module.spare)
    with Removes():
        y = ours(module, x)
    assert module.spare is None and spare() is not None
    assert_equal(torch.autograd.grad(y.sum(), x), torch.autograd.grad(module(x).sum(), x))
    del y
    gc.collect()
    assert soon(lambda: spare() is None)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_parameter_of_a_scripted_module_that_changes_before_backward_raises(name: str) -> None:
    scripted = torch.jit.script(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()))
    for _ in range(3):  # its first runs, which are profiled, save other tensors
        scripted(leaf(3, 4)).sum().backward()
    same, changed = (ours(scripted, leaf(3, 4)) for _ in range(2))
    same.sum().backward()
    with torch.no_grad():
        dict(scripted.named_parameters())[f"0.{name}"].add_(1.0)
    with pytest.raises(actckpt.errors.RerunMismatchError, match="parameter"):
        changed.sum().backward()
