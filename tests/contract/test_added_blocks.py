"""Under a budget, large modules outside of the repeated blocks become blocks after the first step."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from oracle import assert_equal
from peaks import measured
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import actckpt


class Stem(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64))


class OnlyOnce(Stem):
    """It cannot run a second time in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.scales: Iterator[float] = iter([])

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * next(self.scales)  # type: ignore[no-any-return]

    def __deepcopy__(self, memo: dict[int, Any]) -> OnlyOnce:
        return self


class Checkpointed(Stem):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self, stem: Callable[[], nn.Module] = Stem) -> None:
        super().__init__()
        torch.manual_seed(0)
        block = lambda: nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))  # noqa: E731
        self.first, self.stem = nn.Linear(64, 64), stem()
        self.blocks, self.head = nn.ModuleList(block() for _ in range(4)), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(self.first(x))
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)  # type: ignore[no-any-return]


def _step(model: nn.Module, rows: int = 128) -> tuple[list[Tensor], int]:
    def run() -> None:
        x = torch.randn(rows, 64)
        if isinstance(stem := getattr(model, "stem", None), OnlyOnce):
            stem.scales = iter([2.0])
        model(x).square().mean().backward()

    return measured(model, run)


def _train(model: nn.Module, num_steps: int, expected: list[Tensor], rows: int = 128) -> int:
    """Train with the gradients of plain training; return the peak of the last step."""
    for _ in range(num_steps):
        gradients, peak = _step(model, rows)
        assert_equal(gradients, expected)
    return peak


def test_a_large_stem_becomes_a_block_and_a_smaller_budget_fits() -> None:
    expected, plain = _step(Model())
    named, found = Model(), Model()
    actckpt.apply(named, blocks=["blocks.*"])
    budget = int(0.95 * _train(named, 2, expected))  # less than the blocks alone can reach
    assert actckpt.apply(found, activation_budget=budget, race=False) == tuple(f"blocks.{i}" for i in range(4))
    assert _train(found, 6, expected) <= budget < plain
    blocks = ("stem", *(f"blocks.{i}" for i in range(4)))
    assert actckpt.report(found).blocks_ran == blocks and actckpt.remove(found) == blocks
    assert _train(found, 1, expected) == plain


def test_plan_adds_it_too() -> None:
    expected, plain = _step(Model())
    model = Model()
    plan = actckpt.plan(lambda: _step(model) and None, model=model, activation_budget="62%", race=False)
    assert plan.blocks is not None and plan.blocks[0] == "stem"
    assert "forward" not in vars(model.stem)
    actckpt.apply(model, plan)
    assert _train(model, 2, expected) <= 0.63 * plain


def _scripted() -> nn.Module:
    with warnings.catch_warnings():  # deprecated
        warnings.simplefilter("ignore")
        return torch.jit.script(Stem())  # type: ignore[no-any-return]


class OnInputs(Model):
    """Its stem gets what the program made, and may overwrite before backward."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)  # type: ignore[no-any-return]


class Around(Model):
    """Its stem runs in a module that runs blocks, too; later, once in a block."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(self.stem, *self.blocks)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.first(x)))  # type: ignore[no-any-return]


def _with_hook() -> nn.Module:
    stem = Stem()
    stem[1].register_forward_hook(lambda *_: None)
    return stem


@pytest.mark.parametrize(
    ("made", "budget", "blocks"),
    [
        (Model, "70%", "blocks.*"),  # named blocks are the only ones
        (partial(Model, lambda: nn.Sequential(nn.Linear(64, 4), nn.GELU(), nn.Linear(4, 64))), "70%", None),  # small
        *((partial(Model, stem), "82%", None) for stem in (OnlyOnce, Checkpointed, _scripted)),
        *((model, "85%", None) for model in (OnInputs, Around, partial(Model, _with_hook))),
    ],
)
def test_one_that_is_small_or_cannot_be_a_block_or_that_a_second_run_might_disturb_is_not_added(
    made: Callable[[], Model], budget: str, blocks: str | None
) -> None:
    model, plain = made(), made()
    plain.load_state_dict(model.state_dict())
    expected, _ = _step(plain)
    actckpt.apply(model, activation_budget=budget, blocks=blocks, race=False)
    _train(model, 5, expected)
    assert actckpt.report(model).plan is not None and "stem" not in actckpt.remove(model)


@pytest.mark.parametrize("where", ["in a block", "around a block"])
def test_one_that_later_runs_with_a_block_is_no_block_any_more(where: str) -> None:
    model = Model()
    actckpt.apply(model, activation_budget="80%", race=False)
    _train(model, 4, _step(Model())[0])
    assert "forward" in vars(model.stem)
    if where == "in a block":
        first = model.blocks[0][0]
        first.register_forward_pre_hook(lambda _, args: (model.stem(args[0]),))
    else:
        model.stem[0].register_forward_pre_hook(lambda _, args: (model.blocks[3](args[0]),))
    for _ in range(4):
        _step(model, 160)
    assert "forward" not in vars(model.stem)


def test_a_later_larger_batch_adds_it() -> None:
    model = Model()
    budget = int(0.62 * _step(Model())[1])
    actckpt.apply(model, activation_budget=budget, race=False)
    for rows in (2, 128, 2):
        expected, _ = _step(Model(), rows)
        assert _train(model, 4, expected, rows) <= budget


def test_a_copy_of_a_model_with_an_added_block_trains_under_the_budget() -> None:
    model = Model()
    expected, plain = _step(Model())
    actckpt.apply(model, activation_budget="60%", race=False)
    _train(model, 3, expected)
    copied = copy.deepcopy(model)
    assert _train(copied, 4, expected) <= 0.6 * plain
    assert actckpt.remove(copied)[0] == "stem" and _train(model, 2, expected) <= 0.6 * plain
