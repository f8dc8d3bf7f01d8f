"""What a training step costs, block by block: the cost table that the planner works on.

NOTE [ Measuring a step ]

Rule 1. Nothing runs that needs much more memory than a step in which all blocks are checkpointed.
Rule 2. Blocks are profiled at their calls (NOTE [ Profiling a block ]). What runs outside of blocks is watched at
        marks, in steps in which all blocks are recomputed: where a block's forward begins and ends, and where
        backward reaches the output of a block. What runs before the first block, and after its backward, is the
        *stem*; what runs after the last one is the *head*. What runs between two blocks is an entry of its own, where
        it holds something, or needs more than the block after it.
Rule 3. Blocks whose costs are the same but for their times are one class.
Rule 4. The stack has calls of blocks, in their order: a block that runs several times in a forward (weights that layers
        share) is in it as often.
Rule 5. What is made on the way and gone when backward begins (lists of results, states that a later call replaces) does
        not count as held, only while forwards run. What a call is given beside its input does: reruns hold it.
Rule 6. The input of a call counts with it where it is new: made after the block before has ended, or returned by that.
        Of parts of a sequence that calls are given one after the other the whole counts once, with the first of them;
        what the program made before the step does not count.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from actckpt._blocks.applied import CheckpointedForward, patch, unpatch
from actckpt._blocks.arguments import first_tensor
from actckpt._blocks.outside import MadeOutside, OutsideModules
from actckpt._budget.alone import Exchanges, num_ranks
from actckpt._budget.cached_casts import CachedCasts, holding_casts
from actckpt._budget.class_names import AFTER, BEFORE, with_block_names
from actckpt._budget.links import flush
from actckpt._budget.marks import Mark, Marks, Outside, begins, between, outside_bytes, outside_seconds
from actckpt._budget.outside_graph import OutsideGraph, Read
from actckpt._budget.profiled_block import ProfiledBlock, as_given
from actckpt._budget.profiling import Profiler
from actckpt._budget.running import RECOMPUTE, device_of
from actckpt._budget.workspaces import NumberedStorages
from actckpt._core.storages import tensors_in
from actckpt._core.training_state import TrainingState
from actckpt._text.listed import calls_named
from actckpt.errors import BlocksError
from actckpt.planner.costs import BlockClass, CostTable, Value

__all__ = ["MeasuredStep", "cost_table", "measure"]

_Parameters = list[list[torch.nn.Parameter]]

_NUM_TIMED = 2


@dataclasses.dataclass(frozen=True)
class MeasuredStep:
    """A cost table, and which blocks its stack is made of."""

    costs: CostTable
    #: Qualified names of the blocks, for each entry of the stack; None for what runs outside of them.
    names: tuple[str | None, ...]
    #: Per entry of the stack, the place of each value by its name in the cost table.
    places: tuple[dict[str, str], ...]
    #: Per block, what of its working set are gradients that wait.
    waiting_bytes: tuple[int, ...]
    #: Per entry of the stack, names of parameters that it reads and no module of a block there has.
    parameters: tuple[tuple[str, ...], ...]
    #: What is saved for backward after the last block: in the model, and of what is computed from its outputs.
    saved_after_blocks_bytes: float = 0.0
    #: So much more than what runs in the model after the last block needs what is computed from its outputs. Gradients
    #: of parameters are there once that has run backward.
    loss_more_bytes: float = 0.0
    #: Whether working sets of what runs outside of blocks are those of a backward that was watched, too.
    sees_backward: bool = False
    #: Per entry of the stack, of the casts of its parameters that live until backward has ended; empty: of none.
    cast_bytes: tuple[int, ...] = ()
    #: By name of a block, of casts that it was the last one to find in the cache of autocast, of another forward.
    casts_found: Mapping[str, int] = dataclasses.field(default_factory=dict)
    made_outside: tuple[MadeOutside, ...] = ()

    def needing(self, needed: Sequence[float]) -> MeasuredStep:
        """Return the step in which what is on the stack needs so many bytes."""
        classes, stack = {}, []
        for name, old, block, nbytes in zip(self.names, self.costs.stack, self.costs.blocks, needed, strict=True):
            is_other = name is not None and nbytes != block.working_set_bytes
            stack.append(f"{old}, {nbytes:.0f} needed" if is_other else old)
            classes[stack[-1]] = dataclasses.replace(block, working_set_bytes=nbytes)
        costs = dataclasses.replace(self.costs, classes=classes, stack=tuple(stack))
        return dataclasses.replace(self, costs=with_block_names(costs, self.names))

    def beside_others(self, *, are_counted: bool) -> MeasuredStep:
        """Return the step in an autocast with several forwards (NOTE [ Casts in the cache ], Rule 1).

        Args:
            are_counted: casts of others are fixed already.
        """
        found = self.casts_found
        waiting = list(self.cast_bytes or (0,) * len(self.names))
        for number, name in enumerate(self.names):
            if name is not None and name not in self.names[number + 1 :]:  # backward comes to the last call first
                waiting[number] += found.get(name, 0)
        if not any(waiting):
            return self
        classes, stack = {}, []
        for old, block, nbytes in zip(self.costs.stack, self.costs.blocks, waiting, strict=True):
            stack.append(f"{old}, {nbytes} of casts" if nbytes else old)
            classes[stack[-1]] = dataclasses.replace(block, gradient_bytes=block.gradient_bytes + nbytes)
        classes[BEFORE] = _holding(classes[BEFORE], "(casts of others)", 0 if are_counted else sum(found.values()))
        costs = dataclasses.replace(self.costs, classes=classes, stack=tuple(stack))
        return dataclasses.replace(self, costs=with_block_names(costs, self.names))

    def holding(self, name: str, nbytes: float) -> MeasuredStep:
        """Return the step in which so many bytes of what the head needs live to the end of backward."""
        if not nbytes:
            return self
        classes = dict(self.costs.classes)
        head = classes[AFTER]
        classes[BEFORE] = _holding(classes[BEFORE], name, nbytes)
        classes[AFTER] = dataclasses.replace(head, working_set_bytes=max(head.working_set_bytes - nbytes, 0.0))
        return dataclasses.replace(self, costs=dataclasses.replace(self.costs, classes=classes))

    def parameters_in(self, model: torch.nn.Module) -> tuple[_Parameters, _Parameters]:
        """Return per entry of the stack the parameters of a model that it reads, and those of no module of a block."""
        named = dict(model.named_parameters())
        others = [[named[name] for name in names if name in named] for names in self.parameters]
        found = []
        for name, given in zip(self.names, others, strict=True):
            own = () if name is None else model.get_submodule(name).parameters()
            found.append(list({id(parameter): parameter for parameter in (*own, *given)}.values()))
        return found, others


def _holding(stem: BlockClass, name: str, nbytes: float) -> BlockClass:
    """Return the stem with so many bytes more that live through the whole step."""
    held = Value(name, float(nbytes), offloadable=False, replayable=False)
    return dataclasses.replace(stem, values=(*stem.values, held)) if nbytes else stem


def measure(
    step: Callable[[], object],
    *,
    blocks: dict[str, torch.nn.Module],
    model: torch.nn.Module,
    state: TrainingState,
    offloads: bool,
) -> MeasuredStep:
    """Run a step a few times and return what it costs.

    Args:
        step: runs forward and backward once, through each of the blocks.
        blocks: by qualified name.
        state: what is put back before each run.
        offloads: whether plans may offload.
    Raises:
        BlocksError: a block does not run, or several times in several forwards of the model.
    Cost: four steps, and of each distinct block 18 (slow ones) to 42 (fast ones) more on a CPU, some more on a device.
    """
    watched = _Watched(step, blocks, state, model)
    with state.checked("plan"):
        profiled, read, casts = watched.profiled(Profiler(offloads=offloads))
    num_calls = len(profiled)
    marks = watched.marked(NumberedStorages(device_of(model), parameters=model.parameters()))
    profiled, cast_bytes = casts.settled(profiled)
    marks = holding_casts(marks, cast_bytes)
    profiled = as_given(profiled, begins(marks))
    seconds = [outside_seconds(watched.marked(None), num_calls) for _ in range(_NUM_TIMED)]
    stem, head = outside_bytes(marks, num_calls, read.backward_bytes)
    stem, head = (
        dataclasses.replace(each, forward_s=min(f for f, _ in runs), backward_s=min(b for _, b in runs))
        for each, runs in zip((stem, head), zip(*seconds, strict=True), strict=True)
    )
    found = cost_table(profiled, stem, between(marks, num_calls, read.backward_bytes), head, read)
    return dataclasses.replace(casts.completed(found), sees_backward=True, made_outside=watched.made_outside)


class _Watched:
    """Runs the step of a model with its blocks recomputed, and watches them."""

    def __init__(
        self,
        step: Callable[[], object],
        blocks: dict[str, torch.nn.Module],
        state: TrainingState,
        model: torch.nn.Module,
    ) -> None:
        self._step, self._blocks, self._state, self._model = step, blocks, state, model
        self._device = device_of(model)
        self.made_outside: tuple[MadeOutside, ...] = ()

    @contextlib.contextmanager
    def _calls(self, call: _BlockCall) -> Iterator[None]:
        """Let each block call `call(name, checkpointed forward, args, kwargs)`."""
        patch(self._blocks, dict.fromkeys(self._blocks, RECOMPUTE))
        try:
            forwards: dict[str, Any] = {name: block.forward for name, block in self._blocks.items()}
            for name, block in self._blocks.items():
                block.forward = functools.partial(_called, call, name, forwards[name])
            yield
        finally:
            for name, block in self._blocks.items():
                block.forward = forwards[name]
            unpatch(self._blocks)

    def profiled(self, profiler: Profiler) -> tuple[list[ProfiledBlock], Read, CachedCasts]:
        """Return what each call of a block costs, in order, what is read outside of them, and casts."""
        found: list[ProfiledBlock] = []
        casts = CachedCasts()
        reached: set[int] = set()
        forwards = _Forwards(self._model)

        def call(name: str, forward: CheckpointedForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            forwards.graph.call_begins((args, kwargs))
            casts.call_begins()
            result, block = profiler.call(name, self._blocks[name], forward.original(), args, kwargs)
            forwards.graph.call_ended()
            found.append(block)
            casts.call_ended(block, lambda _: True)
            number = len(found) - 1
            _on_gradient(result, lambda: backward_reached(number))
            return result

        def backward_reached(number: int) -> None:
            if not reached:  # nothing is back yet of what was moved
                flush(self._device)
                found[:] = [each.with_input_kept().without_replaced() for each in found]
                casts.backward_reached(0)  # plans are tried: what lives after the blocks shows
            reached.add(number)

        self._state.put_back()
        exchanges = Exchanges()
        with forwards, self._calls(call), exchanges:
            self._step()
        if not exchanges.is_empty and num_ranks() > 1:
            raise BlocksError(
                f"plan: the step exchanges tensors with other ranks, {num_ranks()} in all, and how often it must run "
                "differs between them. Pass the budget to actckpt.apply, which plans while the model trains."
            )
        _check(self._blocks, [each.name for each in found], reached, forwards.num)
        return found, forwards.read or Read.nothing(len(found)), casts

    @contextlib.contextmanager
    def _outside_watched(self, live: NumberedStorages) -> Iterator[None]:
        """Note what modules outside of the blocks make in a forward of the model."""
        outside = OutsideModules(self._model, self._blocks, live)

        def ended(*_: object) -> None:
            self.made_outside = outside.made()

        hook = self._model.register_forward_hook(ended)
        try:
            yield
        finally:
            hook.remove()
            outside.close()

    def marked(self, live: NumberedStorages | None) -> list[Mark]:
        """Return the marks of one step."""
        marks = Marks(live, self._device)
        first, first_reached = iter((True,)), iter((True,))
        numbers = itertools.count()

        def reached(number: int) -> None:
            if next(first_reached, False):
                marks.settle()
            marks.note("backward", number)

        def call(name: str, forward: CheckpointedForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            source, number = first_tensor((args, kwargs)), next(numbers)
            marks.begins(number, (args, kwargs))
            if next(first, False):
                _on_gradient(source, lambda: marks.note("stem"))
            result = forward(*args, **kwargs)
            marks.ends(number, (args, kwargs), result)
            _on_gradient(result, lambda: reached(number))
            return result

        self._state.put_back()

        # What the optimizer makes is no activation: what counts ends before it.
        with contextlib.ExitStack() as exits:
            exits.enter_context(self._calls(call))
            if live is not None:
                exits.enter_context(self._outside_watched(live))
                exits.enter_context(live.paused())
                exits.enter_context(live)
            exits.enter_context(self._state.before_update(lambda: marks.note("done")))
            marks.note("start")
            self._step()
            marks.note("done")
        return marks.found


class _Forwards:
    """Counts the forwards of a model, and takes down the graph of one that is alone."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self.graph = OutsideGraph(model)
        self.num = 0
        self.read: Read | None = None

    def __enter__(self) -> None:
        self._hook = self._model.register_forward_hook(self._ended)

    def __exit__(self, *_: object) -> None:
        self._hook.remove()

    def _ended(self, _: torch.nn.Module, __: Any, result: Any) -> None:
        if torch.is_grad_enabled():
            self.num += 1
            outputs = [tensor for tensor in tensors_in(result) if tensor.requires_grad]
            self.read = self.graph.read(outputs) if self.num == 1 else None


_BlockCall = Callable[[str, CheckpointedForward, tuple[Any, ...], dict[str, Any]], Any]


def _called(call: _BlockCall, name: str, forward: CheckpointedForward, *args: Any, **kwargs: Any) -> Any:
    return call(name, forward, args, kwargs)


def _on_gradient(value: Any, note: Callable[[], None]) -> None:
    tensor = first_tensor(value)
    if tensor is not None and tensor.requires_grad:
        tensor.register_hook(lambda _: note())


def _check(blocks: dict[str, torch.nn.Module], ran: list[str], reached: set[int], num_forwards: int) -> None:
    for name in blocks:
        if not (num := ran.count(name)) or (num > 1 and num_forwards != 1):
            raise BlocksError(
                f"plan: block {name!r} ran {num} times in the step, and the model was called {num_forwards} times, "
                "expected once. Pass a step with one forward of the model, or other blocks=."
            )
    for number, name in enumerate(ran):
        if number not in reached:
            raise BlocksError(f"plan: backward did not run through block {name!r}. Pass a step with its backward.")


def cost_table(
    blocks: list[ProfiledBlock], stem: Outside, between: list[Outside], head: Outside, read: Read
) -> MeasuredStep:
    """Return the cost table of a stack of blocks between stem and head, with what runs between two blocks."""
    waiting = read.waiting_bytes
    blocks = [*(block.before(after) for block, after in itertools.pairwise(blocks)), *blocks[-1:]]
    blocks = [block.with_gradients(nbytes) for block, nbytes in zip(blocks, waiting[1::2], strict=True)]
    between = [outside.with_gradients(nbytes) for outside, nbytes in zip(between, waiting[2:-1:2], strict=True)]
    gathered = [*(each.gathered_bytes for each in between), 0.0]  # the working set of a block that reruns has them
    blocks = [block.with_other(nbytes) for block, nbytes in zip(blocks, gathered, strict=True)]
    classes: dict[str, BlockClass] = {BEFORE: stem.block_class()}
    names: dict[BlockClass, str] = {}
    stack, calls = [BEFORE], list[ProfiledBlock | None]([None])
    parameters = [read.parameters[0]]
    names_before = ((), *read.parameters[2:-1:2])
    called = calls_named([block.name for block in blocks])
    rows = zip(blocks, called, [None, *between], names_before, read.parameters[1::2], strict=True)
    for block, name, outside, before, given in rows:
        if outside is not None and outside.counts_before(block.costs):
            stack.append(f"(before {name})")
            classes[stack[-1]] = outside.block_class()
            calls.append(None)
            parameters.append(before)
            before = ()
        stack.append(names.setdefault(block.costs, str(name)))
        calls.append(block)
        parameters.append((*before, *given))
    classes |= {name: costs for costs, name in names.items()} | {AFTER: head.block_class()}
    costs = CostTable.from_dict(CostTable(classes=classes, stack=(*stack, AFTER)).to_dict())
    calls.append(None)
    parameters.append(read.parameters[-1])
    block_names = tuple(None if call is None else call.name for call in calls)
    return MeasuredStep(
        with_block_names(costs, block_names),
        block_names,
        tuple({} if call is None else call.places for call in calls),
        waiting[1::2],
        tuple(parameters),
    )
