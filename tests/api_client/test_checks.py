"""Every mistake that a caller can make is an error at the call, with the numbers in its message."""

from __future__ import annotations

import math
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift_client import (
    ChairliftError,
    Grammar,
    InvalidJob,
    JobTooLarge,
    JsonSchema,
    Limits,
    Message,
    OneOf,
    Regex,
    SamplingParams,
)
from chairlift_client.checks import check_float, check_int
from chairlift_client.protocol import decode_body
from chairlift_client.request import JobOptions, check_options

LIMITS = Limits()
USER = [{"role": "user", "content": "x"}]


def nested(depth: int) -> dict[str, Any]:
    """A dict within a dict, and so on."""
    return {"x": nested(depth - 1)} if depth > 1 else {}


def check(**options: Any) -> Any:
    if not {"messages", "prompt", "token_ids"} & set(options):
        options["prompt"] = "x"
    return check_options(JobOptions(**{"model": "m", **options}), LIMITS)  # type: ignore[typeddict-item]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("max_tokens", -1, "max_tokens = -1 is outside 0 … 2147483647"),
        ("max_tokens", True, "max_tokens has to be an int, not bool"),
        ("max_tokens", 2.0, "max_tokens has to be an int, not float"),
        ("max_tokens", 2**40, "outside 0 … 2147483647"),
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
        ("truncate_prompt", 0, "truncate_prompt = 0 is outside 1"),
        ("n", 0, "n = 0 is outside 1 … 16"),
        ("n", 17, "n = 17 is outside 1 … 16"),
        ("best_of", 0, "best_of = 0 is outside 1 … 16"),
        ("typical_p", 0, "typical_p = 0 is outside more than 0 … 1"),
        ("typical_p", 1.1, "typical_p = 1.1 is outside"),
        ("repetition_penalty", 0, "repetition_penalty = 0 is outside 0.01 … 100"),
        ("repetition_penalty", math.nan, "not finite"),
        ("presence_penalty", 101, "presence_penalty = 101 is outside -100 … 100"),
        ("frequency_penalty", "x", "frequency_penalty has to be a number, not str"),
        ("logit_bias", [1], "logit_bias has to be a dict of token id to number, not list"),
        ("logit_bias", {"1": 1}, "a token id of logit_bias has to be an int, not str"),
        ("logit_bias", {1: "x"}, r"logit_bias\[1\] has to be a number, not str"),
        ("logit_bias", {-1: 0.0}, "a token id of logit_bias = -1 is outside 0"),
        ("logit_bias", {1: -math.inf}, r"logit_bias\[1\] = -inf is not finite"),
        ("logit_bias", dict.fromkeys(range(1025), 0.0), "logit_bias has 1025 items, more than 1024"),
        ("allowed_token_ids", (), "allowed_token_ids is empty"),
        ("allowed_token_ids", (2**31,), r"allowed_token_ids\[0\] = 2147483648 is outside"),
        ("banned_token_ids", (-1,), r"banned_token_ids\[0\] = -1 is outside"),
        ("banned_token_ids", (1,) * 4097, "banned_token_ids has 4097 items, more than 4096"),
        ("bad_words", ("",), r"bad_words\[0\] is empty"),
        ("bad_words", ("x",) * 65, "bad_words has 65 items, more than 64"),
        ("logprobs", 21, "logprobs = 21 is outside 0 … 20"),
        ("prompt_logprobs", -1, "prompt_logprobs = -1 is outside 0 … 20"),
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
        ({"messages": [{"content": "x"}]}, r"messages\[0\] has the keys \['content'\]"),
        (
            {"messages": [{"role": "user", "text": "x"}]},
            r"the keys \['role', 'text'\]; known are role, content",
        ),
        ({"messages": [{"role": "user"}]}, r"messages\[0\] has neither content nor tool_calls"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            r"messages\[0\].content\[0\] has to be a part of type text, not image_url",
        ),
        ({"messages": [{"role": "tool", "content": "", "name": "n" * 65}]}, "name has 65 characters"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]},
            r"messages\[0\].tool_calls\[0\] has to be a dict with a function that has a name",
        ),
        ({"prompt": "x", "tools": []}, "tools and chat_template need messages"),
        ({"messages": USER, "tools": ["f"]}, r"tools\[0\] has to be a dict, not str"),
        ({"messages": USER, "tools": [{}] * 129}, "tools has 129 items, more than 128"),
        ({"messages": USER, "tools": [{"x": {1}}]}, "tools holds a set, which JSON has no word for"),
        ({"messages": USER, "tools": [{"x": math.inf}]}, "a number in tools = inf is not finite"),
        ({"messages": USER, "tools": [{"x": 2**63}]}, "a number in tools = 9223372036854775808 is outside"),
        ({"messages": USER, "tools": [{"x": "\ud800"}]}, "a string in tools holds a lone surrogate"),
        ({"messages": USER, "tools": [nested(33)]}, "tools is nested more than 32 deep"),
        ({"messages": USER, "tools": [{"x": "y" * 65536}]}, "tools has 65546 bytes of JSON, more than 65536"),
        ({"messages": USER, "chat_template": ""}, "chat_template is empty"),
        ({"messages": USER, "chat_template": "x" * 65537}, "chat_template has 65537 characters, more than"),
        ({"structured": 1}, "structured has to be a JsonSchema, Regex, Grammar or OneOf, not int"),
        ({"structured": {"type": "xml"}}, "structured: Invalid value 'xml'"),
        ({"structured": {"type": "regex"}}, "structured: Object missing required field `pattern`"),
        ({"structured": JsonSchema(schema=False)}, "structured.schema is false: nothing matches it"),
        ({"structured": JsonSchema(schema={"enum": [{1}]})}, "structured.schema holds a set"),
        ({"structured": JsonSchema(schema={"x": nested(33)})}, "structured.schema is nested more than 32"),
        ({"structured": Regex(pattern="")}, "structured.pattern is empty"),
        ({"structured": Regex(pattern="a" * 8193)}, "structured.pattern has 8193 characters, more than 8192"),
        ({"structured": Grammar(grammar="")}, "structured.grammar is empty"),
        ({"structured": OneOf(options=())}, "structured.options is empty"),
        ({"structured": OneOf(options=("a", ""))}, r"structured.options\[1\] is empty"),
        ({"structured": OneOf(options=("a", "a"))}, "structured.options names one text twice"),
        ({"structured": OneOf(options=("a",) * 1025)}, "structured.options has 1025 items, more than 1024"),
        (
            {"structured": Regex(pattern="a"), "sampling": {"ignore_eos": True}},
            "ignore_eos exclude each other",
        ),
        ({"cache": 1}, "cache has to be True or False, not int"),
        ({"adapter": ""}, "adapter is empty"),
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
        ({"sampling": {"n": 3, "best_of": 2}}, "best_of = 2 is outside 3 … 16"),
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


def test_a_chat_with_tools_passes_and_is_stored_as_given() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    tools = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}]
    checked = check(
        messages=[
            {"role": "system", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "user", "content": "What time is it?", "name": "ann"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "12:00", "tool_call_id": "c1"},
        ],
        tools=tools,
        chat_template="{{ messages }}",
        structured={"type": "json_schema", "schema": {"type": "object"}},
        cache=False,
        adapter="polite",
    )
    body = decode_body(checked.encoded)
    assert body == checked.body
    assert body.messages is not None
    assert [message.content for message in body.messages] == ["a\nb", "What time is it?", "", "12:00"]
    assert body.messages[2].tool_calls == (call,)
    assert body.messages[3].tool_call_id == "c1"
    assert body.tools == tuple(tools)
    assert body.structured == JsonSchema(schema={"type": "object"})
    assert (body.chat_template, body.cache, body.adapter) == ("{{ messages }}", False, "polite")


def test_what_a_job_costs_counts_every_choice_and_the_truncated_prompt() -> None:
    sampling = {"n": 2, "best_of": 3, "max_tokens": 10, "truncate_prompt": 4}
    submission = check(token_ids=[1] * 9, sampling=sampling).submission("m.0.x")
    assert (submission.prompt_tokens, submission.cost) == (4, 34)
    assert check(token_ids=[1], sampling={"max_tokens": 0}).submission("m.0.x").cost == 1


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


@pytest.mark.parametrize("value", [10**400, -(10**5000)], ids=["400 digits", "5000 digits"])
def test_ints_too_long_to_print_are_refused(value: int) -> None:
    with pytest.raises(InvalidJob, match=r"an int of \d+ bits"):
        check_float("temperature", value, 0, 2)
    with pytest.raises(InvalidJob, match=r"an int of \d+ bits"):
        check_int("max_tokens", value, 0, 2)
