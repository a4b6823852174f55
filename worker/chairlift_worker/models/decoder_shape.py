"""What the lean decoder has to know of a model, read from its transformers config."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from chairlift_client.errors import ModelError
from chairlift_worker.models.architectures import architecture_name

ARCHITECTURES = frozenset(
    {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "SmolLM3ForCausalLM"}
)

_FIXED_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
"""Those whose frequencies do not depend on how long a sequence has become."""


class LayerShape(NamedTuple):
    """In what layers of one model may differ."""

    window: int | None
    rotates: bool


class DecoderShape(NamedTuple):
    """Sizes and switches of a model of the Llama shape."""

    vocab_size: int
    context_tokens: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_epsilon: float
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    layers: tuple[LayerShape, ...]

    @property
    def head_bounds(self) -> tuple[int, int]:
        """Where the key heads and the value heads begin among a layer's Hq + 2 * Hkv heads."""
        return self.num_heads, self.num_heads + self.num_kv_heads


def decoder_shape(config: PreTrainedConfig) -> DecoderShape:
    """Read the shape; ModelError, naming the architecture, where the lean decoder does not know it."""
    name = architecture_name(config)
    if name not in ARCHITECTURES:
        raise ModelError(f"{name} is not of the Llama shape; known: {', '.join(sorted(ARCHITECTURES))}")
    if config.hidden_act != "silu":
        raise ModelError(f"{name} with activation {config.hidden_act!r}: the lean decoder knows only 'silu'")
    rope_type = _rope_parameters(config)["rope_type"]
    if rope_type not in _FIXED_ROPE_TYPES:
        known = ", ".join(sorted(_FIXED_ROPE_TYPES))
        raise ModelError(f"{name} with rope type {rope_type!r}: the lean decoder knows only {known}")
    bias = bool(getattr(config, "attention_bias", False))
    is_qwen2 = name == "Qwen2ForCausalLM"
    return DecoderShape(
        vocab_size=config.vocab_size,
        context_tokens=config.max_position_embeddings,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=_head_dim(config),
        norm_epsilon=config.rms_norm_eps,
        tied_embeddings=config.tie_word_embeddings,
        qkv_bias=bias or is_qwen2,
        output_bias=bias and not is_qwen2,
        mlp_bias=bool(getattr(config, "mlp_bias", False)),
        qk_norm=name == "Qwen3ForCausalLM",
        layers=_layers(name, config),
    )


def rope_frequencies(config: PreTrainedConfig) -> tuple[Tensor, float]:
    """Angle per position for each pair of dimensions, float32 [R / 2], and the factor on cos and sin."""
    parameters = _rope_parameters(config)
    if parameters["rope_type"] == "default":
        head_dim = _head_dim(config)
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        return 1.0 / parameters["rope_theta"] ** exponents, 1.0
    frequencies, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"))
    return frequencies, float(factor)


def _rope_parameters(config: PreTrainedConfig) -> dict[str, Any]:
    parameters: dict[str, Any] = config.rope_parameters
    return parameters


def _head_dim(config: PreTrainedConfig) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _layers(name: str, config: PreTrainedConfig) -> tuple[LayerShape, ...]:
    count: int = config.num_hidden_layers
    window: int | None = getattr(config, "sliding_window", None)
    if name == "LlamaForCausalLM":
        return (LayerShape(None, True),) * count
    if name == "MistralForCausalLM":
        return (LayerShape(window, True),) * count
    rotates = getattr(config, "no_rope_layers", None) or [1] * count  # 1 means that the layer does rotate
    slides = [kind == "sliding_attention" and config.use_sliding_window for kind in config.layer_types]
    return tuple(
        LayerShape(window if sliding else None, bool(rotate))
        for sliding, rotate in zip(slides, rotates[:count], strict=True)
    )
