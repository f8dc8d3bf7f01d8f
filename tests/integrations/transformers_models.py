"""Small Transformers models with random weights: what is tested is the library's code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf

_LAYERS = 3
_VOCABULARY = 64
_COMMON = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def _causal(model: str, config: str, **options: Any) -> Callable[[], Any]:
    return lambda: getattr(hf, model)(getattr(hf, config)(**{**_COMMON, **options}))


def _deepseek() -> Any:
    heads = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    experts = {"moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2}
    options = {**_COMMON, **heads, **experts, "num_key_value_heads": 4, "topk_group": 1, "first_k_dense_replace": 1}
    return hf.DeepseekV3ForCausalLM(hf.DeepseekV3Config(**options))


def _qwen3_next() -> Any:
    linear = {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
    linear |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    options = {**_COMMON, **_EXPERTS, **linear, "num_hidden_layers": 4, "head_dim": 8}
    return hf.Qwen3NextForCausalLM(hf.Qwen3NextConfig(**options, shared_expert_intermediate_size=16))


def _falcon() -> Any:
    options = {"hidden_size": 32, "num_hidden_layers": _LAYERS, "num_attention_heads": 4, "vocab_size": _VOCABULARY}
    return hf.FalconForCausalLM(hf.FalconConfig(**options))


def _bloom() -> Any:
    return hf.BloomForCausalLM(hf.BloomConfig(hidden_size=32, n_layer=_LAYERS, n_head=4, vocab_size=_VOCABULARY))


def _gpt2() -> Any:
    options = {"n_embd": 32, "n_layer": _LAYERS, "n_head": 4, "vocab_size": _VOCABULARY, "n_positions": 64}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**options, resid_pdrop=0.1))


def _gemma3n() -> Any:
    options = {**_COMMON, "head_dim": 8, "num_hidden_layers": 4, "num_kv_shared_layers": 2}
    per_layer = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": _VOCABULARY, "laurel_rank": 4}
    types = ["sliding_attention", "full_attention"] * 2
    config = hf.Gemma3nTextConfig(
        **options, **per_layer, layer_types=types, sliding_window=8, activation_sparsity_pattern=[0.0] * 4
    )
    return hf.Gemma3nForCausalLM(config)


def _t5() -> Any:
    options = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": _LAYERS, "num_heads": 4, "vocab_size": _VOCABULARY}
    return hf.T5ForConditionalGeneration(hf.T5Config(**options, decoder_start_token_id=0))


def _whisper() -> Any:
    layers = {f"{part}_{what}": n for part in ("encoder", "decoder") for what, n in (("layers", 2), ("ffn_dim", 64))}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    sizes = {"d_model": 32, "max_source_positions": 16, "max_target_positions": 32, "num_mel_bins": 8}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = hf.WhisperConfig(**layers, **heads, **sizes, **tokens, vocab_size=_VOCABULARY)
    return hf.WhisperForConditionalGeneration(config)


MODELS: dict[str, Callable[[], Any]] = {
    "llama eager": _causal("LlamaForCausalLM", "LlamaConfig", attn_implementation="eager"),
    "llama": _causal("LlamaForCausalLM", "LlamaConfig", attention_dropout=0.1),
    "mistral": _causal("MistralForCausalLM", "MistralConfig", sliding_window=8),
    "gemma 2": _causal("Gemma2ForCausalLM", "Gemma2Config", head_dim=8, sliding_window=8),
    "gemma 3": _causal("Gemma3ForCausalLM", "Gemma3TextConfig", head_dim=8, sliding_window=8),
    "gemma 3n": _gemma3n,
    "mixtral": _causal("MixtralForCausalLM", "MixtralConfig", num_local_experts=4),
    "qwen 3 moe": _causal("Qwen3MoeForCausalLM", "Qwen3MoeConfig", **_EXPERTS, head_dim=8),
    "deepseek v3": _deepseek,
    "falcon": _falcon,
    "bloom": _bloom,
    "gpt 2": _gpt2,
    "recurrent gemma": _causal(
        "RecurrentGemmaForCausalLM", "RecurrentGemmaConfig", lru_width=32, attention_window_size=8
    ),
    "qwen3 next": _qwen3_next,
    "gpt oss": _causal(
        "GptOssForCausalLM", "GptOssConfig", head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=8
    ),
    "t5": _t5,
    "whisper": _whisper,
}


def make(name: str) -> Any:
    """Return a model with the same weights each time."""
    torch.manual_seed(1)
    return MODELS[name]().train()


def batch(name: str, *, tokens: int = 12) -> dict[str, torch.Tensor]:
    """Return the inputs of one step."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, _VOCABULARY, (2, tokens), generator=generator)
    if name == "whisper":
        return {"input_features": torch.randn(2, 8, 32, generator=generator), "labels": ids}
    return {"input_ids": ids, "labels": ids}


def cached_tensors(cache: Any) -> list[torch.Tensor]:
    """Return the keys and values, or states, that a cache holds."""
    halves = [getattr(cache, half, None) for half in ("self_attention_cache", "cross_attention_cache")]
    if halves[0] is not None:
        return [tensor for half in halves for tensor in cached_tensors(half)]
    found = []
    for layer in getattr(cache, "layers", ()):
        for name in ("keys", "values", "conv_states", "recurrent_states"):
            held = getattr(layer, name, None)
            values = held.values() if isinstance(held, dict) else [held]
            found += [value for value in values if isinstance(value, torch.Tensor)]
    return found
