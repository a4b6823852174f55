"""The one interface between the engine and a model.

Two implementations: the lean decoder (models/decoder.py) and the transformers fallback
(models/fallback.py). Both own the paged KV cache that the engine's block ids point into.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol

from torch import Tensor

from chairlift_worker.engine.batch import Chunk


class RunnerSpec(NamedTuple):
    """What the engine has to know of a model."""

    vocab_size: int
    """Rows of logits have this many columns; a token id is valid iff 0 <= id < vocab_size."""
    context_tokens: int
    """Most tokens of one sequence, prompt and output together."""
    num_blocks: int
    block_size: int
    eos_token_ids: frozenset[int]

    @property
    def num_slots(self) -> int:
        """Tokens whose keys and values the pool holds at once."""
        return self.num_blocks * self.block_size

    @property
    def pool_tokens(self) -> int:
        """Tokens of the longest sequence for which the pool has room: the last one is never computed."""
        return self.num_slots + 1

    @property
    def longest_sequence(self) -> int:
        """Most tokens of one sequence, whichever ends first, the context or the pool."""
        return min(self.context_tokens, self.pool_tokens)


class Runner(Protocol):
    """Computes logits for a step. Called from the engine's thread only."""

    @property
    def spec(self) -> RunnerSpec:
        """Sizes, fixed for the runner's life."""
        ...

    def forward(self, chunks: Seq[Chunk]) -> Tensor:
        """Write the chunks' K and V and return logits [sum of num_logits, vocab_size] in float32.

        Rows follow the chunks' order. `chunks` is never empty; blocks of different chunks that are
        written to never overlap. First of all, what the chunks' `copy_from` ask for is copied.
        """
        ...
