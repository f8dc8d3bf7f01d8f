"""Settings that torch makes by itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from actckpt._core.torch_private import settings as torch_settings


@pytest.fixture
def order() -> Iterator[None]:
    before = torch._C._get_sdp_priority_order()
    yield
    torch._C._set_sdp_priority_order(before)


def _choose(*_: Any) -> int:
    """What torch does when a process first asks which kernel to run."""
    torch._C._set_sdp_priority_order([3, 1, 2, 0, 4])
    return 3


@pytest.mark.usefixtures("order")
def test_torch_puts_kernels_of_attention_in_order_before_settings_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_settings, "_choose_sdp", _choose)
    torch_settings.settle_sdp_order(torch.device("cpu"))
    assert list(torch._C._get_sdp_priority_order()) == [3, 1, 2, 0, 4]


@pytest.mark.usefixtures("order")
def test_an_order_that_the_program_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_settings, "_choose_sdp", _choose)
    torch._C._set_sdp_priority_order([0, 1, 2, 3, 4])
    torch_settings.settle_sdp_order(torch.device("cpu"))
    assert list(torch._C._get_sdp_priority_order()) == [0, 1, 2, 3, 4]


def test_torch_tells_which_kernel_attention_would_run() -> None:
    """If this fails, torch has renamed it: without it, the first region on a GPU may rerun with another kernel."""
    assert torch_settings._choose_sdp is not None
    torch_settings.settle_sdp_order(torch.device("cpu"))
