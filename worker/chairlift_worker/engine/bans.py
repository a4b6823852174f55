"""Which tokens one choice must not draw next: of the request itself, of bad words, of its structure."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import torch
from torch import Tensor

from chairlift_client.protocol import SamplingParams
from chairlift_worker.engine.grammar import GrammarState


class Bans(NamedTuple):
    """What a draw may choose from: `allowed` [vocab_size] bool (None: all), without the `banned` ids."""

    banned: frozenset[int]
    allowed: Tensor | None

    def leave_none(self, vocab_size: int) -> bool:
        """Whether nothing is left to draw."""
        if self.allowed is None:
            return len(self.banned) >= vocab_size
        if not self.banned:
            return not bool(self.allowed.any())
        banned = torch.tensor(sorted(self.banned))
        return int(self.allowed.sum()) == int(self.allowed[banned].sum())


class StandingBans:
    """What of a job's bans stays the same; shared by its choices."""

    def __init__(self, sampling: SamplingParams, bad_words: Seq[tuple[int, ...]], vocab_size: int) -> None:
        """`bad_words` as token ids, none of them empty."""
        single = {word[0] for word in bad_words if len(word) == 1}
        self._banned = frozenset(single.union(sampling.banned_token_ids))
        self._bad_words = [word for word in bad_words if len(word) > 1]
        self._allowed: Tensor | None = None
        if sampling.allowed_token_ids is not None:
            self._allowed = torch.zeros(vocab_size, dtype=torch.bool)
            self._allowed[list(sampling.allowed_token_ids)] = True

    def after(self, output: Seq[int], endings: frozenset[int], grammar: GrammarState | None) -> Bans:
        """The bans on the token that follows `output`; `endings` must not come yet. Raises GrammarError."""
        banned = self._banned | endings
        completions = {word[-1] for word in self._bad_words if _ends_with(output, word[:-1])}
        if completions:
            banned |= completions
        allowed = self._allowed
        if grammar is not None:
            permitted = grammar.allowed()
            allowed = permitted if allowed is None else allowed & permitted
        return Bans(banned, allowed)


def _ends_with(output: Seq[int], beginning: tuple[int, ...]) -> bool:
    return len(output) >= len(beginning) and tuple(output[len(output) - len(beginning) :]) == beginning
