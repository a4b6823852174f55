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
    """The control tokens of one tokenizer, as texts."""

    def __init__(self, tokens: Iterable[str]) -> None:
        longest_first = sorted(filter(None, tokens), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._beginnings = {token[:size] for token in longest_first for size in range(1, len(token))}
        self._endings = {token[size:] for token in longest_first for size in range(1, len(token))}
        self._longest_part = max(map(len, self._beginnings), default=0)

    def disarm(self, text: str, marker: str) -> str:
        """`text` with a `marker` inside whatever is a control token, or with its surroundings could be."""
        text = self._pattern.sub(lambda match: match[0][0] + marker + match[0][1:], text)
        return self._disarm_end(self._disarm_start(text, marker), marker)

    def _disarm_start(self, text: str, marker: str) -> str:
        """Against the template's own text before: the rest of a token, also once the template trims."""
        blank = len(text) - len(text.lstrip())
        longest = text[blank : blank + self._longest_part]
        if any(longest[:size] in self._endings for size in range(1, len(longest) + 1)):
            return text[:blank] + marker + text[blank:]
        return text

    def _disarm_end(self, text: str, marker: str) -> str:
        """Against the template's own text after: the first part of a token."""
        end = len(text.rstrip())
        for start in range(max(0, end - self._longest_part), end):
            if text[start:end] in self._beginnings:
                return text[: start + 1] + marker + text[start + 1 :]
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
