"""One lean decoder for every model of the Llama shape, on a paged KV cache.

Names of the shapes as in the kernels: T tokens of a step, Hq and Hkv heads of D dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear

from chairlift_kernels import Attention, prepare_attention, rms_norm, rope, silu_mul, write_kv
from chairlift_worker.engine.batch import Batch, Chunk, build_batch
from chairlift_worker.engine.runner import RunnerSpec
from chairlift_worker.models.architectures import read_config
from chairlift_worker.models.checkpoint import Weights, eos_token_ids
from chairlift_worker.models.decoder_shape import (
    DecoderShape,
    decoder_shape,
    rope_frequencies,
)
from chairlift_worker.models.decoder_weights import DecoderWeights, Layer, load_weights


class Step(NamedTuple):
    """What every layer of a step needs."""

    slots: Tensor  # [T]
    cos: Tensor  # [T, D / 2] float32
    sin: Tensor  # [T, D / 2] float32
    attention: Attention


class DecoderRunner:
    """The lean decoder with its KV cache; a `Runner`."""

    def __init__(
        self,
        shape: DecoderShape,
        weights: DecoderWeights,
        frequencies: Tensor,
        rope_factor: float,
        spec: RunnerSpec,
    ) -> None:
        self._shape = shape
        self._weights = weights
        self._frequencies = frequencies.to(weights.embedding.device)
        self._rope_factor = rope_factor
        self._spec = spec
        cache = (len(shape.layers), spec.num_blocks, spec.block_size, shape.num_kv_heads, shape.head_dim)
        self._keys = torch.zeros(cache, dtype=weights.embedding.dtype, device=weights.embedding.device)
        self._values = torch.zeros_like(self._keys)

    @classmethod
    def load(
        cls, folder: Path, *, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> DecoderRunner:
        """Read config and weights from `folder` and allocate the cache.

        ModelError, naming the architecture, for a model that is not of the Llama shape, and for weights
        that do not fit the config.
        """
        config = read_config(folder)
        shape = decoder_shape(config)
        with Weights(folder) as stored:
            weights = load_weights(stored, shape, dtype, device)
        spec = RunnerSpec(
            vocab_size=shape.vocab_size,
            context_tokens=shape.context_tokens,
            num_blocks=num_blocks,
            block_size=block_size,
            eos_token_ids=eos_token_ids(folder),
        )
        return cls(shape, weights, *rope_frequencies(config), spec)

    @property
    def spec(self) -> RunnerSpec:
        """See `Runner`."""
        return self._spec

    def forward(self, chunks: Seq[Chunk]) -> Tensor:
        """See `Runner`."""
        batch = build_batch(chunks, self._spec.block_size, self._keys.device)
        step = self._step(batch)
        hidden = embedding(batch.token_ids, self._weights.embedding)
        for index, layer in enumerate(self._weights.layers):
            hidden = hidden + self._attend(index, layer, self._norm(hidden, layer.attention_norm), step)
            hidden = hidden + _feed_forward(layer, self._norm(hidden, layer.mlp_norm))
        rows = self._norm(hidden[batch.logit_rows], self._weights.norm)
        return linear(rows, self._weights.head).float()

    def _step(self, batch: Batch) -> Step:
        angles = batch.positions[:, None].float() * self._frequencies
        return Step(
            slots=batch.slots,
            cos=angles.cos() * self._rope_factor,
            sin=angles.sin() * self._rope_factor,
            attention=prepare_attention(batch.query_starts, batch.context_lens, batch.block_tables),
        )

    def _attend(self, index: int, layer: Layer, hidden: Tensor, step: Step) -> Tensor:
        shape, kind = self._shape, self._shape.layers[index]
        heads = linear(hidden, layer.qkv, layer.qkv_bias).view(len(hidden), -1, shape.head_dim)
        query, key, value = torch.tensor_split(heads, shape.head_bounds, dim=1)
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key = self._norm(query, layer.query_norm), self._norm(key, layer.key_norm)
        if kind.rotates:
            query, key = rope(query, key, step.cos, step.sin)
        keys, values = self._keys[index], self._values[index]
        write_kv(key, value, keys, values, step.slots)
        attended = step.attention(query, keys, values, scale=shape.head_dim**-0.5, window=kind.window)
        return linear(attended.flatten(1), layer.output, layer.output_bias)

    def _norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(hidden, weight, self._shape.norm_epsilon)


def _feed_forward(layer: Layer, hidden: Tensor) -> Tensor:
    return linear(silu_mul(linear(hidden, layer.gate_up, layer.gate_up_bias)), layer.down, layer.down_bias)
