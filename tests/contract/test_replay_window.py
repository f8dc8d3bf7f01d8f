"""`configure(replay_window=...)`: fewer bytes at once in backward, for at most as many operators again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from oracle import CountOperators

import actckpt
from actckpt.memory import LiveStorages

_LAYERS = 32


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    yield
    actckpt.configure(replay_window=None)


def _run(window: int | None) -> tuple[int, int, list[torch.Tensor]]:
    """Return peak bytes, operators executed again, and gradients of the second of two steps; the first is audited."""
    torch.manual_seed(0)
    layers = (torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(_LAYERS))
    model = torch.nn.Sequential(*layers)
    x = torch.randn(1024, 64, requires_grad=True)
    actckpt.configure(replay_window=window)
    for _ in range(2):
        model.zero_grad()
        with LiveStorages() as live:
            with actckpt.region("recompute"):
                y = model(x)
            with CountOperators() as operators:
                y.sum().backward()
            del y
    again = operators.counts["aten.addmm.default"] + operators.counts["aten.gelu.default"]
    return (
        live.peak_bytes,
        again,
        [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None],
    )


def test_a_quarter_of_the_activations_bounds_the_peak_at_twice_the_operators() -> None:
    peak, operators, gradients = _run(None)
    bounded_peak, bounded_operators, bounded_gradients = _run(2 * _LAYERS * 1024 * 64 * 4 // 4)
    assert operators <= 2 * _LAYERS < bounded_operators <= 4 * _LAYERS
    assert bounded_peak <= 0.4 * peak
    assert all(map(torch.equal, gradients, bounded_gradients))


def test_a_window_that_takes_nothing_bounds_the_peak_too() -> None:
    def run(window: int | None) -> tuple[int, torch.Tensor]:
        h = x = torch.linspace(0, 1, 256, requires_grad=True)
        actckpt.configure(replay_window=window)
        with actckpt.region():
            for _ in range(20):
                h = h.sin()
        with LiveStorages() as live:
            (gradient,) = torch.autograd.grad(h.sum(), x)
        return live.peak_bytes, gradient

    run(None)  # the audit's
    unbounded, expected = run(None)
    for window in (0, 100, 1023):  # one value has 1024 bytes
        peak, gradient = run(window)
        assert peak <= 6 * 1024 < 20 * 1024 <= unbounded
        assert torch.equal(gradient, expected)
