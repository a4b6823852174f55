"""Feeds sequences to a runner as a busy engine might: in random company and in random pieces."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from chairlift_worker.engine.batch import Chunk
from chairlift_worker.engine.runner import Runner


class RaggedDriver:
    """Shares the runner's blocks out among the sequences, shuffled, and feeds each step a random few."""

    def __init__(self, runner: Runner, num_sequences: int, rng: random.Random, *, max_chunk: int = 8) -> None:
        self._runner = runner
        self._rng = rng
        self._max_chunk = max_chunk
        blocks = list(range(runner.spec.num_blocks))
        rng.shuffle(blocks)
        self._tables = [tuple(blocks[index::num_sequences]) for index in range(num_sequences)]
        self._num_computed = [0] * num_sequences

    def is_behind(self, index: int, text: list[int]) -> bool:
        """Whether some of the sequence's tokens are still to be computed."""
        return self._num_computed[index] < len(text)

    def step(self, texts: list[list[int]]) -> dict[int, Tensor]:
        """Advance some sequences; the logits of each one's new rows, by its index."""
        behind = [index for index, text in enumerate(texts) if self.is_behind(index, text)]
        riding = self._rng.sample(behind, self._rng.randint(1, len(behind)))
        chunks = [self._next_chunk(index, texts[index]) for index in riding]
        logits = torch.split(self._runner.forward(chunks), [chunk.num_logits for chunk in chunks])
        return dict(zip(riding, logits, strict=True))

    def continue_greedily(self, prompts: list[list[int]], num_new_tokens: int) -> list[list[int]]:
        """Each prompt with the tokens that follow it; nothing ends a text early."""
        texts = [list(prompt) for prompt in prompts]
        ends = [len(prompt) + num_new_tokens for prompt in prompts]
        while any(len(text) < end for text, end in zip(texts, ends, strict=True)):
            # A text that has its length drops out: its last token needs no computing.
            unfinished = [text if len(text) < end else [] for text, end in zip(texts, ends, strict=True)]
            for index, logits in self.step(unfinished).items():
                if not self.is_behind(index, texts[index]):
                    texts[index].append(int(logits[-1].argmax()))
        return texts

    def _next_chunk(self, index: int, text: list[int]) -> Chunk:
        start = self._num_computed[index]
        end = min(len(text), start + self._rng.randint(1, self._max_chunk))
        self._num_computed[index] = end
        return Chunk(tuple(text[start:end]), start, self._tables[index], num_logits=end - start)
