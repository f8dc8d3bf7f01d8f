"""The options of `checkpoint` are defined once: what repeats them says the same."""

import copy
import inspect
import pickle
import typing

import torch

import actckpt
from actckpt._options import ApplyKeywords, CheckpointKeywords, CheckpointOptions, SequentialKeywords


def test_checkpoint_takes_each_option_with_its_default() -> None:
    parameters = inspect.signature(actckpt.checkpoint).parameters.values()
    keywords = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert keywords == CheckpointOptions()._asdict()
    assert tuple(keywords) == CheckpointOptions._fields


def test_type_checkers_are_told_the_type_of_each_option() -> None:
    types = typing.get_type_hints(CheckpointOptions)
    assert typing.get_type_hints(CheckpointKeywords) == types
    assert types.keys() - typing.get_type_hints(ApplyKeywords).keys() == {"policy"}
    assert types.keys() - typing.get_type_hints(SequentialKeywords).keys() == {"use_reentrant"}


def test_copies_and_pickles_hold_the_operators_of_a_policy() -> None:
    options = CheckpointOptions(policy=[torch.ops.aten.mm, torch.ops.aten.addmm.default], early_stop=False)
    assert copy.deepcopy(options) == options
    assert pickle.loads(pickle.dumps(options)) == options
