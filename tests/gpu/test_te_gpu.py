"""TransformerEngine itself: gradients and FP8 state of ours equal plain training bit for bit.

Skipped without a GPU or without TransformerEngine. Writes what it found, te.checkpoint's differences included, to the
file that ACTCKPT_TE_RESULTS names.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import assert_equal

import actckpt

# Before TransformerEngine is loaded: deterministic attention, and no fusion that te.checkpoint would switch off.
os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
os.environ.setdefault("NVTE_BIAS_GELU_NVFUSION", "0")

pytestmark = pytest.mark.filterwarnings("default")  # TransformerEngine's own warnings are not ours to judge

_DEVICE, _HIDDEN, _TOKENS, _STEPS = "cuda", 256, 128, 3
_KINDS = ("bf16", "delayed", "current", "block")
_TRACKERS = ("no tracker", "graph-safe", "bytes")
_results: dict[str, Any] = {"te_checkpoint": {}, "passed": []}


@pytest.fixture(scope="module")
def te() -> Iterator[Any]:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    found = pytest.importorskip("transformer_engine.pytorch", reason="no TransformerEngine", exc_type=ImportError)
    import transformer_engine

    _results["versions"] = {"torch": torch.__version__, "transformer_engine": str(transformer_engine.__version__)}
    _results["gpu"] = torch.cuda.get_device_name()
    yield found
    path = os.environ.get("ACTCKPT_TE_RESULTS")
    if path:
        Path(path).write_text(json.dumps(_results, indent=1) + "\n")


@pytest.fixture(autouse=True)
def _note_what_passed(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if getattr(request.node, "has_passed", False):
        _results["passed"].append(request.node.name)


def _recipe(te: Any, kind: str) -> Any:
    from transformer_engine.common import recipe

    if kind == "bf16":
        return None
    if not te.is_fp8_available():
        pytest.skip("no FP8 on this GPU")
    if kind == "block" and not te.is_fp8_block_scaling_available():
        pytest.skip("no block scaling on this GPU")
    return {
        "delayed": lambda: recipe.DelayedScaling(amax_history_len=4, amax_compute_algo="max"),
        "current": recipe.Float8CurrentScaling,
        "block": recipe.Float8BlockScaling,
    }[kind]()


@pytest.fixture
def get_tracker(te: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return what returns a tracker with two named states; None for "no tracker"."""
    kind = getattr(request, "param", "no tracker")
    if kind == "no tracker":
        yield None
        return
    from transformer_engine.pytorch import distributed

    if kind == "bytes":
        monkeypatch.setattr(distributed, "graph_safe_rng_available", lambda: False)
    trackers: list[Any] = []

    def get() -> Any:
        return trackers[-1]

    def renew() -> None:
        trackers.append(distributed.CudaRNGStatesTracker())
        trackers[-1].add("model-parallel-rng", 11)
        trackers[-1].add("data", 12)

    get.renew = renew  # type: ignore[attr-defined]
    renew()
    if kind == "bytes":  # TransformerEngine holds stale copies of them
        actckpt.rng.register_tracker(get)
    yield get
    if kind == "bytes":
        actckpt.rng.unregister_tracker(get)


def _layers(te: Any, get_tracker: Any, depth: int = 2) -> torch.nn.ModuleList:
    if get_tracker is not None:
        get_tracker.renew()
    torch.manual_seed(3)
    torch.cuda.manual_seed(3)
    options: dict[str, Any] = {"params_dtype": torch.bfloat16, "get_rng_state_tracker": get_tracker}
    return torch.nn.ModuleList(te.TransformerLayer(_HIDDEN, 4 * _HIDDEN, 4, **options) for _ in range(depth))


def _fp8_state(model: torch.nn.Module) -> list[Any]:
    found = []
    for module in model.modules():
        for key in ("scaling_fwd", "scaling_bwd"):
            scaling = getattr(module, "fp8_meta", {}).get(key)
            if hasattr(scaling, "amax_history"):
                found += [scaling.amax_history.clone(), scaling.scale.clone()]
    return found


Method = Callable[[Any, torch.Tensor], torch.Tensor]


def _train(te: Any, recipe: Any, get_tracker: Any, method: Method, prepare: Any = None) -> list[Any]:
    """Train for some steps; return outputs, gradients and states."""
    model = _layers(te, get_tracker)
    if prepare is not None:
        prepare(model)
    torch.cuda.manual_seed(5)
    found: list[Any] = []
    for step in range(_STEPS):
        generator = torch.Generator(_DEVICE).manual_seed(step)
        x = torch.randn(_TOKENS, 2, _HIDDEN, device=_DEVICE, dtype=torch.bfloat16, generator=generator)
        x.requires_grad_()
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            h = x * 1.0
            for layer in model:
                h = method(layer, h)
        h.float().square().mean().backward()
        found += [h.detach(), x.grad, *(p.grad.clone() for p in model.parameters()), *_fp8_state(model)]
        found.append(torch.cuda.get_rng_state())
        if get_tracker is not None:
            states = get_tracker().get_states().values()
            found += [s.get_state() if isinstance(s, torch.Generator) else s.clone() for s in states]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad
                parameter.grad = None
    return found


def _plain(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return layer(x)  # type: ignore[no-any-return]


def _nested(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return actckpt.checkpoint(lambda x: actckpt.checkpoint(layer, x), x)  # type: ignore[no-any-return]


def _offload(layer: Any, x: torch.Tensor) -> torch.Tensor:
    with actckpt.offload(min_bytes=0):
        return layer(x)  # type: ignore[no-any-return]


METHODS: dict[str, tuple[Method, Any]] = {
    "checkpoint": (actckpt.checkpoint, None),
    "te.checkpoint": (actckpt.te.checkpoint, None),
    "nested": (_nested, None),
    "core attention": (lambda layer, x: actckpt.checkpoint(layer, x, checkpoint_core_attention=True), None),
    "offload": (_offload, None),
    "checkpoint, offloaded inputs": (lambda layer, x: actckpt.checkpoint(layer, x, offload_inputs=True), None),
    "policy": (
        _plain,
        lambda m: actckpt.te.wrap(m, {"self_attention": "offload", "layernorm_mlp": "recompute"}, min_bytes=0),
    ),
    "retain_graph": (_plain, lambda m: actckpt.te.wrap(m, retain_graph=True)),
}


def _reference(te: Any, kind: str, get_tracker: Any, name: str) -> list[Any]:
    plain: Method = _plain
    if name == "core attention":
        plain = lambda layer, x: layer(x, checkpoint_core_attention=True)  # noqa: E731
    expected = _train(te, _recipe(te, kind), get_tracker, plain)
    assert_equal(_train(te, _recipe(te, kind), get_tracker, plain), expected)  # what follows compares bits
    return expected


@pytest.mark.parametrize("get_tracker", _TRACKERS, indirect=True)
@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("name", METHODS)
def test_training_is_bit_equal_to_plain_training(te: Any, name: str, kind: str, get_tracker: Any) -> None:
    if name == "core attention" and get_tracker is not None:
        pytest.skip("te.checkpoint, which the module itself calls, may restore nothing: there is no right reference")
    method, prepare = METHODS[name]
    expected = _reference(te, kind, get_tracker, name)
    assert_equal(_train(te, _recipe(te, kind), get_tracker, method, prepare), expected)


@pytest.mark.parametrize("get_tracker", _TRACKERS, indirect=True)
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("kind", _KINDS)
def test_where_te_checkpoint_differs_is_recorded(te: Any, kind: str, use_reentrant: bool, get_tracker: Any) -> None:
    """Not a claim about actckpt: settles whether te.checkpoint with a tracker and dropout computes other gradients."""
    expected = _reference(te, kind, get_tracker, "checkpoint")

    def theirs(layer: Any, x: torch.Tensor) -> torch.Tensor:
        options = {"use_reentrant": use_reentrant, "get_rng_state_tracker": get_tracker}
        return te.checkpoint(layer, x, **options)  # type: ignore[no-any-return]

    name = f"{kind}, {'reentrant' if use_reentrant else 'hooks'}, {'tracker' if get_tracker else 'no tracker'}"
    if get_tracker is not None:
        states = get_tracker().get_states().values()
        name += " of generators" if isinstance(next(iter(states)), torch.Generator) else " of bytes"
    try:
        found = _train(te, _recipe(te, kind), get_tracker, theirs)
    except Exception as error:  # a finding about te.checkpoint, written down
        _results["te_checkpoint"][name] = f"{type(error).__name__}: {error}"[:300]
        return
    different = [
        index for index, (a, b) in enumerate(zip(found, expected, strict=True)) if not torch.equal(a.float(), b.float())
    ]
    _results["te_checkpoint"][name] = {"different": len(different), "of": len(expected), "first": different[:1]}


@pytest.mark.parametrize("kind", _KINDS)
def test_every_backward_gives_the_same_gradients(te: Any, kind: str) -> None:
    """Under delayed scaling the scales of backward move on; they are put back in between."""

    def run(times: int) -> list[Any]:
        model = _layers(te, None)
        if times > 1:
            actckpt.te.wrap(model, retain_graph=True)
        torch.cuda.manual_seed(5)
        x = torch.randn(_TOKENS, 2, _HIDDEN, device=_DEVICE, dtype=torch.bfloat16, requires_grad=True)
        recipe = _recipe(te, kind)
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            h = x * 1.0
            for layer in model:
                h = layer(h)
        loss, found = h.float().square().mean(), []
        for index in range(times):
            before = _fp8_state(model)
            found.append(torch.autograd.grad(loss, [x, *model.parameters()], retain_graph=index < times - 1))
            _put_back(model, before)
        return found

    (expected,) = run(1)
    for grads in run(3):
        assert_equal(grads, expected)


def _put_back(model: torch.nn.Module, before: list[Any]) -> None:
    values = iter(before)
    for module in model.modules():
        for key in ("scaling_fwd", "scaling_bwd"):
            scaling = getattr(module, "fp8_meta", {}).get(key)
            if hasattr(scaling, "amax_history"):
                scaling.amax_history.copy_(next(values))
                scaling.scale.copy_(next(values))


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("name", ["Linear", "LayerNormLinear", "LayerNormMLP", "MultiheadAttention"])
@pytest.mark.parametrize("how", ["recompute", "offload", "retain_graph"])
def test_each_module_alone(te: Any, name: str, kind: str, how: str) -> None:
    def run(wrapped: bool) -> list[Any]:
        torch.cuda.manual_seed(3)
        sizes = {"MultiheadAttention": (_HIDDEN, 4), "LayerNormMLP": (_HIDDEN, 4 * _HIDDEN)}
        module = getattr(te, name)(*sizes.get(name, (_HIDDEN, _HIDDEN)), params_dtype=torch.bfloat16)
        if wrapped:
            retain_graph = how == "retain_graph"
            actckpt.te.wrap(module, "recompute" if retain_graph else how, retain_graph=retain_graph, min_bytes=0)
        x = torch.randn(_TOKENS, 2, _HIDDEN, device=_DEVICE, dtype=torch.bfloat16, requires_grad=True)
        recipe = _recipe(te, kind)
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            y = module(x * 1.0)
        y.float().square().mean().backward()
        return [y.detach(), x.grad, *(p.grad for p in module.parameters()), *_fp8_state(module)]

    assert_equal(run(True), run(False))


def test_weights_and_their_casts_are_never_moved(te: Any) -> None:
    layer = te.Linear(_HIDDEN, 4 * _HIDDEN, params_dtype=torch.bfloat16)
    recipe = _recipe(te, "delayed")
    for first in (None, True, False):
        actckpt.reset_stats()
        x = torch.randn(_TOKENS, _HIDDEN, device=_DEVICE, dtype=torch.bfloat16, requires_grad=True)
        with te.autocast(enabled=True, recipe=recipe), actckpt.offload(min_bytes=0):
            y = layer(x, is_first_microbatch=first)
        y.float().sum().backward()
        # The quantized input with its transpose and scales; a cast of the weight alone has four times as much.
        assert 0 < actckpt.stats().offloaded_bytes < 4 * _HIDDEN * _HIDDEN


def test_doctor_knows_the_version(te: Any) -> None:
    from actckpt.doctor import examine

    finding = dict(examine(measure=False))["transformer engine"]
    _results["doctor"] = finding
    assert "regions carry FP8 state" in finding
