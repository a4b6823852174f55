"""transformers' attention, answered from pages of KV.

Every attention module of the model carries its `PagedLayer`, so that nothing depends on which keyword
arguments a family passes down to its attention, and two models in one process do not meet.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from chairlift_kernels import Attention, prepare_attention, write_kv
from chairlift_worker.engine.batch import Batch
from chairlift_worker.models.attention_probe import AttentionLayer

_IMPLEMENTATION = "chairlift_paged"
_LAYER = "chairlift_paged_layer"


class CurrentStep:
    """The step that the layers of one model are computing."""

    def __init__(self) -> None:
        self._slots_and_attention: tuple[Tensor, Attention] | None = None

    @contextmanager
    def over(self, batch: Batch) -> Iterator[None]:
        """While inside, the layers store and attend as `batch` says."""
        attention = prepare_attention(batch.query_starts, batch.context_lens, batch.block_tables)
        self._slots_and_attention = (batch.slots, attention)
        try:
            yield
        finally:
            self._slots_and_attention = None

    def get(self) -> tuple[Tensor, Attention]:
        """Where the step's tokens go, [T], and the attention over their sequences."""
        assert self._slots_and_attention is not None, "the model ran outside of a step"
        return self._slots_and_attention


class PagedLayer:
    """Owns the pages of one layer, [num_blocks, block_size, num_kv_heads, head_dim] each for K and V."""

    def __init__(
        self,
        layer: AttentionLayer,
        step: CurrentStep,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_blocks, block_size, layer.num_kv_heads, layer.head_dim)
        self.key_cache = torch.zeros(shape, dtype=dtype, device=device)
        self.value_cache = torch.zeros(shape, dtype=dtype, device=device)
        self.module = layer.module
        self._window = layer.window
        self._step = step

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copy whole blocks, [C] into [C]."""
        for cache in (self.key_cache, self.value_cache):
            cache[targets] = cache[sources]

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        soft_cap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Store K and V [T, Hkv, D] of the step's tokens and attend with `query` [T, Hq, D]."""
        slots, attention = self._step.get()
        write_kv(key, value, self.key_cache, self.value_cache, slots)
        return attention(
            query,
            self.key_cache,
            self.value_cache,
            scale=scale,
            window=self._window,
            soft_cap=soft_cap,
            sinks=sinks,
        )


def attach_layers(model: PreTrainedModel, layers: tuple[PagedLayer, ...]) -> None:
    """From now on the model's attention runs on these pages.

    No mask function is registered under this name, which tells transformers to build no mask.
    """
    AttentionInterface.register(_IMPLEMENTATION, _attend)
    for layer in layers:
        setattr(layer.module, _LAYER, layer)
    model.set_attn_implementation(_IMPLEMENTATION)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_unused: Any,
) -> tuple[Tensor, None]:
    """What transformers calls: tensors are [1, heads, T, head dim], the output [1, T, heads, head dim].

    The unused arguments are those that the probe found to be harmless.
    """
    layer: PagedLayer = getattr(module, _LAYER)
    output = layer.attend(
        *(tensor[0].transpose(0, 1) for tensor in (query, key, value)),
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        soft_cap=softcap,
        sinks=s_aux,
    )
    return output[None], None
