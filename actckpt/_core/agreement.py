"""Ranks of a process group compare what each of them is about to run, before any of them waits for the others.

Through the key-value store of the group: a collective would be taken for the one that another rank is at.
"""

import json
import time
import weakref
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from actckpt._core import torch_private
from actckpt.errors import RanksDifferError

__all__ = ["Exchanges", "agree", "exchanges_of", "resolved"]

#: Between two looks at the store: as short as a look takes at first.
_SHORTEST_S, _LONGEST_S = 0.0005, 0.05

#: One collective: which of the region's on this group it is, and its operator.
Collective = tuple[int, str]


class Exchanges:
    """What the ranks of one group have compared so far: the same on all of them."""

    __slots__ = ("__weakref__", "number")

    def __init__(self) -> None:
        self.number = 0


_exchanges: "weakref.WeakKeyDictionary[Any, Exchanges]" = weakref.WeakKeyDictionary()


def resolved(group: Any) -> Any:
    """Return the process group that an argument of a functional collective stands for."""
    return torch_private.resolved_group(group) if isinstance(group, str) else group


def exchanges_of(group: Any) -> Exchanges:
    """Return what stands for a process group as long as it lives; names are used again."""
    found = _exchanges.get(group)
    if found is None:
        found = _exchanges[group] = Exchanges()
    return found


def agree(group: Any, sequence: Sequence[Collective], where: str) -> None:
    """Return once every rank of a group is about to run the same sequence.

    The first rank of the group compares, and tells all. It takes as long as the last rank takes to come here, at most
    the timeout of the group.

    Raises:
        RanksDifferError: a rank runs another one, or did not come here in time.
    """
    if dist.get_world_size(group) == 1 or dist.get_backend(group) == "fake":
        return
    exchanges = exchanges_of(group)
    exchange = _Exchange(group, exchanges.number, where)
    exchanges.number += 1
    exchange.run([list(each) for each in sequence])


class _Exchange:
    """One comparison."""

    def __init__(self, group: Any, number: int, where: str) -> None:
        self._store = torch_private.group_store(group)
        self._timeout_s = torch_private.group_timeout(group).total_seconds()
        self._name = group.group_name
        self._prefix = f"actckpt/{self._name}/{number}"
        #: As the program numbers them.
        self._ranks = dist.get_process_group_ranks(group)
        self._rank = dist.get_rank()
        self._where = where

    def run(self, sequence: list[list[Any]]) -> None:
        first, others = self._ranks[0], self._ranks[1:]
        if self._rank != first:
            self._store.set(self._key(self._rank), json.dumps([self._where, sequence]))
            found = self._get("verdict")
            problem = self._missing([first], sequence) if found is None else json.loads(found)
        else:
            problem = self._compared(others, sequence)
            self._store.set(f"{self._prefix}/verdict", json.dumps(problem))
        if problem:
            raise RanksDifferError(problem)

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/{rank}"

    def _compared(self, others: list[int], sequence: list[list[Any]]) -> str:
        """Return in which way the other ranks differ from this one, the first of the group; an empty text if none."""
        deadline = time.monotonic() + self._timeout_s
        late = [rank for rank in others if not self._wait(self._key(rank), deadline)]
        if late:
            return self._missing(late, sequence)
        for rank in others:
            where, theirs = json.loads(self._store.get(self._key(rank)))
            if theirs != sequence:
                return self._different(rank, where, theirs, sequence)
        return ""

    def _get(self, name: str) -> Any:
        """Return what is in the store, None where nobody writes it in time."""
        key = f"{self._prefix}/{name}"
        return self._store.get(key) if self._wait(key, time.monotonic() + self._timeout_s) else None

    def _wait(self, key: str, deadline: float) -> bool:
        pause = _SHORTEST_S
        while not self._store.check([key]):
            if time.monotonic() >= deadline:
                return False
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_S)
        return True

    def _missing(self, late: list[int], sequence: list[list[Any]]) -> str:
        ranks = ", ".join(map(str, late[:8])) + (", ..." if len(late) > 8 else "")
        return (
            f"Rank {self._rank} repeats {len(sequence)} collectives of the group {self._name!r} in the backward of "
            f"{self._where}, the first is {_described(sequence, 0)}. Rank {ranks} did not come to that point within "
            f"{self._timeout_s:g} s, the timeout of the group.\nGive the same policy to all ranks, and let all of them "
            "run this backward."
        )

    def _different(self, rank: int, where: str, theirs: list[list[Any]], sequence: list[list[Any]]) -> str:
        pairs = zip(sequence, theirs, strict=False)
        first = next((number for number, (one, other) in enumerate(pairs) if one != other), None)
        if first is None:
            first = min(len(sequence), len(theirs))
        return (
            f"Ranks {self._rank} and {rank} do not repeat the same collectives of the group {self._name!r}: rank "
            f"{self._rank} repeats {len(sequence)} in the backward of {self._where}, and rank {rank} repeats "
            f"{len(theirs)} in that of {where}. They differ from number {first + 1} on: {_described(sequence, first)} "
            f"on rank {self._rank}, {_described(theirs, first)} on rank {rank}.\nEach would wait for the other, or "
            "take what it sent for something else. Give the same policy to all ranks, and open regions around the "
            "same parts."
        )


def _described(sequence: list[list[Any]], number: int) -> str:
    if number >= len(sequence):
        return "none"
    position, operator = sequence[number]
    return f"{operator} (collective {position + 1} of the region's forward)"
