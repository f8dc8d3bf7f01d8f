"""Programs in which a rerun comes after something else has run: in another precision, without grad mode, twice.

Each takes a function that runs a region, `call(function, *args, **kwargs)`, and returns its modules and its results.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from te_on_cpu.training import HIDDEN, make_input, make_layer, make_recipe

__all__ = ["OF_MODULES", "OF_OPS", "OTHERS", "Program", "fused_ops"]

Call = Callable[..., Any]
Program = Callable[[Any, Call], tuple[torch.nn.Module, list[Tensor | None]]]


class _Session:
    """What the programs have in common."""

    def __init__(self, te: Any, recipe: str, kind: str = "Linear", **options: Any) -> None:
        torch.manual_seed(1)
        self.te, self.recipe = te, make_recipe(recipe)
        self.module = make_layer(te, kind, **options)

    def autocast(self, enabled: bool = True, recipe: Any = None) -> Any:
        return self.te.autocast(enabled and self.recipe is not None, recipe=recipe or self.recipe)

    def forwards(self, call: Call, count: int, *args: Any, **options: Any) -> list[Tensor]:
        """Run the module in a number of regions."""
        outputs = []
        for number in range(count):
            with self.autocast():
                outputs.append(call(self.module, _x(number), *args, **options))
        return outputs

    def ended(self, *outputs: Tensor) -> tuple[torch.nn.Module, list[Tensor | None]]:
        """Run the backwards, the last output's first; return the modules and all results."""
        for output in outputs[::-1]:
            output.float().square().mean().backward()
        return self.module, [*outputs, *(parameter.grad for parameter in self.module.parameters())]


def _x(number: int) -> Tensor:
    return make_input(torch.float32, number) * 1.0


def _cast_anew(recipe: str, kind: str, te: Any, call: Call) -> Any:
    """Two forwards cast the weights, a third uses the second's casts; so does one after all backwards."""
    run = _Session(te, recipe, kind)
    outputs = []
    for number, is_first in ((1, True), (2, True), (3, False)):
        with run.autocast():
            outputs.append(call(run.module, _x(number), is_first_microbatch=is_first))
    module, results = run.ended(*outputs)
    with run.autocast():
        return module, [*results, run.module(_x(4), is_first_microbatch=False)]


def _autocast_inside(recipe: str, kind: str, te: Any, call: Call) -> Any:
    run = _Session(te, recipe, kind)

    def function(x: Tensor) -> Tensor:
        with run.autocast():
            return run.module(x)  # type: ignore[no-any-return]

    return run.ended(*(call(function, _x(number)) for number in range(3)))


def _partly_quantized(recipe: str, kind: str, te: Any, call: Call) -> Any:
    """A module runs twice in the region, the second time without quantization."""
    run = _Session(te, recipe, kind)

    def function(x: Tensor) -> Tensor:
        h = run.module(x)
        with run.autocast(False):
            return run.module(h)  # type: ignore[no-any-return]

    return run.ended(*run.forwards(lambda _, x: call(function, x), 2))


def _quantized(run: _Session) -> Any:
    return run.autocast()


def _plainly(run: _Session) -> Any:
    return nullcontext()


def _lower_precision(run: _Session) -> Any:
    stack = ExitStack()
    stack.enter_context(run.autocast())
    stack.enter_context(torch.autocast("cpu", dtype=torch.bfloat16))
    return stack


def _otherwise_since(inside: Any, since: Any, recipe: str, kind: str, te: Any, call: Call) -> Any:
    """A module runs in a region, then outside of it in another context."""
    run = _Session(te, recipe, kind)
    with inside(run):
        output = call(run.module, _x(1))
    with since(run):
        return run.ended(output, run.module(_x(2)))


def _without_grad_between(recipe: str, kind: str, te: Any, call: Call) -> Any:
    run = _Session(te, recipe, kind)
    outputs = []
    for number in range(2):
        with run.autocast(), torch.no_grad():
            call(run.module, _x(7))
        with run.autocast():
            outputs.append(call(run.module, _x(number)))
    return run.ended(*outputs)


def _frozen(recipe: str, kind: str, te: Any, call: Call) -> Any:
    run = _Session(te, recipe, kind)
    run.module.requires_grad_(False)
    return run.ended(*run.forwards(call, 2))


def _calibrating(place: str, kind: str, te: Any, call: Call) -> Any:
    """The amax of the last forward stays, whichever backward is the last."""
    run = _Session(te, "delayed", kind, activation="swiglu")

    def calibrating() -> Any:
        return te.autocast(enabled=False, calibrating=True, recipe=run.recipe)

    def function(x: Tensor) -> Tensor:
        with calibrating():
            return run.module(x)  # type: ignore[no-any-return]

    if place == "inside":
        return run.ended(*(call(function, _x(number)) for number in range(2)))
    outputs = []
    for number in range(2):
        with calibrating():
            outputs.append(call(run.module, _x(number)))
    return run.ended(*outputs)


def _each_step(options: dict[str, Any], recipe: str, kind: str, te: Any, call: Call, **keywords: Any) -> Any:
    """Three forwards, then the backwards, of a module with options."""
    run = _Session(te, recipe, kind, **options)
    if options.get("fuse_wgrad_accumulation"):
        for parameter in run.module.parameters():
            parameter.main_grad = torch.zeros_like(parameter)
    module, results = run.ended(*run.forwards(call, 3, **keywords))
    return module, [*results, *(getattr(p, "main_grad", None) for p in module.parameters())]


def _grouped(recipe: str, te: Any, call: Call) -> Any:
    torch.manual_seed(1)
    run = _Session(te, recipe)
    run.module = te.GroupedLinear(2, HIDDEN, HIDDEN)
    return run.ended(*run.forwards(lambda module, x, *args: call(module, x.reshape(16, HIDDEN), *args), 3, [8, 8]))


def _ops(te: Any) -> torch.nn.Module:
    torch.manual_seed(1)
    ops = te.ops
    parts = [ops.RMSNorm(HIDDEN), ops.Linear(HIDDEN, 4 * HIDDEN), ops.SwiGLU(), ops.Linear(2 * HIDDEN, HIDDEN)]
    return ops.Sequential(*parts, ops.Dropout(0.1))  # type: ignore[no-any-return]


def fused_ops(recipe: str, te: Any, call: Call) -> Any:
    run = _Session(te, recipe)
    run.module = _ops(te)
    return run.ended(*run.forwards(call, 3))


def _fused_ops_since(recipe: str, other: str, te: Any, call: Call) -> Any:
    """The scales of a forward under another recipe stay."""
    run = _Session(te, recipe)
    run.module = _ops(te)
    with run.autocast():
        output = call(run.module, _x(1))
    with te.autocast(True, recipe=make_recipe(other)):
        since = run.module(_x(2))
    module, results = run.ended(output, since)
    with te.autocast(True, recipe=make_recipe(other)):
        return module, [*results, run.module(_x(3))]


_BY_MODULE = {
    "weights cast anew since": _cast_anew,
    "autocast inside": _autocast_inside,
    "partly quantized": _partly_quantized,
    "run plainly since": partial(_otherwise_since, _quantized, _plainly),
    "run quantized since": partial(_otherwise_since, _plainly, _quantized),
    "run in bfloat16 before": partial(_otherwise_since, _lower_precision, _quantized),
    "run in bfloat16 since": partial(_otherwise_since, _quantized, _lower_precision),
    "without grad between": _without_grad_between,
    "frozen": _frozen,
}
_KINDS = ("Linear", "LayerNormMLP", "TransformerLayer")
_RECIPES = ("delayed", "current")

OF_MODULES: dict[str, Program] = {
    f"{name}, {recipe}, {kind}": partial(program, recipe, kind)
    for name, program in _BY_MODULE.items()
    for recipe in _RECIPES
    for kind in _KINDS
}
OF_OPS: dict[str, Program] = {
    **{f"ops, {recipe}": partial(fused_ops, recipe) for recipe in ("none", "current")},
    "ops, plain, delayed since": partial(_fused_ops_since, "none", "delayed"),
    "ops, current, delayed since": partial(_fused_ops_since, "current", "delayed"),
}
OTHERS: dict[str, Program] = {
    **{
        f"calibrating, autocast {place}, {kind}": partial(_calibrating, place, kind)
        for place in ("outside", "inside")
        for kind in ("LayerNormMLP", "TransformerLayer")
    },
    **{f"grouped, {recipe}": partial(_grouped, recipe) for recipe in _RECIPES},
    **{
        f"{name}, {recipe}": partial(_each_step, options, recipe, kind)
        for name, kind, options in (
            ("fused accumulation", "LayerNormMLP", {"fuse_wgrad_accumulation": True}),
            ("delayed products", "Linear", {"delay_wgrad_compute": True}),
            ("swiglu and RMSNorm", "TransformerLayer", {"activation": "swiglu", "normalization": "RMSNorm"}),
        )
        for recipe in _RECIPES
    },
    **{
        f"core attention, {recipe}": partial(
            _each_step, {"dropout": 0.0}, recipe, "TransformerLayer", checkpoint_core_attention=True
        )
        for recipe in _RECIPES
    },
}
