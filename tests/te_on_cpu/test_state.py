"""What a region carries of TransformerEngine's state: flags, autocast, scales, generators of trackers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import Log, leaf
from torch import Tensor

import actckpt
from actckpt.errors import RerunMismatchError
from actckpt.te.internals import Internals
from te_on_cpu import training
from te_on_cpu.training import HIDDEN


def test_te_checkpoint_outside_of_regions_is_left_as_it_is(te: Any) -> None:
    actckpt.checkpoint(torch.sin, leaf(3))  # registers
    before, context = training.process_state()["process: recompute flags"], te.distributed.activation_recompute_forward
    with te.autocast(True, recipe=training.make_recipe("current")), context(True, False):
        with context(True, False):
            pass
        assert Internals().flags == (False, False), "outside of our regions TransformerEngine does as it does"
    assert training.process_state()["process: recompute flags"] == before


@pytest.mark.parametrize(("recipe", "runs"), [("delayed", 2), ("current", 1)])
def test_a_rerun_with_scales_to_take_runs_to_the_end(te: Any, recipe: str, runs: int) -> None:
    layer, ends = te.Linear(HIDDEN, HIDDEN), Log()

    def function(x: Tensor) -> Tensor:
        y = layer(x)
        ends.append(1)
        return y  # type: ignore[no-any-return]

    with te.autocast(True, recipe=training.make_recipe(recipe)):
        y = actckpt.checkpoint(function, training.make_input(torch.float32, 1))
    y.sum().backward()
    assert len(ends) == runs


@pytest.mark.parametrize("call", [actckpt.checkpoint, actckpt.te.checkpoint])
def test_without_grad_mode_no_scales_are_put_aside(te: Any, call: Any) -> None:
    with te.autocast(True, recipe=training.make_recipe("delayed")), torch.no_grad():
        call(te.Linear(HIDDEN, HIDDEN), training.make_input(torch.float32, 1))
    assert training.process_state()["process: queued"] == 0
    assert Internals().flags == (False, False)


def test_every_rerun_of_a_region_takes_its_forwards_scales(te: Any) -> None:
    """The function reads saved tensors of torch's operators only, which can be read again."""
    layer, recipe = te.Linear(HIDDEN, HIDDEN), training.make_recipe("delayed")

    def function(x: Tensor) -> Tensor:
        with torch.no_grad():
            scaled = layer(x)
        return (x * scaled).exp()

    x = training.make_input(torch.float32, 1)
    with te.autocast(True, recipe=recipe):
        y = actckpt.checkpoint(function, x).sum()
    with te.autocast(True, recipe=recipe):
        layer(x)  # the scales move on
    grads = [torch.autograd.grad(y, x, retain_graph=True)[0] for _ in range(3)]
    assert all(torch.equal(grad, grads[0]) for grad in grads)
    assert training.process_state()["process: queued"] == 0


def test_a_step_between_the_forward_of_a_first_microbatch_and_its_backward_raises(te: Any) -> None:
    layer = te.Linear(HIDDEN, HIDDEN)
    y = actckpt.te.checkpoint(layer, training.make_input(torch.float32, 1), is_first_microbatch=True)
    with torch.no_grad():
        layer.weight.add_(1)
    with pytest.raises(RerunMismatchError, match="weight"):
        y.sum().backward()


def test_saved_tensors_of_a_checkpointed_module_are_no_longer_spread_over_fsdp(te: Any) -> None:
    layer, other = te.Linear(HIDDEN, HIDDEN), te.Linear(HIDDEN, HIDDEN)
    for one in (layer, other):
        vars(one).update(fsdp_wrapped=True, fsdp_group="group")
    x = training.make_input(torch.float32, 1)
    actckpt.te.checkpoint(layer, x)
    actckpt.te.checkpoint(lambda x: (x.sin(), other)[0], x)
    assert (layer.fsdp_wrapped, layer.fsdp_group) == (False, None)
    assert (other.fsdp_wrapped, other.fsdp_group) == (True, "group")


def _drawing(get_tracker: Callable[[], Any], drawn: Any) -> Callable[[Tensor], Tensor]:
    def function(x: Tensor) -> Tensor:
        with get_tracker().fork("data"):
            drawn.append(float(torch.rand(1)))
        return (x * drawn[-1]).exp()

    return function


@pytest.mark.parametrize("kind", ["generators", "bytes", "unknown bytes"])
def test_every_rerun_draws_what_its_forward_drew(te: Any, kind: str) -> None:
    """A tracker keeps the dict that it is given, and `fork` changes it: each time it gets a new one."""
    with training.tracker_of(kind) as get_tracker:
        assert get_tracker is not None
        tracker, given, drawn = get_tracker(), [], Log()
        take_over, generators = tracker.set_states, dict(tracker.get_states())
        tracker.set_states = lambda states: (given.append(states), take_over(states))
        options = {"get_rng_state_tracker": get_tracker} if kind == "unknown bytes" else {}
        y = actckpt.te.checkpoint(_drawing(get_tracker, drawn), leaf(3), **options)
        with tracker.fork("data"):
            torch.rand(1)
        for _ in range(3):
            y.sum().backward(retain_graph=True)
        assert len(drawn) == 4 and len(set(drawn)) == 1
        if kind == "generators":  # by reference, as TransformerEngine holds them
            for held in (tracker.get_states(), te.distributed.get_all_rng_states()):
                assert all(held[name] is generator for name, generator in generators.items())
        else:
            assert len(given) >= 6 and len({id(states) for states in given}) == len(given)


@pytest.mark.parametrize("call", ["te.checkpoint", "wrap"])
def test_while_a_stream_is_capturing_states_are_not_read(te: Any, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with training.tracker_of("generators") as get_tracker:
        assert get_tracker is not None
        layer, runs = training.make_layer(te, "TransformerLayer", get_rng_state_tracker=get_tracker), []
        for module in ("checkpointing", "wrapping"):
            monkeypatch.setattr(f"actckpt.te.{module}.is_capturing", lambda: True)
        monkeypatch.setattr(get_tracker(), "get_states", lambda: pytest.fail("a state was read"))
        monkeypatch.setattr(te.distributed, "get_all_rng_states", lambda: pytest.fail("a state was read"))
        layer.self_attention.register_forward_hook(lambda *_: runs.append(1))
        if call == "wrap":
            actckpt.te.wrap(layer, retain_graph=True)
            y = layer(leaf(8, 2, HIDDEN))
        else:
            y = actckpt.te.checkpoint(layer, leaf(8, 2, HIDDEN), get_rng_state_tracker=get_tracker)
        y.sum().backward()
        assert len(runs) == 1, "run plainly: backward ran it again"
