"""What a GGUF file's architecture means in transformers' words: config entries, weight names, transforms.

llama.cpp changes some weights when it writes a file, so that its own kernels fit; this undoes it:
- llama: the rows of q and k are reordered from rotate-halves to interleaved rotary pairs;
- gemma3: RMSNorm weights hold 1 + w.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from chairlift_client.errors import ModelError
from chairlift_worker.models.gguf_file import GgufFile
from chairlift_worker.models.gguf_rope import rope_parameters

Weights = NDArray[np.float32]
Transform = Callable[[Weights], Weights]
Config = dict[str, object]

_ROPE_FACTORS = "rope_freqs.weight"
"""Not a weight of the model: frequency divisors, read by gguf_rope."""
_SLIDING_PATTERN = 6
"""Gemma 3: every sixth layer attends to everything, the others to a window."""
_GEMMA3_LOCAL_THETA = 10_000.0
_GEMMA3_LAYERS_OF_27B = 62

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LLAMA_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GEMMA3_INNER = {
    **_LLAMA_INNER,
    **_HEAD_NORMS,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


class Architecture(NamedTuple):
    """How one family is converted."""

    model_type: str
    class_name: str
    inner: dict[str, str]
    """Names inside a layer, GGUF → transformers."""
    biased: frozenset[str]
    """GGUF names inside a layer that carry a bias."""
    details: Callable[[GgufFile], Config]
    """Config entries beyond those that all families share."""
    transform: Callable[[GgufFile, str], Transform | None]
    """What undoes llama.cpp's change to the tensor of this GGUF name."""


def architecture_of(file: GgufFile) -> Architecture:
    """The file's architecture; ModelError when it is not one of those supported."""
    found = _ARCHITECTURES.get(file.architecture)
    if found is None:
        known = ", ".join(_ARCHITECTURES)
        raise ModelError(f"GGUF architecture {file.architecture!r} is not supported (known: {known})")
    if "token_embd.weight" not in file.tensors:
        raise ModelError(f"{file.path} holds no model weights (token_embd.weight is missing)")
    if file.has(f"{file.architecture}.expert_count"):
        raise ModelError(f"{file.path}: mixture-of-experts GGUF files are not supported")
    return found


def config_of(file: GgufFile) -> Config:
    """The entries of transformers' config.json, but for dtype and token ids."""
    architecture, prefix = architecture_of(file), file.architecture
    num_heads = file.integer(f"{prefix}.attention.head_count")
    shared: Config = {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": file.integer(f"{prefix}.embedding_length"),
        "intermediate_size": file.integer(f"{prefix}.feed_forward_length"),
        "num_hidden_layers": file.integer(f"{prefix}.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": file.integer(f"{prefix}.attention.head_count_kv", num_heads),
        "head_dim": _head_dim(file),
        "max_position_embeddings": file.integer(f"{prefix}.context_length"),
        "rms_norm_eps": _shortest_float32(file.number(f"{prefix}.attention.layer_norm_rms_epsilon")),
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    return shared | architecture.details(file)


def weight_names(file: GgufFile) -> dict[str, str]:
    """GGUF name → transformers name of every weight; ModelError for one that has no place."""
    architecture = architecture_of(file)
    return {name: _weight_name(architecture, name) for name in file.tensors if name != _ROPE_FACTORS}


def _weight_name(architecture: Architecture, name: str) -> str:
    stem, _, kind = name.rpartition(".")
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if layer is None:
        if stem in _OUTER and kind == "weight":
            return f"{_OUTER[stem]}.weight"
    elif layer[2] in architecture.inner and (kind == "weight" or layer[2] in architecture.biased):
        return f"model.layers.{layer[1]}.{architecture.inner[layer[2]]}.{kind}"
    raise ModelError(f"GGUF tensor {name!r} is not known for architecture {architecture.model_type}")


def _head_dim(file: GgufFile) -> int:
    prefix = file.architecture
    even_split = file.integer(f"{prefix}.embedding_length") // file.integer(f"{prefix}.attention.head_count")
    rotated = file.integer(f"{prefix}.rope.dimension_count", even_split)
    head_dim = file.integer(f"{prefix}.attention.key_length", rotated)
    if head_dim != file.integer(f"{prefix}.rope.dimension_count", head_dim):
        raise ModelError(f"{file.path}: rotary embedding of a part of the head is not supported")
    return head_dim


def _shortest_float32(value: float) -> float:
    """1e-05 rather than 9.999999747378752e-06: the file holds the float32 of what was meant."""
    return float(str(np.float32(value)))


def _rope(file: GgufFile, default_theta: float = 10_000.0) -> Config:
    return {"rope_parameters": rope_parameters(file, _head_dim(file), default_theta)}


def _gemma3_details(file: GgufFile) -> Config:
    num_layers = file.integer("gemma3.block_count")
    num_heads = file.integer("gemma3.attention.head_count")
    # The largest model scales by the width of an even split of the hidden size; the others by the head's.
    even_split = file.integer("gemma3.embedding_length") // num_heads
    scaled_by = even_split if num_layers == _GEMMA3_LAYERS_OF_27B else _head_dim(file)
    kinds = ["sliding_attention", "full_attention"]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": file.integer("gemma3.attention.sliding_window"),
        "layer_types": [kinds[(layer + 1) % _SLIDING_PATTERN == 0] for layer in range(num_layers)],
        "query_pre_attn_scalar": scaled_by,
        "rope_parameters": {
            "full_attention": rope_parameters(file, _head_dim(file), 1_000_000.0),
            "sliding_attention": {"rope_type": "default", "rope_theta": _GEMMA3_LOCAL_THETA},
        },
    }


def _halves_from_pairs(num_heads: int) -> Transform:
    """Row 2i + j of each head goes back to row j * (head size / 2) + i."""

    def transform(weights: Weights) -> Weights:
        head_dim = weights.shape[0] // num_heads
        pairs = weights.reshape(num_heads, head_dim // 2, 2, *weights.shape[1:])
        return pairs.swapaxes(1, 2).reshape(weights.shape)

    return transform


def _llama_transform(file: GgufFile, name: str) -> Transform | None:
    num_heads = file.integer("llama.attention.head_count")
    if name.endswith(".attn_q.weight"):
        return _halves_from_pairs(num_heads)
    if name.endswith(".attn_k.weight"):
        return _halves_from_pairs(file.integer("llama.attention.head_count_kv", num_heads))
    return None


def _gemma3_transform(file: GgufFile, name: str) -> Transform | None:
    return (lambda weights: weights - np.float32(1)) if name.endswith("norm.weight") else None


def _no_transform(file: GgufFile, name: str) -> Transform | None:
    return None


_UNBIASED: frozenset[str] = frozenset()
_ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", _LLAMA_INNER, _UNBIASED, _rope, _llama_transform),
    "qwen2": Architecture(
        "qwen2",
        "Qwen2ForCausalLM",
        _LLAMA_INNER,
        frozenset({"attn_q", "attn_k", "attn_v"}),
        lambda file: _rope(file) | {"use_sliding_window": False},
        _no_transform,
    ),
    "qwen3": Architecture(
        "qwen3", "Qwen3ForCausalLM", _LLAMA_INNER | _HEAD_NORMS, _UNBIASED, _rope, _no_transform
    ),
    "gemma3": Architecture(
        "gemma3_text", "Gemma3ForCausalLM", _GEMMA3_INNER, _UNBIASED, _gemma3_details, _gemma3_transform
    ),
}


def num_weights(file: GgufFile) -> int:
    """How many numbers the converted model holds."""
    return sum(math.prod(tensor.shape) for name, tensor in file.tensors.items() if name != _ROPE_FACTORS)
