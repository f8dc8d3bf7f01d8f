"""Operators that are easy to replay wrongly: each in a region, bit-equal to plain autograd."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from oracle import CountOperators, Programs, assert_equal
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own name

import actckpt


def _by_value(info: actckpt.SavedTensorInfo) -> actckpt.Action:
    """Offload no memory that nothing wrote yet: the noise of `rrelu` is drawn after autograd saved it."""
    is_empty = "empty" in str(info.op)
    return actckpt.Action.KEEP if is_empty else list(actckpt.Action)[(len(str(info.op)) + info.index) % 3]


POLICIES: dict[str, Any] = {
    "recompute": "recompute",
    "offload": "offload",
    "list": ["aten.mm"],
    "writes": ["aten.mul_", "aten.mul", "aten.rrelu_with_noise"],
    "values": _by_value,
}
with_policies = pytest.mark.parametrize("policy", POLICIES)
programs = Programs()


@pytest.fixture(params=["always", "off"])
def _audit(request: pytest.FixtureRequest) -> None:
    actckpt.configure(audit=request.param)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized:UserWarning")
@pytest.mark.usefixtures("_audit")
@with_policies
@pytest.mark.parametrize("name", programs)
def test_programs_are_bit_equal_to_plain_autograd(name: str, policy: str) -> None:
    _assert_as_plain(programs[name], POLICIES[policy])


def _assert_as_plain(program: Callable[[Tensor, Any], Tensor], policy: Any, **options: Any) -> None:
    """Compare the result, its gradient and the random state after it."""
    found = []
    for region in (nullcontext, lambda: actckpt.region(policy)):
        torch.manual_seed(5)
        x = torch.randn(8, 4, **options).requires_grad_()
        y = program(x, region)
        found.append((y.detach(), torch.autograd.grad(y.abs().sum(), x), torch.get_rng_state()))
    assert_equal(found[1], found[0])


@torch.library.custom_op("actckpt_test::noisy", mutates_args=())
def noisy(x: Tensor) -> Tensor:
    """Draw random numbers without telling anybody."""
    return x * torch.rand(x.shape)


@torch.library.custom_op("actckpt_test::shift", mutates_args=("x",))
def shift(x: Tensor) -> None:
    """Change an argument."""
    x.add_(1)


noisy.register_autograd(
    lambda ctx, grad: grad * ctx.saved_tensors[0],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
)


@programs
def a_custom_operator_that_draws_without_a_tag(x: Tensor, region: Any) -> Tensor:
    with region():
        return (noisy(x).sin() * F.dropout(noisy(x * 2), 0.5)).exp()


@programs
def a_custom_operator_that_changes_its_argument(x: Tensor, region: Any) -> Tensor:
    with region():
        mask = x.detach() + 2
        y = x * mask.sin()
        shift(mask)
        return y.sin() * mask.cos() * x


@programs.each(in_place=[False, True])
def noise_that_autograd_saves_before_it_is_written(x: Tensor, region: Any, in_place: bool) -> Tensor:
    x = x * 2
    with region():
        x = F.rrelu(x, training=True, inplace=in_place)
        return F.rrelu(x * 3, training=True) * x


@programs.each(make=[torch.Tensor.to_sparse_coo, torch.Tensor.to_sparse_csr], inside=[True, False])
def a_sparse_argument_that_changes(x: Tensor, region: Any, make: Any, inside: bool) -> Tensor:
    matrix = make(torch.rand(8, 8))
    with region():
        y = (matrix @ torch.rand(8, 4)) * x
        if inside:
            matrix.values().mul_(2)
    if not inside:
        matrix.values().mul_(2)
    return y


@programs
def strided_nested_tensors(x: Tensor, region: Any) -> Tensor:
    with region():
        nested = torch.nested.as_nested_tensor([x[:3], x[3:]]) * 2
        padded = torch.nested.to_padded_tensor(nested, 0.0)
        return padded.sin() * padded


@programs
def jagged_tensors(x: Tensor, region: Any) -> Tensor:
    with region():
        nested = torch.nested.as_nested_tensor([x[:3], x[3:]], layout=torch.jagged)
        product = (nested * 2).sin() * nested
        return product.values().sin()


@programs.each(case=["smaller", "empty"])
def an_out_argument_that_was_resized(x: Tensor, region: Any, case: str) -> Tensor:
    with region():
        out = x.detach().abs()
        alias = out.detach()
        if case == "smaller":
            torch.add(torch.ones(3), 1, out=out)
        else:
            torch.linalg.qr(torch.rand(4, 4), mode="r", out=(out, torch.empty(0)))
        return alias * x


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "index_put": lambda t: t.index_put_((torch.tensor([0, 1, 99]),), torch.full((3,), 7.0)),
    "scatter_add": lambda t: t.scatter_add_(0, torch.tensor([0, 1, 99]), torch.full((3,), 7.0)),
    "foreach": lambda t: torch._foreach_mul_([t, t.clone()], [torch.full((4,), 3.0), torch.ones(5)]),
}


@programs.each(is_input=[False, True], write=WRITES)
def what_an_operator_wrote_before_it_raised(x: Tensor, region: Any, write: Any, is_input: bool) -> Tensor:
    given = torch.arange(4.0)
    with region():
        target = given if is_input else given * 1.5
        before = target.clone()
        y = x * target.sin()  # replayed from what the target was
        with pytest.raises((IndexError, RuntimeError)):
            write(target)
        assert not torch.equal(target, before)
        return y.sin() * (x * target).cos()


@programs
def a_parameter_that_was_last_read_through_its_data(x: Tensor, region: Any) -> Tensor:
    """What `.data` returns counts versions of its own."""
    weight = torch.nn.Parameter(torch.randn(8, 4))
    data = weight.data
    data.add_(1)
    with region():
        return (x * weight).sin() * (x * data).cos() * weight


@programs
def what_ctc_loss_leaves_unwritten(x: Tensor, region: Any) -> Tensor:
    targets = torch.randint(1, 8, (3, 5))
    soil = [torch.full((3, 12, 11), 1.0) for _ in range(8)]
    del soil
    with region():
        logits = torch.rand(12, 3, 8) * x[:, 0]
        loss = F.ctc_loss(logits.log_softmax(-1), targets, (12, 7, 9), (5, 2, 3))
    soil = [torch.full((3, 12, 11), 2.0) for _ in range(8)]
    del soil
    return loss


def test_a_bfloat16_cast_of_a_weight_is_replayed_and_not_kept() -> None:
    layer = torch.nn.Linear(256, 256, bias=False)
    x = torch.randn(4, 256, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16), actckpt.region(["aten.mm"]) as r:
        y = layer(x).sin().float()
    casts = [row for row in r.report().as_dict()["rows"] if row["operator"] == "aten._to_copy.default"]
    assert sum(row["kept_bytes"] for row in casts) == 0
    with CountOperators() as counted:
        y.sum().backward()
    assert counted.counts["aten._to_copy.default"] >= 2  # the weight's, and those of backward


@with_policies
@pytest.mark.parametrize("inside", [torch.bfloat16, None])
def test_rule_9_backward_under_another_autocast_state(policy: str, inside: torch.dtype | None) -> None:
    weight = torch.randn(8, 8)
    found = []
    for region in (nullcontext, lambda: actckpt.region(POLICIES[policy])):
        torch.manual_seed(5)
        x = torch.randn(4, 8, requires_grad=True)
        with torch.autocast("cpu", inside, enabled=inside is not None), region():
            y = ((x @ weight).tanh() @ weight).exp().sin()
        with torch.autocast("cpu", torch.bfloat16, enabled=inside is None):
            found.append((y.detach(), torch.autograd.grad(y.float().sum(), x)))
    assert_equal(found[1], found[0])


def test_rule_3_dropout_is_replayed_while_another_thread_draws() -> None:
    stop = threading.Event()
    own = torch.Generator().manual_seed(11)
    drawn: list[Tensor] = []

    def draw() -> None:
        while not stop.is_set():
            drawn.append(torch.rand(3, generator=own))

    def program(x: Tensor, region: Any) -> Tensor:
        with region():
            for _ in range(20):
                x = F.dropout(x, 0.2).sin() + torch.rand(4)
            return x

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        _assert_as_plain(program, "recompute")
    finally:
        stop.set()
        thread.join()
    again = torch.Generator().manual_seed(11)
    assert_equal(drawn[:100], [torch.rand(3, generator=again) for _ in drawn[:100]])


@pytest.mark.parametrize("was_read", [False, True])
@pytest.mark.parametrize("policy", ["recompute", "keep", "offload", []])
def test_a_tensor_that_is_put_onto_the_memory_of_a_parameter_changes_nothing_there(policy: Any, was_read: bool) -> None:
    """As recurrent layers do on GPUs with the memory that all their weights share."""
    weight = torch.nn.Parameter(torch.randn(32))

    def program(x: Tensor, region: Any) -> Tensor:
        with region():
            y = x.view(32) * weight if was_read else x.view(32).cos()
            for _ in range(2):
                flat = torch.empty(0, device=x.device).set_(weight.detach().untyped_storage())
                y = (y * weight + flat * x.view(32)).sin()
            return y

    for _ in range(2):
        _assert_as_plain(program, policy)
        with torch.no_grad():
            weight += 1


def test_the_bytes_behind_the_last_whole_element_are_offloaded_too() -> None:
    def program(x: Tensor, region: Any) -> Tensor:
        numbers = torch.rand(2**20 + 1).half()
        with region():
            halves = numbers.clone()
            words = halves[:-1].view(torch.float32) * x[0, 0]
            return words + (halves[-1:] * x[1, :1].half()).float()

    _assert_as_plain(program, actckpt.policies.PerOp({"aten.clone": "offload"}, default="offload"))


def test_statistics_that_synchronised_batch_norm_writes_unseen_are_written_once() -> None:
    # All are parameters to the region: none costs anything to replay from.
    mean, variance = torch.zeros(4, requires_grad=True), torch.ones(4, requires_grad=True)
    x = torch.rand(2, 4, 3, requires_grad=True)
    weight = torch.rand(4, requires_grad=True)
    with actckpt.region():
        with torch.no_grad():
            found, _ = torch.batch_norm_update_stats(x, mean, variance, 0.1)
        y = found * weight
    before = mean.detach().clone(), variance.detach().clone()
    (gradient,) = torch.autograd.grad(y.sum(), weight)
    assert_equal((mean.detach(), variance.detach()), before)
    assert_equal(gradient, found)
