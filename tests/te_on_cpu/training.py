"""The training runs that tests compare: the same steps plainly and under a method, every bit of results and state.

A run's results are a dict. Its keys begin with what a value is: "output", "gradient", "scales" (with casts and flags of
modules), "process" (what TransformerEngine holds for the process) or "random".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

import actckpt
from te_on_cpu import device

HIDDEN, _FFN, _HEADS, _TOKENS, _BATCH = 32, 64, 2, 8, 2
_STEPS = 4

#: (layer, x, **options) -> output
Method = Callable[..., Tensor]
Results = dict[str, Any]

RECIPES = ("none", "delayed", "current")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TRACKERS = ("none", "generators", "bytes")
#: Around the whole forward, also or only in the layer's region, or off in there.
PLACES = ("around", "around and inside", "off inside")
#: In which order the micro-batches of a step run: a forward's number is positive, its backward's negative.
SCHEDULES = {
    "in turn": (1, -1, 2, -2),
    "first in, first out": (1, 2, -1, -2),
    "reverse": (1, 2, -2, -1),
    "one without backward": (1, 3, 2, -2, -1),
}


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a run is made of, besides the method."""

    recipe: str = "delayed"
    dtype: str = "float32"
    tracker: str = "none"
    schedule: str = "in turn"
    kind: str = "TransformerLayer"
    dropout: float = 0.1
    #: Whether weights are cast in the first micro-batch of a step only.
    caches_weights: bool = False
    #: Whether parameters are quantized themselves (`quantized_model_init`).
    is_quantized: bool = False
    #: Of each layer, instead of two of one kind; and of each step, instead of four of one schedule.
    kinds: tuple[str, ...] = ()
    schedules: tuple[tuple[int, ...], ...] = ()
    #: Where the autocast of each layer stands, one of `PLACES`; whether none is around the whole forward.
    places: tuple[str, ...] = ()
    only_inside: bool = False


def make_recipe(kind: str) -> Any:
    """Return a recipe, under which scales move in every step where they are delayed; None for "none"."""
    from transformer_engine.common import recipe

    if kind == "none":
        return None
    if kind == "current":
        return recipe.Float8CurrentScaling()
    return recipe.DelayedScaling(amax_history_len=3, amax_compute_algo="max")


def quantized_parameters(te: Any, recipe: Any) -> Any:
    """Return a context for making modules whose parameters are quantized."""
    return getattr(te, "quantized_model_init", te.fp8_model_init)(enabled=True, recipe=recipe)


def plain(layer: Any, x: Tensor, **options: Any) -> Tensor:
    """Run a layer with nothing around it."""
    result: Tensor = layer(x, **options)
    return result


@contextmanager
def tracker_of(kind: str) -> Iterator[Callable[[], Any] | None]:
    """Yield what returns a tracker with two named states, of generators or of bytes; None for "none".

    TransformerEngine itself knows only copies of states that are bytes, so such a tracker is registered, but for
    "unknown bytes".
    """
    from transformer_engine.pytorch import distributed

    if kind == "none":
        yield None
        return
    handles_are_safe = distributed.graph_safe_rng_available
    if kind != "generators":
        distributed.graph_safe_rng_available = lambda: False
    tracker = distributed.CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 11)
    tracker.add("data", 12)

    def get() -> Any:
        return tracker

    if kind == "bytes":
        actckpt.rng.register_tracker(get)
    try:
        yield get
    finally:
        if kind == "bytes":
            actckpt.rng.unregister_tracker(get)
        distributed.graph_safe_rng_available = handles_are_safe


def make_layer(te: Any, kind: str, *, dtype: torch.dtype = torch.float32, dropout: float = 0.1, **options: Any) -> Any:
    """Return one module; its parameters are drawn from torch's generator."""
    options["params_dtype"] = dtype
    if kind == "TransformerLayer":
        options |= {"hidden_dropout": dropout, "attention_dropout": dropout}
        return te.TransformerLayer(HIDDEN, _FFN, _HEADS, **options)
    if kind == "MultiheadAttention":
        return te.MultiheadAttention(HIDDEN, _HEADS, attention_dropout=dropout, **options)
    options.pop("get_rng_state_tracker", None)
    return getattr(te, kind)(HIDDEN, _FFN if kind == "LayerNormMLP" else HIDDEN, **options)


def make_input(dtype: torch.dtype, number: int) -> Tensor:
    """Return an input of which each has another size, so that scales move."""
    generator = torch.Generator().manual_seed(100 + number)
    x = torch.randn(_TOKENS, _BATCH, HIDDEN, generator=generator) * (1 + 0.37 * (number % 5))
    return x.to(dtype).requires_grad_()


def scales(model: torch.nn.Module) -> Results:
    """Return what modules hold besides parameters: scales, histories, casts of weights, flags."""
    found: Results = {}
    for name, module in model.named_modules():
        meta = getattr(module, "fp8_meta", {})
        for key in ("scaling_fwd", "scaling_bwd"):
            if hasattr(meta.get(key), "amax_history"):
                found[f"scales: {name} {key} history"] = meta[key].amax_history.clone()
                found[f"scales: {name} {key} scale"] = meta[key].scale.clone()
        noted = [getattr(module, flag, None) for flag in ("fp8", "fp8_calibration", "fp8_initialized")]
        found[f"scales: {name} flags"] = [*noted, meta.get("fp8_checkpoint")]
        for key, cast in getattr(module, "_fp8_workspaces", {}).items():
            parts = (cast._data, cast._transpose, cast._scale_inv)
            found[f"scales: {name} cast of {key}"] = [part.clone() for part in parts if part is not None]
    return found


def process_state() -> Results:
    """Return what TransformerEngine holds for the process: flags, queues, the autocast and its depth; random state."""
    from transformer_engine.pytorch import distributed
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager as Manager

    state = getattr(Manager, "quantization_state", Manager)
    enabled, calibrating, _, group, is_first, capturing = Manager.get_autocast_state()
    flags = [value for name, value in sorted(vars(distributed).items()) if "ACTIVATION_RECOMPUTE" in name]
    return {
        "process: recompute flags": flags,
        "process: first modules": list(distributed.activation_recompute_forward._is_first_fp8_module),
        "process: queued": sum(len(queue) for queue in state.fp8_tensors_recompute_buffer),
        "process: autocast": [enabled, calibrating, group, is_first, capturing],
        "process: depth": getattr(state, "autocast_depth", getattr(state, "AUTOCAST_DEPTH", None)),
        "random: device": device.get_rng_state(),
        "random: host": device.host_get_rng_state(),
    }


def reset() -> None:
    """Put TransformerEngine's globals back, as they are after import."""
    from transformer_engine.debug.pytorch.debug_state import TEDebugState
    from transformer_engine.pytorch import distributed
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    FP8GlobalStateManager.reset()
    TEDebugState.layer_count = 1  # names of modules
    distributed.activation_recompute_forward._is_first_fp8_module.clear()
    distributed.set_all_rng_states({})
    for name in vars(distributed):
        if "_ACTIVATION_RECOMPUTE" in name:
            setattr(distributed, name, "REENTRANT" in name)


class _Run:
    """One training run."""

    def __init__(self, te: Any, setting: Setting, get_tracker: Any, methods: Sequence[Method]) -> None:
        self._te, self._setting, self._get_tracker, self._methods = te, setting, get_tracker, methods
        self._dtype = DTYPES[setting.dtype]
        torch.manual_seed(3)
        options = {"dtype": self._dtype, "dropout": setting.dropout, "get_rng_state_tracker": get_tracker}
        self._recipe, kinds = make_recipe(setting.recipe), setting.kinds or [setting.kind] * 2
        if setting.is_quantized and "TransformerLayer" in kinds:
            options["fuse_qkv_params"] = True
        with quantized_parameters(te, self._recipe) if setting.is_quantized else nullcontext():
            self.model = torch.nn.ModuleList(make_layer(te, kind, **options) for kind in kinds)
        self._open: dict[int, tuple[Tensor, Tensor]] = {}
        self.results: Results = {}

    def train(self) -> Results:
        torch.manual_seed(5)
        for step, schedule in enumerate(self._setting.schedules or [SCHEDULES[self._setting.schedule]] * _STEPS):
            for place, move in enumerate(schedule):
                after = f", step {step}, move {place}"
                if move > 0:
                    self.results[f"output{after}"] = self._forward(step, move)
                else:
                    self.results[f"gradient of x{after}"] = self._backward(-move)
                state = {**scales(self.model), **process_state(), **self._tracked()}
                self.results |= {f"{name}{after}": value for name, value in state.items()}
            self._open.clear()
            self._update(f", step {step}")
        return self.results

    def _autocast(self, enabled: bool = True) -> Any:
        return self._te.autocast(enabled and self._recipe is not None, recipe=self._recipe)

    def _forward(self, step: int, number: int) -> Tensor:
        x = make_input(self._dtype, 10 * step + number)
        options = {"is_first_microbatch": number == 1} if self._setting.caches_weights else {}
        with nullcontext() if self._setting.only_inside else self._autocast():
            h = x * 1.0
            places = self._setting.places or ["around"] * len(self.model)
            for layer, method, place in zip(self.model, self._methods, places, strict=True):
                h = method(self._placed(layer, place), h, **options)
        self._open[number] = (x, h)
        return h.detach().clone()

    def _placed(self, layer: Any, place: str) -> Any:
        if place == "around" and not self._setting.only_inside:
            return layer

        def function(x: Tensor, **options: Any) -> Any:
            with self._autocast(place != "off inside"):
                return layer(x, **options)

        return function

    def _backward(self, number: int) -> Tensor | None:
        x, h = self._open.pop(number)
        h.float().square().mean().backward()
        return x.grad

    def _update(self, after: str) -> None:
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                grad = parameter.grad
                assert grad is not None
                self.results[f"gradient of {name}{after}"] = grad.clone()
                parameter.add_(grad, alpha=-0.05)
                parameter.grad = None

    def _tracked(self) -> Results:
        states = self._get_tracker().get_states() if self._get_tracker is not None else {}
        return {
            f"random: {name}": s.get_state() if isinstance(s, torch.Generator) else s.clone()
            for name, s in states.items()
        }


def train(
    te: Any,
    setting: Setting,
    method: Method | Sequence[Method] | None = None,
    *,
    prepare: Callable[[Any], Any] | None = None,
    method_of: Callable[[Any], Method] | None = None,
) -> Results:
    """Train a new model for 4 steps of 2 micro-batches; return all results.

    Args:
        method: how each layer is called, or one for each; None: plainly.
        prepare: called with the model first.
        method_of: returns the method, given what returns the tracker.
    """
    reset()
    with tracker_of(setting.tracker) as get_tracker:
        chosen = method_of(get_tracker) if method_of is not None else method or plain
        methods = chosen if isinstance(chosen, Sequence) else [chosen] * len(setting.kinds or (1, 2))
        run = _Run(te, setting, get_tracker, methods)
        if prepare is not None:
            prepare(run.model)
        return run.train()


def differing(found: Results, expected: Results) -> list[str]:
    """Return the names of results that are not bit-equal."""
    assert found.keys() == expected.keys()
    return [name for name in expected if not _equal(found[name], expected[name])]


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return torch.equal(left, right)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(_equal, left, right))
    return bool(left == right)
