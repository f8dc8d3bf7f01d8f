"""Budgets where the arguments of the model do not show how large a step is, or what it does."""

from __future__ import annotations

import copy
import enum
import functools
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import assert_equal
from peaks import counted, smallest_budget
from residual_mlp import Mlp
from torch import Tensor, nn

import actckpt


class Scores(Mlp):
    """Needs memory that grows faster than its input."""

    def forward(self, x: Tensor) -> Tensor:
        scores = (x @ x.transpose(-1, -2) / 64).softmax(-1)
        return super().forward(x + scores @ x)


class Model(nn.Module):
    def __init__(self, block: type[Mlp] = Mlp) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(block(64) for _ in range(6)), nn.Linear(64, 1)

    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Unpadded(Model):
    """Takes padding out before its blocks, as ModernBERT does."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.run(x[mask])


class Batch:
    """An object that is no container of tensors."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


class OfObject(Model):
    def forward(self, batch: Batch) -> Tensor:
        return self.run(batch.x)


class Biased(Mlp):
    """Is given a tensor of one size beside its input, larger than that."""

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return super().forward(x if bias is None else x + bias[: len(x)])


class OfBias(OfObject):
    def forward(self, batch: Batch) -> Tensor:
        x, bias = batch.x, torch.zeros(20_000, 64)
        for layer in self.layers:
            x = layer(x, bias)
        return self.head(x)


class Embedded(Mlp):
    """A first block that is given numbers of tokens, and a mask of one size beside them."""

    def forward(self, x: Tensor, tokens: Tensor | None = None) -> Tensor:
        return super().forward(x if tokens is None else nn.functional.one_hot(tokens, 64).float())


class OfTokens(OfObject):
    def forward(self, batch: Batch) -> Tensor:
        mask = torch.ones(4)
        x = self.layers[0](mask, tokens=batch.x.argmax(-1))
        for layer in self.layers[1:]:
            x = layer(x)
        return self.head(x)


class OfParts(OfObject):
    """Is given a part of a larger tensor, always of the same one."""


class Twice(Unpadded):
    """Two forwards are alive."""


def _arguments(model: nn.Module, size: int) -> tuple[Any, ...]:
    x = torch.randn(1024, 64, generator=torch.Generator().manual_seed(size))
    if isinstance(model, Unpadded):
        return x, torch.arange(1024) < size
    return (Batch(x[:size] if isinstance(model, OfParts) else x[:size].clone()),)


def _made(kind: type[Model], block: type[Mlp] = Mlp) -> Model:
    torch.manual_seed(0)
    return kind(block)


def _step(model: nn.Module, size: int) -> tuple[list[Tensor], int]:
    """Return gradients, and the peak."""
    num_forwards = 2 if isinstance(model, Twice) else 1
    args = _arguments(model, size)
    model.zero_grad()
    with counted(model, total=False) as count:
        for loss in [model(*args).square().mean() for _ in range(num_forwards)]:
            loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None], count.peak_bytes


@functools.cache
def _smallest_bytes(kind: type[Model], size: int, block: type[Mlp] = Mlp) -> int:
    model = _made(kind, block)
    actckpt.apply(model, activation_budget=1, on_infeasible="raise")
    _step(model, size)
    return smallest_budget(lambda: _step(model, size))


def _recomputed_bytes(kind: type[Model], size: int, block: type[Mlp]) -> int:
    model = _made(kind, block)
    actckpt.apply(model)
    return [_step(model, size)[1] for _ in range(2)][-1]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("kind", "block", "sizes"),
    [
        (Unpadded, Mlp, [300, 300, 300, 1024, 1024, 200, 1024]),
        (Unpadded, Mlp, [900, 900, 900, 1024, 1024, 1024, 50]),
        (OfObject, Mlp, [300, 300, 300, 1024, 1024, 200, 1024]),
        (OfObject, Mlp, [900, 900, 900, 1024, 1024, 1024, 50]),
        (OfParts, Mlp, [100, 100, 1024, 1024, 1024]),
        (Unpadded, Scores, [128, 128, 128, 700, 700, 700, 1024, 1024, 1024, 600]),
        (Unpadded, Scores, [832, 832, 832, 1024, 1024, 1024]),
        (Unpadded, Mlp, [832, 832, 832, 1024, 1024, 1024]),
        (OfBias, Biased, [300, 300, 300, 1024, 1024, 1024]),
        (OfTokens, Embedded, [200, 200, 200, 1024, 1024, 1024]),
        (Twice, Scores, [128, 128, 128, 1024, 1024, 1024]),
    ],
)
def test_steps_that_grow_stay_in_the_budget(kind: type[Model], block: type[Mlp], sizes: list[int]) -> None:
    # Cycles that are measured recompute everything, which may need more than the smallest plan.
    budget = max(_smallest_bytes(kind, 1024, block), _recomputed_bytes(kind, 1024, block)) + 200_000
    plain, model = _made(kind, block), _made(kind, block)
    actckpt.apply(model, activation_budget=budget, race=False, on_infeasible="raise")
    peaks = []
    for number, size in enumerate(sizes):
        expected, _ = _step(plain, size)
        found, peak = _step(model, size)
        assert_equal(found, expected)
        # Where a size is new, everything is recomputed, and audits may compute checksums.
        assert peak <= (budget if size in sizes[:number] else 1.02 * budget)
        peaks.append(peak)
    plan = actckpt.report(model).plan
    assert plan is not None and 0.95 * max(peaks[-3:]) <= plan.peak_bytes <= budget
    assert max(_step(plain, size)[1] for size in sizes) > budget


def test_sizes_that_differ_in_each_step_stay_in_the_budget_and_get_one_plan() -> None:
    budget = _smallest_bytes(Unpadded, 1024) + 200_000
    model = _made(Unpadded)
    actckpt.apply(model, activation_budget=budget, race=False, on_infeasible="raise")
    plans: list[actckpt.Plan | None] = []
    for size in (100, 100, 180, 90, 300, 50, 500, 90, 800, 50, 1024, 20, 20, 1024, 1024, 1024, 300, 1024):
        assert _step(model, size)[1] <= budget
        plans.append(actckpt.report(model).plan)
    assert plans[-1] is not None and plans[-1] is plans[-2] and plans[-1].peak_bytes > _step(model, 1024)[1] * 0.95


def test_steps_as_large_as_one_that_comes_once_are_waited_for_so_long_at_most() -> None:
    budget = _smallest_bytes(Unpadded, 1024, Scores) + 200_000
    plain, model = _made(Unpadded, Scores), _made(Unpadded, Scores)
    actckpt.apply(model, activation_budget=budget, race=False, on_infeasible="raise")
    peaks = [_step(model, size)[1] for size in (100, 100, 1024, *[100] * 24)]
    plain_bytes = _step(plain, 100)[1]
    assert peaks[3] < 0.9 * plain_bytes, "everything is recomputed"
    assert peaks[-1] == pytest.approx(plain_bytes, rel=0.01), "the plan runs again"
    # Large ones that come after that fit, and are measured.
    assert max(_step(model, size)[1] for size in (1024, 1024, 1024, 1000, 100, 1024)) <= budget


def test_sizes_that_grow_in_each_step_are_told_once_and_stay_checkpointed() -> None:
    plain, model = _made(Unpadded), _made(Unpadded)
    actckpt.apply(model, activation_budget="100%", race=False, on_infeasible="raise")
    with pytest.warns(UserWarning, match="sizes inside of a Unpadded with a budget grow") as told:
        peaks = [_step(model, size)[1] for size in range(100, 160)]
    assert len(told) == 1
    assert max(peaks[40:]) < 0.6 * _step(plain, 159)[1]
    assert_equal(_step(model, 150)[0], _step(plain, 150)[0])


class Skipping(OfObject):
    """Skips a block, as layer dropout does."""

    skipped = -1

    def forward(self, batch: Batch) -> Tensor:
        x = batch.x
        for number, layer in enumerate(self.layers):
            x = x if number == self.skipped else layer(x)
        return self.head(x)


@pytest.mark.filterwarnings("ignore:apply. .* blocks did not run in a step")
@pytest.mark.filterwarnings("ignore:apply. block .* runs, and did not when the plan was made")
@pytest.mark.parametrize("measured_without", [-1, 2])
def test_a_block_that_is_skipped_hides_no_size(measured_without: int) -> None:
    budget = _smallest_bytes(Skipping, 1024) + 200_000
    model = _made(Skipping)
    actckpt.apply(model, activation_budget=budget, race=False, on_infeasible="raise")
    model.skipped = measured_without
    _step(model, 200)
    model.skipped = -1
    for _ in range(3):
        _step(model, 200)
    model.skipped = 0
    assert max(_step(model, 1024)[1] for _ in range(3)) <= budget
    model.skipped = -1
    assert max(_step(model, 1024)[1] for _ in range(3)) <= budget
    plan = actckpt.report(model).plan
    assert plan is not None and plan.blocks is not None and {f"layers.{n}" for n in range(6)} <= {*plan.blocks}


def test_a_block_that_runs_outside_of_its_model_shows_no_size() -> None:
    model = _made(Unpadded)
    actckpt.apply(model, activation_budget="60%", race=False, on_infeasible="raise")
    for _ in range(3):
        _step(model, 200)
    plan = actckpt.report(model).plan
    model.layers[0](torch.randn(1000, 64)).sum().backward()
    for _ in range(3):
        _step(model, 200)
    assert plan is not None and actckpt.report(model).plan is plan


def test_a_step_that_no_plan_fits_is_told() -> None:
    budget = _smallest_bytes(Unpadded, 300) + 100_000
    plain, model = _made(Unpadded), _made(Unpadded)
    actckpt.apply(model, activation_budget=budget, on_infeasible="raise")
    for _ in range(3):
        _step(model, 300)
    with pytest.warns(UserWarning, match="steps need more memory than was known when their plan was made"):
        for _ in range(3):
            found, peak = _step(model, 1024)
            assert_equal(found, _step(plain, 1024)[0])
    plan = actckpt.report(model).plan
    assert plan is not None and peak <= plan.peak_bytes + 4096


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_copies_notice_what_is_larger(copied: Callable[[Any], Any]) -> None:
    model = _made(Unpadded)
    actckpt.apply(model, activation_budget="60%", race=False, on_infeasible="raise")
    for _ in range(3):
        _step(model, 300)
    other, block = copied(model), copied(model.layers[0])
    x = torch.randn(1024, 64)
    torch.testing.assert_close(block(x), _made(Unpadded).layers[0](x), rtol=0, atol=0)  # of a larger size, on its own
    for _ in range(3):
        assert_equal(_step(other, 1024)[0], _step(_made(Unpadded), 1024)[0])
    then, now = actckpt.report(model).plan, actckpt.report(other).plan
    assert then is not None and now is not None and now.peak_bytes > 2 * then.peak_bytes


class Task(enum.Enum):
    LIGHT, HEAVY = 0, 1

    def __eq__(self, other: object) -> bool:  # so that it has no hash
        return self is other


class Flagged(Model):
    def __init__(self, block: type[Mlp] = Mlp) -> None:
        super().__init__(block)
        self.wide = nn.Linear(64, 2048)

    def forward(self, x: Tensor, heavy: bool = False, *, task: Task = Task.LIGHT, wide: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        if heavy or task is Task.HEAVY:
            return self.wide(x).log_softmax(-1).mean()
        return self.head(x).square().mean()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("args", "kwargs"), [((True,), {}), ((), {"heavy": True}), ((), {"task": Task.HEAVY})], ids=["arg", "kwarg", "enum"]
)
def test_steps_of_another_flag_have_plans_of_their_own(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    x, budget = torch.randn(512, 64), 15_000_000
    model = _made(Flagged)
    actckpt.apply(model, activation_budget=budget, on_infeasible="raise")
    for step in range(9):
        with counted(model, total=False) as count:
            loss = model(x) if step < 3 else model(x, *args, **kwargs)
            loss.backward()
        assert count.peak_bytes <= budget
    with counted(model, total=False) as count:
        model(x).backward()
    assert count.peak_bytes < 10_000_000


def test_numbers_and_texts_are_data_and_make_no_plans_of_their_own() -> None:
    class Numbered(Model):
        def forward(self, x: Tensor, number: int, name: str, scale: float, absent: Tensor | None = None) -> Tensor:
            return self.run(x) * scale

    model = _made(Numbered)
    actckpt.apply(model, activation_budget="60%", race=False, on_infeasible="raise")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plans = []
        for step in range(20):
            absent = {"absent": None} if step % 2 else {}
            model(torch.randn(64, 64), step, f"sample {step}", 1.0 / (step + 1), **absent).sum().backward()
            plans.append(actckpt.report(model).plan)
    # A cycle is measured, and a plan is corrected three times at most.
    assert plans[0] is None and plans[5] is not None and all(plan is plans[5] for plan in plans[5:])
