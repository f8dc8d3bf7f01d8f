"""Random state of a region: captured at its forward, restored around its reruns.

NOTE [ Random state ]

Rule 1. States are captured by value and written back into the same generator objects. Restoring a handle restores
nothing, and CUDA graphs do not know cloned generators. A tracker is any object with `get_states() -> dict` and
`set_states(dict)`; it always gets a new dict, because trackers keep and change theirs.
Rule 2. These states are captured:
- the default generators of the CPU, of all devices in use (on CUDA: with a context) and of the inputs' devices;
- every `torch.Generator` among the inputs and in module attributes;
- the trackers of extensions and callers.
The inputs alone do not suffice: a function may move its input to a second device and draw there. A device that the
process first uses inside the function is not captured.
Rule 3. Reruns that restore random state take one lock: two threads that swap the same generator would draw each other's
numbers. C++ takes it (csrc/core/swap_lock.h), before the region's lock, so that two threads that differentiate each
other's regions do not deadlock. The outer state is unchanged after a rerun, also after a failed one.
Rule 4. A region made during a rerun (a backward inside the function, which autograd may run in another thread) shares
the lock with that rerun's owner, which waits for it.
Rule 5. cuDNN's recurrent layers draw dropout from their own state. It is reseeded from the device's generator in the
first layer after that generator's state was set. A rerun sets the state, so the forward also sets it to its current
value: both draw the same masks. They differ from those of a program without regions, where layers continue each other's
state.

Whether the function drew any numbers is deliberately not checked. A function that restores what it drew
(`torch.random.fork_rng`) leaves the same state behind as one that drew nothing. While a stream is capturing, states
cannot be read: a region whose rerun must draw the same numbers raises, as torch's checkpoint does.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from actckpt import _C
from actckpt._core import devices, extensions
from actckpt._core.extensions import Tracker
from actckpt.errors import ActckptError

__all__ = [
    "TrackerState",
    "numpy_random",
    "python_random",
    "register_tracker",
    "tracker_states",
    "unregister_tracker",
]

GetTracker = Callable[[], Tracker]
Generator = torch.Generator | devices.DeviceGenerator


@dataclass(frozen=True)
class _Registered(extensions.Extension):
    """Wraps a registered callable."""

    get_tracker: GetTracker

    def tracker(self) -> Tracker:
        return self.get_tracker()


def register_tracker(get_tracker: GetTracker) -> None:
    """Restore the states of a random state tracker around every rerun from now on.

    Args:
        get_tracker: called for each region; returns an object with `get_states()` and
            `set_states(dict)`. Registering the same callable again changes nothing.
    Raises:
        TypeError: `get_tracker` is not callable.
    """
    if not callable(get_tracker):
        raise TypeError(
            f"register_tracker: expected a callable that returns a tracker, got {type(get_tracker).__name__}. "
            "Pass the function that returns it, for example get_cuda_rng_tracker, not its result."
        )
    extensions.register(_Registered(get_tracker))


def unregister_tracker(get_tracker: GetTracker) -> None:
    """Undo `register_tracker`.

    Raises:
        ValueError: `get_tracker` is not registered.
    """
    try:
        extensions.unregister(_Registered(get_tracker))
    except ValueError:
        raise ValueError(
            f"unregister_tracker: {get_tracker!r} is not registered. Pass what was given to register_tracker."
        ) from None


def known_trackers(get_trackers: Sequence[GetTracker]) -> list[Tracker]:
    """Return the trackers of extensions and of these callables, without repeats."""
    if callable(get_trackers) or not all(map(callable, get_trackers)):
        raise TypeError(
            f"checkpoint: rng_trackers={get_trackers!r}. Pass a list of functions that return trackers, for example "
            "[get_cuda_rng_tracker], not their results."
        )
    trackers = [extension.tracker() for extension in extensions.around_regions]
    trackers += [get_tracker() for get_tracker in get_trackers]
    return list({id(tracker): tracker for tracker in trackers if tracker is not None}.values())


def tracker_states(get_trackers: Sequence[GetTracker] = ()) -> "list[TrackerState]":
    """Return the states of all registered trackers, and of those that these callables return."""
    return [TrackerState(tracker) for tracker in known_trackers(get_trackers)]


def capture(generators: tuple[Generator, ...]) -> "_C.GeneratorStates":
    """Return the states of these generators by value."""
    return _C.capture_generators(generators)


@contextmanager
def swapped_in(states: "_C.GeneratorStates", trackers: "Sequence[TrackerState]" = ()) -> Iterator[None]:
    """Run the body with these states, then restore the current ones. The caller owns the swap (Rule 3)."""
    outside = states.now()
    outside_trackers = [tracker.now() for tracker in trackers]
    try:
        states.restore()
        for tracker in trackers:
            tracker.restore()
        yield
    finally:
        outside.restore()
        for tracker in outside_trackers:
            tracker.restore()


def swap_timeout_error() -> ActckptError:
    """Return the error for a lock that was not free for minutes."""
    return ActckptError(
        "A rerun waited 300 s for a rerun in another thread to give random state back.\nDoes the function of "
        "that region run a backward of its own, on a second device, through another region? Pass "
        "preserve_rng_state=False to the inner checkpoint, or move the backward out of the region."
    )


def capturing_error(name: str) -> ActckptError:
    """Return the error for a region, named `name`, whose rerun would draw other numbers than its forward."""
    return ActckptError(
        f"checkpoint: {name} runs while its stream is being captured into a CUDA graph, where random state cannot be "
        "read: its rerun would draw other numbers. Pass preserve_rng_state=False if it draws none, or policy=[], which "
        "keeps what random operators make."
    )


class TrackerState:
    """The states of one tracker by value (Rule 1)."""

    __slots__ = ("_states", "_tracker")

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self._states = {name: (value, _copied(value)) for name, value in tracker.get_states().items()}

    def now(self) -> "TrackerState":
        return TrackerState(self._tracker)

    def restore(self) -> None:
        states: dict[Any, Any] = {}
        for name, (value, copied) in self._states.items():
            if isinstance(value, torch.Generator):
                value.set_state(copied)
                states[name] = value
            else:
                states[name] = copied.clone() if isinstance(copied, Tensor) else copied
        self._tracker.set_states(states)


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return value.get_state()
    return value.clone() if isinstance(value, Tensor) else value


def generators_of_devices(of_devices: Iterable[torch.device]) -> tuple[Generator, ...]:
    """Return the default generators of the CPU and of these devices, without repeats."""
    generators = [torch.default_generator, *(devices.generator_of(device) for device in of_devices)]
    return tuple(dict.fromkeys(generator for generator in generators if generator is not None))


def generators_of_region(of_inputs: Iterable[torch.device]) -> tuple[Generator, ...]:
    """Return the default generators that a function may draw from, given its inputs' devices (Rule 2)."""
    return tuple(dict.fromkeys((*generators_of_devices(of_inputs), *devices.used_generators())))


def generators_of_call(args: tuple[Any, ...]) -> tuple[Generator, ...]:
    """Return the default generators that a function called with `args` may draw from."""
    return generators_of_region(a.device for a in args if isinstance(a, Tensor) and not a.is_cpu)


class _PythonRandom:
    def get_states(self) -> dict[Any, Any]:
        return {"python": random.getstate()}

    def set_states(self, states: dict[Any, Any], /) -> None:
        random.setstate(states["python"])


class _NumpyRandom:
    def get_states(self) -> dict[Any, Any]:
        import numpy

        return {"numpy": numpy.random.get_state()}

    def set_states(self, states: dict[Any, Any], /) -> None:
        import numpy

        numpy.random.set_state(states["numpy"])


def python_random() -> Tracker:
    """Return a tracker of the `random` module, for `register_tracker` or `rng_trackers=`."""
    return _PythonRandom()


def numpy_random() -> Tracker:
    """Return a tracker of NumPy's global state, for `register_tracker` or `rng_trackers=`."""
    return _NumpyRandom()
