"""Calls that are held outside of reruns' frames: by an extension, which builds the graph itself, and by profiles."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from actckpt import _C
from actckpt._core import messages, random_state, state, torch_private
from actckpt._rerun.buffers import Buffers
from actckpt._rerun.inputs import Call, Survey
from actckpt._rerun.module_state import modules_as_found
from actckpt._rerun.packed import held_inputs

__all__ = ["HeldCall", "ProfiledCall", "tensors_of"]


class HeldCall:
    """Inputs, random state and global state of a module call that is about to run.

    Args:
        module: its parameters must be unchanged when the call is repeated.
        call: function, positional and keyword arguments.
        get_trackers: return random state trackers, besides those of extensions.
        hooks: (pack, unpack) for the held tensors; None: they are held directly.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        call: Call,
        get_trackers: Sequence[random_state.GetTracker],
        hooks: torch_private.Hooks | None,
    ) -> None:
        #: The function's name.
        self.name = messages.name_of(call[0])
        inputs = self._inputs = held_inputs(*call, hooks)
        self._parameters = _C.Parameters(module, inputs.modules)
        generators = (*random_state.generators_of_region(inputs.devices), *inputs.generators)
        self._random = _C.capture_generators_of_rerun((*generators, *self._parameters.generators))
        self._trackers = random_state.tracker_states(get_trackers)
        self._outer_swap = _C.current_swap()
        self._state = state.capture()

    def forward_done(self) -> None:
        """Must be called after the call has run."""
        self._inputs.forward_done()
        self._parameters.forward_done()

    def restore(self) -> Call:
        """Return the call, to repeat it.

        Raises:
            InputChangedError: an input was changed since.
            RerunMismatchError: a parameter was changed since.
        """
        self._parameters.check()
        restored = self._inputs.restore()
        return restored.function, restored.args, restored.kwargs

    @contextmanager
    def as_in_forward(self) -> Iterator[None]:
        """Run the body under the random and global state of the call."""
        with (
            _C.Swap(self._outer_swap),
            random_state.swapped_in(self._random, self._trackers),
            state.restored(self._state, state.capture()),
        ):
            yield


class ProfiledCall:
    """Containers and modules of a call that is about to run, and is repeated to measure it."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._inputs = held_inputs(function, args, kwargs, None)
        self._parameters = _C.Parameters(function, self._inputs.modules)
        buffered = self._parameters.buffered
        self._buffers = Buffers(buffered) if buffered else None

    def forward_done(self) -> None:
        """Must be called after the call has run."""
        self._parameters.forward_done()
        self._inputs.forward_done()
        if self._buffers is not None:
            self._buffers.forward_done()

    @contextmanager
    def as_found(self) -> Iterator[None]:
        """Run the body with containers and modules as the call found them."""
        with modules_as_found(self._parameters, self._buffers), self._inputs.with_containers():
            yield


def tensors_of(call: Call) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors reachable from a call, each with a description of where it is."""
    for place, tensor, _ in Survey(call).tensors:
        yield place, tensor
