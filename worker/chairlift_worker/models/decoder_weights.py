"""The lean decoder's tensors, laid out for few and large products."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from chairlift_client.errors import ModelError
from chairlift_worker.models.checkpoint import Weights
from chairlift_worker.models.decoder_shape import DecoderShape


class Projection(NamedTuple):
    """Matrices of one layer that lie one below the other in one product."""

    modules: tuple[str, ...]
    """Their names within the layer."""
    rows: tuple[int, ...]
    columns: int


class Layer(NamedTuple):
    """One layer. N is the hidden size, I the intermediate size, Hq and Hkv heads of D dimensions."""

    attention_norm: Tensor  # [N]
    qkv: Tensor  # [(Hq + 2 * Hkv) * D, N] query, key and value one below the other
    qkv_bias: Tensor | None
    query_norm: Tensor | None  # [D]
    key_norm: Tensor | None  # [D]
    output: Tensor  # [N, Hq * D]
    output_bias: Tensor | None
    attention_post_norm: Tensor | None  # [N]
    mlp_norm: Tensor  # [N]
    gate_up: Tensor  # [2 * I, N] gate above up
    gate_up_bias: Tensor | None
    down: Tensor  # [N, I]
    down_bias: Tensor | None
    mlp_post_norm: Tensor | None  # [N]


class DecoderWeights(NamedTuple):
    """All of a model."""

    embedding: Tensor  # [vocabulary, N]
    layers: tuple[Layer, ...]
    norm: Tensor  # [N]
    head: Tensor  # [vocabulary, N], the embedding itself where they are tied


class Projections(NamedTuple):
    """The products of a layer."""

    qkv: Projection
    output: Projection
    gate_up: Projection
    down: Projection


def projections(shape: DecoderShape) -> Projections:
    """The same in every layer."""
    size, inner = shape.hidden_size, shape.intermediate_size
    query, both_kv = shape.num_heads * shape.head_dim, 2 * [shape.num_kv_heads * shape.head_dim]
    if shape.fused:
        qkv = Projection(("self_attn.qkv_proj",), (query + sum(both_kv),), size)
        gate_up = Projection(("mlp.gate_up_proj",), (2 * inner,), size)
    else:
        qkv = Projection(tuple(f"self_attn.{name}_proj" for name in "qkv"), (query, *both_kv), size)
        gate_up = Projection(("mlp.gate_proj", "mlp.up_proj"), (inner, inner), size)
    return Projections(
        qkv=qkv,
        output=Projection(("self_attn.o_proj",), (size,), query),
        gate_up=gate_up,
        down=Projection(("mlp.down_proj",), (size,), inner),
    )


def load_weights(
    stored: Weights, shape: DecoderShape, dtype: torch.dtype, device: torch.device
) -> DecoderWeights:
    """Take every tensor of the model; ModelError for one missing, misshapen or left over."""
    reader = _Reader(stored, shape.norm_offset, dtype, device)
    vocabulary = (shape.vocab_size, shape.hidden_size)
    embedding = reader.take("model.embed_tokens.weight", *vocabulary)
    weights = DecoderWeights(
        embedding=embedding,
        layers=tuple(_load_layer(reader, shape, index) for index in range(len(shape.layers))),
        norm=reader.norm("model.norm", shape.hidden_size),
        head=embedding if shape.tied_embeddings else reader.take("lm_head.weight", *vocabulary),
    )
    _check_all_taken(stored, shape)
    return weights


class _Reader:
    """Takes tensors in one dtype to one device."""

    def __init__(self, stored: Weights, norm_offset: float, dtype: torch.dtype, device: torch.device) -> None:
        self._stored, self._norm_offset, self._dtype, self._device = stored, norm_offset, dtype, device

    def take(self, name: str, *shape: int) -> Tensor:
        return self._stored.take(name, shape, self._dtype, self._device)

    def norm(self, name: str, size: int) -> Tensor:
        """What a norm scales by; in float32 where that is a sum, which a shorter float would cut."""
        if self._norm_offset == 0.0:
            return self.take(f"{name}.weight", size)
        stored = self._stored.take(f"{name}.weight", (size,), torch.float32, self._device)
        return stored + self._norm_offset

    def optional_norm(self, present: bool, name: str, size: int) -> Tensor | None:
        return self.norm(name, size) if present else None

    def stack(self, prefix: str, projection: Projection) -> Tensor:
        """The matrices of a layer's projection, one below the other."""
        parts = [
            self.take(f"{prefix}.{module}.weight", rows, projection.columns)
            for module, rows in zip(projection.modules, projection.rows, strict=True)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def bias(self, present: bool, prefix: str, projection: Projection) -> Tensor | None:
        if not present:
            return None
        named = zip(projection.modules, projection.rows, strict=True)
        return torch.cat([self.take(f"{prefix}.{module}.bias", rows) for module, rows in named])


def _load_layer(reader: _Reader, shape: DecoderShape, index: int) -> Layer:
    prefix = f"model.layers.{index}"
    attention, size = f"{prefix}.self_attn", shape.hidden_size
    products = projections(shape)
    after_attention = f"{prefix}.post_attention_layernorm"  # named as if it always stood there
    before_mlp = f"{prefix}.pre_feedforward_layernorm" if shape.post_norms else after_attention
    after_mlp = f"{prefix}.post_feedforward_layernorm"
    return Layer(
        attention_norm=reader.norm(f"{prefix}.input_layernorm", size),
        qkv=reader.stack(prefix, products.qkv),
        qkv_bias=reader.bias(shape.qkv_bias, prefix, products.qkv),
        query_norm=reader.optional_norm(shape.qk_norm, f"{attention}.q_norm", shape.head_dim),
        key_norm=reader.optional_norm(shape.qk_norm, f"{attention}.k_norm", shape.head_dim),
        output=reader.stack(prefix, products.output),
        output_bias=reader.bias(shape.output_bias, prefix, products.output),
        attention_post_norm=reader.optional_norm(shape.post_norms, after_attention, size),
        mlp_norm=reader.norm(before_mlp, size),
        gate_up=reader.stack(prefix, products.gate_up),
        gate_up_bias=reader.bias(shape.mlp_bias, prefix, products.gate_up),
        down=reader.stack(prefix, products.down),
        down_bias=reader.bias(shape.mlp_bias, prefix, products.down),
        mlp_post_norm=reader.optional_norm(shape.post_norms, after_mlp, size),
    )


def _check_all_taken(stored: Weights, shape: DecoderShape) -> None:
    """A tensor nobody took would mean that the model computes something this decoder does not."""
    left = [name for name in stored.untaken if not name.endswith("rotary_emb.inv_freq")]
    if shape.tied_embeddings:
        left = [name for name in left if name != "lm_head.weight"]
    if left:
        raise ModelError(f"the config has no place for {len(left)} of the stored tensors: {left[0]!r}, ...")
