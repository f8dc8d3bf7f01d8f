"""`apply` finds the blocks of Transformers' models that are not built as one row of layers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from held import Held, assert_holds_no_more_than_its_own, compare

import actckpt

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated.*")

_TEXT = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}


def _tokens() -> tuple[torch.Tensor]:
    return (torch.randint(1, 100, (4, 32)),)


def test_rows_of_rows_are_never_called_and_equal_the_layers_in_them() -> None:
    config = transformers.FunnelConfig(
        vocab_size=100, block_sizes=[2, 2, 2], num_decoder_layers=2, d_model=32, n_head=4, d_head=8, d_inner=64
    )
    torch.manual_seed(0)
    model = transformers.FunnelModel(config)
    inputs = _tokens()
    names, plain, _, ours = compare(model, inputs, None)
    by_type = copy.deepcopy(model)
    layer = transformers.models.funnel.modeling_funnel.FunnelLayer
    assert actckpt.apply(by_type, blocks=layer) == names
    assert len(names) == 8
    named = Held(by_type, inputs)
    assert (ours.after_forward, ours.peak) == (named.after_forward, named.peak)
    assert ours.peak < 0.5 * plain.peak


def test_one_layer_that_is_called_many_times_is_one_block() -> None:
    torch.manual_seed(0)
    model = transformers.AlbertModel(transformers.AlbertConfig(**_TEXT, embedding_size=16))
    names, plain, _, ours = compare(model, _tokens(), None)
    assert len(names) == 1
    assert ours.peak < 0.5 * plain.peak


def _bert() -> Any:
    return transformers.BertModel(transformers.BertConfig(**_TEXT)), _tokens(), 4


def _segformer() -> Any:
    return transformers.SegformerModel(transformers.SegformerConfig()), (torch.randn(2, 3, 128, 128),), 8


def _wav2vec2() -> Any:
    config = transformers.Wav2Vec2Config(
        **_TEXT, conv_dim=(32,) * 7, num_conv_pos_embedding_groups=4, apply_spec_augment=False, layerdrop=0.0
    )
    return transformers.Wav2Vec2Model(config), (torch.randn(2, 8000),), 11


@pytest.mark.parametrize("made", [_bert, _segformer, _wav2vec2])
def test_the_blocks_of_a_model_peak_no_higher_than_with_its_own_checkpointing(made: Any) -> None:
    torch.manual_seed(0)
    model, inputs, num_blocks = made()
    assert_holds_no_more_than_its_own(
        model, inputs, lambda model: model.gradient_checkpointing_enable(), num_blocks=num_blocks, of_plain=1.0
    )
