"""A region around many blocks: fewer bytes at once in backward, for at most twice the operators."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from internals.references import assert_references_flat
from oracle import CountOperators
from transformer_block import Block, Residual

import actckpt
from actckpt import _C, _bind
from actckpt._replay import execute
from actckpt.memory import LiveStorages

pytestmark = pytest.mark.usefixtures("counters_only_observe")


class _Whole:
    """A model of many layers in one region, with the settings that it finds."""

    def __init__(self, layers: Iterable[torch.nn.Module], *shape: int) -> None:
        self._model = torch.nn.Sequential(*layers)
        self._x = torch.randn(shape)
        self.peak_bytes = self.forward_operators = self.replayed_operators = 0

    def step(self, region: Any, *, audited: bool = False) -> list[torch.Tensor]:
        """Run a step, the first one also before if it is not to be audited; return its gradients."""
        for _ in range(1 if audited else 2):
            self._model.zero_grad()
            actckpt.reset_stats()
            with LiveStorages(parameters=self._model.parameters()) as live:
                with CountOperators() as operators, region():
                    loss = self._model(self._x).square().mean()
                loss.backward()
            self.peak_bytes = live.peak_bytes
            self.replayed_operators = actckpt.stats().replayed_operators
            views = ("view", "transpose", "permute", "as_strided", "select", "unsqueeze", "aten.t.")
            self.forward_operators = sum(n for name, n in operators.counts.items() if not any(v in name for v in views))
        return [parameter.grad for parameter in self._model.parameters() if parameter.grad is not None]


def _layers(width: int) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU())


WHOLE: dict[str, Callable[[], _Whole]] = {
    "layers": lambda: _Whole((_layers(512) for _ in range(32)), 256, 512),
    "transformer": lambda: _Whole((Block(128) for _ in range(10)), 4, 128, 128),
    "four blocks": lambda: _Whole((Block(256) for _ in range(4)), 4, 256, 256),
    "convolutions": lambda: _Whole((Residual(16) for _ in range(12)), 8, 16, 32, 32),
}


@pytest.mark.parametrize("name", WHOLE)
def test_one_region_around_a_whole_model_peaks_at_a_third_of_plain_for_twice_the_operators(
    name: str, windows_from: Callable[[float], None]
) -> None:
    whole = WHOLE[name]()
    expected = [gradient.clone() for gradient in whole.step(contextlib.nullcontext)]
    plain = whole.peak_bytes
    windows_from(math.inf)
    whole.step(actckpt.region)
    once = whole.replayed_operators
    assert once <= whole.forward_operators
    windows_from(4 << 20)
    gradients = whole.step(actckpt.region)
    print(f"{name}: peak {whole.peak_bytes / plain:.3f} of {plain / 2**20:.1f} MiB, ", end="")
    print(f"{whole.replayed_operators} operators again, without a limit {once}")
    assert whole.peak_bytes <= 0.35 * plain
    assert whole.replayed_operators <= 2 * once
    assert all(map(torch.equal, gradients, expected))


@pytest.mark.parametrize("name", WHOLE)
def test_no_operator_of_a_whole_model_runs_more_than_twice_in_a_backward(
    name: str, request: pytest.FixtureRequest
) -> None:
    runs: Counter[int] = Counter()

    def counted(step: Any, *args: Any) -> Any:
        runs[id(step)] += 1
        return execute.replay_specially(step, *args)

    # Under autocast, as C++ sees it, every operator is executed by Python.
    _C.connect(_bind.NAMES | {"replay_specially": counted, "any_autocast_enabled": lambda: True})
    request.addfinalizer(lambda: _C.connect(_bind.NAMES))
    whole = WHOLE[name]()
    whole.step(actckpt.region, audited=True)
    runs.clear()
    whole.step(actckpt.region, audited=True)  # the second step
    assert runs.total() == whole.replayed_operators
    assert set(runs.values()) == {1, 2}


def test_the_peak_of_a_whole_model_grows_with_the_root_of_its_depth() -> None:
    peaks = []
    for depth in (32, 128):
        whole = _Whole((_layers(128) for _ in range(depth)), 1024, 128)
        whole.step(actckpt.region)
        peaks.append(whole.peak_bytes)
        assert whole.replayed_operators <= 2 * whole.forward_operators
    assert peaks[1] <= 2.1 * peaks[0]


@pytest.mark.parametrize("window_from", [0, math.inf])
def test_replays_give_every_reference_back(window_from: float, windows_from: Callable[[float], None]) -> None:
    windows_from(window_from)
    x = torch.randn(2, 4, requires_grad=True)

    def step() -> None:
        with actckpt.region():
            y = x.sin().exp().tanh().cos().sigmoid().exp().sin().sum() + x.sort(0)[0].exp().var(1).sum()
        y.backward()

    assert_references_flat(step)
