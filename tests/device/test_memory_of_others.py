"""Budgets on a device where memory that is no part of the step comes and goes, and others read the peak too."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from typing import NoReturn

import pytest
import torch
from demo_training import start_peak
from peaks import smallest_budget
from residual_mlp import Mlp
from torch import Tensor, nn

import actckpt

#: Cycles until nothing more is metered, without trials; cycles until an older peak is forgotten.
_SETTLING, _UNTIL_LOOK = 6, 70


def _model(num_outputs: int = 8) -> nn.Module:
    gc.collect()
    torch.manual_seed(0)
    return nn.Sequential(*(Mlp(64) for _ in range(10)), nn.Linear(64, num_outputs)).to("sim")


def _inputs() -> Tensor:
    return torch.ones(256, 64, device="sim")


def _peak_of_step(model: nn.Module, x: Tensor) -> int:
    """Return the most bytes beyond those before a step, without gradients, which come last."""
    model.zero_grad()
    before = start_peak()
    loss = model(x).square().mean()
    forward_bytes = torch.accelerator.max_memory_allocated() - before
    loss.backward()
    gradient_bytes = sum(parameter.grad.nbytes for parameter in model.parameters() if parameter.grad is not None)
    return max(forward_bytes, torch.accelerator.max_memory_allocated() - before - gradient_bytes)


@pytest.mark.parametrize("share", [0.9, 0.95])
def test_outputs_that_the_program_holds_until_the_next_step_do_not_count(share: float) -> None:
    model, x = _model(2048), _inputs()
    budget = int(share * _peak_of_step(model, x))
    actckpt.apply(model, activation_budget=budget, blocks=Mlp, race=False)
    for is_training in (True, False):  # of the second kind, also the first cycle finds outputs
        model.train(is_training)
        for _ in range(_SETTLING):
            model.zero_grad()
            outputs = model(x)
            outputs.square().mean().backward()
    del outputs
    assert _peak_of_step(model, x) <= budget


def _needing_more(model: nn.Module, x: Tensor, length: int) -> None:
    model.zero_grad()
    y = model(x)
    for _ in range(length):
        y = (y @ torch.ones(8, 256, device="sim")).sin() @ torch.ones(256, 8, device="sim")
    y.square().mean().backward()


def test_an_older_peak_hides_for_a_while_that_a_step_needs_more() -> None:
    model, x = _model(), _inputs()
    model.zero_grad()
    start_peak()
    _needing_more(model, x, 0)
    budget = torch.accelerator.max_memory_allocated()
    actckpt.apply(model, budget=budget, blocks=Mlp, race=False)
    for _ in range(_SETTLING):
        _needing_more(model, x, 0)
    torch.empty(1 << 24, device="sim")
    for _ in range(_UNTIL_LOOK):
        _needing_more(model, x, 2)
    start_peak()
    _needing_more(model, x, 2)
    assert torch.accelerator.max_memory_allocated() <= budget


def test_two_models_in_one_step_do_not_hide_each_others_peak() -> None:
    x, models = _inputs(), [_model(), _model()]

    def step() -> None:
        for model in models:
            model.zero_grad()
        sum(model(x).square().mean() for model in models).backward()

    step()
    start_peak()
    step()
    budget = int(0.9 * torch.accelerator.max_memory_allocated())
    for model in models:
        actckpt.apply(model, budget=budget, blocks=Mlp, race=False)
    for _ in range(3 * _SETTLING):
        step()
    start_peak()
    step()
    assert torch.accelerator.max_memory_allocated() <= budget


def test_a_budget_that_cannot_be_met_is_not_planned_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = _model(), _inputs()
    actckpt.apply(model, budget=1 << 20, blocks=Mlp, race=False)
    with pytest.warns(UserWarning, match="No plan fits"):
        for _ in range(_SETTLING):
            _needing_more(model, x, 0)
    plan = actckpt.report(model).plan
    for _ in range(_SETTLING + 5):  # the 8th and the 16th call of each block are audited
        start_peak()
        _needing_more(model, x, 0)
        assert actckpt.report(model).plan is plan


class _Calls(nn.Module):
    """Calls a function where it runs, and returns what it is given."""

    def __init__(self, function: Callable[[], object]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        self.function()
        return x


def _interrupt() -> NoReturn:
    raise KeyboardInterrupt


def _peak_of_checkpointing() -> int:
    model = _checkpointed()
    start_peak()
    torch.empty(1 << 22, device="sim")
    model(_inputs()).square().mean().backward()
    return torch.accelerator.max_memory_allocated()


def _checkpointed() -> nn.Module:
    model = _model()
    actckpt.apply(model, policy=[], blocks=Mlp)
    return model


def test_an_interrupted_model_that_is_dropped_reads_the_peak_no_more() -> None:
    before = _peak_of_checkpointing()
    model = nn.Sequential(Mlp(64), _Calls(_interrupt), Mlp(64)).to("sim")
    actckpt.apply(model, activation_budget="60%", blocks=Mlp)
    with pytest.raises(KeyboardInterrupt):
        model(_inputs())
    del model
    gc.collect()
    assert _peak_of_checkpointing() == before


def test_a_model_that_is_moved_is_planned_for_its_device() -> None:
    model = _model().to("cpu")
    actckpt.apply(model, activation_budget="60%", blocks=Mlp, race=False)
    for _ in range(_SETTLING):
        model(torch.ones(256, 64)).square().mean().backward()
    before = actckpt.report(model).plan
    model.to("sim")
    for _ in range(_SETTLING):
        model(_inputs()).square().mean().backward()
    plan = actckpt.report(model).plan
    assert plan is not None and before is not None and plan is not before
    assert plan.costs.d2h_bytes_per_s > 0.0 and before.costs.d2h_bytes_per_s == 0.0


def _smallest_budget(model: nn.Module) -> int:
    actckpt.apply(model, activation_budget="1B", blocks=Mlp, on_infeasible="raise")
    model(_inputs()).square().mean().backward()
    model.zero_grad()
    return smallest_budget(lambda: model(_inputs()))


def test_memory_that_is_freed_where_the_first_step_begins_does_not_count() -> None:
    budgets = [
        _smallest_budget(nn.Sequential(_Calls(held.clear), *_model(), nn.Identity()))
        for held in ([], [torch.empty(1 << 20, device="sim")])
    ]
    assert budgets[0] == budgets[1]


def _freed_late(num_bytes: int) -> int:
    """Return the smallest budget of a model whose first step begins while autograd's thread is about to free memory."""
    held = [torch.empty(num_bytes, dtype=torch.uint8, device="sim")]
    begun, freed = threading.Event(), threading.Event()

    def free(_: Tensor) -> None:
        begun.set()
        time.sleep(0.2)
        held.clear()
        freed.set()

    leaf = torch.empty(0, device="sim", requires_grad=True)
    y = leaf.view(0)
    y.register_hook(free)
    modules = [*_model()]
    model = nn.Sequential(
        *modules[:3], _Calls(lambda: freed.wait(60) or pytest.fail("nothing was freed")), *modules[3:], nn.Identity()
    )
    thread = threading.Thread(target=torch.autograd.grad, args=(y, leaf, leaf.detach()))
    thread.start()
    assert begun.wait(60)
    try:
        return _smallest_budget(model)
    finally:
        thread.join()


def test_memory_that_autograd_frees_late_does_not_count() -> None:
    assert _freed_late(1 << 16) == _freed_late(0)


@pytest.mark.parametrize("options", [{}, {"policy": "recompute"}, {"policy": []}], ids=str)
def test_audits_hold_no_memory_of_the_device(options: dict[str, object]) -> None:
    """Budgets would count it: a forward holds as much in audited calls as in others."""
    held = []
    for audit in ("off", "always"):
        actckpt.configure(audit=audit)  # until the fixture of all tests puts it back
        block, x = Mlp(64).to("sim"), _inputs().requires_grad_()
        actckpt.checkpoint(block, x, **options).sum().backward()  # a first call allocates what stays
        gc.collect()
        before = torch.accelerator.memory_allocated()
        y = actckpt.checkpoint(block, x, **options)
        held.append(torch.accelerator.memory_allocated() - before)
        y.sum().backward()
        del y
    assert held[0] == held[1] > 0
