"""A block's forward that runs out of memory under a budget runs once more, recomputed, with the same results."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from oracle import assert_equal
from torch import Tensor
from torch.nn import functional

import actckpt

#: Steps until the plan is kept, without trials.
_NUM_STEPS = 5


class _Fault:
    """Raises in one of its calls, once `calls_left` is set. No attribute of a block: attributes must not change."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Raise in no call."""
        self.calls_left = self.num_calls = 0
        self.error: Callable[[], Exception] = lambda: torch.OutOfMemoryError("no memory left")

    def __call__(self) -> None:
        self.num_calls += 1
        self.calls_left -= 1
        if self.calls_left == 0:
            raise self.error()


_fault = _Fault()


@pytest.fixture(autouse=True)
def _reset() -> None:
    _fault.reset()
    actckpt.reset_stats()


class _Block(torch.nn.Module):
    """Draws from the default generator, moves statistics, and changes a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = torch.nn.Linear(8, 64), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 8)
        self.register_buffer("mean", torch.zeros(64))

    def forward(self, x: Tensor) -> Tensor:
        h = functional.dropout(self.norm(self.first(x)), 0.3)
        self.mean.mul_(0.9).add_(h.detach().mean(0))
        _fault()
        return x + self.last(functional.gelu(h) - self.mean.clone())


class _Drawing(torch.nn.Module):
    """Draws from a generator of its own, and twice from the default one."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.noise = torch.nn.Linear(8, 64), torch.nn.Linear(64, 8), torch.Generator()

    def forward(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        h = torch.tanh(self.up(x))
        h = h * torch.rand(h.shape, generator=generator or self.noise)
        _fault()
        return x + self.down(functional.dropout(h, 0.2).sigmoid() * torch.rand(h.shape))


class _Model(torch.nn.Module):
    def __init__(self, kind: type[torch.nn.Module], generator: torch.Generator | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(kind() for _ in range(3))
        self.generator = generator

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) if self.generator is None else layer(x, self.generator)
        return x.square().sum()


def _results(model: _Model, failing: int = 0) -> list[Tensor]:
    """Train; the `failing`-th call of a block in the last step but one fails. Return what training changed."""
    torch.manual_seed(1)
    for number in range(_NUM_STEPS + 2):
        _fault.calls_left = failing if number == _NUM_STEPS else 0
        model(torch.randn(16, 8)).backward()
    _fault.calls_left = 0
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    drawn = [torch.rand(1, generator=layer.noise) for layer in model.layers if isinstance(layer, _Drawing)]
    return [*gradients, *model.buffers(), *drawn, torch.rand(1)]


def _budgeted(
    kind: type[torch.nn.Module],
    budget: str = "95%",
    *,
    num_steps: int = 0,
    generator: torch.Generator | None = None,
) -> _Model:
    model = _Model(kind, generator)
    actckpt.apply(model, activation_budget=budget, race=False)
    for _ in range(num_steps):
        model(torch.randn(16, 8)).backward()
    return model


@pytest.mark.parametrize(("failing", "budget"), [(1, "95%"), (2, "70%"), (3, "95%")])
@pytest.mark.parametrize("kind", [_Block, _Drawing])
@pytest.mark.filterwarnings("ignore:apply. a block of a _Model")
def test_a_forward_that_runs_out_of_memory_runs_once_more(
    kind: type[torch.nn.Module], failing: int, budget: str
) -> None:
    expected = _results(_Model(kind))
    assert_equal(_results(_budgeted(kind, budget), failing), expected)
    assert actckpt.stats().rescued_forwards == 1


def test_the_next_plan_needs_less() -> None:
    model = _budgeted(_Block, num_steps=_NUM_STEPS)
    before = actckpt.report(model).plan
    _fault.calls_left = 2
    with pytest.warns(actckpt.errors.ActckptWarning, match="ran out of memory in forward"):
        model(torch.randn(16, 8)).backward()
    for _ in range(_NUM_STEPS):
        model(torch.randn(16, 8)).backward()
    after = actckpt.report(model).plan
    assert before is not None and after is not None
    assert after.peak_bytes < 0.96 * before.peak_bytes


def _num_calls_to_error(kind: type[torch.nn.Module] = _Block, generator: torch.Generator | None = None) -> int:
    """Return how often blocks ran until the error of one that must not run again was raised."""
    model = _budgeted(kind, num_steps=_NUM_STEPS, generator=generator)
    _fault.num_calls, _fault.calls_left = 0, 2
    with pytest.raises(RuntimeError, match=r"no memory|something"):
        model(torch.randn(16, 8))
    assert actckpt.stats().rescued_forwards == 0
    return _fault.num_calls


class _WritesToItsArgument(_Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(1.0) if _fault.calls_left > 0 else x)


class _ChangesAnotherBuffer(_Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("late", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        if _fault.calls_left > 0:
            self.late.add_(1.0)
        return super().forward(x)


@pytest.mark.parametrize("kind", [_WritesToItsArgument, _ChangesAnotherBuffer])
def test_a_block_that_cannot_start_again_raises(kind: type[torch.nn.Module]) -> None:
    assert _num_calls_to_error(kind) == 2


def test_a_block_that_gets_a_generator_raises() -> None:
    assert _num_calls_to_error(_Drawing, torch.Generator()) == 2


def test_an_error_of_another_kind_is_raised_at_once() -> None:
    _fault.error = lambda: RuntimeError("something else")
    assert _num_calls_to_error() == 2


def test_rescue_can_be_switched_off() -> None:
    actckpt.configure(rescue=False)
    assert _num_calls_to_error() == 2


@pytest.mark.filterwarnings("ignore:apply. a block of a _Model")
def test_the_second_error_has_the_first_as_context_and_a_table_of_memory() -> None:
    def fail_again() -> Exception:
        _fault.error, _fault.calls_left = lambda: torch.OutOfMemoryError("again"), 1
        return torch.OutOfMemoryError("no memory left")

    model = _budgeted(_Block, num_steps=_NUM_STEPS)
    _fault.error, _fault.calls_left = fail_again, 2
    with pytest.raises(torch.OutOfMemoryError, match="again") as raised:
        model(torch.randn(16, 8))
    assert str(raised.value.__context__) == "no memory left"
    assert "memory by module" in "\n".join((str(raised.value), *getattr(raised.value, "__notes__", ())))
