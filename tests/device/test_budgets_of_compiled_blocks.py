"""Budgets plan for blocks that are compiled; dispatch modes see none of their kernels."""

from __future__ import annotations

import copy
import functools
import gc
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from demo_training import start_peak
from oracle import assert_equal
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

import actckpt
from actckpt._core import torch_private

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.skipif(
        not torch_private.runs_compiled_below_modes,
        reason="torch before 2.10 runs functions uncompiled below any dispatch mode",
    ),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # torch's own, while it compiles
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

_WIDTH, _ROWS, _NUM_BLOCKS = 64, 1024, 4


def _hidden(graph: torch.fx.GraphModule, _: Sequence[Any]) -> Callable[[list[Any]], Any]:
    """Compile to kernels that no dispatch mode sees, as inductor does for a GPU, and that differ from eager ones."""

    def run(args: list[Any]) -> Any:
        given = list(args)
        args.clear()
        with torch._C._DisableTorchDispatch():
            return [3 * value / 3 if _is_float(value) else value for value in graph.forward(*given)]

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


_compiler = aot_autograd(fw_compiler=_hidden, bw_compiler=_hidden)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(_WIDTH),
            nn.Linear(_WIDTH, 4 * _WIDTH),
            nn.Linear(4 * _WIDTH, _WIDTH),
        )
        self.num_eager = 0

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            self.num_eager += 1
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def _by_method(block: nn.Module) -> nn.Module:
    block.compile(backend=_compiler)
    return block


_WAYS = {"block.compile()": _by_method, "torch.compile(block)": functools.partial(torch.compile, backend=_compiler)}


class _Training:
    def __init__(self, way: str | None) -> None:
        gc.collect()
        torch.manual_seed(0)
        made = [_Block() for _ in range(_NUM_BLOCKS)]
        self.blocks = made
        self.model = nn.Sequential(*(_WAYS[way](block) if way else block for block in made)).to("sim")
        self.x = torch.randn(_ROWS, _WIDTH).to("sim")

    def gradients(self) -> list[Tensor]:
        self.model.zero_grad()
        self.model(self.x).square().mean().backward()
        return [parameter.grad.cpu() for parameter in self.model.parameters() if parameter.grad is not None]

    def peak(self) -> int:
        self.model.zero_grad()
        start_peak()
        self.gradients()
        return torch.accelerator.max_memory_allocated()


@pytest.mark.parametrize("way", _WAYS)
def test_budgets_hold_and_blocks_stay_compiled(way: str) -> None:
    plain = _Training(way)
    expected, most = plain.gradients(), plain.peak()
    del plain
    rerun = _Training("torch.compile(block)")  # around compiled code: for the other one the compiler would decide
    actckpt.apply(rerun.model)
    rerun.gradients()
    least = rerun.peak()
    del rerun
    assert least < 0.7 * most
    peaks = []
    for share in (0.02, 0.4, 1.0):
        budget = int(least + share * (most - least))
        training = _Training(way)
        actckpt.apply(training.model, budget=budget, on_infeasible="raise", race=False)
        for _ in range(5):
            assert_equal(training.gradients(), expected)
        peaks.append(training.peak())
        assert peaks[-1] <= budget
        assert sum(block.num_eager for block in training.blocks) == 0
        actckpt.remove(training.model)
        assert_equal(training.gradients(), expected)
        assert sum(block.num_eager for block in training.blocks) == 0
    assert peaks == sorted(peaks) and len(set(peaks)) == 3, peaks


def test_hooks_of_compiled_blocks_that_are_kept_run_once() -> None:
    training, calls = _Training("block.compile()"), []
    for block in training.blocks:
        block.register_forward_hook(lambda *_: calls.append(1))
    plain = training.gradients()
    calls.clear()
    training.gradients()
    num_calls = len(calls)
    actckpt.apply(training.model, budget="1GiB")
    for _ in range(2):
        assert_equal(training.gradients(), plain)
    calls.clear()
    training.gradients()
    assert len(calls) == num_calls


def test_inputs_of_compiled_blocks_that_run_again_are_moved() -> None:
    expected, training = _Training("torch.compile(block)").gradients(), _Training("torch.compile(block)")
    actckpt.apply(training.model, offload_inputs=True)
    training.gradients()
    actckpt.reset_stats()
    assert_equal(training.gradients(), expected)
    assert actckpt.stats().offloaded_bytes >= (_NUM_BLOCKS - 1) * _ROWS * _WIDTH * 4
    assert sum(block.num_eager for block in training.blocks) == 0


def test_a_copy_is_planned_too_and_as_uncompiled_as_copies_of_modules_are() -> None:
    training = _Training("block.compile()")
    actckpt.apply(training.model, activation_budget="60%")
    training.gradients()
    training.model = copy.deepcopy(training.model)
    expected = _Training(None).gradients()
    for _ in range(3):
        assert_equal(training.gradients(), expected)
    assert actckpt.report(training.model).plan is not None
