"""Cancelling a job in every state that it can be in; its blocks come back, its neighbours notice nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from redis.asyncio import Redis

from chairlift_client import Client, SamplingParams, keys
from chairlift_client.client import Job
from chairlift_client.protocol import Cancelled, Event
from chairlift_worker.engine.batch import Chunk
from chairlift_worker.service import Worker
from engine_runs import expect_short_outputs
from gated_runner import GatedRunner
from running_worker import running_worker
from servers import until

LONG = SamplingParams(max_tokens=300, temperature=0.0, ignore_eos=True)
PROMPT = "Once there was a fox. " * 12


@asynccontextmanager
async def gated(url: str, namespace: str, **fields: Any) -> AsyncIterator[tuple[Worker, GatedRunner, Client]]:
    """A worker whose steps the test allows one by one."""
    gates: list[GatedRunner] = []

    def wrap(runner: Any) -> GatedRunner:
        gates.append(GatedRunner(runner))
        return gates[0]

    async with (
        Client(url, namespace=namespace) as client,
        running_worker(url, namespace, wrap=wrap, **{"lease_s": 5.0, **fields}) as worker,
    ):
        try:
            yield worker, gates[0], client
        finally:
            gates[0].open()


async def submit(client: Client, prompt: str = "a", **options: Any) -> Job:
    return await client.submit(
        model="tiny", prompt=prompt, sampling=LONG, allow_unknown_model=True, **options
    )


async def last_event(job: Job) -> Event:
    async with asyncio.timeout(10):
        return [event async for event in job.stream()][-1]


async def check_gone(url: str, namespace: str, worker: Worker, gate: GatedRunner, job: Job) -> None:
    """It is cancelled within the step that stands at the gate, and nothing is held for it."""
    assert await job.cancel()
    if gate.at_gate is not None:
        assert isinstance(await last_event(job), Cancelled), "the step need not even end"
        gate.open()

    async def is_free() -> bool:
        return worker.num_used_blocks == 0

    await until(is_free)
    assert isinstance(await last_event(job), Cancelled)
    await check_idle(url, namespace)


async def check_idle(url: str, namespace: str) -> None:
    async with Redis.from_url(url) as redis:
        prefix = keys.prefix(namespace, "tiny", 0)
        for name in ("held", "live", "later"):
            assert not await redis.exists(f"{prefix}:{name}"), name
        counters = await redis.hgetall(f"{prefix}:n")
    left = {b"waiting", b"running", b"delayed", b"bytes"} & counters.keys()
    assert not left, counters


async def test_delayed(redis_url: str, namespace: str) -> None:
    async with gated(redis_url, namespace) as (worker, gate, client):
        job = await submit(client, delay_s=60)
        assert (await job.status()).state == "delayed"
        await check_gone(redis_url, namespace, worker, gate, job)


async def test_waiting_behind_a_full_worker(redis_url: str, namespace: str) -> None:
    async with gated(redis_url, namespace, max_num_seqs=1, lookahead=0) as (worker, gate, client):
        first = await submit(client)
        await gate.stands()
        second = await submit(client)
        assert (await second.status()).state == "waiting"
        before = worker.num_used_blocks
        assert await second.cancel()
        assert isinstance(await last_event(second), Cancelled)
        assert worker.num_used_blocks == before
        await check_gone(redis_url, namespace, worker, gate, first)


async def test_mid_prefill(redis_url: str, namespace: str) -> None:
    async with gated(redis_url, namespace, max_num_seqs=4, max_step_tokens=16) as (worker, gate, client):
        job = await submit(client, PROMPT)
        await gate.step_until(lambda chunks: chunks[0].start > 0 and chunks[0].num_logits == 0)
        assert worker.num_used_blocks > 0
        await check_gone(redis_url, namespace, worker, gate, job)


async def test_decoding_beside_a_neighbour(redis_url: str, namespace: str) -> None:
    """The neighbour's blocks stay, its text is what it would have been."""
    async with gated(redis_url, namespace, max_num_seqs=4) as (worker, gate, client):
        neighbour = await submit(client, "b")
        await gate.step_until(lambda chunks: chunks[0].start > 4)
        before = worker.num_used_blocks
        job = await submit(client)
        await gate.step_until(lambda chunks: len(chunks) == 2 and chunks[1].start > 4)
        assert worker.num_used_blocks > before
        assert await job.cancel()
        assert isinstance(await last_event(job), Cancelled)
        await gate.step()
        await gate.stands()
        assert worker.num_used_blocks == before
        gate.open()
        result = await neighbour.result(timeout=20)
        alone = await client.generate(model="tiny", prompt="b", sampling=LONG)
        assert result.text == alone.text


async def test_preempted(redis_url: str, namespace: str) -> None:
    """A pool in which two jobs cannot both be long: the younger one gives its blocks up, and is cancelled."""
    fields = {"max_num_seqs": 2, "kv_tokens": 320, "teach": expect_short_outputs}
    async with gated(redis_url, namespace, **fields) as (worker, gate, client):
        elder = await submit(client, "b")
        await gate.stands()
        younger = await submit(client)

        def are_two(chunks: tuple[Chunk, ...]) -> bool:
            return len(chunks) == 2 and all(chunk.start > 2 for chunk in chunks)

        await gate.step_until(are_two)
        await gate.step_until(lambda chunks: len(chunks) == 1)
        before = worker.num_used_blocks
        assert await younger.cancel()
        assert isinstance(await last_event(younger), Cancelled)
        await gate.step()
        await gate.stands()
        assert worker.num_used_blocks - before in (0, 1), "only the elder may have grown"
        await check_gone(redis_url, namespace, worker, gate, elder)


async def test_being_resumed(redis_url: str, namespace: str) -> None:
    """One worker made tokens and left; the next is in the middle of reading them in again."""
    async with gated(redis_url, namespace, max_num_seqs=4, max_step_tokens=16) as (_, gate, client):
        job = await submit(client, PROMPT)
        await gate.step_until(lambda chunks: chunks[0].num_logits == 1 and len(chunks[0].token_ids) == 1)
        await gate.step()
    async with gated(redis_url, namespace, max_num_seqs=4, max_step_tokens=16) as (worker, gate, client):
        resumed = client.job(job.id)
        await gate.step_until(lambda chunks: chunks[0].start > 0 and chunks[0].num_logits == 0)
        status = await resumed.status()
        assert status.state == "running"
        assert status.attempts == 2
        assert status.output_tokens > 0
        await check_gone(redis_url, namespace, worker, gate, resumed)


async def test_a_deadline_passes_while_it_runs(redis_url: str, namespace: str) -> None:
    async with gated(redis_url, namespace) as (worker, gate, client):
        job = await submit(client, deadline_s=0.3)
        await gate.stands()

        async def is_past() -> bool:
            status = await job.status()
            async with Redis.from_url(redis_url) as redis:
                seconds, micros = await redis.time()
            return bool(seconds * 1000 + micros // 1000 > status.deadline_ms)

        await until(is_past)
        gate.open()
        event = await last_event(job)
        assert getattr(event, "code", "") == "deadline"

        async def is_free() -> bool:
            return worker.num_used_blocks == 0

        await until(is_free)
        await check_idle(redis_url, namespace)
