"""Arguments that are nearly right: taken where their meaning is plain, else refused where they were written."""

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy

import actckpt


def _model() -> torch.nn.Sequential:
    return torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU()) for _ in range(2)))


def test_per_op_refuses_a_list_and_says_where_it_goes() -> None:
    operators: Any = ["aten.mm"]
    with pytest.raises(ValueError, match=r"^PerOp: .* is a list\. Pass a dict .*; .* itself as policy\.$"):
        actckpt.policies.PerOp(operators)


@pytest.mark.parametrize("wrong", ["x", 0, []])
def test_report_explains_tensors_only(wrong: Any) -> None:
    with actckpt.region() as region:
        torch.ones(2, requires_grad=True).exp()
    with pytest.raises(TypeError, match="takes a tensor of the region"):
        region.report(explain=wrong)


@pytest.mark.parametrize(
    ("options", "message"), [({"min_bytes": "x"}, "min_bytes"), ({"to": "dsk"}, "to='dsk' is not a store")]
)
def test_apply_checks_options_of_offload_before_it_patches(options: dict[str, Any], message: str) -> None:
    model = _model()
    with pytest.raises(ValueError, match=message):
        actckpt.apply(model, policy="offload", **options)
    assert actckpt.apply(model) == ("0", "1")  # nothing was patched


@pytest.mark.parametrize("member", list(CheckpointPolicy), ids=lambda member: member.name)
def test_a_torch_policy_value_is_answered_with_the_action_it_stands_for(member: CheckpointPolicy) -> None:
    name = {"SAVE": "KEEP", "RECOMPUTE": "RECOMPUTE", "CPU_OFFLOAD": "OFFLOAD"}[member.name.partition("_")[2]]
    name = "PREFER_OFFLOAD" if member.name == "PREFER_CPU_OFFLOAD" else name
    message = rf"^policy=CheckpointPolicy\.{member.name} .* Pass actckpt\.Action\.{name}, or a function"
    with pytest.raises(ValueError, match=message):
        actckpt.checkpoint(torch.exp, torch.ones(2, requires_grad=True), policy=member)


@pytest.mark.parametrize("answer", ["keep", "recompute"])
def test_a_policy_function_may_return_the_name_of_an_action(answer: Any) -> None:
    x = torch.rand(8, requires_grad=True)
    (expected,) = torch.autograd.grad(x.exp().sin().sum(), x)
    with actckpt.region(lambda info: answer) as region:
        y = x.exp().sin()
    (found,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(found, expected)
    assert (region.report().recomputed_bytes > 0) == (answer == "recompute")


def test_a_policy_function_may_not_return_another_text() -> None:
    wrong: Any = "kep"
    with (
        pytest.raises(ValueError, match=r"The policy returned 'kep', a str, .* or one of 'keep', "),
        actckpt.region(lambda info: wrong),
    ):
        torch.ones(2, requires_grad=True).exp()


def test_a_misspelt_keyword_of_the_decorator_is_answered_with_the_right_one() -> None:
    with pytest.raises(ValueError, match=r"keyword 'use_reentrent'.* Did you mean use_reentrant\?$"):
        actckpt.checkpoint(use_reentrent=False)


def test_the_decorator_checks_its_keywords_before_it_has_a_function() -> None:
    with pytest.raises(ValueError, match="use_reentrant=True is not supported"):
        actckpt.checkpoint(use_reentrant=True)
    with pytest.raises(ValueError, match="determinism_check"):
        actckpt.checkpoint(determinism_check="sometimes")
