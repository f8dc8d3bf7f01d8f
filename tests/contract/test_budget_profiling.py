"""`apply(budget=...)` profiles blocks in the first step: runs that nothing of the program may show."""

from __future__ import annotations

import contextvars
import dataclasses
import random
import types
from collections.abc import Callable
from typing import Any, ClassVar

import numpy
import pytest
import torch
from oracle import assert_equal
from test_budgets import Block
from torch import Tensor, nn

import actckpt


class Count(Block):
    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num += 1
        return super().forward(x) * (1 + self.num / 10)


class Draws(Block):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * torch.rand(x.shape, generator=self.generator))


class DrawsFromList(Draws):
    """The same, in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.generators = [self.__dict__.pop("generator")]

    def forward(self, x: Tensor) -> Tensor:
        return Block.forward(self, x * torch.rand(x.shape, generator=self.generators[0]))


class DrawsFromObject(Draws):
    """The same, in an object."""

    def __init__(self) -> None:
        super().__init__()
        self.held = types.SimpleNamespace(generator=self.__dict__.pop("generator"))

    def forward(self, x: Tensor) -> Tensor:
        return Block.forward(self, x * torch.rand(x.shape, generator=self.held.generator))


class Observed(Block):
    """Moves a buffer, from the second call on through `.data`, which no version tells."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.ones(32))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        average = self.average if self.count == 0 else self.average.data
        average.mul_(0.5).add_(x.detach().mean((0, 1)))
        self.count.data.add_(1)
        return super().forward(x * self.average)


class TensorAttribute(Block):
    def __init__(self) -> None:
        super().__init__()
        self.mean, self.num = torch.zeros(32), torch.zeros(1)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x) * (1 + self.mean + self.num)
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean((0, 1))
        self.num += 0.1
        return y


class Buffer(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("num", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.num += 0.1
        return super().forward(x) * (1 + self.num)


class Freed(Block):
    """Tensors whose storages a library freed until it needs them, as sharding does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("gathered", torch.zeros(1000), persistent=False)
        weight = next(self.parameters())
        weight.gathered = torch.zeros(2**20)
        for tensor in (self.gathered, weight.gathered):
            tensor.untyped_storage().resize_(0)


class LossAtModule(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.loss = y.square().mean()
        return y


class LossInList(Block):
    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.losses.append(y.square().mean())
        return y


class InPlace(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(1.1))


class Captured(Block):
    """Reads what no argument leads to: the graph of the model around it."""

    scale: list[Tensor]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale[0])


class Recurrent(Block):
    """A module whose parameters are held in a list besides."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = [self.up.weight]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x @ self.weights[0].square().mean(0).diag()


_collected: contextvars.ContextVar[list[Tensor] | None] = contextvars.ContextVar("collected", default=None)


class Collected(Block):
    """What a hook collects in a context variable."""

    def __init__(self) -> None:
        super().__init__()
        self.up.register_forward_hook(self.collect)

    @staticmethod
    def collect(_: nn.Module, args: Any, result: Tensor) -> None:
        collected = _collected.get()
        assert collected is not None
        collected.append(result.square().mean())


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
            if isinstance(block, Captured):
                block.scale = scale
            x = block(x)
        loss = self.head(x).square().mean() + sum(collected)
        for block in self.blocks:
            if isinstance(block, LossAtModule):
                loss = loss + block.loss
            if isinstance(block, LossInList):
                loss = loss + torch.stack(block.losses).sum()
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


_KINDS = (
    Count,
    Draws,
    DrawsFromList,
    DrawsFromObject,
    Observed,
    TensorAttribute,
    Buffer,
    Freed,
    LossAtModule,
    LossInList,
    InPlace,
    Captured,
    Recurrent,
    Collected,
)


@pytest.mark.parametrize("kind", [*_KINDS, ModelOfObjects], ids=lambda kind: kind.__name__)
def test_profiling_leaves_nothing_behind(kind: type[nn.Module]) -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(ModelOfObjects() if kind is ModelOfObjects else Model(kind))
    actckpt.apply(models[1], blocks="blocks.*", activation_budget="80%")
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
    assert actckpt.report(models[1]).plan is not None


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (InPlace, "it writes to its input"),
        (Count, "it changes its attributes at each call"),
        (
            DrawsFromObject,
            "it draws from a generator that is in no attribute of a module, which a rerun would go on with",
        ),
        (TensorAttribute, "it changes its attributes at each call"),
    ],
)
def test_blocks_that_a_rerun_would_change_are_planned_without_one(kind: type[nn.Module], why: str) -> None:
    model = Model(kind)
    actckpt.apply(model, blocks="blocks.*", activation_budget="80%")
    for _ in range(3):
        model(torch.randn(8, 16, 32)).backward()
    plan = actckpt.report(model).plan
    assert plan is not None and not any(plan.rerun)
    assert not any(plan.costs.classes[name].rerun for name in plan.costs.stack)
    named = zip(plan.costs.blocks, plan.blocks or (), strict=True)
    assert {block.no_rerun for block, name in named if name is not None} == {why}
    assert plan.overhead_seconds == 0 or f": {why}." in plan.explain()


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
    assert plan is not None
    named = zip(plan.costs.blocks, plan.blocks or (), strict=True)
    assert {block.no_rerun for block, name in named if name is not None} == {
        f"it draws from {where}, which a rerun would go on with"
    }


@pytest.mark.parametrize(
    ("source", "tracker"), [("python", actckpt.rng.python_random), ("numpy", actckpt.rng.numpy_random)]
)
def test_blocks_that_draw_where_a_tracker_restores_are_planned_with_a_rerun(
    source: str, tracker: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Drawing, "draw", _DRAWS[source][0], raising=False)
    expected = _drawn()[0]
    actckpt.rng.register_tracker(tracker)
    try:
        found, plan = _drawn(activation_budget="60%")
    finally:
        actckpt.rng.unregister_tracker(tracker)
    assert_equal(found, expected)
    assert plan is not None
    named = zip(plan.costs.blocks, plan.blocks or (), strict=True)
    assert all(block.rerun for block, name in named if name is not None)


@pytest.mark.parametrize("budget", ["60%", "100%"])
def test_profiling_leaves_the_states_of_registered_trackers_alone(budget: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def draw() -> Tensor:  # no operator is given the generator
        state = torch.get_rng_state()
        torch.set_rng_state(_generator.get_state())
        drawn = torch.rand(())
        _generator.set_state(torch.get_rng_state())
        torch.set_rng_state(state)
        return drawn

    monkeypatch.setattr(Drawing, "draw", draw, raising=False)
    expected = _drawn()[0]
    actckpt.rng.register_tracker(_Tracker)
    try:
        found, _ = _drawn(activation_budget=budget)
    finally:
        actckpt.rng.unregister_tracker(_Tracker)
    assert_equal(found, expected)


@pytest.mark.parametrize("kind", [Draws, DrawsFromList])
def test_blocks_whose_generators_reruns_restore_are_planned_with_one(kind: type[nn.Module]) -> None:
    results = []
    for is_applied in (False, True):
        torch.manual_seed(0)
        model = Model(kind)
        if is_applied:
            actckpt.apply(model, blocks="blocks.*", activation_budget="65%")
        for _ in range(3):
            loss = model(torch.randn(8, 16, 32))
            loss.backward()
            results.append([loss.detach(), *(p.grad.clone() for p in model.blocks.parameters())])
    assert_equal(results[3:], results[:3])
    plan = actckpt.report(model).plan
    assert plan is not None
    named = zip(plan.costs.blocks, plan.blocks or (), strict=True)
    assert all(block.rerun for block, name in named if name is not None)
