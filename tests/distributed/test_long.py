"""Every kind by every method over more steps than a plan is watched in; part of `make soak`."""

from __future__ import annotations

import importlib

import pytest
import test_data_parallel
import test_experts
import test_model_parallel
import test_pipelines
from pool import Ranks
from training import OURS, PLAIN, check_equal, train

_NUM_STEPS = 20
_KINDS = [
    pytest.param(module.__name__, kind, marks=test_pipelines.NOT_HERE.get(kind, ()))
    for module in (test_data_parallel, test_experts, test_model_parallel, test_pipelines)
    for kind in module.KINDS
]


def _check(module: str, kind: str) -> None:
    make = importlib.import_module(module).KINDS[kind]
    expected = train(make, PLAIN, _NUM_STEPS).gradients
    for method in OURS.values():
        check_equal(train(make, method, _NUM_STEPS).gradients, expected)


@pytest.mark.soak
@pytest.mark.parametrize(("module", "kind"), _KINDS)
def test_gradients_of_many_steps_are_those_of_plain_training(module: str, kind: str, ranks: Ranks) -> None:
    ranks.run(_check, module, kind, timeout_s=300)
