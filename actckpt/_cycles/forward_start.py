"""What a block's forward starts from: its arguments, buffers and random state, to start again from the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from actckpt import _C
from actckpt._core import extensions, random_state
from actckpt._core.storages import tensors_in
from actckpt._core.tensor_changes import has_same_bytes, version_of
from actckpt._rerun.inputs import Survey

__all__ = ["Arguments", "ForwardStart", "StateOfBlock", "WatchedForward"]

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

_PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer)


class _BufferAt(NamedTuple):
    module: torch.nn.Module
    name: str

    @property
    def tensor(self) -> Tensor | None:
        return self.module._buffers.get(self.name)


class StateOfBlock(NamedTuple):
    """What a block's forward uses besides its arguments."""

    #: In attributes of its modules.
    generators: Sequence[torch.Generator]
    #: Whether a forward changes them.
    buffers: dict[_BufferAt, bool]

    def add(self, other: StateOfBlock) -> None:
        """Add what another forward changed."""
        for at, changes in other.buffers.items():
            self.buffers[at] = changes or self.buffers.get(at, False)


class WatchedForward:
    """A forward of a block, to find out what it changes. It runs between the construction and `state`."""

    def __init__(self, block: torch.nn.Module) -> None:
        self._block = block
        # BatchNorm's kernels change statistics without a version: bytes are compared.
        self._buffers = {at: (at.tensor, _copy(at.tensor)) for at in _buffers_of(block)}
        self._parameters = [(parameter, version_of(parameter)) for parameter in block.parameters()]

    def state(self) -> StateOfBlock | None:
        """Return what the forward used, None: it cannot start again from the same."""
        if any(version_of(parameter) != version for parameter, version in self._parameters):
            return None
        changes: dict[_BufferAt, bool] = {}
        for at, (tensor, copy) in self._buffers.items():
            if tensor is not None and copy is None:
                return None
            is_same = tensor is None or copy is None or has_same_bytes(copy, tensor)
            changes[at] = at.tensor is not tensor or not is_same
        return StateOfBlock(_C.Parameters(self._block).generators, changes)


class _Buffer(NamedTuple):
    """A buffer before a forward."""

    at: _BufferAt
    tensor: Tensor | None
    version: int
    #: Whether forwards change it. Then there is a copy, if it can be copied.
    changes: bool
    copy: Tensor | None

    def can_be_restored(self) -> bool:
        if self.tensor is None or self.copy is not None:
            return True
        is_unchanged = version_of(self.tensor) == self.version and not self.tensor.is_inference()
        return is_unchanged and not self.changes

    def restore(self) -> None:
        self.at.module._buffers[self.at.name] = self.tensor
        if self.copy is not None and self.tensor is not None:
            self.tensor.copy_(self.copy)


class ForwardStart:
    """What one forward of a block starts from.

    Args:
        state: what forwards of the block use.
    """

    def __init__(self, arguments: Arguments, state: StateOfBlock) -> None:
        tensors = list(tensors_in(arguments))
        self._arguments, self._generators = arguments, state.generators
        self._versions = [version_of(tensor) for tensor in tensors]
        devices = [tensor.device for tensor in tensors if not tensor.is_cpu]
        self._random = random_state.capture((*random_state.generators_of_region(devices), *state.generators))
        self._trackers = random_state.tracker_states()
        self._buffers = [
            _Buffer(at, tensor := at.tensor, version_of(tensor), changes, _copy(tensor) if changes else None)
            for at, changes in state.buffers.items()
        ]

    def can_be_restored(self, block: torch.nn.Module) -> bool:
        """Whether the forward can start again: what cannot be restored is unchanged."""
        is_known = {buffer.at for buffer in self._buffers} == set(_buffers_of(block)) and (
            list(map(id, self._generators)) == list(map(id, _C.Parameters(block).generators))
        )
        return (
            is_known
            and not Survey(None, *self._arguments).generators
            and all(extension.capture() is None for extension in extensions.around_regions)
            and all(buffer.can_be_restored() for buffer in self._buffers)
            and self._arguments_stand()
        )

    def _arguments_stand(self) -> bool:
        tensors = list(tensors_in(self._arguments))
        has_versions = not any(tensor.is_inference() for tensor in tensors)
        return has_versions and list(map(version_of, tensors)) == self._versions

    def restore(self) -> None:
        """Restore random state and buffers."""
        self._random.restore()
        for tracker in self._trackers:
            tracker.restore()
        with torch.no_grad():
            for buffer in self._buffers:
                buffer.restore()


def _buffers_of(block: torch.nn.Module) -> Iterator[_BufferAt]:
    for module in block.modules():
        for name in module._buffers:
            yield _BufferAt(module, name)


def _copy(tensor: Tensor | None) -> Tensor | None:
    """Return a copy; None if there is nothing to copy, or if it has no bytes of its own (subclasses, freed memory)."""
    if tensor is None or type(tensor) not in _PLAIN or tensor.layout is not torch.strided:
        return None
    is_freed = tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0
    return None if is_freed or tensor.is_inference() or tensor.is_meta else tensor.detach().clone()
