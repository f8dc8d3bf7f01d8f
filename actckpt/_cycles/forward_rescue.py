"""A block's forward that runs out of memory under a plan runs once more, with everything recomputed.

The second attempt starts from what the first one started from: random state, and the buffers that the block changes.
Those are known from the measured cycle, and copied before each call. There is no second attempt

- for a block that no plan may rerun, or that changed a parameter in the measured cycle;
- if an argument or another buffer was changed, or a generator is among the arguments;
- while an extension carries a state through regions (FP8 of TransformerEngine), or a stream is being captured;
- with several ranks, if the first attempt communicated (see `_core/rescue`).

The remaining blocks of the forward recompute everything as well, and the kind of cycle gets a smaller plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from actckpt import _C, config
from actckpt._blocks.applied import CallSettings, CheckpointedForward
from actckpt._budget.running import RECOMPUTE
from actckpt._core import extensions, random_state, rescue
from actckpt._core.memory_by_module import explain
from actckpt._core.storages import tensors_in
from actckpt._core.tensor_changes import has_same_bytes, version_of
from actckpt._rerun.inputs import Survey

__all__ = ["ForwardRescue"]

_RECOMPUTED = CallSettings(RECOMPUTE)
_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class _BufferAt(NamedTuple):
    module: torch.nn.Module
    name: str

    @property
    def tensor(self) -> Tensor | None:
        return self.module._buffers.get(self.name)


class _Known(NamedTuple):
    """What a block's forward uses besides its arguments."""

    #: In attributes of its modules.
    generators: Sequence[torch.Generator]
    #: Whether a forward changes them.
    buffers: dict[_BufferAt, bool]


class ForwardRescue:
    """Second attempts for the blocks of one model.

    Args:
        optimizers: whose state an error lists.
        ran_out: called before a second attempt.
    """

    def __init__(
        self, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], ran_out: Callable[[], object]
    ) -> None:
        self._model, self._optimizers, self._ran_out = model, optimizers, ran_out
        #: By name of a block: what its forward uses; None: it must not run twice.
        self._known: dict[str, _Known | None] = {}

    @contextmanager
    def measured(self, name: str, block: torch.nn.Module) -> Iterator[Callable[[bool], None]]:
        """Determine what a block's forward changes: it runs in the body.

        Yields:
            A function to call with whether a plan may rerun the block.
        """
        # BatchNorm's kernels change statistics without a version: bytes are compared.
        buffers = {at: (at.tensor, _copy(at.tensor)) for at in _buffers_of(block)}
        parameters = [(parameter, version_of(parameter)) for parameter in block.parameters()]
        answers = [False]
        yield answers.append
        if not answers[-1] or any(version_of(parameter) != version for parameter, version in parameters):
            self._known[name] = None
        known = self._known.setdefault(name, _Known(_C.Parameters(block).generators, {}))
        if known is not None:
            for at, (tensor, copy) in buffers.items():
                is_same = tensor is None or copy is None or has_same_bytes(copy, tensor)
                is_changed = at.tensor is not tensor or not is_same
                known.buffers[at] = known.buffers.get(at, False) or is_changed

    def run(
        self,
        forward: CheckpointedForward,
        arguments: _Arguments,
        settings: CallSettings,
        run: Callable[[CallSettings], Any],
    ) -> Any:
        """Return `run(settings)`; if that runs out of memory, run it once more, with everything recomputed."""
        try:
            return self._run(forward, arguments, settings, run)
        except RuntimeError as error:
            explain(error, self._model, self._optimizers)
            raise

    def _run(
        self,
        forward: CheckpointedForward,
        arguments: _Arguments,
        settings: CallSettings,
        run: Callable[[CallSettings], Any],
    ) -> Any:
        known = self._known.get(forward.name)
        if known is None or not config.settings().rescue:
            return run(settings)
        start = _Start(arguments, known)
        try:
            return run(settings)
        except RuntimeError as error:
            if not start.may_run_again(forward.block, error):
                raise
            first = str(error)
        # The error is freed, and with it the frames that hold what the first attempt made.
        start.restore()
        rescue.release_caches("rescued_forwards")
        self._ran_out()
        try:
            return run(_RECOMPUTED)
        except BaseException as error:
            rescue.add_first_error(error, first)
            raise


class _Start:
    """What a block's forward starts from."""

    __slots__ = ("_arguments", "_buffers", "_generators", "_operations", "_states", "_trackers", "_versions")

    def __init__(self, arguments: _Arguments, known: _Known) -> None:
        tensors = list(tensors_in(arguments))
        self._arguments, self._generators = arguments, known.generators
        self._versions = [version_of(tensor) for tensor in tensors]
        devices = [tensor.device for tensor in tensors if not tensor.is_cpu]
        self._states = random_state.capture((*random_state.generators_of_region(devices), *self._generators))
        self._trackers = random_state.tracker_states()
        self._buffers = [
            (at, tensor := at.tensor, version_of(tensor), _copy(tensor) if changes else None)
            for at, changes in known.buffers.items()
        ]
        self._operations = rescue.num_operations()

    def may_run_again(self, block: torch.nn.Module, error: BaseException) -> bool:
        """Whether a forward that raised an error runs once more."""
        if not rescue.may_run_again(error, self._operations):
            return False
        is_known = {at for at, *_ in self._buffers} == set(_buffers_of(block)) and (
            list(map(id, self._generators)) == list(map(id, _C.Parameters(block).generators))
        )
        return (
            is_known
            and not Survey(None, *self._arguments).generators
            and all(extension.capture() is None for extension in extensions.around_regions)
            and self._is_unchanged()
        )

    def _is_unchanged(self) -> bool:
        tensors = list(tensors_in(self._arguments))
        if len(tensors) != len(self._versions) or any(tensor.is_inference() for tensor in tensors):
            return False
        buffers_stand = all(
            copy is not None or tensor is None or (version_of(tensor) == version and not tensor.is_inference())
            for _, tensor, version, copy in self._buffers
        )
        return buffers_stand and list(map(version_of, tensors)) == self._versions

    def restore(self) -> None:
        """Restore random state and buffers."""
        self._states.restore()
        for tracker in self._trackers:
            tracker.restore()
        with torch.no_grad():
            for at, tensor, _, copy in self._buffers:
                at.module._buffers[at.name] = tensor
                if copy is not None and tensor is not None:
                    tensor.copy_(copy)


def _buffers_of(block: torch.nn.Module) -> Iterator[_BufferAt]:
    for module in block.modules():
        for name in module._buffers:
            yield _BufferAt(module, name)


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()
