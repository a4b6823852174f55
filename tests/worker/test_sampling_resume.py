"""kill -9 in the middle of every sampling feature: the output is that of a job that nothing happened to."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema
import msgspec

from chairlift_client import (
    Client,
    Finished,
    Grammar,
    JobResult,
    JsonSchema,
    OneOf,
    Regex,
    SamplingParams,
    TokenLogprobs,
    Tokens,
)
from fleet import Fleet
from hooked_runner import Hooks
from lora_adapters import save_random_adapter
from tiny_model import TINY_MODEL

SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "minLength": 20, "maxLength": 60},
        "words": {
            "type": "array",
            "items": {"type": "string", "maxLength": 12},
            "minItems": 3,
            "maxItems": 5,
        },
    },
    "required": ["title", "words"],
    "additionalProperties": False,
}
PROMPT = "Once upon a time there was a fox"


def order(structured: Any = None, **sampling: Any) -> dict[str, Any]:
    chosen = SamplingParams(**{"max_tokens": 60, "seed": 11, **sampling})
    request: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "sampling": chosen}
    return request if structured is None else {**request, "structured": structured}


FEATURES: dict[str, dict[str, Any]] = {
    "schema": order(JsonSchema(schema=SCHEMA), max_tokens=400),
    "regex": order(Regex(pattern="([a-z]{2,8} ){12}end"), max_tokens=400),
    "grammar": order(Grammar(grammar='start: (word " ")~14 "."\nword: /[a-z]{3,6}/'), max_tokens=400),
    "option": order(
        OneOf(options=(f"{PROMPT} who lived in a hollow tree", f"{PROMPT} who did not")), max_tokens=400
    ),
    "logprobs": order(logprobs=5, prompt_logprobs=3, ignore_eos=True),
    "n": order(n=4, temperature=0.8),
    "n, all of it": order(n=3, logprobs=2, stop=("the", "."), presence_penalty=0.5, min_tokens=20),
    "best of": order(n=2, best_of=5, logprobs=0),
    "best of, no logprobs": order(best_of=3),
    "repetition": order(repetition_penalty=1.4, ignore_eos=True),
    "presence and frequency": order(presence_penalty=0.8, frequency_penalty=0.4, ignore_eos=True),
    "bias and bans": order(
        logit_bias={70: 3.0}, banned_token_ids=(80, 81), bad_words=("the", "was"), ignore_eos=True
    ),
    "typical": order(typical_p=0.8, min_p=0.01, ignore_eos=True),
    "stops": order(stop=("forest", "they lived", "😊"), min_tokens=30, include_stop=True),
    "adapter": order(logprobs=1, ignore_eos=True) | {"adapter": "fox"},
    "adapter and choices": order(n=2, temperature=0.9, ignore_eos=True) | {"adapter": "hen"},
    "structured choices": order(JsonSchema(schema=SCHEMA), max_tokens=400, n=3, repetition_penalty=1.1),
}


@dataclass
class Listener:
    """What a subscriber of one job with any number of choices has heard."""

    job_id: str
    texts: dict[int, str] = field(default_factory=dict)
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: Any = None
    num_token_events: int = 0
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)

    async def listen(self, client: Client) -> None:
        seq = 0
        async for event in client.stream(self.job_id):
            if event.seq:
                assert event.seq == seq + 1
                seq = event.seq
            if isinstance(event, Tokens):
                self._hear(event)
        assert isinstance(event, Finished)
        self.has_begun.set()

    def _hear(self, event: Tokens) -> None:
        for delta in event.choices:
            known = self.token_ids.setdefault(delta.index, [])
            assert delta.offset == len(known)
            known.extend(delta.token_ids)
            self.texts[delta.index] = self.texts.get(delta.index, "") + delta.text
            self.logprobs.setdefault(delta.index, []).extend(delta.logprobs)
        if event.prompt_logprobs is not None:
            assert self.prompt_logprobs is None
            self.prompt_logprobs = event.prompt_logprobs
        self.num_token_events += 1
        if self.num_token_events == 4:
            self.has_begun.set()

    def check(self, result: JobResult) -> None:
        for choice in result.choices:
            assert tuple(self.token_ids[choice.index]) == choice.token_ids
            assert self.texts[choice.index] == choice.text
            assert tuple(self.logprobs[choice.index]) == (choice.logprobs or ())
        assert set(self.token_ids) == {choice.index for choice in result.choices}
        assert self.prompt_logprobs == result.prompt_logprobs


def same(one: JobResult, other: JobResult) -> bool:
    """Equal but for the last bits of logprobs, which may differ with the shape of the batch."""
    return all(
        _same(getattr(one, name), getattr(other, name)) for name in ("choices", "prompt_logprobs")
    ) and (one.usage.output_tokens == other.usage.output_tokens)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= 1e-4
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(_same(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, msgspec.Struct):
        return type(one) is type(other) and _same(
            msgspec.structs.astuple(one), msgspec.structs.astuple(other)
        )
    return bool(one == other)


async def test_every_feature_survives_kill_9(
    fleet: Fleet, redis_url: str, namespace: str, tmp_path: Path
) -> None:
    for seed, name in enumerate(("fox", "hen")):
        save_random_adapter(TINY_MODEL, tmp_path / name, seed=seed, strength=0.05)
    fields: dict[str, Any] = {"max_num_seqs": 32, "adapters": str(tmp_path)}
    slow = Hooks(step_s=0.02)
    calm_worker = await fleet.spawn(redis_url, f"{namespace}-calm", **fields)
    async with Client(redis_url, namespace=f"{namespace}-calm") as client:
        calm_jobs = {name: await client.submit(**request) for name, request in FEATURES.items()}
        calm = {name: await job.result(timeout=60) for name, job in calm_jobs.items()}
    await calm_worker.kill()
    async with Client(redis_url, namespace=namespace) as client:
        victim = await fleet.spawn(redis_url, namespace, lease_s=0.5, lookahead=16, hooks=slow, **fields)
        jobs = {name: await client.submit(**request) for name, request in FEATURES.items()}
        listeners = {name: Listener(job.id) for name, job in jobs.items()}
        listening = [asyncio.create_task(listener.listen(client)) for listener in listeners.values()]
        async with asyncio.timeout(30):
            await asyncio.gather(*(listener.has_begun.wait() for listener in listeners.values()))
        await victim.kill()
        heir = await fleet.spawn(redis_url, namespace, lease_s=0.5, lookahead=16, **fields)
        results = {name: await job.result(timeout=60) for name, job in jobs.items()}
        await asyncio.gather(*listening)
    await heir.kill()
    resumed = {name for name, result in results.items() if result.attempts > 1}
    print(f"{len(resumed)} of {len(results)} resumed")
    assert len(resumed) >= len(FEATURES) - 2, set(FEATURES) - resumed
    for name, result in results.items():
        listeners[name].check(result)
        assert same(result, calm[name]), (name, result, calm[name])
    check_features(results)


def check_features(results: dict[str, JobResult]) -> None:
    """The features really were at work."""
    jsonschema.validate(msgspec.json.decode(results["schema"].text), SCHEMA)
    for choice in results["structured choices"].choices:
        jsonschema.validate(msgspec.json.decode(choice.text), SCHEMA)
    assert results["regex"].text.endswith(" end")
    assert results["option"].text.startswith(PROMPT)
    assert len(results["n"].choices) == 4
    logprobs = results["logprobs"].choices[0].logprobs
    assert logprobs is not None
    assert {len(entry.top) for entry in logprobs} == {5}
    assert results["logprobs"].prompt_logprobs is not None
    assert results["best of, no logprobs"].choices[0].logprobs is None
    best = [sum(e.logprob for e in c.logprobs or ()) / len(c.token_ids) for c in results["best of"].choices]
    assert best == sorted(best, reverse=True)
    assert results["best of"].usage.output_tokens > sum(len(c.token_ids) for c in results["best of"].choices)
    assert "the" not in results["bias and bans"].text.split()
    assert results["adapter"].text != results["logprobs"].text
