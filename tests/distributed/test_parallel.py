"""Each kind of parallelism by each method: plain gradients, and no more bytes and collectives than with torch's."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import data_parallel
import experts
import model_parallel
import pipelines
import pytest
import torch
from pool import Ranks, on_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training import LIKE, OURS, PLAIN, Block, Found, Method, applied, check_equal, compare, on_disk, reference, train

import actckpt

_MODULES = (data_parallel, model_parallel, experts, pipelines)
_each_kind = pytest.mark.parametrize(
    ("module", "kind"),
    [
        pytest.param(module.__name__, kind, marks=pipelines.NOT_HERE.get(kind, ()))
        for module in _MODULES
        for kind in module.KINDS
    ],
)


@pytest.mark.parametrize("method", OURS)
@_each_kind
def test_gradients_are_equal_and_bytes_and_collectives_no_more(
    module: str, kind: str, method: str, ranks: Ranks
) -> None:
    """Torch's selective checkpoint raises where backward comes in halves: there, plain training stands for it."""
    like = "plain" if kind.startswith("zero") and LIKE[method] == "list" else LIKE[method]
    for _ in range(3):  # what gloo's threads have sent dies when they like, and late where the machine is busy
        found = ranks.run(compare, module, kind, method, like)
        if all(ours.peak_bytes <= 1.05 * theirs.peak_bytes for ours, theirs in found) or not _has_like_peak(
            module, method
        ):
            break
    assert len({ours.in_backward for ours, _ in found}) == 1 or module != "model_parallel"
    for ours, theirs in found:
        assert ours.in_forward == theirs.in_forward
        _check_backward(module, method, ours, theirs)


def _has_like_peak(module: str, method: str) -> bool:
    return module in ("data_parallel", "pipelines") or method == "rerun"


def _check_backward(module: str, method: str, ours: Found, theirs: Found) -> None:
    slack = 1.05 if module in ("data_parallel", "pipelines") else 1.1
    if module == "pipelines":  # their forward is the whole step
        assert ours.peak_bytes <= slack * theirs.peak_bytes
    elif module == "data_parallel" or method == "rerun":
        assert ours.in_backward == theirs.in_backward
        assert ours.held_bytes <= theirs.held_bytes and ours.peak_bytes <= slack * theirs.peak_bytes
    else:  # collectives of forwards, which no policy repeats that does not name them
        assert len(ours.in_backward) == theirs.num_in_backward_of_plain
        more_bytes = ours.bytes_in_forward + (experts.ROUTING_BYTES if module == "experts" else 0)
        assert ours.held_bytes <= (1.01 if module == "experts" else 1.0) * (theirs.held_bytes + more_bytes)


def _check_many_steps(module: str, kind: str) -> None:
    make, num_steps = importlib.import_module(module).KINDS[kind], 20  # more than a plan is watched in
    expected = train(make, PLAIN, num_steps).gradients
    for method in OURS.values():
        check_equal(train(make, method, num_steps).gradients, expected)


@pytest.mark.soak
@_each_kind
def test_gradients_of_many_steps_are_those_of_plain_training(module: str, kind: str, ranks: Ranks) -> None:
    ranks.run(_check_many_steps, module, kind, timeout_s=300)


_functional = torch.ops._c10d_functional
_COLLECTIVES = (_functional.all_gather_into_tensor, _functional.reduce_scatter_tensor, _functional.all_reduce)


@pytest.mark.parametrize("kind", model_parallel.KINDS)
@on_ranks
def test_a_policy_that_moves_collectives_holds_no_more_than_torch_which_repeats_them(kind: str) -> None:
    policy = actckpt.policies.PerOp(dict.fromkeys(_COLLECTIVES, "offload"))
    found = train(model_parallel.KINDS[kind], on_disk(applied(policy)), 3)
    plain, rerun = (reference("model_parallel", kind, name) for name in ("plain", "rerun"))
    check_equal(found.gradients, plain.gradients)
    assert found.in_backward == plain.in_backward and len(found.in_backward) < len(rerun.in_backward)
    assert found.held_bytes <= rerun.held_bytes


def _wrapped(checkpoint_fn: Any) -> Method:
    """Return what FSDP's users write: blocks in wrappers that call `checkpoint_fn`."""
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrappers

    def method(model: nn.Module) -> None:
        wrap = functools.partial(wrappers.checkpoint_wrapper, checkpoint_fn=checkpoint_fn, use_reentrant=False)
        wrappers.apply_activation_checkpointing(
            model, checkpoint_wrapper_fn=wrap, check_fn=lambda module: isinstance(module, Block)
        )

    return method


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2"])
@on_ranks
def test_checkpoint_is_a_checkpoint_fn_of_torchs_wrappers(kind: str) -> None:
    make = data_parallel.KINDS[kind]
    ours, theirs = (train(make, _wrapped(function), 3) for function in (actckpt.checkpoint, checkpoint))
    check_equal(ours.gradients, reference("data_parallel", kind, "plain").gradients)
    assert (ours.in_forward, ours.in_backward) == (theirs.in_forward, theirs.in_backward)
    assert ours.held_bytes <= theirs.held_bytes and ours.peak_bytes <= theirs.peak_bytes


@on_ranks
def test_a_region_around_several_units_of_fsdp2_says_what_to_do() -> None:
    def around(model: nn.Module) -> None:
        own = model.forward

        def forward(x: Tensor) -> Tensor:
            with actckpt.region():
                result: Tensor = own(x)
            return result

        model.forward = forward  # type: ignore[method-assign]

    message = r"(?s)of shape .* has 0 bytes now.*FSDP2 frees.*inside each unit"
    with pytest.raises(actckpt.errors.SavedTensorChangedError, match=message):
        train(data_parallel.KINDS["fsdp2"], around, 1)
