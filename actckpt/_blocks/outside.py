"""Which modules outside of the blocks make what a model holds, and how to turn them into blocks."""

from __future__ import annotations

import dataclasses
import re
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import torch

from actckpt._blocks.choosing import chosen_blocks
from actckpt._blocks.finding import has_forward, repeated_blocks
from actckpt._blocks.key_value_caches import is_checkpointing_layer
from actckpt._blocks.reruns import checkpoint_around
from actckpt._core import torch_private
from actckpt._core.storages import storages_of, tensors_in
from actckpt._text.sizes import format_bytes

__all__ = ["MadeOutside", "OutsideModules", "advice", "blocks_argument", "smaller_blocks"]

#: Maximum number of named modules, and the minimum share of each.
_MAX_NAMES, _LEAST_SHARE = 3, 0.1


@dataclasses.dataclass(frozen=True)
class MadeOutside:
    """Live bytes at the end of a model's forward that a module outside of its blocks made."""

    #: Qualified name of the largest enclosing module without a block inside; empty: code of the model's own forward.
    name: str
    nbytes: int
    #: What a block made of the module would drop: everything except its results.
    inner_bytes: int
    #: It ran once, on its own, with inputs that need gradients: it can be checkpointed without being asked for.
    is_alone: bool = False


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
    #: No other call begins or ends inside of it, and its inputs are results of operators with gradients.
    is_alone: bool = False


class OutsideModules:
    """Watches the calls of blocks, and of modules outside of them, in one forward of a model.

    Args:
        blocks: names of the blocks.
        live_bytes: returns the bytes that are alive now.
    """

    def __init__(self, model: torch.nn.Module, blocks: Iterable[str], live_bytes: Callable[[], int]) -> None:
        self._live_bytes, self._blocks = live_bytes, set(blocks)
        self._calls: list[_Call] = []
        self._begin_bytes, self._thread = live_bytes(), threading.get_ident()
        self._close: list[Callable[[], None]] = []
        modules = dict(model.named_modules())
        for name in (*self._blocks, *_outermost_without_blocks(model, self._blocks)):
            if name in modules:  # the program may have removed a block
                self._watch(name, modules[name])

    def _watch(self, name: str, module: torch.nn.Module) -> None:
        def begins(_: torch.nn.Module, args: Any, kwargs: Any) -> None:
            running = [call for call in self._calls if call.added_bytes is None]
            for call in running:
                call.is_alone = False
            is_inside = any(call.name in self._blocks for call in running) or checkpoint_around() is not None
            inputs = list(tensors_in((args, kwargs)))
            is_in_graph = bool(inputs) and all(tensor.grad_fn is not None for tensor in inputs)
            is_alone = is_in_graph and not running and not is_inside and threading.get_ident() == self._thread
            self._calls.append(_Call(name, self._live_bytes(), is_inside=is_inside, is_alone=is_alone))

        def ends(_: torch.nn.Module, args: Any, result: Any) -> None:
            call = next(call for call in reversed(self._calls) if call.name == name)
            call.added_bytes = self._live_bytes() - call.begin_bytes - _bytes_of_casts(module)
            given = set(map(id, storages_of(list(tensors_in(args)))))
            results = [each for each in storages_of(list(tensors_in(result))) if id(each) not in given]
            call.results, call.result_bytes = [*map(weakref.ref, results)], sum(each.nbytes() for each in results)

        if torch_private.call_of_compiled(module) is not None:  # the compiler would trace hooks
            self._close += [_called_around(module, begins, ends)]
            return
        hooks = module.register_forward_pre_hook(begins, with_kwargs=True), module.register_forward_hook(ends)
        self._close += [hook.remove for hook in hooks]

    def close(self) -> None:
        """Stop watching."""
        for close in self._close:
            close()

    def made(self) -> tuple[MadeOutside, ...]:
        """Return what was made outside of the blocks and is alive, the largest first. Called when the forward ends."""
        rest = self._live_bytes() - self._begin_bytes
        sums: dict[str, tuple[int, int]] = {}
        num_calls = Counter(call.name for call in self._calls)
        alone = {call.name for call in self._calls if call.is_alone and num_calls[call.name] == 1}
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
        rows = (MadeOutside(name, nbytes, inner, name in alone) for name, (nbytes, inner) in sums.items() if nbytes > 0)
        return tuple(sorted(rows, key=lambda row: -row.nbytes))


def _bytes_of_casts(module: torch.nn.Module) -> int:
    """Return the maximum bytes of casts of a module's parameters that autocast's cache may hold."""
    parameter = next(module.parameters(), None)
    if parameter is None or not torch.is_autocast_enabled(parameter.device.type):
        return 0
    size = torch.get_autocast_dtype(parameter.device.type).itemsize
    return sum(each.numel() * size for each in module.parameters() if each.dtype == torch.float32)


def _called_around(module: Any, begins: Callable[..., None], ends: Callable[..., None]) -> Callable[[], None]:
    """Call functions before and after a compiled module, like hooks; return a function that undoes it."""
    compiled = torch_private.call_of_compiled(module)
    assert compiled is not None

    def call(*args: Any, **kwargs: Any) -> Any:
        begins(module, args, kwargs)
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


def smaller_blocks(model: torch.nn.Module, blocks: Container[str]) -> str:
    """Return what to pass for smaller blocks, by type where that names the same ones; empty if there are none."""
    smaller: dict[str, torch.nn.Module] = {}
    for name, block in model.named_modules():
        if name in blocks:
            is_whole = is_checkpointing_layer(block) or torch_private.call_of_compiled(block) is not None
            parts = {} if is_whole else repeated_blocks(block)
            smaller |= {f"{name}.{part}": module for part, module in parts.items()} or {name: block}
    if all(name in blocks for name in smaller):
        return ""
    types = list(dict.fromkeys(map(type, smaller.values())))
    are_alike = chosen_blocks(model, types).keys() == smaller.keys()
    by_type = f"blocks=[{', '.join(kind.__name__ for kind in types)}]"
    return f"Smaller blocks may need less: {by_type if are_alike else blocks_argument(model, [], smaller)}"
