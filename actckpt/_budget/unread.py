"""Forwards with gradients that no backward reads.

NOTE [ Forwards without backward ]

Rule 1. A plan is made after a backward. Where none comes, blocks stay checkpointed, and nobody would know why: mostly
        it is evaluation or generation without `torch.no_grad`, or a loss that was detached. It is told once, where the
        next forward begins.
Rule 2. A forward counts when its graph has gone without a backward, and 16 such forwards in a row are told: a few are
        usual (sizes that are tried, operators that are counted, a batch that is skipped), and any backward of the model
        begins anew. To graphs that are alive a backward may come, as it does with micro-batches whose losses are summed
        up, in episodes of reinforcement learning, and in pipelines: those are not told.
Rule 3. Only numbers are held.
"""

from __future__ import annotations

from actckpt._core.sites import warn_user

__all__ = ["UnreadForwards"]

_MOST_DROPPED = 16
_UNREAD = (
    "apply: {} forwards in a row of a {} with a budget ran with gradients, and no backward followed that came to what "
    "they returned. Without one no plan is made, and what they save is for nothing. Run evaluation and generation "
    "under torch.no_grad(); in training call backward on a loss of what the model returns. Told once."
)


class UnreadForwards:
    """Counts the forwards of a model since its last backward."""

    def __init__(self) -> None:
        self._num_dropped = 0
        self._is_told = False

    def check(self, model_name: str) -> None:
        """A forward begins: warn, once, where too many before it had no backward."""
        if not self._is_told and self._num_dropped >= _MOST_DROPPED:
            self._is_told = True
            warn_user(_UNREAD.format(self._num_dropped, model_name))

    def forward_dropped(self) -> None:
        """Its graph has gone without a backward."""
        self._num_dropped += 1

    def backward_ended(self) -> None:
        """A backward came to a forward."""
        self._num_dropped = 0
