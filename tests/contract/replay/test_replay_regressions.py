"""Programs whose gradients, or whose errors, were once wrong under replay."""

from __future__ import annotations

import gc
import time
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from oracle import assert_equal
from torch.nn import functional as F  # noqa: N812 - torch's own name

import actckpt

KEPT = [["aten.mul"], ["aten.mul_"], "recompute"]


#: Let nothing that is wrong be put right by an audit.
pytestmark = pytest.mark.usefixtures("no_audit")


def _gradients(program: Any, region: Any) -> Any:
    torch.manual_seed(3)
    x = torch.randn(8, 4, requires_grad=True)
    return torch.autograd.grad(program(x, region).sum(), x)


def _assert_as_plain(program: Any, policy: Any = "recompute") -> None:
    assert_equal(_gradients(program, lambda: actckpt.region(policy)), _gradients(program, nullcontext))


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("policy", ["recompute", "offload", ["aten.rrelu_with_noise"]])
def test_noise_that_autograd_saves_before_an_operator_writes_it_comes_back_written(in_place: bool, policy: Any) -> None:
    def program(x: torch.Tensor, region: Any) -> torch.Tensor:
        x = x * 2
        with region():
            x = F.rrelu(x, training=True, inplace=in_place)
            return F.rrelu(x * 3, training=True) * x

    _assert_as_plain(program, policy)


@pytest.mark.parametrize("training", [False, True])
def test_statistics_that_batch_norm_writes_unseen_can_be_saved(training: bool) -> None:
    def program(x: torch.Tensor, region: Any) -> torch.Tensor:
        mean, variance = torch.zeros(4), torch.ones(4)
        with region():
            y = F.batch_norm(x.sin(), mean, variance, training=True)
            y = F.batch_norm(y.cos(), mean, variance, training=training)
            return y.sin() * variance * mean

    _assert_as_plain(program)
    _assert_as_plain(program, lambda info: actckpt.Action.RECOMPUTE)


def test_a_value_asks_the_policy_of_the_region_where_it_was_born() -> None:
    asked = []

    def policy(info: Any) -> Any:
        asked.append(info.op)
        return actckpt.Action.KEEP

    def program(x: torch.Tensor, region: Any) -> torch.Tensor:
        with region():
            y = x.exp()
            with actckpt.region("recompute") if region is not nullcontext else nullcontext():
                return y.sin().tanh()

    _assert_as_plain(program, policy)
    # The parameter was born nowhere. Its operator's result was born outside, and saved inside too.
    assert asked == [torch.ops.aten.exp.default]


def test_audits_leave_64_bit_tensors_as_they_are() -> None:
    actckpt.configure(audit="always")

    def program(x: torch.Tensor, region: Any) -> torch.Tensor:
        with region():
            y = x.double().sin()
            values, _ = (y * y).sort(dim=0)
            return values.exp()

    _assert_as_plain(program)


def test_in_place_foreach_operators_count_versions_up_under_the_recorder() -> None:
    x = torch.ones(4, requires_grad=True)
    before = x * 2
    used = before.sin()  # saved outside of the region, so that autograd itself must notice
    with actckpt.region("recompute"), torch.no_grad():
        torch._foreach_mul_([before], 2.0)
    assert before._version == 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        used.sum().backward()


@pytest.mark.parametrize("policy", KEPT)
def test_a_kept_value_changed_through_data_is_watched_through_the_saved_tensor(policy: Any) -> None:
    x = torch.randn(4, requires_grad=True)
    with actckpt.region(policy):
        base = x * 1.5
        base.data.mul_(1.25)
        y = base.cos()
    expected = -base.detach().clone().sin() * 1.5
    with torch.no_grad():
        base.zero_()
    if policy == "recompute":
        assert_equal(torch.autograd.grad(y.sum(), x)[0], expected)
    else:
        with pytest.raises(actckpt.errors.SavedTensorChangedError, match="expected version"):
            torch.autograd.grad(y.sum(), x)


@pytest.mark.parametrize("runs_checkpoint", [False, True])
@pytest.mark.parametrize("name", ["tanh", "sin"])
def test_a_kept_product_is_watched_through_what_matmul_gave_on(name: str, runs_checkpoint: bool) -> None:
    weight = torch.randn(4, 4, requires_grad=True)

    def function() -> tuple[torch.Tensor, torch.Tensor]:
        product = torch.randn(2, 2, 4) @ weight
        return product, getattr(product, name)()

    if runs_checkpoint:
        product, y = actckpt.checkpoint(function, policy=["aten.mm"])
    else:
        with actckpt.region(["aten.mm"]):
            product, y = function()
    torch.autograd.grad(y.sum(), weight, retain_graph=True)
    with torch.no_grad():
        product.zero_()
    with pytest.raises(actckpt.errors.SavedTensorChangedError, match="expected version"):
        torch.autograd.grad(y.sum(), weight)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.parametrize("make", [torch.Tensor.to_sparse_coo, torch.Tensor.to_sparse_csr])
@pytest.mark.parametrize("inside", [True, False])
def test_a_sparse_argument_that_changes_is_not_read_again(make: Any, inside: bool) -> None:
    def program(x: torch.Tensor, region: Any) -> torch.Tensor:
        matrix = make(torch.rand(8, 8))
        with region():
            y = (matrix @ torch.rand(8, 4)) * x
            if inside:
                matrix.values().mul_(2)
        if not inside:
            matrix.values().mul_(2)
        return y

    _assert_as_plain(program)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_strided_nested_tensors_pass_through_a_region() -> None:
    def program(x: torch.Tensor, region: Any) -> torch.Tensor:
        with region():
            nested = torch.nested.as_nested_tensor([x[:3], x[3:]]) * 2
            padded = torch.nested.to_padded_tensor(nested, 0.0)
            return padded.sin() * padded

    _assert_as_plain(program)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_jagged_tensors_come_back_with_the_sizes_that_they_had() -> None:
    def program(x: torch.Tensor, region: Any) -> torch.Tensor:
        with region():
            nested = torch.nested.as_nested_tensor([x[:3], x[3:]], layout=torch.jagged)
            product = (nested * 2).sin() * nested
            return product.values().sin()

    _assert_as_plain(program)


def test_generators_among_the_arguments_are_restored_wherever_they_stand() -> None:
    def program(x: torch.Tensor, region: Any) -> torch.Tensor:
        generator = torch.Generator(x.device).manual_seed(4)
        with region():
            rates = x.detach().abs() * 9
            y = torch.poisson(rates, generator=generator) * x.sin()
            y = y * torch.bernoulli(rates / rates.max(), generator=generator)
            return y * torch.poisson(rates)

    _assert_as_plain(program)


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized:UserWarning")
@pytest.mark.parametrize("case", ["smaller", "empty"])
def test_an_out_argument_that_was_resized_keeps_the_bytes_that_nothing_wrote(case: str) -> None:
    def program(x: torch.Tensor, region: Any) -> torch.Tensor:
        with region():
            out = x.detach().abs()
            alias = out.detach()
            if case == "smaller":
                torch.add(torch.ones(3), 1, out=out)
            else:
                torch.linalg.qr(torch.rand(4, 4), mode="r", out=(out, torch.empty(0)))
            return alias * x

    _assert_as_plain(program)


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


def test_audits_leave_meta_tensors_alone() -> None:
    actckpt.configure(audit="always")
    x = torch.rand(4, 4, device="meta", requires_grad=True)
    with actckpt.region():
        y = (x * 2).sin() * x
    assert torch.autograd.grad(y.sum(), x)[0].shape == (4, 4)


@pytest.mark.parametrize("policy", KEPT)
def test_a_region_in_a_checkpoint_in_a_region_holds_the_same_in_the_rerun(policy: Any) -> None:
    def block(x: torch.Tensor, region: Any) -> torch.Tensor:
        with region():
            y = x.sin() * x
            y = y * y
        return y.cos() * y

    def program(x: torch.Tensor, region: Any) -> torch.Tensor:
        with region():
            y = actckpt.checkpoint(block, x * 2, region)  # not a leaf
            y = actckpt.checkpoint(block, y.view(4, 8), region)
        return actckpt.checkpoint(block, x, region) * y.view(8, 4)

    _assert_as_plain(program, policy)


def test_many_small_values_of_a_large_one_are_decided_in_linear_time() -> None:
    def steps_to(large: torch.Tensor, count: int) -> float:
        weight = torch.rand((), requires_grad=True)
        start = time.process_time()
        with actckpt.region():
            y, total = large.mean(), torch.zeros(())
            for _ in range(count):
                y = y.sin() * 1.01
                total = total + y * weight
        return time.process_time() - start

    large = torch.rand(1000) * 1
    steps_to(large, 100)
    # Ten times as many take ten times as long, where quadratic time would be a hundred times.
    assert min(steps_to(large, 4000) for _ in range(3)) < 40 * min(steps_to(large, 400) for _ in range(5))


def test_a_closed_tape_is_freed_without_garbage_collection() -> None:
    def step() -> None:
        x = torch.rand(4, requires_grad=True)
        with actckpt.region():
            y = x.sin() * x
        y.sum().backward()

    step()
    gc.collect()
    gc.disable()
    try:
        before = len(gc.get_objects())
        for _ in range(50):
            step()
        assert len(gc.get_objects()) - before < 50
    finally:
        gc.enable()


class _ChangesWhatItSaved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grad * x.mul_(3)


def test_a_replayed_tensor_that_backward_changed_is_replayed_again() -> None:
    x = torch.rand(8, requires_grad=True)
    with actckpt.region():
        y = (x * 2).sin()
        loss = (y * x + _ChangesWhatItSaved.apply(y)).sum()
    (gradient,) = torch.autograd.grad(loss, x)  # plain autograd raises
    slope = 2 * (x * 2).cos()
    torch.testing.assert_close(gradient, (y + (x + 3 * y) * slope).detach())


def test_a_tensor_freed_after_its_region_is_not_replayed_from() -> None:
    weight = torch.rand(64, dtype=torch.complex64)
    x = torch.rand(64, requires_grad=True)
    with actckpt.region():
        y = (weight.conj().real.sin().sum() * x.sin()) * x
        z = torch.view_as_real(weight.conj() * x.detach()).sin()[:, 0] * x
    weight.untyped_storage().resize_(0)
    with pytest.raises(actckpt.errors.ActckptError, match=r"0 bytes now; 512 were recorded"):
        (y.sum() + z.sum()).backward()


@pytest.mark.parametrize("audit", ["first", "always"])
def test_audits_do_not_look_at_what_ctc_loss_leaves_unwritten(audit: Any) -> None:
    actckpt.configure(audit=audit)

    def program(x: torch.Tensor, region: Any) -> torch.Tensor:
        targets = torch.randint(1, 8, (3, 5))
        soil = [torch.full((3, 12, 11), 1.0) for _ in range(8)]
        del soil
        with region():
            logits = torch.rand(12, 3, 8) * x[:, 0]
            loss = F.ctc_loss(logits.log_softmax(-1), targets, (12, 7, 9), (5, 2, 3))
        soil = [torch.full((3, 12, 11), 2.0) for _ in range(8)]
        del soil
        return loss

    _assert_as_plain(program)


def test_the_bytes_behind_the_last_whole_element_are_offloaded_too() -> None:
    def program(x: torch.Tensor, region: Any) -> torch.Tensor:
        numbers = torch.rand(2**20 + 1).half()
        with region():
            halves = numbers.clone()
            words = halves[:-1].view(torch.float32) * x[0, 0]
            return words + (halves[-1:] * x[1, :1].half()).float()

    _assert_as_plain(program, actckpt.policies.PerOp({"aten.clone": "offload"}, default="offload"))


@pytest.mark.parametrize("times", [1, 2])
def test_a_view_of_a_parameter_that_its_region_overwrites_comes_back_as_it_was(times: int) -> None:
    weight, x = torch.nn.Parameter(torch.randn(4, 4)), torch.randn(3, 4, requires_grad=True)
    before = weight.detach().clone()
    with actckpt.region(["aten.mm"]):
        y = x @ weight.t()
        with torch.no_grad():
            for _ in range(times):
                weight.mul_(2)
    y.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, torch.ones(3, 4) @ before)


def test_a_view_of_a_parameter_that_changed_after_its_region_raises() -> None:
    weight, x = torch.nn.Parameter(torch.randn(4, 4)), torch.randn(3, 4, requires_grad=True)
    with actckpt.region(["aten.mm"]):
        y = x @ weight.t()
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(actckpt.errors.SavedTensorChangedError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("is_input", [False, True])
@pytest.mark.parametrize(
    "write",
    [
        pytest.param(lambda t: t.index_put_((torch.tensor([0, 1, 99]),), torch.full((3,), 7.0)), id="index_put"),
        pytest.param(lambda t: t.scatter_add_(0, torch.tensor([0, 1, 99]), torch.full((3,), 7.0)), id="scatter_add"),
        pytest.param(
            lambda t: torch._foreach_mul_([t, t.clone()], [torch.full((4,), 3.0), torch.ones(5)]), id="foreach"
        ),
    ],
)
def test_what_an_operator_wrote_before_it_raised_is_no_longer_what_it_was(write: Any, is_input: bool) -> None:
    outside = torch.arange(4.0)

    def program(x: torch.Tensor, region: Any) -> torch.Tensor:
        given = outside.clone()
        with region():
            target = given if is_input else given * 1.5
            before = target.clone()
            y = x * target.sin()  # replayed from what the target was
            with pytest.raises((IndexError, RuntimeError)):
                write(target)
            assert not torch.equal(target, before)
            return y.sin() * (x * target).cos()

    _assert_as_plain(program)


@pytest.mark.parametrize("was_read", [False, True])
@pytest.mark.parametrize("policy", ["recompute", "keep", "offload", []])
def test_a_tensor_that_is_put_onto_the_memory_of_a_parameter_changes_nothing_there(policy: Any, was_read: bool) -> None:
    """As recurrent layers do on GPUs with the memory that all their weights share."""
    weight = torch.nn.Parameter(torch.randn(32))

    def program(x: torch.Tensor, region: Any) -> torch.Tensor:
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


def test_a_parameter_that_was_last_read_through_its_data_has_not_changed() -> None:
    """What `.data` returns counts versions of its own."""
    weight = torch.nn.Parameter(torch.randn(8, 4))
    data = weight.data
    data.add_(1)

    def program(x: torch.Tensor, region: Any) -> torch.Tensor:
        with region():
            return (x * weight).sin() * (x * data).cos() * weight

    _assert_as_plain(program)
