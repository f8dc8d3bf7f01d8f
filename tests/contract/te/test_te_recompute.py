"""TransformerEngine's recompute phase and FP8 state: checklist items 6 to 13, on fakes (te_fakes.py)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import Log, assert_equal, leaf
from te_fakes import VERSIONS, FakeQuantizer, Recipe, installed
from te_oracle import RECIPES, assert_trains_as_plain, fp8_state, make_model, plain, queued, train

import actckpt
from actckpt.errors import RerunMismatchError, TransformerEngineError

pytestmark = pytest.mark.parametrize("te", VERSIONS, indirect=True)


def _nested(layer: Any, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    def outer(x: torch.Tensor) -> torch.Tensor:
        return actckpt.checkpoint(layer, x * 1.5, **kwargs)

    return actckpt.checkpoint(outer, x)


def _scaled(layer: Any, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    return layer(x * 1.5, **kwargs)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("method", [actckpt.checkpoint, actckpt.te.checkpoint], ids=["checkpoint", "te.checkpoint"])
def test_gradients_and_fp8_state_are_those_without_checkpointing(te: Any, recipe: str, method: Any) -> None:
    assert_trains_as_plain(te.version, method, RECIPES[recipe])


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("core", [False, True], ids=["", "checkpoint_core_attention"])
def test_item_6_a_nested_region_leaves_the_outer_one_marked(te: Any, recipe: str, core: bool) -> None:
    options: dict[str, Any] = {"tracker": None, "checkpoint_core_attention": core}
    assert_trains_as_plain(te.version, _nested, RECIPES[recipe], plainly=_scaled, **options)


def test_item_6_the_flags_are_those_of_te_checkpoint_and_put_back(te: Any) -> None:
    seen = Log()

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append(te.flags())
        actckpt.checkpoint(torch.sin, x)
        te.checkpoint(torch.sin, x)
        seen.append(te.flags())
        return x.sin().exp()

    y = actckpt.checkpoint(function, leaf(3), early_stop=False)
    assert te.flags() == (False, False)
    y.sum().backward()
    assert te.flags() == (False, False)
    assert seen == [(True, False)] * 2 + [(True, True)] * 2


def test_item_6_te_checkpoint_alone_is_left_as_it_is(te: Any) -> None:
    actckpt.checkpoint(torch.sin, leaf(3))  # registers
    te.distributed._USE_REENTRANT_ACTIVATION_RECOMPUTE = "untouched"
    with te.distributed.activation_recompute_forward(True, False):
        with te.distributed.activation_recompute_forward(True, False):
            pass
        assert te.flags() == (False, False), "outside of our regions TransformerEngine does as it does"
    assert te.distributed._USE_REENTRANT_ACTIVATION_RECOMPUTE == "untouched"


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_item_6_te_checkpoint_inside_and_outside_of_a_region(te: Any, recipe: str) -> None:
    def theirs(layer: Any, x: torch.Tensor) -> torch.Tensor:
        return now.checkpoint(lambda x: layer(x * 1.5), x)

    def inside(layer: Any, x: torch.Tensor) -> torch.Tensor:
        return actckpt.checkpoint(lambda x: now.checkpoint(layer, x * 1.5), x)

    def outside(layer: Any, x: torch.Tensor) -> torch.Tensor:
        return now.checkpoint(lambda x: actckpt.checkpoint(layer, x * 1.5), x)

    def no_dropout(model: Any) -> None:  # the fake te.checkpoint carries no random state
        for layer in model:
            layer.p = 0.0

    for method in (inside, outside):
        with installed(te.version) as now:
            expected = train(now, theirs, RECIPES[recipe], tracker=None, prepare=no_dropout)
        now = te
        assert_equal(train(now, method, RECIPES[recipe], tracker=None, prepare=no_dropout), expected)
        assert queued(te) == 0


def test_item_7_the_first_module_flag_is_held_per_region(te: Any) -> None:
    """TransformerEngine's first-in-first-out list has one entry per forward: a second recompute finds none."""
    firsts = Log()

    def function(x: torch.Tensor) -> torch.Tensor:
        firsts.append(te.manager_state().is_first)
        te.manager_state().is_first = False
        return x.sin().exp()

    with te.autocast(True, Recipe()):
        ys = [actckpt.checkpoint(function, leaf(3), early_stop=False) for _ in range(3)]
    for index in (2, 0, 1, 0):
        ys[index].sum().backward(retain_graph=True)
    assert firsts == [True, False, False, *(False, True, False, True)]
    assert te.distributed.activation_recompute_forward._is_first_fp8_module == []


@pytest.mark.parametrize("kind", ["delayed", "current"])
def test_item_8_the_autocast_state_is_restored_without_a_new_autocast(te: Any, kind: str) -> None:
    recipe, seen = Recipe(kind), Log()

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append(te.FP8GlobalStateManager.get_autocast_state())
        return x.sin().exp()

    with te.autocast(True, recipe):
        y = actckpt.checkpoint(function, leaf(3))
    outside = te.FP8GlobalStateManager.get_autocast_state()
    updates = list(te.updates)
    with te.autocast(True, Recipe("another")):
        inside = te.FP8GlobalStateManager.get_autocast_state()
        y.sum().backward()
        assert te.FP8GlobalStateManager.get_autocast_state() == inside
        assert te.updates == updates
    assert te.FP8GlobalStateManager.get_autocast_state() == outside
    assert seen[0] == seen[1] and seen[0][2] is recipe


def test_item_8_an_autocast_inside_the_function_updates_scales_once(te: Any) -> None:
    def method(layer: Any, x: torch.Tensor) -> torch.Tensor:
        def function(x: torch.Tensor) -> torch.Tensor:
            with te_now.autocast(True, RECIPES["delayed"]):
                return layer(x)

        return actckpt.checkpoint(function, x) if ours else function(x)

    ours = False
    with installed(te.version) as te_now:
        expected = train(te_now, method, None)
    ours, te_now = True, te
    assert_equal(train(te, method, None), expected)


def test_item_9_each_rerun_uses_the_scales_of_its_forward_in_any_order(te: Any) -> None:
    """Micro-batches whose backwards run last first, one of them dropped, with an update of scales in between."""

    def run(te: Any, method: Any, order: list[int]) -> list[Any]:
        layer = make_model(te, depth=1)[0][0]
        layer.p, losses, xs = 0.0, [], [leaf(2, 4, 8) for _ in range(4)]
        for x in xs:
            with te.autocast(True, RECIPES["delayed"]):
                losses.append(method(layer, x).square().sum())
        losses[1] = None
        for index in order:
            losses[index].backward()
        return [p.grad for p in layer.parameters()] + [x.grad for x in xs if x.grad is not None]

    for order in ([0, 2, 3], [3, 2, 0], [2, 0, 3]):
        torch.manual_seed(1)
        with installed(te.version) as other:
            expected = run(other, plain, order)
        torch.manual_seed(1)
        assert_equal(run(te, actckpt.checkpoint, order), expected)
        assert queued(te) == 0, "TransformerEngine's queues hold what nobody will take"


def test_item_9_a_rerun_that_has_copies_to_take_runs_to_the_end(te: Any) -> None:
    layer, ends = te.Linear(), Log()

    def function(x: torch.Tensor) -> torch.Tensor:
        y = layer(x)
        ends.append(1)
        return y

    for recipe, runs in (("delayed", 2), ("current", 1)):
        ends.clear()
        with te.autocast(True, RECIPES[recipe]):
            y = actckpt.checkpoint(function, leaf(4, 8))
        y.sum().backward()
        assert len(ends) == runs


def test_item_9_without_grad_mode_nothing_is_put_aside(te: Any) -> None:
    layer = te.Linear()
    with te.autocast(True, RECIPES["delayed"]), torch.no_grad():
        actckpt.checkpoint(layer, leaf(4, 8))
        actckpt.te.checkpoint(layer, leaf(4, 8))
    with te.autocast(True, RECIPES["delayed"]), pytest.raises(KeyError, match="in the forward"):
        actckpt.checkpoint(lambda x: (layer(x), {}["in the forward"]), leaf(4, 8))
    assert queued(te) == 0 and te.flags() == (False, False)


@pytest.mark.parametrize("times", [2, 3])
def test_item_9_a_region_is_rerun_several_times(te: Any, times: int) -> None:
    """One rerun per backward; the function reads saved tensors of plain operators only, which can be read again."""
    layer = te.Linear()

    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scaled = layer(x)
        return (x * scaled).exp()

    x = leaf(4, 8)
    with te.autocast(True, RECIPES["delayed"]):
        y = actckpt.checkpoint(function, x).sum()
    with te.autocast(True, RECIPES["delayed"]):
        layer(x)  # the scales move on
    grads = [torch.autograd.grad(y, x, retain_graph=True)[0] for _ in range(times)]
    assert all(torch.equal(grad, grads[0]) for grad in grads)
    assert queued(te) == 0


def test_item_9_scales_that_a_rerun_does_not_find_raise(te: Any) -> None:
    mlp = te.LayerNormMLP(8, checkpoint=True)  # puts a copy aside itself, in the same queue
    with te.autocast(True, RECIPES["delayed"]):
        y = actckpt.checkpoint(mlp, leaf(4, 8))
    with pytest.raises(TransformerEngineError, match=r"LayerNormMLP\(checkpoint=True\)"):
        y.sum().backward()
    assert te.flags() == (False, False)


def test_item_9_a_module_that_ran_in_another_precision_since_is_rerun_as_it_ran(te: Any) -> None:
    def run(method: Any) -> list[Any]:
        torch.manual_seed(0)
        layer, x = te.Linear(), leaf(4, 8)
        with te.autocast(True, RECIPES["delayed"]):
            y = method(layer, x)
        z = method(layer, x)  # in between, in another precision
        with te.autocast(True, RECIPES["delayed"]):
            layer(leaf(4, 8))
        for output in (z, y):
            output.sum().backward()
        return [y.detach(), z.detach(), x.grad, layer.weight.grad, *fp8_state(layer), layer.fp8, queued(te)]

    assert_equal(run(actckpt.checkpoint), run(plain))


def test_item_9_eval_mode_works_or_says_why_not(te: Any) -> None:
    layer = te.Linear().eval()
    with te.autocast(True, RECIPES["delayed"]):
        y = actckpt.checkpoint(layer, leaf(4, 8))
    if not te.eval_keeps_no_copy:
        y.sum().backward()
        return
    with pytest.raises(TransformerEngineError, match="eval mode"):
        y.sum().backward()


def test_item_10_backward_scales_are_updated_as_often_as_without_checkpointing(te: Any) -> None:
    with installed(te.version) as other:
        train(other, plain, RECIPES["delayed"])
    train(te, actckpt.checkpoint, RECIPES["delayed"])
    assert te.updates == other.updates == ["forward", "backward"] * 3


def test_item_11_both_runs_get_the_same_microbatch_and_no_step_may_come_between(te: Any) -> None:
    def run(te: Any, method: Any) -> list[Any]:
        layer = te.Linear()
        xs = [leaf(4, 8) for _ in range(2)]
        for first, x in zip((True, False), xs, strict=True):
            with te.autocast(True, RECIPES["delayed"]):
                y = method(layer, x, is_first_microbatch=first)
            y.square().sum().backward()
        return [layer.weight.grad, *(x.grad for x in xs)]

    torch.manual_seed(1)
    with installed(te.version) as other:
        expected = run(other, plain)
    torch.manual_seed(1)
    assert_equal(run(te, actckpt.te.checkpoint), expected)
    layer = te.Linear()
    y = actckpt.te.checkpoint(layer, leaf(4, 8), is_first_microbatch=True)
    with torch.no_grad():
        layer.weight.add_(1)
    with pytest.raises(RerunMismatchError, match="weight"):
        y.sum().backward()


def test_a_rerun_does_not_calibrate(te: Any) -> None:
    seen: list[float] = []

    class Quantizer(FakeQuantizer):
        def calibrate(self, tensor: torch.Tensor) -> None:
            seen.append(tensor.item())

    def function(x: torch.Tensor) -> torch.Tensor:
        Quantizer().calibrate(x)
        return x.sin().exp()

    for value in (1.0, 2.0):
        actckpt.checkpoint(function, torch.tensor(value, requires_grad=True)).backward()
    assert seen == [1.0, 2.0]


def test_item_12_the_reentrant_flag_is_not_touched(te: Any) -> None:
    actckpt.te.checkpoint(te.Linear(), leaf(4, 8)).sum().backward()
    assert te.distributed._USE_REENTRANT_ACTIVATION_RECOMPUTE is True


def test_item_13_torch_autocast_and_grad_mode_are_restored(te: Any) -> None:
    layer, seen = te.Linear(), Log()

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_grad_enabled()))
        return (layer(x) @ x.T).exp()

    with torch.autocast("cpu", torch.bfloat16):
        y = actckpt.te.checkpoint(function, leaf(8, 8))
    with torch.autocast("cpu", torch.float16):
        y.sum().backward()
        assert torch.get_autocast_dtype("cpu") is torch.float16
    assert seen == [(True, torch.bfloat16, True)] * 2


@pytest.mark.parametrize("number", ["first", "later"])
def test_te_ops_with_delayed_scaling_raise(te: Any, number: str) -> None:
    op = torch.nn.Linear(8, 8)
    op.num_quantizers = lambda mode: 2
    fuser = te.OperationFuser([op])
    if number == "later":
        fuser(leaf(4, 8))
    with te.autocast(True, RECIPES["delayed"]), pytest.raises(TransformerEngineError, match=r"te\.ops with delayed"):
        actckpt.checkpoint(lambda x: fuser(x), leaf(4, 8))
    with te.autocast(True, RECIPES["current"]):
        actckpt.checkpoint(lambda x: fuser(x), leaf(4, 8)).sum().backward()
    with te.autocast(True, RECIPES["delayed"]):
        fuser(leaf(4, 8)).sum().backward()  # outside of regions it is none of our business
