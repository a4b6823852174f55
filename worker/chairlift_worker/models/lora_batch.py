"""Adapters of many kinds in one step: rows of the same adapter lie one behind the other.

    chunks as they come     A  base  B  A  base  A
    as they are computed    base base | A A A | B          one segment for each adapter

So a step costs two small products for each product of the base and each adapter that rides, however many
sequences ride with it, and rows of the base cost nothing (segmented products: Punica, arXiv 2310.18547).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import NamedTuple

from torch import Tensor

from chairlift_worker.engine.batch import Chunk
from chairlift_worker.models.lora_weights import LoraWeights, LowRank


class Segment(NamedTuple):
    """Rows [start, end) of a step, which ride with one adapter."""

    start: int
    end: int
    weights: LoraWeights


class LineUp(NamedTuple):
    """The chunks of a step in the order in which they are computed."""

    chunks: Seq[Chunk]
    segments: tuple[Segment, ...] = ()
    logit_places: tuple[int, ...] | None = None
    """For each row of logits, in the order in which the chunks came, its place among those computed; None
    where that is the same."""


def line_up(chunks: Seq[Chunk]) -> LineUp:
    """Those without an adapter first, then adapter by adapter."""
    if all(chunk.adapter is None for chunk in chunks):
        return LineUp(chunks)
    groups: dict[str, list[int]] = defaultdict(list)
    for index, chunk in enumerate(chunks):
        groups["" if chunk.adapter is None else chunk.adapter.digest].append(index)
    order = [index for digest in sorted(groups) for index in groups[digest]]
    lined_up = [chunks[index] for index in order]
    return LineUp(lined_up, _segments(lined_up), _logit_places(chunks, order))


def low_rank(
    hidden: Tensor, pair: LowRank, linear: Callable[[Tensor, Tensor, Tensor | None], Tensor]
) -> Tensor:
    """What a pair adds to the product [T, N] of the rows `hidden` [T, K]."""
    return linear(linear(hidden, pair.shrink, None), pair.expand, None)


def _segments(chunks: Seq[Chunk]) -> tuple[Segment, ...]:
    segments: list[Segment] = []
    start = 0
    for chunk in chunks:
        end = start + len(chunk.token_ids)
        if chunk.adapter is not None:
            assert isinstance(chunk.adapter, LoraWeights)
            if segments and segments[-1].weights.digest == chunk.adapter.digest:
                segments[-1] = segments[-1]._replace(end=end)
            else:
                segments.append(Segment(start, end, chunk.adapter))
        start = end
    return tuple(segments)


def _logit_places(chunks: Seq[Chunk], order: Seq[int]) -> tuple[int, ...]:
    first: dict[int, int] = {}
    num_before = 0
    for index in order:
        first[index] = num_before
        num_before += chunks[index].num_logits
    return tuple(
        first[index] + offset for index, chunk in enumerate(chunks) for offset in range(chunk.num_logits)
    )
