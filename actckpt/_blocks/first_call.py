"""The first call of a block that reruns: checked at once, since what its forward made can still be replaced then.

A block whose rerun does not repeat its forward gives no right gradient. The cause may be operators that give other
results for the same inputs, such as a dispatch to experts that assigns slots with atomic operations. Then the forward
runs again, in a region that replays operators and keeps the results of those; its result replaces the first one. So do
all later calls of the block. Other differences raise in backward (NOTE [ Audit of reruns ]).

Not checked: blocks under a budget, with several ranks, in other regions or hooks, and with offloaded inputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from actckpt import _C, config
from actckpt._blocks.block_group import BlockGroup
from actckpt._blocks.repeatable import Unrepeatable, unrepeatable_operators
from actckpt._core import random_state, ranks, torch_private
from actckpt._core.sites import warn_user
from actckpt._core.storages import tensors_in
from actckpt._core.warning_texts import WarningText
from actckpt._options import CheckpointOptions
from actckpt._replay.operators import operator_of
from actckpt._rerun.audit import RerunAudit, unwritten_by
from actckpt._rerun.module_state import modules_as_found
from actckpt._text.listed import listed
from actckpt.action import Action
from actckpt.policies import PerOp

__all__ = ["Recomputation"]

_NOT_REPEATABLE = WarningText(
    "apply: {operators} gives other results when it runs again with the same inputs. Blocks that call it do not run "
    "again in backward: their operators are replayed, and its results are kept.",
    "To say so from the start, call actckpt.configure(opaque={names}).",
    per="operator of a model",
)


class Recomputation:
    """How a block is recomputed: by a rerun, unless its first call shows that a rerun gives other results."""

    def __init__(self) -> None:
        self._is_checked = False
        #: Replays operators; None: the block reruns.
        self._policy: PerOp | None = None

    @property
    def reruns(self) -> bool:
        """Whether the block runs again in backward."""
        return self._policy is None and not config.settings().opaque

    def run(
        self,
        group: BlockGroup,
        options: CheckpointOptions,
        checkpointed: Callable[[CheckpointOptions, Callable[[RerunAudit], None] | None], Any],
        plain: Callable[[], object],
        arguments: object,
    ) -> Any:
        """Run a call of the block.

        Args:
            checkpointed: runs it with these options; the second argument receives the audit of its region.
            plain: runs it without a checkpoint.
            arguments: its arguments.
        """
        if not self.reruns:
            return checkpointed(options._replace(policy=self._policy or PerOp({})), None)
        if self._is_checked or not _can_check(options) or group.training is not None:
            return checkpointed(options, None)
        self._is_checked = True
        audits: list[RerunAudit] = []

        def take(audit: RerunAudit) -> None:
            audit.wants_frame = True
            audits.append(audit)

        result = checkpointed(options, take)
        frame = audits[0].frame if audits else None
        if frame is None:
            return result
        audits[0].frame = None  # which holds the audit
        found = _unrepeatable(audits[0], frame, plain, functools.partial(_unwritten, frame, result, arguments))
        if not found:
            return result
        del result
        _tell(group, found)
        self._policy = PerOp({each.operator: Action.KEEP for each in found if each.operator is not None})
        with _as_found(frame):
            return checkpointed(options._replace(policy=self._policy), None)


def _can_check(options: CheckpointOptions) -> bool:
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or options.offload_inputs:
        return False
    return not ranks.has_others() and torch_private.outer_hooks() is None


def _tell(group: BlockGroup, found: list[Unrepeatable]) -> None:
    names = [each.module if each.operator is None else operator_of(each.operator).name for each in found]
    kinds = {each.operator for each in found}
    if not kinds <= group.unrepeatable:
        group.unrepeatable |= kinds
        warn_user(_NOT_REPEATABLE, operators=listed(list(map(str, found))), names=names)


def _unrepeatable(
    audit: RerunAudit, frame: _C.Frame, plain: Callable[[], object], unwritten: Callable[[], set[int]]
) -> list[Unrepeatable]:
    """Return operators that are not repeatable, if a rerun of the region saves other tensors."""

    def run_again() -> None:
        with _as_found(frame):
            plain()

    if frame.region is not None and frame.region.carried is not None:
        return []
    try:
        return [] if audit.repeats(frame, unwritten) else unrepeatable_operators(run_again)
    except torch.OutOfMemoryError:  # a check must not fail the step
        return []


def _unwritten(frame: _C.Frame, result: object, arguments: object) -> set[int]:
    """Return the indices of tensors of a region that operators leave unwritten."""
    done = {tensor.grad_fn for tensor in tensors_in(arguments)}
    nodes = [tensor.grad_fn for tensor in tensors_in(result)]
    found = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in done:
            continue
        done.add(node)
        nodes += [edge for edge, _ in node.next_functions]
        found |= {_C.index_of(held) for held in unwritten_by(node) if _C.frame_of(held) is frame}
    return found


@contextmanager
def _as_found(frame: _C.Frame) -> Iterator[None]:
    """Run the body with the random state and the buffers of the forward."""
    region = frame.region
    if region is not None:
        with region.random.swapped_in() if region.random else nullcontext(), region.inputs.as_found(checks=False):
            yield
        return
    with (
        random_state.swapped_in(frame.random) if frame.random is not None else nullcontext(),
        modules_as_found(frame.parameters, frame.buffers),
    ):
        yield
