"""Which implementation computes an op: by the device its tensors are on."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from chairlift_kernels import cpu, reference


class Attention(Protocol):
    """The paged attention of one step, to be called for each layer."""

    def __call__(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        *,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """As `reference.paged_attention` with the step's tables."""
        ...


def prepare_attention(query_starts: Tensor, context_lens: Tensor, block_tables: Tensor) -> Attention:
    """Do what is the same in every layer of a step once; shapes as in `reference.paged_attention`.

    The tensors must not change while the result is in use.
    """
    if query_starts.device.type == "cpu":
        return cpu.CpuAttention(query_starts, context_lens, block_tables)
    return _ReferenceAttention(query_starts, context_lens, block_tables)


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """As `reference.paged_attention`, by the fastest path for the tensors' device."""
    attention = prepare_attention(query_starts, context_lens, block_tables)
    return attention(
        query, key_cache, value_cache, scale=scale, window=window, soft_cap=soft_cap, sinks=sinks
    )


class _ReferenceAttention:
    def __init__(self, query_starts: Tensor, context_lens: Tensor, block_tables: Tensor) -> None:
        self._tables = (query_starts, context_lens, block_tables)

    def __call__(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        *,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        return reference.paged_attention(
            query,
            key_cache,
            value_cache,
            *self._tables,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
            sinks=sinks,
        )
