"""Which modules of a model are its blocks, if the user does not say.

Nothing runs, and names are not used (with one exception), so the structure decides.

- A *layer* is a module without submodules, except Identity and a Dropout that drops nothing. It stands for one saved
  result.
- A *candidate* has at least two layers, its own forward, and siblings in a row: in a ModuleList, Sequential or
  ModuleDict, or as attributes whose names differ only in a number (`b1`, `b2`). Another candidate in the model must be
  of the same kind. The kind is the type, or for a Sequential the types inside. Containers without a forward are
  transparent.
- Candidates may be nested: stages, their blocks, parts of blocks.
- Modules that compute a parameter (torch's parametrizations) belong to the module that has the parameter. Types of the
  same name and bases count as one, since torch makes a type per parametrized module.

Those candidates are chosen that minimize the peak of training, counted in layers: one input per chosen candidate, all
layers outside, and twice the layers of the largest candidate while backward runs through it (results inside a block are
wider than those between blocks). So stages of many blocks are split into their blocks. Blocks are not split into
attention and MLP, and experts stay inside the block that chooses between them.

The exception: a layer that Transformers' own checkpointing wraps has no candidates inside if each would be of a
different kind (attention and MLP of T5). Such parts get the key-value cache, which is removed only for the library's
layers. If parts of one kind repeat inside, the layer is a stage (Swin), and the count decides.

A candidate without others of its kind is chosen if it shares a container with chosen ones and has at least half as many
layers: the first block of a stack often differs. In a model without repeated candidates (a stack of one layer, or one
layer called many times), those in a ModuleList are considered.

If none are found, blocks may hold their parameters themselves, or have one layer and compute the rest in their forward.
Then modules of a container with matrices among their parameters count as candidates of two layers. torch's own modules
need two matrices, like GRU and MultiheadAttention; with one, like Linear, a rerun saves nothing.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from actckpt._blocks.key_value_caches import is_checkpointing_layer

__all__ = ["has_forward", "repeated_blocks"]

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass(eq=False)
class _Part:
    """A module with the candidates inside."""

    name: str
    module: nn.Module
    num_layers: int
    container: nn.Module
    parts: "list[_Part]" = field(default_factory=list)


def repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks of a model by their qualified names; may be empty."""
    return _repeated(model, _is_block) or _repeated(model, _is_own_block)


def _repeated(model: nn.Module, is_block: Callable[[nn.Module], bool]) -> dict[str, nn.Module]:
    """Return the blocks among the modules for which `is_block` is true."""
    roots = _candidates(model, "", None, set(), is_block)
    everything = list(_all(roots))
    kinds = Counter(_kind(part.module) for part in everything)
    allowed = {id(part) for part in everything if kinds[_kind(part.module)] > 1}
    allowed = allowed or {id(part) for part in everything if isinstance(part.container, nn.ModuleList)}
    total = _num_layers(model)
    best: list[_Part] = []
    least = 0
    for limit in sorted({part.num_layers for part in everything if id(part) in allowed}, reverse=True):
        chosen = list(_cut(roots, allowed, limit))
        outside = total - sum(part.num_layers for part in chosen)
        held = len(chosen) + outside + 2 * max(part.num_layers for part in chosen)
        if not best or held < least:
            best, least = chosen, held
    block_ids = {id(part.module) for part in [*best, *_beside(roots, best)]}
    return {name: module for name, module in model.named_modules() if id(module) in block_ids}


def _beside(parts: list[_Part], chosen: list[_Part]) -> Iterator[_Part]:
    """Yield the outermost candidates beside chosen ones that contain none and are not much smaller."""
    for part in parts:
        if part in chosen:
            continue
        if any(other in chosen for other in _all(part.parts)):
            yield from _beside(part.parts, chosen)
            continue
        if not isinstance(part.container, _CONTAINERS):
            continue
        near = {id(module) for module in part.container.modules()}
        sizes = [other.num_layers for other in chosen if id(other.module) in near]
        if sizes and max(sizes) <= 2 * part.num_layers:
            yield part


def _candidates(
    module: nn.Module,
    name: str,
    container: nn.Module | None,
    seen: set[int],
    is_block: Callable[[nn.Module], bool],
) -> list[_Part]:
    """Return the outermost candidates in a module, including itself, each module once.

    Args:
        container: the module's container, if it is one of several in a row there.
        is_block: whether a module with a forward may be a block.
    """
    if id(module) in seen:
        return []
    seen.add(id(module))
    in_a_row = _names_in_a_row(module)
    inside = [
        part
        for child_name, child in _named_children(module)
        for part in _candidates(
            child,
            f"{name}.{child_name}" if name else child_name,
            module if child_name in in_a_row else None,
            seen,
            is_block,
        )
    ]
    if container is None or not has_forward(module) or not is_block(module):
        return inside
    if not _is_block(module) and not isinstance(container, _CONTAINERS):
        return inside
    if is_checkpointing_layer(module) and len({_kind(part.module) for part in inside}) == len(inside):
        inside = []
    return [_Part(name, module, max(_num_layers(module), 2), container, inside)]


def _names_in_a_row(module: nn.Module) -> set[str]:
    """Return the names of a module's children that are in a row."""
    names = [name for name, _ in _named_children(module)]
    if isinstance(module, _CONTAINERS):
        return set(names)
    stems = Counter(_stem(name) for name in names)
    return {name for name in names if _stem(name) != name and stems[_stem(name)] > 1}


def _stem(name: str) -> str:
    return name.rstrip("0123456789")


def has_forward(module: nn.Module) -> bool:
    """Whether a module can be called; a ModuleList cannot. Compiled modules have their own forward."""
    return getattr(module.forward, "__func__", None) is not nn.Module.forward


def _is_block(module: nn.Module) -> bool:
    return any(_named_children(module)) and _num_layers(module) >= 2


def _is_own_block(module: nn.Module) -> bool:
    """Whether a module with at most one layer may be a block. torch's layers and norms may not."""
    if _is_block(module):
        return True
    of_torch = next(base for base in type(module).__mro__ if base.__module__.startswith("torch.nn.modules."))
    num_matrices = sum(_is_matrix(parameter) for parameter in module.parameters())
    return num_matrices >= (1 if of_torch is nn.Module else 2)


def _is_matrix(parameter: nn.Parameter) -> bool:
    return not is_lazy(parameter) and sum(size > 1 for size in parameter.shape) > 1


def _num_layers(module: nn.Module) -> int:
    return len(set(_layers(module)))


def _layers(module: nn.Module) -> Iterator[int]:
    children = list(_named_children(module))
    saves_nothing = isinstance(module, nn.Identity) or (isinstance(module, nn.Dropout) and module.p == 0)
    if not (children or saves_nothing or isinstance(module, _CONTAINERS)):
        yield id(module)
    for _, child in children:
        yield from _layers(child)


def _named_children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the children of a module, without those that compute its parameters."""
    for name, child in module.named_children():
        if not (name == "parametrizations" and is_parametrized(module)):
            yield name, child


def _kind(module: nn.Module) -> Any:
    if type(module) is nn.Sequential:
        return (nn.Sequential, *(_kind(child) for child in module))
    return _name_and_bases(type(module))


def _name_and_bases(cls: type) -> tuple[Any, ...]:
    return (cls.__module__, cls.__qualname__, *(_name_and_bases(base) for base in cls.__bases__))


def _all(parts: list[_Part]) -> Iterator[_Part]:
    for part in parts:
        yield part
        yield from _all(part.parts)


def _cut(parts: list[_Part], allowed: set[int], limit: int) -> Iterator[_Part]:
    """Yield the outermost allowed candidates of at most `limit` layers, and larger ones without allowed ones."""
    for part in parts:
        inside = list(_cut(part.parts, allowed, limit))
        if id(part) in allowed and (part.num_layers <= limit or not inside):
            yield part
        else:
            yield from inside
