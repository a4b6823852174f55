"""Writes GGUF files as llama.cpp's converter does, from transformers models and token lists."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from transformers import PreTrainedModel

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_GEMMA3_NAMES = _NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


class GgufWriter:
    """A GGUF file in the making."""

    def __init__(self, path: Path, architecture: str) -> None:
        self.path = path
        self.architecture = architecture
        self._writer = gguf.GGUFWriter(path, architecture)

    def add(self, **entries: Any) -> None:
        """Adds metadata; underscores of the architecture's own keys are written as they are."""
        for key, value in entries.items():
            self.entry(f"{self.architecture}.{key}", value)

    def entry(self, key: str, value: Any) -> None:
        """Adds one metadata entry under its full name."""
        match value:
            case bool():
                self._writer.add_bool(key, value)
            case int():
                self._writer.add_uint32(key, value)
            case float():
                self._writer.add_float32(key, value)
            case str():
                self._writer.add_string(key, value)
            case _:
                self._writer.add_array(key, value)

    def tensor(
        self,
        name: str,
        values: np.ndarray[Any, Any],
        quantization: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    ) -> None:
        """Adds a tensor, quantized as told."""
        raw = gguf.quantize(np.ascontiguousarray(values), quantization)
        self._writer.add_tensor(name, raw, raw_dtype=quantization)

    def tokens(self, tokens: Seq[str], types: Seq[int], model: str, **entries: Any) -> None:
        """Adds the vocabulary."""
        self.entry("tokenizer.ggml.model", model)
        self.entry("tokenizer.ggml.tokens", list(tokens))
        self.entry("tokenizer.ggml.token_type", list(types))
        for key, value in entries.items():
            self.entry(f"tokenizer.ggml.{key}", value)

    def close(self) -> Path:
        """Writes the file."""
        self._writer.write_header_to_file()
        self._writer.write_kv_data_to_file()
        self._writer.write_tensors_to_file()
        self._writer.close()
        return self.path


def add_model(writer: GgufWriter, model: PreTrainedModel) -> None:
    """Adds shapes and weights of a Llama, Qwen2, Qwen3 or Gemma3 model."""
    config: Any = model.config
    dotted = {
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.key_length": config.head_dim,
    }
    if writer.architecture == "gemma3":
        dotted["attention.sliding_window"] = config.sliding_window
        dotted["rope.freq_base"] = config.rope_parameters["full_attention"]["rope_theta"]
    else:
        dotted["rope.freq_base"] = config.rope_parameters["rope_theta"]
    writer.add(
        block_count=config.num_hidden_layers,
        context_length=config.max_position_embeddings,
        embedding_length=config.hidden_size,
        feed_forward_length=config.intermediate_size,
        **dotted,
    )
    for name, parameter in model.named_parameters():
        writer.tensor(
            _gguf_name(writer.architecture, name), _stored(writer.architecture, config, name, parameter)
        )


def _gguf_name(architecture: str, name: str) -> str:
    names = _GEMMA3_NAMES if architecture == "gemma3" else _NAMES
    stem, _, kind = name.rpartition(".")
    if stem in names:
        return f"{names[stem]}.{kind}"
    _, _, layer, inner = stem.split(".", 3)
    return f"blk.{layer}.{names[inner]}.{kind}"


def _stored(architecture: str, config: Any, name: str, parameter: Any) -> np.ndarray[Any, Any]:
    values: np.ndarray[Any, Any] = parameter.detach().float().numpy()
    if architecture == "gemma3" and name.endswith("norm.weight"):
        return values + 1
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    kind = name.split(".")[-2]
    if architecture == "llama" and kind in heads:
        # Rotary pairs side by side: halves [2, d/2] of each head become [d/2, 2].
        halves = values.reshape(heads[kind], 2, -1, values.shape[1])
        return halves.swapaxes(1, 2).reshape(values.shape)
    return values
