"""Randomness around TransformerEngine: checklist items 1 to 5, on fakes (te_fakes.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import Log, assert_equal, leaf
from te_fakes import VERSIONS, ByteTracker, FakeTracker
from te_oracle import assert_trains_as_plain, make_model

import actckpt


def _drawing(get_tracker: Callable[[], Any], drawn: Log) -> Callable[[torch.Tensor], torch.Tensor]:
    def function(x: torch.Tensor) -> torch.Tensor:
        with get_tracker().fork("attention") as generator:
            drawn.append(float(torch.rand(1, generator=generator)))
        return (x * drawn[-1]).exp()

    return function


@pytest.mark.parametrize(
    ("kind", "is_given"),
    [(FakeTracker, True), (FakeTracker, False), (ByteTracker, True)],
    ids=["generators", "generators that are found", "bytes"],
)
def test_item_1_states_are_captured_by_value_and_restored_in_place(te: Any, kind: Any, is_given: bool) -> None:
    _, get_tracker = make_model(te, tracker=kind)
    drawn = Log()
    keywords = {"get_rng_state_tracker": get_tracker} if is_given else {}
    y = actckpt.te.checkpoint(_drawing(get_tracker, drawn), leaf(3), **keywords)
    with get_tracker().fork("attention"):
        pass
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert drawn[0] == drawn[1] == drawn[2]


def test_item_1_setting_handles_back_would_restore_nothing(te: Any) -> None:
    """The fake does what the checklist says of te.checkpoint with a tracker."""
    _, get_tracker = make_model(te, tracker=FakeTracker)
    drawn = Log()
    function = _drawing(get_tracker, drawn)
    states = get_tracker().get_states()
    function(leaf(3))
    get_tracker().set_states(states)
    function(leaf(3))
    assert drawn[0] != drawn[1]


def test_item_2_the_generators_stay_the_same_objects(te: Any) -> None:
    _, get_tracker = make_model(te, tracker=FakeTracker)
    before = get_tracker().get_states()
    y = actckpt.te.checkpoint(_drawing(get_tracker, []), leaf(3), get_rng_state_tracker=get_tracker)
    y.sum().backward()
    assert all(get_tracker().states_[name] is generator for name, generator in before.items())
    assert all(te.distributed.get_all_rng_states()[name] is generator for name, generator in before.items())


def test_item_3_a_tracker_always_gets_a_new_dict(te: Any) -> None:
    """It keeps the dict, and `fork` changes it: a second rerun would find another state."""
    _, get_tracker = make_model(te, tracker=ByteTracker)
    tracker, given, drawn = get_tracker(), [], []
    take_over = tracker.set_states
    tracker.set_states = lambda states: (given.append(states), take_over(states))
    y = actckpt.te.checkpoint(_drawing(get_tracker, drawn), leaf(3), get_rng_state_tracker=get_tracker)
    for _ in range(3):
        y.sum().backward(retain_graph=True)
    assert len(set(drawn)) == 1
    assert len(given) >= 6 and len({id(states) for states in given}) == len(given)


@pytest.mark.parametrize("call", ["te.checkpoint", "wrap"])
def test_item_4_while_a_stream_is_capturing_states_are_not_read(te: Any, call: str, monkeypatch: Any) -> None:
    model, get_tracker = make_model(te, tracker=FakeTracker)
    for module in ("checkpointing", "wrapping"):
        monkeypatch.setattr(f"actckpt.te.{module}.is_capturing", lambda: True)
    monkeypatch.setattr(get_tracker(), "get_states", lambda: pytest.fail("a state was read"))
    monkeypatch.setattr(te.distributed, "get_all_rng_states", lambda: pytest.fail("a state was read"))
    layer, runs = model[0], []
    layer.self_attention.register_forward_hook(lambda *_: runs.append(1))
    if call == "wrap":
        actckpt.te.wrap(layer, retain_graph=True)
        y = layer(leaf(1, 4, 8))
    else:
        y = actckpt.te.checkpoint(layer, leaf(1, 4, 8), get_rng_state_tracker=get_tracker)
    y.sum().backward()
    assert len(runs) == 1, "run plainly: backward ran it again"


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", [FakeTracker, ByteTracker])
@pytest.mark.parametrize("method", [actckpt.checkpoint, actckpt.te.checkpoint], ids=["checkpoint", "te.checkpoint"])
def test_item_5_forked_and_default_generators_are_restored(version: str, kind: Any, method: Any) -> None:
    assert_trains_as_plain(version, method, None, tracker=kind)


def test_states_outside_are_unchanged_also_after_a_rerun_that_failed(te: Any) -> None:
    _, get_tracker = make_model(te, tracker=ByteTracker)
    drawing, runs = _drawing(get_tracker, Log()), Log()

    def function(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        y = drawing(x)
        if len(runs) > 1:
            raise KeyError("rerun")
        return y.exp()

    y = actckpt.te.checkpoint(function, leaf(3), get_rng_state_tracker=get_tracker)
    before = {name: state.clone() for name, state in get_tracker().get_states().items()}
    with pytest.raises(KeyError, match="rerun"):
        y.sum().backward()
    assert_equal(get_tracker().get_states(), before)
    assert te.flags() == (False, False)
