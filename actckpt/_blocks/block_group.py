"""The blocks of one `apply`: whether all of them run, and what they save in recorded steps."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch.utils.hooks import RemovableHandle, unserializable_hook

from actckpt import config
from actckpt._blocks.other_checkpointing import holders, is_on, take_over
from actckpt._blocks.recording import RecordedCall, Recording
from actckpt._core.sites import warn_user
from actckpt._core.storages import tensors_in
from actckpt._core.warning_texts import WarningText
from actckpt._offload import stores
from actckpt._replay.named_operators import Matches
from actckpt._text import operator_names
from actckpt._text.places import Selector
from actckpt._text.selectors import matches
from actckpt.planner.plans import Plan

__all__ = ["BlockGroup"]

_MAX_NAMES = 5
#: Maximum number of plans whose last recorded step is kept.
_MAX_RECORDINGS = 8
_NEVER_CALLED = WarningText(
    "apply: there is a budget, but {model} itself was not called in a step that called backward, only blocks of it. No "
    "plan is made, and all blocks are checkpointed.",
    "Give apply the part of {model} that each step calls, or a module whose forward makes all calls of a step.",
    per="model",
)
_IDLE = WarningText(
    "apply: {idle} of {blocks} blocks did not run in a step that called backward: {names}. They reduce no memory.",
    "If the model never calls these modules, but methods or parts of them, pass blocks= to actckpt.apply, those that "
    "it calls. If it skips blocks at random (layer dropout), ignore this.",
    per="model",
)
_UNKNOWN = WarningText(
    "apply: {names} of configure(opaque=...) names no operator that is registered, and no module of {model}. Its "
    "blocks are replayed all the same.",
    "Name operators, such as mylib.dispatch, or modules by their qualified names.",
    per="model",
)
_UNPLANNED = WarningText(
    "apply: block {block!r} runs, and did not when the plan was made, or less often: for example with layer dropout, "
    "or in a loop whose length depends on the data. It is recomputed, and {consequence}.",
    "Pass a smaller budget, or let all blocks run in the first step.",
    per="model",
)
_ADDED = "this step may need more than the budget; plans from the next step on include it"
_NOT_ADDED = "steps in which it runs may need more than the budget"


class Block(Protocol):
    """The forward of one block."""

    name: str
    block: torch.nn.Module
    has_run: bool

    def begin(self) -> None:
        """A forward of the model starts."""

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], record: RecordedCall | None) -> Any:
        """Run it, and record what it saves."""


class Training(Protocol):
    """Finds a plan for blocks while their model trains."""

    is_called: bool

    @property
    def plan(self) -> Plan | None:
        """The plan that a report shows; None: not made yet."""

    @property
    def running_plan(self) -> Plan | None:
        """The plan of the running forward; in a trial, the candidate."""

    @property
    def refused(self) -> str:
        """Why there is no plan: none fits; empty: unknown."""

    @property
    def rescued(self) -> str:
        """Which blocks ran out of memory, and what was done; empty: none."""

    @property
    def model_name(self) -> str:
        """The model's type, for messages."""

    def ran_unplanned(self, name: str) -> bool:
        """A block ran that the plan does not cover; return whether the next plan will."""

    def ran_out_of_memory(self, name: str) -> None:
        """The forward of a block ran out of memory, and runs a second time."""

    def explain(self, error: RuntimeError) -> None:
        """Add a table of memory by module to the error of a block that ran out of memory."""

    def close(self) -> None:
        """Stop watching the model. May be called more than once."""


class BlockGroup:
    """The blocks of one `apply`, watched until a backward shows that the first step is complete."""

    def __init__(self) -> None:
        #: By name; those in the same copy.
        self.forwards: dict[str, Block] = {}
        #: The model passed to `apply`; None: unknown.
        self.model: weakref.ref[torch.nn.Module] | None = None
        #: Modules around blocks with a flag of another library's checkpointing; empty if unknown.
        self.holders: list[weakref.ref[torch.nn.Module]] = []
        self.is_checked = False
        #: Whether calls go through `watched`: until a backward in the first step, and in the one after each report.
        self.is_watching = True
        #: Which operators named by the policy ran in any of them.
        self.matches = Matches()
        self.recording = Recording()
        #: The last record of each plan, the newest last. Plans that differ only in measurements of trials count as one.
        self._recordings: list[tuple[Plan | None, Recording]] = [(None, self.recording)]
        #: Finds a plan for them while the model trains.
        self.training: Training | None = None
        #: Whether they were copied, without the object that finds a plan.
        self.are_of_other_training = False
        #: The policy or the budget as passed, with its keyword.
        self.policy = ""
        self._plan: Plan | None = None
        self._has_told_unplanned = False
        self._window_bytes: int | None = None
        self._hook: RemovableHandle | None = None
        self._gradient_hook: RemovableHandle | None = None

    def watch_gradient(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Check the blocks also when the first trained one of some of their parameters gets gradients.

        It may be that no block is called: a model may call their methods or parts. The first gradient may come from a
        penalty on parameters, before the forward.
        """
        this = weakref.ref(self)

        num_before = 0

        # Otherwise each process that receives the parameter warns.
        @unserializable_hook  # type: ignore[untyped-decorator]
        def came(_: torch.Tensor) -> None:
            nonlocal num_before
            if (blocks := this()) is None:
                return
            has_run = any(forward.has_run for forward in blocks.forwards.values())
            if has_run or num_before:
                blocks.watch_gradient(())
                if not has_run:
                    blocks.tell_idle()
            num_before += 1

        if self._gradient_hook is not None:
            self._gradient_hook.remove()
        trained = next((parameter for parameter in parameters if parameter.requires_grad), None)
        self._gradient_hook = None if trained is None else trained.register_hook(came)

    def belong_to(self, model: torch.nn.Module) -> None:
        """Set the model, and replace checkpointing that another library enabled in it."""
        self.model = weakref.ref(model)
        self.holders = holders(model, self.forwards)
        take_over(model, self._blocks())

    def take_over_late(self, forward: Block) -> None:
        """Replace such checkpointing again if it was enabled since; `forward` is about to run."""
        if is_on(forward.block, self.holders):
            model = None if self.model is None else self.model()
            if model is None:  # of a copy: each block on its own
                take_over(forward.block, {"": forward.block})
            else:
                take_over(model, self._blocks())

    def _blocks(self) -> dict[str, torch.nn.Module]:
        return {name: forward.block for name, forward in self.forwards.items()}

    def count_calls_in(self, model: torch.nn.Module | None) -> None:
        """Count the calls of each block per forward of a model from now on; None: stop."""
        if self._hook is not None:
            self._hook.remove()
        self._hook = None if model is None else model.register_forward_pre_hook(self._begin)

    def _begin(self, *_: object) -> None:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            for forward in self.forwards.values():
                forward.begin()

    def limit_windows(self, nbytes: int | None) -> None:
        """Limit the in-flight bytes of stores; None: the limit of the settings."""
        if nbytes != self._window_bytes:
            self._window_bytes = nbytes
            stores.limit_windows(self, nbytes)

    def __getstate__(self) -> dict[str, Any]:
        # A copy has no store limits yet, and other parameters. The object that finds a plan belongs to the model: if
        # that is copied, it adds itself.
        state = {**vars(self), "_window_bytes": None, "model": None, "_gradient_hook": None, "training": None}
        state["holders"] = []
        state["are_of_other_training"] = self.are_of_other_training or self.training is not None
        state["is_watching"] = True  # the copy's first step is to come
        state["recording"] = Recording()
        state["_recordings"] = [(None, state["recording"])]
        del state["forwards"]  # they add themselves
        return state

    def add(self, forward: Block) -> None:
        """Add a block; if both are copied, this may run before the other attributes exist."""
        vars(self).setdefault("forwards", {})[forward.name] = forward

    @property
    def plan(self) -> Plan | None:
        """The plan that they run under, None if there is none."""
        return self._plan if self.training is None else self.training.plan

    @plan.setter
    def plan(self, plan: Plan) -> None:
        self._plan = plan

    def recording_of(self, plan: Plan | None) -> Recording | None:
        """Return the last record under a plan, or without one; None: there is none."""
        actions = getattr(plan, "actions", None)
        return next(
            (
                recording
                for recorded_plan, recording in self._recordings
                if getattr(recorded_plan, "actions", None) is actions
            ),
            None,
        )

    def _choose_recording(self, plan: Plan | None) -> None:
        if self.recording is not self.recording_of(plan):
            self.recording = self.recording_of(plan) or Recording()
            self._recordings = [item for item in self._recordings if item[1] is not self.recording]
            self._recordings = [*self._recordings, (plan, self.recording)][-_MAX_RECORDINGS:]

    def record_first_step(self, plan: Plan) -> None:
        """Record the step that starts, if none was recorded under this plan."""
        if self.recording_of(plan) is None:
            self.is_watching = True

    def watched(self, forward: Block, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a block and record what it saves; check the blocks as soon as a backward reaches it."""
        if not torch.is_grad_enabled():
            return forward.run(args, kwargs, None)
        self._choose_recording(self._plan if self.training is None else self.training.running_plan)
        with self.recording.begin(forward, forward.block) as record:
            result = forward.run(args, kwargs, record)
        for tensor in tensors_in(result):
            if tensor.grad_fn is not None:
                self.recording.watch(record, tensor, self._check)
                break
        return result

    def _check(self) -> None:
        self.is_watching = False
        if self.is_checked:
            return
        self.is_checked = True
        self.matches.end("apply: the blocks")
        if self.training is not None and not self.training.is_called:
            warn_user(_NEVER_CALLED, model=self.training.model_name)
        self._tell_opaque()
        self.tell_idle()

    def _tell_opaque(self) -> None:
        """Warn of names in `configure(opaque=...)` that cannot match anything."""
        model = None if self.model is None else self.model()
        if model is None or not (opaque := config.settings().opaque):
            return
        modules = [name for name, _ in model.named_modules()]
        unknown = [name for name in opaque if not _names_any(Selector.parse(name), modules)]
        if unknown:
            warn_user(_UNKNOWN, names=", ".join(map(repr, unknown)), model=type(model).__name__)

    def tell_idle(self) -> None:
        """Warn if blocks did not run."""
        idle = [name for name, forward in self.forwards.items() if not forward.has_run]
        if idle:
            more = f" and {len(idle) - _MAX_NAMES} more" if len(idle) > _MAX_NAMES else ""
            names = ", ".join(idle[:_MAX_NAMES]) + more
            warn_user(_IDLE, idle=len(idle), blocks=len(self.forwards), names=names)

    def tell_unplanned(self, name: str) -> None:
        """Warn once that a block runs which the plan does not cover, or more often than in the plan."""
        is_added = self.training is not None and self.training.ran_unplanned(name)
        if not self._has_told_unplanned:
            self._has_told_unplanned = True
            warn_user(_UNPLANNED, block=name, consequence=_ADDED if is_added else _NOT_ADDED)


def _names_any(selector: Selector, modules: list[str]) -> bool:
    """Return whether a selector names a registered operator, or one of some modules, or both if it has both."""
    if selector.name is not None:
        return operator_names.exists(selector.name) or any(matches(selector.name, module) for module in modules)
    has_operator = selector.operator is None or operator_names.exists(selector.operator)
    return has_operator and (selector.module is None or any(matches(selector.module, module) for module in modules))
