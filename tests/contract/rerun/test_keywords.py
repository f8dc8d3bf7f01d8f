"""Keywords, contexts and names: the face of torch.utils.checkpoint."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from oracle import (
    BOTH,
    Checkpoint,
    CountOperators,
    Log,
    assert_as_plain,
    assert_equal,
    leaf,
    mlp,
    ours,
    plain,
    theirs,
)

import actckpt

KEYWORDS_IN_KWARGS = {"preserve_rng_state"}  # torch takes this one out of **kwargs


def test_every_keyword_of_the_installed_torch_is_there_with_its_default() -> None:
    installed = inspect.signature(torch_checkpoint.checkpoint).parameters
    own = inspect.signature(actckpt.checkpoint).parameters
    for name, parameter in installed.items():
        if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
            assert any(p.kind is parameter.kind for p in own.values())
            continue
        assert own[name].kind is parameter.kind, f"torch {torch.__version__} has {name}: add it to checkpoint"
        if name != "use_reentrant" and parameter.default is not parameter.empty:
            assert own[name].default == parameter.default
    assert set(own) >= KEYWORDS_IN_KWARGS
    assert own["use_reentrant"].default is False


def test_checkpoint_sequential_takes_torchs_arguments_in_order() -> None:
    installed = inspect.signature(torch_checkpoint.checkpoint_sequential).parameters
    assert list(inspect.signature(actckpt.checkpoint_sequential).parameters) == list(installed)


def test_all_public_names_of_torchs_module_are_there() -> None:
    missing = [name for name in torch_checkpoint.__all__ if not hasattr(actckpt, name)]
    assert not missing, f"torch {torch.__version__} exports {missing}: re-export them"
    assert not [name for name in actckpt.__all__ if not hasattr(actckpt, name)]
    assert actckpt.CheckpointError is torch_checkpoint.CheckpointError


def test_mismatch_errors_are_torchs_and_ours() -> None:
    for error in (
        actckpt.errors.RerunMismatchError,
        actckpt.errors.InputChangedError,
        actckpt.errors.SavedTensorChangedError,
    ):
        assert issubclass(error, actckpt.errors.ActckptError)
        assert issubclass(error, torch_checkpoint.CheckpointError)
        assert issubclass(error, RuntimeError)
    assert issubclass(actckpt.errors.BlocksError, (actckpt.errors.ActckptError, ValueError))


def _operators_in_backward(method: Checkpoint, *, used: int = -1, **keywords: Any) -> CountOperators:
    def function(x: torch.Tensor) -> list[torch.Tensor]:
        results = []
        for _ in range(4):
            x = x.sin().exp() + 1
            results.append(x)
        return results

    loss = method(function, leaf(3), **keywords)[used].sum()
    with CountOperators() as operators:
        loss.backward()
    return operators


@pytest.mark.parametrize("early_stop", [True, False])
def test_backward_runs_no_more_operators_than_with_torch(early_stop: bool) -> None:
    expected = _operators_in_backward(theirs, early_stop=early_stop)
    assert _operators_in_backward(ours, early_stop=early_stop).counts == expected.counts


def test_early_stop_leaves_out_what_follows_the_last_saved_tensor() -> None:
    stopped, ended = (_operators_in_backward(ours, early_stop=stop).counts for stop in (True, False))
    assert ended - stopped == {"aten.add.Tensor": 1}
    assert not stopped - ended


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_early_stop_leaves_a_scripted_function_in_which_torch_fails() -> None:
    @torch.jit.script
    def scripted(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() * x).exp()

    def run(method: Checkpoint) -> Any:
        x = torch.linspace(0, 1, 6, requires_grad=True)
        method(lambda x: scripted(x * 2), x).sum().backward()
        return x.grad

    expected = run(plain)
    for _ in range(4):  # TorchScript watches the first calls and optimizes the later ones
        assert_equal(run(ours), expected)
    with pytest.raises(RuntimeError, match="operation failed in the TorchScript interpreter"):
        run(theirs)  # a failure here: torch has mended it, or words it otherwise


def test_early_stop_ends_at_the_last_tensor_that_autograd_still_holds() -> None:
    expected = _operators_in_backward(theirs, used=0)
    actual = _operators_in_backward(ours, used=0)
    assert not actual.counts - expected.counts
    assert actual.counts["aten.sin.default"] == 1
    assert expected.counts["aten.sin.default"] == 4


@pytest.mark.parametrize("keyword", [True, False])
@pytest.mark.parametrize("context", [True, False])
def test_torchs_early_stop_context_wins_over_the_keyword(keyword: bool, context: bool) -> None:
    with torch_checkpoint.set_checkpoint_early_stop(context):
        actual = _operators_in_backward(ours, early_stop=keyword)
    assert actual.counts == _operators_in_backward(ours, early_stop=context).counts


def _nested(method: Checkpoint, depth: int, x: torch.Tensor) -> torch.Tensor:
    x = x.sin().exp()
    if depth:
        x = method(_nested, method, depth - 1, x) + method(_nested, method, depth - 1, x.cos())
    return x.sin().exp()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_nested_regions_run_no_more_operators_than_with_torch(depth: int) -> None:
    counts = {}
    for name, method in BOTH.items():
        x = leaf(3)
        loss = method(_nested, method, depth, x).sum()
        with CountOperators() as operators:
            loss.backward()
        counts[name] = operators.counts
    assert not counts["actckpt"] - counts["torch"]


class Difference:
    """Runs one way in the forward and another way from then on."""

    def __init__(self, forward: Any, rerun: Any) -> None:
        self.ways = [forward, rerun]
        self.runs = Log()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.runs.append(1)
        way = self.ways[len(self.runs) > 1]
        return way(x)


DIFFERENCES = {
    "shape": (lambda x: x.sin().exp(), lambda x: x[1:].sin().exp()),
    "dtype": (lambda x: x.sin().exp(), lambda x: x.double().sin().exp()),
    "fewer": (lambda x: x.sin().exp().sin(), lambda x: x.sin()),
    "more": (lambda x: x.sin(), lambda x: x.sin().exp().sin()),
}


@pytest.mark.parametrize("kind", DIFFERENCES)
@pytest.mark.parametrize("method", BOTH)
def test_a_rerun_that_saves_other_tensors_raises_and_ours_names_the_function_and_both_sides(
    method: str, kind: str
) -> None:
    x = leaf(3)
    y = BOTH[method](Difference(*DIFFERENCES[kind]), x, early_stop=False)
    with pytest.raises(actckpt.CheckpointError) as caught:
        y.sum().backward()
    assert x.grad is None
    if method == "actckpt":
        text = str(caught.value)
        assert isinstance(caught.value, actckpt.errors.RerunMismatchError)
        assert "Difference" in text and "orward: " in text and "erun: " in text and "debug=True" in text
        assert kind == "fewer" or "test_keywords.py" in text


def test_determinism_check_none_accepts_another_dtype() -> None:
    x = leaf(3)
    y = ours(Difference(*DIFFERENCES["dtype"]), x, determinism_check="none")
    y.sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize(("context", "keyword"), [(None, True), (True, False), (False, True)])
def test_debug_lists_the_operators_of_both_runs_and_torchs_context_wins(context: bool | None, keyword: bool) -> None:
    with contextlib.nullcontext() if context is None else torch_checkpoint.set_checkpoint_debug_enabled(context):
        y = ours(Difference(*DIFFERENCES["fewer"]), leaf(3), debug=keyword)
    with pytest.raises(actckpt.errors.RerunMismatchError) as caught:
        y.sum().backward()
    text, is_listed = str(caught.value), context is not False
    assert text.count("aten.sin.default") == (3 if is_listed else 0)
    assert text.count("aten.exp.default") == (1 if is_listed else 0)
    assert not is_listed or "test_keywords.py" in text


class Contexts:
    """A context_fn that logs its calls and the entries of its contexts."""

    def __init__(self, *, suppress: bool = False) -> None:
        self.log: list[str] = []
        self.suppress = suppress

    def __call__(self) -> tuple[Any, Any]:
        self.log.append("called")
        return Reusable(self, "forward"), Reusable(self, "rerun")


class Reusable(contextlib.AbstractContextManager[None]):
    def __init__(self, owner: Contexts, name: str) -> None:
        self.owner, self.name = owner, name

    def __enter__(self) -> None:
        self.owner.log.append(f"enter {self.name}")

    def __exit__(self, *_: object) -> bool:
        self.owner.log.append(f"exit {self.name}")
        return self.owner.suppress


@pytest.mark.parametrize("method", BOTH.values(), ids=BOTH)
def test_context_fn_is_called_once_and_its_contexts_surround_the_runs(method: Checkpoint) -> None:
    contexts = Contexts()
    y = method(lambda x: x.sin().exp(), leaf(3), context_fn=contexts)
    assert contexts.log == ["called", "enter forward", "exit forward"]
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert contexts.log[3:] == ["enter rerun", "exit rerun"] * 2


def _fails(x: torch.Tensor) -> torch.Tensor:
    raise KeyError("gone")


def test_contexts_that_suppress_an_exception_raise() -> None:  # torch's leaves its hooks active, up to 2.12
    with pytest.raises(RuntimeError, match="suppressed"):
        ours(_fails, leaf(3), context_fn=Contexts(suppress=True))
    y = ours(Difference(lambda x: x.sin().exp(), _fails), leaf(3), context_fn=Contexts(suppress=True))
    with pytest.raises(actckpt.errors.RerunMismatchError):
        y.sum().backward()


@pytest.fixture
def group() -> Iterator[Any]:
    kind = getattr(torch_checkpoint, "GraphExecGroup", None)
    if kind is None:
        pytest.skip(f"torch {torch.__version__} has no GraphExecGroup")
    yield kind()


@pytest.mark.parametrize("method", BOTH.values(), ids=BOTH)
def test_one_rerun_serves_all_backwards_of_a_graph_exec_group(method: Checkpoint, group: Any) -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return (x.sin() * w.sin()).exp()

    calls = Log()
    x, w = leaf(3), leaf(3)
    middle = x * 2
    y = method(function, middle, w).sum()
    with group:
        (grad_w, grad_middle) = torch.autograd.grad(y, (w, middle), retain_graph=True)
        (grad_x,) = torch.autograd.grad(middle, x, grad_middle)
    assert len(calls) == 2
    assert_equal([grad_x, grad_w], list(torch.autograd.grad(((x * 2).sin() * w.sin()).exp().sum(), (x, w))))


def test_checkpoint_sequential_is_bit_equal_to_torchs() -> None:
    for segments in (1, 2, 3, 5):

        def program(method: Checkpoint, segments: int = segments) -> Any:
            model, x = mlp(depth=3, dropout=0.2), leaf(3, 8)
            if method is ours:
                y = actckpt.checkpoint_sequential(model, segments, x, use_reentrant=False)
            elif method is theirs:
                y = torch_checkpoint.checkpoint_sequential(model, segments, x, use_reentrant=False)
            else:
                y = model(x)
            y.sum().backward()
            return y, x.grad, [p.grad for p in model.parameters()]

        assert_as_plain(program)


def test_without_a_function_it_is_a_decorator_as_in_torch_2_15() -> None:
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(3, 3)

        @actckpt.checkpoint(use_reentrant=False, early_stop=False)
        def forward(self, x: torch.Tensor, *, early_stop: bool) -> torch.Tensor:
            """Doubles."""
            assert early_stop  # the function's own keyword
            return self.linear(x.sin()).exp() * 2

    assert Block.forward.__name__ == "forward" and Block.forward.__doc__ == "Doubles."
    block, x = Block(), leaf(4, 3)
    loss = block(x, early_stop=True).sum()
    with CountOperators() as operators:
        loss.backward()
    assert operators.counts["aten.sin.default"] == 1  # ran again
    expected = torch.autograd.grad((block.linear(x.sin()).exp() * 2).sum(), x)
    assert_equal((x.grad,), expected)
