"""How much memory a backward needs in what a program computed from the outputs of a model, by the graph of autograd.

NOTE [ The graph of a loss ]

Rule 1. It is read where backward comes to the first output: by then it has run what is read here, and has released what
        that saved. So sizes are those of gradients, and what a node saved is what its type can save: its result, or all
        that it was given.
Rule 2. Backward runs nodes in the order of their numbers, the last one first. When it runs one, there are: what the
        program holds, what this node and those before it saved, gradients that wait for nodes before it, the gradients
        that it takes and gives, and what it makes on the way (`node_bytes`). What it gives is added to what waits, out
        of place.
Rule 3. What the program holds are the results of which tensors exist, by what Python knows of tensors that were made
        since the forward; and what was computed since and backward does not go through (metrics with gradients on).
        Outputs that it does not hold are gone from where nothing needs them that saved them.
Rule 4. What a node was given that has no gradient (targets, masks, factors) is taken to be as large as the largest
        gradient of that node, and to have been made by the program, where its type can save that; but what matrices are
        multiplied with are weights, which were there before.
Rule 5. Gradients of leaves that are read there (weights of the loss, penalties on those of the model) are there from
        then on.
Rule 6. In the forward each result is made beside what its node was given, and beside all that is saved or held by then.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Set
from typing import Any

from actckpt._budget import node_bytes
from actckpt._budget.tensors_since import TensorsSince
from actckpt._core import torch_private
from actckpt._core.storages import storages_of

__all__ = ["Key", "LossBytes", "key_of", "loss_bytes"]

#: Number of a node, which does not hold the graph as a node would, and which of its results a tensor is.
Key = tuple[int, int]
#: Bytes of a number, which a loss mostly is: they do not count as held.
_NUMBER = 8
#: Where nothing releases it.
_NEVER = -1


@dataclasses.dataclass(frozen=True)
class LossBytes:
    """What is computed from outputs.

    Args:
        needed: the most at once, beside what there was when the forward of the model had ended.
        saved: for its backward, without outputs.
        held: by the program, when backward has come to the outputs, with gradients of leaves.
        is_complete: whether all nodes tell what they saved.
    """

    needed: float
    saved: float
    held: float
    is_complete: bool


def key_of(node: Any, index: int) -> Key:
    """Return what tells a result of a node apart from all others."""
    return torch_private.sequence_number(node), index


def loss_bytes(
    nodes: Iterable[Any], gone: Mapping[Key, int], tensors: TensorsSince, made: int, others: Set[int]
) -> LossBytes:
    """Return what backward needs in some nodes, and the forward that made them.

    Args:
        nodes: all that backward went through before it came to an output.
        gone: the bytes of outputs that do not exist any more.
        tensors: those that were made since the forward of the model had ended, and older ones that Python had no
            objects for.
        made: the number of the first node that was made after that.
        others: ids of storages that are none of a loss: of the outputs.
    """
    found = _Graph(list(nodes), gone)
    found.note_held(tensors, made, others)
    return found.bytes()


class _Graph:
    """Nodes, and which of their results live how long."""

    def __init__(self, nodes: list[Any], gone: Mapping[Key, int]) -> None:
        self._nodes = sorted(nodes, key=torch_private.sequence_number, reverse=True)
        self._numbers = {torch_private.sequence_number(node) for node in nodes}
        self._gone = gone
        #: Results that are memory of their own.
        self._made = {
            key_of(node, index): torch_private.gradient_bytes(node, index)
            for node in self._nodes
            if not node_bytes.is_view(node)
            for index in range(torch_private.num_gradients(node))
        }
        self._held = set[Key]()
        #: Of what the program computed, holds, and runs no backward through; by the id of the storage.
        self._held_beside: dict[int, int] = {}
        #: The number of the last node that backward runs of those that saved a tensor.
        self._until: dict[Key, int] = {}
        for node in self._nodes:
            self._note_saved(node)
        self._constants = self._found_constants()

    def note_held(self, tensors: TensorsSince, made: int, others: Set[int]) -> None:
        """See which results the program holds, and what it computed and holds beside them (Rule 3)."""
        found, is_exact = tensors.found()
        for tensor in found:
            node = torch_private.node_of(tensor)
            if node is None or torch_private.sequence_number(node) < made:
                continue
            storages = {id(storage): storage.nbytes() for storage in storages_of(tensor) if id(storage) not in others}
            key = self._base(node, tensor.output_nr)
            if torch_private.sequence_number(node) in self._numbers and key in self._made:
                self._held.add(key)  # `mse_loss` has its number in the memory of all that it is the mean of
                self._made[key] = max(self._made[key], sum(storages.values()))
            elif is_exact and torch_private.sequence_number(node) not in self._numbers:
                self._held_beside.update(storages)

    def _note_saved(self, node: Any) -> None:
        number = torch_private.sequence_number(node)
        if node_bytes.saves_operands(node):
            self._until.update((self._base(*edge), number) for edge in node.next_functions if edge[0] is not None)
        if node_bytes.saves_result(node):
            for index in range(torch_private.num_gradients(node)):
                self._until[self._base(node, index)] = number

    def _base(self, node: Any, index: int) -> Key:
        """Return the tensor of whose memory a result is a view."""
        while torch_private.sequence_number(node) in self._numbers and node_bytes.is_view(node):
            node, index = next(edge for edge in node.next_functions if edge[0] is not None)
        return key_of(node, index)

    def bytes(self) -> LossBytes:
        """Return what there is at most, and in between."""
        held = sum(nbytes for key, nbytes in self._made.items() if key in self._held and nbytes > _NUMBER)
        beside = sum(nbytes for nbytes in self._held_beside.values() if nbytes > _NUMBER) + self._leaf_bytes()
        saved = sum(nbytes for key, nbytes in self._made.items() if key in self._until) + sum(self._constants.values())
        needed = beside + max(self._forward_bytes(), self._backward_bytes())
        return LossBytes(needed, saved, held + beside, not any(map(node_bytes.is_of_function, self._nodes)))

    def _leaf_bytes(self) -> int:
        """Return the bytes of the gradients of leaves (Rule 5)."""
        edges = (edge for node in self._nodes for edge in node.next_functions if edge[0] is not None)
        found = {edge[0]: torch_private.gradient_bytes(*edge) for edge in edges if node_bytes.is_of_leaf(edge[0])}
        return sum(found.values())

    def _found_constants(self) -> dict[int, int]:
        """Return by the number of a node the bytes of what it saved that has no gradient (Rule 4)."""
        found = dict[int, int]()
        for node in self._nodes:
            edges, number = node.next_functions, torch_private.sequence_number(node)
            sizes = [torch_private.gradient_bytes(*edge) for edge in edges if edge[0] is not None]
            found[number] = node_bytes.beside_bytes(node)
            if len(sizes) < len(edges) and node_bytes.saves_constants(node):
                found[number] += max(sizes)
        return found

    def _forward_bytes(self) -> float:
        found = kept = 0
        for node in reversed(self._nodes):
            kept += self._constants[torch_private.sequence_number(node)]
            new = {key: self._made.get(key, 0) for key in self._results(node)}
            given = {self._base(*edge) for edge in node.next_functions if edge[0] is not None}
            passing = sum(self._made.get(key, 0) for key in given if not self._is_kept(key))
            found = max(found, kept + passing + sum(new.values()))
            kept += sum(nbytes for key, nbytes in new.items() if self._is_kept(key))
        return found

    def _results(self, node: Any) -> list[Key]:
        return [key_of(node, index) for index in range(torch_private.num_gradients(node))]

    def _is_kept(self, key: Key) -> bool:
        return key in self._held or key in self._until

    def _backward_bytes(self) -> float:
        released: defaultdict[int, int] = defaultdict(int)
        for key, nbytes in itertools.chain(self._made.items(), self._gone.items()):
            if key not in self._held:
                released[self._until.get(key, _NEVER)] += nbytes
        live = sum(nbytes for key, nbytes in self._made.items() if self._is_kept(key))
        live += sum(self._constants.values())
        live -= sum(nbytes for key, nbytes in self._gone.items() if key not in self._until)
        waiting: dict[Key, int] = {}
        found = 0 if not self._nodes else -math.inf
        for node in self._nodes:
            for key in self._results(node):
                waiting.pop(key, None)
            others = live + sum(waiting.values())
            running, _ = node_bytes.running_bytes(node)
            found = max(found, others + running, others + self._give(node, waiting))
            number = torch_private.sequence_number(node)
            live -= released[number] + self._constants[number]
        return found

    def _give(self, node: Any, waiting: dict[Key, int]) -> int:
        """Add what a node gives to what waits; return how many bytes there are of it at most, with the largest sum."""
        given, sums = 0, [0]
        shares = node_bytes.gives_what_it_takes(node)
        for edge in node.next_functions:
            if node_bytes.is_of_leaf(edge[0]):
                continue
            key, nbytes = key_of(*edge), torch_private.gradient_bytes(*edge)
            if key in waiting:
                sums.append(nbytes)
            waiting[key] = nbytes if key in waiting or not (shares and given) else 0
            given += nbytes if not (shares and given) else 0
        return given + max(sums)
