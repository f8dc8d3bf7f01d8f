"""Plans that take turns in the steps of a training on several ranks.

NOTE [ Races of ranks ]

Ranks wait for each other in a step: each one's time is that of the slowest, and tells of a plan only where all ranks
run that plan. So they race together. Nothing waits for it: what a rank does not find in time, it does without, and
stays with its own plan. Ranks with different plans train as well (NOTE [ Alone ]).

Rule 1. A rank whose plan is made says which plans it could race, none where its gain is sure. The first rank reads what
        all have said, and says which of them all that race have, and at which forward they begin.
Rule 2. All ranks take turns in the same order. Then each says how long its steps took; the first rank says how long
        they took on the slowest rank for each plan, and the fastest of these stays on all.
Rule 3. Forwards count from the one that made the plan. A rank that hears of the race when it should have begun, or of
        which one does not hear in so many forwards, has none.
Rule 4. They talk through the key-value store of the default process group: a collective would be taken for another
        one. Races have numbers, which are the same on ranks that apply budgets and make plans in the same order.
"""

from __future__ import annotations

import itertools
import json
from typing import Any

import torch
import torch.distributed as dist

from actckpt._budget.alone import num_ranks
from actckpt._budget.turns import NUM_STEPS, Race
from actckpt._core import torch_private
from actckpt.planner.plans import Plan

__all__ = ["RaceNumbers", "race_of"]

#: Forwards between what the first rank says and the first turn.
_AHEAD = 2
#: Forwards in which a rank looks for what others say.
_MOST_WAITED = 20

_models = itertools.count()


class RaceNumbers:
    """Numbers the races of one model with a budget."""

    def __init__(self) -> None:
        self._model, self._races = next(_models), itertools.count()

    def next(self) -> str:
        """Return what no other race is called."""
        return f"{self._model}/{next(self._races)}"


class Board:
    """What ranks say of one race."""

    def __init__(self, number: str, store: Any, rank: int, num_ranks: int) -> None:
        #: Whether this rank says what all of them do.
        self.is_first = rank == 0
        self._rank, self._num_ranks = rank, num_ranks
        self._store, self._prefix = store, f"actckpt/race/{number}"

    @staticmethod
    def of(number: str) -> Board | None:
        """Return the board of a race; None where the group has no store, as MPI's."""
        if dist.get_backend() == "fake":
            return None
        store = torch_private.group_store(dist.group.WORLD)
        return None if store is None else Board(number, store, dist.get_rank(), dist.get_world_size())

    def say(self, what: str, content: Any) -> None:
        """Tell the first rank."""
        self._store.set(f"{self._prefix}/{what}/{self._rank}", json.dumps(content))

    def heard(self, what: str, ranks: list[int] | None = None) -> dict[int, Any] | None:
        """Return what each of these ranks has said, or all; None where one has not yet."""
        keys = {rank: f"{self._prefix}/{what}/{rank}" for rank in (range(self._num_ranks) if ranks is None else ranks)}
        if not self._store.check(list(keys.values())):
            return None
        return {rank: json.loads(self._store.get(key)) for rank, key in keys.items()}

    def conclude(self, what: str, content: Any) -> None:
        """Tell all ranks, as the first one."""
        self._store.set(f"{self._prefix}/{what}", json.dumps([content]))

    def concluded(self, what: str) -> list[Any]:
        """Return what the first rank has told all, in a list; an empty one where it has not yet."""
        key = f"{self._prefix}/{what}"
        found: list[Any] = json.loads(self._store.get(key)) if self._store.check([key]) else []
        return found


class RaceOfRanks(Race):
    """A race in which all ranks run the same plan in each turn, and the slowest rank's time counts.

    Args:
        entries: names and plans; the first runs where there is no race. One alone: this rank does not race.
    """

    def __init__(self, entries: list[tuple[str, Plan]], device: torch.device, board: Board) -> None:
        super().__init__(entries, device)
        self._board = board
        self._is_racing = len(entries) > 1
        board.say("plans", [name for name, _ in entries] if self._is_racing else None)
        self._num_forwards = self._num_waited = 0
        #: What the ranks that race do: which these are, their plans and the first forward; None: not known yet.
        self._agreed: dict[str, Any] | None = None
        self._has_said = False

    def winner(self) -> Plan | None:
        """Return None: ranks agree on the winner when a forward begins."""
        return None

    def next(self) -> Plan:
        """Return the plan that runs next, or the one that has won, or the first one where there is no race."""
        self._num_forwards += 1
        self._num_waited += 1
        try:
            return self._next()
        except dist.DistError:  # the store is gone with the rank that kept it, which has ended
            return self._gives_up()

    def _next(self) -> Plan:
        if self._agreed is None:
            return self._agree()
        if self._num_forwards < self._agreed["first"]:
            return self._waits()
        if self._is_racing and not self._is_run():
            return self._take_turn()
        if self._is_racing and not self._has_said:
            self._board.say("seconds", dict(zip(self._agreed["plans"], self._medians(), strict=True)))
            self._has_said, self._num_waited = True, 0
        return self._decide()

    @property
    def steps_left(self) -> int:
        """How many steps it still takes; 0: this rank does not race."""
        return super().steps_left if self._is_racing else 0

    def _agree(self) -> Plan:
        """Look whether all ranks have said what they race (Rule 1)."""
        if self._board.is_first:
            said = self._board.heard("plans")
            if said is not None or self._num_waited >= _MOST_WAITED:
                self._board.conclude("plans", self._common(said or {}))
        found = self._board.concluded("plans")
        if not found:
            return self._waits()
        agreed = found[0]
        if agreed is None or agreed["first"] <= self._num_forwards or not (self._is_racing or self._board.is_first):
            return self._gives_up()
        if self._is_racing:
            self._entries = [each for each in self._entries if each[0] in agreed["plans"]]
            self._steps = [[] for _ in self._entries]
        num_turns = len(agreed["plans"]) * NUM_STEPS
        self._agreed, self._num_waited = agreed, -_AHEAD - num_turns
        return self._waits()

    def _common(self, said: dict[int, list[str] | None]) -> dict[str, Any] | None:
        """Return what the ranks that race have in common."""
        racing = {rank: names for rank, names in said.items() if names is not None}
        names = [name for name in next(iter(racing.values()), []) if all(name in each for each in racing.values())]
        first = self._num_forwards + _AHEAD
        return {"plans": names, "ranks": list(racing), "first": first} if len(names) > 1 else None

    def _decide(self) -> Plan:
        """Look whether the slowest rank's times are known (Rule 2)."""
        assert self._agreed is not None
        names = self._agreed["plans"]
        said = self._board.heard("seconds", self._agreed["ranks"]) if self._board.is_first else None
        if said is not None:
            self._board.conclude("seconds", {name: max(each[name] for each in said.values()) for name in names})
        found = self._board.concluded("seconds")
        if found and self._is_racing:
            self.is_over = True
            return self._winner([found[0][name] for name, _ in self._entries])
        return self._gives_up() if found else self._waits()

    def _waits(self) -> Plan:
        """Run the first plan, in no turn, unless the wait has been too long (Rule 3)."""
        self._at = None
        self.is_over = self._num_waited > _MOST_WAITED
        return self._entries[0][1]

    def _gives_up(self) -> Plan:
        self.is_over = True
        return self._entries[0][1]


def race_of(entries: list[tuple[str, Plan]], device: torch.device, number: str) -> Race | None:
    """Return the race of plans; None where there is nothing to race, or nobody to tell of it.

    Args:
        entries: names and plans of this rank; one alone does not race.
        number: what ranks call it.
    """
    if num_ranks() == 1:
        return Race(entries, device) if len(entries) > 1 else None
    board = Board.of(number)
    if board is None:
        return None
    try:
        race = RaceOfRanks(entries, device, board)
    except dist.DistError:  # the store is gone with the rank that kept it, which has ended
        return None
    return race if len(entries) > 1 or board.is_first else None
