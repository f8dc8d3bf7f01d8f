"""The lifetime of a forward's graph."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch

from actckpt import _C
from actckpt._core import torch_private

__all__ = ["ForwardLife", "Held"]


class Held:
    """Held by graph nodes; its death shows that they were freed."""

    def __init__(self, life: ForwardLife) -> None:
        self.life = life


class ForwardLife:
    """Calls `gone(is_read)` once, when the graph of a forward was released by a backward, or dropped.

    A program may drop the outputs while the graph of a gradient (`create_graph=True`) holds the blocks' part of the
    graph. So that is watched too.

    Attributes:
        in_blocks: the object that hooks of the blocks' outputs hold; None: the forward has ended.
    """

    def __init__(self, gone: Callable[[bool], None]) -> None:
        self._gone = gone
        self._is_over = self._is_read = self._are_outputs_gone = False
        self.in_blocks: Held | None = Held(self)
        self._blocks = weakref.ref(self.in_blocks)

    def ends(self, outputs: Iterable[torch.Tensor], reached: Callable[[bool], None]) -> None:
        """The forward has ended.

        Args:
            outputs: those with a graph.
            reached: called with `retains_graph` when a backward reaches one.
        """
        held = Held(self)

        def came(_: torch.Tensor) -> None:
            held.life._is_read = True
            retains_graph = torch_private.keeps_graph()
            reached(retains_graph)
            if not retains_graph:
                _C.when_backward_ends(self._end)

        for output in outputs:
            output.register_hook(came)
        weakref.finalize(held, self._drop).atexit = False
        self.in_blocks = None

    def backward_reaches_block(self, *, retains_graph: bool) -> bool:
        """A backward reached a block; return whether all outputs of the forward were dropped before."""
        if self._are_outputs_gone and not retains_graph:
            _C.when_backward_ends(self._end)
        return self._are_outputs_gone

    def _drop(self) -> None:
        blocks = self._blocks()
        if blocks is None:
            self._end()
        elif not self._is_over:  # their nodes may be freed next
            self._are_outputs_gone = True
            weakref.finalize(blocks, self._end).atexit = False

    def _end(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._gone(self._is_read)
