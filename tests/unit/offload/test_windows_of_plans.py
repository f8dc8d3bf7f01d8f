"""Windows of a plan that offloads: they limit what is on its way until its backward has ended."""

from __future__ import annotations

import pytest
import torch
from internals.stores import offload_from
from torch import nn

import actckpt
from actckpt._offload import stores


def test_windows_of_a_plan_end_with_its_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    offload_from(monkeypatch, 4 << 10)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6)))
    x = torch.randn(256, 64)
    actckpt.apply(model, activation_budget="60%", pins={"0::aten.addmm.default#0.0": "offload"})
    for _ in range(3):
        model(x).square().mean().backward()
        assert stores.limited(1 << 60) == 1 << 60
    loss = model(x).square().mean()
    assert stores.limited(1 << 60) < 1 << 20
    actckpt.remove(model)
    loss.backward()
    assert stores.limited(1 << 60) == 1 << 60, "hooks of its graph limit nothing afterwards"
