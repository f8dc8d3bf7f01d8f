"""A rerun that runs out of memory in backward runs once more, with the same results."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from oracle import assert_equal
from torch import Tensor
from torch.nn import functional

import actckpt


def _out_of_memory() -> None:
    raise torch.OutOfMemoryError("no memory left")


class _Fault:
    """Fails in some of its calls, 1 is the first one."""

    def __init__(self, fails: dict[int, Callable[[], object]] | None = None) -> None:
        self.fails, self.num_calls = fails or {}, 0

    def __call__(self) -> None:
        self.num_calls += 1
        self.fails.get(self.num_calls, lambda: None)()


class _Block(torch.nn.Module):
    """Draws from two generators, moves statistics, and changes buffers in place and by assignment."""

    def __init__(self, fault: _Fault | None = None) -> None:
        super().__init__()
        self.first, self.norm, self.last = torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("replaced", torch.zeros(8))
        self.noise = torch.Generator()
        self.fault = fault or _Fault()

    def forward(self, x: Tensor) -> Tensor:
        h = functional.dropout(self.norm(self.first(x)), 0.3)
        h = h + torch.randn(h.shape, generator=self.noise)
        self.mean.mul_(0.9).add_(h.detach().mean(0))
        self.replaced = self.replaced * 0.9 + h.detach().mean(0)
        self.fault()
        return x + self.last(functional.gelu(h)) - self.mean.clone() + self.replaced


class _Model(torch.nn.Module):
    def __init__(self, fault: _Fault | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList([_Block(), _Block(fault), _Block()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().sum()


def _results(fails: dict[int, Callable[[], object]] | None = None, *, fault: _Fault | None = None) -> list[Tensor]:
    """Train with blocks that run again; return gradients, buffers, and the next random number."""
    model = _Model(fault or _Fault(fails))
    actckpt.apply(model, blocks=_Block)
    torch.manual_seed(1)
    for _ in range(2):
        model(torch.randn(4, 8)).backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [*gradients, *model.buffers(), torch.rand(1)]


@pytest.mark.parametrize(
    "fail", [_out_of_memory, lambda: torch.empty(1 << 60, dtype=torch.uint8, device="cpu")], ids=["device", "cpu"]
)
def test_a_rerun_that_runs_out_of_memory_runs_once_more(fail: Callable[[], object]) -> None:
    expected = _results()
    actckpt.reset_stats()
    assert_equal(_results({2: fail}), expected)
    assert actckpt.stats().rescued_recomputations == 1


@pytest.mark.parametrize("number", [2, 3, 4], ids=["outer rerun", "inner rerun", "inner rerun again"])
def test_checkpoints_in_checkpoints_run_once_more(number: int) -> None:
    def gradients(fault: _Fault) -> list[Tensor]:
        torch.manual_seed(0)
        block = _Block(fault)
        x = torch.randn(4, 8, requires_grad=True)
        actckpt.checkpoint(lambda x: actckpt.checkpoint(block, x).sin(), x).sum().backward()
        return [x.grad, *(parameter.grad for parameter in block.parameters()), *block.buffers()]  # type: ignore[list-item]

    plain = _Fault()
    expected = gradients(plain)
    assert plain.num_calls == 3
    fault = _Fault({number: _out_of_memory})
    assert_equal(gradients(fault), expected)
    assert fault.num_calls == (4 if number < 4 else 3)


def _fail() -> None:
    raise RuntimeError("something else")


@pytest.mark.parametrize(
    ("rescue", "fails", "error", "num_calls"),
    [
        (True, {2: _out_of_memory, 3: _out_of_memory}, torch.OutOfMemoryError, 3),  # nothing runs a third time
        (True, {2: _fail}, RuntimeError, 2),
        (False, {2: _out_of_memory}, torch.OutOfMemoryError, 2),
    ],
)
def test_what_is_not_rescued_raises_at_once(
    rescue: bool, fails: dict[int, Callable[[], object]], error: type[Exception], num_calls: int
) -> None:
    actckpt.configure(rescue=rescue)
    fault = _Fault(fails)
    with pytest.raises(error, match=r"no memory left|something else"):
        _results(fault=fault)
    assert fault.num_calls == num_calls


def test_an_error_of_the_second_attempt_has_the_first_one_as_context() -> None:
    def fail() -> None:
        try:
            raise KeyError("inner")
        except KeyError:
            raise ValueError("something else")  # noqa: B904

    with pytest.raises(ValueError, match="something else") as raised:
        _results({2: _out_of_memory, 3: fail})
    assert isinstance(raised.value.__context__, KeyError)
    first = raised.value.__context__.__context__
    assert isinstance(first, torch.OutOfMemoryError) and str(first) == "no memory left"
