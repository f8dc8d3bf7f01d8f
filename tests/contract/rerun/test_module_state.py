"""A rerun finds buffers, modes and generators of its modules as its forward found them, and leaves them as they are."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from input_routes import MODULE_CALLS
from oracle import Checkpoint, CountOperators, assert_equal, gradients, in_region, leaf, ours, plain, theirs
from torch.nn.utils import parametrizations, spectral_norm

import actckpt
from actckpt.errors import RerunMismatchError


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


#: Modules that change buffers.
BUFFERS: dict[str, Callable[[], torch.nn.Module]] = {
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


class Scaled(torch.nn.Module):
    """Computes something else in training, with as many saved tensors of the same shapes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x * (3 if self.training else 2)).exp()


class Modes(torch.nn.Module):
    """Has parts that go by the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.scaled, self.dropout = Scaled(), torch.nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.scaled(x)).tanh()


class Switches(Modes):
    """Switches a mode, and computes a gradient after it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.scaled(x)
        self.scaled.eval()
        (inner,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        return super().forward(y * inner.detach())


def _switch(module: Any) -> None:
    module.train(not module.training)


def _replace_and_switch(module: Any) -> None:
    before, module.scaled = module.scaled, Scaled()
    _switch(before)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


class Noise(torch.nn.Module):
    """Multiplies its input by numbers from a generator of its own, which `hold` puts into an attribute."""

    def __init__(self, hold: Callable[[torch.Generator], Any] = lambda generator: generator) -> None:
        super().__init__()
        self.held = hold(_generator())

    def generator(self) -> torch.Generator:
        values = self.held.values() if isinstance(self.held, dict) else self.held
        values = [values] if isinstance(values, torch.Generator) else values
        (found,) = [value for value in values if isinstance(value, torch.Generator)]
        return found

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * torch.rand(x.shape, generator=self.generator())).exp()


class Lazy(Noise):
    """Makes its generator in its first forward, or another one in each."""

    def __init__(self, *, in_each: bool) -> None:
        super().__init__(lambda _: None)
        self.in_each = in_each

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.in_each or self.held is None:
            self.held = _generator()
        return super().forward(x)


class Makes(torch.nn.Module):
    """Makes a module in its first forward, with a generator that was there before."""

    def __init__(self) -> None:
        super().__init__()
        self.made, self.inner = _generator(), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.inner is None:
            self.inner = Noise(lambda _: self.made)
        return self.inner(x)


class Equal(torch.Generator):
    """One that is equal to others."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Equal)

    __hash__ = torch.Generator.__hash__


class Pair(torch.nn.Module):
    """Has two generators that are equal and not the same."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Equal(), Equal()
        self.first.manual_seed(1), self.second.manual_seed(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rand(8, generator=self.first) * torch.rand(8, generator=self.second)


def _seed(module: Any) -> None:
    module.generator().manual_seed(5)


def _nothing(module: Any) -> None:
    pass


#: How to make a module, and what somebody does to it between two forwards and their backward.
MODULES: dict[str, tuple[Callable[[], torch.nn.Module], Callable[[Any], object]]] = {
    **{name: (make, _nothing) for name, make in BUFFERS.items()},
    "mode": (Modes, _switch),
    "mode of a part": (Modes, lambda module: _switch(module.scaled)),
    "mode of a part that is replaced": (Modes, _replace_and_switch),
    "mode that the forward switches": (Switches, lambda module: module.train()),
    "generator": (Noise, _seed),
    "generator in a list": (partial(Noise, lambda generator: [None, generator]), _seed),
    "generator in a tuple": (partial(Noise, lambda generator: (generator, "noise")), _seed),
    "generator in a dict": (partial(Noise, lambda generator: {"noise": generator}), _seed),
    "generator of each forward": (partial(Lazy, in_each=True), _nothing),
    "generator of a module that the forward makes": (Makes, _nothing),
    "generators that are equal": (Pair, _nothing),
}


def _state(model: torch.nn.Module) -> list[Any]:
    generators = [module.generator().get_state() for module in model.modules() if isinstance(module, Noise)]
    modes = [module.training for module in model.modules()]
    return [[buffer.clone() for buffer in model.buffers()], generators, modes, torch.get_rng_state()]


class TakesGradient(torch.nn.Sequential):
    """Takes a gradient inside of its forward, after its buffers changed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        (inner,) = torch.autograd.grad(y.square().sum(), self[0].weight, retain_graph=True)
        return (y.tanh() @ inner.detach().tanh()).tanh()


def _train(
    checkpoint: Checkpoint, name: str, call: Any, sequential: type[torch.nn.Sequential] = torch.nn.Sequential
) -> list[Any]:
    torch.manual_seed(3)
    make, disturb = MODULES[name]
    model = sequential(torch.nn.Linear(8, 8), make(), torch.nn.Linear(8, 8))
    results: list[Any] = []
    for _ in range(3):
        x = torch.randn(4, 8)
        y = call(checkpoint, model, x)
        disturb(model[1])
        y = y * call(checkpoint, model, x + 1)
        left = _state(model)
        model.zero_grad()
        y.sum().backward(retain_graph=True)
        y.square().sum().backward()
        results += [gradients(model), left, _state(model)]
    return results


@pytest.mark.filterwarnings("ignore:.*")  # torch.ao is deprecated
@pytest.mark.parametrize("call", MODULE_CALLS)
@pytest.mark.parametrize("module", MODULES)
def test_what_a_forward_reads_and_changes_is_as_it_found_it(module: str, call: str) -> None:
    assert_equal(_train(ours, module, MODULE_CALLS[call]), _train(plain, module, MODULE_CALLS[call]))


@pytest.mark.usefixtures("no_audit")
@pytest.mark.filterwarnings("ignore:.*")  # torch.ao is deprecated
@pytest.mark.parametrize("call", MODULE_CALLS)
@pytest.mark.parametrize("module", BUFFERS)
def test_a_gradient_inside_of_a_forward_sees_the_buffers_that_the_forward_found(module: str, call: str) -> None:
    how = MODULE_CALLS[call]
    assert_equal(_train(ours, module, how, TakesGradient), _train(plain, module, how, TakesGradient))


REPLAYS: dict[str, Any] = {"region": in_region(), "matmuls": partial(actckpt.checkpoint, policy="matmuls")}


@pytest.mark.filterwarnings("ignore:.*")  # torch.ao is deprecated
@pytest.mark.parametrize("replay", REPLAYS)
@pytest.mark.parametrize("module", MODULES)
def test_replay_has_what_a_later_forward_overwrites(module: str, replay: str) -> None:
    how = MODULE_CALLS["module"]
    assert_equal(_train(REPLAYS[replay], module, how), _train(plain, module, how))


@pytest.mark.parametrize("module", ["spectral_norm", "mode of a part", "generator"])
def test_torch_is_silently_wrong(module: str) -> None:
    how = MODULE_CALLS["module"]
    with pytest.raises(AssertionError):  # else torch has learnt this: say so in docs/differences.md
        assert_equal(_train(theirs, module, how), _train(plain, module, how))


def test_a_rerun_has_the_weight_that_a_hook_outside_of_it_had_set() -> None:
    """`apply` runs the forward of a block again, and not the hooks before it."""

    def run(*, is_applied: bool) -> list[Any]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(BUFFERS["spectral_norm"](), torch.nn.Tanh(), BUFFERS["spectral_norm"]())
        if is_applied:
            actckpt.apply(model, policy="recompute", blocks=["0", "2"])
        (model(torch.ones(4, 8)).square().sum() + model(torch.ones(4, 8) * 2).square().sum()).backward()
        return gradients(model)

    assert_equal(run(is_applied=True), run(is_applied=False))


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
    """Changes its buffer in the forward if a flag is set."""

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


def test_a_buffer_parameter_or_layer_that_another_one_takes_the_place_of_is_back_in_the_rerun() -> None:
    model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8), Late(reads=True)), leaf(2, 8)
    before = list(model.parameters())
    expected = torch.autograd.grad(model(x).sum(), [x, *before])
    y = ours(model, x)
    others = torch.nn.Linear(8, 8), torch.nn.Parameter(torch.zeros(8, 8)), torch.zeros(8)
    model[0], model[1].weight, model[2].average = others
    assert_equal(torch.autograd.grad(y.sum(), [x, *before]), expected)
    assert model[0] is others[0] and model[1].weight is others[1] and model[2].average is others[2]


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


@pytest.mark.parametrize("call", MODULE_CALLS)
@pytest.mark.parametrize("is_replaced", [True, False])
def test_a_generator_that_a_rerun_finds_otherwise_raises(is_replaced: bool, call: str) -> None:
    """Another one, or the one that the forward made, which has drawn since."""
    actckpt.configure(audit="always")  # other tests called these functions before
    module = Noise() if is_replaced else Lazy(in_each=False)
    y = MODULE_CALLS[call](ours, module, leaf(3))
    if is_replaced:
        module.held = torch.Generator().manual_seed(7)
    with pytest.raises(RerunMismatchError, match=r"(?s)does not repeat its forward.*generator of its own"):
        y.sum().backward()


def test_a_generator_is_as_it_was_after_a_rerun_that_raises() -> None:
    class Fails(Noise):
        runs = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = super().forward(x)
            self.runs += 1
            if self.runs > 1:
                raise KeyError("rerun")
            return x.exp()

    module = Fails()
    y = ours(module, leaf(3))
    state = module.held.get_state()
    with pytest.raises(KeyError, match="rerun"):
        y.sum().backward()
    assert_equal(module.held.get_state(), state)


@pytest.mark.usefixtures("no_audit")
@pytest.mark.parametrize("method", [theirs, ours])
def test_without_preserve_rng_state_the_rerun_draws_on_from_generators(method: Checkpoint) -> None:
    noise = Noise()
    y = method(noise, leaf(3, 4), preserve_rng_state=False)
    state = noise.held.get_state()
    y.sum().backward()
    assert not torch.equal(noise.held.get_state(), state)


@pytest.mark.usefixtures("no_audit")
@pytest.mark.parametrize(("place", "is_found"), [(63, True), (64, False)])
def test_of_a_long_list_the_first_64_are_looked_at(place: int, is_found: bool) -> None:
    """As docs/differences.md says; a bound, so that regions of modules that keep long lists are not slow."""
    noise, x = Noise(lambda generator: [None] * place + [generator]), leaf(3)
    ours(noise, x).sum().backward()
    drawn = torch.rand(3, generator=_generator())
    assert torch.equal(x.grad, drawn * (x * drawn).exp()) is is_found


def _checks_us(num: int) -> float:
    """Return microseconds of CPU time per module of a region with many attributes."""

    class Empty(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.__dict__.update((f"empty{number}", None) for number in range(8))

    class Model(torch.nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.exp()

    model, x, times = Model(*(Empty() for _ in range(num))), leaf(3), []
    for _ in range(4):
        start = time.process_time()
        ours(model, x).sum().backward()
        times.append(time.process_time() - start)
    return min(times) * 1e6 / num


@pytest.mark.usefixtures("no_audit")
def test_checks_take_no_longer_per_module_with_many_modules() -> None:
    # In quadratic time it would be 16 times; what else runs on the core may spoil one of three tries.
    assert any(_checks_us(3200) < 3 * _checks_us(200) for _ in range(3))
