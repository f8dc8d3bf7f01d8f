"""Which operators lead to which bytes: the graph that a region records and replay walks.

NOTE [ Lineage ]

A *value* is what a storage holds at one version. A *step* is one recorded call of an operator: it reads
values and makes values. A tensor is a *window* on a value: dtype, shape, strides, offset, conj and neg bits.
So views need no step of their own, and one replayed storage serves all of them.

References point from a saved tensor's handle to its value, from a value to the step that makes it, from a
step to the values that it reads, and never the other way. What no handle leads to is therefore freed by
reference counting alone: when a graph dies, and piece by piece while backward frees its nodes.

A value whose bytes are *available* (`held`, `stored`, `cached`) needs no step. One that must not be computed again
(kept, offloaded, opaque) has none, so nothing before it is kept alive on its account.

NOTE [ Needs ]

A backward *asks* for a value that was dropped if a saved tensor on it was not unpacked in this backward yet, or if a
value that it asks for, and that is not available, is made from it. What is replayed stays as long as it is asked for:
so each step runs once, whatever the order of unpacking. Since no reference leads from a value to those that are made
from it, the first replay of a backward walks once from all saved tensors of the region that are alive (a tape lists
them, in the order of saving) and counts for each value how many others that must be replayed read it. From then on the
counts are kept right: a value that becomes available, or that nobody asks for any more, reads nothing; one that is
released too soon, for want of room, reads again. A saved tensor that dies was asked for no longer.

When the backward ends, or fails, all that it had replayed is released at once. A value whose step is gone by then
(csrc/graph/suspended_steps.h) is held instead.

The counts decide how long bytes stay and never what they are: another backward of the same region at the same time
counts anew, and whoever misses something replays it.

The classes are in C++ (csrc/graph/objects.h), since some are made at every operator; the counts in needs.h there.
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
    """Return a value that stands for memory in the place of `value` whose bytes do not matter."""
    blank = Value(value.nbytes, value.device, value.ordinal)
    blank.action = value.action
    blank.why_opaque = why_opaque
    return blank


def is_unread(value: Value) -> bool:
    """Whether nothing that was recorded so far read the bytes of a value, and autograd did not save it."""
    return value.num_reads == 0 and not value.was_saved


def redirect(step: Step, old: Value, new: Value) -> None:
    """Let a step read and write `new` where it was to read and write `old`; a value without a step is not read."""
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
