"""The forward of a block that runs out of memory runs again, checkpointed. See also actckpt/_core/rescue.py.

NOTE [ Rescued forwards ]

Rule 1. The second forward finds what the first one found: random state, the statistics of BatchNorm, other buffers that
        the block changes, the objects among its arguments. What costs little is copied before each forward.
Rule 2. All else must be unchanged: tensors among its arguments, parameters, other buffers. Versions tell. Where one
        changed, or the block has other ones than before, the error is raised.
Rule 3. Nothing is copied, and nothing runs again, where something around the block may have noted what the first one
        did: hooks of saved tensors (another checkpoint), a transform, a stream capture, a compiler, an extension that
        carries state of its own. What is around a block (a rerun of a larger one, say) may run again as a whole.
Rule 4. It runs as a rerun region. With several ranks it runs as a region that replays operators instead, which keeps
        what its collectives returned, unless reruns were asked for.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from actckpt import _C, config
from actckpt._core import devices, extensions, random_state, rescue, torch_private
from actckpt._core.counters import counters
from actckpt._core.memory_by_module import explain
from actckpt._core.tensor_changes import Watched
from actckpt._rerun.buffers import Buffers, has_statistics, may_change
from actckpt._rerun.packed import held_inputs

if TYPE_CHECKING:
    from actckpt._blocks.applied import CheckpointedForward

__all__ = ["StateOfBlock", "run"]

_Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
_Runs = Callable[[tuple[Any, ...], dict[str, Any]], Any]
#: Arguments of these types hold no tensors, and cannot be changed.
_PLAIN = frozenset({bool, bytes, complex, float, int, str, type(None), torch.dtype, torch.device, torch.Size})


class _Members(NamedTuple):
    """What a block is made of, as far as its forward may read or change it."""

    parameters: list[Tensor]
    #: Each BatchNorm with its running mean, running variance and number of batches.
    statistics: list[tuple[Any, Tensor, Tensor, Tensor | None]]
    #: Other modules that have buffers, with these.
    buffered: list[tuple[torch.nn.Module, list[Tensor]]]
    generators: list[torch.Generator]

    @classmethod
    def of(cls, block: torch.nn.Module) -> _Members:
        statistics: list[Any] = []
        buffered = []
        for module in block.modules():
            buffers = [buffer for buffer in module._buffers.values() if buffer is not None]
            if has_statistics(module):
                names = ("running_mean", "running_var", "num_batches_tracked")
                statistics.append((module, *(module._buffers[name] for name in names)))
            elif buffers:
                buffered.append((module, buffers))
        return cls(list(block.parameters()), statistics, buffered, _C.Parameters(block).generators)

    def is_same(self, other: _Members) -> bool:
        """Whether both are of the same objects."""
        return bool(_ids(self) == _ids(other))


def _ids(value: Any) -> Any:
    return [_ids(each) for each in value] if isinstance(value, (tuple, list)) else id(value)


class StateOfBlock:
    """What is known of a block from call to call."""

    def __init__(self) -> None:
        self.members: _Members | None = None
        #: In training and not: whether a forward was watched for the buffers that it changes.
        self._was_watched: set[bool] = set()

    def __reduce__(self) -> tuple[Any, ...]:
        return StateOfBlock, ()  # a copy of a block has other members

    def is_first(self, block: torch.nn.Module) -> bool:
        """Whether the forward that begins is to be watched for the buffers that it changes."""
        is_first = block.training not in self._was_watched
        self._was_watched.add(block.training)
        return is_first


class _Found:
    """What one forward of a block found."""

    def __init__(self, state: StateOfBlock, block: torch.nn.Module, call: _Call) -> None:
        if state.members is None:
            state.members = _Members.of(block)
        self._block, self._members = block, state.members
        self.num_collectives = rescue.num_collectives()
        self._tensors = _watched(call)
        self._inputs = held_inputs(*call, None) if self._tensors is None else None
        generators = self._members.generators if self._inputs is None else self._inputs.generators
        self._random = _C.capture_generators((torch.default_generator, *devices.used_generators(), *generators))
        self._trackers = random_state.tracker_states() if extensions.around_regions else []
        self._note_buffers(is_first=bool(self._members.buffered) and state.is_first(block))

    def _note_buffers(self, *, is_first: bool) -> None:
        members = self._members
        self._constant, changing = list(members.parameters), []
        for module, buffers in members.buffered:
            if is_first or may_change(module):
                changing.append(module)
            else:
                self._constant += buffers
        self._versions = _versions(self._constant)
        self._is_watched = is_first
        self._buffers = Buffers(changing) if changing else None
        moving = [statistics for statistics in members.statistics if statistics[0].training]
        self._batches = [(count, count._version) for *_, count in moving if count is not None]
        self._statistics = [tensor for _, mean, variance, _ in moving for tensor in (mean, variance)]
        is_on_one_device = len({tensor.device for tensor in self._statistics}) == 1
        # One small kernel. Where their types differ, the widest one holds the values of all.
        self._copies = [torch.cat(self._statistics)] if is_on_one_device else [t.clone() for t in self._statistics]

    def watching(self, function: Callable[[], Any]) -> Any:
        """Run the first forward."""
        if self._buffers is None:
            return function()
        result = (self._buffers.watching(function) if self._is_watched else function)()
        self._buffers.forward_done()
        return result

    def put_back(self) -> str:
        """Put everything back that the forward, which failed, found; return why that cannot be done, empty if it is."""
        if torch_private.innermost_transform() is not None:
            return "it is inside of a transform of torch.func"
        if extensions.capture() is not None:
            return "an extension (that of TransformerEngine, say) carries state through it"
        if not self._members.is_same(_Members.of(self._block)):
            return "its parameters, buffers or generators are not those of its first call"
        if _versions(self._constant) != self._versions:
            return "it had changed a parameter or buffer in place"
        is_changed = any(watched.is_changed() or watched.has_other_memory() for watched in self._tensors or ())
        if is_changed or (self._inputs is not None and not self._inputs.put_back()):
            return "it had changed a tensor that it was given in place"
        if self._buffers is not None and not self._buffers.put_back():
            return "it had changed a buffer in place, and had not done so in its first call"
        self._put_statistics_back()
        self._random.restore()
        for tracker in self._trackers:
            tracker.restore()
        return ""

    def _put_statistics_back(self) -> None:
        with torch.no_grad():
            sizes = [tensor.numel() for tensor in self._statistics]
            copies = self._copies[0].split(sizes) if len(self._copies) == 1 else self._copies
            for tensor, copy in zip(self._statistics, copies, strict=True):
                tensor.copy_(copy)
            for count, version in self._batches:  # each forward of BatchNorm adds 1
                count.sub_(count._version - version)


def _watched(call: _Call) -> list[Watched] | None:
    """Return the tensors among the arguments, None where there may be more than these to look at."""
    function, args, kwargs = call
    found = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if type(value) is Tensor and not value.is_inference():
            found.append(Watched(value))
        elif type(value) not in _PLAIN:
            return None
    return found if isinstance(getattr(function, "__self__", None), torch.nn.Module) else None


def _versions(tensors: list[Tensor]) -> int:
    """Return a number that grows with each version."""
    return sum([tensor._version for tensor in tensors])


def run(forward: CheckpointedForward, args: tuple[Any, ...], kwargs: dict[str, Any], first: _Runs, again: _Runs) -> Any:
    """Run the forward of a block; where it runs out of memory, run it again, once.

    Args:
        first: runs it, with the arguments that it is given.
        again: runs it checkpointed.
    """
    if not config.settings().rescue or torch_private.outer_hooks() is not None or devices.is_capturing():
        return first(args, kwargs)
    found = None
    try:
        found = _Found(forward.state, forward.block, (forward.original(), args, kwargs))
        return found.watching(partial(first, args, kwargs))
    except RuntimeError as error:
        if not rescue.is_out_of_memory(error):
            raise
        why = _why_not(error, found)
        if why:
            _explain(forward, error, f"It did not run again: {why}.")
            raise
        _free_frames(error)
    # Here the error is gone, and what its frames held.
    rescue.empty_caches()
    try:
        result = again(args, kwargs)
    except RuntimeError as error:
        if rescue.is_out_of_memory(error):
            _explain(forward, error, "It ran again, checkpointed, after caches had been emptied, and failed again.")
        raise
    counters.add("rescued_forwards", 1)
    forward.together.rescued(forward.name)
    return result


def _why_not(error: BaseException, found: _Found | None) -> str:
    """Return why a forward that ran out of memory cannot run again; empty if it can, and all is as it found it."""
    if not rescue.may_run_again(error, None if found is None else found.num_collectives):
        return "it had run a collective, which other ranks run once"
    return "" if found is None else found.put_back()


def _explain(forward: CheckpointedForward, error: BaseException, what: str) -> None:
    model = None if forward.together.model is None else forward.together.model()
    name = f"{type(forward.block).__name__} {forward.name!r}"
    rescue.add_text(error, f"actckpt: {name} ran out of memory. {what}")
    explain(error, forward.block if model is None else model, ())


def _free_frames(error: BaseException | None) -> None:
    """Free what the frames of an error hold, also where frames and error hold each other."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__
