"""Blocks that are compiled, under a budget: what the program does with them beside training."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from oracle import assert_equal
from torch import Tensor, nn

import actckpt

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.skipif(
        torch.__version__ < (2, 10), reason="torch before 2.10 runs functions uncompiled below any dispatch mode"
    ),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # torch's own, while it compiles
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # read by the compiler
]


class _Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.num_eager = 0

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            self.num_eager += 1
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def _by_method(block: _Block) -> nn.Module:
    block.compile(backend="aot_eager", fullgraph=True)
    return block


def _by_function(block: _Block) -> nn.Module:
    compiled: nn.Module = torch.compile(block, backend="aot_eager", fullgraph=True)
    return compiled


_WAYS = {"block.compile()": _by_method, "torch.compile(block)": _by_function}
#: Blocks that are compiled once they have a budget.
_LATER = "block.compile() after apply"


class _Training:
    def __init__(self, way: str) -> None:
        torch.manual_seed(0)
        self.blocks = [_Block() for _ in range(3)]
        self.model = nn.Sequential(*self.blocks, nn.Linear(16, 16))
        self.x = torch.randn(64, 16, requires_grad=True)  # so that all blocks have the same graph
        self.way = way
        if way != _LATER:
            self.compile()

    def compile(self) -> None:
        for number, block in enumerate(self.blocks):
            self.model[number] = _WAYS.get(self.way, _by_method)(block)

    def apply(self) -> None:
        actckpt.apply(self.model, blocks=["0", "1", "2"], activation_budget="60%")
        if self.way == _LATER:
            self.compile()

    def loss(self) -> Tensor:
        return self.model(self.x).square().mean()

    def gradients(self) -> list[Tensor | None]:
        self.model.zero_grad()
        self.loss().backward()
        return [parameter.grad for parameter in self.model.parameters()]

    @property
    def num_eager(self) -> int:
        return sum(block.num_eager for block in self.blocks)


@pytest.fixture(params=_WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("way", [*_WAYS, _LATER])
def test_each_graph_is_compiled_once_and_a_budget_makes_a_plan(way: str) -> None:
    training = _Training(way)
    training.apply()
    with torch._dynamo.config.patch(error_on_recompile=True), warnings.catch_warnings():
        warnings.filterwarnings("error", "apply:")
        gradients = [training.gradients() for _ in range(5)]
    expected = _Training("block.compile()").gradients()
    assert training.num_eager == 0 and actckpt.report(training.model).plan is not None
    actckpt.remove(training.model)
    for found in (*gradients, training.gradients()):
        assert_equal(found, expected)


@pytest.mark.parametrize("strict", [False, True])
def test_models_are_exported(way: str, strict: bool) -> None:
    training = _Training(way)
    training.apply()
    for _ in range(3):
        training.gradients()
    with torch.no_grad():
        exported = torch.export.export(training.model, (training.x,), strict=strict).module()
        assert_equal(exported(training.x), training.model(training.x))


def test_the_whole_model_may_be_compiled_later(way: str) -> None:
    training = _Training(way)
    expected = training.gradients()
    training.apply()
    training.gradients()
    eager, training.model = training.model, torch.compile(training.model, backend="aot_eager", fullgraph=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "apply: no plan for the budget")
        assert_equal(training.gradients(), expected)
    training.model = eager
    assert_equal(training.gradients(), expected)
    assert training.num_eager == 0


def test_a_plan_of_compiled_blocks_runs_around_them(way: str) -> None:
    training = _Training(way)
    expected, step = training.gradients(), lambda: training.loss().backward()
    plan = actckpt.plan(step, model=training.model, blocks=["0", "1", "2"], activation_budget="70%")
    actckpt.apply(training.model, policy=plan)
    for _ in range(3):
        assert_equal(training.gradients(), expected)
    assert training.num_eager == 0


def test_what_is_compiled_last_stays_when_the_budget_is_removed() -> None:
    training = _Training("block.compile()")
    training.apply()
    training.gradients()
    training.blocks[0].compile(backend="eager")
    training.blocks[1]._compiled_call_impl = None
    newest = [block._compiled_call_impl for block in training.blocks[:2]]
    actckpt.remove(training.model)
    assert [block._compiled_call_impl for block in training.blocks[:2]] == newest
    training.gradients()
    assert training.num_eager == 1


@pytest.fixture
def _group() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch is built without torch.distributed")
@pytest.mark.usefixtures("_group")
def test_data_parallel_models_train_with_inputs_of_several_sizes(way: str) -> None:
    gradients = []
    for has_budget in (False, True):
        training = _Training(way)
        if has_budget:
            training.apply()
        training.model = nn.parallel.DistributedDataParallel(training.model)
        gradients.append([])
        for rows in (64, 64, 64, 96, 96, 96, 48):
            training.x = torch.linspace(-1, 1, rows * 16).view(rows, 16).requires_grad_()
            gradients[-1].append([found for found in training.gradients() if found is not None])
        assert training.num_eager == 0
        torch._dynamo.reset()
    assert_equal(*gradients)


def test_a_checkpoint_runs_while_another_thread_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    block, x = _Block(), torch.randn(4, 16)
    expected = torch.autograd.grad(block(x).sum(), [*block.parameters()])
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)  # as torch sets it then, for all threads
    y = actckpt.checkpoint(block, x, policy=lambda info: "recompute")
    assert_equal(torch.autograd.grad(y.sum(), [*block.parameters()]), expected)


@pytest.mark.parametrize("ends", ["the loss dies", "another forward"])
def test_a_cycle_may_end_inside_of_inference_mode(ends: str) -> None:
    training = _Training("block.compile()")
    training.apply()
    losses: list[Tensor] = [training.loss()]
    losses[0].backward()
    with torch.inference_mode():
        if ends == "the loss dies":
            losses.clear()
        training.model(training.x)
    assert torch.empty(3).shape == (3,)
    losses.clear()
    expected = _Training("block.compile()").gradients()
    for _ in range(3):
        assert_equal(training.gradients(), expected)
