"""Tiny models with random weights, one of each family that the transformers fallback is meant for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    CodeGenConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GPTJConfig,
    GPTNeoXConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    PhiConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Qwen3Config,
)

VOCAB_SIZE = 97
CONTEXT_TOKENS = 64
WINDOW = 5
"""Of the models with a sliding window; shorter than any text worth testing with."""

_SPECIAL = {"vocab_size": VOCAB_SIZE, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_SHAPE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": CONTEXT_TOKENS,
}
_GROUPED = _SPECIAL | _SHAPE | {"num_key_value_heads": 2, "head_dim": 12}
_GPT2 = _SPECIAL | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT_TOKENS}
_MIXED_LAYERS = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}

FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "opt": lambda: OPTConfig(**_SPECIAL, **_SHAPE, ffn_dim=48, word_embed_proj_dim=16),
    "gpt2": lambda: GPT2Config(**_GPT2),
    "phi": lambda: PhiConfig(**_SPECIAL, **_SHAPE, partial_rotary_factor=0.5),
    "codegen": lambda: CodeGenConfig(**_GPT2, rotary_dim=4, tie_word_embeddings=False),
    "gptj": lambda: GPTJConfig(**_GPT2, rotary_dim=4, tie_word_embeddings=False),
    "gpt_neox": lambda: GPTNeoXConfig(**_SPECIAL, **_SHAPE),
    "gemma": lambda: GemmaConfig(**_GROUPED),
    "gemma2": lambda: Gemma2Config(
        **_GROUPED, **_MIXED_LAYERS, attn_logit_softcapping=2.0, final_logit_softcapping=3.0
    ),
    "gemma3": lambda: Gemma3TextConfig(**_GROUPED, **_MIXED_LAYERS),
    "mistral": lambda: MistralConfig(**_GROUPED, sliding_window=WINDOW),
    "mixtral": lambda: MixtralConfig(**_GROUPED, num_local_experts=4),
    "qwen2_moe": lambda: Qwen2MoeConfig(
        **_GROUPED,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=24,
    ),
    "qwen3": lambda: Qwen3Config(**_GROUPED),
    "gpt_oss": lambda: GptOssConfig(**_GROUPED, **_MIXED_LAYERS, num_local_experts=4),
    "llama": lambda: LlamaConfig(**_GROUPED),
}


def save_random_model(config: PreTrainedConfig, folder: Path, *, seed: int = 0) -> None:
    """Write a safetensors folder. The weights are large enough that every part of the model tells."""
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2, generator=generator)
            else:
                parameter.add_(torch.empty_like(parameter).normal_(std=0.2, generator=generator))
    model.save_pretrained(folder)
