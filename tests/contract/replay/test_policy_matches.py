"""Policies whose operators never run: one warning, and the reports name them with what runs in their place."""

from __future__ import annotations

import copy
import functools
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import Checkpoint, plain

import actckpt

_NONE_RAN = "ran none of the operators that its policy names"


def _model() -> torch.nn.Sequential:
    return torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU()) for _ in range(3)))


def _in_region(policy: Any) -> Checkpoint:
    """Return a method whose regions all stand at one place, which other files do not use."""

    def call(block: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        with actckpt.region(policy):
            return block(x)

    return call


#: What runs the blocks of a model that it may change.
WAYS: dict[str, Callable[[torch.nn.Module, Any], tuple[torch.nn.Module, Checkpoint]]] = {
    "region": lambda model, policy: (model, _in_region(policy)),
    "checkpoint": lambda model, policy: (model, functools.partial(actckpt.checkpoint, policy=policy)),
    "apply": lambda model, policy: (_applied(model, policy), plain),
}


def _applied(model: torch.nn.Module, policy: Any) -> torch.nn.Module:
    actckpt.apply(model, policy=policy, blocks=[name for name, _ in model.named_children()])
    return pickle.loads(pickle.dumps(copy.deepcopy(model)))


def _train(model: torch.nn.Module, policy: Any, way: str = "region") -> tuple[list[str], torch.nn.Module]:
    """Return the warnings of a training of four steps, and the model that was trained."""
    model, call = WAYS[way](model, policy)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(4):
            x = torch.ones(2, 4, requires_grad=True)
            for block in model.children():
                x = call(block, x)
            x.sum().backward()
            del x
    return [str(warning.message) for warning in found], model


# Each policy of `_train` names other operators: all share one place in the program, which is watched anew for others.
@pytest.mark.parametrize(
    ("policy", "runs_as"),
    [
        (["aten.linear"], r"aten.linear (runs as aten.addmm, without a bias aten.mm)"),
        (["aten.matmul"], r"aten.matmul (runs as aten.mm, aten.bmm, aten.mv or aten.dot)"),
        (["aten.conv2d"], r"aten.conv2d (runs as aten.convolution)"),
        (["aten.addmm.out"], r"aten.addmm.out (pass 'aten.addmm' for all overloads)"),
        (["aten.t"], r"aten.t (makes views, which have no bytes of their own)"),
        (["aten.bilinear"], r"aten.bilinear"),
        (["aten.feature_dropout.default"], "aten.feature_dropout (is made of other operators, and these run)"),
        (actckpt.policies.PerOp({"aten.conv1d": "offload"}), "aten.conv1d (runs as aten.convolution)"),
    ],
    ids=str,
)
def test_a_policy_that_matches_nothing_warns_once_per_place_and_names_what_runs(policy: Any, runs_as: str) -> None:
    (first, *others), _ = _train(_model(), policy)
    assert _NONE_RAN in first and runs_as in first and not others


@pytest.mark.parametrize(
    "policy",
    [
        [],
        ["aten.addmm"],
        ["aten.addmm.default", "aten.linear"],
        ["aten.linear", "aten.gelu"],
        actckpt.policies.PerOp({}, default="recompute"),
        pytest.param(lambda info: actckpt.Action.KEEP, id="function"),
        "recompute",
    ],
    ids=str,
)
def test_other_policies_do_not_warn(policy: Any) -> None:
    assert _train(_model(), policy)[0] == []


def test_a_report_names_the_operators_that_did_not_run() -> None:
    layer = torch.nn.Linear(4, 4)
    with actckpt.region(["aten.addmm", "aten.linear", "aten.bmm"]) as region:
        layer(torch.ones(2, 4)).sin()
    report = region.report()
    assert report.operators_not_run == ("aten.linear (runs as aten.addmm, without a bias aten.mm)", "aten.bmm")
    assert (
        "did not run: aten.linear" in str(report) and report.as_dict()["operators_not_run"] == report.operators_not_run
    )
    with actckpt.region(["aten.addmm"]) as region:
        layer(torch.ones(2, 4)).sin()
    assert region.report().operators_not_run == () and "did not run" not in str(region.report())


@pytest.mark.parametrize("way", ["checkpoint", "apply"])
def test_each_way_warns_once_for_all_its_blocks(way: str) -> None:
    model = _model() if way != "checkpoint" else _model()[:1]  # which warns once per function
    found, model = _train(model, ["aten.linear"], way)
    assert [_NONE_RAN in message for message in found] == [True]
    if way == "apply":
        report = actckpt.report(model)
        assert report.operators_not_run == ("aten.linear (runs as aten.addmm, without a bias aten.mm)",)
        assert "operators of the policy that did not run: aten.linear" in str(report)


@pytest.mark.parametrize("way", ["region", "apply"])
def test_it_does_not_warn_where_one_block_runs_one(way: str) -> None:
    model = torch.nn.Sequential(torch.nn.GELU(), torch.nn.GELU(), torch.nn.Linear(4, 4))
    found, model = _train(model, ["aten.addmm.default", "aten.linear"], way)
    assert found == []
    assert way != "apply" or len(actckpt.report(model).operators_not_run) == 1
