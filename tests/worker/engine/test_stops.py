from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift_worker.engine.stops import StopMatcher


def feed(matcher: StopMatcher, pieces: list[str]) -> list[str]:
    """What is shown after each piece, and at the end if there was no match."""
    shown = []
    for piece in pieces:
        shown.append(matcher.append(piece))
        if matcher.matched is not None:
            return shown
    return [*shown, matcher.flush()]


def test_a_stop_string_over_several_pieces_is_found_and_never_shown() -> None:
    matcher = StopMatcher(("beta gamma",))
    assert feed(matcher, ["alpha", " be", "ta", " gam", "ma delta"]) == ["alpha", "", "", "", " "]
    assert matcher.matched == "beta gamma"


def test_held_text_comes_back_in_whole_pieces() -> None:
    matcher = StopMatcher(("</s>",))
    # "a <" is held as a whole, not cut before the "<".
    assert feed(matcher, ["x", "a <", "/", "answer>"]) == ["x", "", "", "a </answer>", ""]


def test_only_the_pieces_in_doubt_are_held() -> None:
    matcher = StopMatcher(("abab!",))
    assert feed(matcher, ["ab", "ab", "ab", "x"]) == ["", "", "ab", "ababx", ""]


def test_include_stop() -> None:
    matcher = StopMatcher(("END",), include_stop=True)
    assert "".join(feed(matcher, ["on", "e E", "N", "D two"])) == "one END"


def test_what_was_held_comes_at_the_end() -> None:
    matcher = StopMatcher(("beta gamma",))
    assert feed(matcher, ["alpha", " beta", " ga"]) == ["alpha", "", "", " beta ga"]
    assert matcher.matched is None


def test_the_stop_that_is_complete_first_wins_and_of_two_the_longer() -> None:
    assert feed(matcher := StopMatcher(("abc", "b")), ["xabc"]) == ["xa"]
    assert matcher.matched == "b"
    assert feed(matcher := StopMatcher(("bc", "abc")), ["xabc"]) == ["x"]
    assert matcher.matched == "abc"


def test_unicode_and_line_ends() -> None:
    assert "".join(feed(StopMatcher(("。\n\n",)), ["漢字", "。", "\n", "\n更多"])) == "漢字"
    assert "".join(feed(StopMatcher(("😊ğ",)), ["çğış", "öü😊", "ğ"])) == "çğışöü"


def test_before_min_tokens_a_stop_is_text_but_one_that_began_there_still_counts() -> None:
    matcher = StopMatcher(("END",))
    assert matcher.append("one END t", may_match=False) == "one END t"
    assert matcher.append("wo E", may_match=False) == ""
    assert matcher.append("ND") == "wo "
    assert matcher.matched == "END"


def test_a_stop_passed_over_before_min_tokens_is_not_found_later() -> None:
    matcher = StopMatcher(("END", "END of all"))
    assert matcher.append("END", may_match=False) == ""  # the longer one may still come
    assert matcher.append(" of") == ""
    assert matcher.append(" it") == "END of it"
    assert matcher.matched is None


def test_a_stop_passed_over_is_not_held() -> None:
    assert StopMatcher(("END", "something longer")).append("END", may_match=False) == "END"


def test_an_empty_stop_string_matches_nothing() -> None:
    assert feed(StopMatcher(("",)), ["a", "b"]) == ["a", "b", ""]


@pytest.mark.parametrize("include_stop", [False, True])
@given(
    pieces=st.lists(st.text("abc", max_size=4), max_size=12),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=3),
)
def test_any_cut_into_pieces_gives_the_same_text(
    include_stop: bool, pieces: list[str], stops: list[str]
) -> None:
    text = "".join(pieces)
    ends = [(end, -len(s), s) for s in stops for end in range(1, len(text) + 1) if text[:end].endswith(s)]
    matcher = StopMatcher(tuple(stops), include_stop=include_stop)
    shown = feed(matcher, pieces)
    if not ends:
        assert matcher.matched is None
        assert "".join(shown) == text
        return
    end, _, stop = min(ends)
    assert matcher.matched == stop
    assert "".join(shown) == text[: end if include_stop else end - len(stop)]
    before = "".join(shown[:-1])
    assert all(stop not in before for stop in stops)


@given(
    pieces=st.lists(st.text("ab", max_size=3), max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_no_more_is_held_than_the_doubt_asks_for(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(tuple(stops))
    fed, shown = "", ""
    ends = [0]
    for piece in pieces:
        fed += piece
        ends.append(len(fed))
        shown += matcher.append(piece)
        if matcher.matched is not None:
            return
        doubt = max((n for stop in stops for n in range(1, len(stop)) if fed.endswith(stop[:n])), default=0)
        # Shown up to the last end of a piece before the doubt begins.
        assert len(shown) == max(end for end in ends if end <= len(fed) - doubt)
