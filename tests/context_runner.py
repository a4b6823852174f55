"""A runner without weights: its logits are a random function of the exact context in its paged cache.

The cache holds token ids, one per slot, and the context is read back through the block table. A wrong
slot, a lost token or a block that two sequences write to changes everything that follows.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from chairlift_worker.engine.batch import Chunk, build_batch
from chairlift_worker.engine.runner import RunnerSpec

POISON = 1
"""A context with this token has logits that are not finite."""
EOS = 0


class ContextRunner:
    """A `Runner` that also counts what it is asked to do."""

    def __init__(
        self, *, vocab_size: int = 64, context_tokens: int = 512, num_blocks: int = 64, block_size: int = 4
    ) -> None:
        self._spec = RunnerSpec(vocab_size, context_tokens, num_blocks, block_size, frozenset({EOS}))
        self._cache = torch.full((num_blocks * block_size,), -1)
        self.num_steps = 0
        self.fail_next = False

    @property
    def spec(self) -> RunnerSpec:
        return self._spec

    def forward(self, chunks: Seq[Chunk]) -> Tensor:
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("out of memory")
        self.num_steps += 1
        batch = build_batch(chunks, self._spec.block_size, torch.device("cpu"))
        assert len(set(batch.slots.tolist())) == len(batch.slots), "two tokens in one slot"
        pages = self._cache.view(self._spec.num_blocks, self._spec.block_size)
        pages[batch.copy_targets] = pages[batch.copy_sources]
        self._cache[batch.slots] = batch.token_ids
        rows = [
            self._logits(self._context(chunk, chunk.start + len(chunk.token_ids) - back))
            for chunk in chunks
            for back in range(chunk.num_logits - 1, -1, -1)
        ]
        return torch.stack(rows) if rows else torch.empty(0, self._spec.vocab_size)

    def _context(self, chunk: Chunk, length: int) -> list[int]:
        positions = torch.arange(length)
        blocks = torch.tensor(chunk.block_table)[positions // self._spec.block_size]
        context: list[int] = self._cache[
            blocks * self._spec.block_size + positions % self._spec.block_size
        ].tolist()
        return context

    def _logits(self, context: list[int]) -> Tensor:
        if POISON in context:
            return torch.full((self._spec.vocab_size,), torch.nan)
        state = 0
        for token_id in context:
            state = (state * 1_000_003 + token_id + 1) % (1 << 61)
        logits = 3.0 * torch.randn(self._spec.vocab_size, generator=torch.Generator().manual_seed(state))
        logits[POISON] = -10_000.0
        return logits
