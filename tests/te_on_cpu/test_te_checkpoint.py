"""Where TransformerEngine's own te.checkpoint differs from plain training: claims of docs/te-differences.md.

A failure here means that another version does otherwise: see what is said there. What was found is written to the file
that ACTCKPT_TE_RESULTS names.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import Log
from torch.utils.checkpoint import CheckpointError

import actckpt
from te_on_cpu import training
from te_on_cpu.programs import OF_MODULES, fused_ops
from te_on_cpu.training import RECIPES, SCHEDULES, TRACKERS, Setting, differing, train

Expected = Callable[[Setting], dict[str, Any]]

_VARIANTS = ("reentrant", "hooks")
_results: dict[str, Any] = {}


@pytest.fixture(scope="module", autouse=True)
def _write_results(loaded: Any) -> Iterator[None]:
    yield
    path = os.environ.get("ACTCKPT_TE_RESULTS")
    if path:
        import transformer_engine

        versions = {"torch": torch.__version__, "transformer_engine": str(transformer_engine.__version__)}
        Path(path).write_text(json.dumps({"versions": versions, "te.checkpoint": _results}, indent=1) + "\n")


def _theirs(te: Any, variant: str, get_tracker: Any = None) -> training.Method:
    options = {"use_reentrant": variant == "reentrant", "get_rng_state_tracker": get_tracker}
    return lambda layer, x: te.checkpoint(layer, x, **options)


def _kinds(names: list[str]) -> Counter[str]:
    """Return how many outputs, gradients and scales these are."""
    return Counter(name.split()[0].rstrip(",:") for name in names)


@pytest.mark.parametrize("schedule", SCHEDULES if os.environ.get("ACTCKPT_TE_ALL") else ["in turn", "reverse"])
@pytest.mark.parametrize("tracker", TRACKERS)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("variant", _VARIANTS)
def test_gradients_and_scales(
    te: Any, expected: Expected, variant: str, recipe: str, tracker: str, schedule: str
) -> None:
    setting = Setting(recipe, tracker=tracker, schedule=schedule)
    plain = expected(setting)
    found = _kinds(differing(train(te, setting, method_of=lambda get: _theirs(te, variant, get)), plain))
    all_ = _kinds(list(plain))
    name = f"{variant}, {recipe}, tracker of {tracker}, {schedule}"
    _results[name] = {kind: f"{found[kind]} of {all_[kind]}" for kind in ("output", "gradient", "scales")}
    restores_nothing = tracker == "generators"
    assert bool(found["gradient"]) == (restores_nothing or recipe == "delayed")
    assert bool(found["scales"]) == (recipe == "delayed")


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("variant", _VARIANTS)
@pytest.mark.parametrize("is_inside", [True, False], ids=["theirs in ours", "ours in theirs"])
def test_theirs_and_ours_in_each_other_are_theirs_alone(te: Any, is_inside: bool, variant: str, recipe: str) -> None:
    theirs = _theirs(te, variant)
    outer, inner = (actckpt.checkpoint, theirs) if is_inside else (theirs, actckpt.checkpoint)
    setting = Setting(recipe, dropout=0.0)
    found = train(te, setting, lambda layer, x: outer(lambda x: inner(layer, x), x))
    assert differing(found, train(te, setting, theirs)) == []


@pytest.mark.parametrize("where", ["around", "inside", "both"])
@pytest.mark.parametrize("variant", [*_VARIANTS, "ours"])
def test_updates_of_the_forwards_scales(te: Any, monkeypatch: pytest.MonkeyPatch, variant: str, where: str) -> None:
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager as Manager

    updates: Counter[bool] = Counter()
    update = Manager.reduce_and_update_fp8_tensors
    monkeypatch.setattr(
        Manager, "reduce_and_update_fp8_tensors", lambda forward=True: (updates.update([forward]), update(forward))
    )
    recipe = training.make_recipe("delayed")
    layers = [training.make_layer(te, "LayerNormMLP") for _ in range(3)]

    def run(call: Any) -> int:
        updates.clear()
        with nullcontext() if where == "inside" else te.autocast(True, recipe=recipe):
            h = training.make_input(torch.float32, 1) * 1.0
            for layer in layers:
                h = call(layer if where == "around" else _under(te, recipe, layer), h)
        h.sum().backward()
        return updates[True]

    plain = run(lambda function, x: function(x))
    assert plain == (3 if where == "inside" else 1)
    name = f"{variant}, updates of the forward's scales, autocast {where}, 3 regions"
    if where == "inside" and variant != "ours" and not hasattr(te.distributed, "_IN_ACTIVATION_RECOMPUTE_REGION"):
        with pytest.raises(KeyError):  # before 2.19 a region is one only if it is entered quantized
            run(_theirs(te, variant))
        _results[name] = "raises KeyError"
        return
    found = run(actckpt.checkpoint if variant == "ours" else _theirs(te, variant))
    _results[name] = {"found": found, "plain": plain}
    if variant == "ours":
        assert found == plain
    elif where == "inside":  # a reentrant forward runs without grad mode, in which nothing is updated
        assert found == {"reentrant": 0, "hooks": plain}[variant]
    else:
        assert found == plain + 3


def _under(te: Any, recipe: Any, layer: Any) -> Any:
    def function(x: torch.Tensor) -> torch.Tensor:
        with te.autocast(True, recipe=recipe):
            return layer(x)  # type: ignore[no-any-return]

    return function


def _note_differing(te: Any, name: str, program: Any, variant: str, raises: tuple[type[Exception], ...]) -> bool | None:
    """Whether results of a program are others than plainly; None if it raises one of these."""

    def run(call: Any) -> list[Any]:
        training.reset()
        torch.manual_seed(11)
        return program(te, call)[1]

    plain = run(lambda function, x: function(x))
    try:
        found = run(_theirs(te, variant))
    except raises as error:
        _results[name] = f"raises {type(error).__name__}"
        return None
    different = sum(not torch.equal(one, other) for one, other in zip(found, plain, strict=True))
    _results[name] = f"{different} of {len(plain)} outputs and gradients"
    return bool(different)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("variant", _VARIANTS)
def test_fused_operations(te: Any, variant: str, recipe: str) -> None:
    differs = _note_differing(
        te, f"{variant}, te.ops, {recipe}", partial(fused_ops, recipe), variant, (CheckpointError,)
    )
    assert differs is (None if variant == "hooks" and recipe != "none" else recipe != "none")


@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize("since", ["run quantized since", "run plainly since", "run in bfloat16 since"])
@pytest.mark.parametrize("variant", _VARIANTS)
def test_a_module_that_ran_in_another_precision_since(te: Any, variant: str, since: str, recipe: str) -> None:
    """Ours gives what plain code gives: test_reruns_leave_state.py."""
    program = OF_MODULES[f"{since}, {recipe}, LayerNormMLP"]
    differs = _note_differing(te, f"{variant}, {recipe}, {since}", program, variant, (KeyError, RuntimeError))
    assert differs in (None, since != "run plainly since")


_OURS = (*_VARIANTS, "ours")


def _method(te: Any, variant: str) -> training.Method:
    return actckpt.te.checkpoint if variant == "ours" else _theirs(te, variant)


@pytest.mark.parametrize("variant", _OURS)
def test_an_outer_region_is_marked_after_an_inner_one(te: Any, variant: str) -> None:
    from actckpt.te.internals import Internals

    after = Log()
    layer, call, insides = training.make_layer(te, "Linear"), _method(te, variant), Internals()

    def outer(x: torch.Tensor) -> torch.Tensor:
        x = call(layer, x)
        after.append(insides.flags)
        return x.sin()

    with te.autocast(True, recipe=training.make_recipe("current")):
        y = call(outer, training.make_input(torch.float32, 1) * 1.0)
    y.square().sum().backward()
    is_marked = {"forward": after[0] == (True, False), "recompute": after[1] == (True, True)}
    _results[f"{variant}, marked after an inner region"] = is_marked
    if variant == "ours":
        assert all(is_marked.values())
    else:  # a reentrant forward runs without grad mode, in which newer versions enter no inner region
        assert not is_marked["recompute"]
        assert variant == "reentrant" or not is_marked["forward"]


@pytest.mark.parametrize("variant", _OURS)
def test_which_scales_are_taken_when_backwards_come_in_reverse(
    te: Any, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    """Scales are told by the number of the forward that put them aside."""
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager as Manager

    layer, recipe, call = training.make_layer(te, "Linear"), training.make_recipe("delayed"), _method(te, variant)
    put_aside: list[torch.Tensor] = []
    taken: list[int] = []
    take = Manager.get_old_fp8_meta_tensors_for_recompute

    def watched(meta: Any) -> None:
        take(meta)
        scale = meta["scaling_fwd"].scale
        taken.append(next(i for i, known in enumerate(put_aside) if torch.equal(known, scale)))

    monkeypatch.setattr(Manager, "get_old_fp8_meta_tensors_for_recompute", watched)
    outputs = []
    for number in range(3):
        with te.autocast(True, recipe=recipe):
            outputs.append(call(layer, training.make_input(torch.float32, number) * 1.0))
            put_aside.append(layer.fp8_meta["scaling_fwd"].scale.clone())
    assert len({tuple(scale.tolist()) for scale in put_aside}) == 3
    for output in outputs[:0:-1]:  # the first one's never runs
        output.sum().backward()
    left = training.process_state()["process: queued"]
    _results[f"{variant}, scales of 3 forwards taken by backwards of the last and the second"] = taken
    _results[f"{variant}, scales left by a forward whose backward never runs"] = left
    assert (taken, left) == (([2, 1], 0) if variant == "ours" else ([0, 1], 1))


@pytest.mark.parametrize("variant", _OURS)
def test_which_fields_of_the_autocast_a_recompute_finds(te: Any, variant: str) -> None:
    from actckpt.te.internals import Internals

    insides, layer, call = Internals(), training.make_layer(te, "Linear"), _method(te, variant)
    found = Log()

    def function(x: torch.Tensor) -> torch.Tensor:
        found.append(insides.autocast)
        return layer(x)  # type: ignore[no-any-return]

    with te.autocast(True, calibrating=True, recipe=training.make_recipe("current"), amax_reduction_group="group"):
        y = call(function, training.make_input(torch.float32, 1) * 1.0)
    y.sum().backward()
    names = ("enabled", "calibrating", "recipe", "group")
    kept = [name for name, *values in zip(names, *found, strict=False) if values[0] == values[1]]
    _results[f"{variant}, kept of the autocast"] = kept
    assert kept == (list(names) if variant == "ours" else ["enabled", "recipe"])


@pytest.mark.parametrize("variant", _OURS)
def test_how_many_layers_a_recompute_runs_whose_end_nothing_needs(te: Any, variant: str) -> None:
    layers = torch.nn.Sequential(*(training.make_layer(te, "Linear") for _ in range(3)))
    calls: list[int] = []
    for number, layer in enumerate(layers):
        layer.register_forward_hook(lambda *_, number=number: calls.append(number))
    _method(te, variant)(layers, training.make_input(torch.float32, 1) * 1.0).sum().backward()
    _results[f"{variant}, layers of 3 whose forward ends in the recompute"] = len(calls) - 3
    assert calls == ([0, 1, 2, 0, 1] if variant == "ours" else [0, 1, 2, 0, 1, 2])


@pytest.mark.parametrize("variant", _OURS)
def test_the_fusion_of_bias_and_gelu_after_a_region(te: Any, variant: str) -> None:
    layer = training.make_layer(te, "LayerNormMLP")
    layer.bias_gelu_nvfusion = True
    _method(te, variant)(layer, training.make_input(torch.float32, 1) * 1.0)
    _results[f"{variant}, bias-GELU fusion after a region"] = bool(layer.bias_gelu_nvfusion)
    assert layer.bias_gelu_nvfusion == (variant != "hooks")


def test_a_distributed_input_is_cut_for_everybody(te: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(te.distributed, "get_distributed_world_size", lambda group=None: 2)
    monkeypatch.setattr(te.distributed, "get_distributed_rank", lambda group=None: 0)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    x = torch.arange(9.0).requires_grad_() * 1.0
    te.checkpoint(lambda x: x.sin(), x, distribute_saved_activations=True, tp_group=None)
    _results["reentrant, values left of a distributed input of 9, 2 ranks"] = x.numel()
    assert x.tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("variant", _OURS)
def test_autograd_grad_through_a_region(te: Any, variant: str) -> None:
    layer = training.make_layer(te, "Linear")
    x = training.make_input(torch.float32, 1)
    y = _method(te, variant)(layer, x * 1.0)
    _results[f"{variant}, autograd.grad"] = "raises RuntimeError" if variant == "reentrant" else "works"
    if variant == "reentrant":
        with pytest.raises(RuntimeError, match=r"not compatible with \.grad\(\)"):
            torch.autograd.grad(y.sum(), x)
    else:
        torch.autograd.grad(y.sum(), x)
