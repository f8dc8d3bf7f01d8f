"""A rerun updates nothing of TransformerEngine's a second time: all that it holds is as after plain training."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import actckpt
from actckpt.errors import TransformerEngineError
from te_on_cpu import training
from te_on_cpu.programs import OF_MODULES, OF_OPS, OTHERS, Program
from te_on_cpu.snapshot import snapshot

#: What differs without harm: empty queues stay, and modules keep their places in them; stamps of ours; what attention
#: notes of each forward before it uses it; and what current scaling in older versions writes before each use. (Delayed
#: scaling's are parts of the histories, which stand here too.)
_HARMLESS = re.compile(
    r"fp8_tensors_recompute_buffer|global_fp8_buffer_pos_fwd_recompute|_actckpt_made_by|_attention_backends|input_in_"
    r"|quantizers?(\[\w+\]\[\d+\])?\.(amax|scale)$"
)
_PROGRAMS = {**OF_MODULES, **OF_OPS, **OTHERS}


def _held(te: Any, program: Program, call: Callable[..., Any]) -> dict[str, Any]:
    training.reset()
    torch.manual_seed(11)
    module, results = program(te, call)
    found = {f"result {number}": None if r is None else r.detach().clone() for number, r in enumerate(results)}
    return {**found, **snapshot(module)}


def _plain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def _differing(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    names = [name for name in {**found, **expected} if not _HARMLESS.search(name)]
    return [name for name in names if not _equal(found.get(name), expected.get(name))]


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return torch.equal(left, right)
    return bool(left == right)


def _nested(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return actckpt.checkpoint(lambda *args: actckpt.checkpoint(function, *args, **kwargs), *args)


def differs(te: Any, program: Program, call: Callable[..., Any] = actckpt.checkpoint) -> list[str]:
    """Return what differs from plain training after a program with `checkpoint`."""
    return _differing(_held(te, program, call), _held(te, program, _plain))


@pytest.mark.parametrize("name", _PROGRAMS)
def test_all_that_transformer_engine_holds_is_as_after_plain_training(te: Any, name: str) -> None:
    assert differs(te, _PROGRAMS[name]) == []


@pytest.mark.parametrize("name", [*OF_OPS, *OTHERS])
def test_the_same_in_nested_regions(te: Any, name: str) -> None:
    assert differs(te, _PROGRAMS[name], _nested) == []


@pytest.mark.parametrize("kind", ["Linear", "LayerNormMLP"])
def test_a_rerun_that_would_read_casts_made_since_raises_and_changes_nothing(te: Any, kind: str) -> None:
    module, recipe = training.make_layer(te, kind), training.make_recipe("delayed")
    outputs = []
    for number, is_first in enumerate((True, False, True)):
        with te.autocast(True, recipe=recipe):
            x = training.make_input(torch.float32, number)
            outputs.append(actckpt.checkpoint(module, x, is_first_microbatch=is_first))
    before = {**training.scales(module), **training.process_state()}
    with pytest.raises(TransformerEngineError, match=r"(?s)casts of weights .*is_first_microbatch=True"):
        outputs[1].sum().backward()
    assert training.differing({**training.scales(module), **training.process_state()}, before) == []


@pytest.mark.parametrize("recipes", [("delayed", "current"), ("current", "delayed")])
def test_a_module_that_ran_under_another_recipe_since_is_rerun_rightly_or_raises(te: Any, recipes: Any) -> None:
    def run(call: Any) -> list[torch.Tensor | None]:
        training.reset()
        torch.manual_seed(1)
        module = training.make_layer(te, "LayerNormMLP")
        with te.autocast(True, recipe=training.make_recipe(recipes[0])):
            y = call(module, training.make_input(torch.float32, 1))
        with te.autocast(True, recipe=training.make_recipe(recipes[1])):
            module(training.make_input(torch.float32, 2))
        y.sum().backward()
        return [y.detach(), *(parameter.grad for parameter in module.parameters())]

    with pytest.warns(UserWarning, match="Recipe type changed"):
        expected = run(_plain)
        if recipes[0] == "delayed":
            with pytest.raises(TransformerEngineError, match="another recipe"):
                run(actckpt.checkpoint)
            return
        found = run(actckpt.checkpoint)
    assert all(map(_equal, found, expected))
