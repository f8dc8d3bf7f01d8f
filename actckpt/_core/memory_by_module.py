"""A table of memory by module for out-of-memory errors. It is computed only when an error is raised.

- Parameters, buffers and gradients are those of the model; optimizer state is that of the given optimizers.
- Saved tensors are read from the autograd graphs reachable from local variables of the functions in the traceback and
  of their callers. Nodes are ordered by sequence number. A node counts for the module whose parameter was used last
  before it.
- What regions hold for reruns and replays counts as inputs of the module in which the region ran.
- Each storage counts once, in the first column that has it. "other" is all other allocated memory: workspaces of
  kernels, other tensors of the program, values of the running region, running copies.
"""

from __future__ import annotations

import logging
import types
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from actckpt import _C
from actckpt._core import devices, torch_private
from actckpt._core.rescue import is_out_of_memory
from actckpt._core.storages import gradient_of, storages_of, tensors_in
from actckpt._text.sizes import format_bytes
from actckpt._text.tables import aligned

__all__ = ["explain"]

_logger = logging.getLogger(__name__)

_COLUMNS = ("saved", "inputs", "parameters", "gradients", "optimizer")
#: Maximum number of modules in a table.
_MAX_ROWS = 5
_OUTSIDE = "(no module)"
_TITLE = "actckpt: memory by module on"


def explain(error: BaseException, model: torch.nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Add a table of memory by module to an out-of-memory error that has none."""
    try:
        if is_out_of_memory(error) and _TITLE not in "\n".join((str(error), *getattr(error, "__notes__", ()))):
            _add_text(error, _Table(model, optimizers, list(_local_tensors(error))).text())
    except Exception as failure:  # must not hide the error
        _logger.debug("no table of memory by module", exc_info=True)
        _add_text(error, f"actckpt: there is no table of memory by module: {type(failure).__name__}: {failure}")


def _add_text(error: BaseException, text: str) -> None:
    if hasattr(error, "add_note"):  # from Python 3.11 on
        error.add_note(text)
    else:
        error.args = (f"{error}\n{text}",)


class _Table:
    """Bytes by module and column.

    Args:
        local: tensors whose graphs are read, or that hold memory of no module.
    """

    def __init__(
        self, model: torch.nn.Module, optimizers: Iterable[torch.optim.Optimizer], local: Sequence[Tensor]
    ) -> None:
        parameters = dict(model.named_parameters())
        self._parts = {id(parameter): _part(name) for name, parameter in parameters.items()}
        self._device = next((p.device for p in parameters.values()), torch.device("cpu"))
        self._rows: defaultdict[str, Counter[str]] = defaultdict(Counter)
        #: By id(); held so that ids stay unique.
        self._seen: dict[int, torch.UntypedStorage] = {}
        for name, tensor in (*parameters.items(), *model.named_buffers()):
            self._add(_part(name), "parameters", tensor)
        for name, parameter in parameters.items():
            self._add(_part(name), "gradients", gradient_of(parameter))
        for optimizer in optimizers:
            for trained, state in optimizer.state.items():
                self._add(self._parts.get(id(trained), _OUTSIDE), "optimizer", list(state.values()))
        self._add_graph(local)
        self._num_others = self._add(_OUTSIDE, "other", local)

    def _add(self, part: str, column: str, value: Any) -> int:
        """Add the storages on the device that were not counted yet; return their bytes."""
        nbytes = 0
        for storage in storages_of(value):
            if storage.device == self._device and id(storage) not in self._seen:
                self._seen[id(storage)] = storage
                nbytes += storage.nbytes()
        if nbytes and column in _COLUMNS:
            self._rows[part][column] += nbytes
        return nbytes

    def _add_graph(self, local: Iterable[Tensor]) -> None:
        part = _OUTSIDE
        for node in _nodes(local):
            for before, _ in node.next_functions:
                leaf = getattr(before, "variable", None)
                if isinstance(leaf, torch.nn.Parameter):
                    part = self._parts.get(id(leaf), _OUTSIDE)  # of another model
            for saved in torch_private.saved_in(node):
                for column, tensors in _held_by(saved):
                    self._add(part, column, tensors)

    def text(self) -> str:
        """Return the table, at most ten lines."""
        counted = sum(sum(row.values()) for row in self._rows.values())
        accelerator = devices.counting(self._device)
        total = counted + self._num_others if accelerator is None else accelerator.allocated_bytes(self._device)
        free = "" if accelerator is None else _free(accelerator, self._device)
        rows = sorted(self._rows.items(), key=lambda item: -sum(item[1].values()))
        if len(rows) > _MAX_ROWS:
            rest = sum((row for _, row in rows[_MAX_ROWS - 1 :]), Counter())
            rows = [*rows[: _MAX_ROWS - 1], (f"({len(rows) - _MAX_ROWS + 1} more)", rest)]
        lines = [("module", "total", *_COLUMNS), *(_cells(name, row) for name, row in rows)]
        table = aligned(lines, left=1)
        return (
            f"{_TITLE} {self._device}: {format_bytes(total)} allocated{free}\n{table}\n"
            f"other: {format_bytes(max(0, total - counted))}\n"
            "saved: tensors saved for backward, which actckpt.apply(model, budget=...) limits. inputs: of checkpoints."
        )


def _cells(name: str, row: Counter[str]) -> tuple[str, ...]:
    return name, *map(format_bytes, (sum(row.values()), *(row[column] for column in _COLUMNS)))


def _free(accelerator: devices.Accelerator, device: torch.device) -> str:
    info = accelerator.memory_info(device)
    of_device = "" if info is None else f", {format_bytes(info[0])} of {format_bytes(info[1])} free on the device"
    return f", {format_bytes(accelerator.unused_bytes(device))} cached by the allocator{of_device}"


def _part(name: str) -> str:
    """Return the row of a parameter: `layers.*.mlp` for `layers.0.mlp.fc1.weight`."""
    parts = ["*" if part.isdecimal() else part for part in name.split(".")[:-1]]
    end = parts.index("*") + 2 if "*" in parts else 2
    return ".".join(parts[:end]) or _OUTSIDE


def _local_tensors(error: BaseException) -> Iterator[Tensor]:
    """Yield the tensors among local variables of the functions in an error's traceback, and of their callers."""
    traceback = error.__traceback__
    caller = None if traceback is None else traceback.tb_frame.f_back
    frames: list[types.FrameType] = []
    while caller is not None:
        frames.append(caller)
        caller = caller.f_back
    while traceback is not None:
        frames.append(traceback.tb_frame)
        traceback = traceback.tb_next
    reached: list[Any] = [value for frame in frames for value in frame.f_locals.values()]
    seen: set[int] = set()
    while reached:
        value = reached.pop()
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list, set, dict)) and id(value) not in seen:  # containers may be cyclic
            seen.add(id(value))
            reached += value.values() if isinstance(value, dict) else value


def _nodes(local: Iterable[Tensor]) -> list[Any]:
    """Return the nodes of all graphs in forward order."""
    by_id: dict[int, Any] = {}
    reached = [node for tensor in local if (node := torch_private.node_of(tensor)) is not None]
    while reached:
        node = reached.pop()
        if id(node) not in by_id:
            by_id[id(node)] = node
            reached += [before for before, _ in node.next_functions if before is not None]
    nodes = [node for node in by_id.values() if not hasattr(node, "variable")]  # leaf nodes have no number
    return sorted(nodes, key=torch_private.sequence_number)


def _held_by(saved: Any) -> Iterator[tuple[str, Any]]:
    """Yield columns and tensors of an object that a node saved: a tensor, or what a hook packed it into."""
    if (frame := _C.frame_of(saved)) is not None:
        args = frame.args if frame.region is None else frame.region.inputs.tensors
        yield "inputs", [arg.held if isinstance(arg, _C.HeldTensor) else arg for arg in args or ()]
    elif isinstance(saved, _C.Handle):
        value = saved.window.value
        yield "saved", [value.held, value.cached]
        yield "inputs", [ancestor.held for ancestor in _replayed_from(value)]
    else:
        yield "saved", list(tensors_in(saved))


def _replayed_from(value: Any) -> list[Any]:
    """Return a value and the values that it is replayed from."""
    by_id: dict[int, Any] = {}
    reached = [value]
    while reached:
        value = reached.pop()
        if id(value) not in by_id:
            by_id[id(value)] = value
            if value.held is None and value.step is not None:
                reached += value.step.inputs
    return list(by_id.values())
