"""The graph that a region records and that replay walks: which operators make which bytes.

NOTE [ Lineage ]

A *value* is the contents of a storage at one version. A *step* is one recorded operator call: it reads values and makes
values. A tensor is a *window* on a value: dtype, shape, strides, offset, conj and neg bits. So views need no step, and
one replayed storage serves all of them.

References go from a saved tensor's handle to its value, from a value to the step that makes it, and from a step to the
values that it reads. They never go the other way. So reference counting alone frees whatever no handle depends on: when
a graph dies, and piece by piece while backward frees its nodes.

A value whose bytes are *available* (`held`, `stored`, `cached`) needs no step. A value that must not be recomputed
(kept, offloaded, opaque) has no step, so it keeps nothing before it alive.

NOTE [ Needs ]

A backward *needs* a dropped value in two cases. A saved tensor on the value was not unpacked in this backward yet. Or a
needed value that is not available is made from it. A replayed value stays cached while it is needed, so each step runs
once, in whatever order backward unpacks.

No reference leads from a value to the values made from it. So the first replay of a backward walks once from all live
saved tensors of the region; the tape lists them in the order of saving. The walk counts, for each value, how many
values that must be replayed read it. The counts are updated from then on. A value that becomes available or is no
longer needed stops reading. A value that is evicted reads again. A saved tensor that dies is no longer needed.

When the backward ends or fails, everything cached for it is released at once. A value whose step is gone by then
(csrc/graph/suspended_steps.h) is held instead.

The counts affect only how long bytes stay, never what they are. Another backward of the same region, at the same time,
counts anew. Whoever misses a value replays it.

The classes are in C++ (csrc/graph/objects.h), since some are created for every operator. The counts are in needs.h.
"""

from typing import Any

from actckpt._C import (
    Handle,
    KnownStorage,
    Step,
    TapeCore,
    Value,
    Window,
    release_replay_caches,
    window_of,
)
from actckpt._core import pressure

__all__ = [
    "Handle",
    "KnownStorage",
    "Step",
    "TapeCore",
    "Value",
    "Window",
    "blank_of",
    "is_unread",
    "redirect",
    "window_of",
]


def blank_of(value: Value, why_opaque: str) -> Value:
    """Return a placeholder for the memory of `value`, whose contents do not matter."""
    blank = Value(value.nbytes, value.device, value.ordinal)
    blank.action = value.action
    blank.why_opaque = why_opaque
    return blank


def is_unread(value: Value) -> bool:
    """Whether no recorded step has read a value so far, and autograd did not save it."""
    return value.num_reads == 0 and not value.was_saved


def redirect(step: Step, old: Value, new: Value) -> None:
    """Make a step read and write `new` instead of `old`; a value without a step is not read."""
    step.inputs.remove(old)
    old.num_reads -= 1
    if new.step is not None:
        step.inputs.append(new)

    def replaced(arg: Any) -> Any:
        if isinstance(arg, Window):
            return arg.on(new) if arg.value is old else arg
        return [replaced(item) for item in arg] if isinstance(arg, list) else arg

    step.args = [replaced(arg) for arg in step.args]
    step.kwargs = {name: replaced(arg) for name, arg in (step.kwargs or {}).items()}


pressure.register("replay caches", release_replay_caches)
