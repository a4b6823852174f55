"""How much memory the running sequences will come to need, from how long outputs have been lately.

After "Past-Future Scheduler for LLM Serving under SLA Guarantees" (Gong et al., ASPLOS 2025): sequences
end one after the other, so the most memory is needed just before one of them ends.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable

from chairlift_worker.engine.sequence import Sequence

_WINDOW = 512
_FIRST_GUESS = 256
"""Output tokens of a job before any has ended."""


class OutputLengths:
    """The lengths of the outputs that ended last."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque([_FIRST_GUESS], maxlen=_WINDOW)
        self._sorted: list[int] = []
        self._sums_from: list[int] = []
        self._sort()

    def add(self, num_output: int) -> None:
        """A sequence has ended with so many output tokens."""
        self._recent.append(num_output)
        self._sorted = []

    def expected(self, num_output: int) -> int:
        """The mean length of outputs that were longer than `num_output`; half as much again if none was."""
        if not self._sorted:
            self._sort()
        first = bisect_right(self._sorted, num_output)
        num_longer = len(self._sorted) - first
        if num_longer == 0:
            return num_output + max(1, num_output // 2)
        return -(-self._sums_from[first] // num_longer)

    def _sort(self) -> None:
        self._sorted = sorted(self._recent)
        total, sums = 0, []
        for length in reversed(self._sorted):
            total += length
            sums.append(total)
        self._sums_from = sums[::-1]


def peak_slots(sequences: Iterable[Sequence], lengths: OutputLengths, block_size: int) -> int:
    """The most slots that the sequences are expected to hold at once, half of each one's last block empty.

    Nobody is expected to have less than one token to go, or more than it may.
    """
    expected: list[tuple[int, int]] = []
    for sequence in sequences:
        known, num_output = len(sequence.token_ids), sequence.num_output
        remaining = min(lengths.expected(num_output) - num_output, sequence.max_slots - known)
        expected.append((max(1, remaining), known))
    expected.sort(reverse=True)
    half_block = (block_size - 1) // 2
    peak = num_known = 0
    for num_alive, (remaining, known) in enumerate(expected, start=1):
        num_known += known
        slots = num_known + num_alive * (remaining + half_block)
        if slots > peak:
            peak = slots
    return peak
