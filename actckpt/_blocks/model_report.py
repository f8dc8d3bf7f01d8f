"""What the blocks of an applied model did: whether all of them ran, and the report on them."""

import dataclasses
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from actckpt._replay.matches import Matches
from actckpt.planner.plans import Plan

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
    #: Of `apply(budget=...)` and `apply(policy=plan)`; None: not made yet, or another policy.
    plan: Plan | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain data."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**fields, "plan": None if self.plan is None else self.plan.to_dict()}

    def table(self) -> str:
        """Return a text for people."""
        not_run = [name for name in self.blocks_patched if name not in self.blocks_ran]
        lines = [f"{len(self.blocks_ran)} of {len(self.blocks_patched)} blocks ran"]
        if not_run:
            lines.append(f"not run: {', '.join(not_run)}")
        if self.operators_not_run:
            lines.append(f"operators of the policy that did not run: {'; '.join(self.operators_not_run)}")
        if self.plan is not None:
            lines += [self.plan.explain(), self.plan.table()]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table()


class Block(Protocol):
    """The forward of one block."""

    has_run: bool


class Training(Protocol):
    """Finds a plan for blocks while their model trains."""

    @property
    def plan(self) -> Plan | None:
        """The plan; None: not made yet."""

    def close(self) -> None:
        """Watch the model no more. May be called more than once."""


class AppliedBlocks:
    """The blocks of one `apply`, watched until a backward tells that a first step is complete."""

    def __init__(self) -> None:
        #: By name.
        self.forwards: dict[str, Block] = {}
        self.is_checked = False
        #: What finds a plan for them while the model trains.
        self.training: Training | None = None
        self._plan: Plan | None = None
        #: Which operators that the policy names ran in any of them.
        self.matches = Matches()

    @property
    def plan(self) -> Plan | None:
        """The plan that they run under, None where there is none."""
        return self._plan if self.training is None else self.training.plan

    @plan.setter
    def plan(self, plan: Plan) -> None:
        self._plan = plan

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
