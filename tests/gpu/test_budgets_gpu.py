"""Budgets on a GPU: the peak that the CUDA allocator tells is within them, and gradients are those of plain training.

The first step measures. Where a step of the plan exceeds the budget, the third one is the first of another plan: what
docs/cycles.md promises holds from the fourth step on at the latest.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from gpu_programs import DEVICE, peak_bytes, repeated, stack
from oracle import assert_equal
from peaks import smallest_budget
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import actckpt

pytestmark = pytest.mark.filterwarnings("default:.*the plan")  # that no plan fits is judged by the peak

_DEPTH, _WIDTH, _BATCH, _SEQ = 8, 512, 8, 512
_MIB = 1 << 20
#: Steps until a budget holds.
_SETTLING = 3


@pytest.fixture(autouse=True)
def _deterministic_attention() -> Iterator[None]:
    """The fast kernels for float32 add up gradients in any order."""
    with sdpa_kernel(SDPBackend.MATH):
        yield


class _Training:
    """A model of some hundred MiB and its step; the same numbers each time."""

    def __init__(self, apply: Callable[[torch.nn.Module], object] | None = None, *, rate: float | None = None) -> None:
        gc.collect()  # models that `apply` patched are in cycles
        self.model = stack(_DEPTH, _WIDTH)
        self.x = torch.randn(_BATCH, _SEQ, _WIDTH, device=DEVICE)
        self.optimizer = None if rate is None else torch.optim.AdamW(self.model.parameters(), lr=rate)
        self.micro_steps = 1
        if apply is not None:
            apply(self.model)

    def forward_and_backward(self) -> None:
        self.model(self.x).square().mean().backward()

    def step(self) -> list[Tensor]:
        """Run a step from the same seed; return its gradients on the CPU."""
        torch.manual_seed(1)
        self.model.zero_grad()
        for _ in range(self.micro_steps):
            self.forward_and_backward()
        found = [parameter.grad.cpu() for parameter in self.model.parameters() if parameter.grad is not None]
        if self.optimizer is not None:
            self.optimizer.step()
        return found

    def peak(self) -> int:
        """Return the peak of a step that begins without gradients."""
        self.model.zero_grad()
        return peak_bytes(self.step)


@functools.cache
def _plainly(rate: float | None = None, micro_steps: int = 1) -> tuple[list[list[Tensor]], int]:
    """Gradients of six steps, and the peak of one more."""
    training = _Training(rate=rate)
    training.micro_steps = micro_steps
    gradients = [training.step() for _ in range(6)]
    return gradients, training.peak()


@pytest.fixture(autouse=True)
def _repeatable() -> None:
    repeated(_Training().step)


@functools.cache
def _smallest() -> int:
    training = _Training(lambda model: actckpt.apply(model, budget=8 * _MIB, on_infeasible="raise"))
    return smallest_budget(lambda: [training.step() for _ in range(3)])


def _check(training: _Training, budget: int, expected: list[list[Tensor]]) -> tuple[int, actckpt.Plan]:
    """Train six steps with the bits of plain training, within the budget once it has settled."""
    peaks = []
    for number, gradients in enumerate(expected):
        torch.cuda.reset_peak_memory_stats()  # a high one from before tells nothing of the plan
        found = training.step()
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated())
        assert_equal(found, gradients)
        del found
        assert number < _SETTLING or peaks[-1] <= budget, f"budget {budget}, peaks {peaks}"
    plan = actckpt.report(training.model).plan
    assert plan is not None, f"no plan; budget {budget}, peaks {peaks}"
    print(f"budget {budget}, peaks {peaks}, predicted {plan.peak_bytes}, {_actions(plan)}")
    return peaks[-1], plan


def _actions(plan: actckpt.Plan) -> dict[str, int]:
    actions = [action.value for block in plan.actions for action in block.values()]
    return {name: actions.count(name) for name in sorted(set(actions))}


@pytest.mark.parametrize("share", [0.02, 0.25, 0.5, 0.75, 1.05])
def test_a_budget_in_bytes(share: float) -> None:
    expected, plain = _plainly()
    budget = int(_smallest() + share * (plain - _smallest()))
    actckpt.reset_stats()
    found, plan = _check(_Training(lambda model: actckpt.apply(model, budget=budget)), budget, expected)
    if share < 0.1:  # below what the inputs of all blocks and the largest block need, they must leave
        assert "offload" in _actions(plan) and actckpt.stats().offloaded_bytes > 0, plan.explain()
    if share > 1:
        assert 0.8 * plain <= found <= plain + _MIB, f"plain {plain}, found {found}"  # what is free to run again may
    else:
        assert set(_actions(plan)) != {"keep"}
        assert found >= 0.7 * budget, f"of {budget} only {found} are used; plain {plain}, smallest {_smallest()}"


def test_a_share_of_the_device_and_auto() -> None:
    expected, plain = _plainly()
    total = torch.cuda.mem_get_info()[1]
    budget = 0.6 * plain / total
    if int(budget * total) < _smallest():
        budget = (_smallest() + 0.3 * (plain - _smallest())) / total
    _check(_Training(lambda model: actckpt.apply(model, budget=budget)), int(budget * total), expected)
    training = _Training(lambda model: actckpt.apply(model, budget="auto"))
    _check(training, total, expected)


@pytest.mark.parametrize("budget", ["40%", "70%", "600MiB"])
def test_an_activation_budget(budget: str) -> None:
    expected, plain = _plainly()
    training = _Training(lambda model: actckpt.apply(model, activation_budget=budget))
    found, plan = _check(training, plain, expected)
    assert plan.peak_bytes <= plan.budget_bytes, plan.explain()
    assert found < 0.95 * plain


@pytest.mark.parametrize("share", [0.1, 0.5])
@pytest.mark.parametrize("micro_steps", [1, 3])
def test_an_optimizer_whose_state_appears_in_the_first_step(share: float, micro_steps: int) -> None:
    expected, plain = _plainly(1e-3, micro_steps)
    state_bytes = 2 * sum(parameter.nbytes for parameter in stack(_DEPTH, _WIDTH).parameters())
    smallest = _smallest() + state_bytes
    budget = int(smallest + share * (plain - smallest))
    training = _Training(rate=1e-3)
    training.micro_steps = micro_steps
    actckpt.apply(training.model, budget=budget, optimizer=training.optimizer)
    _check(training, budget, expected)


@pytest.mark.parametrize("share", [0.05, 0.4])
def test_a_plan_made_from_a_step(share: float) -> None:
    expected, plain = _plainly()
    budget = int(_smallest() + share * (plain - _smallest()))
    training = _Training()
    plan = actckpt.plan(training.forward_and_backward, model=training.model, budget=budget, race=False)
    actckpt.apply(training.model, policy=plan)
    assert_equal(training.step(), expected[0])
    peak = training.peak()
    found = f"budget {budget}, predicted {plan.peak_bytes}, peak {peak}"
    assert peak <= budget and peak == pytest.approx(plan.peak_bytes, rel=0.05), found


# A process that may not have more


@pytest.fixture
def capped() -> Iterator[Callable[[int], None]]:
    """Let this process have so many bytes of the device."""
    total = torch.cuda.mem_get_info()[1]

    def cap(nbytes: int) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(nbytes / total)

    yield cap
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.parametrize("budget", ["auto", "bytes"])
def test_what_runs_out_of_memory_plainly_trains_with_a_budget(budget: str, capped: Any) -> None:
    expected, plain = _plainly()
    cap = int(_smallest() + 0.6 * (plain - _smallest()))
    capped(cap)
    training = _Training()
    with pytest.raises(torch.OutOfMemoryError):
        training.step()
    del training
    torch.cuda.empty_cache()
    wanted = "auto" if budget == "auto" else int(0.85 * cap)  # the allocator's blocks are not without gaps
    _check(_Training(lambda model: actckpt.apply(model, budget=wanted)), cap, expected)
