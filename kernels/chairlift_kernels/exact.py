"""Ops on CPU whose rows do not depend, to the last bit, on the rows beside them.

Floats do not add up the same in every order, and libraries choose the order by the shape of the whole
call. Found by trying (torch 2.13 with MKL, AVX-512, float32): a product's rows come out in one way from
1 row, in another from 2 to 4, and in others up to 15, and all alike from 16 rows on; a row's place and
its neighbours do not matter. Fused SiLU and GELU differ between the vectors and the rest of a tensor.
Attention depends on how its positions are padded and split. exp, tanh, sin, cos, sums over the last axis
and batched products of one shape did not depend on the rest of a batch.

So: products have at least 16 rows, activations are made of ops that round each step, and attention adds
its splits, which begin at multiples of a fixed length, in order of position. `check_products` tries on
this machine what cannot be known.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

MIN_ROWS = 16
SPLIT_TOKENS = 64
"""Positions whose scores are computed by one product."""
_TRIED_ROWS = (MIN_ROWS, 17, 33, 64, 130)


def linear(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As torch's: `hidden` [T, K] by `weight` [N, K]."""
    missing = MIN_ROWS - len(hidden)
    if missing <= 0:
        return functional.linear(hidden, weight, bias)
    padded = functional.pad(hidden, (0, 0, 0, missing))
    return functional.linear(padded, weight, bias)[: len(hidden)]


def check_products(weights: Iterable[Tensor]) -> tuple[int, ...] | None:
    """The shape of a weight whose products do depend on the number of rows here; None if there is none."""
    tried: set[tuple[int, ...]] = set()
    generator = torch.Generator().manual_seed(0)
    for weight in weights:
        shape = tuple(weight.shape)
        if shape in tried:
            continue
        tried.add(shape)
        rows = torch.randn(_TRIED_ROWS[-1], shape[1], generator=generator).to(weight.dtype)
        whole = functional.linear(rows, weight)
        if not all(
            torch.equal(functional.linear(rows[:count], weight), whole[:count]) for count in _TRIED_ROWS
        ):
            return shape
    return None


def silu_mul(gate_up: Tensor) -> Tensor:
    """As `reference.silu_mul`."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate / (torch.exp(-gate) + 1.0) * up).to(gate_up.dtype)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """GeGLU's middle (arXiv 2002.05202) with the tanh form of GELU; shapes as in `silu_mul`."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    bent = (gate * gate * gate * 0.044715 + gate) * (2.0 / torch.pi) ** 0.5
    return (gate * 0.5 * (torch.tanh(bent) + 1.0) * up).to(gate_up.dtype)


class Tiles(NamedTuple):
    """All query vectors of a step that share a K/V head, 16 to a tile, each tile of one sequence.

    A vector is one row and one of the G heads that share its K/V head. n tiles.
    """

    vectors: Tensor  # [n, 16] of T * G; where a tile is not full its last vector again
    positions: Tensor  # [n, 16] of the vectors' rows
    sequences: Tensor  # [n]
    first: Tensor  # [n] the lowest position that a vector of the tile sees
    last: Tensor  # [n] the highest


class ExactAttention:
    """The attention of one step; the signature of `reference.paged_attention`, made once for all layers."""

    def __init__(self, query_starts: Tensor, context_lens: Tensor, block_tables: Tensor) -> None:
        self._query_starts: list[int] = query_starts.tolist()
        self._context_lens: list[int] = context_lens.tolist()
        self._block_tables = block_tables.long()
        self._tiles: dict[tuple[int, int | None], Tiles] = {}

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
        """As `reference.paged_attention`, within rounding, and in float32."""
        assert sinks is None, "no family of the decoder has sinks"
        num_rows, num_heads, head_dim = query.shape
        _, block_size, num_kv_heads, _ = key_cache.shape
        tiles = self._plan(num_heads // num_kv_heads, window)
        # [Hkv, T * G, D]: the vectors of each K/V head
        vectors = query.float().view(num_rows, num_kv_heads, -1, head_dim).transpose(0, 1).flatten(1, 2)
        state = _State(vectors[:, tiles.vectors].transpose(0, 1), scale, soft_cap)
        keys, values = (cache.view(-1, num_kv_heads, head_dim) for cache in (key_cache, value_cache))
        for start in range(0, int(tiles.last.max()) + 1, SPLIT_TOKENS):
            reached = ((tiles.last >= start) & (tiles.first < start + SPLIT_TOKENS)).nonzero()[:, 0]
            if len(reached):
                positions = torch.arange(start, start + SPLIT_TOKENS)
                slots = self._slots(tiles, reached, positions, block_size)
                visible = _visible(tiles.positions[reached], positions, window)
                state.add(reached, keys[slots].float(), values[slots].float(), visible)
        output = torch.empty_like(vectors)
        output[:, tiles.vectors.flatten()] = state.attended().transpose(0, 1).flatten(1, 2)
        grouped = output.view(num_kv_heads, num_rows, -1, head_dim).transpose(0, 1)
        return grouped.reshape(query.shape).to(query.dtype)

    def _slots(self, tiles: Tiles, reached: Tensor, positions: Tensor, block_size: int) -> Tensor:
        """Where K and V of the split lie, [n, split]; never a slot that no row of the tile sees."""
        readable = positions.clamp(tiles.first[reached, None], tiles.last[reached, None])
        blocks = self._block_tables[tiles.sequences[reached, None], readable // block_size]
        return blocks * block_size + readable % block_size

    def _plan(self, group: int, window: int | None) -> Tiles:
        key = (group, window)
        if key not in self._tiles:
            self._tiles[key] = self._cut(group, window)
        return self._tiles[key]

    def _cut(self, group: int, window: int | None) -> Tiles:
        vectors, sequences = [], []
        row_positions: list[int] = []
        for index, context in enumerate(self._context_lens):
            start, end = self._query_starts[index], self._query_starts[index + 1]
            row_positions.extend(range(context - (end - start), context))
            of_sequence = list(range(start * group, end * group))
            of_sequence += of_sequence[-1:] * (-len(of_sequence) % MIN_ROWS)
            vectors.extend(of_sequence)
            sequences.extend([index] * (len(of_sequence) // MIN_ROWS))
        tiled = torch.tensor(vectors).view(-1, MIN_ROWS)
        positions = torch.tensor(row_positions)[tiled // group]
        lowest = positions[:, 0]
        first = torch.zeros_like(lowest) if window is None else (lowest - window + 1).clamp(min=0)
        return Tiles(tiled, positions, torch.tensor(sequences), first, positions[:, -1])


class _State:
    """Softmax and weighted sum, split by split (arXiv 1805.02867). A split that hides all changes no bit."""

    def __init__(self, query: Tensor, scale: float, soft_cap: float | None) -> None:
        """`query` [n, Hkv, 16, D]."""
        self._query, self._scale, self._soft_cap = query, scale, soft_cap
        self._best = torch.full((*query.shape[:-1], 1), float("-inf"))
        self._sums = torch.zeros(*query.shape[:-1], query.shape[-1] + 1)  # the weights' own sum comes last

    def add(self, tiles: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> None:
        """`key`, `value` [n, split, Hkv, D] and `visible` [n, 16, split] for the tiles with these numbers."""
        scores = self._query[tiles] @ key.transpose(1, 2).contiguous().mT * self._scale
        if self._soft_cap is not None:
            scores = torch.tanh(scores / self._soft_cap) * self._soft_cap
        scores = scores.masked_fill(~visible[:, None], float("-inf"))
        before = self._best[tiles]
        best = torch.maximum(before, scores.amax(-1, keepdim=True))
        pivot = best.masked_fill(best == float("-inf"), 0.0)  # nothing seen yet
        weights = torch.exp(scores - pivot)
        counted = functional.pad(value.transpose(1, 2), (0, 1), value=1.0)
        self._sums[tiles] = self._sums[tiles] * torch.exp(before - pivot) + weights @ counted.contiguous()
        self._best[tiles] = best

    def attended(self) -> Tensor:
        """[n, Hkv, 16, D]."""
        return self._sums[..., :-1] / self._sums[..., -1:]


def _visible(rows: Tensor, positions: Tensor, window: int | None) -> Tensor:
    """Which `positions` [split] the vectors at `rows` [n, 16] see, bool [n, 16, split]."""
    distance = rows[:, :, None] - positions
    visible = distance >= 0
    return visible if window is None else visible & (distance < window)
