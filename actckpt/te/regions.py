"""TransformerEngine's state around the forward and the reruns of a region.

- The recompute flags are set as te.checkpoint sets them, and the previous values are restored. After a nested region
  the outer one is still marked, even if the nested one is TransformerEngine's own.
- Entries that modules queue in a region's forward (their scales, with delayed scaling) are moved from
  TransformerEngine's queues to the region. A rerun sees them in its own queues. So regions may be rerun in any order,
  several times, or never, and leave nothing behind.
- A region inside an outer one also leaves the entries to the outer one. Inside an outer rerun it keeps what its modules
  took from the outer region's queues. Entries queued inside a te.checkpoint stay in the queues: te.checkpoint takes
  them.
- Each rerun must take exactly the entries that the forward queued, else it used other scales and raises. So a rerun
  with entries does not stop early.
- The FP8 state is the one that te.autocast sets, by value, with the depth increased by one. So an autocast inside the
  function does not update scales a second time when it ends.
- The generators of the current tracker are restored automatically. A tracker that holds bytes instead (Megatron's own,
  or before torch had graph-safe generators) must be registered or passed: TransformerEngine only has copies of them.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from actckpt._core.extensions import Extension, Tracker
from actckpt.errors import TransformerEngineError
from actckpt.te.internals import Internals
from actckpt.te.modules import ModulesInRerun
from actckpt.te.offloadable import Staying

__all__ = ["Provider", "RegionState"]

#: A queued copy: [amax history, scale].
_Entry = Any


class RegionState:
    """State that a region carries from its forward into its reruns."""

    __slots__ = ("autocast", "entries", "first_module_flags", "num_casts")

    def __init__(self, autocast: tuple[Any, ...]) -> None:
        self.autocast = autocast
        #: As found by a rerun that keeps its graph.
        self.first_module_flags: list[Any] = []
        #: By index of the queue.
        self.entries: dict[int, list[_Entry]] = {}
        #: Number of weight casts made until the forward ended.
        self.num_casts = 0


class _Queue(deque):  # type: ignore[type-arg]
    """A module's entries during one rerun."""

    def popleft(self) -> Any:
        if not self:
            raise _wrong_entries("a module looks for more of them")
        return super().popleft()


class Provider(Extension):
    """The extension for a loaded TransformerEngine."""

    def __init__(self, te: Internals) -> None:
        self.te = te
        self._generators = _ActiveGenerators(te)
        self._staying = Staying(te)
        #: Per open forward: entries that belong to a te.checkpoint inside, by id.
        self._open: list[dict[int, _Entry]] = []
        self._reruns: list[ModulesInRerun] = []
        self._num_casts = 0
        te.watch(self)

    def capture(self) -> RegionState:
        """Called before the forward."""
        return RegionState(self.te.autocast)

    @contextmanager
    def forward(self, state: RegionState, /, *, keeps_graph: bool = True) -> Iterator[None]:
        """Entered around the forward.

        Args:
            keeps_graph: whether the graph of the forward is used for backward.
        """
        te = self.te
        outer = te.flags
        before = [tuple(queue) for queue in te.queues]
        firsts = list(te.first_module_flags)
        owned: dict[int, _Entry] = {}
        te.flags = (True, outer[1])
        self._open.append(owned)
        try:
            yield
        finally:
            self._open.pop()
            te.flags = outer
            state.num_casts = self._reruns[-1].num_casts if self._reruns else self._num_casts
            if not keeps_graph:
                te.first_module_flags[:] = firsts
                for outer_owned in self._open:
                    for key in owned:
                        outer_owned.pop(key, None)
                owned = {}
            if outer[1]:
                state.entries = _gone(before, te.queues)
            else:
                state.entries = _added(before, te.queues)
                if not outer[0]:
                    _remove(te.queues, state.entries, owned)

    @contextmanager
    def rerun(self, state: RegionState, /, *, keeps_graph: bool = False) -> Iterator[None]:
        """Entered around each rerun.

        Args:
            keeps_graph: whether backward uses the graph of the rerun.
        """
        te = self.te
        flags, autocast, depth, queues = te.flags, te.autocast, te.autocast_depth, te.queues
        state.first_module_flags = list(te.first_module_flags)
        places = max(len(queues), *(place + 1 for place in state.entries), 0)
        te.queues = [_Queue(state.entries.get(place, ())) for place in range(places)]
        te.flags = (True, True)
        te.autocast = state.autocast
        te.autocast_depth = depth + 1
        modules = ModulesInRerun(te, state.num_casts)
        self._reruns.append(modules)
        try:
            yield
            self._check_all_taken(te.queues)
            if state.entries:
                modules.check_casts()
        except BaseException as error:
            modules.abandon()
            if isinstance(error, KeyError) and error.args and error.args[0] in te.queue_keys:
                raise _wrong_entries("a module that put nothing aside looks for one") from error
            raise
        finally:
            self._reruns.pop()
            modules.put_back()
            # Queues that a module created in the rerun keep their indices.
            queues.extend(deque() for _ in range(len(te.queues) - len(queues)))
            te.queues, te.flags, te.autocast, te.autocast_depth = queues, flags, autocast, depth
            if not keeps_graph:
                te.first_module_flags[:] = state.first_module_flags

    def allows_early_stop(self, state: RegionState, /) -> bool:
        """Whether a rerun may stop before the function returns."""
        return not state.entries

    def tracker(self) -> Tracker:
        """The current generators."""
        return self._generators

    def excludes_from_offload(self, tensor: torch.Tensor, /) -> bool:
        """Whether a tensor must not be offloaded; see `offloadable`."""
        return self._staying.excludes_from_offload(tensor)

    @contextmanager
    def backward(self, state: RegionState, /, *, is_update_due: bool) -> Iterator[None]:
        """Entered around the backward of a rerun's graph, in which every FP8 module takes itself for the first.

        Args:
            is_update_due: whether one of them was the first in the forward.
        """
        try:
            with self.te.no_backward_updates():
                yield
        finally:  # a te.checkpoint in which nothing was needed has left its flag
            self.te.first_module_flags[:] = state.first_module_flags
        if is_update_due:
            self.te.update_backward_scales()

    def is_update_due(self, state: RegionState, /) -> bool:
        """Whether an FP8 module of the last forward was the first of its autocast."""
        return self.te.is_first_module(state.autocast) and not self.te.is_first_module(self.te.autocast)

    @staticmethod
    def _check_all_taken(queues: list[Any]) -> None:
        left = sum(len(queue) for queue in queues)
        if left:
            raise _wrong_entries(f"{left} were left or added")

    @property
    def is_rerunning(self) -> bool:
        """Whether a rerun is active."""
        return bool(self._reruns)

    def module_begins(self, module: torch.nn.Module, inp: torch.Tensor) -> None:
        """Called before a module's forward."""
        if self._reruns:
            self._reruns[-1].module_begins(module, inp)

    def cast_begins(self, tensor: torch.Tensor) -> None:
        """Called before a cast of a weight is made in place."""
        if self._reruns:
            self._reruns[-1].cast_begins(tensor)
        else:
            self._num_casts += 1
            ModulesInRerun.note_cast(tensor, self._num_casts)

    def nested(self) -> Callable[[bool], None] | None:
        """Called before a te.checkpoint's forward or recompute; see `Watcher`."""
        if not self._open and not self._reruns:
            return None
        te = self.te
        outer = te.flags
        before = [tuple(queue) for queue in te.queues]

        def entered_or_left(entered: bool) -> None:
            if entered:
                if outer[1]:
                    te.flags = outer
                return
            te.flags = outer
            if outer == (True, False):
                added = {id(entry): entry for entries in _added(before, te.queues).values() for entry in entries}
                for owned in self._open:
                    owned.update(added)

        return entered_or_left

    def ops_begin(self, fuser: Any, ops: list[Any]) -> None:
        """Called before fused te.ops, which queue no copies of their scales."""
        if self._reruns:
            self._reruns[-1].ops_begin(fuser, ops)
        if (self._open or self._reruns) and any(self.te.has_delayed_scales(op) for op in ops):
            names = ", ".join(type(op).__name__ for op in ops)
            raise TransformerEngineError(
                f"te.ops with delayed scaling (or a custom recipe) inside a region ({names}): "
                f"TransformerEngine {self.te.version} keeps no copy of their scales, so a rerun would use later "
                "ones and compute other gradients.\nTake them out of the region, use modules instead of te.ops, or "
                "use Float8CurrentScaling."
            )

    def close(self) -> None:
        """Undo all changes to TransformerEngine."""
        self.te.unwatch()


class _ActiveGenerators:
    """The generators of TransformerEngine's current tracker, as a tracker."""

    def __init__(self, te: Internals) -> None:
        self._te = te

    def get_states(self) -> dict[Any, Any]:
        """Return the generators by name."""
        states = self._te.rng_states
        return {name: state for name, state in states.items() if isinstance(state, torch.Generator)}

    def set_states(self, states: dict[Any, Any], /) -> None:
        """Do nothing: the generators have been written to, and the tracker holds the same ones."""


def _added(before: list[tuple[_Entry, ...]], queues: list[Any]) -> dict[int, list[_Entry]]:
    """Return the entries that were added to the queues."""
    added = {}
    for place, queue in enumerate(queues):
        known = {id(entry) for entry in before[place]} if place < len(before) else set()
        new = [entry for entry in queue if id(entry) not in known]
        if new:
            added[place] = new
    return added


def _gone(before: list[tuple[_Entry, ...]], queues: list[Any]) -> dict[int, list[_Entry]]:
    """Return the entries that were removed from the queues."""
    return _added([tuple(queue) for queue in queues], list(before))


def _remove(queues: list[Any], entries: dict[int, list[_Entry]], owned: dict[int, _Entry]) -> None:
    for place, taken in entries.items():
        ids = {id(entry) for entry in taken} - owned.keys()
        kept = [entry for entry in queues[place] if id(entry) not in ids]
        queues[place].clear()
        queues[place].extend(kept)


def _wrong_entries(how: str) -> TransformerEngineError:
    return TransformerEngineError(
        f"A rerun does not use the FP8 scales that its forward put aside: {how}.\nIt would compute other gradients. "
        "Known causes: LayerNormMLP(checkpoint=True) with delayed scaling inside a region (turn it off there, the "
        "region does the same); modules that ran under another recipe between forward and backward; modules in eval "
        "mode with delayed scaling and a TransformerEngine before 2.20.2."
    )
