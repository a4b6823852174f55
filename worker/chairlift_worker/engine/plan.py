"""Tokens given out so far in the step being scheduled."""

from __future__ import annotations

from chairlift_worker.engine.sequence import Sequence


class Plan:
    """Two budgets: one for all tokens, and one for those of sequences that have more than one to go."""

    def __init__(self, budget: int, prefill_budget: int) -> None:
        self.num_tokens: dict[Sequence, int] = {}
        self.preempted: set[Sequence] = set()
        self._budget = budget
        self._prefill_budget = prefill_budget

    @property
    def has_room(self) -> bool:
        """Whether a prompt may still begin."""
        return min(self._budget, self._prefill_budget) > 0

    def room(self, sequence: Sequence) -> int:
        """Tokens that the sequence may be given."""
        if sequence.num_pending == 1:
            return self._budget
        return min(self._budget, self._prefill_budget)

    def give(self, sequence: Sequence, num_tokens: int) -> None:
        """Let it compute so many tokens in this step."""
        self.num_tokens[sequence] = num_tokens
        self._spend(sequence, num_tokens)

    def preempt(self, sequence: Sequence) -> None:
        """It loses its blocks; before its counts change, for what it was given goes back."""
        self.preempted.add(sequence)
        self._spend(sequence, -self.num_tokens.pop(sequence, 0))

    def _spend(self, sequence: Sequence, num_tokens: int) -> None:
        self._budget -= num_tokens
        if sequence.num_pending > 1:
            self._prefill_budget -= num_tokens
