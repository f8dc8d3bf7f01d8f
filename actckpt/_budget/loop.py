"""The loop behind `apply(budget=...)`: measure a cycle, solve, run, correct, try candidates, stay.

NOTE [ The loop ]

1. A cycle begins at a forward of the model with gradients while no other one is alive, and ends when none is alive any
   more. A forward is alive until a backward releases its graph, or the program drops it. Forwards without gradients
   (evaluation, generation) are no part of a cycle.
2. Cycles of one kind (shapes, dtypes, flags, mode, autocast, what is trained, whether gradients exist at the begin) share a
   plan. The first cycle of a kind is *measured*: every block drops all that it can, is profiled, and a meter notes the peak
   of each segment (`timeline`).
3. The next cycle solves for the budget and runs the plan under a meter. The observed peaks correct the model. Where the
   budget is exceeded, or more than 2 % of it are unused while values are dropped, the loop solves again, three times at
   most. The fastest plan that fits stays (stage *fit*).
4. Then candidate plans take turns (stage *try*), and the fastest one stays (stage *settled*).
5. What a plan does not know is recomputed: block calls that did not run in the measured cycle, and calls that are larger
   than they were there. The kind is measured again then.
"""

from __future__ import annotations

import enum
import sys
import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

import torch

from actckpt import _C
from actckpt._blocks.applied import CheckpointedForward, Settings
from actckpt._blocks.arguments import first_tensor
from actckpt._blocks.outside import OutsideModules
from actckpt._blocks.reruns import checkpoint_around
from actckpt._budget.alone import num_ranks
from actckpt._budget.budget_config import BudgetConfig
from actckpt._budget.infeasible import Infeasible
from actckpt._budget.kinds import Kind
from actckpt._budget.links import is_linked
from actckpt._budget.meter import Meter, meter_of, sweep
from actckpt._budget.profiled_block import ProfiledBlock
from actckpt._budget.profiling import Profiler
from actckpt._budget.running import RECOMPUTE, device_of, use_settings
from actckpt._budget.settled_block import SettledBlock, settled
from actckpt._budget.timeline import Call, Cycle
from actckpt._budget.warnings import CHECKPOINTED, COMPILED, NO_OUTPUTS, TWO_THREADS, UNREAD
from actckpt._core import torch_private
from actckpt._core.sites import warn_user
from actckpt._core.storages import tensors_in
from actckpt.errors import BlocksError
from actckpt.planner.plans import Plan

__all__ = ["BudgetLoop", "runs_loop"]

#: So many kinds have plans of their own.
_MOST_KINDS = 64
#: So many forwards of one cycle may wait for a backward while others had theirs; then the oldest count as never read.
_MOST_FORWARDS = 16
#: So many forwards in a row without any backward trigger a warning.
_MOST_UNREAD = 16


def runs_loop(model: torch.nn.Module, config: BudgetConfig) -> bool:
    """Return whether the loop plans for a model: one that trains in one process."""
    import os
    device = device_of(model)
    return (os.environ.get("LOOPDEV") == "1" or device.type == "cpu" and not is_linked(device, config.pins)) and num_ranks() == 1


def _with_meter(ended: list[Meter], meter: Meter | None) -> list[Meter] | None:
    return None if meter is None else [each for each in (*ended, meter) if each.left_bytes([])]


@torch_private.called_while_traced
def _warn_compiled() -> bool:
    """Warn that compiled code runs, of which nothing is measured."""
    warn_user(COMPILED)
    return True


class BudgetLoop:
    """The blocks of a model under a budget (NOTE [ The loop ])."""

    def __init__(self, model: torch.nn.Module, forwards: dict[str, CheckpointedForward], config: BudgetConfig) -> None:
        self._model, self._forwards, self._config = model, forwards, config
        self._start()
        self._hooks = [
            model.register_forward_pre_hook(self._begin, with_kwargs=True),
            model.register_forward_hook(self._end, always_call=True),
        ]

    def _start(self) -> None:
        self._kinds: dict[Any, Kind] = {}
        self._kind: Kind | None = None
        self._cycle: Cycle | None = None
        #: Forwards of the cycle that are alive; `_epoch` tells those of cycles that were given up.
        self._num_alive = self._epoch = 0
        #: Per thread, forwards that have begun and not ended: the cycle of each, None where it is no part of one.
        self._running: defaultdict[int, list[Cycle | None]] = defaultdict(list)
        self._profiler = Profiler(offloads=is_linked(self._device, self._config.pins), step=self._unmuted)
        #: Block calls of the cycle that is measured: as they were profiled, and as the first backward found them.
        self._profiled: list[ProfiledBlock] = []
        self._settled: list[SettledBlock] = []
        self._parameters: list[weakref.ref[torch.nn.Parameter]] | None = None
        self._warned: set[str] = set()
        self._infeasible = Infeasible(self._config.on_infeasible)
        self._outside: OutsideModules | None = None
        #: Of the cycles before, as long as something is alive that they counted; None: the last one was not metered.
        self._ended_meters: list[Meter] | None = None
        self._num_unread = 0
        #: How often each block was called.
        self._num_calls = Counter[str]()
        self._num_forwards = 0
        #: Whether a forward with gradients began.
        self.is_called = False

    @property
    def _device(self) -> torch.device:
        return device_of(self._model)

    def __getstate__(self) -> dict[str, Any]:
        # A copy measures anew: its parameters, and with them all that was measured, are others.
        config = self._config.without_optimizers()
        return {"_model": self._model, "_forwards": self._forwards, "_config": config, "_hooks": self._hooks}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        for forward in self._forwards.values():  # a copied block does not take this, and so the model, along
            forward.together.training = self
        self._start()

    # What others ask.

    @property
    def plan(self) -> Plan | None:
        """The plan of the kind of cycle that ran last, None until it is made."""
        return None if self._kind is None else self._kind.plan

    @property
    def running_plan(self) -> Plan | None:
        """The plan of the cycle that runs."""
        return None if self._kind is None else self._kind.running_plan

    @property
    def refused(self) -> str:
        """Why the plan of the kind of cycle that ran last exceeds the budget, or why there is none; else empty."""
        return "" if self._kind is None else self._kind.refused

    @property
    def race_steps_left(self) -> int:
        """In how many more cycles of the kind that ran last candidates may be tried."""
        return 0 if self._kind is None else self._kind.num_trials_left

    @property
    def model_name(self) -> str:
        """The type of the model, for messages."""
        return type(self._model).__name__

    @property
    def is_settled(self) -> bool:
        """Whether the kind of cycle that ran last has its plan, and nothing more is tried."""
        return self._kind is not None and self._kind.stage == "settled"

    def check_step(self, blocks: tuple[str, ...]) -> None:
        """Raise where the one step that ran cannot be planned.

        Raises:
            BlocksError: a block did not run, or ran in several forwards of the model, or backward did not reach it.
        """
        for name in blocks:
            num_calls = self._num_calls[name]
            if not num_calls or (num_calls > 1 and self._num_forwards != 1):
                raise BlocksError(
                    f"plan: block {name!r} ran {num_calls} times in the step, and the model was called "
                    f"{self._num_forwards} times, expected once. Pass a step with one forward of the model, or other "
                    "blocks=."
                )
        if self._kind is None or self._kind.stage == "measure":
            raise BlocksError(
                f"plan: backward did not run through block {blocks[0]!r}. Pass a step with its backward."
            )

    def ran_unplanned(self, name: str) -> bool:
        """A block ran that the plan has nothing for; return whether the kind is measured again."""
        if self._cycle is None or self._kind is None:
            return False
        self._cycle.is_void = True
        return not self._config.pins and self._kind.measure_again()  # pins name calls by their number

    def ran_larger(self, name: str, given: tuple[float, ...]) -> None:
        """A block that runs first was given more bytes than when it was measured: this forward recomputes everything."""
        use_settings(self._forwards, {})
        if self._cycle is not None and self._kind is not None:
            self._cycle.is_void = True
            self._kind.measure_again()

    def close(self) -> None:
        """Watch the model no more."""
        for hook in self._hooks:
            hook.remove()
        self._give_up_cycle()
        sweep()

    # Cycles.

    def _begin(self, _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            if torch.is_grad_enabled():
                _warn_compiled()
            return
        running = self._running[threading.get_ident()]
        self._forget_interrupted(running)
        if running:  # the model calls itself
            running.append(None)
            return
        running.append(None)
        sweep()
        if not torch.is_grad_enabled():
            return
        if torch_private.innermost_transform() is not None:  # tensors of torch.func have no bytes of their own
            use_settings(self._forwards, {})
            return
        if checkpoint_around() is not None:
            raise BlocksError(CHECKPOINTED)
        self._check_unread()
        self.is_called = True
        cycle = self._cycle
        if cycle is not None and cycle.thread != threading.get_ident():
            if self._is_measuring():
                raise BlocksError(TWO_THREADS)
            cycle.is_void = True
        if cycle is not None and cycle.num_forwards >= _MOST_FORWARDS and cycle.num_backwards:
            self._give_up_cycle()
        if self._cycle is None:
            self._begin_cycle(args, kwargs)
        self._begin_forward(self._kind_key(args, kwargs))
        running[-1] = self._cycle

    def _begin_cycle(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        key = self._cycle_key(args, kwargs)
        kind = self._kinds.get(key)
        if kind is None and len(self._kinds) < _MOST_KINDS:
            kind = self._kinds[key] = Kind(self._model, self._forwards, self._config, self._infeasible)
        self._kind = kind
        self._profiled, self._settled = [], []
        static_bytes, held = self._config.static(self._model, self._device)
        static_bytes += self._left_bytes(kind, held, accumulates=bool(key[0]))
        is_metered = kind is not None and kind.begin(static_bytes)  # raises where no plan fits and that was asked for
        own = [] if self._config.is_total else [each for each in self._model.parameters() if each.requires_grad]
        meter = meter_of(self._device, held, parameters=own) if is_metered else None
        self._cycle = Cycle(self._device, meter, static_bytes)
        if self._is_measuring() and meter is not None and (storages := meter.storages()) is not None:
            self._outside = OutsideModules(self._model, self._forwards, storages)
        for forward in self._forwards.values():
            forward.instead = None if meter is None else self._call

    def _left_bytes(self, kind: Kind | None, gradients: list[torch.Tensor], *, accumulates: bool) -> int:
        """Return the bytes that an earlier cycle of the step left behind: casts that autocast holds, outputs in use."""
        if kind is None or not (accumulates or self._config.is_total):
            return 0
        if self._ended_meters is not None:
            kind.left_bytes = sum(meter.left_bytes(gradients) for meter in self._ended_meters)
        return kind.left_bytes

    def _begin_forward(self, key: Any) -> None:
        cycle, kind = self._cycle, self._kind
        assert cycle is not None
        number = cycle.num_forwards
        cycle.num_forwards += 1
        self._num_forwards += 1
        self._num_alive += 1
        settings: Mapping[str, Settings] | None = None if kind is None else kind.settings(number, key)
        if settings is None:
            if kind is not None and not self._config.pins:
                kind.measure_again()
            use_settings(self._forwards, dict.fromkeys(self._forwards, RECOMPUTE))
            cycle.is_void = cycle.is_void or not self._is_measuring()
        else:
            use_settings(self._forwards, settings)

    def _is_measuring(self) -> bool:
        return self._cycle is not None and self._kind is not None and self._kind.is_measured_now

    def _end(self, _: torch.nn.Module, args: Any, result: Any) -> None:
        if torch.compiler.is_compiling():
            return
        running = self._running[threading.get_ident()]
        cycle = running.pop() if running else None  # none where a hook that runs earlier failed
        if cycle is None or cycle is not self._cycle:
            return
        cycle.note("forward")
        if cycle.meter is not None and self._is_measuring() and cycle.num_forwards == 1:
            self._end_outside(cycle)
        outputs = [tensor for tensor in tensors_in(result) if tensor.grad_fn is not None]
        if outputs:
            self._follow(outputs)
            return
        cycle.is_void = True
        if cycle.calls and self._is_measuring() and sys.exc_info()[0] is None and self._are_trained():
            self._warn(NO_OUTPUTS)
        self._gone(self._epoch)

    def _are_trained(self) -> bool:
        return any(block.costs.values and block.costs.values[0].nbytes for block in self._profiled)

    def _follow(self, outputs: list[torch.Tensor]) -> None:
        """See when the graph of a forward is gone: released by a backward, or dropped."""
        epoch, is_over, is_read = self._epoch, False, False
        cycle = self._cycle
        assert cycle is not None

        def gone() -> None:
            nonlocal is_over
            if not is_over:
                is_over = True
                self._num_unread = 0 if is_read else self._num_unread + 1
                self._gone(epoch)

        def reached(_: torch.Tensor) -> None:
            nonlocal is_read
            is_read = True
            cycle.num_backwards += 1
            self._settle(cycle)
            if not torch_private.keeps_graph():
                _C.when_backward_ends(gone)

        dropped = weakref.finalize(reached, gone)
        dropped.atexit = False
        for output in outputs:
            output.register_hook(reached)

    def _gone(self, epoch: int) -> None:
        """A forward of the cycle is not alive any more."""
        if epoch != self._epoch or self._cycle is None:
            return
        self._num_alive -= 1
        if self._num_alive == 0:
            cycle = self._cycle
            self._num_calls.update(call.block for call in cycle.calls)
            self._close_cycle()
            if self._kind is not None:
                self._kind.end(cycle, self._settled)
            self._profiled, self._settled = [], []

    def _give_up_cycle(self) -> None:
        """Forget the cycle: its forwards were interrupted, or are never read."""
        self._close_cycle()
        self._profiled, self._settled = [], []

    def _end_outside(self, cycle: Cycle) -> None:
        """Note what modules outside of the blocks hold, and watch them no more."""
        if self._outside is not None:
            cycle.made_outside = self._outside.made()
            self._outside.close()
            self._outside = None

    def _close_cycle(self) -> None:
        cycle, self._cycle = self._cycle, None
        if cycle is not None:
            self._end_outside(cycle)
            self._ended_meters = _with_meter(self._ended_meters or [], cycle.meter)
        self._epoch += 1
        self._num_alive = 0
        if cycle is not None:
            cycle.end()
            for forward in self._forwards.values():
                forward.instead = None
            if torch_private.current_graph_task_id() == -1:
                sweep()

    def _forget_interrupted(self, running: list[Cycle | None]) -> None:
        """Forget forwards of this thread that were interrupted: no hook ran at their end."""
        num_outer = max(torch_private.num_calls(self._model) - 1, 0) if running else 0
        if any(cycle is not None and cycle is self._cycle for cycle in running[num_outer:]):
            self._give_up_cycle()
        del running[num_outer:]

    def _check_unread(self) -> None:
        if self._num_unread >= _MOST_UNREAD:
            self._warn(UNREAD.format(_MOST_UNREAD, self.model_name))

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            warn_user(text.format(self.model_name))

    # Block calls of a metered cycle.

    def _call(self, forward: CheckpointedForward, args: tuple[Any, ...], kwargs: dict[str, Any], record: Any) -> Any:
        cycle = self._cycle
        if cycle is None or not torch.is_grad_enabled():
            return forward.run_as_set(args, kwargs, record)
        if cycle.thread != threading.get_ident():
            cycle.is_void = True
            return forward.run_as_set(args, kwargs, record)
        number = len(cycle.calls)
        cycle.calls.append(Call(forward.name, cycle.num_forwards - 1))
        source = first_tensor((args, kwargs))
        if source is not None and source.requires_grad:
            source.register_hook(lambda _: cycle.note("backward ends", number))
        cycle.note("forward begins", number)
        try:
            result = (
                self._profile(forward, args, kwargs)
                if self._is_measuring()
                else forward.run_as_set(args, kwargs, record)
            )
        except BaseException:  # no hook runs at the end of a forward that is interrupted
            cycle.is_void = True
            raise
        cycle.note("forward ends", number)
        output = next((tensor for tensor in tensors_in(result) if tensor.grad_fn is not None), None)
        if output is not None:
            output.register_hook(lambda _: self._backward_begins(cycle, number))
        return result

    def _profile(self, forward: CheckpointedForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self._cycle is not None and self._cycle.meter is not None
        with self._cycle.meter.muted():
            result, block = self._profiler.call(forward.name, forward.block, forward.original(), args, kwargs)
        self._profiled.append(block)
        return result

    def _unmuted(self) -> Any:
        assert self._cycle is not None and self._cycle.meter is not None
        return self._cycle.meter.unmuted()

    def _backward_begins(self, cycle: Cycle, number: int) -> None:
        self._settle(cycle)
        cycle.note("backward begins", number, retains_graph=torch_private.keeps_graph())
        _C.when_backward_ends(lambda: cycle.note("backward"))

    def _settle(self, cycle: Cycle) -> None:
        """A backward reaches outputs: see what is alive of that which profiled blocks dropped."""
        if cycle is self._cycle and len(self._settled) < len(self._profiled):
            self._settled += settled(self._profiled[len(self._settled) :])

    # Kinds.

    def _cycle_key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        gradients = any(found is not None and found.grad is not None for ref in self._own() for found in (ref(),))
        return gradients, self._kind_key(args, kwargs)

    def _kind_key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what a forward's share of a plan depends on."""
        trained = bytes(found is None or found.requires_grad for ref in self._own() for found in (ref(),))
        tensors = [
            (tuple(size if type(size) is int else 1 for size in tensor.shape), tensor.dtype, tensor.requires_grad)
            for tensor in tensors_in((args, kwargs))
        ]
        # Numbers and texts may be others in each step, as data is.
        flags = ((name, str(v)) for name, v in (*enumerate(args), *kwargs.items()) if isinstance(v, (bool, enum.Enum)))
        keywords = frozenset(name for name, value in kwargs.items() if value is not None)
        kind = self._device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return self._model.training, autocast, trained, keywords, frozenset(flags), tuple(tensors)

    def _own(self) -> list[weakref.ref[torch.nn.Parameter]]:
        if self._parameters is None:
            self._parameters = [weakref.ref(parameter) for parameter in self._model.parameters()]
        return self._parameters
