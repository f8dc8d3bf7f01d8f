"""An allocation that fails: the step has the right bits or raises, and leaves nothing behind."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import ClassVar

import pytest
import torch
from demo_training import Training
from oracle import assert_equal
from sim import device
from torch import Tensor
from torch.nn import functional

import actckpt


class Block(torch.nn.Module):
    """Draws from two generators, and moves statistics and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = torch.nn.Linear(16, 32), torch.nn.BatchNorm1d(32), torch.nn.Linear(32, 16)
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x: Tensor, generator: torch.Generator) -> Tensor:
        hidden = self.norm(self.up(x)).mul_(1.1)
        hidden[:, :4] = 0.5
        hidden = functional.dropout(hidden.relu_(), 0.3)
        hidden = hidden + torch.randn(hidden.shape, generator=generator, device=hidden.device)
        self.mean.mul_(0.9).add_(x.detach().mean(0))
        return x + self.down(hidden) - self.mean


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor, generator: torch.Generator) -> Tensor:
        for layer in self.layers:
            x = layer(x, generator)
        return x


class Step:
    """A step that is the same each time."""

    def __init__(self, apply: Callable[[Step], object] = lambda step: None) -> None:
        gc.collect()
        torch.manual_seed(0)
        self.model = Model().to("sim")
        self._state = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        self._x = torch.randn(8, 16).to("sim")
        apply(self)
        self.run()
        self.num_allocations = -device.num_allocations()
        self.expected = self.results()
        self.num_allocations += device.num_allocations()
        self.held_bytes = 0
        self.held_bytes = self.bytes_left()

    def run(self) -> None:
        """Run forward and backward."""
        torch.manual_seed(1)
        generator = torch.Generator("sim").manual_seed(2)
        self.model(self._x, generator).square().sum().backward()

    def results(self, failing: int = 0) -> list[Tensor]:
        """Run a step from the same state, with one allocation that fails; return gradients and buffers."""
        self.model.load_state_dict(self._state)
        self.model.zero_grad()
        with device.failing_allocation(failing):
            self.run()
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        return [tensor.cpu() for tensor in (*gradients, *self.model.buffers())]

    def bytes_left(self) -> int:
        """Return what is allocated once gradients are gone."""
        self.model.zero_grad()
        if torch.accelerator.memory_allocated() != self.held_bytes:  # a backward of torch that fails leaves a cycle
            gc.collect()
        return torch.accelerator.memory_allocated()


def _planned(step: Step) -> None:
    plan = actckpt.plan(step.run, model=step.model, activation_budget="80%", race=False)
    actckpt.apply(step.model, policy=plan)


def _budgeted(step: Step) -> None:
    actckpt.apply(step.model, activation_budget="80%", race=False)
    for _ in range(4):  # up to a plan
        step.run()


_METHODS: dict[str, Callable[[Step], object]] = {
    "kept": lambda step: actckpt.apply(step.model, "keep"),
    "rerun": lambda step: actckpt.apply(step.model),
    "matmuls kept": lambda step: actckpt.apply(step.model, "matmuls"),
    "offload": lambda step: actckpt.apply(step.model, "offload", min_bytes=0),
    "planned": _planned,
    "budget": _budgeted,
}


@pytest.fixture
def expected() -> list[Tensor]:
    """What plain training computes."""
    return Step().expected


@pytest.mark.filterwarnings("ignore:apply. the forward of block:actckpt.ActckptWarning")
@pytest.mark.parametrize("method", _METHODS)
def test_any_allocation_that_fails_gives_the_same_bits_or_an_error(method: str, expected: list[Tensor]) -> None:
    step = Step(_METHODS[method])
    assert_equal(step.expected, expected)
    actckpt.reset_stats()
    num_raised = 0
    for failing in range(1, step.num_allocations + 1):
        try:
            assert_equal(step.results(failing), expected)
        except torch.OutOfMemoryError:
            num_raised += 1
        if failing % 16 == 0:  # copies under way when steps failed are freed a few per step
            for _ in range(4):
                assert_equal(step.results(), expected)
            assert step.bytes_left() == step.held_bytes, failing
    assert 0 < num_raised < step.num_allocations or method == "kept"
    assert (actckpt.stats().rescued_recomputations > 0) == (method != "kept")
    assert (actckpt.stats().rescued_forwards > 0) == (method == "budget")


_CHANGES: dict[str, Callable[[Block, Tensor], object]] = {
    "input": lambda block, x: x.detach().mul_(1.0),
    "parameter": lambda block, x: block.down.bias.detach().mul_(1.0),
    "list of losses": lambda block, x: block.losses.append(block.up(x).mean()),
    "module": lambda block, x: setattr(block, "up", torch.nn.Linear(16, 32, device=x.device)),
}


def _made_in_a_thread() -> Tensor:
    """Return a tensor whose node has a larger number than those of a step."""
    made = [torch.ones(2, requires_grad=True)]

    def run() -> None:
        for _ in range(4000):
            made[0] = made[0].detach().requires_grad_() * 1.0

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return made[0]


@pytest.mark.parametrize("change", [None, *_CHANGES])
def test_a_forward_runs_again_unless_that_could_change_results(change: str | None, expected: list[Tensor]) -> None:
    step = Step(_budgeted)
    block, failed = step.model.layers[1], []
    other = _made_in_a_thread()  # a thread numbers its nodes anew

    class FailsOnce(Block):
        losses: ClassVar[list[Tensor]] = []

        def forward(self, x: Tensor, generator: torch.Generator) -> Tensor:
            result = super().forward(x, generator)
            if not failed:
                failed.append(_CHANGES[change](self, x) if change else None)
                raise torch.OutOfMemoryError("no memory left")
            return result

    block.__class__ = FailsOnce
    if change is None:
        with pytest.warns(actckpt.ActckptWarning, match="block 'layers.1' of a Model ran out of memory"):
            assert_equal(step.results(), expected)
        assert "Ran out of memory in forward, and ran once more: layers.1." in str(actckpt.report(step.model))
    else:
        with pytest.raises(torch.OutOfMemoryError, match="no memory left"):
            step.results()
    assert actckpt.stats().rescued_forwards == (change is None) and other.grad_fn is not None


def _text(error: BaseException) -> str:
    return "\n".join((str(error), *getattr(error, "__notes__", ())))


@pytest.mark.parametrize("policy", [None, "keep", "recompute", "matmuls", "offload"])
def test_an_error_gets_a_table_of_memory_by_module(policy: str | None) -> None:
    torch.accelerator.empty_cache()
    with device.capacity(0, 3 << 20), pytest.raises(torch.OutOfMemoryError, match="sim:0 is out of memory") as raised:
        training = Training(lambda model: policy and actckpt.apply(model, policy=policy))
        optimizer = torch.optim.Adam(training.model.parameters())
        with actckpt.explain_oom(training.model, optimizer):
            for _ in range(2):
                training.step()
                optimizer.step()
    _, _, added = _text(raised.value).partition("actckpt: ")
    assert 5 < len(added.splitlines()) <= 10
    assert "\nblocks.*" in added, added
