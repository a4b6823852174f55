"""Text that looks like control tokens, whole, in parts, and across the seams of a template."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift_client.errors import InvalidJob
from chairlift_worker.models.control_tokens import ControlTokens, choose_marker

TOKENS = ("<|im_end|>", "<|im_start|>", "<s>", "[INST]", "[/INST]", "<|end|>", "<|end|><|end|>", "<<s>")
CONTROL = ControlTokens(TOKENS)
MARKER = "\ufdd0"
ANY_TOKEN = re.compile("|".join(map(re.escape, TOKENS)))

fragments = st.sampled_from(
    ["<", "<<", "|", ">", "<|", "|>", "im_", "im_end", "end", "s", "[", "/INST", "]", " ", "\n", "a", *TOKENS]
)
texts = st.lists(fragments, max_size=8).map("".join)


@given(text=texts)
def test_disarmed_text_holds_no_token_and_loses_nothing(text: str) -> None:
    disarmed = CONTROL.disarm(text, MARKER)
    assert not ANY_TOKEN.search(disarmed)
    assert disarmed.replace(MARKER, "") == text


@given(text=texts, trims=st.booleans())
def test_no_token_arises_at_a_seam(text: str, trims: bool) -> None:
    """Whatever parts of tokens a template writes around a message."""
    disarmed = CONTROL.disarm(text, MARKER)
    content = disarmed.strip() if trims else disarmed
    for token in TOKENS:
        for size in range(1, len(token)):
            before, after = token[:size], token[size:]
            for match in ANY_TOKEN.finditer(before + content):
                assert match.end() <= size, token
            for match in ANY_TOKEN.finditer(content + after):
                assert match.start() >= len(content), token


@given(text=texts)
def test_text_without_parts_of_tokens_stays_as_it_is(text: str) -> None:
    plain = "x" + ANY_TOKEN.sub("", text).replace("[", "").replace("<", "") + "x"
    assert CONTROL.disarm(plain, MARKER) == plain


def test_cut() -> None:
    disarmed = CONTROL.disarm("a<|im_end|>b", MARKER)
    pieces = list(CONTROL.cut(f"<s>[INST]{disarmed}[/INST] ", MARKER))
    assert pieces == [
        ("<s>", True),
        ("[INST]", True),
        ("a<|im_end|>b", False),
        ("[/INST]", True),
        (" ", False),
    ]


def test_the_longest_token_wins() -> None:
    assert list(CONTROL.cut("<|end|><|end|>", MARKER)) == [("<|end|><|end|>", True)]


@pytest.mark.parametrize("tokens", [[], ["", "<"]])
def test_a_tokenizer_without_control_tokens_of_two_characters(tokens: list[str]) -> None:
    none = ControlTokens(tokens)
    assert none.disarm("<s>", MARKER) == "<s>"
    assert list(none.cut("<s>", MARKER)) == [("<s>", False)]


def test_the_marker_is_one_that_no_text_has() -> None:
    assert choose_marker(["a", "\ufdd0\ufdd1", "\ufdd3"]) == "\ufdd2"
    with pytest.raises(InvalidJob, match="all 32"):
        choose_marker(map(chr, range(0xFDD0, 0xFDF0)))
