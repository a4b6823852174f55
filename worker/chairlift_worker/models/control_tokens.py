"""Keeps control tokens that a user typed apart from those that the chat template wrote.

A message may contain the text of a control token, like <|im_end|>, by accident or to break out of its
turn. Such text is *disarmed* before the template runs, by a marker character put inside it; what then
still reads as a control token was written by the template. Once the text is cut at those, the marker
is taken out again and the pieces are tokenized with control tokens switched off.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from chairlift_client.errors import InvalidJob

_MARKERS = "".join(map(chr, range(0xFDD0, 0xFDF0)))
"""Code points that Unicode keeps free for use inside a program; no text should have them."""


class Piece(NamedTuple):
    """A part of a rendered prompt: one control token of the template's, or text between such."""

    text: str
    is_control: bool


class ControlTokens:
    """The control tokens of one tokenizer, as texts; those of a single character count as text."""

    def __init__(self, tokens: Iterable[str]) -> None:
        longest_first = sorted((token for token in tokens if len(token) > 1), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._beginnings = {token[:size] for token in longest_first for size in range(1, len(token))}
        self._endings = {token[size:] for token in longest_first for size in range(1, len(token))}
        self._longest_part = max(map(len, self._beginnings), default=0)

    def disarm(self, text: str, marker: str) -> str:
        """`text` with a `marker` inside whatever is a control token, or with its surroundings could be."""
        while self._pattern.search(text):  # again, for tokens within or across tokens
            text = self._pattern.sub(lambda match: match[0][0] + marker + match[0][1:], text)
        return self._disarm_end(self._disarm_start(text, marker), marker)

    def _disarm_start(self, text: str, marker: str) -> str:
        """A marker before the rest of a token that the template's text before it could complete.

        It stands after leading blanks, so that a template that trims still does.
        """
        start = len(text) - len(text.lstrip())
        sizes = range(1, min(self._longest_part, len(text) - start) + 1)
        if any(text[start : start + size] in self._endings for size in sizes):
            return text[:start] + marker + text[start:]
        return text

    def _disarm_end(self, text: str, marker: str) -> str:
        """The same at the end, for the first part of a token."""
        end = len(text.rstrip())
        sizes = range(1, min(self._longest_part, end) + 1)
        if any(text[end - size : end] in self._beginnings for size in sizes):
            return text[:end] + marker + text[end:]
        return text

    def cut(self, text: str, marker: str) -> Iterator[Piece]:
        """The pieces of a rendered prompt in order, markers taken out, empty ones left out."""
        position = 0
        for match in self._pattern.finditer(text):
            yield from _text_piece(text[position : match.start()], marker)
            yield Piece(match[0], is_control=True)
            position = match.end()
        yield from _text_piece(text[position:], marker)


def choose_marker(texts: Iterable[str]) -> str:
    """A character that occurs in none of `texts`; InvalidJob if they leave none."""
    used = set("".join(texts))
    for marker in _MARKERS:
        if marker not in used:
            return marker
    raise InvalidJob(f"the messages contain all {len(_MARKERS)} of the noncharacters U+FDD0 to U+FDEF")


def _text_piece(text: str, marker: str) -> Iterator[Piece]:
    text = text.replace(marker, "")
    if text:
        yield Piece(text, is_control=False)
