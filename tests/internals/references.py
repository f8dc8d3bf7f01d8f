"""Exact counts of references: what a step takes, it gives back.

Objects of the collector are counted by type. Most types of the extension are not the collector's: each of their objects
holds a reference to its type, so the references to the type count them. References to what the extension holds for the
life of the process (names, singletons, what `connect` was given) show a reference that is taken and not given back, or
given back twice.
"""

from __future__ import annotations

import gc
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import on_device
import torch
from offload_oracle import TwoTensor

from actckpt import _bind
from actckpt._core import devices
from internals.stores import flush

STEPS = 500
#: What a step leaves behind, each of these leaves; a cache that fills once per process, whenever it does, is no leak.
_ROUNDS = 3
#: On the simulated device, whose operators take several times as long, this part of them.
_PART = 4

_NAMES_HEADER = Path(__file__).parents[2] / "csrc" / "core" / "names.h"
_SINGLETONS = ("None", "True", "False", "()")
#: References to singletons that come and go with the interpreter's own; other counts must be the same.
_SLACK = {f"references to {name}": 5 for name in _SINGLETONS}
if "PYTEST_XDIST_WORKER" in os.environ:
    # A thread of the worker waits for words from outside, with a view of its buffer.
    _SLACK |= {"objects of type memoryview": 1, "objects of type managedbuffer": 1}
_INTERNED = re.compile(r'X\((\w+), (?:\\\n\s*)?"([^"]*)"\)')


def _held_for_good() -> dict[str, object]:
    """Return what the extension holds for the life of the process, by a name."""
    found: dict[str, object] = {
        f"name {text!r}": sys.intern(text) for _, text in _INTERNED.findall(_NAMES_HEADER.read_text())
    }
    found |= {f"connected {name}": value for name, value in _bind.NAMES.items() if value is not None}
    found |= dict(zip(_SINGLETONS, (None, True, False, ()), strict=True))
    types: list[Any] = [item for item in gc.get_objects() if issubclass(type(item), type)]
    found |= {f"type {item.__name__}": item for item in types if item.__module__ == "actckpt._C"}
    return found


_HELD_FOR_GOOD = _held_for_good()
_clear_caches: Callable[[], None] = (
    sys._clear_internal_caches if hasattr(sys, "_clear_internal_caches") else sys._clear_type_cache
)


def counts() -> Counter[str]:
    """Return how many objects there are of each type, and how many references to what is held for good."""
    flush()  # a device's store holds a source until a call after its copy
    devices.counting(torch.device(on_device.device_type))  # which an accelerator object remembers
    _clear_caches()  # the interpreter's cache of attributes of types holds names, those that were looked up last
    for _ in range(3):  # a container of numbers, and one of those, leave the collector one after the other
        gc.collect()
    found = Counter(f"objects of type {type(item).__name__}" for item in gc.get_objects())
    for name, item in _HELD_FOR_GOOD.items():
        found[f"references to {name}"] = sys.getrefcount(item)
    return found


def _at_rest() -> Counter[str]:
    """Return counts that stay: a device's thread of autograd lets go of a graph a little after its backward."""
    found = counts()
    for _ in range(50):
        time.sleep(0.02)
        again = counts()  # with one such result alive, as later
        if not _changes(found, again):
            break
        found = again
    return again


def _changes(before: Counter[str], after: Counter[str]) -> dict[str, int]:
    changed = {name: after[name] - before[name] for name in before | after}
    return {name: change for name, change in changed.items() if abs(change) > _SLACK.get(name, 0)}


def assert_references_flat(step: Callable[[], object], steps: int = STEPS) -> None:
    """Run `step` a few times, then so many times; counts must be the same before and after, in one round of three."""
    steps = steps if on_device.device_type == "cpu" else steps // _PART
    gc.collect()
    gc.freeze()  # what was there before is not looked at
    for _ in range(20):
        step()
    found = [_left_by(step, steps)]
    while found[-1] and len(found) < _ROUNDS:
        found.append(_left_by(step, steps))
    assert not found[-1], f"in each of {len(found)} times {steps} steps: {found[-1]}"


def _left_by(step: Callable[[], object], steps: int) -> tuple[tuple[str, int], ...]:
    before = _at_rest()
    for _ in range(steps):
        step()
    changed, deadline = _changes(before, counts()), time.monotonic() + 5
    while changed and time.monotonic() < deadline:  # as above; what is lost never comes back
        time.sleep(0.02)
        changed = _changes(before, counts())
    return tuple(changed.items())


def sines(x: torch.Tensor) -> torch.Tensor:
    """Save two values."""
    return x.sin().exp()


def chain(x: torch.Tensor) -> torch.Tensor:
    """Save values and views of them."""
    return (x.sin() * 2).exp().view(4, 2).t().tanh()


def fails(x: torch.Tensor) -> torch.Tensor:
    """Save a value, then raise KeyError."""
    x.sin().exp()
    raise KeyError(x)


class SavesBoth(torch.autograd.Function):
    """Saves a tensor and a pair."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, t: TwoTensor) -> torch.Tensor:
        """Save both."""
        ctx.save_for_backward(x, t)
        return x * t.a

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """Read both."""
        _, t = ctx.saved_tensors
        return grad * t.b, None
