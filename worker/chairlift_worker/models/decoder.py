"""One lean decoder for Llama and its relatives, on a paged KV cache.

Names of the shapes as in the kernels: T tokens of a step, Hq and Hkv heads of D dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding

from chairlift_client.errors import ConfigError, ModelError
from chairlift_kernels import Attention, rms_norm, rope, write_kv
from chairlift_worker.engine.batch import Batch, Chunk, build_batch
from chairlift_worker.engine.runner import RunnerSpec
from chairlift_worker.models.architectures import read_config
from chairlift_worker.models.checkpoint import Weights, eos_token_ids
from chairlift_worker.models.decoder_ops import (
    FAST,
    Ops,
    check_exact_place,
    check_exact_products,
    exact_ops,
)
from chairlift_worker.models.decoder_rope import Rope, read_ropes
from chairlift_worker.models.decoder_shape import DecoderShape, decoder_shape
from chairlift_worker.models.decoder_weights import DecoderWeights, Layer, load_weights
from chairlift_worker.models.lora_batch import Segment, line_up, low_rank
from chairlift_worker.models.lora_weights import LoraWeights, LowRank, ProductName, load_lora


class Rotation(NamedTuple):
    """One of the model's rotations at a step's positions. R dimensions of a head are rotated."""

    cos: Tensor  # [T, R / 2] float32
    sin: Tensor  # [T, R / 2] float32


class Step(NamedTuple):
    """What every layer of a step needs."""

    slots: Tensor  # [T]
    rotations: Mapping[str, Rotation]
    attention: Attention
    segments: tuple[Segment, ...]
    """Rows that ride with adapters."""


class DecoderRunner:
    """The lean decoder with its KV cache; a `Runner`."""

    def __init__(
        self,
        shape: DecoderShape,
        weights: DecoderWeights,
        ropes: Mapping[str, Rope],
        spec: RunnerSpec,
        ops: Ops,
    ) -> None:
        table = weights.embedding
        self._shape = shape
        self._weights = weights
        self._embedding_scale = torch.tensor(shape.embedding_scale, dtype=table.dtype, device=table.device)
        self._ropes = {
            name: rope._replace(frequencies=rope.frequencies.to(table.device)) for name, rope in ropes.items()
        }
        self._spec = spec
        self._ops = ops
        cache = (len(shape.layers), spec.num_blocks, spec.block_size, shape.num_kv_heads, shape.head_dim)
        self._keys = torch.zeros(cache, dtype=table.dtype, device=table.device)
        self._values = torch.zeros_like(self._keys)

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        exact: bool = False,
    ) -> DecoderRunner:
        """Read config and weights from `folder` and allocate the cache.

        ModelError, naming the architecture, for a model that this decoder does not know, and for weights
        that do not fit the config. With `exact` a row's logits do not depend, to the last bit, on what else
        is computed beside it; ConfigError where that cannot be had: elsewhere than on a CPU in float32.
        """
        if exact:
            check_exact_place(dtype, device)
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
        return cls(
            shape, weights, read_ropes(config, shape.rotated_dim), spec, exact_ops(weights) if exact else FAST
        )

    @property
    def spec(self) -> RunnerSpec:
        """See `Runner`."""
        return self._spec

    def load_adapter(self, folder: Path, *, max_rank: int) -> LoraWeights:
        """Read a LoRA adapter that chunks may ride with; from any thread. See `load_lora`.

        ModelError also where this decoder is exact and could not be with the adapter's shapes.
        """
        table = self._weights.embedding
        adapter = load_lora(folder, self._shape, table.dtype, table.device, max_rank=max_rank)
        if self._ops is not FAST:
            try:
                check_exact_products(adapter.matrices())
            except ConfigError as error:
                raise ModelError(str(error)) from error
        return adapter

    def forward(self, chunks: Seq[Chunk]) -> Tensor:
        """See `Runner`."""
        lined_up = line_up(chunks)
        batch = build_batch(lined_up.chunks, self._spec.block_size, self._keys.device)
        if len(batch.copy_sources):
            for cache in (self._keys, self._values):
                cache[:, batch.copy_targets] = cache[:, batch.copy_sources]
        step = self._step(batch, lined_up.segments)
        hidden = embedding(batch.token_ids, self._weights.embedding) * self._embedding_scale
        for index, layer in enumerate(self._weights.layers):
            attended = self._attend(index, layer, self._norm(hidden, layer.attention_norm), step)
            hidden = hidden + self._norm(attended, layer.attention_post_norm)
            fed_forward = self._feed_forward(index, layer, self._norm(hidden, layer.mlp_norm), step)
            hidden = hidden + self._norm(fed_forward, layer.mlp_post_norm)
        logit_rows = batch.logit_rows
        if lined_up.logit_places is not None:
            logit_rows = logit_rows[list(lined_up.logit_places)]
        rows = self._norm(hidden[logit_rows], self._weights.norm)
        return _capped(self._ops.linear(rows, self._weights.head, None).float(), self._shape.logit_cap)

    def _step(self, batch: Batch, segments: tuple[Segment, ...]) -> Step:
        return Step(
            slots=batch.slots,
            rotations={name: _rotation(batch.positions, rope) for name, rope in self._ropes.items()},
            attention=self._ops.prepare_attention(batch.query_starts, batch.context_lens, batch.block_tables),
            segments=segments,
        )

    def _attend(self, index: int, layer: Layer, hidden: Tensor, step: Step) -> Tensor:
        shape, kind = self._shape, self._shape.layers[index]
        projected = self._project(hidden, layer.qkv, layer.qkv_bias, step, index, "qkv")
        heads = projected.view(len(hidden), -1, shape.head_dim)
        query, key, value = torch.tensor_split(heads, shape.head_bounds, dim=1)
        query, key = self._norm(query, layer.query_norm), self._norm(key, layer.key_norm)
        if kind.rope is not None:
            query, key = rope(query, key, *step.rotations[kind.rope])
        keys, values = self._keys[index], self._values[index]
        write_kv(key, value, keys, values, step.slots)
        attended = step.attention(
            query, keys, values, scale=shape.score_scale, window=kind.window, soft_cap=shape.score_cap
        )
        return self._project(attended.flatten(1), layer.output, layer.output_bias, step, index, "output")

    def _feed_forward(self, index: int, layer: Layer, hidden: Tensor, step: Step) -> Tensor:
        gate_up = self._project(hidden, layer.gate_up, layer.gate_up_bias, step, index, "gate_up")
        multiply = self._ops.silu_mul if self._shape.activation == "silu" else self._ops.gelu_mul
        return self._project(multiply(gate_up), layer.down, layer.down_bias, step, index, "down")

    def _project(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, step: Step, index: int, name: ProductName
    ) -> Tensor:
        """A product of layer `index` with what the adapters on board add to it."""
        output = self._ops.linear(hidden, weight, bias)
        for start, end, adapter in step.segments:
            pair: LowRank | None = getattr(adapter.layers[index], name)
            if pair is not None:
                output[start:end] += low_rank(hidden[start:end], pair, self._ops.linear)
        return output

    def _norm(self, hidden: Tensor, weight: Tensor | None) -> Tensor:
        """Normed in the weight's dtype; unchanged where the model has no such norm."""
        if weight is None:
            return hidden
        return rms_norm(hidden.to(weight.dtype), weight, self._shape.norm_epsilon).to(hidden.dtype)


def _rotation(positions: Tensor, rope: Rope) -> Rotation:
    angles = positions[:, None].float() * rope.frequencies
    return Rotation(angles.cos() * rope.factor, angles.sin() * rope.factor)


def _capped(logits: Tensor, cap: float | None) -> Tensor:
    """Bounded to ± cap (arXiv 2408.00118)."""
    return logits if cap is None else cap * torch.tanh(logits / cap)
