"""A plan as settings of the blocks of a model, and a way to run and measure a step with it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any

import torch

from actckpt._blocks.applied import (
    CheckpointedForward,
    OneCall,
    Settings,
    applied_blocks,
    count_calls,
    unpatch,
)
from actckpt._blocks.key_value_caches import is_checkpointing_layer
from actckpt._blocks.windows import Windows
from actckpt._budget.offloading import offloaded_bytes
from actckpt._core import devices
from actckpt._core.training_state import TrainingState
from actckpt._replay.operators import is_collective
from actckpt._text.places import Place
from actckpt.action import Action
from actckpt.memory import LiveStorages
from actckpt.planner.costs import BLOCK_INPUT, BlockClass
from actckpt.planner.plans import Plan

__all__ = ["RECOMPUTE", "UNPLANNED", "Candidate", "device_of", "settings_of", "use_settings"]

#: Resolution of device events.
_RESOLUTION_S = 5e-7
#: Everything is recomputed, operator by operator: no Python code of a block runs twice.
RECOMPUTE: dict[str, Any] = {"policy": [], "drops_caches": True}
#: The same, for a block that did not run when the plan was made.
UNPLANNED: dict[str, Any] = {**RECOMPUTE, "is_unplanned": True}


def settings_of(
    plan: Plan, model: torch.nn.Module, entries: Iterable[int] | None = None, unknown: Container[int] = ()
) -> dict[str, Settings]:
    """Return how each block of a model runs under a plan: a table of places, a rerun, or unchanged.

    A block that the plan has several times runs by its entry in each call; a block that the plan does not have is
    recomputed.

    Args:
        entries: of the plan's stack, those of one forward of the model; None: all.
        unknown: entries that the plan does not cover, which recompute everything.
    Raises:
        ValueError: the plan has no model.
    """
    if plan.blocks is None or plan.places is None:
        raise ValueError(
            "apply: this plan was made from a cost table and knows no model. Make one with "
            "actckpt.plan(step, model=...)."
        )
    own = [at for at in (range(len(plan.blocks)) if entries is None else entries) if plan.blocks[at] is not None]
    offloaded = offloaded_bytes(plan)
    by_name: dict[str, tuple[OneCall, ...]] = {}
    for at in own:
        name = plan.blocks[at] or ""
        one = _settings(plan.costs.blocks[at], plan.actions[at], plan.places[at], plan.rerun[at])
        if "is_plain" in one and is_checkpointing_layer(model.get_submodule(name)):
            one["drops_caches"] = True  # even if it drops nothing: later blocks share the key-value cache
        if plan.windows is not None:
            one["windows"] = Windows(plan.windows[at], math.ceil(offloaded[at]), is_last=at == own[-1])
        by_name[name] = (*by_name.get(name, ()), RECOMPUTE if at in unknown else one)
    return {name: calls[0] if len(calls) == 1 else (*calls, UNPLANNED) for name, calls in by_name.items()}


def use_settings(forwards: Mapping[str, CheckpointedForward], settings: Mapping[str, Settings]) -> None:
    """Set how blocks run; a block without settings recomputes everything, as unmeasured if there are other settings."""
    for name, forward in forwards.items():
        forward.use(settings.get(name, UNPLANNED if settings else RECOMPUTE))


def _settings(
    block: BlockClass, actions: Mapping[str, Action], places: Mapping[str, str], rerun: bool
) -> dict[str, Any]:
    moves_input = actions.get(BLOCK_INPUT) is Action.OFFLOAD
    if rerun:
        return {"policy": "recompute", "offload_inputs": moves_input, "is_planned": True}
    needed = [value for value in block.values if value.needed]
    if all(actions[value.name] is Action.KEEP for value in needed):
        held = [value.nbytes for value in needed if value.nbytes]
        return {"is_plain": True, "held": (len(held), int(sum(held)))}
    policy = {place: actions[name] for name, place in places.items() if not _repeats(place, actions[name])}
    return {"policy": policy, "drops_caches": True, "offload_inputs": moves_input, "is_planned": True}


def _repeats(place: str, action: Action) -> bool:
    """Whether an entry would make replay repeat a collective, which plans never do (NOTE [ Fake collectives ])."""
    return action is Action.RECOMPUTE and is_collective(Place.parse(place).operator)


def device_of(model: torch.nn.Module) -> torch.device:
    """Return the device of the first parameter of a model."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


class Candidate:
    """One way to run a step, and its measurements.

    Args:
        name: for people.
        model: what the step trains.
        forwards: replacements of the forwards of its blocks.
        step: runs forward and backward, without arguments.
        state: restored before each step.
        opens: called before each step, when the blocks have these forwards.
    """

    def __init__(
        self,
        name: str,
        model: torch.nn.Module,
        forwards: dict[torch.nn.Module, Any],
        step: Callable[[], object],
        state: TrainingState,
        opens: Callable[[], object] | None = None,
    ) -> None:
        self.name = name
        self.forwards = forwards
        self._model, self._step, self._state = model, step, state
        self._opens = opens or (lambda: count_calls(model, forwards.values()))
        self._device = device_of(model)
        self.seconds: list[float] = []
        self.held_bytes = self.peak_bytes = 0

    @contextlib.contextmanager
    def _applied(self) -> Iterator[None]:
        for block, forward in self.forwards.items():
            block.forward = forward
        self._opens()
        try:
            yield
        finally:
            unpatch({name: block for name, block in applied_blocks(self._model).items() if block in self.forwards})

    def run(self) -> None:
        self._state.put_back()
        with self._applied():
            self._step()

    def measure_memory(self) -> None:
        """Count the live bytes during one step, without gradients of parameters."""
        held = [0]
        live = LiveStorages(parameters=self._model.parameters(), device=self._device)
        hook = self._model.register_forward_hook(lambda *_: held.append(live.live_bytes))
        try:
            with live:
                self.run()
        finally:
            hook.remove()
        self.held_bytes, self.peak_bytes = max(held), live.peak_bytes

    def time(self) -> None:
        self._state.put_back()
        with self._applied():
            devices.synchronize(self._device)
            start = devices.moment(self._device)
            self._step()
            seconds = devices.seconds_between(start, devices.moment(self._device))
            self.seconds.append(max(seconds, _RESOLUTION_S))
