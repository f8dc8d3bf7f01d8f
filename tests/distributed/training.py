"""What is trained on two ranks, in which ways it is checkpointed, and what is measured of it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from parallel_blocks import Block
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import actckpt
from actckpt._core.storages import tensors_in
from actckpt._offload import stores
from actckpt.action import Action
from actckpt.memory import LiveStorages

aten = torch.ops.aten

#: What activation checkpointing of transformers saves: matmuls and attention.
SAVED = [aten.mm.default, aten.addmm.default, aten._scaled_dot_product_flash_attention_for_cpu.default]

_COLLECTIVE = ("c10d", "_c10d_functional", "c10d_functional")
#: They are no collectives of their own.
_NO_COLLECTIVES = ("wait_tensor", "_wrap_tensor_autograd")

#: Gloo's threads hold what they sent a little longer than it takes.
_LET_GO_S = 0.05

#: Of the model and what it trains on. On a GPU both are larger: tests/gpu/sharded_program.py.
DEVICE, WIDTH, ROWS = "cpu", 32, (2, 16)

Method = Callable[[nn.Module], object]


class Model(nn.Module):
    """A transformer of four blocks."""

    def __init__(self, *, width: int, depth: int = 4, dropout: float = 0.1) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(depth))
        self.last = nn.Linear(width, 4)
        #: Number of a block that does not run, -1: all run.
        self.left_out = -1

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            if number != self.left_out:
                x = block(x)
        return self.last(x)


def model_of(seed: int = 1, **options: Any) -> Model:
    """Return a model with the same parameters on every rank."""
    torch.manual_seed(seed)
    return Model(**{"width": WIDTH, **options}).to(DEVICE)


def batch(step: int, *, is_same: bool = False) -> Tensor:
    """Return what this rank trains on in a step; where it is the same on all ranks, these have one batch together."""
    generator = torch.Generator().manual_seed(1000 * step + (0 if is_same else dist.get_rank()))
    return torch.randn(*ROWS, 8, generator=generator).to(DEVICE)


class Collectives(TorchDispatchMode):
    """Takes down which collectives run, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # the operators inside of it come here
        namespace, _, name = func._schema.name.partition("::")
        if namespace in _COLLECTIVE and name not in _NO_COLLECTIVES:
            self.seen.append(name)
            result = func(*args, **(kwargs or {}))
            self.nbytes += sum(tensor.nbytes for tensor in tensors_in(result))
            return result
        return func(*args, **(kwargs or {}))


@dataclasses.dataclass(frozen=True)
class Training:
    """A model on two ranks."""

    #: Whose gradients are compared.
    parameters: Callable[[], list[nn.Parameter]]
    #: Takes the number of a step, and returns a loss. Where it runs backward too, it returns None.
    forward: Callable[[int], Tensor | None]


@dataclasses.dataclass(frozen=True)
class Found:
    """What was found on a rank: the gradients of all steps, and figures of the last one."""

    gradients: list[Tensor]
    held_bytes: int
    peak_bytes: int
    in_forward: tuple[str, ...]
    in_backward: tuple[str, ...]
    #: What the collectives of the forward returned.
    bytes_in_forward: int
    num_in_backward_of_plain: int = 0


def train(make: Callable[[Method], Training], method: Method, steps: int) -> Found:
    """Train a few steps, the last one of them watched."""
    actckpt.configure(observers=[Collectives])
    training = make(method)
    gradients: list[Tensor] = []
    for step in range(steps):
        torch.manual_seed(100 * step + dist.get_rank())
        with _watching(is_last=step == steps - 1) as (live, collectives):
            loss = training.forward(step)
            held_bytes, num_forward = _settled_bytes(live), len(collectives.seen)
            bytes_in_forward = collectives.nbytes
            if loss is not None:
                loss.backward()
                del loss
        gradients += _update(training.parameters())
    seen = tuple(collectives.seen)
    return Found(gradients, held_bytes, live.peak_bytes, seen[:num_forward], seen[num_forward:], bytes_in_forward)


@contextlib.contextmanager
def _watching(*, is_last: bool) -> Iterator[tuple[LiveStorages, Collectives]]:
    live, collectives = LiveStorages(), Collectives()
    with live if is_last else contextlib.nullcontext(), collectives if is_last else contextlib.nullcontext():
        yield live, collectives


def _settled_bytes(live: LiveStorages) -> int:
    """Return what is alive once all that is moved has left, and gloo's threads let go of what they have sent."""
    store = stores.cpu_store()
    if store is not None:
        store.flush()
        store.poll()
    time.sleep(_LET_GO_S)
    return live.live_bytes


def check_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    """Compare gradients bit for bit."""
    assert found and len(found) == len(expected), f"{len(found)} gradients, {len(expected)} expected"
    for number, (ours, right) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(ours, right), f"gradient {number} of {len(found)}"


def _update(parameters: list[nn.Parameter]) -> list[Tensor]:
    """Take a step down the gradients of this rank, and return them."""
    found = []
    for parameter in parameters:
        if parameter.grad is None:
            continue
        gradient = _local(parameter.grad)
        found.append(gradient.clone())
        with torch.no_grad():
            _local(parameter).sub_(gradient, alpha=0.01)
        parameter.grad = None
    return found


def _local(tensor: Any) -> Tensor:
    return tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor.detach()


# The methods


def _each_block(call: Callable[..., Any]) -> Method:
    def method(model: nn.Module) -> None:
        for block in _blocks_of(model):
            block.forward = functools.partial(call, block.forward)

    return method


def _blocks_of(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, Block) or hasattr(module, "is_block")]


def applied(*args: Any, **options: Any) -> Method:
    return lambda model: actckpt.apply(model, *args, blocks=lambda module: module in _blocks_of(model), **options)


def on_disk(method: Method) -> Method:
    def with_folder(model: nn.Module) -> None:
        actckpt.configure(spill_dir=_folder())
        method(model)

    return with_folder


@functools.cache
def _folder() -> str:
    return tempfile.mkdtemp(prefix=f"actckpt{dist.get_rank()}-")


PLAIN: Method = lambda model: None  # noqa: E731
TORCH = {
    "rerun": _each_block(functools.partial(checkpoint, use_reentrant=False)),
    "list": _each_block(
        functools.partial(
            checkpoint,
            use_reentrant=False,
            context_fn=functools.partial(create_selective_checkpoint_contexts, SAVED),
        )
    ),
}
OURS = {
    "rerun": applied("recompute"),
    "replay": applied([]),
    "list": applied(SAVED),
    "offload by operator": on_disk(
        applied(actckpt.policies.PerOp(dict.fromkeys(SAVED, Action.OFFLOAD), default=Action.RECOMPUTE))
    ),
    "budget": applied(activation_budget="70%", race=False),
}
#: Which of torch's holds no less.
LIKE = {"rerun": "rerun", "replay": "rerun", "list": "list", "offload by operator": "list", "budget": "plain"}
#: Everything is audited in the first one, DDP has its buckets from the second on, and plans run.
_STEPS = 3


@functools.cache
def reference(module: str, kind: str, name: str) -> Found:
    """Return what is found without actckpt."""
    make = importlib.import_module(module).KINDS[kind]
    return train(make, PLAIN if name == "plain" else TORCH[name], _STEPS)


def compare(module: str, kind: str, name: str, like: str | None = None) -> tuple[Found, Found]:
    """Train one kind of a test module by one of our methods; returns what was found, and what torch's method finds.

    Args:
        like: that method, if not the usual one.

    Raises:
        AssertionError: gradients are not those of plain training.
    """
    found = train(importlib.import_module(module).KINDS[kind], OURS[name], _STEPS)
    plain = reference(module, kind, "plain")
    expected = plain.gradients
    check_equal(found.gradients, expected)
    theirs = dataclasses.replace(
        reference(module, kind, like or LIKE[name]), gradients=[], num_in_backward_of_plain=len(plain.in_backward)
    )
    return dataclasses.replace(found, gradients=[]), theirs
