"""Which modules outside of the blocks make what a model holds, and how to turn them into blocks."""

from __future__ import annotations

import dataclasses
import re
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from actckpt._blocks.choosing import chosen_blocks
from actckpt._blocks.finding import has_forward
from actckpt._blocks.reruns import checkpoint_around
from actckpt._core import torch_private
from actckpt._core.storages import storages_of, tensors_in
from actckpt._text.sizes import format_bytes

__all__ = ["MadeOutside", "OutsideModules", "advice", "blocks_argument"]

#: Maximum number of named modules, and the minimum share of each.
_MAX_NAMES, _LEAST_SHARE = 3, 0.1


@dataclasses.dataclass(frozen=True)
class MadeOutside:
    """Live bytes at the end of a model's forward that a module outside of its blocks made."""

    #: Qualified name of the largest enclosing module without a block inside; empty: code of the model's own forward.
    name: str
    nbytes: int
    #: What a block made of the module would drop: everything except its results. 0: it cannot be a block.
    inner_bytes: int


@dataclasses.dataclass
class _Call:
    name: str
    #: Live bytes when it begins, and by how much they grow.
    begin_bytes: int
    added_bytes: int | None = None
    #: What it returns and did not get.
    results: list[weakref.ref[torch.UntypedStorage]] = dataclasses.field(default_factory=list)
    result_bytes: int = 0
    #: It runs inside of a block or a checkpoint.
    is_inside: bool = False


class OutsideModules:
    """Watches the calls of blocks, and of modules outside of them, in one forward of a model.

    Args:
        blocks: names of the blocks.
        live_bytes: returns the bytes that are alive now.
    """

    def __init__(self, model: torch.nn.Module, blocks: Iterable[str], live_bytes: Callable[[], int]) -> None:
        self._live_bytes, self._blocks = live_bytes, set(blocks)
        self._calls: list[_Call] = []
        self._begin_bytes = live_bytes()
        self._close: list[Callable[[], None]] = []
        for name in (*self._blocks, *_outermost_without_blocks(model, self._blocks)):
            self._watch(name, model.get_submodule(name))

    def _watch(self, name: str, module: torch.nn.Module) -> None:
        def begins(*_: object) -> None:
            is_in_block = any(call.added_bytes is None and call.name in self._blocks for call in self._calls)
            is_inside = is_in_block or checkpoint_around() is not None
            self._calls.append(_Call(name, self._live_bytes(), is_inside=is_inside))

        def ends(_: torch.nn.Module, args: Any, result: Any) -> None:
            call = next(call for call in reversed(self._calls) if call.name == name)
            call.added_bytes = self._live_bytes() - call.begin_bytes
            given = set(map(id, storages_of(list(tensors_in(args)))))
            results = [each for each in storages_of(list(tensors_in(result))) if id(each) not in given]
            call.results, call.result_bytes = [*map(weakref.ref, results)], sum(each.nbytes() for each in results)

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
        rest = self._live_bytes() - self._begin_bytes
        sums: dict[str, tuple[int, int]] = {}
        for call in self._calls:
            if call.added_bytes is None or call.is_inside:
                continue
            inner = call.added_bytes - call.result_bytes
            nbytes = inner + sum(storage.nbytes() for each in call.results if (storage := each()) is not None)
            rest -= nbytes
            if call.name not in self._blocks:
                before = sums.get(call.name, (0, 0))
                sums[call.name] = before[0] + nbytes, before[1] + inner
        sums[""] = max(rest, 0), 0
        rows = (MadeOutside(name, nbytes, inner) for name, (nbytes, inner) in sums.items() if nbytes > 0)
        return tuple(sorted(rows, key=lambda row: -row.nbytes))


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
    """Return the outermost callable modules with no block inside or around them. Scripted ones take no hooks."""
    outermost: set[str] = set()
    for name, module in model.named_modules():
        is_near_block = any(
            f"{name}.".startswith(f"{other}.") or f"{other}.".startswith(f"{name}.") for other in blocks
        )
        is_part = any(name.startswith(f"{other}.") for other in outermost)
        can_watch = has_forward(module) and not isinstance(module, torch.jit.ScriptModule)
        if name and can_watch and not is_near_block and not is_part:
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
