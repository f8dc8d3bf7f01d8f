"""What a program computes from the outputs of a model, and how much memory that is taken to need.

NOTE [ Loss ]

Rule 1. What a program computes from an output, and backward goes through, is taken to need four times the bytes of the
        output, which is what `outputs.square().mean()` needs. Of the others, which backward begins with or does not
        come to, once their bytes are taken to be needed: their gradients, and what is computed without any. Once
        their bytes are taken to be saved for backward of those that are read.
Rule 2. Which is which shows when backward comes to the first of the outputs. The graph is walked from what it began
        with, to nodes that were made before the forward of the model had ended.
Rule 3. It is not known where another forward of the model began before that backward had ended, as both may lead to one
        loss; where backward is asked to retain the graph, as another one may follow; where it began elsewhere than in
        this thread; and where the graph is too large to look at. Then something is taken to be computed from all
        outputs.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from actckpt._budget.class_names import AFTER
from actckpt._budget.measuring import MeasuredStep
from actckpt._budget.outside_graph import MOST_NODES
from actckpt._core import torch_private

__all__ = ["Loss"]

#: Number of a node, which does not hold the graph as a node would, and which of its results a tensor is.
_Key = tuple[int, int]
#: Times the bytes of an output (Rule 1).
_READ, _NOT_READ = 4, 1


class Loss:
    """What is computed from the outputs of one forward of a model."""

    def __init__(self, outputs: list[Tensor], held_bytes: float) -> None:
        """Begin where the forward ends.

        Args:
            outputs: those with a graph.
            held_bytes: of what lives there and was made after the last block had ended.
        """
        self._held_bytes = held_bytes
        self._made = torch_private.next_sequence_number()
        self._outputs = {_key(each.grad_fn, each.output_nr): each.nbytes for each in outputs}
        #: From which outputs something is computed.
        self._read = set(self._outputs)
        self._is_alone = True

    def disturb(self) -> None:
        """Another forward of the model begins (Rule 3)."""
        self._is_alone = False

    @torch_private.untraced
    def backward_begins(self) -> None:
        """Backward has come to the first of the outputs, whose hook calls this."""
        roots = torch_private.backward_roots()
        if self._is_alone and roots is not None and not torch_private.keeps_graph():
            self._read = self._read_from(roots)

    def _read_from(self, nodes: list[Any]) -> set[_Key]:
        found, seen, left = set[_Key](), set[Any](), [node for node in nodes if self._is_of_loss(node)]
        while left:
            node = left.pop()
            if node in seen:
                continue
            if len(seen) == MOST_NODES:
                return set(self._outputs)
            seen.add(node)
            edges = [edge for edge in node.next_functions if edge[0] is not None]
            found |= {_key(*edge) for edge in edges}
            left += [node for node, _ in edges if self._is_of_loss(node)]
        return found

    def _is_of_loss(self, node: Any) -> bool:
        return torch_private.sequence_number(node) >= self._made and type(node).__name__ != "AccumulateGrad"

    def added(self, measured: MeasuredStep) -> MeasuredStep:
        """Return a step that was measured up to the end of its forward with what is computed from the outputs."""
        read = self._read if self._is_alone else self._outputs
        nbytes = sum(nbytes * (_READ if key in read else _NOT_READ) for key, nbytes in self._outputs.items())
        saved_bytes = self._held_bytes + sum(nbytes for key, nbytes in self._outputs.items() if key in read)
        head = measured.costs.classes[AFTER]
        needed = max(head.working_set_bytes, self._held_bytes + nbytes)
        classes = {**measured.costs.classes, AFTER: dataclasses.replace(head, working_set_bytes=needed)}
        costs = dataclasses.replace(measured.costs, classes=classes)
        return dataclasses.replace(measured, costs=costs, saved_after_blocks_bytes=saved_bytes)


def _key(node: Any, index: int) -> _Key:
    return torch_private.sequence_number(node), index
