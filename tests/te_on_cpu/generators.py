"""The random state of the device: generators that are handles on states, as CUDA's are.

CPU operators draw from torch's default generator, so that is where the state lies which the device's default generator
points to. All other states are put by.
"""

from __future__ import annotations

import torch

__all__ = ["DeviceGenerator", "default"]


class _State:
    """What handles point to."""

    def __init__(self, bytes_: torch.Tensor) -> None:
        self.bytes = bytes_  # of the state that is in use: those from before it was


class DeviceGenerator(torch.Generator):
    """A handle on a state.

    `graphsafe_get_state` returns another handle on the same state, `graphsafe_set_state` points to another's state, and
    `get_state` and `set_state` read and write bytes.
    """

    _state: _State

    @classmethod
    def on(cls, state: _State) -> DeviceGenerator:
        """Return a new handle."""
        self = cls.__new__(cls)
        self._state = state
        return self

    @property
    def _is_in_use(self) -> bool:
        return self._state is default._state

    def get_state(self) -> torch.Tensor:
        return torch.default_generator.get_state() if self._is_in_use else self._state.bytes.clone()

    def set_state(self, new_state: torch.Tensor) -> DeviceGenerator:  # type: ignore[override]
        if self._is_in_use:
            torch.default_generator.set_state(new_state)
        else:
            self._state.bytes = new_state.clone()
        return self

    def manual_seed(self, seed: int) -> DeviceGenerator:
        return self.set_state(torch.Generator().manual_seed(seed).get_state())

    def clone_state(self) -> DeviceGenerator:
        return DeviceGenerator.on(_State(self.get_state()))

    def graphsafe_get_state(self) -> DeviceGenerator:
        return DeviceGenerator.on(self._state)

    def graphsafe_set_state(self, state: DeviceGenerator) -> DeviceGenerator:  # type: ignore[override]
        if self is default:
            self._state.bytes = torch.default_generator.get_state()
            torch.default_generator.set_state(state._state.bytes)
        self._state = state._state
        return self


default = DeviceGenerator.on(_State(torch.default_generator.get_state()))
