"""Stop strings over the accumulated text: found across tokens, and never shown in part.

Text that may be the beginning of a stop string is held back. What is held is whole pieces (the text
of one token each), so that a marker like `</answer>` that turns out to be no stop string arrives in
the pieces it was made of, and not cut where the doubt began.
"""

from __future__ import annotations

from typing import NamedTuple


class StopMatch(NamedTuple):
    """Where the accumulated held text is cut."""

    end: int
    start: int
    stop: str


class StopMatcher:
    """Fed with the pieces of one text in order; after a match it must not be fed any more."""

    def __init__(self, stops: tuple[str, ...], *, include_stop: bool = False) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._include_stop = include_stop
        self._pieces: list[str] = []
        self.matched: str | None = None

    def append(self, piece: str, *, may_match: bool = True) -> str:
        """The text that may be shown after this piece.

        The stop string that is complete first wins, of two that end together the longer one. With
        `may_match` False (before min_tokens) a stop string that this piece completes is ordinary text.
        """
        if not self._stops:
            return piece
        num_before = sum(map(len, self._pieces))
        self._pieces.append(piece)
        text = "".join(self._pieces)
        match = self._find(text, num_before) if may_match else None
        if match is None:
            return self._release(_doubtful_length(text, self._stops))
        self.matched = match.stop
        self._pieces.clear()
        return text[: match.end if self._include_stop else match.start]

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        return self._release(0)

    def _find(self, text: str, num_before: int) -> StopMatch | None:
        """The first match that ends behind the `num_before` characters searched before."""
        matches = []
        for stop in self._stops:
            start = text.find(stop, max(0, num_before - len(stop) + 1))
            if start >= 0:
                matches.append(StopMatch(start + len(stop), start, stop))
        return min(matches, default=None)

    def _release(self, num_held: int) -> str:
        """Let whole pieces go, keeping at least the last `num_held` characters."""
        num_kept = 0
        first_kept = len(self._pieces)
        while num_kept < num_held:
            first_kept -= 1
            num_kept += len(self._pieces[first_kept])
        released, self._pieces = self._pieces[:first_kept], self._pieces[first_kept:]
        return "".join(released)


def _doubtful_length(text: str, stops: tuple[str, ...]) -> int:
    """Length of the longest end of the text that some stop string, not yet complete, begins with."""
    longest = min(len(text), max(map(len, stops)) - 1)
    for length in range(longest, 0, -1):
        end = text[-length:]
        if any(len(stop) > length and stop.startswith(end) for stop in stops):
            return length
    return 0
