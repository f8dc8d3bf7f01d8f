"""`apply` and `remove`: which blocks, what stays as it was, what goes wrong."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import subprocess
import sys
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import Log, assert_equal, gradients, leaf
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import actckpt


class Block(torch.nn.Module):
    """A residual block that counts its calls."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(width, width)
        self.act = torch.nn.GELU()
        self.drop = torch.nn.Dropout(0.3)
        self.calls = 0

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        self.calls += 1
        return x + self.drop(self.act(self.linear(x))) * scale


class Other(Block):
    """A second kind of block."""


class Model(torch.nn.Module):
    def __init__(self, kind: type[Block] = Block) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(8, 8)
        self.layers = torch.nn.ModuleList(kind() for _ in range(3))
        self.head = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x, scale=0.5)
        return self.head(x)


NAMES = ("layers.0", "layers.1", "layers.2")


def _step(model: torch.nn.Module) -> Any:
    model.zero_grad()
    torch.manual_seed(3)
    y = model(torch.linspace(-1, 1, 16).view(2, 8))
    y.square().sum().backward()
    return y.detach(), gradients(model)


def _reruns(model: Any) -> list[int]:
    for layer in model.layers:
        layer.calls = 0
    _step(model)
    return [layer.calls - 1 for layer in model.layers]


@pytest.mark.parametrize(
    ("blocks", "names"),
    [
        (None, NAMES),
        (Block, NAMES),
        ((Block, torch.nn.LayerNorm), (*NAMES, "head.0")),
        ("layers.1", ("layers.1",)),
        ("layers.*", NAMES),
        ("layers.**", NAMES),
        ("**", ("embed", *NAMES, "head")),
        (lambda module: not isinstance(module, torch.nn.Linear), (*NAMES, "head")),
        ("layers.[!1]", ("layers.0", "layers.2")),
        ("**.linear", tuple(f"{name}.linear" for name in NAMES)),
        (["layers.*", "**.linear", "layers.1.act"], (*NAMES[:2], "layers.1.act", NAMES[2])),
        ([Block, torch.nn.Linear], ("embed", *NAMES, "head.1")),
        ("layers.?", NAMES),
        (["layers.2", "layers.0"], ("layers.0", "layers.2")),
        (["head", Block], (*NAMES, "head")),
        (lambda module: isinstance(module, Block), NAMES),
        (["head", "head.*"], ("head",)),
        (["head", "head.1"], ("head", "head.1")),
    ],
)
def test_blocks_are_found_by_type_name_pattern_predicate_or_repetition(blocks: Any, names: Any) -> None:
    model = Model()
    expected = _step(model)
    assert actckpt.apply(model, blocks=blocks) == names
    assert_equal(_step(model), expected)
    assert actckpt.remove(model) == names
    assert_equal(_step(model), expected)


def test_each_block_reruns_once_per_backward_and_never_without_one_or_after_remove() -> None:
    model = Model()
    assert _reruns(model) == [0, 0, 0]
    expected = model.eval()(torch.ones(2, 8)).detach()
    model.train()
    actckpt.apply(model, blocks=["layers.0", "layers.2"])
    assert _reruns(model) == [1, 0, 1]
    with pytest.raises(actckpt.errors.BlocksError, match=r"2 of 3 blocks.*'layers\.0'"):
        actckpt.apply(model)
    assert _reruns(model) == [1, 0, 1]
    before = [layer.calls for layer in model.layers]
    with torch.no_grad():
        assert_equal(model.eval()(torch.ones(2, 8)), expected)
    assert [layer.calls - num for layer, num in zip(model.layers, before, strict=True)] == [1, 1, 1]
    actckpt.remove(model)
    assert _reruns(model) == [0, 0, 0]


def test_state_dict_types_signature_and_parameters_stay() -> None:
    model = Model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    kinds = [type(module) for module in model.modules()]
    signature = inspect.signature(model.layers[0].forward)
    actckpt.apply(model)
    assert_equal(dict(model.state_dict()), before)
    assert [type(module) for module in model.modules()] == kinds
    assert inspect.signature(model.layers[0].forward) == signature
    model.load_state_dict(before)
    assert set(dict(model.named_parameters())) == set(before)


def test_hooks_of_a_block_run_once_and_see_what_they_saw_before() -> None:
    calls: list[str] = []
    model = Model()
    block = model.layers[1]
    block.register_forward_pre_hook(lambda *_: calls.append("pre"))
    block.register_forward_hook(lambda *_: calls.append("forward"))
    block.register_full_backward_pre_hook(lambda *_: calls.append("backward pre"))
    block.register_full_backward_hook(lambda *_: calls.append("backward"))
    expected = _step(model)
    before, calls[:] = list(calls), []
    actckpt.apply(model)
    assert_equal(_step(model), expected)
    assert calls == before


def test_a_module_of_another_type_may_run_the_forward_of_a_block() -> None:
    model = Model()
    actckpt.apply(model, blocks="layers.0")
    around = torch.nn.Module()
    around.forward = model.layers[0].forward
    around(leaf(4, 8)).sum().backward()
    assert model.layers[0].linear.weight.grad is not None


@pytest.mark.parametrize("options", [{}, {"policy": "matmuls"}, {"policy": "offload"}, {"activation_budget": "50%"}])
@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("kind", [Block, type("Functional", (torch.nn.Module,), {})])  # as `higher` makes
def test_a_shallow_copy_raises_and_does_not_run_with_the_parameters_of_the_original(
    options: dict[str, Any], hooked: bool, kind: type[torch.nn.Module]
) -> None:
    model = Model()
    actckpt.apply(model, blocks=Block, **options)
    copied: Any = kind()
    copied.__dict__.update(vars(copy.copy(model.layers[0])))
    copied._modules = {name: copy.deepcopy(module) for name, module in copied._modules.items()}
    if hooked:
        copied.register_forward_hook(lambda *_: None)
    with pytest.raises(actckpt.errors.BlocksError, match="a shallow copy of a Block runs"):
        copied(leaf(4, 8))
    model.layers[0](leaf(4, 8))


def test_a_forward_that_was_patched_before_is_kept_and_put_back() -> None:
    model = Model()
    calls = Log()
    block = model.layers[1]
    original = block.forward

    def patched(x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        calls.append(1)
        return original(x, **kwargs)

    block.forward = patched
    actckpt.apply(model)
    _step(model)
    assert len(calls) == 2
    actckpt.remove(model)
    assert block.__dict__["forward"] is patched
    assert "forward" not in model.layers[0].__dict__


def test_blocks_that_are_not_made_before_their_first_forward_are_named() -> None:
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.LazyLinear(8), torch.nn.GELU()) for _ in range(3)))
    with pytest.raises(actckpt.errors.BlocksError, match=r"'0\.weight' of block '0' is not made before"):
        actckpt.apply(model)
    model(torch.randn(2, 8))
    assert actckpt.apply(model) == ("0", "1", "2")


@pytest.mark.parametrize(
    ("blocks", "words"),
    [
        ("layer.1", r"(?s)'layer\.1'.*Nearest: .*layers\.1"),
        ("zzzzzzzz", r"it has 16\. The first: embed, layers\.0"),
        (Other, "(?s)Other.*Block.*blocks="),
        (lambda module: False, "no block that matches"),
        ([], "no block"),
        (3, "a int"),
        (["layers.0", 4], "a int"),
        ("layers", r"'layers' is a ModuleList, which is never called.* 'layers\.\*'"),
        (torch.nn.ModuleList, "no block that matches"),
    ],
)
def test_blocks_that_match_nothing_are_named(blocks: Any, words: str) -> None:
    model = Model()
    with pytest.raises(actckpt.errors.BlocksError, match=words):
        actckpt.apply(model, blocks=blocks)
    assert _reruns(model) == [0, 0, 0]


def test_a_module_as_block_is_answered_with_its_name() -> None:
    model = Model()
    for blocks in (model.embed, [torch.nn.LayerNorm, model.embed]):
        with pytest.raises(actckpt.errors.BlocksError, match=r"has a module, a Linear\. Pass its name, 'embed'"):
            actckpt.apply(model, blocks=blocks)
    with pytest.raises(actckpt.errors.BlocksError, match="It is not in the model"):
        actckpt.apply(model, blocks=torch.nn.Linear(4, 4))


def test_one_block_that_stands_twice_in_a_model_is_one_block() -> None:
    block = Block()
    model = torch.nn.Sequential(block, block, torch.nn.Linear(8, 2))
    assert actckpt.apply(model, blocks=Block) == ("0",)
    expected_runs = 4
    model(leaf(2, 8)).sum().backward()
    assert block.calls == expected_runs
    assert actckpt.remove(model) == ("0",)


_ADDMM = torch.ops.aten.addmm.default


def _keep_addmm(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
    return op == _ADDMM


def _keep_values_of_addmm(info: actckpt.SavedTensorInfo) -> str:
    return "keep" if info.op == _ADDMM else "recompute"


_POLICIES: dict[str, dict[str, Any]] = {
    "overload": {"policy": [_ADDMM]},
    "packet": {"policy": [torch.ops.aten.addmm]},
    "name": {"policy": ["aten.addmm"]},
    "tuple": {"policy": (_ADDMM, torch.ops.higher_order.cond)},
    "set": {"policy": {_ADDMM}},
    "PerOp": {"policy": actckpt.policies.PerOp({torch.ops.aten.addmm: "keep", torch.ops.higher_order.cond: "offload"})},
    "context_fn": {"context_fn": partial(create_selective_checkpoint_contexts, [_ADDMM])},
    "function": {"policy": _keep_addmm},
    "values": {"policy": _keep_values_of_addmm},
    "action": {"policy": actckpt.Action.RECOMPUTE},
    "rerun": {"policy": "recompute", "early_stop": False},
}

_LOAD = """
import sys, torch, actckpt
model = torch.load(sys.argv[1], weights_only=False)
x = torch.linspace(-1, 1, 16, device=next(model.parameters()).device).view(2, 8)
actckpt.reset_stats()
model(x).square().sum().backward()
assert actckpt.stats().replayed_operators == int(sys.argv[2]), actckpt.stats()
assert actckpt.report(model).blocks_ran == ("0", "1", "2")
torch.save([p.grad for p in model.parameters()], sys.argv[1])
"""


def _layers() -> torch.nn.Sequential:
    torch.manual_seed(2)
    layers = (torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Sigmoid())
    return torch.nn.Sequential(*(torch.nn.Sequential(*copy.deepcopy(layers)) for _ in range(3)))


def _num_repeated(model: torch.nn.Module) -> int:
    """Return how many operators are replayed and regions rerun in a step."""
    actckpt.reset_stats()
    model.zero_grad()
    model(torch.linspace(-1, 1, 16).view(2, 8)).square().sum().backward()
    return actckpt.stats().replayed_operators + actckpt.stats().rerun_regions


def _saved_by_torch(model: torch.nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


_COPIES = {
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch": _saved_by_torch,
    "deepcopy": copy.deepcopy,
}
#: Per block: a rerun, or what is replayed, of three operators or of what follows the product that is kept.
_NUM_REPEATED = {"rerun": 3, "action": 9}


@pytest.mark.parametrize("way", _COPIES)
@pytest.mark.parametrize("options", _POLICIES)
def test_an_applied_model_can_be_saved_and_copied_whatever_its_policy(options: str, way: str) -> None:
    model, plain = _layers(), _layers()
    actckpt.apply(model, **({"policy": None} | _POLICIES[options]))
    num = _NUM_REPEATED.get(options, 6)
    assert [_num_repeated(model) for _ in range(2)][-1] == num  # the first one is audited
    before, twin = [p.grad.clone() for p in model.parameters()], _COPIES[way](model)
    with torch.no_grad():
        for parameter in (*twin.parameters(), *plain.parameters()):
            parameter.mul_(2)
    assert [_num_repeated(twin) for _ in range(2)][-1] == num and _num_repeated(plain) == 0
    assert_equal(gradients(twin), gradients(plain))
    assert_equal(gradients(model), before)
    _num_repeated(model)
    assert_equal(gradients(model), before)
    assert actckpt.remove(twin) == actckpt.remove(model) == ("0", "1", "2")


@pytest.mark.parametrize("options", ["packet", "PerOp"])
def test_a_saved_model_is_loaded_by_a_fresh_process(options: str, tmp_path: Path) -> None:
    model = _layers()
    actckpt.apply(model, **_POLICIES[options])
    expected = _num_repeated(model)
    assert expected == 6
    torch.save(model, tmp_path / "model.pt")
    subprocess.run([sys.executable, "-c", _LOAD, str(tmp_path / "model.pt"), str(expected)], check=True)
    assert_equal(torch.load(tmp_path / "model.pt"), gradients(model))


class _Skipping(Model):
    """Calls the parts of its second block, not the block."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](self.embed(x))
        x = self.layers[1].act(self.layers[1].linear(x))
        return self.head(self.layers[2](x))


def test_a_block_that_does_not_run_in_a_step_with_a_backward_is_told_once() -> None:
    model = _Skipping()
    actckpt.apply(model)
    with torch.no_grad():
        model(torch.ones(2, 8))
    model(torch.ones(2, 8)).sum()  # no backward
    with pytest.warns(
        UserWarning, match=r"1 of 3 blocks did not run in a step that called backward: layers\.1\."
    ) as warned:
        _step(model)
    assert len(warned) == 1
    _step(model)
    report = actckpt.report(model)
    assert report.blocks_patched == NAMES and report.blocks_ran == ("layers.0", "layers.2")
    assert str(report).startswith("2 of 3 blocks ran (policy='recompute')\nnot run: layers.1\n")
    assert report.as_dict()["blocks_ran"] == ("layers.0", "layers.2")


class _Flow(torch.nn.Module):
    """Is trained by methods, as normalizing flows are: no module of its blocks is called either."""

    def __init__(self) -> None:
        super().__init__()
        self.flows = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        for flow in self.flows:
            x = torch.nn.functional.linear(x, flow.weight, flow.bias)
        return x.square().mean()


@pytest.mark.parametrize("options", [{}, {"policy": ["aten.mm"]}, {"activation_budget": "50%"}], ids=str)
def test_blocks_of_which_none_is_called_are_told_once_and_parameters_can_be_copied_and_sent(
    options: dict[str, Any],
) -> None:
    model = _Flow()
    actckpt.apply(model, blocks="flows.*", **options)
    with pytest.warns(UserWarning, match=r"3 of 3 blocks did not run in a step that called backward: flows\.0") as told:
        for _ in range(2):
            model.loss(torch.ones(2, 8)).backward()
    assert len(told) == 1
    assert all(not parameter._backward_hooks for parameter in model.parameters())
    actckpt.remove(model)
    actckpt.apply(model, blocks="flows.*", **options)
    copied = copy.deepcopy(model)
    if model.flows[0].weight.device.type in ("cpu", "cuda"):  # torch sends no tensors of others
        ForkingPickler.dumps(next(model.parameters()))
    actckpt.remove(model)
    model.loss(torch.ones(2, 8)).backward()  # without a warning
    pickle.loads(pickle.dumps(copied.flows))
    actckpt.apply(model, blocks="flows.*", **options)
    pickle.loads(pickle.dumps(model))
    actckpt.remove(model)
    assert all(not parameter._backward_hooks for parameter in model.parameters())


_OFFLOAD: dict[str, Any] = {"policy": actckpt.Action.OFFLOAD, "min_bytes": 0}  # takes the options of its name


@pytest.mark.parametrize("options", [{}, _OFFLOAD, {"policy": ["aten.addmm"]}], ids=str)
def test_where_all_blocks_run_nothing_is_told_and_nothing_is_left_on_what_they_return(options: dict[str, Any]) -> None:
    model = Model()
    actckpt.apply(model, **options)
    assert actckpt.report(model).blocks_ran == ()
    actckpt.reset_stats()
    for _ in range(2):
        _step(model)
    assert (actckpt.stats().offloaded_bytes > 0) == (options is _OFFLOAD)
    hidden = model.layers[0](torch.ones(2, 8, requires_grad=True))
    assert hidden._backward_hooks is None
    assert actckpt.report(model).blocks_ran == actckpt.report(model).blocks_patched == NAMES


@pytest.mark.parametrize("wrap", [tuple, list, lambda parts: {"first": parts[0], "second": [parts[1]]}])
def test_blocks_that_return_containers_are_watched_too(wrap: Any) -> None:
    class Several(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> Any:
            return wrap([x.detach(), self.linear(x)])

    model = torch.nn.ModuleList([Several(), Several()])
    actckpt.apply(model, blocks=Several)
    result = model[1](torch.ones(2, 8))
    last = result["second"][0] if isinstance(result, dict) else result[1]
    with pytest.warns(UserWarning, match="1 of 2 blocks did not run"):
        last.sum().backward()


@pytest.mark.parametrize("way", _COPIES)
def test_a_copy_of_a_model_has_all_its_blocks_and_one_of_a_block_knows_of_no_others(way: str) -> None:
    model = _layers()
    actckpt.apply(model)
    copied = _COPIES[way](model[1])
    copied(torch.randn(2, 8, requires_grad=True)).sum().backward()  # without a warning of blocks that did not run
    assert actckpt.report(copied).blocks_ran == (type(copied).__name__,)
    assert not any(actckpt.report(model).blocks_ran)
    copied = _COPIES[way](model)
    with pytest.warns(UserWarning, match=r"1 of 3 blocks did not run.*: 2\."):
        copied[:2](torch.randn(2, 8)).sum().backward()


def test_a_shallow_copy_of_a_model_is_not_removed_from() -> None:
    model = _layers()
    actckpt.apply(model)
    with pytest.raises(
        actckpt.errors.BlocksError, match=r"^remove: this Sequential is a shallow copy \(copy\.copy\) .*copy\.deepcopy"
    ):
        actckpt.remove(copy.copy(model))
    assert actckpt.report(model).blocks_patched == ("0", "1", "2")
    assert actckpt.remove(model[:2]) == ("0", "1"), "a part of the model, which it was given for, is none"
    deep = copy.deepcopy(model)
    assert actckpt.remove(deep) == ("2",) == actckpt.remove(model)


class _Around(torch.nn.Module):
    """Checkpoints its blocks where a flag is on, as models of Diffusers do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(3))
        self.gradient_checkpointing = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            is_on = self.gradient_checkpointing and self.training
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) if is_on else block(x)
        return x


@pytest.mark.parametrize("options", [{"policy": "matmuls"}, {"activation_budget": "90%"}], ids=str)
@pytest.mark.parametrize("is_on_before", [True, False])
def test_checkpointing_of_the_model_itself_is_taken_over(options: dict[str, Any], is_on_before: bool) -> None:
    x = torch.randn(4, 8)

    def calls_in_a_step(model: _Around) -> list[int]:
        before = [block.calls for block in model.blocks]
        torch.manual_seed(0)
        model(x).sum().backward()
        return [block.calls - num for block, num in zip(model.blocks, before, strict=True)]

    model = _Around()
    plain = copy.deepcopy(model)
    model.gradient_checkpointing = is_on_before
    names = actckpt.apply(model, **options)
    assert names == ("blocks.0", "blocks.1", "blocks.2")
    model.gradient_checkpointing = True
    for _ in range(3):
        calls_in_a_step(model)
    assert calls_in_a_step(model) == [1, 1, 1], "a policy runs no code again, and theirs does"
    assert actckpt.report(model).blocks_ran == names
    actckpt.remove(model)
    assert calls_in_a_step(model) == [2, 2, 2], "the model's own is back"
    for _ in range(5):
        calls_in_a_step(plain)
    assert_equal(gradients(model), gradients(plain))
