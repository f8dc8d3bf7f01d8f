"""What the tests of TransformerEngine compare: training steps on the fakes, plain and with ours."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from oracle import assert_equal
from te_fakes import ByteTracker, FakeTracker, Recipe, installed

import actckpt

#: (layer, x, **keywords) -> output
Method = Callable[..., torch.Tensor]
RECIPES = {"bf16": None, "delayed": Recipe("delayed"), "current": Recipe("current")}


def plain(layer: Any, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """Run a layer without anything around it."""
    return layer(x, **kwargs)


def make_model(te: Any, depth: int = 2, tracker: type[FakeTracker] | None = None) -> tuple[torch.nn.ModuleList, Any]:
    """Return a stack of fake layers and the callable that returns its tracker, from one seed."""
    torch.manual_seed(3)
    get_tracker = None
    if tracker is not None:
        found = tracker(te)
        found.add("attention", 11)
        found.add("model-parallel-rng", 12)
        get_tracker = lambda: found  # noqa: E731
    return torch.nn.ModuleList(te.TransformerLayer(8, get_tracker) for _ in range(depth)), get_tracker


def fp8_state(model: torch.nn.Module) -> list[Any]:
    """Return every amax history and scale of a model."""
    found = []
    for module in model.modules():
        for key in ("scaling_fwd", "scaling_bwd"):
            if key in getattr(module, "fp8_meta", {}):
                found += [module.fp8_meta[key].amax_history.clone(), module.fp8_meta[key].scale.clone()]
    return found


def queued(te: Any) -> int:
    """Return how many copies of scales modules have put aside."""
    return sum(len(queue) for queue in te.manager_state().fp8_tensors_recompute_buffer)


def train(
    te: Any,
    method: Method,
    recipe: Recipe | None,
    *,
    steps: int = 3,
    tracker: type[FakeTracker] | None = ByteTracker,
    prepare: Callable[[Any], Any] = lambda model: None,
    backward: Callable[[Any, list[Any]], Any] = lambda loss, _: loss.backward(),
    **kwargs: Any,
) -> list[Any]:
    """Train a stack of layers for some steps; return all gradients, states and outputs, bit for bit."""
    model, get_tracker = make_model(te, tracker=tracker)
    with ExitStack() as stack:
        if tracker is ByteTracker:  # of which TransformerEngine has stale copies
            actckpt.rng.register_tracker(get_tracker)
            stack.callback(actckpt.rng.unregister_tracker, get_tracker)
        prepare(model)
        return _steps(te, model, method, recipe, steps, backward, kwargs)


def assert_trains_as_plain(
    version: str,
    method: Method,
    recipe: Recipe | None,
    *,
    plainly: Method = plain,
    prepare: Callable[[Any], Any] = lambda model: None,
    **options: Any,
) -> Any:
    """Compare training with plain training, bit for bit; return the fake TransformerEngine of the former."""
    with installed(version) as te:
        expected = train(te, plainly, recipe, **options)
    with installed(version) as te:
        assert_equal(train(te, method, recipe, prepare=prepare, **options), expected)
        assert te.distributed.activation_recompute_forward._is_first_fp8_module == []
    return te


def _steps(
    te: Any, model: Any, method: Method, recipe: Recipe | None, steps: int, backward: Any, kwargs: dict[str, Any]
) -> list[Any]:
    torch.manual_seed(5)
    found: list[Any] = []
    for _ in range(steps):
        x = torch.randn(2, 4, 8, requires_grad=True)
        with te.autocast(recipe is not None, recipe):
            h = x * 1.0
            for layer in model:
                h = method(layer, h, **kwargs)
        backward(h.square().sum(), [x, *model.parameters()])
        found += [h.detach(), x.grad, *(p.grad.clone() for p in model.parameters()), torch.get_rng_state()]
        found += fp8_state(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad
                parameter.grad = None
    return [*found, te.updates[-3 * steps :], te.flags(), queued(te)]
