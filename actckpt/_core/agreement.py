"""Ranks of a process group compare what each of them is about to run, before any of them waits for the others.

Through the key-value store of the group: a collective would be taken for the one that another rank is at.
"""

import json
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch.distributed as dist

from actckpt._core import torch_private
from actckpt.errors import RanksDifferError

__all__ = [
    *("COLLECTIVE_NAMESPACES", "Exchanges", "Repeated", "agree", "exchanges_of", "generation", "has_others"),
    *("is_alone", "resolved", "waiting", "without_others"),
]

#: Namespaces whose operators talk to other processes.
COLLECTIVE_NAMESPACES = frozenset({"c10d", "_c10d_functional", "c10d_functional", "_dtensor", "fsdp", "symm_mem"})

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
    #: All of the region; of a rerun, which tells no more before it runs, the first.
    collectives: tuple[Collective, ...]
    is_rerun: bool = False

    @property
    def key(self) -> tuple[str, str | None]:
        """What is known of it in every step, whatever the policy."""
        return self.where, self.module

    @property
    def what(self) -> tuple[bool, tuple[Collective, ...]]:
        """What all ranks must repeat there."""
        return self.is_rerun, self.collectives

    def is_elsewhere(self, other: "Repeated") -> bool:
        """Whether another rank is at another part of the forward, where the like runs."""
        if self.is_rerun:
            return self.key != other.key
        return self.began != other.began and (self.module is None or self.key != other.key)

    @property
    def place(self) -> str:
        """As messages say it."""
        return self.where if self.module is None else f"{self.where} in {self.module}"

    def __str__(self) -> str:
        if self.is_rerun:
            return f"runs {self.place} again in backward, and in it {self.collectives[0][1]}"
        if not self.collectives:
            return f"repeats none in the backward of {self.place}, where it did before"
        return f"repeats {len(self.collectives)} in the backward of {self.place}, the first is {self.described(0)}"

    def described(self, number: int) -> str:
        """Name one of them."""
        if number >= len(self.collectives):
            return "none"
        position, operator = self.collectives[number]
        return operator if self.is_rerun else f"{operator} (collective {position + 1} of the region's forward)"


class Exchanges:
    """What the ranks of one group have compared so far: the same on all of them."""

    __slots__ = ("__weakref__", "agreed", "number")

    def __init__(self) -> None:
        self.number = 0
        #: By place, what ran there last.
        self.agreed: dict[tuple[str, str | None], tuple[bool, tuple[Collective, ...]]] = {}


_exchanges: "weakref.WeakKeyDictionary[Any, Exchanges]" = weakref.WeakKeyDictionary()


class _Changes:
    """How often ranks agreed on something else than they had before."""

    number = 0


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
    """Return the process group that an argument of a collective stands for."""
    return torch_private.resolved_group(group)


def exchanges_of(group: Any) -> Exchanges:
    """Return what stands for a process group as long as it lives; names are used again."""
    found = _exchanges.get(group)
    if found is None:
        found = _exchanges[group] = Exchanges()
    return found


def has_others() -> bool:
    """Whether this is one of several ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def generation() -> int:
    """Return a number that changes when ranks have agreed on something else than before."""
    return _Changes.number


def agree(group: Any, repeated: Repeated) -> None:
    """Return once every rank of a group is about to run the same collectives again, if they are not those of before.

    Who repeats at a place what it repeated there last asks nobody: all ranks agreed to that. Who does not, or is new
    there, compares; if it is the only one, nobody comes, and it raises. The first rank of the group compares, and tells
    all. It takes as long as the last rank takes to come here, at most the timeout of the group. Groups without a store,
    as MPI's, compare nothing.

    Raises:
        RanksDifferError: a rank runs another one, or did not come here in time.
    """
    if dist.get_world_size(group) == 1 or dist.get_backend(group) == "fake" or torch_private.group_store(group) is None:
        return
    exchanges = exchanges_of(group)
    before = exchanges.agreed.get(repeated.key, _NOTHING)
    if before == repeated.what:
        return
    exchange = _Exchange(group, exchanges.number, repeated)
    exchanges.number += 1
    exchange.run()
    exchanges.agreed[repeated.key] = repeated.what
    _Changes.number += before != _NOTHING


def waiting(group: Any) -> str:
    """Say which ranks of a group wait to compare what they repeat while this one does not; an empty text if none."""
    exchange = _Exchange(group, exchanges_of(group).number, Repeated("", None, None, ()))
    try:
        return "; ".join(f"rank {rank} {exchange.statement_of(rank)}" for rank in exchange.others_there()[:8])
    except RuntimeError:  # the store is gone: who keeps it has ended
        return ""


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
        self._store.set(self._key(self._rank), json.dumps(self._mine))
        if self._rank != first:
            found = self._get("verdict")
            problem = self._missing([first]) if found is None else json.loads(found)
        else:
            problem = self._compared(others)
            self._store.set(f"{self._prefix}/verdict", json.dumps(problem))
        if problem:
            raise RanksDifferError(problem)

    def others_there(self) -> list[int]:
        """Return the other ranks that have come here."""
        return [rank for rank in self._ranks if rank != self._rank and self._store.check([self._key(rank)])]

    def statement_of(self, rank: int) -> Repeated:
        """Return what a rank that has come here is about to run."""
        where, module, began, collectives, is_rerun = json.loads(self._store.get(self._key(rank)))
        return Repeated(where, module, began, tuple((number, name) for number, name in collectives), is_rerun)

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/{rank}"

    def _compared(self, others: list[int]) -> str:
        """Return in which way the other ranks differ from this one, the first of the group; an empty text if none."""
        deadline = time.monotonic() + self._timeout_s
        late = [rank for rank in others if not self._wait(self._key(rank), deadline)]
        if late:
            return self._missing(late)
        for rank in others:
            theirs = self.statement_of(rank)
            if theirs.what != self._mine.what:
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
        return (
            f"Of the collectives of the group {self._name!r}, rank {self._rank} {self._mine}. Rank {ranks} did not "
            f"come to that point within {self._timeout_s:g} s, the timeout of the group.\nGive the same policy to all "
            "ranks, and let all of them run this backward."
        )

    def _different(self, rank: int, other: Repeated) -> str:
        mine, theirs = self._mine.collectives, other.collectives
        pairs = zip(mine, theirs, strict=False)
        first = next((number for number, (one, two) in enumerate(pairs) if one != two), min(len(mine), len(theirs)))
        return (
            f"Ranks {self._rank} and {rank} do not repeat the same collectives of the group {self._name!r}: rank "
            f"{self._rank} {self._mine}; rank {rank} {other}. They differ from number {first + 1} on: "
            f"{self._mine.described(first)} on rank {self._rank}, {other.described(first)} on rank {rank}.\n"
            f"{_NEXT_STEP}"
        )

    def _elsewhere(self, rank: int, other: Repeated) -> str:
        return (
            f"Ranks {self._rank} and {rank} repeat collectives of the group {self._name!r} from other places of the "
            f"forward: rank {self._rank} {self._mine}{_counted(self._mine)}; rank {rank} {other}{_counted(other)}."
            f"\n{_NEXT_STEP}"
        )


#: What places of which nothing is known repeat.
_NOTHING: tuple[bool, tuple[Collective, ...]] = (False, ())

_NEXT_STEP = (
    "Each would wait for the other, or take what it sent for something else. Give the same policy to all ranks, and "
    "open regions around the same parts."
)


def _counted(repeated: Repeated) -> str:
    return "" if repeated.began is None else f", which ran when the group had run {repeated.began}"
