"""Does backward's peak depend on the order in which the forward was written? Bytes, exact, and a picture.

    python benchmarks/memory_order.py

Ten independent paths relu -> matmul with itself -> relu -> matmul are chained into one product. Written path by path,
backward needs the replayed values of one path at a time; written layer by layer, the same operators make it need those
of all paths before it lets go of the first. Compared are plain autograd, torch's checkpoint, torch's selective
checkpointing and ours ("keep matmuls, recompute the rest"): bytes held after the forward, and the peak of backward over
that. Gradients must be equal bit for bit.
"""

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor

import actckpt
from actckpt.memory import LiveStorages

_MIB = 1 << 20
_MATMUL = torch.ops.aten.mm.default

Program = Callable[..., Tensor]
Method = Callable[[Program, list[Tensor]], Tensor]


def path_by_path(product: Tensor, *paths: Tensor) -> Tensor:
    """Finish each path before the next begins."""
    for path in paths:
        hidden = path.relu()
        product = product @ (hidden @ hidden).relu()
    return product


def layer_by_layer(product: Tensor, *paths: Tensor) -> Tensor:
    """Run each layer of all paths before the next layer begins: the same operators as `path_by_path`."""
    hidden = [path.relu() for path in paths]
    hidden = [h @ h for h in hidden]
    hidden = [h.relu() for h in hidden]
    return functools.reduce(torch.matmul, hidden, product)


ORDERS: dict[str, Program] = {"path by path": path_by_path, "layer by layer": layer_by_layer}

_selective = functools.partial(torch_checkpoint.create_selective_checkpoint_contexts, [_MATMUL])

METHODS: dict[str, Method] = {
    "plain autograd": lambda program, inputs: program(*inputs),
    "torch checkpoint": lambda program, inputs: torch_checkpoint.checkpoint(program, *inputs, use_reentrant=False),
    "torch selective, keep mm": lambda program, inputs: torch_checkpoint.checkpoint(
        program, *inputs, use_reentrant=False, context_fn=_selective
    ),
    "actckpt, keep mm": lambda program, inputs: actckpt.checkpoint(program, *inputs, policy=[_MATMUL]),
}


@dataclasses.dataclass(frozen=True)
class Figures:
    """Of one forward and backward, without inputs and their gradients."""

    held_bytes: int
    #: Peak of backward, over `held_bytes`.
    extra_bytes: int
    timeline: tuple[tuple[float, int], ...]
    gradients: tuple[Tensor, ...]


def measure(program: Program, method: Method, *, size: int, num_paths: int) -> Figures:
    """Run `program` on matrices of `size` x `size` under the counter."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(size, size, generator=generator) / size**0.5 for _ in range(num_paths + 1)]
    for tensor in inputs:
        tensor.requires_grad_()
    with LiveStorages(parameters=inputs, timeline=True) as live:
        loss = method(program, inputs).sum()
        held_bytes = live.live_bytes
        live.reset_peak()
        loss.backward()
    gradients = tuple(tensor.grad for tensor in inputs if tensor.grad is not None)
    return Figures(held_bytes, live.peak_bytes - held_bytes, live.timeline, gradients)


def compare(*, size: int, num_paths: int) -> dict[str, dict[str, Figures]]:
    """Measure every method on both orders.

    Returns:
        Figures by order and method.
    Raises:
        AssertionError: a method's gradients are not those of plain autograd.
    """
    results = {}
    for order, program in ORDERS.items():
        for method in METHODS.values():
            measure(program, method, size=size, num_paths=num_paths)
        figures = {name: measure(program, m, size=size, num_paths=num_paths) for name, m in METHODS.items()}
        plain = figures["plain autograd"].gradients
        for name, got in figures.items():
            assert len(got.gradients) == len(plain), f"{name}, {order}: gradients are missing"
            equal = all(torch.equal(a, b) for a, b in zip(got.gradients, plain, strict=True))
            assert equal, f"{name}, {order}: gradients differ from plain autograd's"
        results[order] = figures
    return results


def main(arguments: list[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Peak of backward for two orders of the same operators.")
    parser.add_argument("--size", type=int, default=256, help="rows and columns of a matrix (256: 0.25 MiB)")
    parser.add_argument("--paths", type=int, default=10, help="number of independent paths")
    args = parser.parse_args(arguments)
    if args.size < 1 or args.paths < 1:
        parser.error("--size and --paths must be at least 1")
    results = compare(size=args.size, num_paths=args.paths)
    for order, figures in results.items():
        print(f"{order + ' (MiB)':28}held after forward  backward over it")
        for name, got in figures.items():
            print(f"  {name:26}{got.held_bytes / _MIB:18.2f}{got.extra_bytes / _MIB:18.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
