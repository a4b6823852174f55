"""Token ids to text, one by one, append-only, at a flat cost per token.

Decoding token by token is wrong twice: a character's bytes may lie in several tokens, and
SentencePiece-style decoders drop the leading space of whatever they decode. So every token is decoded
together with a short window of tokens before it, and what the window's text has more than before is
new. Characters that may still be incomplete (U+FFFD at the end) are held back until they are whole, or
until it is certain that they never will be.

The joined texts equal the tokenizer's decode of all tokens. One exception: SentencePiece's byte
fallback turns a whole run of byte tokens into U+FFFD if it is not valid UTF-8 as a whole; the
characters of such a run that were complete, and so already given out, stay.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

REPLACEMENT = "\ufffd"
MAX_WINDOW = 16
"""Tokens. At least twice the four bytes of a character, so that half of it always holds a whole one."""
MAX_INCOMPLETE = 3
"""A character has four bytes at most, so three may wait for the last."""


class TokenDecoder(Protocol):
    """All that is asked of a tokenizer; a `tokenizers.Tokenizer` is one.

    Its decode must not clean up spaces around punctuation: that would rewrite text already sent.
    """

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """The text of the ids; ids without a token add nothing."""
        ...


class Detokenizer:
    """The text of one growing list of tokens."""

    def __init__(self, decoder: TokenDecoder, *, skip_special_tokens: bool = True) -> None:
        self._decoder = decoder
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []
        self._text = ""  # of the window
        self._emitted = ""  # the window's text that was given out: a prefix of `_text`, bytes permitting
        # Ends of the last two pieces given out, as indices into the window. Both are ends of characters.
        self._marks = (0, 0)

    def append(self, token_id: int) -> str:
        """The text that became certain with this token; often empty."""
        text = self._decode([*self._window, token_id])
        if text == self._text and self._adds_nothing(token_id):
            return ""
        self._window.append(token_id)
        self._text = text
        if self._is_broken_run():
            self._restart(self._marks[1])
        new_text = self._take(_certain_length(self._text))
        if len(self._window) >= MAX_WINDOW and self._text.startswith(self._emitted):
            new_text += self._shorten()
        return new_text

    def flush(self) -> str:
        """The rest, when no more tokens come; an incomplete character becomes what decode makes of it."""
        if not self._text.startswith(self._emitted):
            self._restart(self._marks[1])
        return self._take(len(self._text))

    def _take(self, length: int) -> str:
        """Give out the window's text up to `length` characters, as far as it goes on from what was given."""
        if length <= len(self._emitted) or not self._text.startswith(self._emitted):
            return ""
        new_text = self._text[len(self._emitted) : length]
        self._emitted = self._text[:length]
        if length == len(self._text):
            self._marks = (self._marks[1], len(self._window))
        return new_text

    def _adds_nothing(self, token_id: int) -> bool:
        """Whether a token that left the text as it was can be dropped.

        Special tokens that are skipped can. Otherwise it may be a byte of an incomplete character, or
        the lone space at the beginning that only shows when something follows.
        """
        if self._text and not self._text.endswith(REPLACEMENT):
            return True
        alone = [token_id]
        return self._decode(alone) == "" and self._decoder.decode(alone, skip_special_tokens=False) != ""

    def _is_broken_run(self) -> bool:
        """Whether the new tokens changed text that was given out, for good (see the module's exception).

        While a character is incomplete this happens too, for its first tokens.
        """
        num_held = len(self._window) - self._marks[1]
        is_waiting = self._text.endswith(REPLACEMENT) and num_held <= MAX_INCOMPLETE
        return not is_waiting and not self._text.startswith(self._emitted)

    def _restart(self, start: int) -> None:
        """Drop the window's tokens before `start`, all of whose text was given out."""
        self._window = self._window[start:]
        self._text = self._decode(self._window)
        self._emitted = ""
        self._marks = (0, 0)

    def _shorten(self) -> str:
        """Keep the last piece given out as the context of what follows.

        A window without such a piece is a run of broken bytes: there any half will do. Should the cut
        mend what was broken, the held text is given out as it was.
        """
        start = self._marks[0] or MAX_WINDOW // 2
        held = self._text[len(self._emitted) :]
        marks = self._marks
        self._restart(start)
        self._marks = (0, max(0, marks[1] - start))
        if self._text.endswith(held):
            self._emitted = self._text.removesuffix(held)
            return ""
        self._emitted = self._text
        return held

    def _decode(self, token_ids: Seq[int]) -> str:
        return self._decoder.decode(list(token_ids), skip_special_tokens=self._skip_special_tokens)


def _certain_length(text: str) -> int:
    """Characters of the text that no later byte can change."""
    return max(len(text.rstrip(REPLACEMENT)), len(text) - MAX_INCOMPLETE)
