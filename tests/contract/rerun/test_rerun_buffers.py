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


def _in_place(module: Any, mean: torch.Tensor) -> None:
    module.average.mul_(0.9).add_(mean, alpha=0.1)


def _through_data(module: Any, mean: torch.Tensor) -> None:
    module.average.data.lerp_(mean, 0.1)


def _bound_anew(module: Any, mean: torch.Tensor) -> None:
    module.average = module.average * 0.9 + mean * 0.1


def _into_out(module: Any, mean: torch.Tensor) -> None:
    torch.lerp(module.average.clone(), mean, 0.1, out=module.average)


def _by_foreach(module: Any, mean: torch.Tensor) -> None:
    torch._foreach_mul_([module.average], 0.5)


def _through_a_view(module: Any, mean: torch.Tensor) -> None:
    module.average[2:4].add_(0.5)


def _grown(module: Any, mean: torch.Tensor) -> None:
    module.register_buffer("more", mean)
    module.average.add_(1)


MOVES = {
    "in place": _in_place,
    "through .data": _through_data,
    "bound anew": _bound_anew,
    "into out=": _into_out,
    "foreach": _by_foreach,
    "through a view": _through_a_view,
    "grown": _grown,
}


def _spectral() -> torch.nn.Module:
    return spectral_norm(torch.nn.Linear(8, 8))


def _parametrized() -> torch.nn.Module:
    return parametrizations.spectral_norm(torch.nn.Linear(8, 8))


def _observed() -> torch.nn.Module:
    return torch.ao.quantization.FakeQuantize(
        observer=torch.ao.quantization.MovingAverageMinMaxObserver, quant_min=0, quant_max=255
    )


MODULES: dict[str, Callable[[], torch.nn.Module]] = {
    **{name: partial(Average, move) for name, move in MOVES.items()},
    "spectral_norm": _spectral,
    "parametrized spectral_norm": _parametrized,
    "observer": _observed,
}


def _train(checkpoint: Checkpoint, make: Callable[[], torch.nn.Module], call: Any, steps: int = 3) -> list[Any]:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), make(), torch.nn.Linear(8, 8))
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
        model = torch.nn.Sequential(_spectral(), torch.nn.Tanh(), _spectral())
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
        model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), Average(_in_place)), leaf(4, 8)
        for is_training in (False, True, False, True):
            model.train(is_training)
            checkpoint(model, x).sum().backward()
        return [x.grad, model[1].average]

    assert_equal(run(ours), run(plain))


class Late(Average):
    """Changes its buffer once it is told to."""

    def __init__(self, *, reads: bool) -> None:
        super().__init__(_in_place)
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


def test_a_buffer_that_is_changed_and_not_read_does_no_harm() -> None:
    module, x = Late(reads=False), leaf(4, 8)
    for call in range(4):
        module.changes = call > 1
        ours(module, x).sum().backward()
    assert_equal(x.grad, (x.detach().exp() * 4))


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


class Convolutions(torch.nn.Sequential):
    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__(
            torch.nn.Conv1d(2, 3, 1),
            torch.nn.BatchNorm1d(3, momentum=momentum),
            torch.nn.ReLU(),
            torch.nn.Conv1d(3, 2, 1),
        )


class _WithActivation(torch.nn.BatchNorm1d):
    """As timm's: an activation after the norm."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).relu()


NORMS: dict[str, Callable[[], torch.nn.Module]] = {
    "momentum": Convolutions,
    "average": partial(Convolutions, None),
    "subclass": lambda: torch.nn.Sequential(torch.nn.Conv1d(2, 3, 1), _WithActivation(3), torch.nn.Conv1d(3, 2, 1)),
}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("call", MODULE_CALLS)
def test_batch_norm_updates_its_statistics_once(call: str, norm: str) -> None:
    def run(checkpoint: Checkpoint) -> list[Any]:
        torch.manual_seed(0)
        model, x = NORMS[norm](), leaf(4, 2, 5)
        for _ in range(3):
            MODULE_CALLS[call](checkpoint, model, x).sum().backward(retain_graph=True)
        return [x.grad, gradients(model), list(model.buffers())]

    assert_equal(run(ours), run(plain))


@pytest.mark.parametrize(
    ("make", "num_calls"), [(Convolutions, 1), (lambda: torch.nn.Sequential(Average(_in_place).eval()), 2)]
)
def test_buffers_cost_a_forward_no_operator(make: Callable[[], torch.nn.Module], num_calls: int) -> None:
    """From the first call on those of batch norm, from the second one on those that stay."""
    model, x = make(), leaf(4, 2, 8)
    counts = []
    for checkpoint in (plain, *[ours] * num_calls):
        with CountOperators() as operators:
            checkpoint(model, x)
        counts.append(operators.total)
    assert counts[0] == counts[-1]


def test_what_is_known_of_a_module_does_not_keep_it() -> None:
    model = Average(_in_place)
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
        inner = torch.nn.Sequential(torch.nn.Linear(3, 3), Convolutions()[1], torch.nn.Tanh())
        outer, x = Outer(inner, how), leaf(4, 3)
        mine = {name: (p.detach() * 2).requires_grad_() for name, p in outer.named_parameters()}
        buffers = {name: b.clone() for name, b in outer.named_buffers()}
        before = dict(outer.named_parameters())
        y = torch.func.functional_call(outer, (mine, buffers), (x,))
        y.sum().backward()
        assert all(parameter is before[name] for name, parameter in outer.named_parameters())
        return [x.grad, *(p.grad for p in mine.values()), gradients(outer), *buffers.values(), *outer.buffers()]

    assert_equal(run(partial(MODULE_CALLS[call], ours)), run(partial(MODULE_CALLS[call], plain)))


def test_functional_call_of_an_applied_model_computes_plain_gradients() -> None:
    def run(*, applies: bool) -> list[Any]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU()) for _ in range(3)))
        if applies:
            actckpt.apply(model)
        weights = {name: (p.detach() * 1.5).requires_grad_() for name, p in model.named_parameters()}
        (torch.func.functional_call(model, weights, (leaf(2, 4),)) ** 2).sum().backward()
        return [p.grad for p in weights.values()]

    assert_equal(run(applies=True), run(applies=False))


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
