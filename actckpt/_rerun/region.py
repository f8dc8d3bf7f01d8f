"""Rerun: a region's dropped tensors are restored by calling its function again.

NOTE [ Rerun ]

This is non-reentrant checkpointing, as in torch.utils.checkpoint, with the bookkeeping of saved tensors in C++
(csrc/rerun/frame.h). It differs from torch as follows.

Rule 1. A rerun stops as soon as the last saved tensor that autograd still holds is back, not the last one of the
forward. It stops by a BaseException, which `except Exception` does not catch.
Rule 2. A value leaves the frame at its first unpack. If it is read a second time in the same backward
(`ctx.saved_tensors` read twice), one more rerun restores the values, and they stay until the end of that backward.
Rule 3. Values that a backward did not use are dropped when it ends or fails (csrc/core/task_end.h). Values released
under memory pressure (NOTE [ Pressure ]) are restored by one more rerun, which skips what was already unpacked. Under a
GraphExecGroup, values stay for its later backwards, unless one fails.
Rule 4. Reruns of one region are serialized by its lock. A thread that waited finds the values.
Rule 5. Each saved tensor must be restored with the same shape, dtype, device and, for parameters, version. Hooks
disable autograd's own version check; this replaces it.
Rule 6. Lock order: an outer region's lock may be taken while an inner one's is held (inputs come from outside), never
the other way round.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from types import CellType
from typing import Any

from torch import Tensor

from actckpt import _C
from actckpt._core import extensions, messages, pressure, random_state, state, torch_private
from actckpt._core.functions import EMPTY_CELL, contents_of
from actckpt._rerun.buffers import Stale
from actckpt._rerun.inputs import Call, Restored
from actckpt._rerun.module_state import modules_as_found, reads_checked
from actckpt._rerun.packed import held_inputs
from actckpt.errors import ActckptError

__all__ = ["Region", "failure", "mismatch_error", "rerun_in_python"]


class Region:
    """What reruns need that C++ does not hold: other inputs than plain arguments of a module, trackers and contexts.

    C++ (csrc/rerun/region.h) reads `generators`, `modules` and `is_swapped`, and calls `forward_done` and `restore`.

    Args:
        call: function, positional and keyword arguments.
        hooks: (pack, unpack) for tensors of the call where no hooks are active outside; None: they are held directly.
        get_trackers: return random state trackers, besides those of extensions.
        restores_random: whether reruns restore the states of trackers.
    """

    __slots__ = ("carried", "forward_context", "generators", "inputs", "modules", "rerun_context", "trace", "trackers")

    def __init__(
        self,
        call: Call,
        hooks: torch_private.Hooks | None,
        get_trackers: Sequence[random_state.GetTracker],
        *,
        restores_random: bool,
    ) -> None:
        self.inputs = inputs = held_inputs(*call, hooks, random_state.known_trackers(get_trackers))
        self.modules = inputs.modules
        self.generators = (*random_state.generators_of_region(inputs.devices), *inputs.generators)
        self.trackers = random_state.tracker_states(get_trackers) if restores_random else []
        #: State that extensions carry from the forward into reruns.
        self.carried = extensions.capture()
        #: The contexts of `context_fn`.
        self.forward_context: AbstractContextManager[Any] | None = None
        self.rerun_context: AbstractContextManager[Any] | None = None
        #: Operators of forward and rerun, for `debug=True`.
        self.trace: messages.Trace | None = None

    @property
    def is_swapped(self) -> bool:
        """Whether reruns change containers."""
        return self.inputs.has_containers

    def forward_of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return what the forward calls: the function, in its contexts."""
        has_contexts = self.forward_context is not None or self.carried is not None
        return partial(self._run_in_contexts, function) if has_contexts else function

    def _run_in_contexts(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with (
            self.carried.forward() if self.carried is not None else nullcontext(),
            self.forward_context or nullcontext(),
        ):
            return function(*args, **kwargs)
        raise RuntimeError(
            f"The forward context of context_fn suppressed an exception that "
            f"{messages.name_of(function)} raised; there is no result to return. Let the context "
            "pass exceptions on."
        )

    def forward_done(self) -> None:
        """Record what the forward changed in the inputs."""
        self.inputs.forward_done()

    def restore(self) -> Restored:
        """Return the inputs of one rerun."""
        restored = self.inputs.restore()
        has_contexts = bool(self.trackers) or self.carried is not None or self.rerun_context is not None
        restored.is_plain = not (has_contexts or self.is_swapped or restored.cells or restored.stale)
        return restored

    @contextmanager
    def around_rerun(self, recomputed: "_C.RecomputedValues") -> Iterator[None]:
        """Run the body, of a rerun, in the region's contexts, with containers and closures as before the forward."""
        if self.carried is not None and not self.carried.allows_early_stop():
            recomputed.run_to_the_end()
        with (
            self.carried.rerun() if self.carried is not None else nullcontext(),
            self.rerun_context or nullcontext(),
            _filled(recomputed.restored.cells),
            self.inputs.with_containers(),
        ):
            yield


@contextmanager
def _filled(cells: Sequence[tuple[CellType, Any]]) -> Iterator[None]:
    """Run the body with these contents of closure cells (NOTE [ Inputs of a region ], Rule 2)."""
    outside = [(cell, contents_of(cell)) for cell, _ in cells]
    try:
        _fill(cells)
        yield
    finally:
        _fill(outside)


def _fill(cells: Sequence[tuple[CellType, Any]]) -> None:
    for cell, value in cells:
        if value is EMPTY_CELL:
            del cell.cell_contents
        else:
            cell.cell_contents = value


class _Failed(BaseException):
    """Ends a rerun whose mismatch user code has caught, so that contexts see a failure."""


def rerun_in_python(
    recomputed: "_C.RecomputedValues",
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
) -> None:
    """Call the function of a region under the state of its forward; called from C++ if that needs Python."""
    frame = recomputed.frame
    region: Region | None = frame.region
    stale: list[Stale] = []
    try:
        with ExitStack() as stack:
            if frame.random is not None:
                trackers = region.trackers if region is not None else ()
                stack.enter_context(random_state.swapped_in(frame.random, trackers))
            stack.enter_context(state.restored(frame.state, state.capture()))
            stale += stack.enter_context(modules_as_found(frame.parameters, frame.buffers))
            if region is not None:
                stack.enter_context(region.around_rerun(recomputed))
                stale += recomputed.restored.stale
            is_checked = frame.metadata_is_checked
            stack.enter_context(reads_checked(stale if is_checked else [], messages.name_of(frame.function)))
            _C.rerun(recomputed, function, args, kwargs or {})
            if recomputed.has_failed:
                raise _Failed
    except _Failed:
        pass  # C++ raises the error


def mismatch_error(recomputed: "_C.RecomputedValues", index: int, tensor: Tensor, problem: str) -> ActckptError | None:
    """Return the error for a mismatch that the pack hook found, None if it is harmless (Rule 5)."""
    if problem == "version":
        base = tensor._base if tensor._is_view() and tensor._base is not None else tensor
        restored = recomputed.restored.tensors if recomputed.restored is not None else ()
        if not (base.is_leaf and base.requires_grad) or any(base is known for known in restored):
            return None
    return messages.mismatch(recomputed, index, tensor, problem)


def failure(what: "_C.RecomputedValues | _C.Frame") -> BaseException:
    """Return the error of a rerun that failed, or that did not restore a tensor."""
    if isinstance(what, _C.Frame):
        return messages.not_saved(what)
    region = what.frame.region
    error = what.error if what.error is not None else messages.fewer_saved(what)
    return messages.traced(error, region.trace) if region is not None and region.trace is not None else error


pressure.register("rerun values", _C.release_rerun_values)
