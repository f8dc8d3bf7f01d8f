"""`profile`: which modules and operators hold memory at the peak of a training step."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from actckpt._blocks.choosing import check_model
from actckpt._core import torch_private
from actckpt._core.sites import modules_on_stack, qualified_name
from actckpt._core.storages import storages_of
from actckpt._report_page.content import Page, Table, bytes_cell, number_cell, share_cell
from actckpt._report_page.html_page import tables_as_html, to_html
from actckpt._text.sizes import format_bytes
from actckpt._text.tables import aligned
from actckpt.memory import LiveStorages

__all__ = ["MemoryProfile", "ProfileRow", "profile"]

By = Literal["module", "operator"]
Phase = Literal["forward", "backward"]
_NO_MODULE = "(no module)"
_NO_CHARTS = (
    "Memory over a step: left out. A profile has the peak of the step, not what was before and after it.",
    "Time against memory, trials: left out. A profile has no times. actckpt.plan(step, model=model, budget=...) has.",
)


@dataclasses.dataclass(frozen=True)
class ProfileRow:
    """What one operator made in a module, or in the same module of repeated blocks, and is alive at the peak.

    Attributes:
        module: qualified name of the innermost module whose forward ran, with `*` for the number of a repeated block.
        operator: the operator that made it.
        phase: whether it was made in the forward or in the backward.
        nbytes: bytes of the storages.
        count: number of the storages.
    """

    module: str
    operator: str
    phase: Phase
    nbytes: int
    count: int


@dataclasses.dataclass(frozen=True)
class MemoryProfile:
    """Memory of a training step at its peak.

    Attributes:
        peak_bytes: most bytes alive at once of what the step made, without gradients of parameters.
        peak_phase: whether the peak is in the forward or in the backward.
        parameter_bytes: bytes of parameters and buffers of the model.
        gradient_bytes: bytes of gradients of parameters after the step.
        rows: what is alive at the peak, largest first. Their bytes add up to `peak_bytes`.
    """

    peak_bytes: int
    peak_phase: Phase
    parameter_bytes: int
    gradient_bytes: int
    rows: tuple[ProfileRow, ...]

    def table(self, by: By | None = None, *, top: int | None = 15) -> str:
        """Return a table of the rows.

        Args:
            by: one row per module or per operator; None: per module, operator and phase.
            top: number of rows; the others are summed up in one more. None: all.
        Raises:
            ValueError: `by` or `top` is none of these.
        """
        if by is not None and by not in get_args(By):
            raise ValueError(f"table: by={by!r}. Pass 'module', 'operator' or None.")
        if top is not None and (type(top) is not int or top < 1):
            raise ValueError(f"table: top={top!r}. Pass the number of rows, from 1 on, or None for all.")
        columns = (by,) if by is not None else ("module", "operator", "phase")
        sums: defaultdict[tuple[str, ...], list[int]] = defaultdict(lambda: [0, 0])
        for row in self.rows:
            found = sums[tuple(getattr(row, column) for column in columns)]
            found[0], found[1] = found[0] + row.nbytes, found[1] + row.count
        ranked = sorted(sums.items(), key=lambda item: -item[1][0])
        shown, others = (ranked, []) if top is None else (ranked[:top], ranked[top:])
        lines = [(*columns, "tensors", "bytes", "of the peak"), *(self._cells(key, *found) for key, found in shown)]
        if others:
            key = (f"{len(others)} others", *[""] * (len(columns) - 1))
            lines.append(self._cells(key, *(sum(found[i] for _, found in others) for i in (0, 1))))
        return aligned(lines, left=len(columns))

    def _cells(self, key: tuple[str, ...], nbytes: int, count: int) -> tuple[str, ...]:
        return (*key, str(count), format_bytes(nbytes), f"{nbytes / max(self.peak_bytes, 1):.1%}")

    def to_html(self, path: str | Path | None = None) -> str | None:
        """Write a page with the summary and all rows, in a table that can be sorted. It is one file and loads nothing.

        Args:
            path: of the file to write; None: return the page instead.
        Raises:
            OSError: the file cannot be written.
        """
        page = Page("Memory at the peak of a step", [self.summary], left_out=_NO_CHARTS, tables=[self._html_table()])
        return to_html(page, path)

    def _repr_html_(self) -> str:
        """Return the table for a notebook."""
        return tables_as_html([self.summary], [self._html_table()])

    def _html_table(self) -> Table:
        most = max(self.peak_bytes, 1)
        numbers = ((number_cell(r.count), bytes_cell(r.nbytes), share_cell(r.nbytes / most)) for r in self.rows)
        lines = [(row.module, row.operator, row.phase, *cells) for row, cells in zip(self.rows, numbers, strict=True)]
        columns = ("module", "operator", "phase", "tensors", "bytes", "of the peak")
        return Table("Alive at the peak, by module and operator", columns, lines)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return dataclasses.asdict(self)

    def as_json(self) -> str:
        """Return a JSON object."""
        return json.dumps(self.as_dict(), indent=1)

    @property
    def summary(self) -> str:
        """The peak, and the memory of parameters and gradients beside it, in one line."""
        return (
            f"peak {format_bytes(self.peak_bytes)}, in the {self.peak_phase}, beside parameters and buffers "
            f"({format_bytes(self.parameter_bytes)}) and their gradients ({format_bytes(self.gradient_bytes)})"
        )

    def __str__(self) -> str:
        return f"{self.summary}\n{self.table()}"


def profile(step: Callable[[], object], *, model: torch.nn.Module) -> MemoryProfile:
    """Run a training step once and return which modules and operators hold memory at its peak.

    The step runs with what `apply` did to the model, if anything. Tensors that existed before the step are in no row.
    Temporary memory inside of a kernel, and what compiled code allocates, cannot be seen.

    Args:
        step: runs forward and backward.
        model: the model whose modules name the rows. Its parameters and their gradients are not in rows.
    Raises:
        TypeError: `model` is not a module, or `step` cannot be called.
    Cost: some microseconds per operator.

    Example::

        >>> import torch, actckpt
        >>> block = lambda: torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU())
        >>> model = torch.nn.Sequential(block(), block(), torch.nn.Linear(64, 1))
        >>> x = torch.randn(32, 64)
        >>> found = actckpt.profile(lambda: model(x).sum().backward(), model=model)
        >>> print(found.table(by="operator", top=1))
        operator                tensors      bytes  of the peak
        aten.addmm.default            2  16.00 KiB        66.7%
        2 others                      2   8.00 KiB        33.3%
    """
    check_model(model, "profile")
    if not callable(step):
        raise TypeError(f"profile: step is a {type(step).__name__}. Pass a function that runs forward and backward.")
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    counting = _Counting(model, device)
    with counting:
        step()
    entries, phase = counting.at_peak()
    held: defaultdict[tuple[str, str, Phase], list[int]] = defaultdict(list)
    for key, nbytes in entries:
        held[key].append(nbytes)
    rows = [ProfileRow(*key, sum(found), len(found)) for key, found in held.items()]
    gradients = [parameter.grad for parameter in model.parameters()]
    return MemoryProfile(
        peak_bytes=counting.peak_bytes,
        peak_phase=phase,
        parameter_bytes=_bytes_of([*model.parameters(), *model.buffers()]),
        gradient_bytes=_bytes_of(gradients),
        rows=tuple(sorted(rows, key=lambda row: (-row.nbytes, row.module, row.operator, row.phase))),
    )


def _bytes_of(tensors: Iterable[Any]) -> int:
    storages = {id(storage): storage for storage in storages_of(list(tensors))}
    return sum(storage.nbytes() for storage in storages.values())


class _Counting(LiveStorages):
    """Counts live storages, and notes what made each and every change of its bytes."""

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        super().__init__(parameters=model.parameters(), device=device)
        self._model = model
        self._operator = ""
        self._patterns: dict[str, str] = {}
        self._keys: dict[Any, tuple[str, str, Phase]] = {}
        #: Entry, change of its bytes, and phase.
        self._changes: list[tuple[Any, int, Phase]] = []

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self._operator = str(func)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _change(self, entry: Any, change: int, *, now_s: float | None = None) -> None:
        if not entry.is_gradient and change != 0:
            if id(entry) not in self._keys:
                self._keys[id(entry)] = (self._module(), self._operator, _phase())
            self._changes.append((entry, change, _phase()))  # holds the entry: its id() stays its own
        super()._change(entry, change, now_s=now_s)

    def _module(self) -> str:
        innermost = next(modules_on_stack(), None)
        if innermost is None:
            return _NO_MODULE
        name = qualified_name(self._model, innermost)
        if name not in self._patterns:
            self._patterns[name] = _pattern(self._model, name)
        return self._patterns[name]

    def at_peak(self) -> tuple[list[tuple[tuple[str, str, Phase], int]], Phase]:
        """Return what made each storage that is alive at the peak, with its bytes, and the phase of the peak."""
        total = most = end = 0
        phase: Phase = "forward"
        for number, (_, change, changed_in) in enumerate(self._changes, 1):
            total += change
            if total > most:
                most, end, phase = total, number, changed_in
        alive: defaultdict[int, int] = defaultdict(int)
        for entry, change, _ in self._changes[:end]:
            alive[id(entry)] += change
        return [(self._keys[number], nbytes) for number, nbytes in alive.items() if nbytes > 0], phase


def _pattern(model: torch.nn.Module, name: str) -> str:
    """Return a qualified name with `*` for each number in a row of modules of one type."""
    parts, parent = name.split("."), model
    for index, part in enumerate(parts):
        if part.isdigit() and len({type(child) for child in parent.children()}) == 1:
            parts[index] = "*"
        parent = getattr(parent, part, parent)
    return ".".join(parts)


def _phase() -> Phase:
    return "forward" if torch_private.current_graph_task_id() == -1 else "backward"
