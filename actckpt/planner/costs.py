"""Cost tables: what the solver and the simulator know of a model and its machine. See docs/planning.md."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from actckpt._error_base import CostTableError
from actckpt.action import Action
from actckpt.planner.fields import Fields
from actckpt.planner.readers import read_json

__all__ = ["BLOCK_INPUT", "COST_TABLE_VERSION", "BlockClass", "CostTable", "Segment", "Value"]

COST_TABLE_VERSION = 1
#: Name of the value that is the input of its block.
BLOCK_INPUT = "x0"


@dataclasses.dataclass(frozen=True)
class Value:
    """A tensor of a block: what it costs to hold and to compute again. Fields as in docs/planning.md."""

    name: str
    nbytes: float
    recompute_s: float = 0.0
    inputs: tuple[str, ...] = ()
    needed: bool = True
    offloadable: bool = True
    replayable: bool = True
    offload_s: float = 0.0

    @classmethod
    def _from_fields(cls, fields: Fields) -> Value:
        name = fields.text("name")
        replayable = fields.flag("replayable", name != BLOCK_INPUT)
        found = cls(
            name=name,
            nbytes=fields.size("bytes"),
            recompute_s=fields.seconds("recompute_s", None if replayable else 0.0),
            inputs=fields.names("inputs", ()),
            needed=fields.flag("needed", True),
            offloadable=fields.flag("offloadable", True),
            replayable=replayable,
            offload_s=fields.seconds("offload_s", 0.0),
        )
        fields.nothing_else()
        return found

    def _to_dict(self) -> dict[str, Any]:
        found = dataclasses.asdict(self)
        return {"name": found.pop("name"), "bytes": found.pop("nbytes"), **found, "inputs": list(self.inputs)}


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

    def bytes_of(self, actions: Mapping[str, Action], action: Action) -> float:
        """Return the bytes of the values that have an action."""
        return sum(value.nbytes for value in self.values if actions[value.name] is action)

    @classmethod
    def _from_fields(cls, fields: Fields) -> BlockClass:
        values = tuple(Value._from_fields(each) for each in fields.tables("values"))
        _check_values(values, fields.where)
        found = cls(
            forward_s=fields.seconds("forward_s"),
            backward_s=fields.seconds("backward_s"),
            working_set_bytes=fields.size("working_set_bytes"),
            gradient_bytes=fields.size("gradient_bytes", 0),
            values=values,
            rerun=fields.flag("rerun", False),
            recording_s=fields.seconds("recording_s", 0.0),
            rerun_s=fields.optional_seconds("rerun_s"),
            no_rerun=fields.optional_text("no_rerun"),
            recompute_bytes=fields.size("recompute_bytes", 0),
            rerun_bytes=fields.size("rerun_bytes", 0),
            input_bytes=fields.size("input_bytes", 0),
        )
        if found.rerun and found.no_rerun is not None:
            raise CostTableError(
                f"{fields.where}.no_rerun says why there is no rerun, and rerun is true. Leave out one of them."
            )
        fields.nothing_else()
        return found

    def _to_dict(self) -> dict[str, Any]:
        found = {**dataclasses.asdict(self), "values": [value._to_dict() for value in self.values]}
        if not self.input_bytes:
            del found["input_bytes"]
        return {key: each for key, each in found.items() if each is not None}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Segment:
    """A stretch of a training cycle between two events, and the peak memory in it."""

    #: Entry of the stack whose forward or backward runs; -1: none.
    running: int = -1
    is_forward: bool = False
    #: Entries between their forward and their backward, without `running`.
    alive: tuple[int, ...] = ()
    #: The peak, without what plans add: where the running entry keeps all that backward needs, or none runs; where
    #: something of it is replayed; where it is run again. None: as the first.
    plain_bytes: float
    replay_bytes: float | None = None
    rerun_bytes: float | None = None
    #: Of a forward: the most that what the running entry holds adds to the peak.
    kept_limit_bytes: float = math.inf
    #: Where no entry runs; those of an entry are in its class.
    seconds: float = 0.0

    @property
    def bases(self) -> tuple[float, float, float]:
        """The peak without what plans add, where the running entry is kept, replayed, and run again."""
        replay, rerun = (self.plain_bytes if each is None else each for each in (self.replay_bytes, self.rerun_bytes))
        return self.plain_bytes, replay, rerun

    @classmethod
    def _from_fields(cls, fields: Fields, num_entries: int) -> Segment:
        kept_limit_bytes = fields.limit("kept_limit_bytes")
        found = cls(
            running=fields.entry("running", num_entries),
            is_forward=fields.flag("is_forward", False),
            alive=fields.entries("alive", num_entries),
            plain_bytes=fields.difference("plain_bytes"),
            replay_bytes=fields.difference("replay_bytes", optional=True),
            rerun_bytes=fields.difference("rerun_bytes", optional=True),
            seconds=fields.seconds("seconds", 0.0),
            kept_limit_bytes=math.inf if kept_limit_bytes is None else kept_limit_bytes,
        )
        fields.nothing_else()
        return found

    def _to_dict(self) -> dict[str, Any]:
        found = {**dataclasses.asdict(self), "alive": list(self.alive)}
        return {key: each for key, each in found.items() if each not in (None, math.inf)}


@dataclasses.dataclass(frozen=True)
class CostTable:
    """Bytes and seconds of a stack of blocks, and the links to host memory and disk.

    Make one with `from_dict` or `from_json`, which check what they read; the constructor checks nothing.
    """

    classes: Mapping[str, BlockClass]
    #: Name of the class of each block, in the order of the forward.
    stack: tuple[str, ...]
    fixed_bytes: float = 0.0
    d2h_bytes_per_s: float = 0.0
    h2d_bytes_per_s: float = 0.0
    #: None: no limit.
    host_bytes: float | None = None
    disk_bytes: float = 0.0
    disk_write_bytes_per_s: float = 0.0
    disk_read_bytes_per_s: float = 0.0
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
        fields = Fields(table, "cost table")
        fields.version(COST_TABLE_VERSION)
        classes = {name: BlockClass._from_fields(each) for name, each in fields.named_tables("classes").items()}
        stack = fields.names("stack", among=classes)
        if not stack:
            raise CostTableError("cost table.stack is empty. List the class of each block, in forward order.")
        found = cls(
            classes=classes,
            stack=stack,
            fixed_bytes=fields.size("fixed_bytes", 0),
            d2h_bytes_per_s=fields.rate("d2h_bytes_per_s"),
            h2d_bytes_per_s=fields.rate("h2d_bytes_per_s"),
            host_bytes=fields.limit("host_bytes"),
            disk_bytes=fields.limit("disk_bytes") or 0,
            disk_write_bytes_per_s=fields.rate("disk_write_bytes_per_s"),
            disk_read_bytes_per_s=fields.rate("disk_read_bytes_per_s"),
            segments=tuple(Segment._from_fields(each, len(stack)) for each in fields.tables("segments")) or None,
        )
        fields.nothing_else()
        found._check_both_ways("d2h_bytes_per_s", "h2d_bytes_per_s")
        found._check_both_ways("disk_write_bytes_per_s", "disk_read_bytes_per_s")
        return found

    def _check_both_ways(self, out: str, back: str) -> None:
        missing, given = sorted((out, back), key=lambda name: getattr(self, name))
        if getattr(self, missing) == 0 < getattr(self, given):
            raise CostTableError(
                f"cost table.{given} is {getattr(self, given)}, but {missing} is 0: nothing could go there and come "
                "back. Give both, or neither."
            )

    @classmethod
    def from_json(cls, path: str | Path) -> CostTable:
        """Read a cost table from a JSON file.

        Raises:
            OSError: the file cannot be read.
            CostTableError: it is no JSON, or as in `from_dict`.
        """
        try:
            table = read_json(path, what="cost table")
        except ValueError as error:
            raise CostTableError(f"{error}. See docs/planning.md for what it must be.") from None
        return cls.from_dict(table)

    def to_dict(self) -> dict[str, Any]:
        """Return the table as plain data, which `from_dict` reads."""
        table = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        table["classes"] = {name: block._to_dict() for name, block in self.classes.items()}
        table["stack"] = list(self.stack)
        if self.segments is not None:
            table["segments"] = [segment._to_dict() for segment in self.segments]
        return {"version": COST_TABLE_VERSION, **{key: each for key, each in table.items() if each is not None}}

    def to_json(self, path: str | Path) -> None:
        """Write the table to a JSON file, which `from_json` reads."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")


def as_cost_table(costs: CostTable | Mapping[str, Any]) -> CostTable:
    """Return a cost table, read from plain data where it is not one yet."""
    return costs if isinstance(costs, CostTable) else CostTable.from_dict(costs)


def _check_values(values: tuple[Value, ...], where: str) -> None:
    """Names are unique, inputs exist, and each comes before what reads it."""
    inputs = {value.name: value.inputs for value in values}
    if len(inputs) < len(values):
        twice = next(value.name for index, value in enumerate(values) if value.name in list(inputs)[:index])
        raise CostTableError(f"{where}.values has two values named {twice!r}. Give each a name of its own.")
    for index, value in enumerate(values):
        Fields.check_names(value.inputs, inputs, f"{where}.values[{index}].inputs")
    if cycle := _cycle(inputs):
        raise CostTableError(
            f"{where}.values has a cycle: {' <- '.join(cycle)}. No value can be computed from itself; leave out one of "
            "these inputs."
        )
    seen: set[str] = set()
    for index, value in enumerate(values):
        if late := [name for name in value.inputs if name not in seen]:
            raise CostTableError(
                f"{where}.values[{index}] ({value.name!r}) reads {late[0]!r}, which comes after it. Put values in the "
                "order in which the forward computes them."
            )
        seen.add(value.name)


def _cycle(inputs: Mapping[str, tuple[str, ...]]) -> list[str] | None:
    """Return the names along a cycle, its first one again at the end; None where there is none."""
    left = dict(inputs)
    while ready := [name for name, reads in left.items() if not any(read in left for read in reads)]:
        for name in ready:
            del left[name]
    if not left:
        return None
    path = [next(iter(left))]
    while path.count(path[-1]) < 2:  # each of these reads another of these
        path.append(next(read for read in left[path[-1]] if read in left))
    return path[path.index(path[-1]) :]
