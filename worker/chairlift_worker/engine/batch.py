"""What the scheduler hands to the runner: plain data first, tensors second.

Ranges are half-open. A block holds `block_size` slots; slot s lies in block s // block_size.

    sequence A   |  computed  | scheduled now |        tokens it knows
    positions    0 ......... start ......... start + len(token_ids)
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import torch
from torch import Tensor

from chairlift_worker.engine.adapter import Adapter


class Chunk(NamedTuple):
    """One sequence's part of a step: the tokens to compute now, and where its KV lies."""

    token_ids: tuple[int, ...]
    start: int
    """Position of the first of them; the KV of positions [0, start) is in the cache already."""
    block_table: tuple[int, ...]
    """Covers at least start + len(token_ids) slots."""
    num_logits: int
    """How many of the last rows need logits: 0 inside a prompt, 1 to sample, more to verify drafts."""
    copy_from: int | None = None
    """A block whose content goes into the one that `start` lies in, before anything is written: the
    sequence shares a beginning with another one, and goes on in the middle of a block."""
    adapter: Adapter | None = None
    """Weights that its rows are computed with on top of the model's."""


class Batch(NamedTuple):
    """The tensors of one step. T tokens of S sequences, R rows of logits; int64 unless said otherwise."""

    token_ids: Tensor  # [T]
    positions: Tensor  # [T]
    slots: Tensor  # [T] where each token's K and V go: block * block_size + offset
    query_starts: Tensor  # [S + 1] int32, cumulative query lengths
    context_lens: Tensor  # [S] int32, tokens in the cache after this step's write
    block_tables: Tensor  # [S, max blocks] int32, padded with 0
    logit_rows: Tensor  # [R] indices into T
    copy_sources: Tensor  # [C] blocks to copy, before this step's write …
    copy_targets: Tensor  # [C] … and those to copy them into
    max_query_len: int
    max_context_len: int


def build_batch(chunks: Seq[Chunk], block_size: int, device: torch.device) -> Batch:
    """Lay out the chunks of a step one behind the other."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    query_starts = [0]
    context_lens: list[int] = []
    logit_rows: list[int] = []
    copies: list[tuple[int, int]] = []
    for chunk in chunks:
        end = chunk.start + len(chunk.token_ids)
        token_ids.extend(chunk.token_ids)
        positions.extend(range(chunk.start, end))
        slots.extend(
            chunk.block_table[position // block_size] * block_size + position % block_size
            for position in range(chunk.start, end)
        )
        if chunk.copy_from is not None:
            copies.append((chunk.copy_from, chunk.block_table[chunk.start // block_size]))
        query_starts.append(len(token_ids))
        context_lens.append(end)
        logit_rows.extend(range(len(token_ids) - chunk.num_logits, len(token_ids)))
    width = max(len(chunk.block_table) for chunk in chunks)
    tables = [chunk.block_table + (0,) * (width - len(chunk.block_table)) for chunk in chunks]

    def integers(values: Seq[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    return Batch(
        token_ids=integers(token_ids),
        positions=integers(positions),
        slots=integers(slots),
        query_starts=torch.tensor(query_starts, dtype=torch.int32, device=device),
        context_lens=torch.tensor(context_lens, dtype=torch.int32, device=device),
        block_tables=torch.tensor(tables, dtype=torch.int32, device=device),
        logit_rows=integers(logit_rows),
        copy_sources=integers([source for source, _ in copies]),
        copy_targets=integers([target for _, target in copies]),
        max_query_len=max(len(chunk.token_ids) for chunk in chunks),
        max_context_len=max(context_lens),
    )
