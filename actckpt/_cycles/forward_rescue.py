"""A block's forward that runs out of memory under a plan runs once more, with everything recomputed.

The second attempt starts from what the first one started from (`forward_start`): random state, and the buffers that the
block changes. Those are known from the measured cycle, and copied before each call. There is no second attempt

- for a block that no plan may rerun, that changed a parameter in the measured cycle, or that has a buffer whose bytes
  cannot be copied (a subclass, freed memory);
- if an argument or another buffer was changed, or a generator is among the arguments;
- while an extension carries a state through regions (FP8 of TransformerEngine), or a stream is being captured;
- with several ranks, if the first attempt communicated (see `_core/rescue`).

The remaining blocks of the forward recompute everything as well, and the kind of cycle gets a smaller plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from actckpt import config
from actckpt._blocks.applied import CallSettings, CheckpointedForward
from actckpt._budget.running import RECOMPUTE
from actckpt._core import rescue
from actckpt._core.memory_by_module import explain
from actckpt._cycles.forward_start import Arguments, ForwardStart, StateOfBlock, WatchedForward

__all__ = ["ForwardRescue"]

_RECOMPUTED = CallSettings(RECOMPUTE)


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
        #: By name of a block: what its forwards use; None: they must not run twice.
        self._states: dict[str, StateOfBlock | None] = {}

    def measured(self, name: str, watched: WatchedForward, *, is_rerunnable: bool) -> None:
        """A block was measured.

        Args:
            is_rerunnable: whether plans may rerun it.
        """
        state = watched.state() if is_rerunnable else None
        before = self._states.setdefault(name, state)
        if before is None or state is None:
            self._states[name] = None
        else:
            before.add(state)

    def run(
        self,
        forward: CheckpointedForward,
        arguments: Arguments,
        settings: CallSettings,
        run: Callable[[CallSettings], Any],
    ) -> Any:
        """Return `run(settings)`; if that runs out of memory, run it once more, with everything recomputed."""
        try:
            state = self._states.get(forward.name)
            if state is None or not config.settings().rescue:
                return run(settings)
            return self._run_twice(forward.block, ForwardStart(arguments, state), settings, run)
        except RuntimeError as error:
            explain(error, self._model, self._optimizers)
            raise

    def _run_twice(
        self, block: torch.nn.Module, start: ForwardStart, settings: CallSettings, run: Callable[[CallSettings], Any]
    ) -> Any:
        operations = rescue.num_operations()
        try:
            return run(settings)
        except RuntimeError as error:
            if not rescue.may_run_again(error, operations) or not start.can_be_restored(block):
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
