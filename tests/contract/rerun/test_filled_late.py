"""`rrelu` in training: autograd saves its noise before its kernel draws it, and often as the last tensor of a function.

A rerun that ends once it has saved that much has not drawn the noise. Torch's checkpoint ends there, and its gradients
are others: here plain training alone is the oracle. New memory is full of NaN, so that no old noise lies in it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from oracle import assert_equal
from torch.nn import functional as F  # noqa: N812 - torch's own name

import actckpt


@pytest.fixture(autouse=True)
def _new_memory_is_nan() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]


Function = Callable[[torch.Tensor], torch.Tensor]


def _rrelu(x: torch.Tensor, in_place: bool = False) -> torch.Tensor:
    return F.rrelu(x, training=True, inplace=in_place)


FUNCTIONS: dict[str, Function] = {
    "last": lambda x: _rrelu(x * 2),
    "only": _rrelu,
    "in place": lambda x: _rrelu(x * 2, in_place=True),
    "before what saves nothing": lambda x: _rrelu(x.sin()) + 1,
    "before what saves": lambda x: _rrelu(x * 2).sin(),
    "twice": lambda x: _rrelu(_rrelu(x).sin()),
    "beside another": lambda x: _rrelu(x) + _rrelu(x.sin()),
    "evaluation": lambda x: F.rrelu(x * 2, training=False),
    "module": lambda x: torch.nn.RReLU()(x.sin()),
}


def _gradients(function: Function, run: Callable[[Function, torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    torch.manual_seed(3)
    x = torch.randn(16, 4, requires_grad=True)
    y = run(function, x * 1)
    return [torch.autograd.grad(y.square().sum(), x, retain_graph=True)[0] for _ in range(2)]


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("is_nested", [False, True])
def test_gradients_are_those_of_plain_training(name: str, is_nested: bool) -> None:
    def run(function: Function, x: torch.Tensor) -> torch.Tensor:
        if is_nested:
            return actckpt.checkpoint(lambda h: actckpt.checkpoint(function, h), x)
        return actckpt.checkpoint(function, x)

    expected = _gradients(FUNCTIONS[name], lambda function, x: function(x))
    assert_equal(_gradients(FUNCTIONS[name], run), expected)
    assert not expected[0].isnan().any()


def test_what_autograd_saved_can_be_read_outside_of_a_backward() -> None:
    torch.manual_seed(3)
    x = torch.randn(16, requires_grad=True)
    noise = actckpt.checkpoint(_rrelu, x).grad_fn._saved_noise  # type: ignore[union-attr]
    torch.manual_seed(3)
    assert_equal(noise, _rrelu(torch.randn(16, requires_grad=True)).grad_fn._saved_noise)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("function", "expected"),
    [(lambda x: _rrelu(x * 2), 3), (lambda x: F.dropout(x.sin()), 2), (lambda x: x * torch.ones(16), 2)],
    ids=["rrelu", "dropout", "mul"],
)
def test_only_what_is_filled_late_runs_once_more(function: Function, expected: int) -> None:
    runs = itertools.count()  # what a rerun does to an iterator is not undone

    def counted(x: torch.Tensor) -> torch.Tensor:
        next(runs)
        return function(x)

    x = torch.randn(16, requires_grad=True)
    actckpt.checkpoint(counted, x).sum().backward()
    assert next(runs) == expected


def test_offload_refuses_noise_that_it_moved_too_early(tmp_path: Path) -> None:
    actckpt.configure(spill_dir=tmp_path)
    x = torch.randn(64, 64, requires_grad=True)
    with actckpt.offload(min_bytes=1):
        y = _rrelu(x.sin())
    with pytest.raises(actckpt.errors.SavedTensorChangedError, match=r"noise of rrelu, of shape \(64, 64\)"):
        y.sum().backward()
