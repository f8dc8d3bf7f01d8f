"""State that TransformerEngine modules remember of their last forward, corrected for one rerun.

A module's recompute trusts what the module remembers of its last forward. That may not be the region's forward, and may
have had another precision. So the module follows the autocast of the rerun, as it did in the forward. What a module, a
te.ops operation or a fuser remembers from a rerun is undone: the next forward sees the state of the last one. A rerun
does not calibrate. A module whose recompute raises uses its own scales again.

A weight cast that a module keeps between microbatches belongs to the last forward that made it. A rerun of that forward
makes the same bytes. Another forward may have made the cast since, with other scales. Then a rerun that makes its own
cast restores the bytes when it ends, because the backward of plain code reads them. A rerun that only reads the cast
(`is_first_microbatch=False`) raises.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from actckpt.errors import TransformerEngineError
from actckpt.te.internals import Internals

__all__ = ["ModulesInRerun"]

#: Attribute of a cast: the number of the last call that made it outside of reruns.
_MADE_BY = "_actckpt_made_by"


class ModulesInRerun:
    """Saved state of one rerun.

    Args:
        num_casts: number of casts made until the region's forward ended.
    """

    def __init__(self, te: Internals, num_casts: int) -> None:
        self._te = te
        self.num_casts = num_casts
        self._modules: list[torch.nn.Module] = []
        #: By id: the object, held so that ids stay unique, and the function that restores its state.
        self._seen: dict[int, tuple[Any, Callable[[], None]]] = {}
        #: Casts that another forward has made since and this rerun has not, by id; those that it has made; their bytes.
        self._newer: dict[int, Tensor] = {}
        self._made: set[int] = set()
        self._bytes: list[tuple[Tensor, Tensor]] = []

    @staticmethod
    def note_cast(tensor: Any, number: int) -> None:
        """Record who made a cast outside of reruns."""
        setattr(tensor, _MADE_BY, number)

    def module_begins(self, module: torch.nn.Module, inp: Tensor) -> None:
        """Called before a module's forward."""
        self._note(module)
        self._modules.append(module)
        self._te.begin_recompute(module, inp)
        self._newer |= {id(cast): cast for cast in self._te.kept_casts(module) if self._is_newer(cast)}

    def ops_begin(self, fuser: Any, ops: list[Any]) -> None:
        """Called before fused te.ops."""
        for owner in (fuser, *ops):
            self._note(owner)

    def cast_begins(self, tensor: Tensor) -> None:
        """Called before a cast is made in place."""
        if self._is_newer(tensor):
            self._newer.pop(id(tensor), None)
            self._made.add(id(tensor))
            self._bytes += [(part, part.clone()) for part in self._te.parts(tensor)]

    def _is_newer(self, cast: Tensor) -> bool:
        return id(cast) not in self._made and getattr(cast, _MADE_BY, 0) > self.num_casts

    def _note(self, owner: Any) -> None:
        if id(owner) not in self._seen:
            self._seen[id(owner)] = owner, self._te.noted(owner)

    def check_casts(self) -> None:
        """Raise if the rerun has read casts that are not those of the forward."""
        if self._newer:
            shapes = ", ".join(str(tuple(cast.shape)) for cast in self._newer.values())
            raise TransformerEngineError(
                "A rerun reads FP8 casts of weights that another forward has made since, with other scales: "
                f"{len(self._newer)}, of shape {shapes}.\nIt would compute other gradients. Pass "
                "is_first_microbatch=True in the first forward of a step only, and run the backward of all its "
                "microbatches before the next."
            )

    def abandon(self) -> None:
        """Make modules whose recompute raised use their own scales again."""
        for module in self._modules:
            self._te.abandon_recompute(module)

    def put_back(self) -> None:
        """Restore everything."""
        for part, bytes_ in self._bytes:
            part.data.copy_(bytes_)  # like a kernel's write: versions do not change
        for _, put_back in self._seen.values():
            put_back()
