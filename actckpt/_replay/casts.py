"""Casts of parameters outlive their region: autocast caches them and hands them to later regions.

In a later region such a cast is an input that no recorded step makes. Keeping it would hold the memory. So a region
that closes under autocast notes which storages are such casts and which step makes them. Later regions replay them from
the parameter.
"""

import weakref

import torch

from actckpt._core import torch_private
from actckpt._core.tensor_changes import version_of
from actckpt._replay.lineage import Step, Value
from actckpt._replay.tape import Tape
from actckpt.action import Action

__all__ = ["note", "replay_from_parameters"]

#: By id() of the storage, while it is alive.
_known: dict[int, tuple[weakref.ref[torch.UntypedStorage], Step]] = {}


def note(tape: Tape) -> None:
    """Note the parameter casts of a region that is about to close, if autocast may have cached them."""
    if not (torch_private.any_autocast_enabled() and torch.is_autocast_cache_enabled()):
        return
    for key, known in tape.storages.items():
        step, storage = known.value.step, known.storage()
        if storage is not None and step is not None and _is_cast(step) and not known.value.why_opaque:
            _known[key] = weakref.ref(storage, lambda _, key=key: _known.pop(key, None)), step  # type: ignore[misc]


def _is_cast(step: Step) -> bool:
    return (
        step.operator.func is torch.ops.aten._to_copy.default and len(step.inputs) == 1 and step.inputs[0].is_parameter
    )


def replay_from_parameters(tape: Tape) -> None:
    """Release inputs of a closed region that are casts of parameters; they are replayed instead."""
    if not _known or not tape.choice.recomputes("aten._to_copy.default"):
        return
    for value in tape.holding:
        if value.is_input and not value.is_parameter and value.held is not None and version_of(value.held) == 0:
            known = _known.get(id(value.held.untyped_storage()))
            if known is not None and known[0]() is value.held.untyped_storage():
                _have_replayed(value, known[1])


def _have_replayed(value: Value, cast: Step) -> None:
    parameter = cast.inputs[0]
    if parameter.held is None or version_of(parameter.held) != parameter.version:
        return  # the parameter changed; the cast is of its old bytes
    step = Step(cast.operator, cast.args, cast.kwargs, cast.inputs)
    step.grad_enabled, step.numerics = cast.grad_enabled, cast.numerics
    step.add_output(value, (0, 0))
    value.why_opaque = ""
    value.held = None
    if value.entry is not None:
        value.entry.action, value.entry.why = Action.RECOMPUTE, "a cast of a parameter"
