"""A compiled structure and the state of one text in it, as the engine knows them."""

from __future__ import annotations

import numpy as np
import torch
from llguidance import LLMatcher
from torch import Tensor

from chairlift_worker.engine.grammar import GrammarError


class CompiledGrammar:
    """See `engine.grammar.Grammar`."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, endings: frozenset[int]) -> None:
        """`endings` are the model's end-of-sequence tokens; `matcher` stands at the beginning."""
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._endings = sorted(endings)

    def begin(self) -> MatcherState:
        """See `engine.grammar.Grammar`."""
        return MatcherState(self._matcher.deep_copy(), self._vocab_size, self._endings)


class MatcherState:
    """See `engine.grammar.GrammarState`. Lives in the engine's thread."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, endings: list[int]) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._endings = endings
        self._bits = np.zeros(-(-vocab_size // 32), dtype=np.int32)

    @property
    def is_complete(self) -> bool:
        """See `engine.grammar.GrammarState`."""
        return bool(self._matcher.is_stopped())

    def allowed(self) -> Tensor:
        """See `engine.grammar.GrammarState`."""
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        self._check()
        bits = np.unpackbits(self._bits.view(np.uint8), bitorder="little", count=self._vocab_size)
        allowed = torch.from_numpy(bits).bool()
        allowed[self._endings] = bool(self._matcher.is_accepting())
        return allowed

    def accept(self, token_id: int) -> None:
        """See `engine.grammar.GrammarState`."""
        self._matcher.consume_token(token_id)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(f"structured output: {self._matcher.get_error()[:500]}")
