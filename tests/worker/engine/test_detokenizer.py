from __future__ import annotations

from collections.abc import Callable
from itertools import chain

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from chairlift_worker.engine.detokenizer import MAX_INCOMPLETE, MAX_WINDOW, REPLACEMENT, Detokenizer
from tokenizer_kinds import TEXTS, CountingDecoder, byte_level, metaspace, sentence_piece_like

KINDS = [byte_level, sentence_piece_like, metaspace]
kinds = pytest.mark.parametrize("kind", KINDS)


def stream(tokenizer: Tokenizer, token_ids: list[int], *, skip_special_tokens: bool = True) -> list[str]:
    """The text of each token, and the rest."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    return [*(detokenizer.append(token_id) for token_id in token_ids), detokenizer.flush()]


def token_id(tokenizer: Tokenizer, piece: str) -> int:
    found: int | None = tokenizer.token_to_id(piece)
    assert found is not None, piece
    return found


@kinds
@pytest.mark.parametrize("text", TEXTS)
def test_joined_pieces_are_the_decoded_whole(kind: Callable[[], Tokenizer], text: str) -> None:
    tokenizer = kind()
    token_ids = tokenizer.encode(text, add_special_tokens=False).ids
    pieces = stream(tokenizer, token_ids)
    assert "".join(pieces) == tokenizer.decode(token_ids)
    if kind is byte_level:
        assert "".join(pieces) == text
    assert REPLACEMENT not in "".join(pieces)
    assert pieces[-1] == "", "valid text needs no flush"


@pytest.mark.parametrize("kind", [byte_level, sentence_piece_like])
@pytest.mark.parametrize("text", TEXTS[:-1])
def test_text_is_given_out_as_soon_as_its_characters_are_whole(
    kind: Callable[[], Tokenizer], text: str
) -> None:
    tokenizer = kind()
    token_ids = tokenizer.encode(text, add_special_tokens=False).ids
    pieces = stream(tokenizer, token_ids)
    for end in range(1, len(token_ids) + 1):
        whole = tokenizer.decode(token_ids[:end])
        if REPLACEMENT not in whole:
            assert "".join(pieces[:end]) == whole


@given(st.data())
def test_any_byte_level_tokens(data: st.DataObject) -> None:
    """Also those that no text encodes to: broken bytes, special and unknown ids."""
    tokenizer = byte_level()
    ids = st.lists(st.integers(0, tokenizer.get_vocab_size() + 3), max_size=60)
    token_ids = data.draw(ids)
    for skip_special_tokens in (True, False):
        whole = tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        assert "".join(stream(tokenizer, token_ids, skip_special_tokens=skip_special_tokens)) == whole


@given(st.data())
def test_any_tokens_that_are_single_bytes(data: st.DataObject) -> None:
    tokenizer = byte_level()
    single = sorted(i for piece, i in tokenizer.get_vocab().items() if len(piece) == 1)
    token_ids = data.draw(st.lists(st.sampled_from(single), max_size=60))
    assert "".join(stream(tokenizer, token_ids)) == tokenizer.decode(token_ids)


@given(text=st.text(max_size=40))
@example(text="   ")
@example(text=" a")
@example(text="漢漢漢漢漢漢漢漢漢漢x")
def test_any_text_through_byte_fallback(text: str) -> None:
    tokenizer = sentence_piece_like()
    token_ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert "".join(stream(tokenizer, token_ids)) == tokenizer.decode(token_ids)


@given(st.data())
def test_any_sentence_piece_tokens(data: st.DataObject) -> None:
    """Any order of pieces, special tokens, unknown ids, and characters spelled in bytes."""
    tokenizer = sentence_piece_like()
    size = tokenizer.get_vocab_size()
    piece = st.one_of(st.integers(0, 2), st.integers(259, size + 2)).map(lambda index: [index])
    spelled = st.characters(codec="utf-8").map(lambda char: [3 + byte for byte in char.encode()])
    token_ids = list(chain(*data.draw(st.lists(st.one_of(piece, piece, spelled), max_size=40))))
    for skip_special_tokens in (True, False):
        whole = tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        assert "".join(stream(tokenizer, token_ids, skip_special_tokens=skip_special_tokens)) == whole


@given(st.data())
def test_broken_byte_runs_never_add_replacement_characters(data: st.DataObject) -> None:
    tokenizer = sentence_piece_like()
    any_byte = st.integers(3, 258)
    spelled = st.sampled_from("漢😊ğ").map(lambda char: [3 + byte for byte in char.encode()])
    run = st.lists(st.one_of(any_byte.map(lambda index: [index]), spelled), max_size=30)
    token_ids = list(chain(*data.draw(run)))
    whole = tokenizer.decode(token_ids)
    text = "".join(stream(tokenizer, token_ids))
    assert text.count(REPLACEMENT) <= whole.count(REPLACEMENT)
    if REPLACEMENT not in whole:
        assert text == whole


@given(st.lists(st.integers(0, 410), max_size=40))
def test_any_metaspace_tokens(token_ids: list[int]) -> None:
    tokenizer = metaspace()
    assume(token_ids)
    assert "".join(stream(tokenizer, token_ids)) == tokenizer.decode(token_ids)


def test_a_character_comes_whole_with_its_last_byte() -> None:
    tokenizer = sentence_piece_like()
    token_ids = [3 + byte for byte in "😊똻".encode()]
    assert stream(tokenizer, token_ids) == ["", "", "", "😊", "", "", "똻", ""]


def test_a_replacement_character_that_is_meant_is_text() -> None:
    tokenizer = sentence_piece_like()
    assert "".join(stream(tokenizer, [3 + byte for byte in "\ufffdࠀ".encode()])) == "\ufffdࠀ"


def test_a_character_given_out_stays_when_its_byte_run_breaks() -> None:
    tokenizer = sentence_piece_like()
    token_ids = [*(3 + byte for byte in "漢".encode()), 3 + 0xFF, token_id(tokenizer, "a")]
    assert tokenizer.decode(token_ids) == "\ufffd" * 4 + "a"
    assert stream(tokenizer, token_ids) == ["", "", "漢", "", "\ufffda", ""]


def test_an_incomplete_character_is_flushed_as_the_whole_decode_has_it() -> None:
    for tokenizer in (byte_level(), sentence_piece_like()):
        token_ids = tokenizer.encode("a漢", add_special_tokens=False).ids[:-1]
        pieces = stream(tokenizer, token_ids)
        assert "".join(pieces) == tokenizer.decode(token_ids)
        assert REPLACEMENT in pieces[-1]
        assert REPLACEMENT not in "".join(pieces[:-1])


def test_a_lone_space_at_the_beginning_shows_when_something_follows() -> None:
    tokenizer = sentence_piece_like()
    space, a = token_id(tokenizer, "▁"), token_id(tokenizer, "a")
    assert stream(tokenizer, [space, space, a]) == ["", " ", "a", ""]
    assert stream(tokenizer, [a, space, a]) == ["a", " ", "a", ""]


def test_special_tokens_are_skipped_or_shown() -> None:
    tokenizer = sentence_piece_like()
    end, a, space = (token_id(tokenizer, piece) for piece in ("</s>", "a", "▁"))
    assert stream(tokenizer, [a, end, space, a]) == ["a", "", " ", "a", ""]
    shown = stream(tokenizer, [a, end, a], skip_special_tokens=False)
    assert "".join(shown) == "a</s>a"


def test_special_tokens_without_end_do_not_lose_what_is_held() -> None:
    tokenizer = sentence_piece_like()
    end = token_id(tokenizer, "</s>")
    first, *rest = [3 + byte for byte in "漢".encode()]
    assert "".join(stream(tokenizer, [first, *[end] * 50, *rest])) == "漢"


@kinds
@pytest.mark.parametrize("shape", ["text", "broken", "special", "unknown"])
def test_the_cost_per_token_is_flat(kind: Callable[[], Tokenizer], shape: str) -> None:
    tokenizer = kind()
    text_ids = [token for text in TEXTS for token in tokenizer.encode(text, add_special_tokens=False).ids]
    incomplete = tokenizer.encode("똻", add_special_tokens=False).ids[0]
    special = 0 if kind is byte_level else token_id(tokenizer, "</s>")
    assert tokenizer.decode([special]) == ""
    token_ids = {
        "text": (text_ids * 40)[:8192],
        "broken": [incomplete] * 8192,
        "special": [special] * 8192,
        "unknown": [tokenizer.get_vocab_size() + 5] * 8192,
    }[shape]
    counting = CountingDecoder(tokenizer)
    detokenizer = Detokenizer(counting)
    for token in token_ids:
        detokenizer.append(token)
    assert max(counting.lengths) <= MAX_WINDOW + MAX_INCOMPLETE
    assert sum(counting.lengths) <= 8192 * MAX_WINDOW * 1.5
