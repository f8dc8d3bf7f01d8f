"""Calls of blocks that a plan has nothing for: with layer dropout, or in loops whose length depends on the data.

NOTE [ Calls that were not measured ]

Rule 1. A block that did not run when the others were measured, or runs more often than then, is recomputed. From the
        next step on the plan has that call: with the costs of the last call of the same block, or of the nearest block
        before it of the same type and shapes, and its place after that of the block before it in the model. Further
        calls of blocks that ran come after all calls of these blocks, one of each in turn: as in a longer loop.
Rule 2. Where one block was skipped, others will be: all that did not run when it did not are taken into the plan at
        once, as far as they are of its type. So each kind of block lets the plan be made again once, and not each draw.
Rule 3. The plan is made again so often at most: loops may go on to grow.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from typing import TypeVar

import torch

from actckpt._budget.class_names import BEFORE
from actckpt._budget.measuring import MeasuredStep

__all__ = ["Unmeasured"]

_MOST_PLANS = 16
_T = TypeVar("_T")


class Unmeasured:
    """Takes calls down that were not measured, and adds them to what was.

    Args:
        model: whose blocks they are.
        blocks: names of all blocks, in the order of the model.
    """

    def __init__(self, model: torch.nn.Module, blocks: Iterable[str]) -> None:
        self._model, self._blocks = model, list(blocks)
        #: Calls beyond those that were measured, by the name of the block; those that the plan does not have; and which
        #: of these ran.
        self._calls: Counter[str] = Counter()
        self._new: Counter[str] = Counter()
        self._ran: Counter[str] = Counter()
        self._num_plans = 0

    @property
    def wants_plan(self) -> bool:
        """Whether calls came that the plan does not have."""
        return bool(self._new)

    @property
    def has_calls(self) -> bool:
        """Whether there are calls that were not measured."""
        return bool(self._calls)

    def note(self, name: str, measured: MeasuredStep) -> bool:
        """Take down a call that the plan has nothing for; return whether the next plan has it."""
        if self._num_plans >= _MOST_PLANS or self._alike(name, measured) is None:
            return False
        self._ran[name] += 1
        self._new[name] = max(self._new[name], self._ran[name])
        if name not in measured.names:  # Rule 2
            kind = type(self._model.get_submodule(name))
            for other in self._blocks:
                is_skipped = other not in measured.names and not self._calls[other]
                if is_skipped and type(self._model.get_submodule(other)) is kind:
                    self._new[other] = max(self._new[other], 1)
        return True

    def added(self, measured: MeasuredStep) -> MeasuredStep:
        """Return what was measured with the calls that were not, for the plan that is made now."""
        self._calls += self._new
        self._num_plans += bool(self._new)
        self._new.clear()
        self._ran.clear()
        for number in range(max(self._calls.values(), default=0)):
            for name in self._blocks:
                if number < self._calls[name]:
                    measured = self._with_call(name, measured)
        return measured

    def _alike(self, name: str, measured: MeasuredStep) -> int | None:
        """Return the place in the stack of the call that is taken for one of a block, None where there is none."""
        places = {other: place for place, other in enumerate(measured.names) if other is not None}
        if name in places:
            return places[name]
        before = self._blocks[: self._blocks.index(name)]
        after = self._blocks[len(before) + 1 :]
        wanted = _kind(self._model, name)
        near = (*reversed(before), *after)
        found = [places[other] for other in near if other in places and _kind(self._model, other) == wanted]
        # That of the first block may be what the program made: then what is put before it has one that counts.
        blocks = measured.costs.blocks
        return max(found, key=lambda place: sum(value.nbytes for value in blocks[place].values[:1]), default=None)

    def _with_call(self, name: str, measured: MeasuredStep) -> MeasuredStep:
        """Return what was measured with one more call of a block."""
        source = self._alike(name, measured)
        if source is None:
            return measured
        costs, other = measured.costs, measured.names[source] or ""
        # With what runs before a call of the same block, which the next call has before it, too.
        is_repeated = name == other and measured.names[source - 1] is None and costs.stack[source - 1] != BEFORE
        taken = slice(source - is_repeated, source + 1)
        at = self._place(name, measured)
        names = tuple(None if each is None else name for each in measured.names[taken])
        places = tuple({key: _moved(each[key], other, name) for key in each} for each in measured.places[taken])
        number = sum(each is not None for each in measured.names[:at])
        waiting = measured.waiting_bytes[sum(each is not None for each in measured.names[:source])]
        return dataclasses.replace(
            measured,
            costs=dataclasses.replace(costs, stack=_with(costs.stack, at, costs.stack[taken])),
            names=_with(measured.names, at, names),
            places=_with(measured.places, at, places),
            waiting_bytes=_with(measured.waiting_bytes, number, (waiting,)),
            parameters=_with(measured.parameters, at, measured.parameters[taken]),
            cast_bytes=_with(measured.cast_bytes, at, measured.cast_bytes[taken]) if measured.cast_bytes else (),
        )

    def _place(self, name: str, measured: MeasuredStep) -> int:
        """Return where in the stack a call of a block is put: after the last one of a loop, or of a block before it."""
        is_repeated = name in measured.names
        before = {*self._calls} if is_repeated else {*self._blocks[: self._blocks.index(name)]}
        found = [place for place, other in enumerate(measured.names) if other in before]
        return found[-1] + 1 if found else measured.costs.stack.index(BEFORE) + 1


def _with(values: tuple[_T, ...], at: int, more: tuple[_T, ...]) -> tuple[_T, ...]:
    return (*values[:at], *more, *values[at:])


def _moved(place: str, block: str, to: str) -> str:
    """Return a place in one block as the same one in another."""
    return to + place[len(block) :] if place.startswith((f"{block}.", f"{block}::")) else place


def _kind(model: torch.nn.Module, name: str) -> object:
    """Return what two blocks must have in common to cost the same."""
    block = model.get_submodule(name)
    return type(block), block.training, [(key, each.shape, each.dtype) for key, each in block.named_parameters()]
