"""`apply(budget=...)` profiles blocks in the first step: runs that nothing of the program may show."""

from __future__ import annotations

import contextvars
import dataclasses
import random
import types
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import numpy
import pytest
import torch
from oracle import assert_equal
from peaks import plan_of
from test_budgets import Block
from torch import Tensor, nn

import actckpt


class Kind(Block):
    """A block that does something besides, by its name."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        _KINDS[kind][0](self)

    def forward(self, x: Tensor) -> Tensor:
        return _KINDS[self.kind][1](self, x)


_plain = Block.forward
_collected: contextvars.ContextVar[list[Tensor]] = contextvars.ContextVar("collected")


def _has(**values: Callable[[], Any]) -> Callable[[Any], None]:
    """Return what gives a block attributes."""
    return lambda block: vars(block).update({name: make() for name, make in values.items()})


def _counts(block: Any, x: Tensor) -> Tensor:
    block.num += 1
    return _plain(block, x) * (1 + block.num / 10)


def _draws(generator_of: Callable[[Any], torch.Generator]) -> Callable[[Any, Tensor], Tensor]:
    return lambda block, x: _plain(block, x * torch.rand(x.shape, generator=generator_of(block)))


def _own_generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def _has_average(block: Any) -> None:
    block.register_buffer("average", torch.ones(32))
    block.register_buffer("count", torch.zeros(()))


def _observes(block: Any, x: Tensor) -> Tensor:
    """Move a buffer, from the second call on through `.data`, which no version tells."""
    average = block.average if block.count == 0 else block.average.data
    average.mul_(0.5).add_(x.detach().mean((0, 1)))
    block.count.data.add_(1)
    return _plain(block, x * block.average)


def _changes_tensors(block: Any, x: Tensor) -> Tensor:
    y = _plain(block, x) * (1 + block.mean + block.num)
    block.mean = 0.9 * block.mean + 0.1 * y.detach().mean((0, 1))
    block.num += 0.1
    return y


def _has_freed(block: Any) -> None:
    """Have tensors whose storages a library freed until it needs them, as sharding does."""
    block.register_buffer("gathered", torch.zeros(1000), persistent=False)
    weight = next(block.parameters())
    weight.gathered = torch.zeros(2**20)
    for tensor in (block.gathered, weight.gathered):
        tensor.untyped_storage().resize_(0)


def _leaves_losses(block: Any, x: Tensor) -> Tensor:
    """Leave a loss in an attribute, and one in a list."""
    y = _plain(block, x)
    block.loss = y.square().mean()
    block.losses.append(y.square().mean())
    return y


def _has_weights(block: Any) -> None:
    block.weights = [block.up.weight]


def _collects(block: Any) -> None:
    """Let a hook collect in a context variable."""
    block.up.register_forward_hook(_collect)


def _collect(_: nn.Module, args: Any, result: Tensor) -> None:
    _collected.get().append(result.square().mean())


#: What each has, and what it does.
_KINDS: dict[str, tuple[Callable[[Any], None], Callable[[Any, Tensor], Tensor]]] = {
    "counts": (_has(num=int), _counts),
    "draws": (_has(generator=_own_generator), _draws(lambda block: block.generator)),
    "draws from a list": (_has(drawn=lambda: [_own_generator()]), _draws(lambda block: block.drawn[0])),
    "draws from an object": (
        _has(held=lambda: types.SimpleNamespace(generator=_own_generator())),
        _draws(lambda block: block.held.generator),
    ),
    "observes": (_has_average, _observes),
    "changes tensors": (_has(mean=lambda: torch.zeros(32), num=lambda: torch.zeros(1)), _changes_tensors),
    "has freed tensors": (_has_freed, _plain),
    "leaves losses": (_has(losses=list), _leaves_losses),
    "in place": (_has(), lambda block, x: _plain(block, x.mul_(1.1))),
    # What no argument leads to: the graph of the model around it.
    "captures": (_has(scale=list), lambda block, x: _plain(block, x * block.scale[0])),
    # Its parameters are held in a list besides.
    "recurrent": (_has_weights, lambda block, x: _plain(block, x) + x @ block.weights[0].square().mean(0).diag()),
    "collects": (_collects, _plain),
}


class Model(nn.Module):
    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.stem, self.gate = nn.Linear(32, 32), nn.Linear(32, 32)
        self.blocks: Any = nn.ModuleList(block() for _ in range(4))
        self.head = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        scale = [torch.sigmoid(self.gate(x)).square()]
        x = self.stem(x)
        collected: list[Tensor] = []
        _collected.set(collected)
        for block in self.blocks:
            if hasattr(block, "scale"):
                block.scale = scale
            x = block(x)
        loss = self.head(x).square().mean() + sum(collected)
        for block in self.blocks:
            if hasattr(block, "losses"):
                loss = loss + block.loss + torch.stack(block.losses).sum()
                block.losses.clear()
        return loss


@dataclasses.dataclass
class State:
    x: Tensor
    num: int


class ModelOfObjects(nn.Module):
    """Blocks take and give a dataclass, and leave losses in an object, results in a list and counts in a dict."""

    class Block(Block):
        def forward(
            self, seen: list[Tensor], counts: dict[str, int], *, state: State, notes: types.SimpleNamespace
        ) -> State:
            y = super().forward(state.x) * (1 + state.num / 10)
            notes.losses = [*notes.losses, y.square().mean()]
            seen.append(y)
            counts["calls"] = counts.get("calls", 0) + 1
            return State(y * len(seen), state.num + 1)

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(32, 32)
        self.blocks = nn.ModuleList(self.Block() for _ in range(4))
        self.counts: dict[str, int] = {}

    def forward(self, x: Tensor) -> Tensor:
        notes, state = types.SimpleNamespace(losses=[]), State(self.stem(x), 0)
        seen: list[Tensor] = []
        for block in self.blocks:
            state = block(seen, self.counts, state=state, notes=notes)
        assert len(notes.losses) == len(seen) == 4 and self.counts["calls"] % 4 == 0
        return state.x.square().mean() + sum(notes.losses) + seen[0].mean()


def _planned(make: Callable[[], nn.Module], budget: str = "80%") -> actckpt.Plan:
    """Train plainly and under a budget: all that a program sees is the same. Return the plan."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(make())
    actckpt.apply(models[1], blocks="blocks.*", activation_budget=budget)
    x = torch.randn(8, 16, 32)
    for step in range(4):
        found = []
        for model in models:
            torch.manual_seed(step)
            model.zero_grad()
            loss = model(x)
            loss.backward()
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            buffers = [b.clone() for b in model.buffers() if b.untyped_storage().nbytes()]
            found.append([loss, *gradients, *buffers, torch.get_rng_state()])
        assert_equal(found[1], found[0])
    return plan_of(models[1])


def _no_rerun(plan: actckpt.Plan) -> set[str]:
    """Return why blocks of a plan have no rerun, or that they have one."""
    named = zip(plan.costs.blocks, plan.blocks or (), strict=True)
    return {"rerun" if block.rerun else block.no_rerun for block, name in named if name is not None}


_UNSEEN = "it draws from a generator that is in no attribute of a module, which a rerun would go on with"
_CHANGES = "it changes its attributes at each call"


#: Whose generators reruns restore.
_RERUN = ("draws", "draws from a list")
_WHY = {
    "in place": "it writes to its input",
    "counts": _CHANGES,
    "changes tensors": _CHANGES,
    "draws from an object": _UNSEEN,
}


@pytest.mark.parametrize("kind", [*_KINDS, "of objects"])
def test_profiling_leaves_nothing_behind_and_a_plan_reruns_no_block_that_it_would_change(kind: str) -> None:
    make = partial(Model, partial(Kind, kind)) if kind in _KINDS else ModelOfObjects
    plan = _planned(make, "65%" if kind in _RERUN else "80%")
    if kind in _RERUN:
        assert _no_rerun(plan) == {"rerun"}
    elif kind in _WHY:
        assert not any(plan.rerun) and _no_rerun(plan) == {_WHY[kind]}
        assert plan.overhead_seconds == 0 or f": {_WHY[kind]}." in plan.explain()


class Drawing(Block):
    """Draws from somewhere that no module knows of."""

    draw: ClassVar[Callable[[], float | Tensor]]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * Drawing.draw())


_generator = torch.Generator()
_DRAWS: dict[str, tuple[Callable[[], float | Tensor], str]] = {
    "python": (lambda: 1 + random.random(), "random"),
    "numpy": (lambda: 1 + float(numpy.random.rand()), "numpy.random"),
    "generator": (lambda: torch.rand((), generator=_generator), "a generator that is in no attribute of a module"),
}


class _Tracker:
    def get_states(self) -> dict[Any, Any]:
        return {"generator": _generator.get_state()}

    def set_states(self, states: dict[Any, Any], /) -> None:
        _generator.set_state(states["generator"])


def _drawn(**options: Any) -> tuple[list[list[Tensor]], actckpt.Plan | None]:
    torch.manual_seed(0)
    _generator.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    model = Model(Drawing)
    if options:
        actckpt.apply(model, blocks="blocks.*", race=False, **options)
    found = []
    for _ in range(4):
        model.zero_grad()
        loss = model(torch.randn(8, 16, 32))
        loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in model.blocks.parameters())])
    return found, actckpt.report(model).plan if options else None


@pytest.mark.parametrize("source", list(_DRAWS))
@pytest.mark.parametrize("budget", ["60%", "100%"])
def test_blocks_that_draw_where_reruns_restore_nothing_are_planned_without_one(
    source: str, budget: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw, where = _DRAWS[source]
    monkeypatch.setattr(Drawing, "draw", draw, raising=False)
    found, plan = _drawn(activation_budget=budget)
    assert_equal(found, _drawn()[0])
    assert plan is not None and _no_rerun(plan) == {f"it draws from {where}, which a rerun would go on with"}


def _draw_past_operators() -> Tensor:
    """Draw so that no operator is given the generator."""
    state = torch.get_rng_state()
    torch.set_rng_state(_generator.get_state())
    drawn = torch.rand(())
    _generator.set_state(torch.get_rng_state())
    torch.set_rng_state(state)
    return drawn


@pytest.mark.parametrize(
    ("draw", "tracker", "budget"),
    [
        (_DRAWS["python"][0], actckpt.rng.python_random, "60%"),
        (_DRAWS["numpy"][0], actckpt.rng.numpy_random, "60%"),
        (_draw_past_operators, _Tracker, "60%"),
        (_draw_past_operators, _Tracker, "100%"),
    ],
)
def test_blocks_that_draw_where_a_tracker_restores_are_planned_with_a_rerun_and_profiling_leaves_its_state(
    draw: Callable[[], float | Tensor], tracker: Callable[[], Any], budget: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Drawing, "draw", draw, raising=False)
    expected = _drawn()[0]
    actckpt.rng.register_tracker(tracker)
    try:
        found, plan = _drawn(activation_budget=budget)
    finally:
        actckpt.rng.unregister_tracker(tracker)
    assert_equal(found, expected)
    assert plan is not None and (tracker is _Tracker or _no_rerun(plan) == {"rerun"})
