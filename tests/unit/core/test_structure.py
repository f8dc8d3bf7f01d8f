"""How much of what a function reaches is looked at."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from actckpt import _C


def test_of_a_long_chain_of_objects_a_bounded_part_is_looked_at() -> None:
    chain = SimpleNamespace(value=torch.zeros(()))
    for _ in range(20_000):
        chain = SimpleNamespace(value=[chain, torch.zeros(())])
    assert 0 < len(_C.Structure((chain,), set(), []).take_tensors()) < 10_000
