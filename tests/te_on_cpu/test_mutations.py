"""Each rule that carries TransformerEngine's state is needed: without it one of these comparisons fails."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch

import actckpt
from actckpt.te.internals import Internals
from actckpt.te.modules import ModulesInRerun
from actckpt.te.regions import Provider
from te_on_cpu import training
from te_on_cpu.methods import METHODS
from te_on_cpu.programs import OF_MODULES, OF_OPS, OTHERS
from te_on_cpu.test_failures import leaves_other_state
from te_on_cpu.test_reruns_leave_state import differs
from te_on_cpu.training import Setting, differing, train

_PROGRAMS = {**OF_MODULES, **OF_OPS, **OTHERS}
Check = Callable[[Any], Any]


def _training(te: Any, name: str = "checkpoint", **options: Any) -> list[str]:
    setting, how = Setting(**{"schedule": "reverse", **options}), METHODS[name]
    return differing(train(te, setting, how.method, prepare=how.prepare), train(te, setting))


def _program(name: str) -> Check:
    return partial(differs, program=_PROGRAMS[name])


def _reads_newer_casts(te: Any) -> bool:
    module, recipe = training.make_layer(te, "LayerNormMLP"), training.make_recipe("delayed")
    outputs = []
    for number, is_first in enumerate((True, False, True)):
        with te.autocast(True, recipe=recipe):
            x = training.make_input(torch.float32, number)
            outputs.append(actckpt.checkpoint(module, x, is_first_microbatch=is_first))
    try:
        outputs[1].sum().backward()
    except actckpt.errors.TransformerEngineError:
        return False
    return True


def _needs_part(te: Any) -> bool:
    """Backward needs nothing of the last module in the region."""
    modules, recipe = [training.make_layer(te, "Linear") for _ in range(2)], training.make_recipe("delayed")
    with te.autocast(True, recipe=recipe):
        x = training.make_input(torch.float32, 1)
        used = actckpt.checkpoint(lambda x: [module(x) for module in modules], x)[0]
    used.sum().backward()
    return training.process_state()["process: queued"] != 0


def _is_noticed(te: Any, check: Check) -> bool:
    training.reset()
    try:
        return bool(check(te))
    except Exception:  # it raises instead of computing something else
        return True


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Stand in for what is left out."""


def _read_only(name: str) -> property:
    """Return a property of `Internals` that cannot be set."""
    return property(vars(Internals)[name].fget, lambda self, value: None)


_MUTATIONS: dict[str, tuple[Any, str, Any, Check]] = {
    "the autocast is not restored": (Internals, "autocast", _read_only("autocast"), _training),
    "regions are not marked": (Internals, "flags", _read_only("flags"), _training),
    "an autocast inside updates scales again": (
        Internals,
        "autocast_depth",
        _read_only("autocast_depth"),
        _program("autocast inside, delayed, LayerNormMLP"),
    ),
    "reruns take the oldest scales": (Internals, "queues", _read_only("queues"), _training),
    "scales stay in the queues": ("actckpt.te.regions", "_remove", _nothing, _training),
    "reruns stop early": (Provider, "allows_early_stop", lambda self, state: True, _needs_part),
    "generators are not restored": (
        Provider,
        "tracker",
        lambda self: None,
        partial(_training, recipe="none", tracker="generators"),
    ),
    "reruns calibrate": (
        Provider,
        "is_rerunning",
        property(lambda self: False),
        _program("calibrating, autocast outside, LayerNormMLP"),
    ),
    "modules go by their last forward": (
        Internals,
        "begin_recompute",
        _nothing,
        _program("run quantized since, current, LayerNormMLP"),
    ),
    "modules keep what a rerun noted": (
        Internals,
        "noted",
        staticmethod(lambda owner: _nothing),
        _program("run plainly since, current, Linear"),
    ),
    "operations keep what a rerun noted": (
        ModulesInRerun,
        "ops_begin",
        _nothing,
        _program("ops, plain, delayed since"),
    ),
    "casts of weights keep a rerun's bytes": (
        ModulesInRerun,
        "cast_begins",
        _nothing,
        _program("weights cast anew since, delayed, Linear"),
    ),
    "casts made since are read": (ModulesInRerun, "check_casts", _nothing, _reads_newer_casts),
    "a graph that a rerun built updates scales": (
        Internals,
        "no_backward_updates",
        lambda self: nullcontext(),
        partial(_training, name="wrap, retain_graph"),
    ),
    "the first module's update is left out": (
        Internals,
        "update_backward_scales",
        _nothing,
        partial(_training, name="wrap, retain_graph"),
    ),
}


@pytest.mark.parametrize("mutation", _MUTATIONS)
def test_a_rule_that_is_left_out_is_noticed(te: Any, monkeypatch: pytest.MonkeyPatch, mutation: str) -> None:
    owner, name, instead, check = _MUTATIONS[mutation]
    assert not check(te)
    monkeypatch.setattr(*((f"{owner}.{name}", instead) if isinstance(owner, str) else (owner, name, instead)))
    assert _is_noticed(te, check)


def test_before_2_12_a_module_whose_rerun_raised_keeps_the_forwards_scales(
    te: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

    if hasattr(TransformerEngineBaseModule, "end_forward"):
        pytest.skip("TransformerEngine puts them back itself")

    def check(te: Any) -> Any:
        return leaves_other_state(te, "delayed", "kernel")

    assert not check(te)
    monkeypatch.setattr(ModulesInRerun, "abandon", _nothing)
    assert _is_noticed(te, check)


def test_without_the_provider_delayed_scaling_is_wrong(te: Any) -> None:
    from actckpt.te import registration

    actckpt.te.ignore()
    try:
        assert _is_noticed(te, _training)
    finally:
        registration.await_te()
    training.reset()
    assert not _training(te)
