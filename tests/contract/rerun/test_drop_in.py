"""Programs that run with torch's checkpoint run with ours: a rerun gets the objects that the forward got."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from oracle import Checkpoint, Programs, assert_as_plain, assert_equal
from torch.autograd.graph import save_on_cpu

import actckpt

programs, functions, programs_that_torch_gets_wrong = Programs(), Programs(), Programs()


@pytest.mark.parametrize("name", programs)
def test_programs_give_what_they_give_plainly_and_with_torch(name: str) -> None:
    assert_as_plain(programs[name])


@pytest.mark.parametrize("name", programs_that_torch_gets_wrong)
def test_programs_that_torch_gets_wrong_give_what_they_give_plainly(name: str) -> None:
    assert_as_plain(programs_that_torch_gets_wrong[name], with_torch=False)


@pytest.mark.parametrize("name", functions)
def test_a_rerun_gets_the_objects_that_the_forward_got(name: str) -> None:
    def gradient(checkpoint: Checkpoint) -> torch.Tensor | None:
        x = _x()
        functions[name](checkpoint, x).sum().backward()
        return x.grad

    assert_as_plain(gradient)


def _x() -> torch.Tensor:
    return torch.tensor([0.1, 0.2, 0.3], requires_grad=True)


@programs
def optimizer_steps_in_backward_through_functions_that_index_the_model(checkpoint: Checkpoint) -> list[torch.Tensor]:
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


class Gan(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)

    def generate(self, x: torch.Tensor) -> torch.Tensor:
        return self.generator(x).tanh()


@programs
def a_step_of_the_discriminator_before_backward_of_the_generator(
    checkpoint: Checkpoint,
) -> torch.Tensor | None:
    gan, x = Gan(), _x()
    y = checkpoint(gan.generate, x)
    with torch.no_grad():
        gan.discriminator.weight.add_(1)
    y.sum().backward()
    return x.grad


@programs
def a_module_that_changes_its_own_parameters_in_forward(checkpoint: Checkpoint) -> torch.Tensor | None:
    block = torch.nn.Sequential(torch.nn.Embedding(5, 3, max_norm=0.5), torch.nn.Linear(3, 3), torch.nn.Tanh())
    first, second = (checkpoint(block, torch.tensor([1, 2])) for _ in range(2))
    (first + second).sum().backward()
    return block[1].weight.grad


class Tagged(namedtuple("Tagged", "a b")):
    pass


@programs
def a_named_tuple_with_attributes_of_its_own_inside_save_on_cpu(checkpoint: Checkpoint) -> torch.Tensor | None:
    x = _x()
    pair = Tagged(x, x * 2)
    pair.scale = 4.0
    with save_on_cpu():
        y = checkpoint(lambda p: (p.a * p.b * getattr(p, "scale", 1.0)).sin(), pair)
    y.sum().backward()
    return x.grad


@programs
def a_parameter_that_was_made_in_inference_mode(checkpoint: Checkpoint) -> torch.Tensor | None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh())
    with torch.inference_mode():
        model[1].register_parameter("frozen", torch.nn.Parameter(torch.randn(3, 3), requires_grad=False))
    checkpoint(model, _x()).sum().backward()
    return model[0].weight.grad


@functions
def a_list_that_is_passed_twice(checkpoint: Checkpoint, x: torch.Tensor) -> torch.Tensor:
    def region(x: torch.Tensor, a: list[torch.Tensor], b: list[torch.Tensor]) -> torch.Tensor:
        a[0] = x.sin()
        return (b[0] * x).exp()

    both = [torch.ones(3, requires_grad=True)]
    return checkpoint(region, x, both, both)


@functions
def a_dict_that_an_object_holds_too(checkpoint: Checkpoint, x: torch.Tensor) -> torch.Tensor:
    state = {"h": torch.ones(3, requires_grad=True)}
    holder = SimpleNamespace(state=state)

    def region(x: torch.Tensor) -> torch.Tensor:
        holder.state["h"] = x.sin()
        return (state["h"] * x).exp()

    return checkpoint(region, x)


class Two(tuple[Any, ...]):
    def __new__(cls, a: Any, b: Any) -> Two:
        return super().__new__(cls, (a, b))


class Repeated(list[Any]):
    def __init__(self, count: int, value: Any) -> None:
        super().__init__([value] * count)


@functions.each(make={"tuple": lambda x: Two(x, x), "list": lambda x: Repeated(2, x)})
def subclasses_with_a_constructor_of_their_own(checkpoint: Checkpoint, x: torch.Tensor, make: Any) -> torch.Tensor:
    return checkpoint(lambda pair: (pair[0] * pair[1]).exp(), make(x))


@functions.each(place=["positional", "keyword"])
def tensors_keep_their_identity(checkpoint: Checkpoint, x: torch.Tensor, place: str) -> torch.Tensor:
    t = x * 2
    scale_of = {id(t): 3.0}
    function = lambda t: (t * scale_of.get(id(t), 1.0)).exp()  # noqa: E731
    return checkpoint(function, t=t) if place == "keyword" else checkpoint(function, t)


@functions
def a_variable_that_a_called_sibling_function_assigns(checkpoint: Checkpoint, x: torch.Tensor) -> torch.Tensor:
    hidden = torch.ones(3, requires_grad=True)

    def step(x: torch.Tensor) -> None:
        nonlocal hidden
        hidden = x.sin()

    def region(x: torch.Tensor) -> torch.Tensor:
        step(x)
        return (hidden * x).exp()

    return torch.cat([checkpoint(region, x * scale) for scale in (1.0, 5.0)])


HIDDEN = torch.ones(3)


@functions
def a_global_tensor_that_the_function_itself_binds_anew(checkpoint: Checkpoint, x: torch.Tensor) -> torch.Tensor:
    def region(x: torch.Tensor) -> torch.Tensor:
        global HIDDEN
        HIDDEN = x.sin()
        return (HIDDEN * x).exp()

    return checkpoint(region, x)


@functions
def a_gradient_taken_inside_towards_a_tensor_upstream(checkpoint: Checkpoint, x: torch.Tensor) -> torch.Tensor:
    def region(y: torch.Tensor) -> torch.Tensor:
        (grad,) = torch.autograd.grad(y.exp().sum(), x, create_graph=True, retain_graph=True)
        return (grad * y).exp()

    return checkpoint(region, x * 2)


@programs_that_torch_gets_wrong
def a_recursive_closure_defined_in_a_loop(checkpoint: Checkpoint) -> torch.Tensor | None:
    x = hidden = _x()
    for scale in (2.0, 5.0):

        def recurse(n: int, t: torch.Tensor) -> torch.Tensor:
            return t if n == 0 else recurse(n - 1, (t * scale).sin())  # noqa: B023 - the point

        hidden = checkpoint(recurse, 3, hidden)
    hidden.sum().backward()
    return x.grad


@programs_that_torch_gets_wrong
def a_variable_that_the_forward_reads_and_then_binds_anew(checkpoint: Checkpoint) -> torch.Tensor | None:
    state = torch.tensor([1.0, 2.0, 3.0])
    x = _x()

    def step(x: torch.Tensor) -> torch.Tensor:
        nonlocal state
        state = state * x
        return state.sin().sin()

    checkpoint(step, x).sum().backward()
    return x.grad


def _attend(h: torch.Tensor, *, score: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    return score(h).sin()


@programs_that_torch_gets_wrong.each(is_nested=[False, True])
def a_loop_variable_in_a_function_among_the_arguments(checkpoint: Checkpoint, is_nested: bool) -> torch.Tensor | None:
    x = _x()

    def layers(h: torch.Tensor) -> torch.Tensor:
        for k in (2.0, 5.0):
            h = checkpoint(_attend, h, score=lambda s: (s * k).sin())  # noqa: B023 - the point
        return h

    y = checkpoint(layers, x) if is_nested else layers(x)
    y.sum().backward()
    return x.grad


LAYER: Any = None


def test_a_loop_variable_of_the_module_level_raises() -> None:
    global LAYER
    h = torch.ones(2, 3, requires_grad=True)
    for LAYER in [torch.nn.Linear(3, 3) for _ in range(3)]:
        h = actckpt.checkpoint(lambda h: LAYER(h).tanh(), h)  # noqa: B023 - the point
    with pytest.raises(actckpt.errors.RerunMismatchError, match="does not repeat its forward"):
        h.sum().backward()


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
