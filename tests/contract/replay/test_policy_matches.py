"""Policies whose operators never run: one warning, and the reports name them with what runs in their place."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch

import actckpt

_NONE_RAN = "ran none of the operators that its policy names"


def _model() -> torch.nn.Sequential:
    return torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU()) for _ in range(3)))


def _train(model: torch.nn.Module, policy: Any, steps: int) -> list[str]:
    """Train with a region around each block; return the warnings."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(steps):
            x = torch.ones(2, 4, requires_grad=True)
            for block in model.children():
                with actckpt.region(policy):
                    x = block(x)
            x.sum().backward()
            del x
    return [str(warning.message) for warning in found]


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
    first, *others = _train(_model(), policy, steps=4)
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
    assert _train(_model(), policy, steps=4) == []


def test_a_loop_over_blocks_warns_only_if_no_block_runs_any() -> None:
    model = torch.nn.Sequential(torch.nn.GELU(), torch.nn.GELU(), torch.nn.Linear(4, 4))
    assert _train(model, ["aten.addmm.default"], steps=3) == []


def test_checkpoint_warns_once_per_function() -> None:
    layer = torch.nn.Linear(4, 4)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(4):
            actckpt.checkpoint(layer, torch.ones(2, 4), policy=["aten.linear"]).sum().backward()
    assert [_NONE_RAN in str(warning.message) for warning in found] == [True]


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


def test_apply_warns_once_for_all_its_blocks_and_its_report_names_the_operators() -> None:
    model = _model()
    actckpt.apply(model, policy=["aten.linear"])
    model = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
    assert [_NONE_RAN in str(warning.message) for warning in found] == [True]
    assert actckpt.report(model).operators_not_run == ("aten.linear (runs as aten.addmm, without a bias aten.mm)",)
    assert "operators of the policy that did not run: aten.linear" in str(actckpt.report(model))


def test_apply_does_not_warn_where_one_block_runs_one() -> None:
    model = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.GELU()])
    actckpt.apply(model, policy=["aten.gelu", "aten.linear"], blocks=["0", "1"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            model[1](model[0](torch.ones(2, 4))).sum().backward()
    assert len(actckpt.report(model).operators_not_run) == 1
