"""The module tree of the fake TransformerEngine; see te_fakes.py, which describes the fakes."""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import te_fakes as fakes
import torch

_P = "transformer_engine.pytorch"
_QUEUE_KEY = "global_fp8_buffer_pos_fwd_recompute"


def build(version: str) -> Any:
    """Return a namespace of fakes with the layout of `version`, and its `tree` for sys.modules."""
    major = tuple(int(part) for part in version.split(".")[:2])
    te = SimpleNamespace(version=version, eval_keeps_no_copy=major < (2, 20))
    below = ("distributed", "quantization", "cpu_offload", "ops", "ops.fuser", "module", "module.base", "tensor")
    names = [_P, *(f"{_P}.{name}" for name in below)]
    te.tree = {name: ModuleType(name) for name in ("transformer_engine", *names)}
    te.tree["transformer_engine"].__version__ = version
    te.distributed, te.offload = te.tree[f"{_P}.distributed"], te.tree[f"{_P}.cpu_offload"]
    _add_manager(te, old=major < (2, 15))
    _add_distributed(te, old=major < (2, 19))
    _add_offload(te, old=major < (2, 10))
    _add_autocast(te)
    te.tree[f"{_P}.tensor"].Float8Tensor, te.tree[f"{_P}.tensor"].Quantizer = fakes.FakeCast, fakes.FakeQuantizer
    _add_modules(te)
    _add_ops(te)
    return te


def _add_manager(te: Any, *, old: bool) -> None:
    depth_name = "AUTOCAST_DEPTH" if old else "autocast_depth"

    class FP8GlobalStateManager:
        if not old:
            quantization_state = fakes._State("autocast_depth")

        @classmethod
        def get_autocast_state(cls) -> Any:
            s = te.manager_state()
            return s.enabled, s.calibrating, s.recipe, s.group, s.is_first, s.capturing

        @classmethod
        def set_autocast_state(cls, state: Any) -> None:
            s = te.manager_state()
            s.enabled, s.calibrating, s.recipe, s.group, s.is_first, s.capturing = state

        @classmethod
        def is_fp8_enabled(cls) -> bool:
            return te.manager_state().enabled

        @classmethod
        def get_fp8_recipe(cls) -> Any:
            return te.manager_state().recipe

        @staticmethod
        def restore_fp8_meta_tensors(meta: Any) -> None:
            meta["scaling_fwd"].amax_history.copy_(meta["updated_amax_history_fwd"])
            meta["scaling_fwd"].scale.copy_(meta["updated_scale_fwd"])

        @classmethod
        def reduce_and_update_fp8_tensors(cls, forward: bool = True) -> None:
            direction = "forward" if forward else "backward"
            scalings = te.manager_state().global_amax_buffer.get(direction, [])
            if scalings:  # here ranks would talk to each other
                te.updates.append(direction)
            for scaling in scalings:
                amax = scaling.amax_history.max(0).values
                scaling.scale.copy_(torch.where(amax > 0, 100 / amax, scaling.scale))
                scaling.amax_history.copy_(scaling.amax_history.roll(-1, 0))
                scaling.amax_history[0].zero_()

    if old:
        for name, value in vars(fakes._State(depth_name)).items():
            setattr(FP8GlobalStateManager, name, value)
    te.updates = []
    te.depth_name = depth_name
    te.FP8GlobalStateManager = FP8GlobalStateManager
    te.manager_state = lambda: getattr(FP8GlobalStateManager, "quantization_state", FP8GlobalStateManager)
    te.tree[f"{_P}.quantization"].FP8GlobalStateManager = FP8GlobalStateManager


def _add_distributed(te: Any, *, old: bool) -> None:
    d = te.distributed
    region, phase = (
        ("_FP8_ACTIVATION_RECOMPUTE_ENABLED", "_FP8_ACTIVATION_RECOMPUTE_PHASE")
        if old
        else ("_IN_ACTIVATION_RECOMPUTE_REGION", "_ACTIVATION_RECOMPUTE_PHASE")
    )

    class activation_recompute_forward(AbstractContextManager):  # noqa: N801 - TransformerEngine's name
        _is_first_fp8_module: list[bool] = []  # noqa: RUF012 - as theirs

        def __init__(self, activation_recompute: bool = False, recompute_phase: bool = False) -> None:
            self.recompute, self.phase = activation_recompute, recompute_phase

        def __enter__(self) -> None:
            setattr(d, region, self.recompute and (not old or te.manager_state().enabled))
            setattr(d, phase, self.phase)
            if self.recompute and not self.phase:
                self._is_first_fp8_module.append(te.manager_state().is_first)
            if self.recompute and self.phase:
                te.manager_state().is_first = self._is_first_fp8_module.pop(0)

        def __exit__(self, *details: Any) -> None:
            setattr(d, region, False)
            setattr(d, phase, False)

    setattr(d, region, False)
    setattr(d, phase, False)
    d._USE_REENTRANT_ACTIVATION_RECOMPUTE = True
    d.active_states = {}
    d.get_all_rng_states = lambda: d.active_states
    d.activation_recompute_forward = activation_recompute_forward
    d.CudaRNGStatesTracker = fakes.FakeTracker
    d.checkpoint = te.checkpoint = fake_checkpoint(te)
    te.in_region = lambda: getattr(d, region) and te.manager_state().enabled
    te.phase = lambda: getattr(d, phase)
    te.flags = lambda: (getattr(d, region), getattr(d, phase))


def fake_checkpoint(te: Any) -> Any:
    """te.checkpoint, the reentrant variant, with what it does to flags and queues; without random state."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, function: Any, x: Any) -> Any:
            ctx.function, ctx.autocast = function, te.FP8GlobalStateManager.get_autocast_state()
            ctx.save_for_backward(x)
            with torch.no_grad(), te.distributed.activation_recompute_forward(True, False):
                return function(x)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            x = ctx.saved_tensors[0].detach().requires_grad_()
            enabled, _, recipe, *_ = ctx.autocast
            context = te.distributed.activation_recompute_forward(True, True)
            with torch.enable_grad(), context, te.autocast(enabled, recipe):
                y = ctx.function(x)
            torch.autograd.backward(y, grad)
            return None, x.grad

    return Function.apply


def _add_offload(te: Any, *, old: bool) -> None:
    name = "CPUOffloadEnabled" if old else "OFFLOAD_SYNCHRONIZER"
    setattr(te.offload, name, False if old else None)
    te.offload.is_cpu_offload_enabled = lambda: getattr(te.offload, name) not in (False, None)

    @contextmanager
    def offload_context() -> Any:
        before = getattr(te.offload, name)
        setattr(te.offload, name, True)
        try:
            yield
        finally:
            setattr(te.offload, name, before)

    te.offload_context = offload_context


def _add_autocast(te: Any) -> None:
    @contextmanager
    def autocast(enabled: bool = True, recipe: Any = None) -> Any:
        s = te.manager_state()
        before = te.FP8GlobalStateManager.get_autocast_state()
        s.enabled, s.recipe = enabled, recipe or fakes.Recipe()
        if getattr(s, te.depth_name) == 0:
            s.is_first = True
        setattr(s, te.depth_name, getattr(s, te.depth_name) + 1)
        try:
            yield
        finally:
            te.FP8GlobalStateManager.set_autocast_state(before)
            setattr(s, te.depth_name, getattr(s, te.depth_name) - 1)
            if enabled and getattr(s, te.depth_name) == 0 and torch.is_grad_enabled():
                te.FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=True)

    te.autocast = autocast


def _add_ops(te: Any) -> None:
    class OperationFuser:
        def __init__(self, ops: list[Any]) -> None:
            self._basic_ops = ops

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            for op in self._basic_ops:
                x = op(x)
            return x

    te.OperationFuser = te.tree[f"{_P}.ops.fuser"].OperationFuser = OperationFuser


def _add_modules(te: Any) -> None:
    class Base(torch.nn.Module):
        __module__ = f"{_P}.module.base"

        def __init__(self) -> None:
            super().__init__()
            self.fp8, self.fp8_meta, self._fp8_workspaces = False, {}, {}
            self.fsdp_wrapped, self.fsdp_group = True, "group"

        def set_activation_dtype(self, inp: torch.Tensor) -> None:
            self.activation_dtype = inp.dtype

        def prepare_forward(self, inp: torch.Tensor) -> None:
            s, meta = te.manager_state(), self.fp8_meta
            if self.fp8 and te.phase():
                if meta["recipe"].delayed():
                    scaling = meta["scaling_fwd"]
                    meta["updated_amax_history_fwd"] = scaling.amax_history.clone()
                    meta["updated_scale_fwd"] = scaling.scale.clone()
                    history, scale = s.fp8_tensors_recompute_buffer[meta[_QUEUE_KEY]].popleft()
                    scaling.amax_history.copy_(history)
                    scaling.scale.copy_(scale)
                return
            self.set_activation_dtype(inp)
            self.fp8 = s.enabled
            if not self.fp8:
                return
            meta["recipe"] = s.recipe
            if "scaling_fwd" not in meta:
                meta["scaling_fwd"], meta["scaling_bwd"] = fakes._scaling(2), fakes._scaling(1)
            if s.recipe.delayed() and "registered" not in meta:
                meta["registered"] = True
                s.global_amax_buffer.setdefault("forward", []).append(meta["scaling_fwd"])
                s.global_amax_buffer.setdefault("backward", []).append(meta["scaling_bwd"])
            if s.recipe.delayed() and te.in_region() and (self.training or not te.eval_keeps_no_copy):
                copy_for_recompute(te, meta)

        def end_forward(self) -> None:
            if self.fp8 and self.fp8_meta["recipe"].delayed() and te.phase():
                te.FP8GlobalStateManager.restore_fp8_meta_tensors(self.fp8_meta)

        def quantized(self, x: torch.Tensor, place: int, recipe: Any) -> fakes.Storage:
            if not recipe.delayed():
                return fakes.quantize(x, 100 / x.detach().abs().max())
            fakes.note_amax(self.fp8_meta["scaling_fwd"], place, x)
            return fakes.quantize(x, self.fp8_meta["scaling_fwd"].scale[place].clone())

        def linear(self, weight: Any, x: Any, is_first_microbatch: bool | None = None) -> Any:
            self.prepare_forward(x)
            try:
                workspace = None
                if self.fp8 and is_first_microbatch is not None:
                    if is_first_microbatch:
                        self._fp8_workspaces["weight"] = self.quantized(weight, 1, te.manager_state().recipe)
                    workspace = self._fp8_workspaces["weight"]
                return fakes._Linear.apply(weight, x, self, te, workspace)
            finally:
                self.end_forward()

    class Linear(Base):
        __module__ = f"{_P}.module.linear"

        def __init__(self, n: int = 8, m: int | None = None) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(m or n, n) / n**0.5)

        def forward(self, x: Any, is_first_microbatch: bool | None = None) -> Any:
            return self.linear(self.weight, x, is_first_microbatch)

    class LayerNormLinear(Linear):
        __module__ = f"{_P}.module.layernorm_linear"

        def forward(self, x: Any, is_first_microbatch: bool | None = None) -> Any:
            return self.linear(self.weight, torch.nn.functional.layer_norm(x, x.shape[-1:]), is_first_microbatch)

    class LayerNormMLP(Base):
        __module__ = f"{_P}.module.layernorm_mlp"

        def __init__(self, n: int = 8, checkpoint: bool = False) -> None:
            super().__init__()
            self.fc1, self.fc2, self.checkpoint = LayerNormLinear(n), Linear(n), checkpoint

        def forward(self, x: Any) -> Any:
            if self.checkpoint:  # the module's own recompute: only what it does to its queue
                self.prepare_forward(x)
                if self.fp8 and torch.is_grad_enabled():
                    copy_for_recompute(te, self.fp8_meta)
                self.end_forward()
            return self.fc2(torch.nn.functional.gelu(self.fc1(x)))

    class DotProductAttention(Base):
        __module__ = f"{_P}.attention.dot_product_attention"

        def __init__(self, get_tracker: Any = None, p: float = 0.3) -> None:
            super().__init__()
            self.get_tracker, self.p = get_tracker, p
            if get_tracker is not None:
                te.distributed.active_states = get_tracker().get_states()  # a copy of the dict

        def attend(self, x: Any) -> Any:
            scores = torch.softmax(x @ x.transpose(-1, -2), -1)
            if self.get_tracker is not None:
                with self.get_tracker().fork("attention") as generator:
                    scores = scores * (torch.rand(scores.shape, generator=generator) > self.p)
            return scores @ x

        def forward(self, x: Any, checkpoint_core_attention: bool = False) -> Any:
            return te.checkpoint(self.attend, x) if checkpoint_core_attention else self.attend(x)

    class MultiheadAttention(torch.nn.Module):
        __module__ = f"{_P}.attention.multi_head_attention"

        def __init__(self, n: int = 8, get_tracker: Any = None) -> None:
            super().__init__()
            self.layernorm_qkv, self.core_attention = LayerNormLinear(n), DotProductAttention(get_tracker)
            self.proj = Linear(n)

        def forward(self, x: Any, checkpoint_core_attention: bool = False) -> Any:
            return self.proj(self.core_attention(self.layernorm_qkv(x), checkpoint_core_attention))

    class TransformerLayer(torch.nn.Module):
        __module__ = f"{_P}.transformer"

        def __init__(self, n: int = 8, get_tracker: Any = None, p: float = 0.1) -> None:
            super().__init__()
            self.self_attention, self.layernorm_mlp = MultiheadAttention(n, get_tracker), LayerNormMLP(n)
            self.p = p

        def forward(self, x: Any, checkpoint_core_attention: bool = False) -> Any:
            h = self.self_attention(x, checkpoint_core_attention=checkpoint_core_attention)
            x = x + torch.nn.functional.dropout(h, self.p, self.training)
            return x + torch.nn.functional.dropout(self.layernorm_mlp(x), self.p, self.training)

    te.Base = te.tree[f"{_P}.module.base"].TransformerEngineBaseModule = Base
    for kind in (Linear, LayerNormLinear, LayerNormMLP, DotProductAttention, MultiheadAttention, TransformerLayer):
        setattr(te, kind.__name__, kind)
        setattr(te.tree[_P], kind.__name__, kind)


def copy_for_recompute(te: Any, meta: Any) -> None:
    """Put a copy of the scales aside, in the module's queue."""
    queues = te.manager_state().fp8_tensors_recompute_buffer
    if _QUEUE_KEY not in meta:
        queues.append(deque())
        meta[_QUEUE_KEY] = len(queues) - 1
    scaling = meta["scaling_fwd"]
    queues[meta[_QUEUE_KEY]].append([scaling.amax_history.clone(), scaling.scale.clone()])
