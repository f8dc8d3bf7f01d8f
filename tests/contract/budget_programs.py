"""Small training programs for budgets: each makes a model and a step that runs forward and backward."""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import on_device
import torch
from residual_mlp import Mlp
from torch import Tensor, nn
from torch.nn import functional

import actckpt

__all__ = ["BESIDE", "PROGRAMS", "Configured", "Net", "Program", "Residual", "beside", "chain"]

#: A model, and its step. The step sets no gradients to None.
Program = tuple[nn.Module, Callable[[], object]]

_WIDTH, _VOCABULARY = 32, 128


class Net(nn.Module):
    """Blocks, other modules by their names, and the function of all of them that is the forward."""

    def __init__(self, run: Callable[..., Any], blocks: Iterable[nn.Module], **others: nn.Module) -> None:
        super().__init__()
        self.run, self.blocks = run, nn.ModuleList(blocks)
        for name, module in others.items():
            self.add_module(name, module)

    def forward(self, *args: Any) -> Any:
        return self.run(self, *args)


def _mlps(num: int = 4, width: int = _WIDTH) -> list[nn.Module]:
    return [Mlp(width) for _ in range(num)]


def chain(net: Any, x: Tensor) -> Tensor:
    """Run one block after the other."""
    for block in net.blocks:
        x = block(x)
    return x


def _squares(model: nn.Module, *args: Any) -> Program:
    return model, lambda: model(*args).square().mean().backward()


def _autocast(enabled: bool = True) -> Any:
    return torch.autocast(on_device.device_type, torch.bfloat16) if enabled else contextlib.nullcontext()


class _Block(nn.Module):
    def __init__(self, *, memory: bool = False, rank: int = 0) -> None:
        super().__init__()
        linear: Callable[[int, int], nn.Module] = (lambda a, b: _LowRank(a, b, rank)) if rank else nn.Linear
        self.norm1, self.norm2 = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self.qkv, self.out = linear(_WIDTH, 3 * _WIDTH), linear(_WIDTH, _WIDTH)
        self.up, self.down = linear(_WIDTH, 4 * _WIDTH), linear(4 * _WIDTH, _WIDTH)
        self.drop = nn.Dropout(0.1)
        self.memory = nn.Linear(_WIDTH, _WIDTH) if memory else None

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 2, -1)).transpose(1, 3).unbind(2)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.drop(self.out(mixed))
        if self.memory is not None and memory is not None:
            x = x + self.memory(memory)
        return x + self.drop(self.down(functional.gelu(self.up(self.norm2(x)))))


class _LowRank(nn.Module):
    """A frozen linear layer and a trained one of low rank beside it."""

    def __init__(self, a: int, b: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(a, b).requires_grad_(False)
        self.a, self.b = nn.Linear(a, rank, bias=False), nn.Linear(rank, b, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(functional.dropout(x, 0.05)))


class _Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.route, self.norm = nn.Linear(_WIDTH, 2), nn.LayerNorm(_WIDTH)
        self.experts = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x).flatten(0, 1)
        weight, chosen = self.route(h).softmax(-1).max(-1)
        result = torch.zeros_like(h)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(1)
            result = result.index_add(0, rows, torch.tanh(expert(h[rows])) * weight[rows, None])
        return x + result.view_as(x)


# Language models, and others that are trained alike.


def _tokens(rows: int = 8) -> Tensor:
    return torch.randint(_VOCABULARY, (rows, 64))


def _loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def _language(*, rank: int = 0, casts: bool = False) -> nn.Module:
    """Decoder blocks under a head that shares its weight with the embedding."""

    def run(net: Any, tokens: Tensor) -> Tensor:
        with _autocast(casts):
            return net.head(chain(net, net.embedding(tokens)))

    embedding, head = nn.Embedding(_VOCABULARY, _WIDTH), nn.Linear(_WIDTH, _VOCABULARY, bias=False)
    head.weight = embedding.weight
    embedding.requires_grad_(not rank)
    return Net(run, [_Block(rank=rank) for _ in range(4)], embedding=embedding, head=head)


def _plainly(model: nn.Module, tokens: Tensor) -> None:
    _loss(model(tokens), tokens).backward()


def _autocast_outside(model: nn.Module, tokens: Tensor) -> None:
    with _autocast():
        loss = _loss(model(tokens), tokens)
    loss.backward()


def _micro_batches_in_one_autocast(model: nn.Module, *batches: Tensor) -> None:
    with _autocast():
        for tokens in batches:
            (_loss(model(tokens), tokens) / len(batches)).backward()


def _pairs(model: nn.Module, *batches: Tensor) -> None:
    better, worse = (_loss(model(tokens), tokens) for tokens in batches)
    functional.softplus(better - worse).backward()


def _chunked_loss(model: nn.Module, tokens: Tensor) -> None:
    """The loss is computed in chunks, on outputs that are detached."""
    logits = model(tokens)
    leaf = logits.detach().requires_grad_()
    for part, labels in zip(leaf.chunk(4), tokens.chunk(4), strict=True):
        _loss(part, labels).backward()
    logits.backward(leaf.grad)


def _retained(model: nn.Module, tokens: Tensor) -> None:
    logits = model(tokens)
    _loss(logits, tokens).backward(retain_graph=True)
    (1e-4 * logits.float().square().mean()).backward()


def _pipeline(model: nn.Module, *batches: Tensor) -> None:
    """One forward, one backward, with three forwards alive (1F1B)."""
    alive: list[Tensor] = []
    for tokens in batches:
        alive.append(_loss(model(tokens), tokens))
        if len(alive) == 3:
            alive.pop(0).backward()
    for loss in alive:
        loss.backward()


def _trained(step: Callable[..., None] = _plainly, *rows: int, **options: Any) -> Program:
    """Train a language model by a step that gets one batch for each number of rows."""
    model = _language(**options)
    batches = [_tokens(num) for num in rows or (8,)]
    return model, lambda: step(model, *batches)


def _translation() -> Program:
    """An encoder whose result every block of the decoder reads."""

    def run(net: Any, source: Tensor, target: Tensor) -> Tensor:
        memory, x = net.embedding(source), net.embedding(target)
        for block in net.blocks[:3]:
            memory = block(memory)
        for block in net.blocks[3:]:
            x = block(x, memory)
        return net.head(x)

    others = {"embedding": nn.Embedding(_VOCABULARY, _WIDTH), "head": nn.Linear(_WIDTH, _VOCABULARY)}
    model = Net(run, [_Block(memory=number >= 3) for number in range(6)], **others)
    source, target = _tokens(), _tokens()
    return model, lambda: _loss(model(source, target), target).backward()


def _experts() -> Program:
    return _squares(Net(chain, [_Expert() for _ in range(4)]), torch.randn(8, 64, _WIDTH))


def _forces() -> Program:
    """The loss contains a gradient of the output: backward runs through a backward."""
    model, positions = Net(chain, [_tanh(_WIDTH) for _ in range(4)]), torch.randn(256, _WIDTH).requires_grad_()

    def step() -> None:
        positions.grad = None
        energy = model(positions).square().sum()
        (forces,) = torch.autograd.grad(energy, positions, create_graph=True)
        (1e-3 * energy + forces.square().sum()).backward()

    return model, step


# What is computed from the outputs of a model.


def _classified(backward: Callable[[dict[str, Tensor]], object]) -> Program:
    """The model returns its loss beside its wide outputs, as models of Transformers do."""

    def run(net: Any, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        outputs = net.head(chain(net, x))
        return {"loss": functional.cross_entropy(outputs, labels), "outputs": outputs}

    model = Net(run, _mlps(), head=nn.Linear(_WIDTH, 1024))
    x, labels = torch.randn(256, _WIDTH), torch.randint(1024, (256,))
    return model, lambda: backward(model(x, labels))


def _own_with_accuracy(found: dict[str, Tensor]) -> None:
    with torch.no_grad():
        assert found["outputs"].softmax(-1).max() <= 1
    found["loss"].backward()


def _own_by_edge(found: dict[str, Tensor]) -> None:
    torch.autograd.backward([torch.autograd.graph.get_gradient_edge(found["loss"])], [torch.ones(())])  # type: ignore[list-item]


def _one_after_the_other(found: dict[str, Tensor]) -> None:
    found["loss"].backward(retain_graph=True)
    found["outputs"].square().mean().backward()


class _SquaredShares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        shares = x.softmax(-1)
        ctx.save_for_backward(shares)
        return shares * shares

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (shares,) = ctx.saved_tensors
        gradient = 2 * gradients[0] * shares
        return shares * (gradient - (gradient * shares).sum(-1, keepdim=True))


def _with_metric(found: dict[str, Tensor]) -> None:
    shares = found["outputs"].softmax(-1)
    found["loss"].backward()
    assert shares.max() <= 1


def _with_weights(found: dict[str, Tensor]) -> None:
    weight = torch.full((2048, 1024), 1e-3, requires_grad=True)
    functional.linear(found["outputs"], weight).square().mean().backward()
    assert weight.grad is not None


def _cast(found: dict[str, Tensor]) -> None:
    with _autocast():
        outputs = found["outputs"].bfloat16() * 2
        loss = functional.cross_entropy(outputs, torch.zeros(256, dtype=torch.long))
    loss.backward()


_LOSSES: dict[str, Callable[[dict[str, Tensor]], object]] = {
    "loss of the model": lambda found: found["loss"].backward(),
    "loss of the model and accuracy": _own_with_accuracy,
    "loss of the model by its edge": _own_by_edge,
    "loss of outputs": lambda found: found["outputs"].square().mean().backward(),
    "loss of both": lambda found: (found["loss"] * 2 + found["outputs"].t()[:, 1:].square().mean()).backward(),
    "one loss after the other": _one_after_the_other,
    "loss by a function": lambda found: _SquaredShares.apply(found["outputs"]).sum().backward(),  # type: ignore[no-untyped-call]
    "metric beside the loss": _with_metric,
    "loss with weights": _with_weights,
    "cast loss": _cast,
    "loss beside a leaf": lambda found: torch.autograd.backward(
        [found["outputs"].square().mean(), torch.ones((), requires_grad=True)]
    ),
}


# Outside of blocks.


def _outside(where: str) -> Program:
    """Something needs much more than a block, and returns little."""

    def wide(net: Any, x: Tensor) -> Tensor:
        x = net.up(x).sin().unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)  # saves views, then results
        return net.down(x.sigmoid().exp())

    def run(net: Any, x: Tensor) -> Tensor:
        for number, block in enumerate(net.blocks):
            x = block(wide(net, x) if number == {"stem": 0, "between": 2}.get(where) else x)
        return (wide(net, x) if where == "head" else x)[:, :1]

    return _squares(Net(run, _mlps(), up=nn.Linear(_WIDTH, 512), down=nn.Linear(512, _WIDTH)), torch.randn(64, _WIDTH))


def _between(net: Any, x: Tensor) -> Tensor:
    x = chain(net, net.first(x) if hasattr(net, "first") else x)
    return net.last(x) if hasattr(net, "last") else x


def _embedded(kind: str) -> Program:
    """Six blocks between an embedding and a head: one that is tied to it or not, with skips or without."""

    def run(net: Any, tokens: Tensor) -> Tensor:
        x, skips = net.embedding(tokens), []
        for number, block in enumerate(net.blocks):
            if number < 3:
                skips.append(x)
            elif kind == "add":
                x = x + skips.pop()
            elif kind in ("cat", "stack"):
                both = [x, skips.pop()]
                x = net.mix(torch.cat(both, -1) if kind == "cat" else torch.stack(both, -1).flatten(-2))
            x = block(x)
        return net.head(x[:, -1])

    others = {"embedding": nn.Embedding(2048, 64), "head": nn.Linear(64, 2048, bias=False)}
    if kind in ("cat", "stack"):
        others["mix"] = nn.Linear(128, 64)
    model = Net(run, _mlps(6, 64), **others)
    if kind == "tied":
        others["head"].weight = others["embedding"].weight
    return _squares(model, torch.randint(2048, (2, 128)))


# Loops over blocks.


class _InDicts(nn.Module):
    """Is given more than its hidden states, which a rerun holds, and saves nothing of that."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp, self.other = _tanh(width), nn.Linear(width, width)

    def forward(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"x": self.mlp(given["x"]) + given["other"], "other": self.other(given["x"])}


class _Leaky(nn.Module):
    """Keeps its state in an attribute, as spiking neurons do."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(x) if self.state is None else self.state
        self.state = 0.9 * state + torch.tanh(self.linear(x))
        return torch.sigmoid(self.state - 1)


def _tanh(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width))


def _parts(net: Any, x: Tensor) -> Tensor:
    return torch.stack([net.blocks[1](net.blocks[0](part)) for part in x])


def _chunks(net: Any, x: Tensor) -> Tensor:
    for block in net.blocks:
        x = torch.cat([block(chunk) for chunk in x.chunk(3)])
    return x


def _into_one_tensor(net: Any, x: Tensor) -> Tensor:
    result = torch.zeros_like(x)
    for number, part in enumerate(x):
        result[number] = net.blocks[1](net.blocks[0](part))
    return result


def _results_in_a_list(net: Any, x: Tensor) -> Tensor:
    seen = [x * 1.0]
    for _ in range(2):
        seen += [block(torch.stack(seen).mean(0)) for block in net.blocks]
    return seen[-1]


def _frozen_ones_in_a_list(net: Any, x: Tensor) -> Tensor:
    """The first seven of eight blocks are frozen, and all of their results are there until the forward has ended."""
    results = [x * 1.0]
    results += [net.blocks[0].requires_grad_(False)(results[-1]) for _ in range(7)]
    return net.blocks[1](results[-1])


def _others(net: Any, x: Tensor) -> Tensor:
    other, total = x * 2, x.new_zeros(())
    for block in [*net.blocks] * 2:
        x, other = block({"x": x, "other": other}).values()
        total = total + other.sum()
    return x + total


def _states(net: Any, x: Tensor) -> Tensor:
    states, results = [x.new_zeros(x.shape[1:])] * 2, []
    for part in x:
        for number, block in enumerate(net.blocks):
            states[number] = part = block(part, states[number])
        results.append(part)
    return torch.stack(results)


def _states_in_attributes(net: Any, x: Tensor) -> Tensor:
    for block in net.blocks:
        block.state = None
    return _parts(net, x)


def _in_turn(net: Any, x: Tensor) -> Tensor:
    for number in range(6):
        x = net.blocks[number % len(net.blocks)](x)
    return x


_LOOPS: dict[str, tuple[Callable[[Any, Tensor], Tensor], Callable[[int], nn.Module], int]] = {
    "each part": (_parts, _tanh, 2),
    "each part of a result": (lambda net, x: _parts(net, x * 1.0), _tanh, 2),
    "chunks": (_chunks, _tanh, 2),
    "into one tensor": (_into_one_tensor, _tanh, 2),
    "results in a list": (_results_in_a_list, _tanh, 2),
    "frozen ones in a list": (_frozen_ones_in_a_list, _tanh, 2),
    "others": (_others, _InDicts, 2),
    "states": (_states, lambda width: nn.GRUCell(width, width), 2),
    "states in attributes": (_states_in_attributes, _Leaky, 2),
    "one block": (_in_turn, Mlp, 1),
    "two blocks in turn": (_in_turn, Mlp, 2),
}


def _looped(name: str) -> Program:
    run, block, num = _LOOPS[name]
    return _squares(Net(run, [block(64) for _ in range(num)]), torch.randn(6, 128, 64))


# Values that something besides autograd holds, and tensors beside hidden states.


class _Silu(torch.autograd.Function):
    """Holds tensors in attributes of its context, which no hook sees."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.x, ctx.y = x, torch.sigmoid(x)
        return x * ctx.y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * (ctx.y * (1 + ctx.x * (1 - ctx.y)))


@torch.library.custom_op("budget_programs::twice", mutates_args=())
def _twice(x: Tensor) -> Tensor:
    """An operator that replays do not run again; backward does not need what it makes."""
    return x * 2


_twice.register_autograd(lambda ctx, gradient: gradient * 2, setup_context=lambda ctx, inputs, output: None)


def _changed_in_place(block: Any, x: Tensor) -> Tensor:
    """Values are changed in place, with what came after them."""
    y = x.sigmoid() + 1
    y /= y.sum(-1, keepdim=True)
    z = x.mul(2)
    z -= z.amin(-1, keepdim=True).detach()  # nothing saves it, and what comes from it is saved
    return functional.gelu(y) + functional.gelu(z + 1)


def _written_view(net: Any, x: Tensor) -> Tensor:
    h = net.first(x)[:32]
    h[0] = 0
    return chain(net, h)


class Configured(nn.Module):
    """Two linear layers with a residual; `first` and `activation` are given the block, and a tensor."""

    def __init__(self, width: int = _WIDTH, **functions: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.first = functions.get("first", lambda block, x: block.norm(x))
        self.activation = functions.get("activation", lambda block, x: functional.gelu(x))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.activation(self, self.up(self.first(self, x))))


def _remembers(block: Any, x: Tensor) -> Tensor:
    block.last = x
    return x.sin()


def _normed_in_double(_: object, x: Tensor) -> Tensor:
    h = x.double()
    return (h * h.square().mean(-1, keepdim=True).add(1e-5).rsqrt()).float()


_HELD: dict[str, dict[str, Callable[[Any, Tensor], Tensor]]] = {
    "inputs that are cast": {"first": _normed_in_double},
    "inputs that are saved": {"first": lambda _, x: x.sin()},
    "inputs in contexts of functions": {"first": lambda _, x: _Silu.apply(x)},  # type: ignore[no-untyped-call]
    "inputs in attributes": {"first": _remembers},
    "values in contexts of functions": {"activation": lambda _, x: _Silu.apply(x)},  # type: ignore[no-untyped-call]
    "values in attributes": {"activation": _remembers},
    "values that change in place": {"activation": _changed_in_place},
    "values of modules that run twice": {"first": lambda block, x: block.norm(functional.silu(block.norm(x)))},
    "results of opaque operators": {"activation": lambda _, x: functional.gelu(_twice(x) + 1)},
}


def _held(name: str) -> Program:
    actckpt.configure(opaque=["budget_programs.twice"])
    model, x = Net(chain, [Configured(**_HELD[name]) for _ in range(6)]), torch.randn(256, _WIDTH)

    def step() -> None:
        for block in model.blocks:
            vars(block).pop("last", None)
        model(x).square().mean().backward()

    return model, step


class _Beside(nn.Module):
    """Saves what it is given beside its hidden states, and gives it back where `is_handed_on`."""

    def __init__(self, *, is_handed_on: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)
        self.is_handed_on = is_handed_on

    def forward(self, x: Tensor, other: Tensor) -> Any:
        y = x + self.down(functional.gelu(self.up(x)) * other)
        return (y, other) if self.is_handed_on else y


BESIDE = ("mask", "bias", "handed on", "per block")


def beside(kind: str) -> Net:
    """Return a model of five blocks that are given a tensor beside their hidden states."""

    def run(net: Any, x: Tensor) -> Tensor:
        other = net.bias(x)
        if kind == "mask":
            other = (other > 0).float()
        x = net.stem(x)
        for block in net.blocks:
            if kind == "per block":
                other = other.sigmoid()  # saved by itself
            result = block(x, other)
            x, other = result if isinstance(result, tuple) else (result, other)
        return x.square().mean()

    others = {"stem": nn.Linear(_WIDTH, _WIDTH), "bias": nn.Linear(_WIDTH, 4 * _WIDTH)}
    return Net(run, [_Beside(is_handed_on=kind == "handed on") for _ in range(5)], **others)


def _of_beside(kind: str) -> Program:
    model, x = beside(kind), torch.randn(64, _WIDTH)
    return model, lambda: model(x).backward()


# Autocast.


def _casting(after: str, *rows: int, run: Callable[..., Tensor] = chain, num: int = 6, **others: nn.Module) -> Program:
    """Autocast ends after each block, the forward, the call of the model, its backward, or the whole step."""

    def forward(net: Any, x: Tensor) -> Tensor:
        with _autocast(after == "forward"):
            return run(net, x).float().square().mean()

    model = Net(forward, [_CastAlone() if after == "block" else Configured(64) for _ in range(num)], **others)
    inputs = [torch.randn(num, 64) for num in rows]

    def step() -> None:
        with _autocast(after == "step"):
            for x in inputs:
                with _autocast(after == "backward"):
                    with _autocast(after == "call"):
                        loss = model(x)
                    loss.backward()

    return model, step


class _CastAlone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Configured(64)

    def forward(self, x: Tensor) -> Tensor:
        with _autocast():
            return self.block(x)


def _weights_again(net: Any, x: Tensor) -> Tensor:
    """Read the weights of a block, which runs several times, beside it: casts are made once, and then cached."""
    for _ in range(4):
        x = net.blocks[0](x)
        x = x + functional.linear(functional.linear(x, net.blocks[0].up.weight), net.blocks[0].down.weight)
    return x


def _tied_head(net: Any, x: Tensor) -> Tensor:
    """Read the weight of the embedding, whose gradient is there at the end, with the cast for the head."""
    x = chain(net, x + net.embedding(torch.arange(len(x))))
    return functional.linear(x, net.embedding.weight).float().logsumexp(-1)


def _all_read(net: Any, x: Tensor) -> Tensor:
    """The model reads a weight before all blocks, which read it, too."""
    x = net.given(x)
    for block in net.blocks:
        x = block(x) + net.given(x)
    return x


# Several forwards, retained graphs, backward through backward.


def _together(*rows: int, is_summed: bool) -> Program:
    """All forwards, then their backwards, or one of their sum."""
    model, inputs = Net(chain, _mlps(6, 64)), [torch.randn(num, 64) for num in rows]

    def step() -> None:
        losses = [model(x).square().mean() for x in inputs]
        for loss in [torch.stack(losses).sum()] if is_summed else losses:
            loss.backward()

    return model, step


def _again(kind: str) -> Program:
    """Backward retains the graph of its loss, and that is read again."""
    model, x = Net(lambda net, x: net.head(chain(net, x)), _mlps(6, 64), head=nn.Linear(64, 2)), torch.randn(512, 64)

    def step() -> None:
        found = model(x).square()
        losses = [found[:, 0].mean(), found[:, 1].mean()] if kind == "parts" else [found.mean()] * 2
        losses[0].backward(retain_graph=True)
        if kind == "next forward":
            losses[1] = model(x).square().mean()
        losses[1].backward()

    return model, step


def _penalized(kind: str) -> Program:
    """The loss of a critic, with a penalty on its gradient at inputs: backward runs through a backward."""
    model = Net(lambda net, x: net.head(chain(net, x)), [Configured(16) for _ in range(5)], head=nn.Linear(16, 1))
    x = torch.randn(64, 16)
    other = x.cos()  # made in a step before its forward, it would not count

    def penalty() -> Tensor:
        mixed = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(mixed).sum(), mixed, create_graph=True)
        return 10 * (gradient.norm(dim=1) - 1).square().mean()

    def step() -> None:
        if kind == "before another backward":
            penalty().backward()
        first = penalty() if kind in ("alone", "first") else torch.zeros(())
        if kind != "alone":
            first = first + model(other).mean() - model(x).mean()
        (first + penalty() if kind == "last" else first).backward()

    return model, step


# Images.


class Residual(nn.Module):
    """A block of a residual network, that may halve the size of the image; its ReLU saves what the block returns."""

    def __init__(self, channels: int, stride: int = 1) -> None:
        super().__init__()
        wide = channels * stride
        self.first = nn.Conv2d(channels, wide, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(wide, wide, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(wide) for _ in range(2))
        self.skip = nn.Conv2d(channels, wide, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norms[0](self.first(x)))
        return torch.relu(self.norms[1](self.second(y)) + self.skip(x))


class _Convolved(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(16, 16, size, padding=size // 2)

    def forward(self, x: Tensor) -> Tensor:
        return x + functional.gelu(self.convolution(x))


def _skips() -> Program:
    """The first half of the blocks is read again by the second half, as in a UNet."""

    def run(net: Any, x: Tensor) -> Tensor:
        x, skips = net.stem(x), []
        for number, block in enumerate(net.blocks):
            x = block(x if number < 3 else x + skips.pop())
            skips += [x] if number < 3 else []
        return net.head(x)

    others = {"stem": nn.Conv2d(3, 8, 3, padding=1), "head": nn.Conv2d(8, 3, 1)}
    return _squares(Net(run, [Residual(8) for _ in range(6)], **others), torch.randn(4, 3, 24, 24))


def _residual_network(strides: list[int], between: Callable[[Tensor], Tensor] = lambda x: x) -> Program:
    def run(net: Any, x: Tensor) -> Tensor:
        x = net.stem(x).relu()
        for block in net.blocks:
            x = between(block(x))
        return net.head(x.mean((2, 3)))

    channels = list(itertools.accumulate([16, *strides], operator.mul))
    blocks = [Residual(*each) for each in zip(channels, strides, strict=False)]
    others = {"stem": nn.Conv2d(3, 16, 7, 2, 3), "head": nn.Linear(channels[-1], 10)}
    return _squares(Net(run, blocks, **others), torch.randn(4, 3, 48, 48))


PROGRAMS: dict[str, Callable[[], Program]] = {
    "language": _trained,
    "autocast inside": partial(_trained, casts=True),
    "autocast outside": partial(_trained, _autocast_outside),
    "low rank": partial(_trained, rank=4),
    "micro-batches in one autocast": partial(_trained, _micro_batches_in_one_autocast, 4, 4, 4),
    "two forwards in one loss": partial(_trained, _pairs, 4, 4),
    "chunked loss": partial(_trained, _chunked_loss),
    "retained graph": partial(_trained, _retained),
    "pipeline": partial(_trained, _pipeline, *[4] * 5),
    "encoder and decoder": _translation,
    "skips": _skips,
    "experts": _experts,
    "forces": _forces,
    "residual network": partial(_residual_network, [1, 2, 1, 2, 1]),
    "residual blocks with tanh between": partial(_residual_network, [1] * 5, torch.tanh),
    "kernels of two sizes": lambda: _squares(Net(chain, map(_Convolved, (3, 3, 9, 9))), torch.randn(2, 16, 8, 8)),
    "written view": lambda: _squares(Net(_written_view, _mlps(), first=nn.Linear(32, 32)), torch.randn(64, 32)),
    "large weight before blocks": lambda: _squares(
        Net(_between, _mlps(), first=nn.Linear(4096, 32)), torch.ones(8, 4096)
    ),
    "large weight after blocks": lambda: _squares(Net(_between, _mlps(), last=nn.Linear(32, 4096)), torch.ones(8, 32)),
    **{name: partial(_classified, loss) for name, loss in _LOSSES.items()},
    **{f"wide {where}": partial(_outside, where) for where in ("head", "stem", "between")},
    **{f"embedding and head, {kind}": partial(_embedded, kind) for kind in ("tied", "add", "cat", "stack", "apart")},
    **{f"loop, {name}": partial(_looped, name) for name in _LOOPS},
    **{name: partial(_held, name) for name in _HELD},
    **{f"{kind} beside hidden states": partial(_of_beside, kind) for kind in BESIDE},
    **{
        f"casts until the {after} ends, rows {rows}": partial(_casting, after, *rows)
        for after, rows in [
            *itertools.product(("block", "forward", "call", "backward"), [(64,)]),
            *itertools.product(("block", "backward"), [(512,)]),
            *itertools.product(("step",), [(64, 64), (16, 128), (128, 16), (16, 16, 64)]),
        ]
    },
    "casts, weights read again": lambda: _casting("call", 512, run=_weights_again, num=1),
    "casts, tied head": lambda: _casting("backward", 8, run=_tied_head, embedding=nn.Embedding(4096, 64)),
    "casts, all blocks read a weight": lambda: _casting("step", 16, 128, run=_all_read, given=nn.Linear(64, 64)),
    **{
        f"forwards of rows {rows}, {'summed' if is_summed else 'apart'}": partial(_together, *rows, is_summed=is_summed)
        for rows, is_summed in [
            *itertools.product([(256, 256), (1024, 256), (256, 1024, 512)], [False, True]),
            *itertools.product([(64, 64), (32, 128)], [True]),
        ]
    },
    **{f"retained graph, {kind}": partial(_again, kind) for kind in ("same loss", "parts", "next forward")},
    **{f"penalty {kind}": partial(_penalized, kind) for kind in ("alone", "first", "last", "before another backward")},
}
