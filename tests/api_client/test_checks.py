"""Every mistake that a caller can make is an error at the call, with the numbers in its message."""

from __future__ import annotations

import math
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift_client import ChairliftError, InvalidJob, JobTooLarge, Limits, Message, SamplingParams
from chairlift_client.protocol import decode_body
from chairlift_client.request import JobOptions, check_options

LIMITS = Limits()


def check(**options: Any) -> Any:
    if not {"messages", "prompt", "token_ids"} & set(options):
        options["prompt"] = "x"
    return check_options(JobOptions(**{"model": "m", **options}), LIMITS)  # type: ignore[typeddict-item]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("max_tokens", 0, "max_tokens = 0 is outside 1 … 2147483647"),
        ("max_tokens", -1, "max_tokens = -1 is outside"),
        ("max_tokens", True, "max_tokens has to be an int, not bool"),
        ("max_tokens", 2.0, "max_tokens has to be an int, not float"),
        ("max_tokens", 2**40, "outside 1 … 2147483647"),
        ("min_tokens", -1, "min_tokens = -1 is outside 0"),
        ("temperature", -0.1, "temperature = -0.1 is outside 0 … 100"),
        ("temperature", 101, "temperature = 101 is outside"),
        ("temperature", 1e-9, "temperature = 1e-09 is under 0.0001; use 0 for greedy"),
        ("temperature", math.nan, "temperature = nan is not finite"),
        ("temperature", math.inf, "temperature = inf is not finite"),
        ("temperature", "hot", "temperature has to be a number, not str"),
        ("temperature", None, "temperature has to be a number, not None"),
        ("temperature", True, "not bool"),
        ("top_k", -1, "top_k = -1 is outside 0"),
        ("top_k", 1.5, "top_k has to be an int"),
        ("top_p", 0, "top_p = 0 is outside more than 0 … 1"),
        ("top_p", 1.01, "top_p = 1.01 is outside"),
        ("top_p", math.nan, "not finite"),
        ("min_p", -0.1, "min_p = -0.1 is outside 0 … 1"),
        ("min_p", 1.1, "min_p = 1.1 is outside"),
        ("seed", -1, "seed = -1 is outside"),
        ("seed", 2**63, "seed = 9223372036854775808 is outside"),
        ("seed", "1", "seed has to be an int, not str"),
        ("stop", ("a", ""), r"stop\[1\] is empty"),
        ("stop", "", r"stop\[0\] is empty"),
        ("stop", (1,), r"stop\[0\] has to be a str, not int"),
        ("stop", ("x" * 257,), r"stop\[0\] has 257 characters, more than 256"),
        ("stop", ("x",) * 17, "stop has 17 items, more than 16"),
        ("stop", {"x"}, "stop has to be a list or a tuple, not set"),
        ("stop", ("a\ud800b",), r"stop\[0\] holds a lone surrogate at character 1"),
        ("stop_token_ids", (-1,), r"stop_token_ids\[0\] = -1 is outside 0"),
        ("stop_token_ids", (True,), r"stop_token_ids\[0\] has to be an int, not bool"),
        ("stop_token_ids", tuple(range(257)), "stop_token_ids has 257 items, more than 256"),
        ("stop_token_ids", None, "has to be a list or a tuple, not None"),
        ("ignore_eos", 1, "ignore_eos has to be True or False, not int"),
        ("include_stop", None, "include_stop has to be True or False, not None"),
        ("skip_special_tokens", "no", "skip_special_tokens has to be True or False"),
    ],
)
def test_sampling(field: str, value: object, message: str) -> None:
    for sampling in ({field: value}, SamplingParams(**{field: value})):  # type: ignore[arg-type]
        with pytest.raises(InvalidJob, match=message):
            check(sampling=sampling)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": ""}, "model is empty"),
        ({"model": "a b"}, "model name 'a b'"),
        ({"model": "x" * 97}, r"\(97 characters\) does not match"),
        ({"model": 3}, "model has to be a str"),
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt": b"x"}, "prompt has to be a str, not bytes"),
        ({"prompt": "a\udfff"}, "prompt holds a lone surrogate at character 1"),
        ({"prompt": "x" * (5 * 2**20)}, r"the job has 52429\d\d bytes, more than 4194304"),
        ({"prompt": "x", "token_ids": [1]}, "exactly one of .* not prompt and token_ids"),
        ({"prompt": None}, "exactly one of messages, prompt and token_ids, not none"),
        ({"messages": []}, "messages is empty"),
        ({"messages": "hello"}, "messages has to be a list or a tuple, not str"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\] has the keys \['role'\]"),
        ({"messages": [{"role": "user", "content": 1}]}, r"messages\[0\].content has to be a str"),
        ({"messages": [{"role": "", "content": ""}]}, r"messages\[0\].role is empty"),
        ({"messages": [{"role": "r" * 65, "content": ""}]}, r"role has 65 characters, more than 64"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "lone surrogate at character 0"),
        ({"messages": ["hi"]}, r"messages\[0\] has to be a Message or a dict, not str"),
        ({"messages": [Message(role="u", content="")] * 4097}, "messages has 4097 items, more than 4096"),
        ({"token_ids": []}, "token_ids is empty"),
        ({"token_ids": [1, -1]}, r"token_ids\[1\] = -1 is outside 0 … 2147483647"),
        ({"token_ids": [1, True]}, r"token_ids\[1\] has to be an int, not bool"),
        ({"token_ids": [1.0]}, r"token_ids\[0\] has to be an int, not float"),
        ({"token_ids": 5}, "token_ids has to be a list or a tuple, not int"),
        ({"sampling": 3}, "sampling has to be a SamplingParams or a dict, not int"),
        ({"sampling": {"temprature": 1}}, "sampling has no temprature; known are max_tokens"),
        ({"sampling": {"min_tokens": 5, "max_tokens": 4}}, "min_tokens = 5 is outside 0 … 4"),
        ({"job_class": "urgent"}, "job_class = 'urgent' is none of high, normal, low, batch"),
        ({"tenant": "a:b"}, "tenant name 'a:b'"),
        ({"tenant": ""}, "tenant is empty"),
        ({"deadline_s": 0}, "deadline_s = 0 is outside 0.001"),
        ({"deadline_s": math.nan}, "deadline_s = nan is not finite"),
        ({"delay_s": -1}, "delay_s = -1 is outside 0"),
        ({"delay_s": 1e9}, "delay_s = 1e\\+09 is outside"),
        ({"queue_ttl_s": None}, "queue_ttl_s has to be a number, not None"),
        ({"result_ttl_s": 0}, "result_ttl_s = 0 is outside 0.001"),
        ({"run_at": 5}, "run_at has to be a datetime with a time zone"),
        ({"run_at": datetime(2030, 1, 1)}, "run_at has to be a datetime with a time zone"),
        (
            {"run_at": datetime.now(UTC) + timedelta(days=1000)},
            "run_at is 863999.. s ahead|run_at is 864.* s ahead",
        ),
        ({"run_at": datetime.now(UTC), "delay_s": 1}, "delay_s and run_at exclude each other"),
        ({"idempotency_key": ""}, "idempotency_key is empty"),
        ({"idempotency_key": "k" * 513}, "idempotency_key has 513 characters, more than 512"),
        ({"metadata": {"a": 1}}, r"metadata\['a'\] has to be a str, not int"),
        ({"metadata": {1: "a"}}, "a key of metadata has to be a str"),
        ({"metadata": ["a"]}, "metadata has to be a dict of str, not list"),
        ({"metadata": {"a": "x" * 16384}}, "metadata has 16385 bytes, more than 16384"),
        ({"traceparent": "00-xyz"}, "traceparent is not of the form"),
        ({"allow_unknown_model": 1}, "allow_unknown_model has to be True or False"),
    ],
)
def test_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidJob, match=message):
        check(**options)


def test_sizes_have_an_error_of_their_own() -> None:
    with pytest.raises(JobTooLarge):
        check(sampling={"stop": ["x"] * 17})


def test_what_is_right_passes_and_is_stored_as_given() -> None:
    checked = check(
        messages=[{"role": "user", "content": "日本語 😊"}],
        sampling={"temperature": 1, "stop": "x", "seed": 0, "stop_token_ids": [5], "max_tokens": 3},
        deadline_s=1.5,
        delay_s=0,
        metadata={"é": ""},
    )
    body = decode_body(checked.encoded)
    assert body.messages == (Message(role="user", content="日本語 😊"),)
    assert body.sampling == SamplingParams(
        max_tokens=3, temperature=1.0, seed=0, stop=("x",), stop_token_ids=(5,)
    )
    assert (checked.deadline_ms, checked.delay_ms, checked.run_at_ms) == (1500, 0, 0)
    assert checked.submission("m.0.x").seed == 0
    assert checked.submission("m.0.x").idempotency == ""


def test_a_seed_is_drawn_where_none_is_given() -> None:
    seeds = {check().submission("m.0.x").seed for _ in range(20)}
    assert len(seeds) == 20
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_equal_jobs_have_equal_hashes() -> None:
    one = check(metadata={"a": "1", "b": "2"}, traceparent=f"00-{'1' * 32}-{'2' * 16}-00")
    two = check(metadata={"b": "2", "a": "1"}, traceparent=f"00-{'3' * 32}-{'4' * 16}-00")
    assert one.body_hash == two.body_hash
    assert one.body_hash != check(metadata={"a": "1"}).body_hash
    assert one.body_hash != check(metadata={"a": "1", "b": "2"}, sampling={"top_k": 1}).body_hash


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.datetimes(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(options=st.dictionaries(st.sampled_from(sorted(JobOptions.__annotations__)), anything))
def test_nothing_else_ever_escapes(options: dict[str, Any]) -> None:
    """Whatever is given, the answer is a checked job or one of our errors."""
    with suppress(ChairliftError):
        check_options(JobOptions(**{"model": "m", **options}), LIMITS)  # type: ignore[typeddict-item]


@given(sampling=st.dictionaries(st.sampled_from(SamplingParams.__struct_fields__), anything))
def test_nothing_else_ever_escapes_from_sampling(sampling: dict[str, Any]) -> None:
    try:
        checked = check(sampling=sampling)
    except InvalidJob:
        return
    assert decode_body(checked.encoded).sampling == checked.body.sampling
