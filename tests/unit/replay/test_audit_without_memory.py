"""An audit that has no memory for its checksum is left out."""

from __future__ import annotations

import pytest
import torch
from oracle import assert_equal
from torch import Tensor

import actckpt
from actckpt._replay import audit


@pytest.mark.parametrize("fails", ["in forward", "in backward"])
def test_an_audit_without_memory_for_its_checksum_is_left_out(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Tensor] = []

    def out_of_memory(tensor: Tensor) -> Tensor:
        asked.append(tensor)
        raise torch.OutOfMemoryError("none left")

    right = audit.checksum
    monkeypatch.setattr(audit, "checksum", out_of_memory if fails == "in forward" else right)
    x = torch.randn(13, 3, requires_grad=True)
    with actckpt.region():
        y = x.exp().sin()
    monkeypatch.setattr(audit, "checksum", out_of_memory if fails == "in backward" else right)
    assert_equal(torch.autograd.grad(y.sum(), x)[0], torch.autograd.grad(x.exp().sin().sum(), x)[0])
    assert asked
