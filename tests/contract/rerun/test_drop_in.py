"""Programs that run with torch's checkpoint run with ours, and both give what plain autograd gives."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import Checkpoint, assert_equal, ours, plain, theirs
from torch.autograd.graph import save_on_cpu

import actckpt

Program = Callable[[Checkpoint], Any]


def _assert_all_agree(program: Program, *, with_torch: bool = True) -> None:
    expected = program(plain)
    if with_torch:
        assert_equal(program(theirs), expected)
    assert_equal(program(ours), expected)


def _x() -> torch.Tensor:
    return torch.tensor([0.1, 0.2, 0.3], requires_grad=True)


def test_optimizer_steps_in_backward_through_functions_that_index_the_model() -> None:
    def program(checkpoint: Checkpoint) -> list[torch.Tensor]:
        torch.manual_seed(0)
        layers = torch.nn.ModuleList(torch.nn.Linear(3, 3) for _ in range(3))

        def update(parameter: torch.Tensor) -> None:
            with torch.no_grad():
                parameter.add_(parameter.grad, alpha=-0.1)

        for parameter in layers.parameters():
            parameter.register_post_accumulate_grad_hook(update)
        hidden = x = _x()
        for i in range(3):
            hidden = checkpoint(lambda h, i=i: layers[i](h).tanh(), hidden)
        hidden.sum().backward()
        return [x.grad, *(p.detach().clone() for p in layers.parameters())]

    _assert_all_agree(program)


def test_a_step_of_the_discriminator_between_forward_and_backward_of_the_generator() -> None:
    class Gan(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generator, self.discriminator = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)

        def generate(self, x: torch.Tensor) -> torch.Tensor:
            return self.generator(x).tanh()

    def program(checkpoint: Checkpoint) -> torch.Tensor | None:
        torch.manual_seed(0)
        gan, x = Gan(), _x()
        y = checkpoint(gan.generate, x)
        with torch.no_grad():
            gan.discriminator.weight.add_(1)
        y.sum().backward()
        return x.grad

    _assert_all_agree(program)


def test_a_module_that_changes_its_own_parameters_in_forward() -> None:
    def program(checkpoint: Checkpoint) -> torch.Tensor | None:
        torch.manual_seed(0)
        block = torch.nn.Sequential(torch.nn.Embedding(5, 3, max_norm=0.5), torch.nn.Linear(3, 3), torch.nn.Tanh())
        first, second = (checkpoint(block, torch.tensor([1, 2])) for _ in range(2))
        (first + second).sum().backward()
        return block[1].weight.grad

    _assert_all_agree(program)


def test_a_momentum_encoder_that_the_forward_updates() -> None:
    class Momentum(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.online = torch.nn.Linear(3, 3)
            self.average = torch.nn.Linear(3, 3).requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.average.weight.lerp_(self.online.weight, 0.5)
            return self.online(x).tanh()

    def program(checkpoint: Checkpoint) -> torch.Tensor | None:
        torch.manual_seed(0)
        model = Momentum()
        (checkpoint(model, _x()) + checkpoint(model, _x())).sum().backward()
        return model.online.weight.grad

    _assert_all_agree(program)


def test_a_parameter_that_was_made_in_inference_mode() -> None:
    with torch.inference_mode():
        frozen = torch.nn.Parameter(torch.randn(3, 3), requires_grad=False)

    class Teacher(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen, self.trained = frozen, torch.nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.trained(x).tanh()

    def program(checkpoint: Checkpoint) -> torch.Tensor | None:
        torch.manual_seed(0)
        model = Teacher()
        checkpoint(model, _x()).sum().backward()
        return model.trained.weight.grad

    _assert_all_agree(program)


def test_a_recursive_closure_defined_in_a_loop() -> None:
    def program(checkpoint: Checkpoint) -> torch.Tensor | None:
        x = hidden = _x()
        for scale in (2.0, 5.0):

            def recurse(n: int, t: torch.Tensor) -> torch.Tensor:
                return t if n == 0 else recurse(n - 1, (t * scale).sin())  # noqa: B023 - the point

            hidden = checkpoint(recurse, 3, hidden)
        hidden.sum().backward()
        return x.grad

    _assert_all_agree(program, with_torch=False)


@pytest.mark.parametrize("is_nested", [False, True])
def test_a_loop_variable_in_a_function_among_the_arguments(is_nested: bool) -> None:
    def attend(h: torch.Tensor, *, score: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return score(h).sin()

    def program(checkpoint: Checkpoint) -> torch.Tensor | None:
        x = _x()

        def layers(h: torch.Tensor) -> torch.Tensor:
            for k in (2.0, 5.0):
                h = checkpoint(attend, h, score=lambda s: (s * k).sin())  # noqa: B023 - the point
            return h

        y = checkpoint(layers, x) if is_nested else layers(x)
        y.sum().backward()
        return x.grad

    _assert_all_agree(program, with_torch=False)


def test_a_variable_that_the_forward_reads_and_then_binds_anew() -> None:
    def program(checkpoint: Checkpoint) -> torch.Tensor | None:
        state = torch.tensor([1.0, 2.0, 3.0])
        x = _x()

        def step(x: torch.Tensor) -> torch.Tensor:
            nonlocal state
            state = state * x
            return state.sin().sin()

        checkpoint(step, x).sum().backward()
        return x.grad

    _assert_all_agree(program, with_torch=False)


def test_a_list_that_an_object_holds_too_changed_and_put_back_in_a_nested_region() -> None:
    class Holder:
        items: list[torch.Tensor]

    def program(checkpoint: Checkpoint) -> torch.Tensor | None:
        x, holder = _x(), Holder()
        items = [torch.ones(3, requires_grad=True)]
        holder.items = items

        def inner(x: torch.Tensor, items: list[torch.Tensor]) -> torch.Tensor:
            before, items[0] = items[0], x * 2
            y = (holder.items[0] * x).sin().sin()
            items[0] = before
            return y

        checkpoint(lambda x: checkpoint(inner, x, items).sin(), x).sum().backward()
        return x.grad

    _assert_all_agree(program)


class Tagged(namedtuple("Tagged", "a b")):
    pass


def test_a_named_tuple_with_attributes_of_its_own_inside_save_on_cpu() -> None:
    def program(checkpoint: Checkpoint) -> torch.Tensor | None:
        x = _x()
        pair = Tagged(x, x * 2)
        pair.scale = 4.0
        with save_on_cpu():
            y = checkpoint(lambda p: (p.a * p.b * getattr(p, "scale", 1.0)).sin(), pair)
        y.sum().backward()
        return x.grad

    _assert_all_agree(program)


def test_keywords_of_an_applied_block_that_are_named_like_options_reach_it() -> None:
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(3, 3)

        def forward(self, x: torch.Tensor, debug: bool = False, early_stop: int = 3, policy: str = "") -> torch.Tensor:
            return self.linear(x) * (2 if debug else 1) * early_stop * len(policy)

    model = torch.nn.ModuleList([Block(), Block()])
    expected = model[0](_x(), debug=True, early_stop=5, policy="ab")
    actckpt.apply(model, blocks=Block)
    assert_equal(model[0](_x(), debug=True, early_stop=5, policy="ab").detach(), expected.detach())


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("how", ["module", "forward", "dropout", "other dtype", "function", "nested"])
def test_an_input_changed_in_place_raises_the_same_error_on_every_path(how: str, requires_grad: bool) -> None:
    block = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout(0.5 if how == "dropout" else 0.0))
    x = torch.ones(2, 3, requires_grad=requires_grad) * 1
    if how == "function":
        y = actckpt.checkpoint(lambda x: block(x), x)
    elif how == "nested":
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            y = actckpt.checkpoint(block, x)
    else:
        y = actckpt.checkpoint(block.forward if how == "forward" else block, x)
    with torch.no_grad():
        x.add_(1)
    if how == "other dtype":
        torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(actckpt.errors.InputChangedError, match=r"(?s)Argument 0.*Version \d in forward, \d now"):
            y.sum().backward()
    finally:
        torch.set_default_dtype(torch.float32)
