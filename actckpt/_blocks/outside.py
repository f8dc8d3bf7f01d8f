"""Which modules outside of the blocks make what a model holds, and how to turn them into blocks."""

from __future__ import annotations

import dataclasses
import re
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch

from actckpt._blocks.choosing import chosen_blocks
from actckpt._blocks.finding import has_forward
from actckpt._core import torch_private
from actckpt._core.storages import storages_of, tensors_in
from actckpt._text.sizes import format_bytes

__all__ = ["MadeOutside", "MadeStorages", "OutsideModules", "advice", "blocks_argument"]

#: Maximum number of named modules, and the minimum share of each.
_MAX_NAMES, _LEAST_SHARE = 3, 0.1


@dataclasses.dataclass(frozen=True)
class MadeOutside:
    """Live bytes at the end of a model's forward that a module outside of its blocks made."""

    #: Qualified name of the largest enclosing module without a block inside; empty: code of the model's own forward.
    name: str
    nbytes: int
    #: What a block made of the module would drop: everything except the module's results.
    inner_bytes: int


class MadeStorages(Protocol):
    """Numbers the storages that a forward makes."""

    num_made: int

    def has_made(self, storage: torch.UntypedStorage, *, since: int) -> bool:
        """Return whether a storage was created after the first `since` storages."""

    def made_by(self) -> Callable[[int], int]:
        """Return a function that maps a number of storages to the live bytes among the first that many."""


@dataclasses.dataclass
class _Call:
    name: str
    begin: int
    end: int | None = None
    results: list[weakref.ref[torch.UntypedStorage]] = dataclasses.field(default_factory=list)


class OutsideModules:
    """Watches the calls of blocks, and of modules outside of them, in one forward of a model."""

    def __init__(self, model: torch.nn.Module, blocks: Iterable[str], storages: MadeStorages) -> None:
        self._storages, self._blocks = storages, set(blocks)
        self._calls: list[_Call] = []
        self._begin = storages.num_made
        self._close: list[Callable[[], None]] = []
        for name in (*self._blocks, *_outermost_without_blocks(model, self._blocks)):
            self._watch(name, model.get_submodule(name))

    def _watch(self, name: str, module: torch.nn.Module) -> None:
        def begins(*_: object) -> None:
            self._calls.append(_Call(name, self._storages.num_made))

        def ends(_: torch.nn.Module, __: object, result: Any) -> None:
            call = next(call for call in reversed(self._calls) if call.name == name)
            call.end = self._storages.num_made
            call.results = [weakref.ref(storage) for storage in storages_of(list(tensors_in(result)))]

        if torch_private.call_of_compiled(module) is not None:  # the compiler would trace hooks
            self._close += [_called_around(module, begins, ends)]
            return
        hooks = module.register_forward_pre_hook(begins), module.register_forward_hook(ends)
        self._close += [hook.remove for hook in hooks]

    def close(self) -> None:
        """Stop watching."""
        for close in self._close:
            close()

    def made(self) -> tuple[MadeOutside, ...]:
        """Return what was made outside of the blocks and is alive, the largest first. Called when the forward ends."""
        made_by, end = self._storages.made_by(), self._storages.num_made
        rest = made_by(end) - made_by(self._begin)
        sums: dict[str, tuple[int, int]] = {}
        for call in self._calls:
            if call.end is None:
                continue
            nbytes = made_by(call.end) - made_by(call.begin)
            rest -= nbytes
            if call.name not in self._blocks:
                before = sums.get(call.name, (0, 0))
                sums[call.name] = before[0] + nbytes, before[1] + nbytes - self._returned_bytes(call)
        sums[""] = max(rest, 0), 0
        rows = (MadeOutside(name, nbytes, inner) for name, (nbytes, inner) in sums.items() if nbytes > 0)
        return tuple(sorted(rows, key=lambda row: -row.nbytes))

    def _returned_bytes(self, call: _Call) -> int:
        alive = {id(storage): storage for each in call.results if (storage := each()) is not None}.values()
        return sum(each.nbytes() for each in alive if self._storages.has_made(each, since=call.begin))


def _called_around(module: Any, begins: Callable[..., None], ends: Callable[..., None]) -> Callable[[], None]:
    """Call functions before and after a compiled module, like hooks; return a function that undoes it."""
    compiled = torch_private.call_of_compiled(module)
    assert compiled is not None

    def call(*args: Any, **kwargs: Any) -> Any:
        begins()
        result = compiled(*args, **kwargs)
        ends(module, args, result)
        return result

    def close() -> None:
        torch_private.set_call_of_compiled(module, compiled)

    torch_private.set_call_of_compiled(module, call)
    return close


def _outermost_without_blocks(model: torch.nn.Module, blocks: set[str]) -> list[str]:
    """Return the outermost callable modules with no block inside or around them."""
    outermost: set[str] = set()
    for name, module in model.named_modules():
        is_near_block = any(
            f"{name}.".startswith(f"{other}.") or f"{other}.".startswith(f"{name}.") for other in blocks
        )
        is_part = any(name.startswith(f"{other}.") for other in outermost)
        if name and not is_near_block and not is_part and has_forward(module):
            outermost.add(name)
    return [*outermost]


def blocks_argument(model: torch.nn.Module, more: Sequence[str], blocks: Iterable[str]) -> str:
    """Return the `blocks=` argument that adds modules to a model's blocks."""
    names = [*blocks]
    patterns = [*more, *dict.fromkeys(re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in names)]
    is_same = set(chosen_blocks(model, patterns)) == {*more, *names}
    return f"blocks={patterns if is_same else [*more, *names]}"


def advice(
    rows: Sequence[MadeOutside], model: torch.nn.Module, blocks: Iterable[str], needed_bytes: float | None
) -> str:
    """Return how much is made outside of the blocks of a model, by which modules, and what to do.

    Args:
        needed_bytes: of the smallest budget; the text is empty if less than a tenth of that is made there.
    """
    total = sum(row.nbytes for row in rows)
    if total <= _LEAST_SHARE * (needed_bytes or 0.0):
        return ""
    rows = [row for row in rows if row.nbytes >= _LEAST_SHARE * total] or rows[:1]
    named = [f"{row.name or f'the forward of {type(model).__name__}'} ({format_bytes(row.nbytes)})" for row in rows]
    more = f" and {len(named) - _MAX_NAMES} more" if len(named) > _MAX_NAMES else ""
    what = f"{format_bytes(total)} are made outside of the blocks, by {', '.join(named[:_MAX_NAMES])}{more}"
    inner = [row.name for row in rows if row.inner_bytes >= _LEAST_SHARE * total]
    if inner:
        added = "it" if len(rows) == 1 else ", ".join(inner)
        return f"{what}: add {added} with {blocks_argument(model, inner, blocks)}"
    return f"{what}: call that in one module, such as a torch.nn.Sequential, and add it with blocks=[...]"
