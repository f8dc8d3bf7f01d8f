"""Cost tables: what the solver and the simulator know of a model and its machine. See docs/planning.md."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from actckpt._error_base import CostTableError
from actckpt.action import Action
from actckpt.planner.fields import as_table, check_names, missing, plain_data, read_fields, read_json

__all__ = ["BLOCK_INPUT", "COST_TABLE_VERSION", "BlockClass", "CostTable", "Moment", "Segment", "Value"]

COST_TABLE_VERSION = 1
#: Fields that an earlier actckpt wrote into tables without a disk, as 0.
_RETIRED = {"disk_bytes", "disk_write_bytes_per_s", "disk_read_bytes_per_s"}
#: Name of the value that is the input of its block.
BLOCK_INPUT = "x0"
#: Bytes that may be below zero, and limits, which may be larger than any memory.
_CHANGE, _LIMIT = {"least": -math.inf}, {"most": 2**63}


@dataclasses.dataclass(frozen=True)
class Value:
    """A tensor of a block: what it costs to hold and to compute again. Fields as in docs/planning.md."""

    name: str
    nbytes: float = dataclasses.field(metadata={"key": "bytes"})
    recompute_s: float = 0.0
    inputs: tuple[str, ...] = ()
    needed: bool = True
    offloadable: bool = True
    replayable: bool = True
    offload_s: float = 0.0
    #: Autocast's cache holds it, too, in segments with `holds_casts`.
    cached: bool = False

    @classmethod
    def _checked(cls, given: dict[str, Any], where: str) -> Value:
        """Return a value; raises a CostTableError if it can be computed again in a time that is not known."""
        given.setdefault("replayable", given["name"] != BLOCK_INPUT)
        if given["replayable"] and "recompute_s" not in given:
            raise missing("recompute_s", where)
        return cls(**given)


@dataclasses.dataclass(frozen=True)
class BlockClass:
    """What the blocks of one structure have in common. Fields as in docs/planning.md."""

    forward_s: float
    backward_s: float
    working_set_bytes: float
    gradient_bytes: float = 0.0
    values: tuple[Value, ...] = ()
    rerun: bool = False
    recording_s: float = 0.0
    #: Seconds of a rerun, which may end before the forward does; None: `forward_s`.
    rerun_s: float | None = None
    #: Why the block may not be run again, for explanations.
    no_rerun: str | None = None
    #: Beyond the working set, in backward: where something is not kept and replayed, and where the block is run again.
    recompute_bytes: float = 0.0
    rerun_bytes: float = 0.0
    #: Of the hidden states that it was measured with, whoever holds them; 0: not known.
    input_bytes: float = 0.0

    @classmethod
    def _checked(cls, given: dict[str, Any], where: str) -> BlockClass:
        """Return a class; raises a CostTableError unless names are unique, and inputs come before what reads them."""
        block = cls(**given)
        if block.rerun and block.no_rerun is not None:
            raise CostTableError(
                f"{where}.no_rerun says why there is no rerun, and rerun is true. Leave out one of them."
            )
        names = [value.name for value in block.values]
        for index, value in enumerate(block.values):
            if value.name in names[:index]:
                raise CostTableError(
                    f"{where}.values has two values named {value.name!r}. Give each a name of its own."
                )
            check_names(value.inputs, names, f"{where}.values[{index}].inputs")
            if late := [name for name in value.inputs if name not in names[:index]]:
                raise CostTableError(
                    f"{where}.values[{index}] ({value.name!r}) reads {late[0]!r}, which does not come before it. Put "
                    "values in the order in which the forward computes them."
                )
        return block

    @property
    def rerun_seconds(self) -> float:
        """Seconds that running the block again takes."""
        return self.forward_s if self.rerun_s is None else self.rerun_s

    def is_recorded(self, actions: Mapping[str, Action]) -> bool:
        """Return whether the block must be recorded, if it is not run again as a whole: something is not kept."""
        return any(value.needed and actions[value.name] is not Action.KEEP for value in self.values)

    def mode(self, actions: Mapping[str, Action], *, rerun: bool) -> int:
        """Return which of the bases of a segment holds where the block runs in it."""
        return 2 if rerun else int(self.is_recorded(actions))

    def recomputed(self, actions: Mapping[str, Action], *, rerun: bool = False) -> list[Value]:
        """Return what is computed again one by one so that backward has all it needs: what reads a value comes first.

        Args:
            rerun: the block is run again as a whole, which needs its input alone.
        """
        found: list[Value] = []
        wanted = {BLOCK_INPUT} if rerun else {value.name for value in self.values if value.needed}
        for value in reversed(self.values):
            if value.name in wanted and actions[value.name] is Action.RECOMPUTE:
                found.append(value)
                wanted.update(value.inputs)
        return found

    def lost(self, actions: Mapping[str, Action], *, rerun: bool = False) -> str | None:
        """Return the name of a value that must be computed again and cannot be; None where there is none."""
        return next((each.name for each in self.recomputed(actions, rerun=rerun) if not each.replayable), None)

    def added_seconds(self, actions: Mapping[str, Action], *, rerun: bool) -> float:
        """Return the seconds that computing again, recording and offloading take, without waits."""
        seconds = sum(value.recompute_s for value in self.recomputed(actions, rerun=rerun))
        seconds += sum(value.offload_s for value in self.values if actions[value.name] is Action.OFFLOAD)
        return seconds + (self.rerun_seconds if rerun else self.recording_s * self.is_recorded(actions))

    def bytes_of(self, actions: Mapping[str, Action], action: Action, *, counts_cached: bool = True) -> float:
        """Return the bytes of the values that have an action."""
        return sum(v.nbytes for v in self.values if actions[v.name] is action and (counts_cached or not v.cached))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Segment:
    """A stretch of a training cycle between two events, and the peak memory in it."""

    #: Entry of the stack whose forward or backward runs; -1: none.
    running: int = dataclasses.field(default=-1, metadata={"least": -1})
    is_forward: bool = False
    #: Entries between their forward and their backward, without `running`.
    alive: tuple[int, ...] = ()
    #: The peak, without what plans add: where the running entry keeps all that backward needs, or none runs; where
    #: something of it is replayed; where it is run again. None: as the first.
    plain_bytes: float = dataclasses.field(metadata=_CHANGE)
    replay_bytes: float | None = dataclasses.field(default=None, metadata=_CHANGE)
    rerun_bytes: float | None = dataclasses.field(default=None, metadata=_CHANGE)
    #: Of a forward: the most that what the running entry holds adds to the peak.
    kept_limit_bytes: float = dataclasses.field(default=math.inf, metadata=_LIMIT)
    #: `plain_bytes` and the others include `cached` values: other entries that keep these add nothing for them.
    holds_casts: bool = False
    #: Where no entry runs; those of an entry are in its class.
    seconds: float = 0.0

    @property
    def bases(self) -> tuple[float, float, float]:
        """The peak without what plans add, where the running entry is kept, replayed, and run again."""
        replay, rerun = (self.plain_bytes if each is None else each for each in (self.replay_bytes, self.rerun_bytes))
        return self.plain_bytes, replay, rerun


class Moment(NamedTuple):
    """A segment of the cycle, and what changes when it begins."""

    segment: Segment
    #: An entry takes its seconds in the first segment of its own in each direction.
    seconds: float
    #: Values come back in it, and none go: a backward runs, or ran last.
    is_backward: bool
    #: Entries whose forward has ended since the segment before, and whose backward begins.
    handed: tuple[int, ...]
    consumed: tuple[int, ...]
    #: Entries whose values can come back by now, in the order of backward: the forward of each has ended.
    readable: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class CostTable:
    """Bytes and seconds of a stack of blocks, and the links to host memory.

    Make one with `from_dict` or `from_json`, which check what they read; the constructor checks nothing.
    """

    classes: Mapping[str, BlockClass]
    #: Name of the class of each block, in the order of the forward.
    stack: tuple[str, ...]
    fixed_bytes: float = 0.0
    d2h_bytes_per_s: float = 0.0
    h2d_bytes_per_s: float = 0.0
    #: None: no limit.
    host_bytes: float | None = dataclasses.field(default=None, metadata=_LIMIT)
    #: The cycle, in the order of time; None: the stack runs forward, then backward.
    segments: tuple[Segment, ...] | None = None

    @functools.cached_property
    def timeline(self) -> tuple[Segment, ...]:
        """The segments, made of the stack where none are given: the working set holds a block's own values."""
        if self.segments is not None:
            return self.segments
        forward, backward, gradients = [], [], sum(block.gradient_bytes for block in self.blocks)
        for index, block in enumerate(self.blocks):
            nbytes, alive = self.fixed_bytes + block.working_set_bytes, tuple(range(index))
            one = Segment(running=index, alive=alive, plain_bytes=nbytes, kept_limit_bytes=0.0)
            forward.append(dataclasses.replace(one, is_forward=True))
            nbytes += gradients
            backward.append(
                dataclasses.replace(
                    one,
                    plain_bytes=nbytes,
                    replay_bytes=nbytes + block.recompute_bytes,
                    rerun_bytes=nbytes + block.rerun_bytes,
                )
            )
            gradients -= block.gradient_bytes
        return (*forward, *reversed(backward))

    @functools.cached_property
    def moments(self) -> tuple[Moment, ...]:
        """The segments of the cycle, with what changes when each begins."""
        entries = range(len(self.stack))
        runs = [(segment.running, segment.is_forward) for segment in self.timeline]
        begins = {run: number for number, run in reversed(list(enumerate(runs)))}
        ends = {index: number for number, (index, is_forward) in enumerate(runs) if is_forward}
        backwards = sorted((index for index in entries if (index, False) in begins), key=lambda j: begins[j, False])
        found: list[Moment] = []
        is_backward = False
        for number, segment in enumerate(self.timeline):
            index, seconds = segment.running, segment.seconds
            is_first = begins[runs[number]] == number
            if index >= 0:
                is_backward = not segment.is_forward
                block = self.blocks[index]
                seconds = (block.backward_s if is_backward else block.forward_s) * is_first
            handed = tuple(entry for entry in entries if ends.get(entry) == number - 1)
            consumed = (index,) if index >= 0 and is_first and not segment.is_forward else ()
            readable = tuple(itertools.takewhile(lambda j: ends.get(j, -1) < number, backwards))  # noqa: B023
            found.append(Moment(segment, seconds, is_backward, handed, consumed, readable))
        return tuple(found)

    @functools.cached_property
    def blocks(self) -> tuple[BlockClass, ...]:
        """The class of each block, in the order of the forward."""
        return tuple(self.classes[name] for name in self.stack)

    @property
    def plain_seconds(self) -> float:
        """Seconds of a step in which every value is kept."""
        between = sum(segment.seconds for segment in self.segments or () if segment.running < 0)
        return sum(block.forward_s + block.backward_s for block in self.blocks) + between

    @classmethod
    def from_dict(cls, table: Mapping[str, Any]) -> CostTable:
        """Read a cost table from plain data.

        Args:
            table: fields as in docs/planning.md, sizes in bytes, times in seconds.
        Raises:
            CostTableError: a field is missing, unknown or makes no sense. The message says which one.

        Example::

            >>> from actckpt.planner import CostTable
            >>> block = {"forward_s": 0.1, "backward_s": 0.2, "working_set_bytes": 300, "values": []}
            >>> CostTable.from_dict({"version": 1, "classes": {"block": block}, "stack": ["block"]}).plain_seconds
            0.30000000000000004
        """
        where = "cost table"
        given = {key: each for key, each in as_table(table, where).items() if each != 0 or key not in _RETIRED}
        version = given.pop("version", None)
        if version is None:
            raise missing("version", where)
        if version != COST_TABLE_VERSION or isinstance(version, bool):
            raise CostTableError(f"{where}.version is {version!r}. This actckpt reads version {COST_TABLE_VERSION}.")
        costs = cls(**read_fields(cls, given, where))
        if not costs.stack:
            raise CostTableError(f"{where}.stack is empty. List the class of each block, in forward order.")
        check_names(costs.stack, costs.classes, f"{where}.stack")
        entries = range(len(costs.stack))
        for number, segment in enumerate(costs.segments or ()):
            if not {segment.running, *segment.alive} <= {-1, *entries} or -1 in segment.alive:
                raise CostTableError(
                    f"{where}.segments[{number}] names a block that is not there. Their numbers are 0 to {entries[-1]}."
                )
        absent, there = sorted(("d2h_bytes_per_s", "h2d_bytes_per_s"), key=lambda name: getattr(costs, name))
        if getattr(costs, absent) == 0 < getattr(costs, there):
            raise CostTableError(
                f"{where}.{there} is {getattr(costs, there)}, but {absent} is 0: nothing could go there and come "
                "back. Give both, or neither."
            )
        return costs if costs.segments else dataclasses.replace(costs, segments=None)

    @classmethod
    def from_json(cls, path: str | Path) -> CostTable:
        """Read a cost table from a JSON file.

        Raises:
            OSError: the file cannot be read.
            CostTableError: it is no JSON, or as in `from_dict`.
        """
        return cls.from_dict(read_json(path, what="cost table", instead="See docs/planning.md for what it must be."))

    def to_dict(self) -> dict[str, Any]:
        """Return the table as plain data, which `from_dict` reads."""
        return {"version": COST_TABLE_VERSION, **plain_data(self)}

    def to_json(self, path: str | Path) -> None:
        """Write the table to a JSON file, which `from_json` reads."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")


def as_cost_table(costs: CostTable | Mapping[str, Any]) -> CostTable:
    """Return a cost table, read from plain data where it is not one yet."""
    return costs if isinstance(costs, CostTable) else CostTable.from_dict(costs)
