"""Blocks of a model, and the objects that replace their forwards while they are checkpointed.

The forward of each block is replaced by an instance attribute. So the block keeps its type, its `state_dict` keys and
its hooks. The block's own hooks run outside of the region, once.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from types import FrameType
from typing import Any

import torch

from actckpt._blocks.arguments import exclude_from_offload
from actckpt._blocks.block_group import BlockGroup
from actckpt._blocks.choosing import Blocks, check_made, check_model, chosen_blocks, nothing_found
from actckpt._blocks.first_calls import FirstCalls
from actckpt._blocks.key_value_caches import without_cache
from actckpt._blocks.planned_size import PlannedSize
from actckpt._blocks.recording import RecordedCall
from actckpt._blocks.reruns import checkpoint_around
from actckpt._blocks.second_attempt import SecondAttempts
from actckpt._blocks.windows import Windows
from actckpt._checkpointed_call import checkpoint_call
from actckpt._core import torch_private
from actckpt._options import CheckpointOptions
from actckpt._replay.calls import RegionOptions
from actckpt._text.listed import listed
from actckpt.action import Action
from actckpt.api import offload
from actckpt.errors import BlocksError

__all__ = [
    *("CheckpointedForward", "Settings", "applied_blocks", "blocks_of", "check_no_copy", "count_calls", "find_blocks"),
    *("forwards_in", "patch", "unpatch", "unpatch_one", "watch"),
]

#: The globals through which modules call their forwards.
_CALLS = vars(torch.nn.modules.module)
#: How a block runs: keywords of `checkpoint`, or with `"policy": "offload"` those of `offload`; None: unchanged.
#: `"drops_caches": True` removes key-value caches from its arguments, as for reruns. `"windows"` are those of a plan,
#: also for a block that runs unchanged (`"is_plain": True`; then `"held"` is the number of values it holds, and their
#: bytes). `"is_planned": True`: its tables count module calls per region (NOTE [ Places ]), and only its first tensor
#: is offloaded as input. `"is_unplanned": True`: the plan does not cover this call.
OneCall = Mapping[str, Any] | None
#: A tuple has the settings of each call in a forward of the model, in order; the last one is for all further calls.
Settings = OneCall | tuple[OneCall, ...]


def find_blocks(model: torch.nn.Module, blocks: Blocks | None, what: str) -> dict[str, torch.nn.Module]:
    """Return the blocks of a model by their qualified names.

    Raises:
        BlocksError: there are none, or one is checkpointed already.
    """
    check_model(model, what)
    chosen = chosen_blocks(model, blocks)
    if not chosen:
        raise BlocksError(nothing_found(model, blocks))
    check_made(chosen, what)
    applied = [name for name, block in chosen.items() if _is_applied(block)]
    if applied:
        raise BlocksError(
            f"{what}: {len(applied)} of {len(chosen)} blocks are checkpointed already, the first is {applied[0]!r}. "
            "Call actckpt.remove(model) first, or pass other blocks."
        )
    return chosen


def patch(
    blocks: Mapping[str, torch.nn.Module],
    settings: Mapping[str, Settings],
    model: torch.nn.Module | None = None,
    group: BlockGroup | None = None,
) -> tuple[str, ...]:
    """Checkpoint blocks.

    Args:
        blocks: by qualified name.
        settings: of each block, by the same names.
        model: the model passed to `apply`, if known.
        group: the blocks that they are added to; None: they are an `apply` of their own.
    Returns:
        Their names.
    """
    group = BlockGroup() if group is None else group
    for name, block in blocks.items():
        block.forward = CheckpointedForward(name, block, settings[name], group)
    if model is not None:
        group.belong_to(model)
    return tuple(blocks)


def watch(blocks: Mapping[str, Any]) -> None:
    """Make patched blocks notice if none of them runs."""
    group = {id(forward.group): forward.group for forward in forwards_in(blocks).values()}
    for applied in group.values():
        applied.watch_gradient(parameter for block in blocks.values() for parameter in block.parameters())


def count_calls(model: torch.nn.Module, forwards: Iterable[CheckpointedForward]) -> None:
    """Make patched blocks count their calls per forward of a model, if that matters."""
    group = {id(forward.group): forward.group for forward in forwards if forward.differs}
    for applied in group.values():
        applied.count_calls_in(model)


def forwards_in(blocks: Mapping[str, Any]) -> dict[str, CheckpointedForward]:
    """Return the objects that replace the forwards of patched blocks."""
    return {name: block.forward for name, block in blocks.items()}


def unpatch(blocks: Mapping[str, Any]) -> None:
    """Restore the original forwards of blocks, and stop what watches them."""
    for module in blocks.values():
        group = module.forward.group
        group.limit_windows(None)
        group.count_calls_in(None)
        group.watch_gradient(())
        if group.training is not None:
            group.training.close()
        unpatch_one(module)


def unpatch_one(block: Any) -> None:
    """Restore the original forward of a block."""
    forward = block.__dict__.pop("forward")
    if forward.replaced is not None:
        block.forward = forward.replaced
    if forward.stands_before(torch_private.call_of_compiled(block)):
        torch_private.set_call_of_compiled(block, forward.compiled)


class CallSettings:
    """How one call of a block runs."""

    def __init__(self, settings: OneCall) -> None:
        options = dict(settings or {})
        offloads = options.get("policy") == "offload"
        if offloads:
            del options["policy"]
        self.is_plain: bool = options.pop("is_plain", settings is None)
        self.held: tuple[int, int] | None = options.pop("held", None)
        self.windows: Windows | None = options.pop("windows", None)
        self.is_planned: bool = options.pop("is_planned", False)
        self.is_unplanned: bool = options.pop("is_unplanned", False)
        is_rerun = not self.is_plain and options.get("policy") in (None, "recompute", Action.RECOMPUTE)
        #: Whether key-value caches are removed: they would hold what is dropped.
        self.drops_caches: bool = options.pop("drops_caches", is_rerun)
        #: The keywords of `offload`; None: the block is checkpointed.
        self.offloading = options if offloads else None
        self.options = CheckpointOptions() if offloads else CheckpointOptions(**options)


class CheckpointedForward:
    """The forward of one block, checkpointed. An object, so that deepcopy and pickle follow the block."""

    def __init__(self, name: str, block: torch.nn.Module, settings: Settings, group: BlockGroup) -> None:
        self.name = name
        self.block = block
        self.group = group
        group.add(self)
        self.has_run = False
        #: Handles calls instead of this object: `instead(self, args, kwargs, record)`.
        self.profiling_override: Callable[[CheckpointedForward, tuple[Any, ...], dict[str, Any], Any], Any] | None = (
            None
        )
        #: The input sizes of its plan, if this block may be the one that checks them.
        self.planned_size: PlannedSize | None
        self.use(settings)
        #: As passed to `apply`: copies start with these.
        self._calls_as_applied = self._calls
        self.first_calls = FirstCalls(name)
        self._second_attempts = SecondAttempts()
        #: The result of `block.compile()`, if this object runs around it.
        self.compiled: Callable[..., Any] | None = None
        #: The instance's own forward before, for example from another library's patch.
        self.replaced: Callable[..., Any] | None = block.__dict__.get("forward")
        self.__wrapped__ = block.forward  # for `inspect`: the signature

    def __getstate__(self) -> dict[str, Any]:
        # A copy has not run, and a budget for this model is solved anew for the copy. The copy is not compiled either:
        # modules do not copy that.
        new: dict[str, Any] = {"has_run": False, "profiling_override": None, "planned_size": None, "compiled": None}
        new |= {"first_calls": FirstCalls(self.name), "_second_attempts": SecondAttempts()}
        return {**vars(self), "_calls": self._calls_as_applied, **new}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.group.add(self)  # blocks outside of the copy do not count

    def use(self, settings: Settings) -> None:
        """Run with these settings from the next call on, which is the first one in a forward of the model."""
        self.planned_size = None
        self._calls = tuple(CallSettings(call) for call in (settings if isinstance(settings, tuple) else (settings,)))
        self.begin()
        if all(call_settings.windows is None for call_settings in self._calls):
            self.group.limit_windows(None)

    def begin(self) -> None:
        """A forward of the model starts."""
        self.num_calls = 0
        self._around = id(checkpoint_around()) if self.differs else None

    @property
    def differs(self) -> bool:
        """Whether calls in one forward of the model run differently."""
        return len(self._calls) > 1

    def _next_call(self) -> CallSettings:
        """Return how the next call runs. Calls without gradients, which save nothing, do not count."""
        if not self.differs or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return self._calls[-1]
        around = checkpoint_around()
        if around is not None and id(around) != self._around:
            raise BlocksError(
                f"apply: a {type(self.block).__name__} runs several times in a forward, each time as the plan says for "
                "that call, and here inside of a checkpoint, which would run it again without saying which call that "
                "is. Leave out that checkpoint: the plan says what is recomputed. Or put it around the whole model."
            )
        self.num_calls += 1
        return self._calls[min(self.num_calls, len(self._calls)) - 1]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_exporting() or self.compiled is not None:  # without a backward, or inside of `_compiled`
            return self._plain()(*args, **kwargs)
        return self._called(args, kwargs, None if torch.compiler.is_compiling() else sys._getframe(1))

    def run_around_compiled(self) -> bool:
        """Run around the compiled call of `block.compile()`, not inside of it; return whether that is new."""
        compiled = torch_private.call_of_compiled(self.block)
        if self.stands_before(compiled):
            return False
        before, self.compiled = self.compiled, compiled
        if compiled is not None:
            torch_private.set_call_of_compiled(self.block, self._compiled)
        return compiled is not before

    def stands_before(self, compiled: object) -> bool:
        """Return whether a block's compiled call is this object, which in turn calls the compiled code."""
        return compiled == self._compiled

    def _compiled(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_exporting():
            assert self.compiled is not None
            return self.compiled(*args, **kwargs)
        return self._called(args, kwargs, None if torch.compiler.is_compiling() else sys._getframe(1))

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any], caller: FrameType | None) -> Any:
        self.has_run = True
        if caller is not None:
            self._check_caller(caller)
            self.group.take_over_late(self)
            if self.group.is_watching:
                return self.group.watched(self, args, kwargs)
        return self.run(args, kwargs, None)

    def _check_caller(self, frame: FrameType) -> None:
        """Raise if a copy of the block is called: it shares the block's attributes, including this object."""
        caller = frame.f_locals.get("self") if frame.f_globals is _CALLS else None
        if caller is not None and caller is not self.block and _is_copy(caller, self.block):
            raise BlocksError(
                f"apply: a shallow copy of a {type(self.block).__name__} runs (copy.copy, a replica of "
                "DataParallel, higher): it has the forward of the block that it was copied from, which would use the "
                "parameters of that one. Use copy.deepcopy, call actckpt.remove(model) before copying, or use "
                "actckpt.checkpoint in the model's own forward."
            )

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], record: RecordedCall | None) -> Any:
        """Run it checkpointed, and record what it saves."""
        if self.profiling_override is not None and not torch.compiler.is_compiling():
            return self.profiling_override(self, args, kwargs, record)
        return self.run_as_set(args, kwargs, record)

    def run_as_set(self, args: tuple[Any, ...], kwargs: dict[str, Any], record: RecordedCall | None) -> Any:
        """Run it with its settings."""
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self._run(self._next_call(), args, kwargs, record)
        if self.planned_size is not None:
            self.planned_size.check(self.name, self.group.training, (args, kwargs))
        call_settings = self._next_call()
        if call_settings.is_unplanned:
            self.group.tell_unplanned(self.name)
        training = self.group.training
        first = functools.partial(self._run_in_windows, call_settings, args, kwargs, record)
        if training is None:
            return first()

        def second() -> Any:
            training.ran_out_of_memory(self.name)
            checkpointed = CallSettings({"policy": [], "drops_caches": True, "windows": call_settings.windows})
            return self._run_in_windows(checkpointed, args, kwargs, None)

        return self._second_attempts.run(self.block, (args, kwargs), first, second, training.explain)

    def _run_in_windows(
        self, call_settings: CallSettings, args: tuple[Any, ...], kwargs: dict[str, Any], record: RecordedCall | None
    ) -> Any:
        if call_settings.windows is None:
            return self._run(call_settings, args, kwargs, record)
        return call_settings.windows.run(self.group, lambda: self._run(call_settings, args, kwargs, record))

    def _run(
        self, call_settings: CallSettings, args: tuple[Any, ...], kwargs: dict[str, Any], record: RecordedCall | None
    ) -> Any:
        if call_settings.drops_caches and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            arguments = without_cache(self.block, self._plain(), args, kwargs)
            if arguments is None:
                return self.original()(*args, **kwargs)
            args, kwargs = arguments
        if call_settings.is_plain:
            if record is not None and call_settings.held is not None:
                record.keeps(*call_settings.held)
            return self.original()(*args, **kwargs)
        if call_settings.offloading is not None:
            # Evaluated inside: torch.compile breaks the graph here. It would turn `self.block.forward` into a bound
            # method that it must carry over, and that is this object.
            with offload(**call_settings.offloading) as offloading:
                if record is not None:
                    record.offloading = offloading
                return self.original()(*args, **kwargs)
        original = self.original()
        matches = None if torch.compiler.is_compiling() else self.group.matches
        figures = None if record is None else record.figures
        options, is_planned = call_settings.options, call_settings.is_planned
        is_rerun = options.policy in (None, "recompute", Action.RECOMPUTE)
        if is_rerun and not is_planned:
            options = self.first_calls.changed(options, may_hold=self.group.training is None)
        if is_planned and options.offload_inputs:
            exclude_from_offload((args, kwargs))
        inside = RegionOptions(matches, figures, counts_anew=is_planned, is_block=True)
        result = checkpoint_call(original, args, kwargs, options, inside=inside)
        if record is not None and options.policy in (None, "recompute", Action.RECOMPUTE):
            record.holds((args, kwargs), Action.OFFLOAD if options.offload_inputs else Action.KEEP)
        return result

    def original(self) -> Callable[..., Any]:
        """Return the block's forward without checkpointing, compiled if it is compiled."""
        return self._plain() if self.compiled is None else self.compiled

    def _plain(self) -> Callable[..., Any]:
        if self.replaced is not None:
            return self.replaced
        if torch.compiler.is_compiling():  # before torch 2.13 the compiler cannot create a bound method
            return functools.partial(type(self.block).forward, self.block)
        return types.MethodType(type(self.block).forward, self.block)


def _is_copy(module: torch.nn.Module, block: torch.nn.Module) -> bool:
    """Whether a module has a block's forward as a copy of the block: others may call it on purpose."""
    parts = vars(block)["_modules"].keys()
    return type(module) is type(block) or (len(parts) > 0 and vars(module)["_modules"].keys() == parts)


def blocks_of(model: torch.nn.Module, what: str) -> dict[str, Any]:
    """Return the checkpointed blocks of a model; raises if there are none."""
    check_model(model, what)
    applied = applied_blocks(model)
    if not applied:
        raise BlocksError(
            f"{what}: none of the {sum(1 for _ in model.modules())} modules of {type(model).__name__} is "
            f"checkpointed. Call {what} on the model that was given to actckpt.apply, before actckpt.remove."
        )
    return applied


def check_no_copy(model: torch.nn.Module, blocks: Mapping[str, Any], what: str) -> None:
    """Raise if a model is a shallow copy of the one passed to `apply`, with which it shares its blocks."""
    for name, block in blocks.items():
        group = block.forward.group
        applied_model = group.model() if group.model is not None else None
        if applied_model is None or applied_model is model or type(applied_model) is not type(model):
            continue
        if vars(applied_model)["_modules"] == vars(model)["_modules"]:
            raise BlocksError(
                f"{what}: this {type(model).__name__} is a shallow copy (copy.copy) of the one given to apply. "
                f"Block {name!r} and the others are the same modules in both: call {what} on that one, which does it "
                "for both, or copy with copy.deepcopy."
            )


def check_all_of_budget(model: torch.nn.Module, blocks: Mapping[str, Any], what: str) -> None:
    """Raise if blocks are only some of those that share a plan, and the model still has the others."""
    chosen = {id(block) for block in blocks.values()}
    for group in {block.forward.group for block in blocks.values()}:
        whole = group.model() if group.model is not None and group.training is not None else None
        inside = applied_blocks(whole) if whole is not None else {}
        left = [name for name, b in inside.items() if id(b) not in chosen and b.forward.group is group]
        if left:
            raise BlocksError(
                f"{what}: this {type(model).__name__} is a part of a {type(whole).__name__} with a budget, whose plan "
                f"is for all of its blocks group: {listed(left)} would be left. Call {what} on that model, and then "
                "apply again with other blocks=."
            )


def applied_blocks(model: torch.nn.Module) -> dict[str, Any]:
    """Return the checkpointed blocks of a model by name.

    A replaced `forward` that was assigned again after `remove` is in use again.
    """
    return {name: module for name, module in model.named_modules() if _is_applied(module)}


def _is_applied(module: torch.nn.Module) -> bool:
    return isinstance(module.__dict__.get("forward"), CheckpointedForward)
