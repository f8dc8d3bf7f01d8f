"""What a region did with every value that autograd saved, by operator and module."""

import dataclasses
import json
import weakref
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from actckpt._C import Entry, Meter, OffloadSession
from actckpt._text.places import Place
from actckpt._text.sizes import format_bytes
from actckpt._text.tables import aligned
from actckpt.action import Action

__all__ = ["READ", "SMALL", "Entry", "Figures", "RecordedValue", "Report", "Row", "SavedValue", "explained"]

#: Why a value that autograd did not save is held; C++ uses the same text.
READ = "others are replayed from it"
#: Why a value that the policy offloads stays.
SMALL = "smaller than min_bytes"
_NOTHING = "Nothing was moved here."


@dataclasses.dataclass
class RecordedValue:
    """A value that no recorder saw: the fields of an `Entry` that reports use."""

    operator: str
    module: str | None
    action: Action
    why: str
    storage: weakref.ref[torch.UntypedStorage] | None
    nbytes: int
    num_replays: int = 0
    #: The number of values it represents.
    num_values: int = 1


@dataclasses.dataclass(frozen=True)
class Row:
    """Values of one operator in one module."""

    operator: str
    module: str | None
    num_values: int
    kept_bytes: int
    offloaded_bytes: int
    recomputed_bytes: int
    #: How often a value of this row was recomputed.
    num_replays: int
    #: Why values that the policy wanted to recompute were kept: reason -> number of values.
    not_replayed: dict[str, int]


@dataclasses.dataclass(frozen=True)
class SavedValue:
    """One value that autograd saved."""

    #: Names it in every step and process, and as a key of a policy. None for inputs, for what no recorded operator
    #: made, and if the first report was requested after the first step.
    place: Place | None
    action: Action
    nbytes: int
    #: Why it got its action, if not from the policy alone; else empty.
    why: str

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain data, the place as text."""
        place = None if self.place is None else str(self.place)
        return {"place": place, "action": self.action.value, "nbytes": self.nbytes, "why": self.why}


@dataclasses.dataclass(frozen=True)
class Report:
    """What became of the saved tensors of a region. `print` it for a table."""

    rows: tuple[Row, ...]
    #: Why there are no rows, if nothing was recorded; else empty.
    note: str = ""
    #: Operators that the policy names and that did not run here in the first step, each with what ran instead.
    operators_not_run: tuple[str, ...] = ()
    #: Peak of the live bytes of the values made in the region: saved, kept, replayed or loaded. Not counted: inputs and
    #: parameters, gradients, and what autograd did not save and the region did not hold.
    peak_bytes: int = 0
    #: The single values, in the order of saving.
    values: tuple[SavedValue, ...] = ()

    @property
    def kept_bytes(self) -> int:
        """Bytes of values whose storage was kept."""
        return sum(row.kept_bytes for row in self.rows)

    @property
    def offloaded_bytes(self) -> int:
        """Bytes of offloaded values."""
        return sum(row.offloaded_bytes for row in self.rows)

    @property
    def recomputed_bytes(self) -> int:
        """Bytes of dropped values."""
        return sum(row.recomputed_bytes for row in self.rows)

    @classmethod
    def of(
        cls,
        entries: list[Entry],
        note: str = "",
        operators_not_run: tuple[str, ...] = (),
        *,
        peak_bytes: int = 0,
    ) -> "Report":
        """Sum up entries by operator and module, in the order of their first value."""
        groups: dict[tuple[str, str | None], list[Entry]] = {}
        for entry in entries:
            groups.setdefault((entry.operator, entry.module), []).append(entry)
        rows = tuple(_row(*key, members) for key, members in groups.items())
        values = tuple(SavedValue(_place(entry), entry.action, entry.nbytes, entry.why) for entry in entries)
        return cls(rows, "" if groups else note, operators_not_run, peak_bytes, values)

    def as_dict(self) -> dict[str, Any]:
        """Return rows, values and sums as plain data."""
        return {
            "rows": [dataclasses.asdict(row) for row in self.rows],
            "values": [value.as_dict() for value in self.values],
            "note": self.note,
            "operators_not_run": self.operators_not_run,
            "kept_bytes": self.kept_bytes,
            "offloaded_bytes": self.offloaded_bytes,
            "recomputed_bytes": self.recomputed_bytes,
            "peak_bytes": self.peak_bytes,
        }

    def as_json(self) -> str:
        """Return `as_dict` as JSON."""
        return json.dumps(self.as_dict(), indent=2)

    def table(self, *, places: bool = False) -> str:
        """Return a table for people, or one line that says why there is none.

        Args:
            places: one line per value, with its place, instead of one per operator and module.
        """
        if self.note:
            return self.note
        if places:
            return aligned([("place", "bytes", "action", "why"), *map(_value_cells, self.values)], left=4)
        header = ("operator", "module", "values", "kept", "offloaded", "recomputed", "replays", "why kept")
        lines = [header, *(_cells(row) for row in self.rows)]
        lines.append(
            ("all", "", "", *map(format_bytes, (self.kept_bytes, self.offloaded_bytes, self.recomputed_bytes)), "", "")
        )
        table = [aligned(lines, left=len(header))]
        if self.operators_not_run:
            table.append(f"operators of the policy that did not run: {'; '.join(self.operators_not_run)}")
        table.append(f"peak so far: {format_bytes(self.peak_bytes)}")
        return "\n".join(table)

    def __str__(self) -> str:
        return self.table()


class Figures:
    """The data for the report of one region."""

    __slots__ = ("entries", "meter", "session", "site")

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.meter = Meter()
        self.session: OffloadSession | None = None
        #: The call site of the region; notified when a report is requested.
        self.site: Any = None

    def watch(self, session: OffloadSession) -> None:
        """Report on a block that offloads everything, without recorded operators."""
        self.session = session
        session.watch(self.meter)

    def report(self, note: str = "", operators_not_run: tuple[str, ...] = ()) -> Report:
        """Return the current report."""
        if self.site is not None:
            self.site.is_reported = True
        if self.session is None:
            return Report.of(self.entries, note, operators_not_run, peak_bytes=self.meter.peak_bytes)
        num_moved, moved_bytes, num_small, small_bytes = self.session.moved_and_small()
        why = {SMALL: num_small} if num_small else {}
        count = num_moved + num_small
        row = Row("(all)", None, count, small_bytes, moved_bytes, recomputed_bytes=0, num_replays=0, not_replayed=why)
        return Report((row,) if count else (), "" if count else note or _NOTHING, peak_bytes=self.meter.peak_bytes)


def explained(entries: list[Entry], tensor: Tensor) -> str:
    """Return why a tensor got its action."""
    storage = tensor.untyped_storage()
    matching = [entry for entry in entries if entry.storage() is storage]
    if not matching and tensor.is_leaf and tensor.requires_grad:
        return (
            f"Tensor of shape {tuple(tensor.shape)}: a leaf that requires grad, as parameters are. It stays: somebody "
            "else holds it anyway."
        )
    if not matching:
        return (
            f"Tensor of shape {tuple(tensor.shape)}: autograd did not save it in this region, so nothing is held on "
            "its account."
        )
    return "\n".join(_explained_one(entry) for entry in matching)


def _explained_one(entry: Entry) -> str:
    where = f" in {entry.module}" if entry.module else ""
    done = {Action.KEEP: "kept", Action.OFFLOAD: "offloaded", Action.RECOMPUTE: "dropped"}[entry.action]
    why = entry.why or "the policy says so"
    replays = f"; replayed {entry.num_replays} times so far" if entry.action is Action.RECOMPUTE else ""
    return f"Made by {entry.operator}{where}, {format_bytes(entry.nbytes)}: {done}, because {why}{replays}."


def _row(operator: str, module: str | None, entries: list[Entry]) -> Row:
    sums = Counter(dict.fromkeys(Action, 0))
    for entry in entries:
        sums[entry.action] += entry.nbytes
    return Row(
        operator=operator,
        module=module,
        num_values=len(entries),
        kept_bytes=sums[Action.KEEP],
        offloaded_bytes=sums[Action.OFFLOAD],
        recomputed_bytes=sums[Action.RECOMPUTE],
        num_replays=sum(entry.num_replays for entry in entries),
        not_replayed=dict(Counter(entry.why for entry in entries if entry.why)),
    )


def _place(entry: Entry) -> Place | None:
    if entry.module is None or entry.occurrence < 0:
        return None
    return Place(entry.module, entry.operator, entry.occurrence, entry.result, entry.call)


def _value_cells(value: SavedValue) -> tuple[str, ...]:
    place = "(no place)" if value.place is None else str(value.place)
    return place, format_bytes(value.nbytes), value.action.value, value.why


def _cells(row: Row) -> tuple[str, ...]:
    reasons = ", ".join(f"{count} x {reason}" for reason, count in row.not_replayed.items())
    sizes = map(format_bytes, (row.kept_bytes, row.offloaded_bytes, row.recomputed_bytes))
    return (row.operator, row.module or "", str(row.num_values), *sizes, str(row.num_replays), reasons)
