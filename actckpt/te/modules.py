"""What TransformerEngine's modules note of their last forward, put right for one rerun.

NOTE [ Modules in reruns ]

Rule 1. A module's recompute trusts what the module noted of its last forward. That need not be the region's: it may
        have run in another precision since. So each goes by the autocast of the rerun, as it did in the forward.
Rule 2. What a module, a te.ops operation or a fuser notes in a rerun is put back: the next forward finds what the last
        one left.
Rule 3. A rerun does not calibrate: the last forward's values stay.
Rule 4. A cast of a weight that a module keeps between microbatches belongs to the last forward that made it. A rerun
        of that forward makes the same bytes. Where another forward has made it since, with other scales, a rerun that
        makes its own puts the bytes back when it ends, which is what plain code's backward reads; one that only
        reads (`is_first_microbatch=False`) raises.
Rule 5. A module whose recompute raises uses its own scales again.
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
    """What is put aside in one rerun.

    Args:
        num_casts: how many casts had been made when the region's forward ended.
    """

    def __init__(self, te: Internals, num_casts: int) -> None:
        self._te = te
        self.num_casts = num_casts
        self._modules: list[torch.nn.Module] = []
        #: By id: the object, which must not go, and what puts back what it noted.
        self._seen: dict[int, tuple[Any, Callable[[], None]]] = {}
        #: Casts that another forward has made since and this rerun has not, by id; those that it has made; their bytes.
        self._newer: dict[int, Tensor] = {}
        self._made: set[int] = set()
        self._bytes: list[tuple[Tensor, Tensor]] = []

    @staticmethod
    def note_cast(tensor: Any, number: int) -> None:
        """Note who made a cast outside of reruns."""
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
        """Raise if the rerun has read casts that are not the forward's."""
        if self._newer:
            shapes = ", ".join(str(tuple(cast.shape)) for cast in self._newer.values())
            raise TransformerEngineError(
                "A rerun reads FP8 casts of weights that another forward has made since, with other scales: "
                f"{len(self._newer)}, of shape {shapes}.\nIt would compute other gradients. Pass "
                "is_first_microbatch=True in the first forward of a step only, and run the backward of all its "
                "microbatches before the next."
            )

    def abandon(self) -> None:
        """Have modules whose recompute raised use their own scales again (Rule 5)."""
        for module in self._modules:
            self._te.abandon_recompute(module)

    def put_back(self) -> None:
        """Put everything back."""
        for part, bytes_ in self._bytes:
            part.data.copy_(bytes_)  # as a kernel writes: versions do not move
        for _, put_back in self._seen.values():
            put_back()
