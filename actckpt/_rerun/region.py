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
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import CellType
from typing import Any, Literal

from torch import Tensor

from actckpt import _C
from actckpt._core import extensions, messages, pressure, random_state, state
from actckpt._core.functions import EMPTY_CELL, contents_of
from actckpt._rerun.audit import RerunAudit
from actckpt._rerun.inputs import Inputs
from actckpt._rerun.module_state import modules_as_found, reads_checked
from actckpt.errors import ActckptError

__all__ = ["Region", "failure", "mismatch_error", "rerun_in_python"]


class Region:
    """The state that reruns need of a region that C++ does not run on its own (csrc/rerun/region.h)."""

    __slots__ = (
        "carried",
        "forward_context",
        "inputs",
        "random",
        "rerun_context",
        "restored",
        "state",
        "trace",
    )

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self.state = state.capture()
        #: None: reruns do not restore random state.
        self.random: random_state.RandomState | None = None
        #: State that extensions carry from the forward into reruns.
        self.carried = extensions.capture()
        #: The contexts of `context_fn`.
        self.forward_context: AbstractContextManager[Any] | None = None
        self.rerun_context: AbstractContextManager[Any] | None = None
        #: Inputs of the current rerun.
        self.restored: Sequence[Any] = ()
        #: Operators of forward and rerun, for `debug=True`.
        self.trace: messages.Trace | None = None

    def run(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        early_stop: bool,
        check_metadata: bool,
        audit: RerunAudit | Literal[False] | None = None,
    ) -> Any:
        """Run the forward: saved tensors become slots, which hold no data."""
        if self.forward_context is not None or self.carried is not None:
            function = partial(self._run_in_contexts, function)
        function = self.inputs.watching(function)
        if self.random is not None:
            swap = self.random.outer_swap
        else:
            swap = _C.current_swap() if self.inputs.is_swapped else -1
        result = _C.run(self, function, args, kwargs, early_stop, check_metadata, swap, audit)
        self.inputs.forward_done()
        return result

    def _run_in_contexts(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with (
            self.carried.forward() if self.carried is not None else nullcontext(),
            self.forward_context or nullcontext(),
        ):
            return function(*args, **kwargs)
        raise RuntimeError(
            f"The forward context of context_fn suppressed an exception that "
            f"{self.inputs.name} raised; there is no result to return. Let the context "
            "pass exceptions on."
        )

    def rerun(self, recomputed: "_C.RecomputedValues") -> None:
        """Call the function under the state of its forward, until all needed values are restored."""
        if self.carried is not None and not self.carried.allows_early_stop():
            recomputed.run_to_the_end()
        is_checked = recomputed.frame.metadata_is_checked
        if is_checked:
            self.inputs.parameters.check(may_be_replaced=True)
        restored = self.inputs.restore()
        function, args, kwargs = restored.call
        self.restored = restored.tensors
        try:
            with (
                self.random.swapped_in() if self.random is not None else nullcontext(),
                state.restored(self.state, state.capture()),
                self.carried.rerun() if self.carried is not None else nullcontext(),
                self.rerun_context or nullcontext(),
                _filled(restored.cells),
                self.inputs.as_found(checks=is_checked),
            ):
                _C.rerun(recomputed, function, args, kwargs)
                if recomputed.has_failed:
                    raise _Failed
        except _Failed:
            pass  # C++ raises the error
        finally:
            self.restored = ()


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


def rerun_in_python(recomputed: "_C.RecomputedValues") -> None:
    """Rerun a region; called from C++ if it cannot do that itself."""
    frame = recomputed.frame
    if frame.region is not None:
        frame.region.rerun(recomputed)
        return
    # C++ ran its forward, but it draws random numbers, or global state or its modules differ now.
    args = _C.restore_inputs(frame.args)
    with (
        random_state.swapped_in(frame.random) if frame.random is not None else nullcontext(),
        state.restored(frame.state, state.capture()),
        modules_as_found(frame.parameters, frame.buffers) as stale,
        reads_checked(stale if frame.metadata_is_checked else [], messages.name_of(frame.function)),
    ):
        _C.rerun(recomputed, frame.function, args, {})


def mismatch_error(recomputed: "_C.RecomputedValues", index: int, tensor: Tensor, problem: str) -> ActckptError | None:
    """Return the error for a mismatch that the pack hook found, None if it is harmless (Rule 5)."""
    if problem == "version":
        base = tensor._base if tensor._is_view() and tensor._base is not None else tensor
        region = recomputed.frame.region
        restored = region.restored if region is not None else ()
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
