"""Why blocks did not run in the step passed to `plan`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack

import torch

from actckpt._core.training_state import TrainingState
from actckpt._text.listed import listed

__all__ = ["why_not_run"]

_STEP = "lambda: model(x).sum().backward()"


def why_not_run(
    step: Callable[[], object], model: torch.nn.Module, blocks: Mapping[str, torch.nn.Module], state: TrainingState
) -> str:
    """Run a step once more and return why blocks did not run in it with gradients.

    The text is empty if all did, and if the step raises now.
    """
    calls, trained = Counter[torch.nn.Module](), Counter[torch.nn.Module]()

    def called(module: torch.nn.Module, _: object) -> None:
        calls[module] += 1
        trained[module] += torch.is_grad_enabled()

    with ExitStack() as exits:
        for module in {model, *blocks.values()}:
            exits.callback(module.register_forward_pre_hook(called).remove)
        state.put_back()
        try:
            step()
        except Exception:  # the step may run only once: report the first run
            return ""
    idle = [name for name, block in blocks.items() if not trained[block]]
    if not idle:
        return ""
    kind, of = type(model).__name__, f"{len(idle)} of {len(blocks)} blocks"
    if without_gradients := [name for name in idle if calls[blocks[name]]]:
        return (
            f"{len(without_gradients)} of {len(blocks)} blocks ran without gradients in the step (torch.no_grad, "
            f"torch.inference_mode): {listed(without_gradients)}. Pass a step that trains: {_STEP}."
        )
    if calls[model]:
        return (
            f"{of} were not called in the step, though the {kind} was: {listed(idle)}. Pass blocks=: those that it "
            "calls as modules (at most methods or parts of these were called)."
        )
    if len(idle) == len(blocks):
        return (
            f"the step called neither the {kind} that was given as model nor any of its {len(blocks)} blocks. Pass as "
            f"model what the step trains, and a step that calls it: {_STEP}."
        )
    return (
        f"{of} were not called in the step, and neither was the {kind} that was given as model: {listed(idle)}. Pass "
        "as model the part of it that the step calls, or as blocks= those that run."
    )
