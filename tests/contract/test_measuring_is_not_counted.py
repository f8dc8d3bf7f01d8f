"""`stats()` counts what the steps of a program do, and not what is run in order to measure."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_budgets import Training
from torch import nn

import actckpt
from actckpt.statistics import uncounted

#: What is held now and was held at most: no sums.
_HELD = ("peak_", "host_", "disk_", "store_", "inflight_")


def _counted_sums(step: Callable[[], Any]) -> dict[str, float]:
    actckpt.reset_stats()
    step()
    found = vars(actckpt.stats())
    return {name: value for name, value in found.items() if not name.startswith(_HELD)}


def test_the_first_step_under_a_budget_counts_as_one_in_which_everything_is_recomputed() -> None:
    plain, ours = Training(), Training()
    actckpt.apply(plain.model, policy=[])
    expected = _counted_sums(plain.step)
    assert expected["replayed_operators"] > 0
    actckpt.apply(ours.model, activation_budget="50%")
    assert _counted_sums(ours.step) == expected


@pytest.mark.usefixtures("small_tensors_on_disk")
def test_the_first_step_under_a_budget_with_a_store_counts_as_one_that_offloads_nothing() -> None:
    plain, ours = Training(), Training()
    actckpt.apply(plain.model, policy=[])
    expected = _counted_sums(plain.step)
    actckpt.apply(ours.model, activation_budget="50%")
    assert _counted_sums(ours.step) == expected, "pieces of the link, or moved while profiled"


@pytest.mark.usefixtures("small_tensors_on_disk")
@pytest.mark.parametrize("how", ["plan", "compare", "estimate"])
def test_what_runs_steps_to_measure_them_counts_nothing(how: str) -> None:
    training = Training()
    options: dict[str, Any] = {"model": training.model}
    if how == "plan":
        options |= {"activation_budget": "50%"}
    elif how == "compare":
        options |= {"policies": {"rerun": "recompute", "replay": [], "offload": {"policy": "offload", "min_bytes": 0}}}
    assert not any(_counted_sums(lambda: getattr(actckpt, how)(training.step, **options)).values())


def test_a_step_that_raises_or_resets_while_it_is_measured_leaves_the_sums() -> None:
    model, x = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2))), torch.randn(4, 8)

    def step() -> None:
        actckpt.reset_stats()
        model(x).sum().backward()
        raise OSError("no more data")

    actckpt.apply(model)
    model(x).sum().backward()
    actckpt.remove(model)
    before = actckpt.stats()
    assert before.rerun_regions > 0
    with pytest.raises(OSError, match="no more data"):
        actckpt.compare(step, model=model)
    assert actckpt.stats() == before


def test_two_threads_that_measure_at_once_count_nothing() -> None:
    before = actckpt.stats().rerun_regions
    first_is_in, second_is_in, first_is_out = (threading.Event() for _ in range(3))

    def rerun() -> None:
        actckpt.checkpoint(torch.sin, torch.randn(2, requires_grad=True), use_reentrant=False).sum().backward()

    def first() -> None:
        with uncounted():
            first_is_in.set()
            second_is_in.wait(10)
            rerun()
        first_is_out.set()

    thread = threading.Thread(target=first)
    thread.start()
    first_is_in.wait(10)
    with uncounted():
        rerun()
        second_is_in.set()
        first_is_out.wait(10)
        rerun()
    thread.join()
    assert actckpt.stats().rerun_regions == before
    rerun()
    assert actckpt.stats().rerun_regions == before + 1
