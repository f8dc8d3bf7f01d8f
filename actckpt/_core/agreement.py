"""Ranks of a process group compare what each of them is about to run, before any of them waits for the others.

Through the key-value store of the group: a collective would be taken for the one that another rank is at.
"""

import json
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch.distributed as dist

from actckpt._core import torch_private
from actckpt.errors import RanksDifferError

__all__ = ["Exchanges", "Repeated", "agree", "exchanges_of", "is_alone", "resolved", "without_others"]

#: Between two looks at the store: as short as a look takes at first.
_SHORTEST_S, _LONGEST_S = 0.0005, 0.05

#: One collective: which of the region's on this group it is, and its operator.
Collective = tuple[int, str]


class Repeated(NamedTuple):
    """What a rank is about to run again on one group."""

    #: Where the region was opened, and the module that ran the first of them in forward, None: none.
    where: str
    module: str | None
    #: How many operations the group had run then. Ranks may send single tensors more or less often than others.
    began: int | None
    collectives: tuple[Collective, ...]

    def is_elsewhere(self, other: "Repeated") -> bool:
        """Whether another rank is at another part of the forward, where the like runs."""
        if self.began == other.began:
            return False
        return self.module is None or (self.where, self.module) != (other.where, other.module)

    @property
    def place(self) -> str:
        """As messages say it."""
        return self.where if self.module is None else f"{self.where} in {self.module}"


class Exchanges:
    """What the ranks of one group have compared so far: the same on all of them."""

    __slots__ = ("__weakref__", "number")

    def __init__(self) -> None:
        self.number = 0


_exchanges: "weakref.WeakKeyDictionary[Any, Exchanges]" = weakref.WeakKeyDictionary()


class _Thread(threading.local):
    num_alone = 0


_thread = _Thread()


@contextmanager
def without_others() -> Iterator[None]:
    """Say that what runs in this thread runs on this rank only."""
    _thread.num_alone += 1
    try:
        yield
    finally:
        _thread.num_alone -= 1


def is_alone() -> bool:
    """Whether other ranks do not run what runs now (NOTE [ Alone ])."""
    return _thread.num_alone > 0


def resolved(group: Any) -> Any:
    """Return the process group that an argument of a functional collective stands for."""
    return torch_private.resolved_group(group) if isinstance(group, str) else group


def exchanges_of(group: Any) -> Exchanges:
    """Return what stands for a process group as long as it lives; names are used again."""
    found = _exchanges.get(group)
    if found is None:
        found = _exchanges[group] = Exchanges()
    return found


def agree(group: Any, repeated: Repeated) -> None:
    """Return once every rank of a group is about to run the same collectives again.

    The first rank of the group compares, and tells all. It takes as long as the last rank takes to come here, at most
    the timeout of the group.

    Raises:
        RanksDifferError: a rank runs another one, or did not come here in time.
    """
    if dist.get_world_size(group) == 1 or dist.get_backend(group) == "fake":
        return
    exchanges = exchanges_of(group)
    exchange = _Exchange(group, exchanges.number, repeated)
    exchanges.number += 1
    exchange.run()


class _Exchange:
    """One comparison."""

    def __init__(self, group: Any, number: int, repeated: Repeated) -> None:
        self._store = torch_private.group_store(group)
        self._timeout_s = torch_private.group_timeout(group).total_seconds()
        self._name = group.group_name
        self._prefix = f"actckpt/{self._name}/{number}"
        #: As the program numbers them.
        self._ranks = dist.get_process_group_ranks(group)
        self._rank = dist.get_rank()
        self._mine = repeated

    def run(self) -> None:
        first, others = self._ranks[0], self._ranks[1:]
        if self._rank != first:
            self._store.set(self._key(self._rank), json.dumps(self._mine))
            found = self._get("verdict")
            problem = self._missing([first]) if found is None else json.loads(found)
        else:
            problem = self._compared(others)
            self._store.set(f"{self._prefix}/verdict", json.dumps(problem))
        if problem:
            raise RanksDifferError(problem)

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/{rank}"

    def _compared(self, others: list[int]) -> str:
        """Return in which way the other ranks differ from this one, the first of the group; an empty text if none."""
        deadline = time.monotonic() + self._timeout_s
        late = [rank for rank in others if not self._wait(self._key(rank), deadline)]
        if late:
            return self._missing(late)
        for rank in others:
            where, module, began, collectives = json.loads(self._store.get(self._key(rank)))
            theirs = Repeated(where, module, began, tuple((number, name) for number, name in collectives))
            if theirs.collectives != self._mine.collectives:
                return self._different(rank, theirs)
            if self._mine.is_elsewhere(theirs):
                return self._elsewhere(rank, theirs)
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

    def _missing(self, late: list[int]) -> str:
        ranks = ", ".join(map(str, late[:8])) + (", ..." if len(late) > 8 else "")
        mine = self._mine.collectives
        return (
            f"Rank {self._rank} repeats {len(mine)} collectives of the group {self._name!r} in the backward of "
            f"{self._mine.place}, the first is {_described(mine, 0)}. Rank {ranks} did not come to that point within "
            f"{self._timeout_s:g} s, the timeout of the group.\nGive the same policy to all ranks, and let all of them "
            "run this backward."
        )

    def _different(self, rank: int, other: Repeated) -> str:
        mine, theirs = self._mine.collectives, other.collectives
        pairs = zip(mine, theirs, strict=False)
        first = next((number for number, (one, two) in enumerate(pairs) if one != two), None)
        if first is None:
            first = min(len(mine), len(theirs))
        return (
            f"Ranks {self._rank} and {rank} do not repeat the same collectives of the group {self._name!r}: rank "
            f"{self._rank} repeats {len(mine)} in the backward of {self._mine.place}, and rank {rank} repeats "
            f"{len(theirs)} in that of {other.place}. They differ from number {first + 1} on: "
            f"{_described(mine, first)} on rank {self._rank}, {_described(theirs, first)} on rank {rank}.\n{_NEXT_STEP}"
        )

    def _elsewhere(self, rank: int, other: Repeated) -> str:
        return (
            f"Ranks {self._rank} and {rank} repeat collectives of the group {self._name!r} from other places of the "
            f"forward: rank {self._rank} is in the backward of {self._mine.place}, whose first ran when the group had "
            f"run {self._mine.began}, and rank {rank} in that of {other.place}, whose first ran when it had run "
            f"{other.began}.\n{_NEXT_STEP}"
        )


_NEXT_STEP = (
    "Each would wait for the other, or take what it sent for something else. Give the same policy to all ranks, and "
    "open regions around the same parts."
)


def _described(collectives: Sequence[Collective], number: int) -> str:
    if number >= len(collectives):
        return "none"
    position, operator = collectives[number]
    return f"{operator} (collective {position + 1} of the region's forward)"
