"""Policies of one word: which operators they keep, wherever a policy is accepted."""

from __future__ import annotations

import pickle
import warnings
from typing import Any

import pytest
import torch
from oracle import CountOperators, assert_equal, gradients
from torch import Tensor, nn
from transformer_block import Block

import actckpt
from actckpt.policies import choice_of

_ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu.default"
_MATMULS = ("aten.addmm.default", "aten.mm.default", "aten.bmm.default", "aten.convolution.default", _ATTENTION)


class Model(nn.Module):
    """A convolution, a block with attention, a product with batch dimensions, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.head = nn.Conv1d(16, 16, 1), Block(16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(self.first(x.mT).mT.contiguous().sin())
        return self.head((x @ x.mT @ x).sin()).sin()


def _run(model: nn.Module, way: str, policy: Any) -> tuple[list[Any], dict[str, int]]:
    """Return gradients and the operators of a backward."""
    model.zero_grad()
    x = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(0))
    if way == "region":
        with actckpt.region(policy):
            loss = model(x).sum()
    elif way == "checkpoint":
        loss = actckpt.checkpoint(model, x, policy=policy).sum()
    else:
        loss = model(x).sum()
    with CountOperators() as count:
        loss.backward()
    return gradients(model), dict(count.counts)


def _replayed(policy: Any) -> set[str]:
    """Return the expensive operators that a backward executes, of those that the backward of plain training does not.

    The backward of a matmul is made of matmuls, so that these are counted.
    """
    model = Model()
    before = _run(model, "plain", None)[1]
    after = _run(model, "region", policy)[1]
    return {name for name in _MATMULS if after.get(name, 0) > before.get(name, 0)}


def test_each_keeps_what_it_says_and_the_rest_is_recomputed() -> None:
    assert _replayed("recompute") == {*_MATMULS} - {"aten.mm.default"}
    assert _replayed("attention") == {"aten.convolution.default", "aten.addmm.default", "aten.bmm.default"}
    assert _replayed("matmuls") == set()
    assert _replayed("dots_with_no_batch_dims") == {"aten.convolution.default", "aten.bmm.default", _ATTENTION}


@pytest.mark.parametrize("name", ["attention", "matmuls", "dots_with_no_batch_dims"])
@pytest.mark.parametrize("way", ["region", "checkpoint", "apply"])
def test_gradients_are_those_of_plain_training(name: str, way: str) -> None:
    model = nn.Sequential(*(Block(16) for _ in range(3)))
    expected, _ = _run(model, "plain", None)
    if way == "apply":
        actckpt.apply(model, policy=name)
        model = pickle.loads(pickle.dumps(model))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            found, _ = _run(model, way, name)
            assert_equal(found, expected)


def test_a_preset_names_operators_of_packages_that_are_imported_later() -> None:
    kept = choice_of("attention").actions
    assert kept is not None
    assert {"flash_attn._flash_attn_forward.default", "higher_order.flex_attention", _ATTENTION} <= kept.keys()


def test_one_of_which_no_operator_runs_is_told_as_one_and_not_by_each_operator_of_other_devices() -> None:
    layer = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid())
    with actckpt.region("matmuls") as region:
        y = layer(torch.randn(2, 4))
    y.sum().backward()
    assert region.report().operators_not_run == ()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(3):
            with actckpt.region("attention") as region:
                y = layer(torch.randn(2, 4))
            y.sum().backward()
            del y
    assert len(told) == 1 and "'attention' (aten._scaled_dot_product_flash_attention, " in str(told[0].message)
    (idle,) = region.report().operators_not_run
    assert idle.startswith("'attention' (") and idle.endswith(" and others)")
