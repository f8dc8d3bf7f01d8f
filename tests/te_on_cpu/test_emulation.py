"""The emulation quantizes, moves scales, and hides what CUDA's kernels hide."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from te_on_cpu import generators, training
from te_on_cpu.training import Setting, train


def _x() -> Tensor:
    return training.make_input(torch.float32, 1)


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_quantized_modules_compute_nearly_what_plain_ones_compute(te: Any, recipe: str) -> None:
    module = training.make_layer(te, "LayerNormMLP")
    plain, recipe_ = module(_x()), training.make_recipe(recipe)
    for _ in range(3):  # delayed scaling begins with a scale of one
        with te.autocast(True, recipe=recipe_):
            quantized = module(_x())
    error = (quantized - plain).norm() / plain.norm()
    assert 1e-4 < error < 0.1


def test_scales_move_in_every_step(te: Any) -> None:
    setting = Setting("delayed")
    results = train(te, setting)
    for step in range(1, 4):
        now, before = (
            [value for name, value in results.items() if name.endswith(f" scale, step {s}, move 3")]
            for s in (step, step - 1)
        )
        moved = [not torch.equal(one, other) for one, other in zip(now, before, strict=True)]
        assert sum(moved) > len(moved) / 2


class _Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_kernels_are_unseen_by_modes_and_version_counters(te: Any) -> None:
    linear, recipe = training.make_layer(te, "Linear"), training.make_recipe("delayed")
    with te.autocast(True, recipe=recipe):
        linear(_x())
    history = linear.fp8_meta["scaling_fwd"].amax_history
    version = history._version
    with te.autocast(True, recipe=recipe), _Seen() as seen:
        linear(_x())
    assert history._version == version
    assert not [name for name in seen.names if "mm" in name or "copy_" in name]


def test_handles_of_generators_share_a_state_as_cudas_do() -> None:
    default = generators.default
    torch.manual_seed(1)
    handle, copy = default.graphsafe_get_state(), default.clone_state()
    torch.rand(3)
    assert torch.equal(handle.get_state(), default.get_state())
    assert not torch.equal(copy.get_state(), default.get_state())
    default.graphsafe_set_state(copy)
    first = torch.rand(3)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(3), first)
    default.graphsafe_set_state(handle)
    assert torch.equal(handle.get_state(), torch.get_rng_state())
