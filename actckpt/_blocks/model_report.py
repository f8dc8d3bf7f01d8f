"""What the blocks of an applied model did: whether all of them ran, and the report on them."""

import dataclasses
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from actckpt._replay.matches import Matches

__all__ = ["AppliedBlocks", "ModelReport"]

_MAX_NAMES = 5


@dataclasses.dataclass(frozen=True)
class ModelReport:
    """What `actckpt.report(model)` returns. `print` it for a table."""

    #: Qualified names of the blocks that `apply` checkpoints.
    blocks_patched: tuple[str, ...]
    #: Those of them that ran since.
    blocks_ran: tuple[str, ...]
    #: Operators that the policy names and that did not run in the first step, with what ran in their place.
    operators_not_run: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain data."""
        return dataclasses.asdict(self)

    def table(self) -> str:
        """Return a text for people."""
        not_run = [name for name in self.blocks_patched if name not in self.blocks_ran]
        lines = [f"{len(self.blocks_ran)} of {len(self.blocks_patched)} blocks ran"]
        if not_run:
            lines.append(f"not run: {', '.join(not_run)}")
        if self.operators_not_run:
            lines.append(f"operators of the policy that did not run: {'; '.join(self.operators_not_run)}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table()


class Block(Protocol):
    """The forward of one block."""

    has_run: bool


class AppliedBlocks:
    """The blocks of one `apply`, watched until a backward tells that a first step is complete."""

    def __init__(self) -> None:
        #: By name.
        self.forwards: dict[str, Block] = {}
        self.is_checked = False
        #: Which operators that the policy names ran in any of them.
        self.matches = Matches()

    def watched(self, result: Any) -> Any:
        """Return what a block returned; as soon as backward comes to it, the blocks are checked."""
        if torch.is_grad_enabled():
            for tensor in _tensors_in(result):
                if tensor.requires_grad:
                    tensor.register_hook(self._check)
                    break
        return result

    def _check(self, grad: Tensor) -> None:
        if self.is_checked:
            return
        self.is_checked = True
        self.matches.end("apply: the blocks")
        idle = [name for name, forward in self.forwards.items() if not forward.has_run]
        if idle:
            more = f" and {len(idle) - _MAX_NAMES} more" if len(idle) > _MAX_NAMES else ""
            warnings.warn(
                f"apply: {len(idle)} of {len(self.forwards)} blocks did not run in a step that called backward: "
                f"{', '.join(idle[:_MAX_NAMES])}{more}. Nothing is saved there: the model does not call these modules. "
                "Pass blocks= to actckpt.apply, those that it calls. Told once.",
                stacklevel=2,
            )


def _tensors_in(result: Any) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, Mapping):
        yield from _tensors_in(list(result.values()))
    elif isinstance(result, (list, tuple)):
        for part in result:
            yield from _tensors_in(part)
