"""Every op in plain torch: the oracle that faster versions are tested against.

Letters in shapes: T tokens of a step (all sequences one behind the other), S sequences,
Hq query heads, Hkv key/value heads (Hq is a multiple of Hkv), D head dim.
Each op computes in float32 and returns the dtype of its first argument.
"""

from __future__ import annotations

import torch
from torch import Tensor


def write_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """Store each token's K and V in its slot, in place.

    `key`, `value` [T, Hkv, D]; caches [num_blocks, block_size, Hkv, D]; `slots` [T] int64, all
    different: slot s is row s % block_size of block s // block_size. Other slots stay as they are.
    """
    block_size = key_cache.shape[1]
    blocks, offsets = slots // block_size, slots % block_size
    key_cache[blocks, offsets] = key.to(key_cache.dtype)
    value_cache[blocks, offsets] = value.to(value_cache.dtype)


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
    """Causal attention of ragged queries over a paged KV cache; returns [T, Hq, D].

    `query` [T, Hq, D]: rows query_starts[s] to query_starts[s + 1] (`query_starts` [S + 1] int32)
    belong to sequence s. Its context of c = context_lens[s] tokens ([S] int32) is in the cache,
    its own q query tokens included, through `block_tables` [S, max_blocks] int32: row i stands at
    position c - q + i and sees the positions up to its own. One op thus serves decoding (q = 1),
    prefill chunks and the verification of drafts.

    `window` w keeps only the last w of these positions, its own among them. `soft_cap` bounds
    scores to cap * tanh(score / cap) (Gemma 2, arXiv 2408.00118). `sinks` [Hq] is one more score
    per head that takes part in the softmax but has no value (GPT-OSS, arXiv 2309.17453).
    Query head h uses key/value head h // (Hq / Hkv) (grouped-query attention, arXiv 2305.13245).

    A slot that no row of its sequence sees is never read: those at or past context_lens[s], and
    those before every row's window. Whatever is left there, NaN too, cannot leak.
    """
    output = torch.empty_like(query)
    bounds, lengths = query_starts.tolist(), context_lens.tolist()
    for index, context in enumerate(lengths):
        start, end = bounds[index], bounds[index + 1]
        if start == end:
            continue
        first = 0 if window is None else max(0, context - (end - start) - window + 1)
        positions = torch.arange(first, context, device=query.device)
        output[start:end] = _attend(
            query[start:end].float(),
            _gather(key_cache, block_tables[index], positions),
            _gather(value_cache, block_tables[index], positions),
            visible=_visible(positions[start - end :], positions, window),
            scale=scale,
            soft_cap=soft_cap,
            sinks=sinks,
        ).to(query.dtype)
    return output


def _gather(cache: Tensor, block_table: Tensor, positions: Tensor) -> Tensor:
    """The tokens of one sequence at `positions` [p], float32 [p, Hkv, D]."""
    block_size = cache.shape[1]
    return cache[block_table[positions // block_size].long(), positions % block_size].float()


def _visible(rows: Tensor, positions: Tensor, window: int | None) -> Tensor:
    """Which `positions` [p] the query rows at positions `rows` [q] see, bool [q, p]."""
    distance = rows[:, None] - positions[None, :]
    visible = distance >= 0
    return visible if window is None else visible & (distance < window)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    visible: Tensor,
    scale: float,
    soft_cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Dense attention of one sequence: `query` [q, Hq, D], `key` and `value` [c, Hkv, D]."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,chd->hqc", query, key) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        sink = sinks.float()[:, None, None].expand(-1, scores.shape[1], 1)
        scores = torch.cat((scores, sink), dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : key.shape[0]]
    return torch.einsum("hqc,chd->qhd", weights, value)


def rms_norm(hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Scale each row of the last axis to a root mean square of 1, then by `weight` (arXiv 1910.07467).

    `hidden` [..., N], `weight` [N].
    """
    wide = hidden.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return weight * wide.to(hidden.dtype)


def rope(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by their positions (arXiv 2104.09864), the halves of a head being the pairs.

    `query` [T, Hq, D], `key` [T, Hkv, D]; `cos`, `sin` [T, R / 2] with R <= D: dimension i < R / 2
    is paired with i + R / 2; dimensions from R on pass unrotated.
    """
    return _rotate(query, cos, sin), _rotate(key, cos, sin)


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    cos, sin = cos[:, None].float(), sin[:, None].float()
    first, second = heads[..., :half].float(), heads[..., half : 2 * half].float()
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat([*(part.to(heads.dtype) for part in turned), heads[..., 2 * half :]], dim=-1)


def silu_mul(gate_up: Tensor) -> Tensor:
    """SwiGLU's middle (arXiv 2002.05202): silu(gate) * up.

    `gate_up` [..., 2 * N], the gate in the first half of each row; returns [..., N].
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)
