"""Token ids to text, one by one, append-only, at a flat cost per token.

Decoding token by token is wrong twice: a character's bytes may lie in several tokens, and
SentencePiece-style decoders drop the leading space of whatever they decode. So every token is decoded
together with a short window of tokens before it, and what the window's text has more than before is
new. Characters that may still be incomplete (U+FFFD at the end) are held back until they are whole, or
until it is certain that they never will be.

The joined texts equal the tokenizer's decode of all tokens. One exception: SentencePiece's byte
fallback turns a whole run of byte tokens into U+FFFD, one for each, if it is not valid UTF-8 as a
whole; the characters of such a run that were complete, and so already given out, stay.
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

    def decode(self, ids: list[int], /, *, skip_special_tokens: bool) -> str:
        """The text of the ids; ids without a token add nothing."""
        ...


class Detokenizer:
    """The text of one growing list of tokens.

    window   [ context ... | last piece | held ]      tokens, at most MAX_WINDOW and a few held
    marks               [0]^         [1]^             ends of the last two pieces given out
    """

    def __init__(self, decoder: TokenDecoder, *, skip_special_tokens: bool = True) -> None:
        self._decoder = decoder
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []
        self._text = ""  # of the window
        self._emitted = ""  # the window's text that was given out: a prefix of `_text`, byte runs permitting
        self._marks = (0, 0)

    def append(self, token_id: int) -> str:
        """The text that became certain with this token; often empty."""
        text = self._decode([*self._window, token_id])
        if text == self._text and self._adds_nothing(token_id):
            return ""
        # A text that grew shorter has joined bytes to a character, even if that character is U+FFFD.
        is_whole = not text.endswith(REPLACEMENT) or len(text) < len(self._text)
        self._window.append(token_id)
        self._text = text
        new_text = self._take_all() if is_whole else self._take_broken()
        if len(self._window) >= MAX_WINDOW and self._text.startswith(self._emitted):
            self._shorten()
        return new_text

    def flush(self) -> str:
        """The rest, when no more tokens come; an incomplete character becomes what decode makes of it."""
        return self._take_all()

    def _take_all(self) -> str:
        self._mend()
        return self._take(len(self._text), num_tokens=len(self._window))

    def _take_broken(self) -> str:
        """The text ends in U+FFFD: wait, or if that was too long, give out what no later byte can change."""
        if len(self._window) - self._marks[1] <= MAX_INCOMPLETE:
            return ""
        self._mend()
        for num_held in range(MAX_INCOMPLETE, 0, -1):
            # Only between characters do the parts decode to the parts of the whole.
            held = self._decode(self._window[-num_held:])
            if self._decode(self._window[:-num_held]) + held == self._text:
                return self._take(len(self._text) - len(held), num_tokens=len(self._window) - num_held)
        # Every token ends inside a character, as tokens of byte-level BPE may: only the last is open.
        return self._take(len(self._text) - 1, num_tokens=self._marks[1])

    def _take(self, length: int, *, num_tokens: int) -> str:
        """Give out the window's text up to `length` characters, the text of its first `num_tokens` tokens."""
        new_text = self._text[len(self._emitted) : length]
        self._emitted += new_text
        if num_tokens > self._marks[1]:
            self._marks = (self._marks[1], num_tokens)
        return new_text

    def _adds_nothing(self, token_id: int) -> bool:
        """Whether a token that left the text as it was can be dropped.

        It cannot if it is a byte of an incomplete character, or the space at the very beginning that
        only shows when something follows.
        """
        if self._text and not self._text.endswith(REPLACEMENT):
            return True
        is_skipped = self._decode([token_id]) == ""
        return is_skipped and (
            self._text != "" or self._decoder.decode([token_id], skip_special_tokens=False) != ""
        )

    def _mend(self) -> None:
        """Go on without context where new bytes have broken text that was given out."""
        if not self._text.startswith(self._emitted):
            self._restart(self._marks[1])

    def _restart(self, start: int) -> None:
        """Forget the window's tokens before `start`, all of whose text was given out."""
        self._window = self._window[start:]
        self._text = self._decode(self._window)
        self._emitted = ""
        self._marks = (0, 0)

    def _shorten(self) -> None:
        """Keep the last piece as the context of what follows; without pieces, any half will do."""
        start = self._marks[0] or MAX_WINDOW // 2
        held = self._text[len(self._emitted) :]
        end_of_piece = max(0, self._marks[1] - start)
        self._restart(start)
        self._marks = (0, end_of_piece)
        if self._text.endswith(held):
            self._emitted = self._text.removesuffix(held)
        else:
            self._emitted = self._decode(self._window[:end_of_piece])

    def _decode(self, token_ids: Seq[int]) -> str:
        return self._decoder.decode(list(token_ids), skip_special_tokens=self._skip_special_tokens)
