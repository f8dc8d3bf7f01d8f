"""Budgets with plans that may offload, of models whose block outputs the program holds: offloading frees nothing."""

from __future__ import annotations

import gc

import pytest
import torch
from demo_training import start_peak
from internals.stores import offload_from
from oracle import assert_equal
from torch import Tensor, nn

import actckpt
from actckpt._core import devices

_SHARES = (0.55, 0.65, 0.8)
#: With candidates that are tried.
_STEPS = 24


@pytest.fixture(autouse=True)
def _small_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let plans offload small tensors, and set windows by themselves; no audit adds to peaks."""
    offload_from(monkeypatch, 16 << 10)
    actckpt.configure(max_inflight="auto", audit="off")


@pytest.fixture(autouse=True)
def peaks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The peaks that a meter took down before it started the allocator's peak again."""
    found: list[int] = []
    original = devices.Accelerator.reset_peak

    def reset_peak(self: devices.Accelerator, device: torch.device, *, waits: bool = True) -> int:
        found.append(self.peak_bytes(device))
        return original(self, device, waits=waits)

    monkeypatch.setattr(devices.Accelerator, "reset_peak", reset_peak)
    return found


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class _Stack(nn.Module):
    """The results of its blocks are dropped, held by hooks or until the forward ends, or returned as well."""

    def __init__(self, held: str) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(_Block() for _ in range(12)), nn.Linear(64, 32)
        self.held, self.hidden = held, []
        if held == "by hooks":
            for block in self.blocks:
                block.register_forward_hook(lambda module, args, result: self.hidden.append(result))

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the result, and what each block returned."""
        hidden = []
        for block in self.blocks:
            x = block(x)
            if self.held != "not":
                hidden.append(x)
        y = self.head(x)
        return y, hidden if self.held == "by the program" else []


class _Training:
    def __init__(self, held: str, peaks: list[int]) -> None:
        gc.collect()
        torch.manual_seed(0)
        self.model, self._peaks = _Stack(held).to("sim"), peaks
        self.x = torch.randn(2048, 64).to("sim")
        self.static_bytes = torch.accelerator.memory_allocated()

    def step(self) -> tuple[list[Tensor], int]:
        """Return gradients and the peak."""
        self.model.zero_grad()
        start_peak()
        self._peaks.clear()
        y, hidden = self.model(self.x)
        y.square().mean().backward()
        del hidden
        self.model.hidden.clear()
        gradients = [each.grad.cpu() for each in self.model.parameters() if each.grad is not None]
        return gradients, max(*self._peaks, torch.accelerator.max_memory_allocated(), 0)


@pytest.mark.parametrize("share", _SHARES)
@pytest.mark.parametrize("held", ["not", "by the program", "until the forward ends", "by hooks"])
def test_no_step_exceeds_the_budget_once_the_plan_is_corrected(held: str, share: float, peaks: list[int]) -> None:
    plainly = _Training(held, peaks)
    expected, plain_peak = plainly.step()
    static_bytes = plainly.static_bytes
    del plainly
    training = _Training(held, peaks)
    budget = int(static_bytes + share * (plain_peak - static_bytes))
    actckpt.apply(training.model, budget=budget)
    found = [training.step() for _ in range(_STEPS)]
    for gradients, _ in found:
        assert_equal(gradients, expected)
    assert max(peak for _, peak in found[2:]) <= budget  # the second step may show that something is held
