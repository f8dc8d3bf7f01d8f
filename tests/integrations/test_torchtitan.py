"""torchtitan's own activation checkpointing, unmodified, with `actckpt.checkpoint` behind it."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from parallel_blocks import Block
from training import assert_equal, held_and_peak, train_on

import actckpt

pytest.importorskip("torchtitan")
titan = importlib.import_module("torchtitan.distributed.activation_checkpoint")

KINDS = {"FullAC": titan.FullAC, "SelectiveAC": titan.SelectiveAC}


class Model(torch.nn.Module):
    """As torchtitan's: the blocks are in `layers`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleDict({str(i): Block(32, 0.1) for i in range(3)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


def _train(prepare: Callable[[Any], object]) -> tuple[list[torch.Tensor], tuple[int, int]]:
    model = Model()
    prepare(model)
    x = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(0))
    found = train_on(model, lambda: model(x).square().mean())
    return found, held_and_peak(model, lambda: model(x).square().mean())


@pytest.mark.parametrize("kind", KINDS)
def test_its_policies_run_unmodified_with_ours_as_checkpoint_fn(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = KINDS[kind](KINDS[kind].Config())
    plain, plain_held = _train(lambda model: None)
    theirs, their_held = _train(policy.apply)
    with_ours = functools.partial(titan.ptd_checkpoint_wrapper, checkpoint_fn=actckpt.checkpoint)
    monkeypatch.setattr(titan, "ptd_checkpoint_wrapper", with_ours)
    actckpt.reset_stats()
    ours, our_held = _train(policy.apply)
    assert_equal(theirs, plain)
    assert_equal(ours, plain)
    stats = actckpt.stats()
    assert (stats.rerun_regions > 0, stats.replayed_operators > 0) == (kind == "FullAC", kind == "SelectiveAC")
    assert all(one <= other < before for one, other, before in zip(our_held, their_held, plain_held, strict=True))


@pytest.mark.parametrize("policy", ["recompute", "matmuls"])
def test_apply_takes_the_place_of_its_policies(policy: str) -> None:
    plain, plain_held = _train(lambda model: None)
    ours, our_held = _train(lambda model: actckpt.apply(model, policy, blocks="layers.*"))
    assert_equal(ours, plain)
    assert all(one < before for one, before in zip(our_held, plain_held, strict=True))
