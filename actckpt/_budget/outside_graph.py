"""What the graph of autograd tells of the parts of a step outside of its blocks: which gradients wait.

NOTE [ Gradients that wait ]

Rule 1. A tensor that several parts of a step read (the skips of a UNet, what an encoder made, a mask that is trained)
        gets its gradient piece by piece: from where backward comes to the last part that reads it to where it comes to
        the part that made it, the sum so far waits. So does the gradient of a parameter that several parts read, as an
        embedding that is tied to the head.
Rule 2. Gradients that are views of another one (of what `cat` and `stack` are given) are no other memory: that whole
        one waits until each of these tensors was made, or got something else: where several read such a tensor, its
        gradient is a sum of its own from the second on.
Rule 3. Numbers of nodes tell what ran when: autograd counts them up in the order of the forward. Positions are those of
        calls of blocks and of what runs between them: 2 l + 1 is call l, 2 l what runs before it.
Rule 4. The graph is walked from the outputs of the model and from what blocks are given, not through blocks: which
        parameters those read, their modules tell. Nor is it walked without end: torch frees nodes that Python has seen
        one inside the other, and some ten thousand in a row need more stack than a thread has. What is not found is
        taken to be read by the head (parameters), or not to wait.
Rule 5. What backward needs there, the graph tells before it has run, also on devices whose allocator tells more of it
        afterwards (NOTE [ The first backward ]): when a node runs, that lives which was made before its operator ran
        and is alive when the forward ends, its result if it saved that, and the gradients that it takes and gives. Once
        it has run, what it gives is added to what waits, out of place: there is the sum, too.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from actckpt._budget import node_bytes
from actckpt._core import torch_private
from actckpt._core.storages import tensors_in
from actckpt._core.subclasses import plain_parts

__all__ = ["MOST_NODES", "OutsideGraph", "Read"]

#: So many nodes are looked at (Rule 4).
MOST_NODES = 5000
#: Of the gradient of a tensor: the node that takes it, or the id of a leaf, and which of its results the tensor is.
_Key = tuple[Any, int]
#: In place of which result: the gradient that a node takes, of which it gives views.
_WHOLE = -1
_Edge = tuple[Any, int]


@dataclasses.dataclass(frozen=True)
class Read:
    """What is read by position (Rule 3), in a forward with so many calls of blocks."""

    #: Names of parameters that what runs outside of blocks reads, or that a block is given.
    parameters: tuple[tuple[str, ...], ...]
    #: Bytes of gradients that wait while backward runs there, but for those of parameters.
    waiting_bytes: tuple[int, ...]
    #: Most bytes alive while backward runs outside of blocks there (Rule 5), 0 where that is not known.
    backward_bytes: tuple[int, ...]

    @classmethod
    def nothing(cls, num_calls: int) -> Read:
        """Return what is known without a graph."""
        size = 2 * num_calls + 1
        return cls(((),) * size, (0,) * size, (0,) * size)


@dataclasses.dataclass
class _Waiting:
    """Where a tensor is made, where it is read, and the bytes of its gradient."""

    made: int
    nbytes: int = 0
    #: And whether the gradient that is given there is memory of its own (Rule 2).
    reads: list[tuple[int, bool]] = dataclasses.field(default_factory=list)
    #: Of a whole gradient: the tensors whose gradients are views of it.
    parts: list[_Waiting] = dataclasses.field(default_factory=list)

    def positions(self) -> tuple[int, int]:
        """Return from where on its gradient waits, and where no more. What goes from a call to the next passes by."""
        (read, is_own), *others = sorted(self.reads, reverse=True)
        if not is_own:  # until something is added to it, it is no memory of its own
            read = others[0][0] if others else self.made
        begin = min((part.waits_from(read) for part in self.parts), default=self.made + 1)
        passes_by = self.made % 2 == 1 and read - self.made == 2
        return begin, begin if passes_by else max(read, begin)

    def is_added(self, position: int) -> bool:
        """Return whether a gradient that is given at a position may be added to another one."""
        return sum(read >= position for read, _ in self.reads) > 1

    def waits_from(self, read: int) -> int:
        """Return from where on what is given at a position waits: something is added to it there, or it is taken."""
        before = sorted(position for position, _ in self.reads if position <= read)
        return before[-2] if len(before) > 1 else self.made + 1


class OutsideGraph:
    """Takes down the graph between calls of blocks, in the order in which they run (NOTE [ Gradients that wait ])."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        #: Numbers of nodes at which calls begin and end, one after the other.
        self._numbers: list[int] = []
        #: Nodes, and leaves. A node holds what its operator saved, until the model's first forward has ended.
        self._given: list[list[_Edge]] = []
        #: Of a call whose forward has not ended: it may fail, and the model go on without it.
        self._begun: tuple[int, list[_Edge]] | None = None
        #: Nothing more is taken down: a later forward would hold what it is given.
        self._is_read = False

    def call_begins(self, given: Any) -> None:
        """A block is called."""
        if not self._is_read:
            edges = _edges(given)
            self._begun = torch_private.next_sequence_number(), edges

    def call_ended(self) -> None:
        """The forward of a block has ended."""
        if self._begun is not None:
            (number, edges), self._begun = self._begun, None
            self._given.append(edges)
            self._numbers += [number, torch_private.next_sequence_number()]

    def read(self, outputs: list[Tensor], made_before: Callable[[int], int] | None = None) -> Read:
        """Return what is read where, the model having returned `outputs`.

        Args:
            made_before: tells the bytes of what is alive and was there before the operator of a node ran, by its
                number; None: what backward needs is not asked for.
        """
        self._names |= {id(parameter): name for name, parameter in self._model.named_parameters()}
        walk = _Walk(self._numbers, self._names, made_before, gathers=_is_sharded(self._model))
        last = len(self._numbers)
        for call, given in enumerate(self._given):
            walk.begin(given, 2 * call + 1)
        walk.begin(_edges(outputs), last)
        self._given, self._begun, self._is_read = [], None, True
        changes = [0] * (last + 2)
        for each in walk.waiting.values():
            begin, end = each.positions()
            changes[begin] += each.nbytes
            changes[end] -= each.nbytes
        waiting = tuple(itertools.accumulate(changes[: last + 1]))
        positions, backward_bytes = range(last + 1), walk.backward_bytes()
        parameters = tuple(tuple(walk.parameters.get(position, ())) for position in positions)
        return Read(parameters, waiting, tuple(backward_bytes.get(position, 0) for position in positions))


def _is_sharded(model: torch.nn.Module) -> bool:
    """Return whether FSDP gathers parameters of a model: what is read are others than those of its modules."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # who shards with it has imported it
    kinds = () if fsdp is None else (fsdp.FSDPModule, fsdp.FullyShardedDataParallel)
    return any(isinstance(module, kinds) for module in model.modules())


def _edges(value: Any) -> list[_Edge]:
    """Return what takes the gradients of the tensors in a value: nodes, or leaves."""
    tensors = [tensor for tensor in tensors_in(value) if tensor.requires_grad]
    return [(tensor if tensor.grad_fn is None else tensor.grad_fn, tensor.output_nr) for tensor in tensors]


def _passing_bytes(node: Any) -> tuple[int, int]:
    """Return the bytes of the gradients that a node takes and gives, with its result if it saved that, and those left.

    The largest gradient of a leaf counts with parameters, and so does a node that turns that around.

    Returns:
        While it runs, and once it has run.
    """
    if node_bytes.is_of_leaf(node):
        return 0, 0
    leaves = [torch_private.gradient_bytes(*edge) for edge in node.next_functions if _is_leaf(edge[0])]
    others = sum(leaves) - max(leaves, default=0)
    running, left = node_bytes.running_bytes(node)
    return running + others + node_bytes.saves_result(node) * node_bytes.taken_bytes(node), left + others


def _is_leaf(node: Any) -> bool:
    return node is not None and node_bytes.is_of_leaf(node)


class _Walk:
    """One walk through the graph."""

    def __init__(
        self,
        numbers: list[int],
        names: dict[int, str],
        made_before: Callable[[int], int] | None,
        *,
        gathers: bool,
    ) -> None:
        self._numbers, self._names, self._made_before, self._gathers = numbers, names, made_before, gathers
        self._seen: set[Any] = set()
        self.waiting: dict[_Key, _Waiting] = {}
        #: By position, names in the order in which they were found.
        self.parameters: dict[int, dict[str, None]] = {}
        #: Of nodes outside of blocks: position, what lives before it, what passes, and what it gives to.
        self._outside: list[tuple[int, int, tuple[int, int], list[_Key]]] = []

    def begin(self, edges: list[_Edge], position: int) -> None:
        """Walk from tensors that are read at a position."""
        left = [(position, node, number, None) for node, number in edges]
        while left:
            reader, node, number, viewed = left.pop()
            if isinstance(node, Tensor) or type(node).__name__ == "AccumulateGrad":
                self._note_leaf(node if isinstance(node, Tensor) else node.variable, reader)
                continue
            made = bisect.bisect_right(self._numbers, torch_private.sequence_number(node))
            self._note_read((node, number), made, reader, torch_private.gradient_bytes(node, number), viewed)
            if made % 2 == 0 and node not in self._seen and len(self._seen) < MOST_NODES:
                self._seen.add(node)
                if self._made_before is not None:
                    lives = self._made_before(torch_private.sequence_number(node))
                    given = [edge for edge in node.next_functions if edge[0] is not None]
                    self._outside.append((made, lives, _passing_bytes(node), given))
                viewed = node if node_bytes.gives_views(node) else None
                left.extend((made, each, index, viewed) for each, index in node.next_functions if each is not None)

    def backward_bytes(self) -> dict[int, int]:
        """Return `Read.backward_bytes`, by position, once all was walked."""
        found: dict[int, int] = {}
        for position, lives, (passing, given), keys in self._outside:
            sums = [
                self.waiting[key].nbytes for key in keys if key in self.waiting and self.waiting[key].is_added(position)
            ]
            needed = lives + max(passing, given + max(sums, default=0))
            found[position] = max(needed, found.get(position, 0))
        return found

    def _note_leaf(self, leaf: Tensor, reader: int) -> None:
        name = self._names.get(id(leaf))
        if name is not None:
            self.parameters.setdefault(reader, {})[name] = None
        elif not (self._gathers and isinstance(leaf, torch.nn.Parameter)):  # of those the gradient is sharded at once
            parts = [part for part in plain_parts(leaf.detach()) if part.layout is torch.strided]
            self._note_read((id(leaf), 0), -1, reader, sum(part.nbytes for part in parts))

    def _note_read(self, key: _Key, made: int, reader: int, nbytes: int, viewed: Any = None) -> None:
        """Take down that something at a position reads a tensor.

        Args:
            viewed: the node of whose gradient that of the tensor is a view there (Rule 2), None: of none.
        """
        known = self.waiting.setdefault(key, _Waiting(made))
        known.nbytes = max(known.nbytes, nbytes)
        known.reads.append((reader, viewed is None))
        if viewed is not None:
            whole = self.waiting.setdefault((viewed, _WHOLE), _Waiting(made))
            whole.nbytes, whole.reads = torch_private.gradient_bytes(viewed, 0), [(reader, True)]
            whole.parts.append(known)
