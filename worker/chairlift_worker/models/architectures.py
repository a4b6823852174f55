"""Which transformers models can run on pages of KV, and why the others cannot.

What a config or a class declares is judged here, before any weight is read; what only shows when the
model runs is judged by `attention_probe`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel

from chairlift_client.errors import ModelError

_PAGEABLE_LAYERS = frozenset({"full_attention", "sliding_attention", "dense", "sparse"})
"""Layer types that keep nothing but K and V ("dense" and "sparse" speak of the feed-forward part)."""


def read_config(folder: Path) -> PreTrainedConfig:
    """The config in `folder`; ModelError if there is none that transformers knows. Runs no foreign code."""
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{folder}: no config that transformers can read: {error}") from error


def check_architecture(config: PreTrainedConfig) -> None:
    """Raise ModelError, naming the architecture and the reason, if its kind cannot run on paged KV."""
    name = architecture_name(config)
    if config.is_encoder_decoder:
        raise unsupported(name, "it is an encoder-decoder: its decoder attends to a second, encoded input")
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model_class is None:
        raise unsupported(name, "transformers has no causal language model of this kind")
    _check_class(name, model_class)
    text_config = config.get_text_config(decoder=True)
    if getattr(text_config, "add_cross_attention", False):
        raise unsupported(name, "its layers have cross attention to a second input")
    foreign = set(getattr(text_config, "layer_types", None) or ()) - _PAGEABLE_LAYERS
    if foreign:
        raise unsupported(name, f"it has layers of type {', '.join(sorted(foreign))}")


def _check_class(name: str, model_class: type[PreTrainedModel]) -> None:
    if model_class._is_stateful:
        raise unsupported(name, "it carries a recurrent state from token to token, not only K and V")
    if not model_class._supports_attention_backend:
        raise unsupported(name, "its attention does not go through transformers' attention interface")


def architecture_name(config: PreTrainedConfig) -> str:
    """As people call it: the class the weights were saved from, else the model type."""
    names = config.architectures
    return str(names[0]) if names else str(config.model_type)


def unsupported(name: str, reason: str) -> ModelError:
    """The one form in which a refusal is worded."""
    return ModelError(f"{name} cannot run on paged attention: {reason}")


def context_tokens(config: PreTrainedConfig) -> int:
    """Most tokens of one sequence.

    Two kinds of rotary embedding turn all positions of a step another way once one of them passes a
    limit: "longrope" its original context (arXiv 2402.13753), "dynamic" the model's context. A long
    sequence would change the output of those beside it, and its own older K would not fit its newer
    queries. So a model with "longrope" ends at the original context here; "dynamic" never gets beyond its
    limit and is the plain rotation up to there.
    """
    text_config = config.get_text_config(decoder=True)
    limit = getattr(text_config, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit < 1:
        raise unsupported(architecture_name(config), f"its config gives no context length ({limit!r})")
    for rope in _rope_parameters(text_config):
        if rope.get("rope_type") == "longrope":
            original = rope.get("original_max_position_embeddings")
            original = original or getattr(text_config, "original_max_position_embeddings", None)
            limit = min(limit, int(original or limit))
    return limit


def _rope_parameters(text_config: PreTrainedConfig) -> list[dict[str, Any]]:
    """The one dictionary of the model, or the ones of its layer types."""
    parameters = getattr(text_config, "rope_parameters", None) or {}
    by_layer_type = [entry for entry in parameters.values() if isinstance(entry, dict)]
    return by_layer_type or [parameters]
