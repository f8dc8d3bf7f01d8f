"""What a program computes from the outputs of a model, and how much memory that is taken to need.

NOTE [ Loss ]

Rule 1. When backward comes to the first of the outputs, its graph shows what a program computed from which of them. It
        is walked from what backward began with, to nodes that were made before the forward of the model had ended;
        what these nodes needed is told by them (NOTE [ The graph of a loss ]).
Rule 2. Of outputs that backward begins with, or does not come to, once their bytes are taken to be needed: their
        gradients, and what is computed without any.
Rule 3. The graph is not known where another forward of the model began before that backward had ended, as both may lead
        to one loss; where backward is asked to retain the graph, as another one may follow; where the loss was made in
        another thread, or several threads run backward; and where the graph is too large to look at. Then what is
        computed from each output is taken to need four times its bytes, which is what `outputs.square().mean()` needs,
        and to save them once. So it is, at least, where a `torch.autograd.Function` is in the graph, which does not
        tell what it saved.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

from torch import Tensor

from actckpt._budget.class_names import AFTER
from actckpt._budget.loss_graph import Key, LossBytes, key_of, loss_bytes
from actckpt._budget.measuring import MeasuredStep
from actckpt._budget.outside_graph import MOST_NODES
from actckpt._budget.tensors_since import TensorsSince
from actckpt._core import torch_private
from actckpt._core.storages import storages_of

__all__ = ["Loss"]

#: Times the bytes of an output (Rule 3).
_UNKNOWN = 4


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
        self._tensors = TensorsSince()
        self._outputs = {key_of(each.grad_fn, each.output_nr): each.nbytes for each in outputs}
        self._storages = [
            (key_of(each.grad_fn, each.output_nr), id(storage), weakref.ref(storage), storage.nbytes())
            for each in outputs
            for storage in storages_of(each)
        ]
        #: From which outputs something is computed, and what that needs; None: it is not known.
        self._read = set(self._outputs)
        self._found: LossBytes | None = None
        self._is_alone = True
        #: Whether backward was asked to retain the graph, so that another one may follow.
        self.is_retained = False

    def disturb(self) -> None:
        """Another forward of the model begins (Rule 3)."""
        self._is_alone = False

    @torch_private.untraced
    def backward_begins(self) -> None:
        """Backward has come to the first of the outputs, whose hook calls this."""
        roots, self.is_retained = torch_private.backward_roots(), torch_private.keeps_graph()
        if not self._is_alone or roots is None or self.is_retained:
            return
        nodes = self._nodes(roots)
        if nodes is not None and all(self._is_of_loss(root) or self._is_output(root) for root in roots):
            edges = {key_of(*edge) for node in nodes for edge in node.next_functions if edge[0] is not None}
            read = edges & self._outputs.keys()
            if not read and not any(map(self._is_output, roots)):
                return  # they are those of a graph in another thread
            self._read = read
            others = {number for _, number, storage, _ in self._storages if storage() is not None}
            self._found = loss_bytes(nodes, self._gone(), self._tensors, self._made, others)

    def _nodes(self, roots: list[Any]) -> set[Any] | None:
        """Return the nodes of what was computed from outputs, None where there are too many."""
        found, left = set[Any](), [node for node in roots if self._is_of_loss(node)]
        while left:
            node = left.pop()
            if node in found:
                continue
            if len(found) == MOST_NODES:
                return None
            found.add(node)
            left += [each for each, _ in node.next_functions if each is not None and self._is_of_loss(each)]
        return found

    def _is_of_loss(self, node: Any) -> bool:
        return torch_private.sequence_number(node) >= self._made and type(node).__name__ != "AccumulateGrad"

    def _is_output(self, node: Any) -> bool:
        return torch_private.sequence_number(node) in {number for number, _ in self._outputs}

    def _gone(self) -> dict[Key, int]:
        """Return the bytes of outputs that do not exist any more, each storage once."""
        once = {number: (key, storage, nbytes) for key, number, storage, nbytes in self._storages}
        return {key: nbytes for key, storage, nbytes in once.values() if storage() is None}

    @property
    def held_bytes(self) -> float:
        """Bytes of what the program computed from outputs and holds while the model runs backward."""
        return self._found.held if self._is_alone and self._found is not None else 0.0

    def added(self, measured: MeasuredStep) -> MeasuredStep:
        """Return a step that was measured up to the end of its forward with what is computed from the outputs."""
        outputs_bytes = sum(self._outputs.values())
        if self._is_alone and self._found is not None:
            nbytes = self._found.needed + sum(self._outputs[key] for key in self._outputs.keys() - self._read)
            saved_bytes = self._held_bytes + self._found.saved
            if not self._found.is_complete:
                nbytes = max(nbytes, _UNKNOWN * outputs_bytes)
        else:
            nbytes, saved_bytes = float(_UNKNOWN * outputs_bytes), self._held_bytes + outputs_bytes
        head = measured.costs.classes[AFTER]
        own_bytes = head.working_set_bytes + self.held_bytes
        more_bytes = max(self._held_bytes + nbytes - own_bytes, 0.0)
        classes = {**measured.costs.classes, AFTER: dataclasses.replace(head, working_set_bytes=own_bytes + more_bytes)}
        costs = dataclasses.replace(measured.costs, classes=classes)
        found = dataclasses.replace(measured, costs=costs, saved_after_blocks_bytes=saved_bytes)
        return dataclasses.replace(found, loss_more_bytes=more_bytes)
