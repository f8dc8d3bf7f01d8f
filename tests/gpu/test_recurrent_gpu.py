"""Recurrent layers of cuDNN, whose dropout draws from a state that no generator has."""

from __future__ import annotations

import pytest
import torch
from gpu_programs import OURS, Method
from oracle import assert_equal, plain, theirs
from torch import Tensor, nn

import actckpt

_LAYERS, _STEPS = 3, 3
METHODS: dict[str, Method] = {
    **{name: OURS[name] for name in ("rerun", "rerun, inputs away", "replay", "region")},
    "nested": lambda function, *args: actckpt.checkpoint(lambda *own: actckpt.checkpoint(function, *own), *args),
}


def _set_anew() -> None:
    """Let the next layer start its dropout anew, as each rerun does."""
    generator = torch.cuda.default_generators[0]
    generator.set_state(generator.get_state())


def _train(kind: type[nn.RNNBase], method: Method) -> list[Tensor]:
    torch.manual_seed(0)
    layers = [kind(32, 32, num_layers=2, dropout=0.5).cuda() for _ in range(_LAYERS)]
    x = torch.randn(10, 4, 32, device="cuda", requires_grad=True)
    found = []
    for _ in range(_STEPS):
        h = x * 1
        for layer in layers:
            _set_anew()
            h = method(lambda h, layer=layer: layer(h)[0], h)
        found += [h.detach(), *torch.autograd.grad(h.sum(), [x, *(p for layer in layers for p in layer.parameters())])]
    return found


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("name", METHODS)
def test_a_rerun_draws_the_masks_of_its_forward(name: str, kind: type[nn.RNNBase]) -> None:
    expected = _train(kind, plain)
    assert_equal(_train(kind, METHODS[name]), expected)


@pytest.mark.parametrize("name", METHODS)
def test_it_does_so_where_nobody_set_the_state_of_the_generator(name: str) -> None:
    """Gradients are those of the masks that the forward drew: of a layer that is linear in what it drops."""

    def gradient_of_sum(method: Method) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        layers = [nn.RNN(8, 8, num_layers=2, dropout=0.5, nonlinearity="relu", bias=False).cuda() for _ in range(3)]
        for layer in layers:
            for parameter in layer.parameters():
                parameter.data.abs_()  # what comes is positive: each layer is linear in what it gets, but for its masks
        x = torch.rand(5, 4, 8, device="cuda").requires_grad_()
        for _ in range(2):
            h = x * 1
            for layer in layers:
                h = method(lambda h, layer=layer: layer(h)[0], h)
        (grad,) = torch.autograd.grad(h.sum(), x)
        return h.detach().double().sum(), (grad.double() * x.detach().double()).sum()

    value, directional = gradient_of_sum(METHODS[name])
    torch.testing.assert_close(directional, value, rtol=1e-4, atol=0)  # a linear function is its own derivative


def test_torchs_checkpoint_draws_others() -> None:
    """If this fails, torch has fixed it: see Rule 5 of NOTE [ Random state ]."""

    def gradient(method: Method) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        layers = [nn.LSTM(32, 32, num_layers=2, dropout=0.5).cuda() for _ in range(2)]
        x = torch.randn(10, 4, 32, device="cuda", requires_grad=True)
        torch.manual_seed(1)
        h = x * 1
        for layer in layers:
            h = method(lambda h, layer=layer: layer(h)[0], h)
        return h.detach(), torch.autograd.grad(h.sum(), x)[0]

    expected, found = gradient(plain), gradient(theirs)
    assert torch.equal(found[0], expected[0]) and not torch.equal(found[1], expected[1])
