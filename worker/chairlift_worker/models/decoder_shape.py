"""What the lean decoder has to know of a model, read from its transformers config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, cast, get_args

from transformers import PreTrainedConfig

from chairlift_client.errors import ModelError
from chairlift_worker.models.architectures import architecture_name
from chairlift_worker.models.decoder_rope import ONLY, rope_parameters

_FULL, _SLIDING = "full_attention", "sliding_attention"

Activation = Literal["silu", "gelu_pytorch_tanh"]


class Family(NamedTuple):
    """What an architecture's name says and its config does not."""

    windows: Literal["none", "every layer", "by layer type"] = "by layer type"
    biases: Literal["by config", "qkv"] = "by config"
    qk_norm: bool = False
    some_do_not_rotate: bool = False
    partial_rotation: bool = False
    fused: bool = False
    """Query, key and value are stored as one matrix, gate and up as another."""
    gemma: bool = False
    """Norms also behind attention and feed-forward, each scaling by 1 + weight; a scaled embedding."""
    soft_caps_scores: bool = False


FAMILIES = {
    "LlamaForCausalLM": Family(windows="none"),
    "MistralForCausalLM": Family(windows="every layer"),
    "Phi3ForCausalLM": Family(windows="every layer", fused=True, partial_rotation=True),
    "Qwen2ForCausalLM": Family(biases="qkv"),
    "Qwen3ForCausalLM": Family(qk_norm=True),
    "SmolLM3ForCausalLM": Family(some_do_not_rotate=True),
    "Gemma2ForCausalLM": Family(gemma=True, soft_caps_scores=True),
    "Gemma3ForCausalLM": Family(gemma=True, qk_norm=True),
}
"""The architectures that run on the lean decoder."""


class LayerShape(NamedTuple):
    """In what layers of one model may differ."""

    window: int | None
    rope: str | None
    """Which of the model's rotations; None: it does not rotate."""


class DecoderShape(NamedTuple):
    """Sizes and switches of a model."""

    vocab_size: int
    context_tokens: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotated_dim: int
    norm_epsilon: float
    norm_offset: float
    """Added to each norm's stored weight."""
    post_norms: bool
    """Attention and feed-forward are normed before they are added, too."""
    embedding_scale: float
    tied_embeddings: bool
    fused: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    activation: Activation
    score_scale: float
    score_cap: float | None
    logit_cap: float | None
    layers: tuple[LayerShape, ...]

    @property
    def head_bounds(self) -> tuple[int, int]:
        """Where the key heads and the value heads begin among a layer's Hq + 2 * Hkv heads."""
        return self.num_heads, self.num_heads + self.num_kv_heads


def decoder_shape(config: PreTrainedConfig) -> DecoderShape:
    """Read the shape; ModelError, naming the architecture, where the lean decoder does not know it."""
    name = architecture_name(config)
    family = FAMILIES.get(name)
    if family is None:
        raise ModelError(f"{name} is not known to the lean decoder; known: {', '.join(sorted(FAMILIES))}")
    if getattr(config, "use_bidirectional_attention", False):
        raise ModelError(f"{name} with attention in both directions cannot decode")
    bias = bool(getattr(config, "attention_bias", False))
    qkv_only = family.biases == "qkv"
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    ropes = rope_parameters(config)
    return DecoderShape(
        vocab_size=config.vocab_size,
        context_tokens=config.max_position_embeddings,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        rotated_dim=_rotated_dim(family, head_dim, ropes),
        norm_epsilon=config.rms_norm_eps,
        norm_offset=1.0 if family.gemma else 0.0,
        post_norms=family.gemma,
        embedding_scale=config.hidden_size**0.5 if family.gemma else 1.0,
        tied_embeddings=config.tie_word_embeddings,
        fused=family.fused,
        qkv_bias=bias or qkv_only,
        output_bias=bias and not qkv_only,
        mlp_bias=bool(getattr(config, "mlp_bias", False)),
        qk_norm=family.qk_norm,
        activation=_activation(name, config),
        score_scale=(config.query_pre_attn_scalar if family.gemma else head_dim) ** -0.5,
        score_cap=config.attn_logit_softcapping if family.soft_caps_scores else None,
        logit_cap=config.final_logit_softcapping if family.gemma else None,
        layers=_layers(name, family, config, ropes),
    )


def _activation(name: str, config: PreTrainedConfig) -> Activation:
    given = getattr(config, "hidden_activation", None) or config.hidden_act
    if given not in get_args(Activation):
        known = ", ".join(get_args(Activation))
        raise ModelError(f"{name} with activation {given!r}: the lean decoder knows only {known}")
    return cast("Activation", given)


def _rotated_dim(family: Family, head_dim: int, ropes: Mapping[str, Mapping[str, Any]]) -> int:
    """Of a rotation of type "default"; those of the other types say it themselves."""
    return int(head_dim * ropes[ONLY]["partial_rotary_factor"]) if family.partial_rotation else head_dim


def _layers(
    name: str, family: Family, config: PreTrainedConfig, ropes: Mapping[str, Mapping[str, Any]]
) -> tuple[LayerShape, ...]:
    kinds = _layer_types(family, config)
    if not {_FULL, _SLIDING}.issuperset(kinds):
        raise ModelError(f"{name} with layers of type {', '.join(sorted(set(kinds) - {_FULL, _SLIDING}))}")
    window: int | None = getattr(config, "sliding_window", None)
    if not getattr(config, "use_sliding_window", True):
        window = None
    # 1 means that the layer does rotate.
    rotates = config.no_rope_layers if family.some_do_not_rotate else [1] * len(kinds)
    return tuple(
        LayerShape(
            window=window if kind == _SLIDING else None,
            rope=(ONLY if ONLY in ropes else kind) if rotate else None,
        )
        for kind, rotate in zip(kinds, rotates[: len(kinds)], strict=True)
    )


def _layer_types(family: Family, config: PreTrainedConfig) -> list[str]:
    if family.windows == "by layer type":
        return list(config.layer_types)
    return [_FULL if family.windows == "none" else _SLIDING] * config.num_hidden_layers
