"""Paged attention for CPU: few large torch calls in place of many small ones per sequence.

Sequences of equal query length and similar context form a group; a group's K and V are gathered
into one padded tensor and attended to in one call. Groups stay small enough for the gathered copy
to live in a core's cache. Padding repeats the sequence's own last token, so that nothing foreign,
and no stale NaN, is ever read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

GROUP_BYTES = 1 << 20
"""Gathered K and V of a group, at most, where it has more than one sequence."""


class Group(NamedTuple):
    """n sequences with q query rows each over at most p positions: where to read, what to see."""

    rows: Tensor  # [n * q] rows of the step's queries
    slots: Tensor  # [n * p] slots of K and V; past a context's end its last token again
    visible: Tensor | None  # [n, 1, q, p] bool; None: everything, or the causal triangle where q = p
    num_sequences: int
    query_len: int


class CpuAttention:
    """The attention of one step; made once and called for each layer, it plans only once per window."""

    def __init__(self, query_starts: Tensor, context_lens: Tensor, block_tables: Tensor) -> None:
        self._query_starts: list[int] = query_starts.tolist()
        self._context_lens: list[int] = context_lens.tolist()
        self._block_tables = block_tables.long()
        self._plans: dict[tuple[int | None, int, int], list[Group]] = {}

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
        """As `reference.paged_attention`, within rounding."""
        _, block_size, num_kv_heads, head_dim = key_cache.shape
        output = torch.empty_like(query)
        for group in self._plan(window, block_size, 2 * num_kv_heads * head_dim * key_cache.element_size()):
            rows = query.index_select(0, group.rows).view(
                group.num_sequences, group.query_len, *query.shape[1:]
            )
            key = _gather(key_cache, group).to(query.dtype)
            value = _gather(value_cache, group).to(query.dtype)
            if soft_cap is None and sinks is None:
                attended = _attend_fused(rows, key, value, group.visible, scale)
            else:
                attended = _attend(rows, key, value, group.visible, scale, soft_cap, sinks)
            output.index_copy_(0, group.rows, attended.reshape(-1, *query.shape[1:]))
        return output

    def _plan(self, window: int | None, block_size: int, token_bytes: int) -> list[Group]:
        key = (window, block_size, token_bytes)
        if key not in self._plans:
            max_tokens = GROUP_BYTES // token_bytes
            self._plans[key] = [
                self._group(members, window, block_size) for members in self._members(window, max_tokens)
            ]
        return self._plans[key]

    def _members(self, window: int | None, max_tokens: int) -> Iterator[list[int]]:
        """Sequences to be computed together: same query length, few padded tokens."""
        sized = sorted(
            (query_len, self._num_visible(index, window), index)
            for index, query_len in enumerate(map(self._query_len, range(len(self._context_lens))))
            if query_len
        )
        members: list[int] = []
        shortest, length = 0, 0
        for query_len, num_visible, index in sized:
            fits = (len(members) + 1) * num_visible <= max_tokens and num_visible <= 2 * shortest
            if members and not (fits and query_len == length):
                yield members
                members = []
            if not members:
                shortest, length = num_visible, query_len
            members.append(index)
        if members:
            yield members

    def _query_len(self, index: int) -> int:
        return self._query_starts[index + 1] - self._query_starts[index]

    def _num_visible(self, index: int, window: int | None) -> int:
        """Positions that at least one row of the sequence sees: the last so many of its context."""
        context = self._context_lens[index]
        return context if window is None else min(context, self._query_len(index) + window - 1)

    def _group(self, members: list[int], window: int | None, block_size: int) -> Group:
        query_len = self._query_len(members[0])
        sizes = [self._num_visible(index, window) for index in members]
        starts = torch.tensor([self._query_starts[index] for index in members])
        contexts = torch.tensor([self._context_lens[index] for index in members])[:, None]
        positions = contexts - torch.tensor(sizes)[:, None] + torch.arange(max(sizes))
        readable = torch.minimum(positions, contexts - 1)
        blocks = self._block_tables[torch.tensor(members)[:, None], readable // block_size]
        row_positions = contexts - query_len + torch.arange(query_len)
        whole = query_len == sizes[0] and _window_spans(window, query_len)
        plain = min(sizes) == max(sizes) and (query_len == 1 or whole)
        return Group(
            rows=(starts[:, None] + torch.arange(query_len)).view(-1),
            slots=(blocks * block_size + readable % block_size).view(-1),
            visible=None if plain else _visible(row_positions, positions, window),
            num_sequences=len(members),
            query_len=query_len,
        )


def _window_spans(window: int | None, length: int) -> bool:
    """Whether a window hides nothing among `length` positions."""
    return window is None or window >= length


def _gather(cache: Tensor, group: Group) -> Tensor:
    """K or V of a group, [n, Hkv, p, D] (strided: a token's heads stay together in memory)."""
    _, _, num_kv_heads, head_dim = cache.shape
    tokens = cache.view(-1, num_kv_heads * head_dim).index_select(0, group.slots)
    return tokens.view(group.num_sequences, -1, num_kv_heads, head_dim).transpose(1, 2)


def _visible(rows: Tensor, positions: Tensor, window: int | None) -> Tensor:
    """Which `positions` [n, p] query rows at positions `rows` [n, q] see, bool [n, 1, q, p]."""
    distance = rows[:, None, :, None] - positions[:, None, None, :]
    visible = distance >= 0
    return visible if window is None else visible & (distance < window)


def _attend_fused(query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, scale: float) -> Tensor:
    """`query` [n, q, Hq, D], `key` and `value` [n, Hkv, p, D]; returns [n, q, Hq, D]."""
    num_sequences, query_len, num_heads, head_dim = query.shape
    if query_len == 1:  # the heads that share K and V become the rows of one query: no head is repeated
        grouped = query.view(num_sequences, key.shape[1], -1, head_dim)
        return scaled_dot_product_attention(grouped, key, value, attn_mask=visible, scale=scale)
    attended = scaled_dot_product_attention(
        query.transpose(1, 2),
        key,
        value,
        attn_mask=visible,
        is_causal=visible is None,
        scale=scale,
        enable_gqa=num_heads != key.shape[1],
    )
    return attended.transpose(1, 2)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor | None,
    scale: float,
    soft_cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """What the fused call cannot do; shapes as there, float32 inside."""
    num_sequences, query_len, _, head_dim = query.shape
    num_kv_heads, num_positions = key.shape[1:3]
    grouped = query.view(num_sequences, query_len, num_kv_heads, -1, head_dim).permute(0, 2, 3, 1, 4)
    scores = grouped.float() @ key.float().mT.unsqueeze(2) * scale  # [n, Hkv, Hq / Hkv, q, p]
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if visible is None:
        everything = torch.ones(query_len, num_positions, dtype=torch.bool)
        visible = everything.tril(num_positions - query_len)[None, None]
    scores = scores.masked_fill(~visible.unsqueeze(1), float("-inf"))
    if sinks is not None:
        sink = sinks.float().view(1, num_kv_heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, sink), dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., :num_positions]
    attended = weights @ value.float().unsqueeze(2)
    return attended.permute(0, 3, 1, 2, 4).to(query.dtype)
