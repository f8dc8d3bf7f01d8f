"""Fakes of TransformerEngine for machines that cannot load it: same names, same order of effects, CPU tensors.

Written after the sources of 2.9, 2.15 and 2.20.2; nothing here is theirs. What each fake is there to catch:

- `FakeTracker`: its states are generators, handed out as they are and taken over by reference. Setting them back
  restores nothing (item 1), the dict that it is given is kept (item 3), cloned generators are noticed (item 2).
- `ByteTracker`: states as byte tensors in a dict that `fork` changes (item 3). What TransformerEngine holds of them
  is a copy of the dict, which goes stale.
- `FakeLinear`'s Function: saves quantized storages part by part (item 14), nulls the attributes of its context,
  clears `.data` of what it unpacked (item 15), and has no second backward.
- `FakeLinear` under delayed scaling: its output depends on its scale, which moves with every update; each update
  rolls the amax history, so that one update too many, or too few, shows (items 8 to 10). It keeps the queue of
  copies and the flags of a recompute as TransformerEngine does (items 6, 7 and 9), and casts of weights between
  microbatches (item 11).
- `QuantizedPair`: a wrapper subclass whose `detach` shares the inner tensors, but not the version counter, and whose
  `clear` empties them (15).
- `fake_checkpoint`: te.checkpoint's reentrant variant, whose end clears the flags (item 6).
- `FakeLayer`: attention dropout from a forked tracker, hidden dropout from the default generator (item 5).

`installed(version)` puts a tree of modules into sys.modules and takes it out again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from actckpt.te import registration

VERSIONS = ("2.9.0", "2.15.0", "2.20.2")


class FakeTracker:
    """Named generators, by pointer."""

    def __init__(self, te: Any) -> None:
        self._te, self.states_, self.seeds_ = te, {}, set()

    def get_states(self) -> dict[str, Any]:
        return dict(self.states_)

    def set_states(self, states: dict[str, Any]) -> None:
        self.states_ = states
        self._te.distributed.active_states = states

    def add(self, name: str, seed: int) -> None:
        self.states_[name] = torch.Generator().manual_seed(seed)
        self.set_states(self.states_)

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[torch.Generator]:
        yield self.states_[name]


class ByteTracker(FakeTracker):
    """Named states as bytes; `fork` writes into the dict that the tracker was given."""

    def add(self, name: str, seed: int) -> None:
        self.states_[name] = torch.Generator().manual_seed(seed).get_state()
        self.set_states(self.states_)

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[torch.Generator]:
        generator = torch.Generator()
        generator.set_state(self.states_[name])
        yield generator
        self.states_[name] = generator.get_state()


class Recipe:
    """Delayed scaling, or scales from the tensor itself."""

    def __init__(self, kind: str = "delayed") -> None:
        self.kind = kind

    def delayed(self) -> bool:
        return self.kind == "delayed"


class _State:
    def __init__(self, depth_name: str) -> None:
        self.enabled, self.calibrating, self.recipe, self.group = False, False, None, None
        self.is_first, self.capturing = False, False
        setattr(self, depth_name, 0)
        self.fp8_tensors_recompute_buffer: list[Any] = []
        self.global_amax_buffer: dict[str, list[Any]] = {}
        self.depth_name = depth_name


class Storage:
    """Quantized bytes that are no tensor."""

    def __init__(self, data: torch.Tensor, scale_inv: torch.Tensor) -> None:
        self.data, self.scale_inv = data, scale_inv

    def prepare_for_saving(self) -> tuple[list[Any], Storage]:
        tensors = [self.data, self.scale_inv]
        self.data = self.scale_inv = None  # type: ignore[assignment]
        return tensors, self

    def restore_from_saved(self, tensors: Any) -> Any:
        self.data, self.scale_inv = tensors[:2]
        return tensors[2:]

    def value(self) -> torch.Tensor:
        return self.data.float() * self.scale_inv


def quantize(x: torch.Tensor, scale: torch.Tensor) -> Storage:
    """Round to whole multiples of 1 / scale that fit a byte."""
    return Storage((x.detach() * scale).round().clamp(-127, 127).to(torch.int8), 1 / scale)


class FakeQuantizer:
    """What TransformerEngine's quantizers derive from."""

    def calibrate(self, tensor: torch.Tensor) -> None:
        """Do nothing, as the one of TransformerEngine."""


class FakeCast:
    """Stands for the class of casts that are made in place."""

    def quantize_(self, tensor: torch.Tensor) -> None:
        """Never called."""


def clear_tensor_data(*tensors: Any) -> None:
    """Empty tensors that backward is done with, for everybody who shares the object."""
    for tensor in tensors:
        if not hasattr(tensor, "_do_not_clear"):
            tensor.clear() if hasattr(tensor, "clear") else setattr(tensor, "data", torch.empty(0))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Any, inp: Any, module: Any, te: Any, workspace: Any) -> Any:
        state = te.manager_state()
        if not module.fp8:
            kept = inp.detach().clone()
            ctx.save_for_backward(kept, weight)
            ctx.tensor_objects, ctx.backward_objects = [None, None], SimpleNamespace(reduce=False, fp8=False)
            return kept @ weight.T
        meta = module.fp8_meta
        quantized_inp = module.quantized(inp, 0, state.recipe)
        quantized_weight = workspace or module.quantized(weight, 1, state.recipe)
        out = quantized_inp.value() @ quantized_weight.value().T
        first = state.is_first
        state.is_first = False
        if te.phase():
            state.is_first = first  # a recompute does not use the flag up
        own_weight = Storage(quantized_weight.data, quantized_weight.scale_inv)
        tensors, objects = [], []
        for storage in (quantized_inp, own_weight):
            parts, kept_object = storage.prepare_for_saving()
            tensors += parts
            objects.append(kept_object)
        ctx.save_for_backward(*tensors)
        ctx.tensor_objects = objects
        ctx.backward_objects = SimpleNamespace(reduce=first, fp8=True, meta=meta, recipe=state.recipe, te=te)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        objects = ctx.backward_objects
        objects.grad_output = grad  # AttributeError in a second backward
        saved = ctx.saved_tensors
        if not objects.fp8:
            inp, weight = saved
            grads = grad @ weight, grad.reshape(-1, grad.shape[-1]).T @ inp.reshape(-1, inp.shape[-1])
            clear_tensor_data(inp)
        else:
            for storage in ctx.tensor_objects:
                saved = storage.restore_from_saved(saved)
            inp_storage, weight_storage = ctx.tensor_objects
            if objects.recipe.delayed():
                note_amax(objects.meta["scaling_bwd"], 0, grad)
                grad = quantize(grad, objects.meta["scaling_bwd"].scale[0]).value()
            inp, weight = inp_storage.value(), weight_storage.value()
            grads = grad @ weight, grad.reshape(-1, grad.shape[-1]).T @ inp.reshape(-1, inp.shape[-1])
            clear_tensor_data(inp_storage.data)
        ctx.tensor_objects = ctx.backward_objects = None
        if objects.reduce:
            objects.te.FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)
        return grads[1], grads[0], None, None, None


def note_amax(scaling: Any, place: int, x: torch.Tensor) -> None:
    """Write a tensor's largest absolute value into the history's first row."""
    scaling.amax_history[0, place] = torch.maximum(scaling.amax_history[0, place], x.detach().abs().max())


def _scaling(count: int) -> SimpleNamespace:
    return SimpleNamespace(amax_history=torch.zeros(3, count), scale=torch.full((count,), 16.0))


class Quantized(torch.Tensor):
    """A quantized tensor as a wrapper subclass. Not to be taken apart, as in 2.9.

    As theirs, `detach` is a Python method: a new wrapper around the same inner tensors, with a version counter of its
    own.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale_inv: torch.Tensor, requires_grad: bool = False) -> Any:
        self = torch.Tensor._make_wrapper_subclass(
            cls, data.shape, dtype=torch.float32, device=data.device, requires_grad=requires_grad
        )
        self._data, self._scale_inv = data, scale_inv
        return self

    def __init__(self, data: torch.Tensor, scale_inv: torch.Tensor, requires_grad: bool = False) -> None:
        pass

    def untyped_storage(self) -> torch.UntypedStorage:
        return torch.UntypedStorage(0)

    def detach(self) -> Quantized:
        return type(self)(self._data, self._scale_inv)

    def clear(self) -> None:
        self._data.data = torch.empty(0)

    def value(self) -> torch.Tensor:
        return self._data.float() * self._scale_inv

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0].detach()
        if func in (torch.ops.aten.mul_.Tensor, torch.ops.aten.mul_.Scalar):
            new = quantize(args[0].value() * args[1], 100 / args[0].value().abs().max())
            args[0]._data.copy_(new.data)
            args[0]._scale_inv.copy_(new.scale_inv)
            return args[0]
        raise NotImplementedError(func)


class QuantizedPair(Quantized):
    """The same, and it can be taken apart, as in 2.20."""

    def __tensor_flatten__(self) -> tuple[list[str], bool]:
        return ["_data", "_scale_inv"], self.requires_grad

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: bool, size: Any, stride: Any) -> QuantizedPair:
        return QuantizedPair(inner["_data"], inner["_scale_inv"], context)


def fake_te(version: str) -> Any:
    """Return the fakes of one version of TransformerEngine."""
    from te_fake_modules import build

    return build(version)


@contextmanager
def installed(version: str = "2.20.2", *, without: str | None = None) -> Iterator[Any]:
    """Have `transformer_engine` loaded inside the block, and known to nobody before and after.

    Args:
        without: a name to leave out of `transformer_engine.pytorch.distributed`.
    """
    te = fake_te(version)
    tree: dict[str, ModuleType] = te.tree
    if without is not None:
        delattr(te.distributed, without)
    registration.ignore()
    before = {name: sys.modules[name] for name in tree if name in sys.modules}  # of a block around this one
    sys.modules.update(tree)
    registration.await_te()
    try:
        yield te
    finally:
        registration.ignore()
        for name in tree:
            del sys.modules[name]
        sys.modules.update(before)
        registration.await_te()


def as_result(make: Callable[[], Any]) -> Any:
    """Return what `make` returns, or the type and text of what it raises."""
    try:
        return make()
    except Exception as error:
        return type(error), str(error)
