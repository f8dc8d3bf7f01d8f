"""A module call that is held so that an extension, which builds the graph itself, can repeat it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from actckpt import _C
from actckpt._core import random_state, state, torch_private
from actckpt._rerun.inputs import Call, Survey
from actckpt._rerun.packed import held_inputs

__all__ = ["HeldCall", "tensors_of"]


class HeldCall:
    """Inputs, random state and global state of a call that is about to run.

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
        self._inputs = held_inputs(*call, hooks)
        self._parameters = _C.Parameters(module)
        self._random = random_state.RandomState(self._inputs.devices, self._inputs.generators, get_trackers)
        self._state = state.capture()

    @property
    def name(self) -> str:
        """The function's name."""
        return self._inputs.name

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
        return self._inputs.restore().call

    @contextmanager
    def as_in_forward(self) -> Iterator[None]:
        """Run the body under the random and global state of the call."""
        with (
            _C.Swap(self._random.outer_swap),
            self._random.swapped_in(),
            state.restored(self._state, state.capture()),
        ):
            yield


def tensors_of(call: Call) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors reachable from a call, each with a description of where it is."""
    for place, tensor, _ in Survey(call).tensors:
        yield place, tensor
