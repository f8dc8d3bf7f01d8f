"""`apply` with operators that give other results each time, as dispatches to experts do: listed ones are kept."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from oracle import assert_equal
from torch import Tensor, nn

import actckpt
from actckpt.errors import RerunMismatchError

_ROWS = 12


class _Calls:
    """Counts the calls of all dispatches: each has another layout."""

    num = itertools.count(1)


def _layout(num_rows: int, num_padded: int = 0) -> np.ndarray[Any, Any]:
    """Return where each row goes, and -1 for rows of padding; another layout each time, which no generator gives."""
    order = np.random.default_rng(next(_Calls.num)).permutation(num_rows + num_padded)
    return np.where(order < num_rows, order, -1)


@torch.library.custom_op("actckpt_tests::dispatch", mutates_args=())
def _dispatch(x: Tensor) -> tuple[Tensor, Tensor]:
    layout = torch.from_numpy(_layout(len(x)))
    return x[layout], layout


@torch.library.custom_op("actckpt_tests::dispatch_padded", mutates_args=())
def _dispatch_padded(x: Tensor) -> tuple[Tensor, Tensor]:
    layout = torch.from_numpy(_layout(len(x), num_padded=next(_Calls.num) % 5))
    return torch.where((layout < 0)[:, None], 0, x[layout]), layout


def _to_experts(ctx: Any, grad: Tensor, _: Tensor) -> Tensor:
    (layout,) = ctx.saved_tensors
    is_row = layout >= 0
    return grad.new_empty(int(is_row.sum()), grad.shape[1]).index_copy(0, layout[is_row], grad[is_row])


for _operator in (_dispatch, _dispatch_padded):
    _operator.register_autograd(_to_experts, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output[1]))


class _Outside(torch.autograd.Function):
    """A kernel that no operator calls: it writes to memory that it gets by its address."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        moved, layout = torch.empty_like(x), torch.empty(len(x), dtype=torch.int64)
        order, rows = _layout(len(x)), np.empty(tuple(x.shape))
        ctypes.memmove(rows.ctypes.data, x.data_ptr(), rows.nbytes)
        for tensor, values in ((moved, rows[order]), (layout, order)):
            ctypes.memmove(tensor.data_ptr(), values.ctypes.data, values.nbytes)
        ctx.save_for_backward(layout)
        ctx.mark_non_differentiable(layout)
        return moved, layout

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Tensor:
        return _to_experts(ctx, grad, _)


DISPATCHES: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "actckpt_tests.dispatch": _dispatch,
    "actckpt_tests.dispatch_padded": _dispatch_padded,
    "outside of the dispatcher": _Outside.apply,
}


class Experts(nn.Module):
    """Moves rows, works on each, and moves them back: results do not depend on the layout. Small integers: exact."""

    def __init__(self, dispatch: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.dispatch, self.num_calls = dispatch, 0
        self.first, self.second = nn.Linear(4, 6).double(), nn.Linear(6, 4).double()
        for parameter in self.parameters():
            with torch.no_grad():
                parameter.copy_(torch.randint(-1, 2, parameter.shape))

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        moved, layout = self.dispatch(x)
        moved = self.second(self.first(moved).square().relu())
        is_row = layout >= 0
        return x + torch.zeros_like(x).index_copy(0, layout[is_row], moved[is_row])


class Model(nn.Module):
    def __init__(self, dispatch: Callable[[Tensor], tuple[Tensor, Tensor]], num_blocks: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Experts(dispatch) for _ in range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _gradients(model: nn.Module) -> list[Tensor]:
    x = torch.arange(4.0 * _ROWS, dtype=torch.float64).reshape(_ROWS, 4).remainder(3).requires_grad_()
    model.zero_grad()
    model(x).sum().backward()
    return [tensor.grad for tensor in (x, *model.parameters()) if tensor.grad is not None]


def _applied(dispatch: Callable[[Tensor], tuple[Tensor, Tensor]], **options: Any) -> Model:
    model = Model(dispatch)
    actckpt.apply(model, blocks=Experts, **options)
    return model


@pytest.fixture(params=DISPATCHES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_one_that_is_not_listed_raises(name: str) -> None:
    with pytest.raises(RerunMismatchError, match=r"no right gradient|saves other|different"):
        _gradients(_applied(DISPATCHES[name]))


@pytest.mark.parametrize("dot", [".", "::"])  # torch's own spelling, too
def test_results_of_listed_operators_are_kept(name: str, dot: str) -> None:
    expected, model = _gradients(Model(DISPATCHES[name])), _applied(DISPATCHES[name])
    opaque = ["blocks.*"] if name.startswith("outside") else [name.replace(".", dot)]
    actckpt.configure(opaque=opaque)  # until the fixture of all tests puts it back
    for _ in range(3):
        assert_equal(_gradients(model), expected)
    assert model.blocks[0].num_calls == 3


class Noisy(Experts):
    def __init__(self, dispatch: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
        super().__init__(dispatch)
        self.drop, self.norm = nn.Dropout(0.5), nn.BatchNorm1d(4).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.drop(super().forward(x)))  # type: ignore[no-any-return]


def test_random_numbers_and_buffers_are_those_of_plain_training(name: str) -> None:
    results = []
    for is_applied in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(Noisy(DISPATCHES[name]) for _ in range(2)))
        if is_applied:
            actckpt.configure(opaque=[name, "*"])  # until the fixture of all tests puts it back
            actckpt.apply(model, blocks=Noisy)
        torch.manual_seed(1)
        steps = [_gradients(model) for _ in range(2)]
        results.append([*itertools.chain(*steps), *model.buffers(), torch.get_rng_state()])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)
    assert torch.equal(results[0][-1], results[1][-1])
