"""Sizes that are checked at the door, and again by the worker."""

from __future__ import annotations

from msgspec import Struct


class Limits(Struct, frozen=True, kw_only=True):
    """Sizes that are checked at the door, before anything is sent."""

    body_bytes: int = 4 * 1024 * 1024
    prompt_tokens: int = 1_000_000
    messages: int = 4096
    stop_strings: int = 16
    stop_string_chars: int = 256
    stop_token_ids: int = 256
    metadata_bytes: int = 16 * 1024
    choices: int = 16
    logprobs: int = 20
    logit_bias: int = 1024
    allowed_token_ids: int = 65_536
    banned_token_ids: int = 4096
    bad_words: int = 64
    bad_word_chars: int = 64
    tools: int = 128
    template_chars: int = 64 * 1024
    json_bytes: int = 64 * 1024
    """Of a JSON schema, of all tools together, of all tool calls of one message."""
    json_depth: int = 32
    pattern_chars: int = 8192
    grammar_chars: int = 64 * 1024
    options: int = 1024
    option_chars: int = 4096
