"""What is remembered of casts that autocast caches."""

import gc

import torch

import actckpt
from actckpt._replay import casts


def test_nothing_is_remembered_once_the_casts_are_gone() -> None:
    layer, x = torch.nn.Linear(64, 64, bias=False), torch.randn(2, 64, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(3):
            with actckpt.region():
                y = torch.tanh(layer(x))
    y.float().sum().backward()
    del y
    gc.collect()
    assert not casts._known
