"""The modules of a model whose calls are forwards: the model, or its parts where the program calls these instead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch

from actckpt._blocks.applied import CheckpointedForward
from actckpt._blocks.finding import has_forward
from actckpt._core import torch_private

__all__ = ["Forwards", "Part", "parts_of"]


class Forwards(Protocol):
    """What follows the forwards of a model."""

    def begin(self, part: Part, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A call of the model or of a part begins."""

    def end(self, result: Any) -> None:
        """It has ended."""


class Part:
    """A module whose calls are forwards, with the hooks that see them.

    Args:
        name: qualified; empty: the model itself.
        forwards: of all blocks, by qualified name.

    Attributes:
        forwards: those of the blocks inside of the module.
        following: None in a copy or a file of a part without its model. Its hooks remove themselves at the next call.
    """

    following: Forwards | None = None

    def __init__(
        self, name: str, module: torch.nn.Module, forwards: Mapping[str, CheckpointedForward], following: Forwards
    ) -> None:
        self.name, self.module, self.following = name, module, following
        modules = set(module.modules())
        self.forwards = {block: forward for block, forward in forwards.items() if forward.block in modules}
        self._handles = [
            module.register_forward_pre_hook(self._begin, with_kwargs=True),
            module.register_forward_hook(self._end, always_call=True),
        ]

    def __getstate__(self) -> dict[str, Any]:
        # A copied part does not take the model along: where that is copied, it adds itself.
        state = {**vars(self)}
        if self.name:
            del state["following"]
        return state

    def close(self) -> None:
        """See no more calls."""
        for handle in self._handles:
            handle.remove()

    def _begin(self, _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.following is None:
            self.close()
        elif not self._is_rerun():
            self.following.begin(self, args, kwargs)

    def _end(self, _: torch.nn.Module, args: Any, result: Any) -> None:
        if self.following is not None and not self._is_rerun():
            self.following.end(result)

    def _is_rerun(self) -> bool:
        """Whether a part runs again in a backward, or is compiled, as blocks may be."""
        return bool(self.name) and (torch.compiler.is_compiling() or torch_private.current_graph_task_id() != -1)


def parts_of(
    model: torch.nn.Module, forwards: Mapping[str, CheckpointedForward], following: Forwards
) -> Iterator[Part]:
    """Yield the modules of a model that can be called, and are blocks or have some inside."""
    blocks = {forward.block for forward in forwards.values()}
    for name, module in model.named_modules():
        if name and has_forward(module) and not blocks.isdisjoint(module.modules()):
            yield Part(name, module, forwards, following)
