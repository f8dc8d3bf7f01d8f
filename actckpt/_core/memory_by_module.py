"""Which modules hold how much memory: found when an error is raised, so it costs nothing before.

NOTE [ Memory by module ]

Rule 1. Parameters, buffers, gradients and the state of optimizers are those of the model and the optimizers.
Rule 2. What is kept for backward stands in the nodes of the autograd graphs to which living tensors lead. Nodes are
        numbered in the order of the forward, so a node counts for the module whose parameter was used last before it.
Rule 3. What regions hold for reruns and replays are inputs, of the module in which the region ran.
Rule 4. Each storage counts once, in the first column that has it. All else that is allocated is "other": what kernels
        and the program hold, other models, what is on its way from a store.
"""

from __future__ import annotations

import gc
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from actckpt import _C
from actckpt._core import devices, torch_private
from actckpt._core.rescue import add_text
from actckpt._core.storages import storages_of, tensors_in
from actckpt._text.sizes import format_bytes
from actckpt._text.tables import aligned

__all__ = ["explain"]

_COLUMNS = ("kept", "inputs", "parameters", "gradients", "optimizer")
#: Modules in a table, which has ten lines.
_MAX_ROWS = 5
_OUTSIDE = "(no module)"
_TITLE = "actckpt: what holds the memory of"


def explain(error: BaseException, model: torch.nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Add to an error which modules of a model hold how much, unless it says so already."""
    if _TITLE not in "\n".join((str(error), *getattr(error, "__notes__", ()))):
        add_text(error, _Table(model, optimizers).text())


class _Table:
    """Bytes by module and column."""

    def __init__(self, model: torch.nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        parameters = dict(model.named_parameters())
        self._parts = {id(parameter): _part(name) for name, parameter in parameters.items()}
        self._device = next((p.device for p in parameters.values()), torch.device("cpu"))
        self._rows: defaultdict[str, Counter[str]] = defaultdict(Counter)
        #: By identity; held, so that no other one gets it.
        self._seen: dict[int, torch.UntypedStorage] = {}
        for name, tensor in (*parameters.items(), *model.named_buffers()):
            self._add(_part(name), "parameters", tensor)
        for name, parameter in parameters.items():
            self._add(_part(name), "gradients", parameter.grad)
        for optimizer in optimizers:
            for trained, state in optimizer.state.items():
                self._add(self._parts.get(id(trained), _OUTSIDE), "optimizer", list(state.values()))
        living = [found for found in gc.get_objects() if issubclass(type(found), Tensor)]
        self._add_graph(living)
        self._num_others = self._add(_OUTSIDE, "other", living)

    def _add(self, part: str, column: str, value: Any) -> int:
        """Count the storages of tensors on the device that were not seen; return their bytes."""
        nbytes = 0
        for storage in storages_of(value):
            if storage.device == self._device and id(storage) not in self._seen:
                self._seen[id(storage)] = storage
                nbytes += storage.nbytes()
        if nbytes and column in _COLUMNS:
            self._rows[part][column] += nbytes
        return nbytes

    def _add_graph(self, living: Iterable[Tensor]) -> None:
        part = _OUTSIDE
        for node in _nodes(living):
            for before, _ in node.next_functions:
                leaf = getattr(before, "variable", None)
                if isinstance(leaf, torch.nn.Parameter):
                    part = self._parts.get(id(leaf), _OUTSIDE)  # of another model
            for saved in torch_private.saved_in(node):
                for column, tensors in _held_by(saved):
                    self._add(part, column, tensors)

    def text(self) -> str:
        """Return it for people, in ten lines at most."""
        counted = sum(sum(row.values()) for row in self._rows.values())
        accelerator = devices.counting(self._device)
        total = counted + self._num_others if accelerator is None else accelerator.allocated_bytes(self._device)
        of_capacity = "" if accelerator is None else f"; {_reserved(self._device)}"
        rows = sorted(self._rows.items(), key=lambda item: -sum(item[1].values()))
        if len(rows) > _MAX_ROWS:
            rest = sum((row for _, row in rows[_MAX_ROWS - 1 :]), Counter())
            rows = [*rows[: _MAX_ROWS - 1], (f"({len(rows) - _MAX_ROWS + 1} more)", rest)]
        lines = [("module", "all", *_COLUMNS), *(_cells(name, row) for name, row in rows)]
        table = aligned(lines, left=1)
        return (
            f"{_TITLE} {self._device}: {format_bytes(total)} are allocated{of_capacity}.\n{table}\n"
            f"other: {format_bytes(max(0, total - counted))}\n"
            "Kept: saved tensors that wait for backward. actckpt.apply(model, budget=...) keeps what fits."
        )


def _cells(name: str, row: Counter[str]) -> tuple[str, ...]:
    return name, *map(format_bytes, (sum(row.values()), *(row[column] for column in _COLUMNS)))


def _reserved(device: torch.device) -> str:
    free, capacity = torch.accelerator.get_memory_info(device)
    reserved = torch.accelerator.memory_reserved(device)
    return f"the allocator has {format_bytes(reserved)}, {format_bytes(free)} of {format_bytes(capacity)} are free"


def _part(name: str) -> str:
    """Return under which name the module of a parameter counts: `layers.*.mlp` of all `layers.<number>.mlp.fc1`."""
    parts = ["*" if part.isdecimal() else part for part in name.split(".")[:-1]]
    end = parts.index("*") + 2 if "*" in parts else 2
    return ".".join(parts[:end]) or _OUTSIDE


def _nodes(living: Iterable[Tensor]) -> list[Any]:
    """Return the nodes of all graphs, in the order in which forwards made them."""
    found: dict[int, Any] = {}
    reached = [node for tensor in living if (node := torch_private.node_of(tensor)) is not None]
    while reached:
        node = reached.pop()
        if id(node) not in found:
            found[id(node)] = node
            reached += [before for before, _ in node.next_functions if before is not None]
    nodes = [node for node in found.values() if not hasattr(node, "variable")]  # those of leaves have no number
    return sorted(nodes, key=torch_private.sequence_number)


def _held_by(saved: Any) -> Iterator[tuple[str, Any]]:
    """Yield the columns and tensors of what autograd holds in the place of a saved tensor."""
    if isinstance(saved, _C.Slot):
        frame = saved.frame
        args = frame.args if frame.region is None else frame.region.inputs.tensors
        yield "inputs", [arg.held if isinstance(arg, _C.HeldTensor) else arg for arg in args or ()]
    elif isinstance(saved, _C.Handle):
        value = saved.window.value
        yield "kept", [value.held, value.cached]
        yield "inputs", [each.held for each in _leads_to(value)]
    else:
        yield "kept", list(tensors_in(saved))


def _leads_to(value: Any) -> list[Any]:
    """Return the values from which one is replayed."""
    found: dict[int, Any] = {}
    reached = [value]
    while reached:
        each = reached.pop()
        if id(each) not in found:
            found[id(each)] = each
            if each.held is None and each.step is not None:
                reached += each.step.inputs
    return list(found.values())
