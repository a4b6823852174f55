from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift_client.protocol import SamplingParams
from chairlift_worker.engine.output import JobOutput
from tokenizer_kinds import byte_level

EOS = 0


def output(sampling: SamplingParams, max_output_tokens: int = 100) -> JobOutput:
    return JobOutput(
        sampling,
        byte_level(),
        eos_token_ids=frozenset({EOS}),
        max_output_tokens=max_output_tokens,
    )


def encode(text: str) -> list[int]:
    token_ids: list[int] = byte_level().encode(text, add_special_tokens=False).ids
    return token_ids


def feed(job: JobOutput, token_ids: list[int]) -> str:
    """Everything given out until the end or until the tokens are used up."""
    text = ""
    for token_id in token_ids:
        text += job.append(token_id)
        if job.finish_reason is not None:
            break
    assert job.text == text
    return text


def test_a_stop_string_over_two_tokens() -> None:
    job = output(SamplingParams(stop=("beta gamma",)))
    token_ids = encode("alpha beta gamma delta")
    text = feed(job, token_ids)
    assert text == "alpha "
    assert (job.finish_reason, job.stop_reason) == ("stop", "beta gamma")
    # The tokens end with the one that completed the stop string, and run no further.
    assert job.token_ids == token_ids[: len(job.token_ids)]
    assert "beta gamma" in byte_level().decode(job.token_ids)
    assert "beta gamma" not in byte_level().decode(job.token_ids[:-1])


def test_include_stop() -> None:
    job = output(SamplingParams(stop=("beta gamma",), include_stop=True))
    assert feed(job, encode("alpha beta gamma delta")) == "alpha beta gamma"


def test_a_stop_string_inside_characters_of_several_tokens() -> None:
    job = output(SamplingParams(stop=("똻。",)))
    assert feed(job, encode("漢字똻。😊")) == "漢字"
    assert job.stop_reason == "똻。"


def test_nothing_comes_after_a_stop_string_that_broken_bytes_complete() -> None:
    job = output(SamplingParams(stop=("b\ufffd",)))
    first_byte = encode("똻")[0]
    assert feed(job, [*encode("a b"), *[first_byte] * 8]) == "a "
    assert job.stop_reason == "b\ufffd"


def test_an_end_token_is_a_token_without_text() -> None:
    job = output(SamplingParams())
    token_ids = encode("the lift")
    assert feed(job, [*token_ids, EOS]) == "the lift"
    assert job.token_ids == [*token_ids, EOS]
    assert (job.finish_reason, job.stop_reason) == ("stop", None)


def test_a_stop_id_is_named() -> None:
    token_ids = encode("the lift")
    job = output(SamplingParams(stop_token_ids=(token_ids[-1],)))
    assert feed(job, token_ids) == byte_level().decode(token_ids[:-1])
    assert (job.finish_reason, job.stop_reason) == ("stop", token_ids[-1])


def test_ignore_eos_goes_on_but_stop_ids_still_stop() -> None:
    token_ids = encode("the lift")
    job = output(SamplingParams(ignore_eos=True, stop_token_ids=(token_ids[-1],)))
    feed(job, [EOS, *token_ids])
    assert job.token_ids == [EOS, *token_ids]
    assert job.stop_reason == token_ids[-1]


def test_length_flushes_what_is_held() -> None:
    token_ids = encode("alpha beta")
    job = output(SamplingParams(stop=("beta gamma",)), max_output_tokens=len(token_ids))
    assert feed(job, token_ids) == "alpha beta"
    assert job.finish_reason == "length"


def test_a_stop_on_the_last_allowed_token_is_a_stop() -> None:
    token_ids = encode("alpha")
    assert feed(job := output(SamplingParams(stop=("pha",)), len(token_ids)), token_ids) == "al"
    assert job.finish_reason == "stop"


def test_an_incomplete_character_at_the_end_is_flushed() -> None:
    token_ids = encode("똻")[:-1]
    job = output(SamplingParams(), max_output_tokens=len(token_ids))
    assert feed(job, token_ids) == byte_level().decode(token_ids) == "\ufffd"


def test_min_tokens_bans_ids_and_stop_strings_up_to_its_number() -> None:
    token_ids = encode("stop it, stop it, stop it")
    for min_tokens in range(len(token_ids)):
        job = output(SamplingParams(min_tokens=min_tokens, stop=("stop",)))
        feed(job, token_ids)
        assert len(job.token_ids) > min_tokens
        assert job.token_ids == token_ids[: len(job.token_ids)]


def test_min_tokens_bans_exactly_the_first_ones() -> None:
    job = output(SamplingParams(min_tokens=2, stop_token_ids=(9,)))
    token_ids = encode("a b c")
    assert job.banned_token_ids == {EOS, 9}
    job.append(token_ids[0])
    assert job.banned_token_ids == {EOS, 9}
    job.append(token_ids[1])
    assert job.banned_token_ids == frozenset()
    job.append(EOS)
    assert job.finish_reason == "stop"


def test_ignored_end_tokens_are_not_banned() -> None:
    assert output(SamplingParams(min_tokens=2, ignore_eos=True)).banned_token_ids == frozenset()


samplings = st.builds(
    SamplingParams,
    stop=st.lists(st.sampled_from(["e", "the", " a", "ft ", "漢字", "n\n"]), max_size=3).map(tuple),
    include_stop=st.booleans(),
    min_tokens=st.integers(0, 10),
    ignore_eos=st.booleans(),
    skip_special_tokens=st.booleans(),
)


@given(
    sampling=samplings,
    token_ids=st.lists(st.integers(0, 639), min_size=1, max_size=40),
    length=st.integers(1, 45),
)
def test_the_rules_hold_for_any_tokens(sampling: SamplingParams, token_ids: list[int], length: int) -> None:
    job = output(sampling, length)
    text = feed(job, token_ids)
    kept = job.token_ids
    ended_by_id = job.finish_reason == "stop" and not isinstance(job.stop_reason, str)
    whole = byte_level().decode(
        kept[:-1] if ended_by_id else kept, skip_special_tokens=sampling.skip_special_tokens
    )
    assert whole.startswith(text)
    assert "\ufffd" not in text or "\ufffd" in whole
    if isinstance(job.stop_reason, str):
        assert (text if sampling.include_stop else whole[: len(text) + len(job.stop_reason)]).endswith(
            job.stop_reason
        )
    elif job.finish_reason is not None:
        assert text == whole
    if job.finish_reason == "length":
        assert len(kept) == length
    if job.finish_reason == "stop":
        assert len(kept) > sampling.min_tokens


@given(sampling=samplings, token_ids=st.lists(st.integers(0, 639), min_size=1, max_size=30))
def test_replaying_a_part_leads_to_the_same_place(sampling: SamplingParams, token_ids: list[int]) -> None:
    undisturbed = output(sampling, len(token_ids))
    texts = []
    for token_id in token_ids:
        if undisturbed.finish_reason is None:
            texts.append(undisturbed.append(token_id))
    for split in range(len(texts) + 1):
        resumed = output(sampling, len(token_ids))
        for token_id in token_ids[:split]:
            resumed.append(token_id)
        assert resumed.text == "".join(texts[:split])
        assert [resumed.append(token_id) for token_id in undisturbed.token_ids[split:]] == texts[split:]
        assert resumed.text == undisturbed.text


def test_an_ended_output_takes_no_more() -> None:
    job = output(SamplingParams(), max_output_tokens=1)
    job.append(5)
    with pytest.raises(AssertionError):
        job.append(5)
