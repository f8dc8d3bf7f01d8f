"""Random state of a region: captured at its forward, restored around its reruns.

NOTE [ Random state ]

Rule 1. States are captured by value and written back into the same generator objects. A handle that
        is merely set back restores nothing, and a cloned generator is unknown to CUDA graphs.
Rule 2. Captured are the CPU's default generator, the default generators of all devices that are in use (on CUDA:
        that have a context) or among the inputs, once each, every `torch.Generator` among the inputs and in attributes
        of modules, and the trackers of extensions and callers. Inputs alone do not tell: a function may send what it
        was given to a second device and draw there, with parameters there or without. A device that the process uses
        for the first time within the function is not captured.
Rule 3. A tracker is any object with `get_states() -> dict` and `set_states(dict)`, whose values are
        byte tensors, `torch.Generator`s, or immutable values; recognised by value, not by class.
        It always gets a new dict, because trackers keep and change the one they are given.
Rule 4. The state outside is unchanged after a rerun, also after one that failed.
Rule 5. Reruns that restore random state take one lock: two threads that swap the same generator would
        draw each other's numbers. The extension takes it (csrc/core/swap_lock.h), before the lock of
        the region, so that two threads which differentiate each other's regions do not block.
Rule 6. A region made within a rerun (a backward inside the function, which autograd may run in
        another thread) belongs to the owner of the lock, who is waiting for it.
Rule 7. While a stream is capturing, states cannot be read: a region whose rerun is to draw the same numbers raises, as
        torch's checkpoint does.
Rule 8. cuDNN's recurrent layers draw their dropout from a state of their own, which starts anew, from a number of the
        device's generator, in the first layer after the state of that generator was set. It is set before each rerun,
        so it is set to what it is before the function's first run as well: both draw the same masks. Those of a program
        without regions, where layers go on from each other's state, are others.

Whether the function drew any numbers is deliberately not asked. A function that puts back what it drew
(`torch.random.fork_rng`) leaves the same state behind as one that drew nothing.
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
    "RandomState",
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
    """Stands for a registered callable."""

    get_tracker: GetTracker

    def tracker(self) -> Tracker:
        return self.get_tracker()


def register_tracker(get_tracker: GetTracker) -> None:
    """Restore the states of a random state tracker around every rerun from now on.

    Args:
        get_tracker: called at each region; returns an object with `get_states()` and
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
    """Return the trackers of extensions, and those that these callables return, each once."""
    if callable(get_trackers) or not all(map(callable, get_trackers)):
        raise TypeError(
            f"checkpoint: rng_trackers={get_trackers!r}. Pass a list of functions that return trackers, for example "
            "[get_cuda_rng_tracker], not their results."
        )
    found = [extension.tracker() for extension in extensions.around_regions]
    found += [get_tracker() for get_tracker in get_trackers]
    return list({id(tracker): tracker for tracker in found if tracker is not None}.values())


def tracker_states() -> "list[TrackerState]":
    """Return the states of all trackers that are registered."""
    return [TrackerState(tracker) for tracker in known_trackers(())]


class RandomState:
    """Random state at the start of one region's forward. See NOTE [ Random state ]."""

    __slots__ = ("_generators", "_trackers", "outer_swap")

    def __init__(
        self,
        of_inputs: Sequence[torch.device],
        generators: Sequence[torch.Generator],
        trackers: Sequence[GetTracker],
    ) -> None:
        self._generators = _C.capture_generators_of_rerun((*generators_of_region(of_inputs), *generators))
        self._trackers = [TrackerState(tracker) for tracker in known_trackers(trackers)]
        #: The swap within whose rerun the region is made (Rule 6).
        self.outer_swap = _C.current_swap()

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Run the body with the state of the forward, then put back what was there."""
        with swapped_in(self._generators, self._trackers):
            yield


def capture(generators: tuple[Generator, ...]) -> "_C.GeneratorStates":
    """Return the states of these generators by value."""
    return _C.capture_generators(generators)


@contextmanager
def swapped_in(states: "_C.GeneratorStates", trackers: "Sequence[TrackerState]" = ()) -> Iterator[None]:
    """Run the body with these states, then put back what was there. The caller owns the swap (Rule 5)."""
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
    """Return the error for a lock that was not to be had for minutes."""
    return ActckptError(
        "A rerun waited 300 s for a rerun in another thread to give random state back.\nDoes the function of "
        "that region run a backward of its own, on a second device, through another region? Pass "
        "preserve_rng_state=False to the inner checkpoint, or move the backward out of the region."
    )


def capturing_error(name: str) -> ActckptError:
    """Return the error for a region whose rerun would draw other numbers than its forward, named `name`."""
    return ActckptError(
        f"checkpoint: {name} runs while its stream is being captured into a CUDA graph, where random state cannot be "
        "read: its rerun would draw other numbers. Pass preserve_rng_state=False if it draws none, or policy=[], which "
        "keeps what random operators make."
    )


class TrackerState:
    """The states of one tracker by value (Rules 1 and 3)."""

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


def generators_of_devices(found: Iterable[torch.device]) -> tuple[Generator, ...]:
    """Return the default generators of the CPU and of these devices, each once."""
    generators = [torch.default_generator, *(devices.generator_of(device) for device in found)]
    return tuple(dict.fromkeys(generator for generator in generators if generator is not None))


def generators_of_region(of_inputs: Iterable[torch.device]) -> tuple[Generator, ...]:
    """Return the default generators that a function may draw from, given its inputs' devices, each once (Rule 2)."""
    return tuple(dict.fromkeys((*generators_of_devices(of_inputs), *devices.used_generators())))


def generators_of_call(args: tuple[Any, ...]) -> tuple[Generator, ...]:
    """Return the default generators that a function called with `args` may draw from, each once."""
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
