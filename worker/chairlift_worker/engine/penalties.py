"""Penalties on tokens that occurred before: pure functions of the tokens, whatever a step computes.

What counts is every token of prompt and output that the sequence knows. It makes no difference whether
the prompt came out of a cache, in chunks, or was computed twice.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from chairlift_client.protocol import SamplingParams


class TokenCounts:
    """Which tokens occur in prompt or output, and how often in the output; append-only."""

    def __init__(self, prompt_token_ids: Iterable[int]) -> None:
        self._places = {token_id: place for place, token_id in enumerate(dict.fromkeys(prompt_token_ids))}
        self._token_ids = torch.tensor(list(self._places), dtype=torch.int64)
        self._counts = torch.zeros(len(self._places))

    def append(self, token_id: int) -> None:
        """One more output token."""
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self._token_ids):
            self._grow()
        self._token_ids[place] = token_id
        self._counts[place] += 1

    @property
    def token_ids(self) -> Tensor:
        """[N] int64, each token once."""
        return self._token_ids[: len(self._places)]

    @property
    def output_counts(self) -> Tensor:
        """[N] float32, 0 for those of the prompt alone."""
        return self._counts[: len(self._places)]

    def _grow(self) -> None:
        """Twice the room, so that appending costs the same however long the output is."""
        more = max(16, len(self._token_ids))
        self._token_ids = torch.cat([self._token_ids, torch.zeros(more, dtype=torch.int64)])
        self._counts = torch.cat([self._counts, torch.zeros(more)])


def has_penalties(sampling: SamplingParams) -> bool:
    """Whether counts are needed at all."""
    penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
    return penalties != (1.0, 0.0, 0.0)


def penalize(logits: Tensor, counts: TokenCounts, sampling: SamplingParams) -> Tensor:
    """The row [V] with all three penalties; the row given stays as it was.

    Repetition: Keskar et al., "CTRL", 2019, over prompt and output. Presence and frequency: over the output.
    """
    token_ids = counts.token_ids.to(logits.device)
    output_counts = counts.output_counts.to(logits.device)
    values = logits[token_ids]
    factor = sampling.repetition_penalty
    values = torch.where(values > 0, values / factor, values * factor)
    values = values - sampling.frequency_penalty * output_counts
    values = values - sampling.presence_penalty * (output_counts > 0)
    return logits.index_copy(0, token_ids, values)
