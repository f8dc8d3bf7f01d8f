"""A rerun finds the buffers of its modules as its forward found them, and changes none."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from input_routes import MODULE_CALLS
from oracle import Checkpoint, CountOperators, assert_equal, gradients, leaf, ours, plain, soon, theirs
from torch.nn.utils import parametrizations, spectral_norm
from torch.overrides import TorchFunctionMode

import actckpt


class Average(torch.nn.Module):
    """Reads a moving average of its inputs and moves it."""

    def __init__(self, move: Callable[[Any, torch.Tensor], None]) -> None:
        super().__init__()
        self.move = move
        self.register_buffer("average", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (x + self.average).sin()
        if self.training:
            with torch.no_grad():
                self.move(self, x.detach().mean(0))
        return (y + self.average).exp()


MOVES: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "in place": lambda m, mean: m.average.mul_(0.9).add_(mean, alpha=0.1),
    "through .data": lambda m, mean: m.average.data.lerp_(mean, 0.1),
    "bound anew": lambda m, mean: setattr(m, "average", m.average * 0.9 + mean * 0.1),
    "into out=": lambda m, mean: torch.lerp(m.average.clone(), mean, 0.1, out=m.average),
    "foreach": lambda m, mean: torch._foreach_mul_([m.average], 0.5),
    "through a view": lambda m, mean: m.average[2:4].add_(0.5),
    "grown": lambda m, mean: (m.register_buffer("more", mean), m.average.add_(1)),
}


class WithActivation(torch.nn.BatchNorm1d):
    """As timm's: an activation after the norm."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).relu()


MODULES: dict[str, Callable[[], torch.nn.Module]] = {
    **{name: partial(Average, move) for name, move in MOVES.items()},
    "spectral_norm": lambda: spectral_norm(torch.nn.Linear(8, 8)),
    "parametrized spectral_norm": lambda: parametrizations.spectral_norm(torch.nn.Linear(8, 8)),
    "observer": lambda: torch.ao.quantization.FakeQuantize(
        observer=torch.ao.quantization.MovingAverageMinMaxObserver, quant_min=0, quant_max=255
    ),
    "batch norm": lambda: torch.nn.BatchNorm1d(8),
    "batch norm by averages": lambda: torch.nn.BatchNorm1d(8, momentum=None),
    "batch norm of a subclass": lambda: WithActivation(8),
}


class TakesGradient(torch.nn.Sequential):
    """Takes a gradient inside of its forward, after its buffers changed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        (inner,) = torch.autograd.grad(y.square().sum(), self[0].weight, retain_graph=True)
        return (y.tanh() @ inner.detach().tanh()).tanh()


def _train(
    checkpoint: Checkpoint,
    make: Callable[[], torch.nn.Module],
    call: Any,
    steps: int = 3,
    sequential: type[torch.nn.Sequential] = torch.nn.Sequential,
) -> list[Any]:
    torch.manual_seed(3)
    model = sequential(torch.nn.Linear(8, 8), make(), torch.nn.Linear(8, 8))
    model.train()
    results: list[Any] = []
    for _ in range(steps):
        x = torch.randn(4, 8)
        y = call(checkpoint, model, x) * call(checkpoint, model, x + 1)  # two forwards before the backwards
        left = [buffer.clone() for buffer in model.buffers()]
        model.zero_grad()
        y.sum().backward(retain_graph=True)
        y.square().sum().backward()
        results += [gradients(model), left, [buffer.clone() for buffer in model.buffers()]]
    return results


@pytest.mark.filterwarnings("ignore:.*")  # torch.ao is deprecated
@pytest.mark.parametrize("call", MODULE_CALLS)
@pytest.mark.parametrize("module", MODULES)
def test_buffers_that_a_forward_reads_and_changes_are_as_it_found_them(module: str, call: str) -> None:
    make, how = MODULES[module], MODULE_CALLS[call]
    assert_equal(_train(ours, make, how), _train(plain, make, how))


@pytest.mark.usefixtures("no_audit")
@pytest.mark.filterwarnings("ignore:.*")  # torch.ao is deprecated
@pytest.mark.parametrize("call", MODULE_CALLS)
@pytest.mark.parametrize("module", MODULES)
def test_a_gradient_inside_of_a_forward_sees_the_buffers_that_the_forward_found(module: str, call: str) -> None:
    make, how = MODULES[module], MODULE_CALLS[call]
    assert_equal(_train(ours, make, how, sequential=TakesGradient), _train(plain, make, how, sequential=TakesGradient))


def _in_region(function: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
    with actckpt.region("recompute"):
        return function(*args)


REPLAYS: dict[str, Any] = {"region": _in_region, "matmuls": partial(actckpt.checkpoint, policy="matmuls")}


@pytest.mark.filterwarnings("ignore:.*")  # torch.ao is deprecated
@pytest.mark.parametrize("replay", REPLAYS)
@pytest.mark.parametrize("module", MODULES)
def test_replay_has_the_buffers_that_a_later_forward_overwrites(module: str, replay: str) -> None:
    make, how = MODULES[module], MODULE_CALLS["module"]
    assert_equal(_train(REPLAYS[replay], make, how), _train(plain, make, how))


def test_a_rerun_has_the_weight_that_a_hook_outside_of_it_had_set() -> None:
    """`apply` runs the forward of a block again, and not the hooks before it."""

    def run(*, is_applied: bool) -> list[Any]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(MODULES["spectral_norm"](), torch.nn.Tanh(), MODULES["spectral_norm"]())
        if is_applied:
            actckpt.apply(model, policy="recompute", blocks=["0", "2"])
        (model(torch.ones(4, 8)).square().sum() + model(torch.ones(4, 8) * 2).square().sum()).backward()
        return gradients(model)

    assert_equal(run(is_applied=True), run(is_applied=False))


def test_spectral_norm_is_silently_wrong_with_torch() -> None:
    make, how = MODULES["spectral_norm"], MODULE_CALLS["module"]
    try:
        assert_equal(_train(theirs, make, how), _train(plain, make, how))
    except AssertionError:
        return
    raise AssertionError("torch has learnt this: say so in docs/differences.md")


def test_a_module_that_changes_buffers_in_training_only_is_right_after_evaluation() -> None:
    def run(checkpoint: Checkpoint) -> list[Any]:
        torch.manual_seed(0)
        model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), Average(MOVES["in place"])), leaf(4, 8)
        for is_training in (False, True, False, True):
            model.train(is_training)
            checkpoint(model, x).sum().backward()
        return [x.grad, model[1].average]

    assert_equal(run(ours), run(plain))


class Late(Average):
    """Changes its buffer once it is told to."""

    def __init__(self, *, reads: bool) -> None:
        super().__init__(MOVES["in place"])
        self.reads, self.changes = reads, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (x + self.average if self.reads else x).exp()
        if self.changes:
            with torch.no_grad():
                self.average.add_(1)
        return y


@pytest.mark.parametrize("as_module", [True, False])
def test_a_buffer_that_is_changed_for_the_first_time_in_a_later_call_raises_once_and_is_named(as_module: bool) -> None:
    module, x = Late(reads=True), leaf(4, 8)
    call = MODULE_CALLS["module" if as_module else "closure"]
    for _ in range(2):
        call(ours, module, x).sum().backward()
    module.changes = True
    y = call(ours, module, x)
    with pytest.raises(
        actckpt.errors.InputChangedError, match=r"(?s)Buffer 'average' of Late.*version 1.*version 0.*policy"
    ):
        y.sum().backward()
    x.grad = None
    expected = torch.autograd.grad((x + module.average).exp().sum(), x)[0]
    call(ours, module, x).sum().backward()
    assert_equal(x.grad, expected)


@pytest.mark.parametrize("reads", [True, False])
def test_a_buffer_that_somebody_changes_after_the_forward_raises_where_it_is_read(reads: bool) -> None:
    module, x = Late(reads=reads), leaf(4, 8)
    y = ours(module, x)
    module.average.add_(1)
    if not reads:
        y.sum().backward()
        assert_equal(x.grad, x.detach().exp())
        return
    with pytest.raises(actckpt.errors.InputChangedError, match="Buffer 'average' of Late"):
        y.sum().backward()


@pytest.mark.parametrize("call", MODULE_CALLS)
def test_inference_buffers_that_change_are_as_the_forward_found_them(call: str) -> None:
    with torch.inference_mode():
        module = Late(reads=True)
    x = leaf(4, 8)
    expected = torch.autograd.grad(MODULE_CALLS[call](plain, module, x).sum(), x)[0]
    y = MODULE_CALLS[call](ours, module, x)
    with torch.inference_mode():
        module.average.add_(1)
    y.sum().backward()
    assert_equal(x.grad, expected)


def test_a_buffer_that_another_one_takes_the_place_of_is_back_in_the_rerun() -> None:
    module, x = Late(reads=True), leaf(4, 8)
    y = ours(module, x)
    other = module.average = torch.zeros(8)
    y.sum().backward()
    assert_equal(x.grad, (x.detach() + 1).exp())
    assert module.average is other


def test_the_check_of_buffers_can_be_switched_off() -> None:
    module, x = Late(reads=True), leaf(4, 8)
    y = ours(module, x, determinism_check="none")
    module.average.add_(0)
    y.sum().backward()
    assert_equal(x.grad, (x.detach() + 1).exp())


@pytest.mark.parametrize(
    ("make", "num_calls"), [(partial(torch.nn.BatchNorm1d, 8), 1), (lambda: Average(MOVES["in place"]).eval(), 2)]
)
def test_buffers_cost_a_forward_no_operator(make: Callable[[], torch.nn.Module], num_calls: int) -> None:
    """From the first call on those of batch norm, from the second one on those that stay."""
    model, x = make(), leaf(4, 8)
    counts = []
    for checkpoint in (plain, *[ours] * num_calls):
        with CountOperators() as operators:
            checkpoint(model, x)
        counts.append(operators.total)
    assert counts[0] == counts[-1]


def test_what_is_known_of_a_module_does_not_keep_it() -> None:
    model = Average(MOVES["in place"])
    ours(model, leaf(4, 8)).sum().backward()
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


def test_a_model_without_buffers_runs_under_no_mode_in_its_first_call() -> None:
    seen = []

    class Look(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(torch._C._len_torch_dispatch_stack())
            return x.exp()

    ours(Look(), leaf(3)).sum().backward()
    assert seen == [0, 0]


class Outer(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module, call: Any) -> None:
        super().__init__()
        self.inner, self.call = inner, call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.call(self.inner, x)
        return y


@pytest.mark.parametrize("call", MODULE_CALLS)
def test_functional_call_computes_the_gradients_of_its_own_weights(call: str) -> None:
    def run(how: Callable[..., torch.Tensor]) -> list[Any]:
        torch.manual_seed(0)
        inner = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Tanh())
        outer, x = Outer(inner, how), leaf(4, 3)
        mine = {name: (p.detach() * 2).requires_grad_() for name, p in outer.named_parameters()}
        buffers = {name: b.clone() for name, b in outer.named_buffers()}
        before = dict(outer.named_parameters())
        y = torch.func.functional_call(outer, (mine, buffers), (x,))
        y.sum().backward()
        assert all(parameter is before[name] for name, parameter in outer.named_parameters())
        return [x.grad, *(p.grad for p in mine.values()), gradients(outer), *buffers.values(), *outer.buffers()]

    assert_equal(run(partial(MODULE_CALLS[call], ours)), run(partial(MODULE_CALLS[call], plain)))


def test_a_parameter_or_layer_that_another_one_takes_the_place_of_is_back_in_the_rerun() -> None:
    model, x = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3), torch.nn.Tanh()), leaf(2, 3)
    expected = torch.autograd.grad(model(x).sum(), [x, *model.parameters()])
    before = list(model.parameters())
    y = ours(model, x)
    other, weight = torch.nn.Linear(3, 3), torch.nn.Parameter(torch.zeros(3, 3))
    model[0] = other
    model[1].weight = weight
    assert_equal(torch.autograd.grad(y.sum(), [x, *before]), expected)
    assert model[0] is other and model[1].weight is weight


def test_weights_of_functional_call_that_changed_in_place_raise() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh())
    weights = {f"inner.{name}": (p.detach() * 2).requires_grad_() for name, p in model.named_parameters()}
    y = torch.func.functional_call(Outer(model, ours), weights, (leaf(2, 3),))
    with torch.no_grad():
        weights["inner.0.bias"].add_(1)
    with pytest.raises(actckpt.errors.RerunMismatchError, match=r"version 1; it was at version 0"):
        y.sum().backward()


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


class Stages(torch.nn.Module):
    """Two parts, each run in a region of its own; the second changes a buffer."""

    def __init__(self, second: torch.nn.Module) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), second

    def run_first(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x).tanh()

    def run_second(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(x).exp()


SECOND: dict[str, Callable[[Checkpoint, Stages, torch.Tensor], torch.Tensor]] = {
    "method": lambda checkpoint, model, x: checkpoint(model.run_second, x),
    "module": lambda checkpoint, model, x: checkpoint(model.second, x).exp(),
    "closure": lambda checkpoint, model, x: checkpoint(lambda h: model.second(h).exp(), x),
}


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("call", SECOND)
def test_a_module_is_watched_until_a_region_calls_it(call: str, is_training: bool) -> None:
    def program(checkpoint: Checkpoint) -> Any:
        torch.manual_seed(0)
        model, found = Stages(parametrizations.spectral_norm(torch.nn.Linear(4, 4))), []
        model.train(is_training)
        for _ in range(3):
            x = leaf(2, 4)
            SECOND[call](checkpoint, model, checkpoint(model.run_first, x)).sum().backward()
            found += [x.grad, gradients(model), [buffer.clone() for buffer in model.buffers()]]
        return found

    assert_equal(program(ours), program(plain))


def test_a_module_that_no_region_calls_costs_no_operator_after_the_first_step() -> None:
    model = Stages(torch.nn.BatchNorm1d(4).eval())

    def operators() -> int:
        with CountOperators() as counted:
            y = ours(model.run_first, leaf(2, 4))
        y.sum().backward()
        return counted.total

    assert operators() == operators()


def test_statistics_of_a_batch_norm_that_no_region_calls_are_not_copied_in_reruns() -> None:
    model = Stages(torch.nn.BatchNorm1d(4))
    for method in (model.run_first, model.run_second):
        y = ours(method, leaf(2, 4))
        with CountOperators() as counted:
            y.sum().backward()
        assert ("aten.clone.default" in counted.counts) is (method == model.run_second)
