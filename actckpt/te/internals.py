"""TransformerEngine's internals; no other file uses them.

Read in the sources of TransformerEngine 2.9 to 2.18 (each release), of the 2.19 branch and of 2.20.2. A version with
other names is rejected, with the missing names. The versions differ as follows:

- 2.9 to 2.14 keep the FP8 state in class attributes of FP8GlobalStateManager, later ones in its `quantization_state`;
  the depth of autocasts is `AUTOCAST_DEPTH` in the former and `autocast_depth` in the latter.
- Until 2.18 the flags of a recompute are `_FP8_ACTIVATION_RECOMPUTE_ENABLED` and `_FP8_ACTIVATION_RECOMPUTE_PHASE`,
  from 2.19 on `_IN_ACTIVATION_RECOMPUTE_REGION` and `_ACTIVATION_RECOMPUTE_PHASE`.
- Until 2.19 modules in eval mode do not queue a copy of their scales in the forward, but need it in the recompute.
- Until 2.11 a module whose recompute raises does not restore its scales.
- 2.9 has one CPU offloader, with a flag; later ones have two, selected by `NVTE_CPU_OFFLOAD_V1`.
- Quantized tensors have `__tensor_flatten__` from 2.19 on.

With delayed scaling, a module in a recompute region copies its scales and amax history: it appends the copy to its own
queue, in a list of queues that all modules share. In the recompute it takes the oldest entry, uses it for that forward,
and restores the previous values. The flags are process-wide, not per thread.

A module remembers under which autocast, and in which dtype, it last ran. In a recompute, a module that last ran
quantized does not check again. It keeps its weight casts between microbatches: `is_first_microbatch=True` writes to
them in place.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from actckpt.errors import TransformerEngineError
from actckpt.te.watching import Calls, Watcher

__all__ = ["PACKAGE", "READ_VERSIONS", "Internals", "is_te_module", "read_already"]

PACKAGE = "transformer_engine.pytorch"
#: Oldest and newest version whose sources were read.
READ_VERSIONS = ("2.9", "2.20.2")

_FLAG_NAMES = (
    ("_IN_ACTIVATION_RECOMPUTE_REGION", "_ACTIVATION_RECOMPUTE_PHASE"),
    ("_FP8_ACTIVATION_RECOMPUTE_ENABLED", "_FP8_ACTIVATION_RECOMPUTE_PHASE"),
)
_MANAGER_METHODS = (
    *("get_autocast_state", "set_autocast_state", "reduce_and_update_fp8_tensors", "is_fp8_enabled"),
    *("get_fp8_recipe", "restore_fp8_meta_tensors"),
)
_STATE_NAMES = ("fp8_tensors_recompute_buffer", "global_amax_buffer")
_AUTOCAST_FIELDS = 6
#: Index of `is_first_fp8_module` in the result of get_autocast_state.
_FIRST_MODULE = 4
#: What modules, te.ops operations and their fusers remember of the last forward.
_NOTED = (
    *("fp8", "fp8_calibration", "fp8_parameters", "fp8_initialized", "fp8_meta_tensors_initialized"),
    *("activation_dtype", "fp8_meta", "quantizers", "_fp8_workspaces"),
    *("_fp8_metas", "_quantizers"),
    *("recipe_type", "backward_override", "_last_amax_history_len", "first_op_requiring_backward"),
    *("_forward_ops", "_backward_ops"),
)
#: In a module's `fp8_meta`: the index of its queue.
_QUEUE_PLACE = "global_fp8_buffer_pos_fwd_recompute"
#: In a module's `fp8_meta`: its scales before the running recompute.
_UPDATED = ("updated_amax_history_fwd", "updated_scale_fwd")

#: (inside a recompute region, in its recompute)
Flags = tuple[bool, bool]


def installed_version() -> str | None:
    """Return the version of the loaded, else of the installed, TransformerEngine; None if there is none."""
    loaded = getattr(sys.modules.get("transformer_engine"), "__version__", None)
    if loaded is not None:
        return str(loaded)
    from importlib import metadata

    for name in ("transformer_engine", "transformer-engine"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def read_already(version: str) -> bool:
    """Whether the sources of this version were read."""
    oldest, newest = (_numbers(text) for text in READ_VERSIONS)
    return oldest <= _numbers(version)[:2] and _numbers(version)[:3] <= newest


def _numbers(version: str) -> tuple[int, ...]:
    parts = []
    for part in version.split("+")[0].split("."):
        if not part.isdigit():
            break
        parts.append(int(part))
    return tuple(parts)


def is_te_module(module: torch.nn.Module) -> bool:
    """Whether this is a TransformerEngine module, or of a subclass."""
    return any(kind.__module__.split(".")[0] == "transformer_engine" for kind in type(module).__mro__)


class Internals:
    """The loaded TransformerEngine.

    Raises:
        TransformerEngineError: its internals differ from those of the versions that were read.
    """

    def __init__(self) -> None:
        self.version: str = installed_version() or "of unknown version"
        self._missing: list[str] = []
        self._distributed = self._module("distributed")
        self._offload = self._module("cpu_offload")
        self._manager = self._name(self._module("quantization"), "FP8GlobalStateManager")
        self._base = self._name(self._module("module.base"), "TransformerEngineBaseModule")
        self._tensor = self._name(self._module("tensor"), "Float8Tensor")
        self._quantizer = self._name(self._module("tensor"), "Quantizer")
        self._context = self._name(self._distributed, "activation_recompute_forward")
        self._flags = next((pair for pair in _FLAG_NAMES if all(hasattr(self._distributed, n) for n in pair)), None)
        if self._flags is None:
            self._missing.append("the flags of a recompute in transformer_engine.pytorch.distributed")
        self._check_names()
        self._depth = "autocast_depth" if hasattr(self._fp8, "autocast_depth") else "AUTOCAST_DEPTH"

    def _check_names(self) -> None:
        for name in ("get_all_rng_states", "CudaRNGStatesTracker", "checkpoint"):
            self._name(self._distributed, name)
        for name in ("prepare_forward", "set_activation_dtype"):
            self._name(self._base, name)
        self._name(self._tensor, "quantize_")
        self._name(self._quantizer, "calibrate")
        self._name(self._context, "_is_first_fp8_module")
        for name in _MANAGER_METHODS:
            self._name(self._manager, name)
        for name in _STATE_NAMES:
            self._name(self._fp8, name)
        if not (hasattr(self._fp8, "autocast_depth") or hasattr(self._fp8, "AUTOCAST_DEPTH")):
            self._missing.append("the depth of autocasts")
        if not (hasattr(self._offload, "OFFLOAD_SYNCHRONIZER") or hasattr(self._offload, "CPUOffloadEnabled")):
            self._missing.append("the flag of CPU offloading in transformer_engine.pytorch.cpu_offload")
        if not self._missing and len(self._manager.get_autocast_state()) != _AUTOCAST_FIELDS:
            count = len(self._manager.get_autocast_state())
            self._missing.append(f"the {_AUTOCAST_FIELDS} fields of the autocast state (it has {count})")
        if self._missing:
            raise TransformerEngineError(
                f"TransformerEngine {self.version} is not as actckpt knows it (read were {READ_VERSIONS[0]} to "
                f"{READ_VERSIONS[1]}): it lacks {', '.join(self._missing)}.\nRegions over its modules could compute "
                "wrong gradients. Install a version that was read, or, if no region runs modules of "
                "TransformerEngine, call actckpt.te.ignore()."
            )

    def _module(self, name: str) -> ModuleType | None:
        module = sys.modules.get(f"{PACKAGE}.{name}")
        if module is None:
            self._missing.append(f"{PACKAGE}.{name}")
        return module

    def _name(self, owner: Any, name: str) -> Any:
        if owner is not None and not hasattr(owner, name):
            self._missing.append(f"{getattr(owner, '__name__', type(owner).__name__)}.{name}")
        return getattr(owner, name, None)

    # ------------------------------------------------------------------ recompute regions

    @property
    def flags(self) -> Flags:
        """Whether a recompute region is running, and whether that is its recompute."""
        region, phase = self._flags or ("", "")
        return getattr(self._distributed, region), getattr(self._distributed, phase)

    @flags.setter
    def flags(self, flags: Flags) -> None:
        for name, value in zip(self._flags or (), flags, strict=True):
            setattr(self._distributed, name, value)

    @property
    def queues(self) -> list[Any]:
        """One queue per module, of the [amax history, scale] that it queued."""
        queues: list[Any] = self._fp8.fp8_tensors_recompute_buffer
        return queues

    @queues.setter
    def queues(self, queues: list[Any]) -> None:
        self._fp8.fp8_tensors_recompute_buffer = queues

    #: Keys missing in a module that must take an entry, or restore its scales, and never queued one.
    queue_keys: tuple[str, str] = (_QUEUE_PLACE, _UPDATED[0])

    @property
    def first_module_flags(self) -> list[Any]:
        """Flags that te.checkpoint's forwards queued for their recomputes, oldest first."""
        flags: list[Any] = self._context._is_first_fp8_module
        return flags

    # ------------------------------------------------------------------ FP8 state

    @property
    def _fp8(self) -> Any:
        """The holder of the FP8 state; another object after FP8GlobalStateManager.reset()."""
        return getattr(self._manager, "quantization_state", self._manager)

    @property
    def autocast(self) -> tuple[Any, ...]:
        """The state of te.autocast, by value."""
        return tuple(self._manager.get_autocast_state())

    @autocast.setter
    def autocast(self, state: tuple[Any, ...]) -> None:
        self._manager.set_autocast_state(state)

    @staticmethod
    def is_first_module(autocast: tuple[Any, ...]) -> bool:
        """Whether the next FP8 module is the first of its autocast, which updates scales in backward."""
        return bool(autocast[_FIRST_MODULE])

    @property
    def autocast_depth(self) -> int:
        """The number of active te.autocasts. Leaving the outermost one updates the scales of the forward."""
        depth: int = getattr(self._fp8, self._depth)
        return depth

    @autocast_depth.setter
    def autocast_depth(self, depth: int) -> None:
        setattr(self._fp8, self._depth, depth)

    @contextmanager
    def no_backward_updates(self) -> Iterator[None]:
        """Run the body with nothing that an update of backward scales would find."""
        buffers = self._fp8.global_amax_buffer  # keys begin with "forward" or "backward"
        self._fp8.global_amax_buffer = {key: held for key, held in buffers.items() if key.startswith("forward")}
        try:
            yield
        finally:
            self._fp8.global_amax_buffer = buffers

    def update_backward_scales(self) -> None:
        """Do what the first FP8 module of an autocast does at the end of its backward."""
        self._manager.reduce_and_update_fp8_tensors(forward=False)

    @property
    def rng_states(self) -> dict[str, Any]:
        """The live states of the current tracker: generators, or byte tensors."""
        states: dict[str, Any] = self._distributed.get_all_rng_states()  # type: ignore[union-attr]
        return states

    # ------------------------------------------------------------------ hooks into TransformerEngine

    def watch(self, watcher: Watcher) -> None:
        """Notify `watcher` of TransformerEngine's calls."""
        calls = self._calls = Calls(watcher)
        calls.tell_of_recomputes(self._context)
        calls.tell_before(self._base, "prepare_forward", watcher.module_begins)
        calls.tell_before(self._tensor, "quantize_", lambda tensor, _: watcher.cast_begins(tensor))
        fuser = getattr(sys.modules.get(f"{PACKAGE}.ops.fuser"), "OperationFuser", None)
        if fuser is not None:
            calls.tell_before(fuser, "__call__", lambda one, _: watcher.ops_begin(one, one._basic_ops))
        for kind in _with_subclasses(self._quantizer):
            if "calibrate" in vars(kind):
                calls.skip_in_reruns(kind, "calibrate")

    def unwatch(self) -> None:
        """Undo `watch`."""
        self._calls.undo()

    def has_delayed_scales(self, op: Any) -> bool:
        """Whether a te.ops operation would quantize its forward with delayed scaling now."""
        if not self._manager.is_fp8_enabled() or not op.num_quantizers("forward"):
            return False
        recipe = self._manager.get_fp8_recipe()  # a custom recipe may use delayed scaling for some tensors
        return bool(recipe.delayed() or (hasattr(recipe, "custom") and recipe.custom()))

    # ------------------------------------------------------------------ state of the last forward

    @staticmethod
    def noted(owner: Any) -> Callable[[], None]:
        """Return a function that restores what a module, operation or fuser remembers of its last forward."""
        values = {name: vars(owner)[name] for name in _NOTED if name in vars(owner)}
        outer = [held for held in values.values() if isinstance(held, dict)]
        inner = [held for kept in outer for held in kept.values() if isinstance(held, dict)]
        copies = [(held, dict(held)) for held in (*outer, *inner)]

        def put_back() -> None:
            vars(owner).update(values)
            for held, copy in copies:
                held.clear()
                held.update(copy)

        return put_back

    def begin_recompute(self, module: Any, inp: Tensor) -> None:
        """Make a module's recompute follow the autocast, not what the module remembers of its last forward."""
        for key in _UPDATED:
            module.fp8_meta.pop(key, None)
        place = module.fp8_meta.get(_QUEUE_PLACE, len(self.queues))
        has_entry = place < len(self.queues) and bool(self.queues[place])
        if self._manager.is_fp8_enabled() and (has_entry or self._manager.get_fp8_recipe().delayed()):
            vars(module)["fp8"] = True  # it takes an entry, and does not check
            module.set_activation_dtype(inp)
        else:
            vars(module)["fp8"] = False  # it checks again

    def abandon_recompute(self, module: Any) -> None:
        """Make a module whose recompute raised use its own scales again (TransformerEngine does so from 2.12 on)."""
        if _UPDATED[0] in module.fp8_meta:
            self._manager.restore_fp8_meta_tensors(module.fp8_meta)

    @staticmethod
    def kept_casts(module: Any) -> list[Tensor]:
        """Return the weight casts that a module keeps between microbatches."""
        return [cast for cast in module._fp8_workspaces.values() if isinstance(cast, Tensor)]

    @staticmethod
    def parts(tensor: Any) -> list[Tensor]:
        """Return the tensors inside a quantized one."""
        return [part for part in vars(tensor).values() if isinstance(part, Tensor)]

    @staticmethod
    def leave_fsdp_group(module: Any) -> None:
        """Stop a module from sharding what it saves over its FSDP group, as te.checkpoint does."""
        if isinstance(module, torch.nn.Module) and is_te_module(module) and hasattr(module, "fsdp_wrapped"):
            set_attribute: Callable[[str, Any], None] = getattr(module, "fast_setattr", module.__setattr__)
            set_attribute("fsdp_wrapped", False)
            set_attribute("fsdp_group", None)

    # ------------------------------------------------------------------ offloading

    @property
    def is_offloading(self) -> bool:
        """Whether TransformerEngine's own CPU offloading is on."""
        return bool(self._offload.is_cpu_offload_enabled())  # type: ignore[union-attr]

    @staticmethod
    def is_marked(tensor: Tensor) -> bool:
        """Whether TransformerEngine marks the tensor as not offloadable."""
        return bool(getattr(tensor, "_TE_do_not_offload", False))

    @staticmethod
    def ready_event(tensor: Tensor) -> Any:
        """The event after which the tensor's bytes are ready, or None; its name is misleading."""
        return getattr(tensor, "start_reload_event", None)

    @staticmethod
    def weight_tensors(module: torch.nn.Module) -> Iterator[Tensor]:
        """Yield the tensors inside a module's weights: parameters, quantized ones part by part, cached casts."""
        workspaces = getattr(module, "_fp8_workspaces", None) or {}
        for weight in (*module._parameters.values(), *workspaces.values()):
            if isinstance(weight, Tensor):
                yield weight
            if weight is not None:
                yield from Internals.parts(weight)


def _with_subclasses(kind: type[Any]) -> list[Any]:
    return [kind, *(subclass for below in kind.__subclasses__() for subclass in _with_subclasses(below))]
