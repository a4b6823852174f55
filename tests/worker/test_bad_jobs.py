"""Everything that a user can send wrong, past the client's checks, beside neighbours that must not notice.

Each bad job gets a clear error and is acknowledged; what its neighbours are given does not change.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from chairlift_client import Client, Failed, InvalidJob, JobFailed, JobResult, JobTooLarge, SamplingParams
from chairlift_client.protocol import Limits
from chairlift_client.request import JobOptions, check_options
from running_worker import running_worker

CONTEXT = 1024
STRICT = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content }}{% endfor %}"
)
ENDLESS = {"type": "integer", "allOf": [{"multipleOf": p} for p in (7, 11, 13, 17, 19, 23, 29)]}
TWO_USERS = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]


def nested(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = {"x": value}
    return value


BAD: dict[str, tuple[dict[str, Any] | bytes, str]] = {
    "no msgpack": (b"\xc1", "the job's body does not follow the schema"),
    "no map": (b"\x01", "does not follow the schema"),
    "endless nesting": (b"\x91" * 3000, "does not follow the schema|nested"),
    "unknown sampling": ({"prompt": "x", "sampling": {"temprature": 1}}, "unknown field `temprature`"),
    "no input": ({}, "exactly one of messages, prompt and token_ids, not none"),
    "two inputs": ({"prompt": "x", "token_ids": [5]}, "not prompt and token_ids"),
    "empty prompt": ({"prompt": ""}, "prompt is empty"),
    "empty ids": ({"token_ids": []}, "token_ids is empty"),
    "no messages": ({"messages": []}, "messages is empty"),
    "id outside": ({"token_ids": [5, 640]}, "has id 640, the model's vocabulary has 640 ids"),
    "prompt of the context": (
        {"token_ids": [5] * CONTEXT},
        "the prompt has 1024 tokens; the context of 1024",
    ),
    "prompt beyond it": (
        {"token_ids": [5] * (CONTEXT + 1)},
        "the prompt has 1025 tokens; the context of 1024",
    ),
    "one too many": (
        {"token_ids": [5] * 1000, "sampling": {"max_tokens": 25}},
        "prompt .1000. and max_tokens .25. make 1025 tokens; the context has 1024",
    ),
    "temperature": ({"prompt": "x", "sampling": {"temperature": -1.0}}, "temperature = -1 is outside 0"),
    "not a number": ({"prompt": "x", "sampling": {"top_p": float("nan")}}, "top_p = nan is not finite"),
    "bias outside": ({"prompt": "x", "sampling": {"logit_bias": {640: 1.0}}}, "token id 640 in logit_bias"),
    "bias without end": ({"prompt": "x", "sampling": {"logit_bias": {5: float("inf")}}}, "inf is not finite"),
    "stop outside": (
        {"prompt": "x", "sampling": {"stop_token_ids": [9999]}},
        "token id 9999 in stop_token_ids",
    ),
    "nothing allowed": (
        {"prompt": "x", "sampling": {"allowed_token_ids": [7], "banned_token_ids": [7]}},
        "leave none of 640 tokens",
    ),
    "choices": ({"prompt": "x", "sampling": {"n": 17}}, "n = 17 is outside 1 … 16"),
    "logprobs": ({"prompt": "x", "sampling": {"logprobs": 21}}, "logprobs = 21 is outside 0 … 20"),
    "schema": (
        {"prompt": "x", "structured": {"type": "json_schema", "schema": {"type": "no"}}},
        "cannot be compiled",
    ),
    "deep schema": (
        {"prompt": "x", "structured": {"type": "json_schema", "schema": nested(40)}},
        "structured.schema is nested more than 32 deep",
    ),
    "regex": (
        {"prompt": "x", "structured": {"type": "regex", "pattern": "(ab"}},
        "this regex cannot be compiled",
    ),
    "minutes": (
        {"prompt": "x", "structured": {"type": "json_schema", "schema": ENDLESS}},
        "this json_schema cannot be compiled: it is not done after 2 s",
    ),
    "unknown form": ({"prompt": "x", "structured": {"type": "xml"}}, "does not follow the schema"),
    "two users": (
        {"messages": TWO_USERS, "chat_template": STRICT},
        "does not take these messages: roles must alternate",
    ),
    "role": ({"messages": [{"role": "<|im_end|>", "content": "x"}]}, r"messages\[0\].role is '<|im_end|>'"),
    "template": ({"messages": TWO_USERS, "chat_template": "{% if %}"}, "chat_template is not valid"),
    "adapter": ({"prompt": "x", "adapter": "nobody"}, "no adapters; the job asks for 'nobody'"),
}

NEIGHBOURS = [
    SamplingParams(max_tokens=80, temperature=0.9, seed=1, logprobs=3, ignore_eos=True),
    SamplingParams(max_tokens=80, temperature=0.0, ignore_eos=True, n=2),
]


def raw(body: dict[str, Any] | bytes) -> bytes:
    """As another client might send it."""
    return body if isinstance(body, bytes) else msgspec.msgpack.encode({"version": 1, **body})


async def submit_raw(client: Client, body: dict[str, Any] | bytes) -> str:
    """Past every check of the client's."""
    checked = check_options(JobOptions(model="tiny", prompt="x"), Limits())
    (outcome,) = await client._door.submit([checked._replace(encoded=raw(body), body=checked.body)])
    assert isinstance(outcome, str), outcome
    return outcome


async def ride(client: Client) -> list[JobResult]:
    jobs = [
        await client.submit(model="tiny", prompt="Once upon", sampling=sampling) for sampling in NEIGHBOURS
    ]
    return [await job.result(timeout=60) for job in jobs]


def outputs(result: JobResult) -> list[tuple[str, tuple[int, ...]]]:
    return [(choice.text, choice.token_ids) for choice in result.choices]


async def test_a_bad_job_fails_with_a_clear_error_and_its_neighbours_do_not_notice(
    redis_url: str, namespace: str
) -> None:
    async with running_worker(redis_url, namespace, max_num_seqs=8) as worker:
        async with Client(redis_url, namespace=namespace) as client:
            await client.submit(model="tiny", prompt="x", sampling=SamplingParams(max_tokens=1))
            alone = await ride(client)
            riding = asyncio.create_task(ride(client))
            ids = {name: await submit_raw(client, body) for name, (body, _) in BAD.items()}
            assert [outputs(result) for result in await riding] == [outputs(result) for result in alone]
            for name, (_, message) in BAD.items():
                with pytest.raises(JobFailed, match=f"(?s){message}") as failed:
                    await client.result(ids[name], timeout=60)
                assert failed.value.code == "invalid", name
            good = await client.generate(
                model="tiny",
                prompt="x",
                sampling=SamplingParams(max_tokens=40, temperature=0.0),
                structured={"type": "json_schema", "schema": {}},
                timeout=60,
            )
            assert good.text
            status = await client.model_status("tiny")
            assert (status.waiting, status.running) == (0, 0)
        assert worker.num_used_blocks == 0


async def test_what_takes_long_to_check_keeps_nobody_waiting(redis_url: str, namespace: str) -> None:
    """Two schemas of minutes at once; plain jobs ride and end meanwhile."""
    short = SamplingParams(max_tokens=3)
    async with running_worker(redis_url, namespace), Client(redis_url, namespace=namespace) as client:
        await client.generate(model="tiny", prompt="x", sampling=short, timeout=60)
        slow = [
            await client.submit(
                model="tiny", prompt="x", structured={"type": "json_schema", "schema": schema}
            )
            for schema in ({**ENDLESS, "title": "a"}, {**ENDLESS, "title": "b"})
        ]
        quick = [await client.submit(model="tiny", prompt="x", sampling=short) for _ in range(5)]
        results = [await job.result(timeout=60) for job in quick]
        for job in slow:
            (*_, end) = [event async for event in job.stream()]
            assert isinstance(end, Failed)
            assert "not done after 2 s" in end.message
            assert all(result.timings.finished_ms < end.at_ms for result in results)


ONLY_THE_WORKER_KNOWS = {
    *(
        "id outside",
        "prompt of the context",
        "prompt beyond it",
        "one too many",
        "bias outside",
        "stop outside",
    ),
    *("nothing allowed", "schema", "regex", "minutes", "two users", "role", "template", "adapter"),
}
AT_THE_DOOR = {
    name: body
    for name, (body, _) in BAD.items()
    if isinstance(body, dict) and name not in ONLY_THE_WORKER_KNOWS
}


@pytest.mark.parametrize("body", AT_THE_DOOR.values(), ids=AT_THE_DOOR)
def test_the_client_refuses_at_the_door_what_it_can_know(body: dict[str, Any]) -> None:
    with pytest.raises(InvalidJob):
        check_options(JobOptions(**{"model": "tiny", **body}), Limits())  # type: ignore[typeddict-item]


@pytest.mark.parametrize("num_prompt", [1, 39, 40])
async def test_the_door_and_the_engine_agree_on_what_the_pool_can_hold(
    redis_url: str, namespace: str, num_prompt: int
) -> None:
    """The last token is never computed, so that a pool of 64 slots has room for 65."""
    async with (
        running_worker(redis_url, namespace, kv_tokens=64),
        Client(redis_url, namespace=namespace) as client,
    ):
        prompt = [5] * num_prompt
        fills = SamplingParams(max_tokens=65 - num_prompt, ignore_eos=True)
        result = await client.generate(model="tiny", token_ids=prompt, sampling=fills)
        assert len(result.choices[0].token_ids) == 65 - num_prompt
        assert result.choices[0].finish_reason == "length"
        too_long = SamplingParams(max_tokens=66 - num_prompt)
        with pytest.raises(JobTooLarge, match="need 66 tokens; the pool of tiny has 65"):
            await client.submit(model="tiny", token_ids=prompt, sampling=too_long)
