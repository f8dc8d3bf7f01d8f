"""A block under a budget whose forward runs out of memory on a device runs once more, checkpointed.

The second attempt starts from the random state and the buffers of the first one. It is not made if that could change
results: if the first attempt changed an input, a parameter, or a buffer for the first time; or if something still holds
a tensor with a graph that it made, for example a list of losses. Reruns have their own second attempt, and with several
ranks `rescue.may_run_again` decides. Python code of the block runs twice.

Noting the state takes some microseconds per call, so calls on a CPU are left out: its allocations hardly ever fail.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Container
from typing import Any

import torch
from torch import Tensor

from actckpt import _C, config
from actckpt._core import devices, random_state, rescue, torch_private
from actckpt._core.storages import tensors_in
from actckpt._core.tensor_changes import own_copy, version_of
from actckpt.errors import RerunMismatchError

__all__ = ["SecondAttempts"]


class SecondAttempts:
    """Runs the forward of one block, and again if it runs out of memory."""

    def __init__(self) -> None:
        #: id() of modules that changed their buffers in an earlier call: copies are made before the next ones.
        self._changing: set[int] = set()

    def run(
        self,
        block: torch.nn.Module,
        call: tuple[tuple[Any, ...], dict[str, Any]],
        first: Callable[[], Any],
        second: Callable[[], Any],
        explain: Callable[[RuntimeError], None],
    ) -> Any:
        """Return what `first` returns, or `second` if `first` runs out of memory.

        Args:
            call: positional and keyword arguments of the block.
            explain: adds to an error that is raised what holds the memory.
        """
        state = self._noted(block, call)
        try:
            result = first()
        except RuntimeError as error:
            if state is None or not state.allows_second_attempt(error):
                explain(error)
                raise
            failed = error
        else:
            if state is not None:
                self._changing.update(map(id, state.changed_modules()))
            return result
        _free_frames(failed)  # they hold what the first attempt made
        if state.has_left_tensors():
            explain(failed)
            raise failed
        rescue.release_caches("rescued_forwards")
        state.put_back()
        try:
            return second()
        except RuntimeError as error:
            rescue.add_first_error(error, str(failed))
            explain(error)
            raise

    def _noted(self, block: torch.nn.Module, call: tuple[tuple[Any, ...], dict[str, Any]]) -> _State | None:
        if not _may_run_twice(call):
            return None
        try:
            return _State(block, call, self._changing)
        except RuntimeError as error:
            if rescue.is_out_of_memory(error):  # there is no room for copies of buffers
                return None
            raise


def _free_frames(error: BaseException | None) -> None:
    while error is not None:
        error.__traceback__ = None
        error = error.__context__


def _may_run_twice(call: tuple[tuple[Any, ...], dict[str, Any]]) -> bool:
    first = next(tensors_in(call), None)
    if first is None or first.is_cpu or devices.counting(first.device) is None:
        return False
    return config.settings().rescue and not _C.is_rerunning() and not devices.is_capturing()


class _State:
    """What a call may change, noted before it runs."""

    def __init__(
        self,
        block: torch.nn.Module,
        call: tuple[tuple[Any, ...], dict[str, Any]],
        changing: Container[int],
    ) -> None:
        self._block, self._call = block, call
        self._began_at = torch_private.next_sequence_number()
        self._operations = rescue.num_operations()
        self._inputs = [(tensor, version_of(tensor)) for tensor in tensors_in(call)]
        self._parameters = _C.Parameters(block)
        self._parameters.forward_done()  # from now on they must not change
        self._buffers = [
            (module, name, buffer, version_of(buffer), own_copy(buffer) if id(module) in changing else None)
            for module in self._parameters.buffered
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        args, kwargs = call
        passed = (each for each in (*args, *kwargs.values()) if isinstance(each, torch.Generator))
        generators = random_state.generators_of_call(tuple(tensor for tensor, _ in self._inputs))
        self._random = random_state.capture((*generators, *passed, *self._parameters.generators))
        self._trackers = random_state.tracker_states()

    def changed_modules(self) -> set[torch.nn.Module]:
        """Return the modules whose buffers changed."""
        return {
            module
            for module, name, buffer, version, _ in self._buffers
            if module._buffers.get(name) is not buffer or version_of(buffer) != version
        }

    def allows_second_attempt(self, error: RuntimeError) -> bool:
        """Return whether an error is of memory, and what the call has changed can be put back."""
        if not rescue.may_run_again(error, self._operations):
            return False
        now = [(tensor, version_of(tensor)) for tensor in tensors_in(self._call)]
        are_same = len(now) == len(self._inputs) and all(
            one is other and version == before
            for (one, version), (other, before) in zip(now, self._inputs, strict=True)
        )
        copied = {module for module, _, _, _, copy in self._buffers if copy is not None}
        return are_same and self._are_parameters_same() and self.changed_modules() <= copied

    def _are_parameters_same(self) -> bool:
        try:
            return not self._parameters.check()
        except RerunMismatchError:  # one was written to
            return False

    def has_left_tensors(self) -> bool:
        """Return whether Python objects of the first attempt's graph are alive. Its frames must be gone."""
        gc.collect()
        tensors = (each for each in gc.get_objects() if issubclass(type(each), Tensor))
        nodes = (node for tensor in tensors if (node := torch_private.node_of(tensor)) is not None)
        # Each thread numbers its own nodes, so those of other threads may have larger numbers, too.
        return any(torch_private.sequence_number(node) >= self._began_at and self._leads_here(node) for node in nodes)

    def _leads_here(self, node: Any) -> bool:
        """Return whether a graph contains parameters or inputs of the call."""
        inputs = [tensor for tensor, _ in self._inputs]
        leaves = set(map(id, (*inputs, *self._block.parameters())))
        made = [found for tensor in inputs if (found := torch_private.node_of(tensor)) is not None]
        seen, left = {node}, [node]
        while left:
            node = left.pop()
            if node in made or id(getattr(node, "variable", None)) in leaves:
                return True
            new = {before for before, _ in node.next_functions if before is not None} - seen
            seen |= new
            left += new
        return False

    def put_back(self) -> None:
        """Restore random state and buffers."""
        self._random.restore()
        for tracker in self._trackers:
            tracker.restore()
        for module, name, buffer, _, copy in self._buffers:
            if copy is not None:
                buffer.data.copy_(copy)  # `.data`, since an earlier call may have saved it at its version
                module._buffers[name] = buffer
