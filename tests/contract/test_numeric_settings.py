"""Reruns and replayed operators find the settings that change numbers as the forward did."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from oracle import assert_equal
from settings_seen import (
    CHANGES_SETTINGS,
    READ_ABOVE,
    READ_BY_CODE,
    assert_same,
    everything,
    fails_from_call,
    flushes,
    found,
    look,
    seen,
)
from torch import Tensor
from torch_settings import CANNOT_CHANGE, IRRELEVANT, RESTORED, RESTORED_FOR_RERUNS, all_public_names

import actckpt

pytestmark = CHANGES_SETTINGS


def test_every_public_setter_of_torch_is_classed() -> None:
    classed = IRRELEVANT.keys() | RESTORED.keys() | RESTORED_FOR_RERUNS.keys()
    unknown = all_public_names() - classed
    assert sorted(unknown) == [], (
        "does it change numbers? Restore it in actckpt/_core/numerics.py, or say above why not"
    )


_OF_2_13 = pytest.mark.skipif(torch.__version__ < (2, 13), reason="torch 2.13 brought some of the settings")


def _is_here(name: str) -> bool:
    try:
        eval(name, {"torch": torch})
    except AttributeError:
        return False
    return True


def _each(names: Iterable[str]) -> list[Any]:
    """Return names of settings to run a test with; those that this torch does not have are skipped."""
    of_later = pytest.mark.skip(reason=f"torch {torch.__version__} has no such setting; 2.13 has all")
    return [name if _is_here(name) else pytest.param(name, marks=of_later) for name in names]


@_OF_2_13
def test_nothing_is_classed_that_torch_does_not_have() -> None:
    optional = {"torch.backends.cudnn.benchmark_limit", "torch.set_vital"}  # with a GPU; in older versions
    elsewhere = {"torch.nn.attention.sdpa_kernel", "torch.utils.deterministic.fill_uninitialized_memory"}
    classed = IRRELEVANT.keys() | RESTORED.keys() | RESTORED_FOR_RERUNS.keys()
    assert sorted(classed - all_public_names() - optional - elsewhere) == []


@_OF_2_13
def test_nothing_is_read_that_torch_does_not_have() -> None:
    assert [name for name, value in everything().items() if value == "missing"] == []


@pytest.mark.parametrize("name", _each(RESTORED))
@pytest.mark.parametrize("depth", [1, 3])
def test_a_replayed_operator_finds_the_settings_of_its_forward(name: str, depth: int) -> None:
    for_forward, for_backward = RESTORED[name]
    w, t = torch.randn(3, requires_grad=True), torch.randn(3)
    for_forward()
    with actckpt.region():
        h = t
        for _ in range(depth):
            h = look(h.sin())
        y = w * h
    for_backward()
    outside = everything()
    assert found() != seen[0] or name in CANNOT_CHANGE
    (gradient,) = torch.autograd.grad(y, w, torch.ones(3))
    assert everything() == outside
    assert len(seen) == 2 * depth
    for settings in seen:
        assert_same(settings, seen[0])
    assert_equal(gradient, h)


@pytest.mark.parametrize("name", _each(RESTORED))
def test_a_replayed_operator_finds_settings_that_were_in_force_for_a_part_of_its_region(name: str) -> None:
    for_forward, for_backward = RESTORED[name]
    w, t = torch.randn(3, requires_grad=True), torch.randn(3)
    with actckpt.region():
        y = w * look(t)
        for_forward()
        y = y + w * look(t)
        for_backward()
        y = y * look(t)
    outside = everything()
    assert not seen[0] == seen[1] == seen[2] or name in CANNOT_CHANGE
    torch.autograd.grad(y, w, torch.ones(3))
    assert everything() == outside
    for settings, expected in zip(seen[3:], seen[2::-1], strict=True):  # backward begins with the last one
        assert_same(settings, expected)


@pytest.mark.parametrize("kind", ["module", "function"])
@pytest.mark.parametrize("name", _each(RESTORED | RESTORED_FOR_RERUNS))
def test_a_rerun_finds_the_settings_of_its_forward(name: str, kind: str) -> None:
    for_forward, for_backward = (RESTORED | RESTORED_FOR_RERUNS)[name]

    class Looks(torch.nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            seen_above.append({name: READ_ABOVE[name]() for name in READ_BY_CODE})
            return (w * look(t)).sin()

    seen_above: list[dict[str, Any]] = []
    w, t = torch.randn(3, requires_grad=True), torch.randn(3)
    module = Looks()
    for_forward()
    y = actckpt.checkpoint(module if kind == "module" else lambda w: module(w), w)
    for_backward()
    outside = everything()
    by_code = {name: outside[name] for name in READ_BY_CODE}
    assert found() != seen[0] or by_code != seen_above[0] or name in CANNOT_CHANGE
    torch.autograd.grad(y, w, torch.ones(3))
    assert everything() == outside
    assert len(seen) == 2
    assert_same(seen[1], seen[0])
    assert len(seen_above) == 2 and seen_above[0] == seen_above[1]


_SEVERAL = [
    "torch.set_default_dtype",
    "torch.set_flush_denormal",
    "torch.set_float32_matmul_precision",
    "torch.use_deterministic_algorithms",
    "torch.nn.attention.sdpa_kernel",
    "torch.backends.cudnn.allow_tf32",
]


@pytest.mark.parametrize("kind", ["rerun", "replay"])
def test_settings_are_put_back_after_an_error(kind: str) -> None:
    fails_from_call[0] = 1
    w, t = torch.randn(3, requires_grad=True), torch.randn(3)
    fail = torch.ops.settings_seen.fail
    for name in _SEVERAL:
        RESTORED[name][0]()
    if kind == "rerun":
        y = actckpt.checkpoint(lambda w: w * fail(t, []), w)
    else:
        with actckpt.region():
            y = w * fail(t, [])
    for name in _SEVERAL:
        RESTORED[name][1]()
    outside = everything()
    with pytest.raises(ValueError, match="this kernel fails"):
        torch.autograd.grad(y, w, torch.ones(3))
    assert len(seen) == 2 and seen[0] != found()
    assert_same(seen[1], seen[0])
    assert everything() == outside


def test_settings_of_a_thread_are_those_of_the_forward_where_backward_runs_in_another_one() -> None:
    w, t = torch.randn(3, requires_grad=True), torch.randn(3)
    torch.set_flush_denormal(True)
    with actckpt.region():
        y = w * look(t)
    z = actckpt.checkpoint(lambda w: w * look(t), w)
    left: list[bool] = []

    def backward() -> None:
        torch.set_flush_denormal(False)
        torch.autograd.grad(y, w, torch.ones(3))
        torch.autograd.grad(z, w, torch.ones(3))
        left.append(flushes())

    thread = threading.Thread(target=backward)
    thread.start()
    thread.join()
    assert left == [False] and flushes()
    assert [settings["denormals"] for settings in seen] == [True] * 4
