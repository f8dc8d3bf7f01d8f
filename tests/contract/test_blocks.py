"""`apply` and `remove`: which blocks, what stays as it was, what goes wrong."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from typing import Any

import pytest
import torch
from oracle import Log, assert_equal, gradients, leaf

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
        ("layers.*", None),
        ("layers.?", NAMES),
        (["layers.2", "layers.0"], ("layers.0", "layers.2")),
        (["head", Block], (*NAMES, "head")),
        (lambda module: isinstance(module, Block), NAMES),
    ],
)
def test_blocks_are_found_by_type_name_pattern_predicate_or_repetition(blocks: Any, names: Any) -> None:
    model = Model()
    expected = _step(model)
    applied = actckpt.apply(model, blocks=blocks)
    if names is None:
        names = tuple(name for name, _ in model.named_modules() if name.startswith("layers."))
    assert applied == names
    assert_equal(_step(model), expected)
    assert actckpt.remove(model) == names
    assert_equal(_step(model), expected)


def test_each_block_reruns_once_per_backward_and_never_after_remove() -> None:
    model = Model()
    assert _reruns(model) == [0, 0, 0]
    actckpt.apply(model, blocks=["layers.0", "layers.2"])
    assert _reruns(model) == [1, 0, 1]
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


def test_a_deep_copy_checkpoints_itself_independently_of_the_original() -> None:
    model = Model()
    actckpt.apply(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(2)
    before = _step(model)
    reference = copy.deepcopy(twin)
    actckpt.remove(reference)
    for layer in model.layers:
        layer.calls = 0
    assert_equal(_step(twin), _step(reference))
    assert [layer.calls for layer in model.layers] == [0, 0, 0]
    assert _reruns(twin) == [1, 1, 1]
    assert actckpt.remove(twin) == NAMES
    assert_equal(_step(model), before)
    assert _reruns(model) == [1, 1, 1]


@pytest.mark.parametrize("way", ["pickle", "torch"])
def test_a_saved_model_comes_back_checkpointed(way: str) -> None:
    model = Model()
    actckpt.apply(model, early_stop=False)
    expected = _step(model)
    if way == "pickle":
        loaded = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
    assert_equal(_step(loaded), expected)
    assert _reruns(loaded) == [1, 1, 1]
    assert actckpt.remove(loaded) == NAMES
    assert actckpt.remove(model) == NAMES


def test_options_reach_every_region() -> None:
    entered: list[str] = []

    def contexts() -> Any:
        entered.append("called")
        return torch.enable_grad(), torch.enable_grad()

    model = Model()
    actckpt.apply(model, policy=None, context_fn=contexts)
    _step(model)
    assert entered == ["called"] * 3


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


def test_applying_twice_names_the_first_block_and_changes_nothing() -> None:
    model = Model()
    actckpt.apply(model, blocks="layers.1")
    with pytest.raises(actckpt.BlocksError, match=r"1 of 3 blocks.*'layers\.1'"):
        actckpt.apply(model)
    assert _reruns(model) == [0, 1, 0]


def test_removing_from_an_untouched_model_raises() -> None:
    with pytest.raises(actckpt.BlocksError, match="remove"):
        actckpt.remove(Model())


@pytest.mark.parametrize(
    ("blocks", "words"),
    [
        ("layer.1", r"(?s)'layer\.1'.*Nearest: .*layers\.1"),
        ("zzzzzzzz", "Nearest: none"),
        (Other, "(?s)Other.*Block.*blocks="),
        (lambda module: False, "no block that matches"),
        ([], "no block"),
        (3, "a int"),
        (["layers.0", 4], "a int"),
    ],
)
def test_blocks_that_match_nothing_are_named(blocks: Any, words: str) -> None:
    model = Model()
    with pytest.raises(actckpt.BlocksError, match=words):
        actckpt.apply(model, blocks=blocks)
    assert _reruns(model) == [0, 0, 0]


def test_a_model_without_repeated_blocks_names_its_types() -> None:
    with pytest.raises(actckpt.BlocksError, match=r"(?s)no repeated blocks.*GELU.*Linear"):
        actckpt.apply(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()))


def test_unknown_policies_raise_before_anything_is_changed() -> None:
    model = Model()
    with pytest.raises(ValueError, match="'recompute'"):
        actckpt.apply(model, policy="sometimes")
    assert _reruns(model) == [0, 0, 0]


def test_one_block_that_stands_twice_in_a_model_is_one_block() -> None:
    block = Block()
    model = torch.nn.Sequential(block, block, torch.nn.Linear(8, 2))
    assert actckpt.apply(model, blocks=Block) == ("0",)
    expected_runs = 4
    model(leaf(2, 8)).sum().backward()
    assert block.calls == expected_runs
    assert actckpt.remove(model) == ("0",)


def test_evaluation_without_grad_runs_each_block_once() -> None:
    model = Model().eval()
    expected = model(torch.ones(2, 8))
    actckpt.apply(model)
    for layer in model.layers:
        layer.calls = 0
    with torch.no_grad():
        assert_equal(model(torch.ones(2, 8)), expected.detach())
    assert [layer.calls for layer in model.layers] == [1, 1, 1]
