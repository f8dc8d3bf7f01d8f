"""`apply(budget=...)`: a plan is found while a model trains.

NOTE [ A budget in training ]

Rule 1. A step is a forward of the model with gradients, up to the end of the backward that reads it. Forwards without
        gradients (evaluation, generation) count for nothing. Where the program calls a part of the model in place of
        the model, or that returns nothing with a graph, no step or no end of it is seen, which is told once. So is a
        backward with `create_graph=True`, which is planned as any other one. One with `retain_graph=True` is planned as
        what it is from the next step on.
Rule 2. In the first step of each size (shapes and dtypes of what the model is called with, its keywords and flags,
        autocast, training or evaluation mode, and which parameters and inputs are trained) everything is checkpointed,
        and blocks are profiled (NOTE [ Profiling a block ]). Until its backward has ended, further forwards are
        checkpointed as well. Sizes that these do not show are seen later (NOTE [ Sizes inside of a model ]). After so
        many sizes smaller ones run the plans of larger ones (NOTE [ Sizes that share a plan ]).
        What is computed from the model's outputs (a loss, its intermediate results, gradients) is read from its graph
        (NOTE [ Loss ]), unless an allocator tells (NOTE [ The first backward ]). Outputs that are alive
        when that backward has ended are held by the program, and taken to be in every backward. Where not everything
        fits, plans are made for 2 % less than the budget, or on a device for 1 % less where none fits otherwise.
Rule 3. At the next forward the plan is made: by then the optimizer has its state. Where several forwards were alive at
        once (pipelines, pairs of sequences), each gets a part of what is not fixed (NOTE [ Forwards that are alive ]);
        a percentage of activations is one of what all of them make. Where more are alive than ever before, or what is
        fixed grows, or shrinks in the next steps, the plan is made again. Where any forward but the first begins with
        gradients (of another micro-batch, or set to zero in place), all gradients are fixed from then on, for plans of
        all sizes.
        Inside of a checkpoint, which would run the forward again, it raises.
Rule 4. On a device the allocator tells where a step needed more than that (NOTE [ Observed peaks ]). Stores tell how
        long steps waited for copies (NOTE [ Observed stalls ]). A budget of what is free is looked at now and then.
Rule 5. Where the plan is not predicted to be much faster than the best simple choice that fits, they take turns in the
        next steps, and the fastest stays. All give the same gradients. Ranks race together (NOTE [ Races of ranks ]).
"""

from __future__ import annotations

import dataclasses
import enum
import threading
import weakref
from collections import defaultdict
from typing import Any

import torch

from actckpt._blocks.applied import CheckpointedForward
from actckpt._blocks.reruns import checkpoint_around
from actckpt._budget.alike_steps import AlikeSteps
from actckpt._budget.alive_forwards import AliveForwards
from actckpt._budget.budget_config import BudgetConfig
from actckpt._budget.infeasible import Infeasible
from actckpt._budget.known_sizes import Found, KnownSizes
from actckpt._budget.rank_races import RaceNumbers
from actckpt._budget.running import device_of, use_settings
from actckpt._budget.shapes import Shapes
from actckpt._budget.words import CHECKPOINTED, COMPILED, MANY_SIZES
from actckpt._core import torch_private
from actckpt._core.sites import warn_user
from actckpt._core.storages import tensors_in
from actckpt.errors import BlocksError, PlanInfeasibleError
from actckpt.planner.plans import Plan

__all__ = ["BudgetedTraining"]


@torch_private.called_while_traced
def _tell_compiled() -> bool:
    """Warn that compiled code runs, of which nothing is measured."""
    warn_user(COMPILED)
    return True


class BudgetedTraining:
    """The blocks of a model, and what was found for them (NOTE [ A budget in training ])."""

    def __init__(self, model: torch.nn.Module, forwards: dict[str, CheckpointedForward], wanted: BudgetConfig) -> None:
        self._model, self._forwards, self._wanted = model, forwards, wanted
        self._hooks = [
            model.register_forward_pre_hook(self._begin, with_kwargs=True),
            model.register_forward_hook(self._end, always_call=True),
        ]
        self._start()

    def _start(self) -> None:
        """Nothing is measured or planned yet."""
        self._told: set[str] = set()
        self._numbers, self._alive = RaceNumbers(), AliveForwards()
        self._infeasible = Infeasible(self._wanted.on_infeasible)
        self._sizes = KnownSizes(self._another)
        self._current: AlikeSteps | None = None
        #: By thread, forwards that have begun and not ended, None for those that nothing is done for. There are several
        #: where a model calls itself.
        self._begun: defaultdict[int, list[Found | None]] = defaultdict(list)
        #: Whether a step began (Rule 1), and whether one after the first began with gradients (Rule 3).
        self.is_called = self._keeps_gradients = False
        #: Weak: a library may put others in their place (sharding), and these must be able to go.
        self._parameters: list[weakref.ref[torch.nn.Parameter]] | None = None

    @property
    def plan(self) -> Plan | None:
        """The plan of the size that ran last, None until it is made."""
        return None if self._current is None else self._current.plan

    @property
    def running_plan(self) -> Plan | None:
        """The plan of the forward that runs."""
        return None if self._current is None else self._current.running_plan

    @property
    def refused(self) -> str:
        """Why no plan fits for the size that ran last; empty where one does, or none is made yet."""
        return "" if self._current is None else self._current.refused

    @property
    def race_steps_left(self) -> int:
        """In how many more steps of the size that ran last plans take turns (Rule 5)."""
        return 0 if self._current is None else self._current.race_steps_left

    @property
    def model_name(self) -> str:
        """The type of the model, for messages."""
        return type(self._model).__name__

    def ran_unplanned(self, name: str) -> bool:
        """A block ran that the plan has nothing for; return whether the next plan has it."""
        size = None if self._wanted.pins else self._current  # pins name calls by their number
        return size is not None and size.ran_unplanned(name)

    def ran_larger(self, name: str, given: tuple[float, ...]) -> None:
        """A block that runs first was given tensors of so many bytes, more than when it was measured."""
        begun = self._begun[threading.get_ident()]
        found = begun[-1] if begun else None
        if found is not None and found.shapes is not None:
            self._sizes.set_apart(found.shapes)
        if self._current is not None:
            self._current.ran_larger(name, given, is_smaller=found is not None and found.is_smaller)

    def close(self) -> None:
        """Watch the model no more."""
        for hook in self._hooks:
            hook.remove()
        for size in self._sizes:
            size.close()

    def _another(self) -> AlikeSteps:
        shared = self._told, self._numbers, self._alive, self._infeasible
        return AlikeSteps(self._model, self._forwards, self._wanted, *shared)

    def _begin(self, _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            if torch.is_grad_enabled() and not torch.compiler.is_exporting():
                _tell_compiled()
            return
        first = next(iter(self._forwards.values()))
        first.together.take_over_late(first)
        begun = self._begun[threading.get_ident()]
        if begun:
            self._drop_interrupted(begun)
        begun.append(None)
        if not torch.is_grad_enabled():
            return
        if torch_private.innermost_transform() is not None:  # tensors of torch.func have no bytes of their own
            use_settings(self._forwards, {})
            return
        if checkpoint_around() is not None:
            raise BlocksError(CHECKPOINTED)
        self._alive.unread.check(self.model_name)
        shapes = self._shapes(args, kwargs)
        self._keeps_gradients = self._keeps_gradients or (self.is_called and self._has_gradients())
        self.is_called = True
        if self._is_watched_elsewhere():
            raise BlocksError(
                "apply: the model was called in two threads at once, and one of them measures its blocks. Run one step "
                "before other threads begin."
            )
        found = self._find(begun, shapes)
        self._current = found.steps
        if self._current is None:
            use_settings(self._forwards, {})
            if MANY_SIZES not in self._told:
                self._told.add(MANY_SIZES)
                warn_user(MANY_SIZES.format(self.model_name))
        else:
            begun[-1] = found
            self._begin_steps(self._current, found)

    def _find(self, begun: list[Found | None], shapes: Shapes) -> Found:
        """Return whose plan a forward runs, beside those that have begun."""
        if self._current is not None and self._current.give_up():
            begun[:] = [each if each is None or each.steps is not self._current else None for each in begun]
        for steps in self._sizes:
            steps.disturb()
        for smaller in self._alive.smaller():
            self._sizes.set_apart(smaller)
        return self._sizes.find(shapes, is_alone=not self._alive.num)

    def _drop_interrupted(self, begun: list[Found | None]) -> None:
        """Forget forwards that were interrupted: no hook told of their end, and this thread is no longer in them."""
        num_outer = max(torch_private.num_calls(self._model) - 1, 0)
        for found in begun[num_outer:]:
            if found is not None and found.steps is not None and not found.steps.give_up():
                found.steps.interrupted(found.shapes)
        del begun[num_outer:]

    def _begin_steps(self, steps: AlikeSteps, found: Found) -> None:
        begun, keeps_gradients = self._begun[threading.get_ident()], self._keeps_gradients
        try:
            steps.begin(keeps_gradients=keeps_gradients, is_smaller=found.is_smaller, shapes=found.shapes)
        except PlanInfeasibleError:
            if found.shapes is None:
                raise
            self._alive.gone(found.shapes)
            self._sizes.set_apart(found.shapes)  # perhaps a plan of its own fits
            begun[-1] = own = self._sizes.find(found.shapes, is_alone=True)
            self._current = own.steps
            if own.steps is not None:
                own.steps.begin(keeps_gradients=keeps_gradients, is_smaller=own.is_smaller, shapes=own.shapes)

    def __getstate__(self) -> dict[str, Any]:
        # The optimizer trains this model, not a copy of it. What was measured is of this one, too.
        wanted = dataclasses.replace(self._wanted, optimizers=())
        return {"_model": self._model, "_forwards": self._forwards, "_wanted": wanted, "_hooks": self._hooks}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()
        for forward in self._forwards.values():  # a copied block does not take this, and so the model, along
            forward.together.training = self

    def _shapes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Shapes:
        """Return what a plan depends on."""
        if self._parameters is None:
            self._parameters = [weakref.ref(parameter) for parameter in self._model.parameters()]
        trained = bytes(found is None or found.requires_grad for ref in self._parameters for found in (ref(),))
        tensors = list(tensors_in((args, kwargs)))
        inputs = ((tensor.dtype, tensor.requires_grad) for tensor in tensors)
        # Numbers and texts may be others in each step, as data is.
        flags = ((name, str(v)) for name, v in (*enumerate(args), *kwargs.items()) if isinstance(v, (bool, enum.Enum)))
        keywords = frozenset(name for name, value in kwargs.items() if value is not None)
        device_type = device_of(self._model).type
        autocast = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
        kind = self._model.training, autocast, trained, keywords, frozenset(flags), *inputs
        return Shapes(kind, tuple(tuple(n if type(n) is int else 1 for n in tensor.shape) for tensor in tensors))

    def _has_gradients(self) -> bool:
        assert self._parameters is not None
        return any(found is not None and found.grad is not None for ref in self._parameters for found in (ref(),))

    def _is_watched_elsewhere(self) -> bool:
        return self._current is not None and self._current.watching_thread not in (None, threading.get_ident())

    def _end(self, _: torch.nn.Module, args: Any, result: Any) -> None:
        if torch.compiler.is_compiling():
            return
        begun = self._begun[threading.get_ident()]
        found = begun.pop() if begun else None  # it did not begin where a hook that runs earlier failed
        if found is not None and found.steps is not None:
            self._current = found.steps
            found.steps.end(result, is_smaller=found.is_smaller, shapes=found.shapes)
