"""What nodes of the graph need while they run: what each of them does to memory, beside what is taken to be needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from actckpt._budget import node_bytes
from actckpt.memory import LiveStorages

SIZE = 64
_INDEX = torch.arange(SIZE)


#: Functions of tensors in (0.1, 0.9), of SIZE x SIZE.
ONE: list[Callable[[Tensor], Tensor]] = [
    *(torch.abs, torch.acos, torch.acosh, torch.asin, torch.asinh, torch.atan, torch.atanh, torch.cos, torch.cosh),
    *(torch.digamma, torch.erf, torch.erfc, torch.erfinv, torch.exp, torch.exp2, torch.expm1, torch.lgamma, torch.log),
    *(torch.log10, torch.log1p, torch.log2, torch.reciprocal, torch.rsqrt, torch.sigmoid, torch.sin, torch.sinc),
    *(torch.sinh, torch.sqrt, torch.square, torch.tan, torch.tanh, torch.trace, torch.i0, torch.nan_to_num),
    *(torch.special.entr, torch.special.erfcx, torch.special.i0e, torch.special.i1, torch.special.i1e),
    *(torch.special.log_ndtr, torch.special.ndtri, torch.amax, torch.amin, torch.prod, torch.std, torch.var),
    *(torch.nansum, torch.mean, torch.sum, torch.norm, torch.linalg.vector_norm, torch.linalg.inv, torch.linalg.det),
    *(torch.linalg.svdvals, torch.linalg.matrix_exp, torch.linalg.pinv, torch.linalg.eigvalsh, torch.median),
    *(functional.gelu, functional.silu, functional.softplus, functional.relu, functional.hardswish, functional.mish),
    *(functional.elu, functional.logsigmoid, torch.nanmedian, torch.clone, torch.cholesky_inverse),
    lambda x: x.clamp(0.3, 0.6),
    lambda x: x.clamp_min(torch.full((SIZE, SIZE), 0.3)),
    lambda x: x.clamp_max(torch.full((SIZE, SIZE), 0.3)),
    lambda x: x.pow(3),
    lambda x: 2.0**x,
    lambda x: x / 2.0,
    lambda x: x * 2.0,
    lambda x: x.prod(0),
    lambda x: x.cumprod(0),
    lambda x: x.cumsum(0),
    lambda x: x.logcumsumexp(0),
    lambda x: x.logsumexp(0),
    lambda x: x.softmax(0),
    lambda x: x.log_softmax(0),
    lambda x: x.renorm(2, 0, 0.5),
    lambda x: x.max(0).values,
    lambda x: x.min(0).values,
    lambda x: x.median(0).values,
    lambda x: x.nanmedian(0).values,
    lambda x: x.sort(0).values,
    lambda x: x.norm(3.0),
    lambda x: x.norm(1.0, 1),
    lambda x: torch.linalg.vector_norm(x, 3.0, 1),
    lambda x: x[:, _INDEX % 7],
    lambda x: x[:, 3],
    lambda x: x.index_select(0, _INDEX % 7),
    lambda x: x.take(_INDEX),
    lambda x: x.gather(0, torch.zeros(SIZE, SIZE, dtype=torch.long)),
    lambda x: x.masked_select(torch.eye(SIZE) > 0),
    lambda x: x.masked_fill(torch.eye(SIZE) > 0, 1.0),
    lambda x: x.as_strided((SIZE, SIZE), (1, SIZE)),
    lambda x: x.mvlgamma(1),
    lambda x: x.polygamma(1),
    lambda x: torch.special.xlog1py(torch.ones(SIZE, SIZE), x),
    lambda x: x.ldexp(_INDEX.expand(SIZE, SIZE)),
    lambda x: x.nextafter(torch.ones(SIZE, SIZE)),
    lambda x: torch.cholesky_solve(x, torch.eye(SIZE)),
    lambda x: functional.layer_norm(x, (SIZE,)),
    lambda x: functional.nll_loss(x, _INDEX),
    lambda x: functional.prelu(x, torch.tensor([0.3])),
    lambda x: torch.linalg.solve_triangular(torch.eye(SIZE), x, upper=True),
]
#: Functions of two of them.
TWO: list[Callable[[Tensor, Tensor], Tensor]] = [
    *(torch.add, torch.mul, torch.div, torch.maximum, torch.minimum, torch.fmax, torch.fmin, torch.hypot, torch.mm),
    *(torch.atan2, torch.copysign, torch.fmod, torch.remainder, torch.xlogy, torch.logaddexp, torch.logaddexp2),
    *(torch.pow, torch.dist, torch.linalg.solve, functional.mse_loss),
    *(functional.binary_cross_entropy, functional.binary_cross_entropy_with_logits),
    *(functional.smooth_l1_loss, functional.huber_loss),
    lambda x, y: torch.cdist(x, y, p=1.0),
    lambda x, y: torch.lerp(x, y, 0.3),
    lambda x, y: torch.lerp(x, y, torch.full((SIZE, SIZE), 0.3)),
    lambda x, y: torch.addcdiv(x, y, y),
]
#: Nodes that functions of torch make only inside of others, or for inputs that no test has.
UNSEEN = {"AddcdivBackward", "NormBackward", "UnsafeMaskedIndexBackward"}


def _ran(function: Callable[..., Tensor], num: int) -> tuple[Any, int, int]:
    """Return the one node that a function makes, what is taken to be needed while it runs, and what is."""
    torch.manual_seed(0)
    given = [(torch.rand(SIZE, SIZE) * 0.8 + 0.1).requires_grad_() for _ in range(num)]
    inner = [x * 1.0 for x in given]  # leaves would count with parameters
    result = function(*inner)
    node = result.grad_fn
    assert node is not None and {each for each, _ in node.next_functions} <= {x.grad_fn for x in inner} | {None}
    gradient = torch.ones_like(result)
    running, _ = node_bytes.running_bytes(node)
    with LiveStorages() as live:
        torch.autograd.grad(result, inner, gradient)
    # The gradient that it takes, and what it saved, are there already.
    return node, running - node_bytes.taken_bytes(node), live.peak_bytes


def _functions() -> Iterator[tuple[Callable[..., Tensor], int]]:
    for function in ONE:
        yield function, 1
    for other in TWO:
        yield other, 2


@pytest.mark.parametrize(("function", "num"), list(_functions()))
def test_no_node_needs_more_than_it_is_taken_to_need(function: Any, num: int) -> None:
    node, estimated, real = _ran(function, num)
    assert real <= estimated + 1024, (type(node).__name__, real, estimated)


def test_every_name_is_one_of_a_node() -> None:
    made = {type(_ran(function, num)[0]).__name__ for function, num in _functions()}
    for names in node_bytes.MAKE_MORE.values():
        for name in names:
            assert name in UNSEEN or any(each.startswith(name) for each in made), name
