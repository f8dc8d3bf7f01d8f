"""Which operators named by a policy ran: without this, a policy that matches nothing would do nothing, silently.

torch decomposes many operators before a recorder sees them: `aten.linear` runs as `aten.addmm`. So the first step of a
call site (or of all blocks of one `apply`) is watched. Watching ends at the site's first opening after the graph of its
first region is gone. Then the plain recorder is used again.
"""

import weakref
from typing import Any

from actckpt import _C
from actckpt._core.sites import warn_user
from actckpt._core.warning_texts import WarningText
from actckpt._replay.choice import Choice, Table
from actckpt._replay.operators import operator_of
from actckpt._text import operator_names

__all__ = ["Matches"]

#: Placeholder for the operators inside compiled code, which no mode sees.
_COMPILED = None
#: Maximum number of operators listed for a preset.
_MAX_NAMED = 4
_NONE_RAN = WarningText(
    "{region} ran none of the {kind} that its policy names in its first step, so they have no effect: {names}.",
    "Name operators that run: r.report() of actckpt.region lists them.",
    per="region or model",
)


class Matches:
    """The operators that the policy of one call site names, and those that ran there."""

    __slots__ = ("_first", "_is_over", "_preset", "_table", "operators", "ran")

    def __init__(self) -> None:
        self.operators: tuple[Any, ...] = ()
        self.ran: set[Any] = set()
        self._first: weakref.ref[Any] | None = None
        self._is_over = False
        self._table: Table | None = None
        self._preset = ""

    def __reduce__(self) -> tuple[Any, ...]:
        return Matches, ()  # a copy starts empty

    def is_watching(self, choice: Choice) -> bool:
        """Whether to watch a region that opens. Warns after the first step if nothing matched."""
        if choice.operators != self.operators:
            self.operators, self.ran, self._first, self._is_over = choice.operators, set(), None, False
            self._table, self._preset = choice.table, choice.preset
        if self._is_over or not self.operators:
            return False
        if self._first is not None and self._first() is None:
            self.end("A region")
        return not self._is_over and len(self.ran) < len(self.operators)

    def note(self, func: Any) -> None:
        """Note that an operator ran."""
        named = operator_of(func).name if self._preset else func
        if named in self.operators and not _C.is_paused() and not _is_view(func):
            self.ran.add(named)

    def see(self, tape: Any, *, has_compiled: bool) -> None:
        """Record a watched tape, and whether compiled code ran meanwhile."""
        if self._first is None:
            self._first = weakref.ref(tape)
        if self._table is not None:
            self.ran |= self._table.matched
        if has_compiled:
            self.ran.add(_COMPILED)

    def end(self, who: str) -> None:
        """Stop watching; warn if no operator of the policy ran."""
        if self._is_over:
            return
        self._is_over = True
        if self._table is not None:
            self.ran |= self._table.matched  # that ran elsewhere since
        if self.operators and not self.ran:
            kind = "places" if self._table else "operators"
            warn_user(_NONE_RAN, region=who, kind=kind, names="; ".join(self.idle()))

    def idle(self) -> tuple[str, ...]:
        """Return the operators that did not run, each with its decomposition where that is known."""
        if _COMPILED in self.ran:
            return ()
        if self._table is not None:
            table = self._table
            idle = [text for text in self.operators if text not in table.matched]
            return tuple(f"{text} (nearest of those that ran: {table.nearest(text)})" for text in idle)
        if self._preset:
            some = ", ".join(dict.fromkeys(str(name).rpartition(".")[0] for name in self.operators[:_MAX_NAMED]))
            return () if self.ran else (f"{self._preset!r} ({some} and others)",)
        packets: dict[Any, list[Any]] = {}
        for op in self.operators:
            packets.setdefault(getattr(op, "overloadpacket", op), []).append(op)
        names: list[str] = []
        for packet, ops in packets.items():
            if hasattr(packet, "overloads") and len(ops) == len(packet.overloads()):
                names += [] if self.ran.intersection(ops) else [_explained(packet, ops[0])]
            else:
                names += [_explained(op, op) for op in ops if op not in self.ran]
        return tuple(names)


def _is_view(op: Any) -> bool:
    return bool(getattr(operator_of(op), "is_view", False))


def _explained(name: Any, op: Any) -> str:
    packet = str(getattr(op, "overloadpacket", op))
    if _is_view(op):
        return f"{name} (makes views, which have no bytes of their own)"
    if packet in operator_names.RUNS_AS:
        return f"{name} (runs as {operator_names.RUNS_AS[packet]})"
    if operator_names.is_composite(op):
        return f"{name} (is made of other operators, and these run)"
    return f"{name} (pass {packet!r} for all overloads)" if str(name) != packet else str(name)
