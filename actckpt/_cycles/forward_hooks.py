"""Hooks where the forwards of a model begin and end."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch.utils.hooks import RemovableHandle

from actckpt._core import torch_private

__all__ = ["ForwardHooks"]


class ForwardHooks:
    """Calls `begin(module, args, kwargs)` and `end(module, args, result)` for a model, or for parts of it.

    A part is a module of the model with blocks inside, or a block. Programs that call methods of a model (`encode` and
    `decode` of an autoencoder) call parts, and never the model.
    """

    def __init__(self, model: torch.nn.Module, begin: Callable[..., None], end: Callable[..., None]) -> None:
        self._begin, self._end = begin, end
        self._model = model
        self._modules: list[torch.nn.Module] = []
        self._handles: list[RemovableHandle] = []
        self._add(model)

    def _add(self, module: torch.nn.Module) -> None:
        self._modules.append(module)
        self._handles += [
            module.register_forward_pre_hook(self._begin, with_kwargs=True),
            module.register_forward_hook(self._end, always_call=True),
        ]

    def add_parts(self, blocks: Iterable[str]) -> None:
        """Watch the parts of the model, too, given the names of its blocks. May be called more than once."""
        if len(self._modules) == 1:
            splits = (block.split(".") for block in blocks)
            names = dict.fromkeys(".".join(split[:end]) for split in splits for end in range(1, len(split) + 1))
            for module in dict.fromkeys(map(self._model.get_submodule, names)):
                self._add(module)

    def num_calls(self) -> int:
        """Return how many calls of what is watched this thread is in."""
        return torch_private.num_calls(self._modules)

    def remove(self) -> None:
        """Watch nothing more."""
        for handle in self._handles:
            handle.remove()
