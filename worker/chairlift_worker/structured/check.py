"""Compiles a grammar and forgets it: run apart, to find out whether it compiles, and in time.

stdin   the grammar, as llguidance reads it
stdout  what is wrong with it; nothing if it is right
"""

from __future__ import annotations

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from chairlift_worker.apart import serve_apart
from chairlift_worker.structured.source import limits


class _Bytes:
    """The smallest tokenizer: what compiling costs is a matter of the grammar."""

    eos_token_id = 256
    bos_token_id = None
    tokens = (*(bytes((value,)) for value in range(256)), b"<end>")
    special_token_ids = (256,)

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def check(source: bytes) -> bytes:
    """The error message of a grammar, empty if it compiles."""
    matcher = LLMatcher(
        LLTokenizer(TokenizerWrapper(_Bytes())), source.decode(), log_level=0, limits=limits()
    )
    return matcher.get_error().encode() if matcher.is_error() else b""


if __name__ == "__main__":
    serve_apart(check)
