"""The whole lift: real servers, worker processes, subscribers, and kill -9."""

from __future__ import annotations

import asyncio
import random
import signal

import msgspec
import pytest

from chairlift_client import Client, SamplingParams
from chairlift_client.protocol import JobResult, Tokens
from fleet import Fleet, WorkerHandle
from loads import Order, draw_orders, run_all
from transcript import Transcript


async def test_200_jobs_8_subscribers_2_workers(fleet: Fleet, redis_url: str, namespace: str) -> None:
    seed = 20261201
    print(f"seed {seed}")
    rng = random.Random(seed)
    workers = [await fleet.spawn(redis_url, namespace) for _ in range(2)]
    async with Client(redis_url, namespace=namespace) as producer:
        jobs = [await producer.submit(**order.request()) for order in draw_orders(seed, 200)]
        transcripts = [Transcript(job.id) for job in jobs]
        late = [Transcript(job.id, rng.randint(0, 20)) for job in jobs]

        async def subscribe(share: list[Transcript]) -> None:
            async with Client(redis_url, namespace=namespace) as client:
                await asyncio.gather(*(transcript.listen(client) for transcript in share))

        await asyncio.gather(*(subscribe(transcripts[index::8]) for index in range(8)))
        results = {job.id: await job.result(timeout=60) for job in jobs}
        for transcript in transcripts:
            transcript.check(results[transcript.job_id])
        for transcript in late:
            transcript.after_seq = min(transcript.after_seq, _last_seq(transcripts, transcript.job_id) - 1)
        await asyncio.gather(*(subscribe(late[index::8]) for index in range(8)))
        for transcript in late:
            transcript.check(results[transcript.job_id])
    assert len({event.worker for t in transcripts for event in t.events if hasattr(event, "worker")}) == 2
    for worker in workers:
        worker.signal(signal.SIGTERM)
        assert await worker.wait() == 0


def _last_seq(transcripts: list[Transcript], job_id: str) -> int:
    return next(t.events[-1].seq for t in transcripts if t.job_id == job_id)


async def test_reconnecting_subscriber_gets_exactly_the_rest(
    fleet: Fleet, redis_url: str, namespace: str
) -> None:
    worker = await fleet.spawn(redis_url, namespace)
    async with Client(redis_url, namespace=namespace) as client:
        rng = random.Random(7)
        for order in draw_orders(7, 10):
            job = await client.submit(**order.request())
            whole: list[int] = []
            seq, done = 0, False
            while not done:
                patience = rng.randint(1, 8)
                async for event in client.stream(job.id, seq):
                    if event.seq:
                        assert event.seq == seq + 1
                        seq = event.seq
                    if isinstance(event, Tokens):
                        whole.extend(event.choices[0].token_ids)
                    patience -= 1
                    if patience == 0:
                        break
                else:
                    done = True
            result = await job.result(timeout=30)
            assert tuple(whole) == result.choices[0].token_ids
    await worker.kill()


async def _kill_in_a_loop(
    fleet: Fleet, url: str, namespace: str, orders: list[Order], num_kills: int, rng: random.Random
) -> list[JobResult]:
    """Two workers and a running load; one is killed at a random moment and replaced, again and again."""
    workers: list[WorkerHandle] = [
        await fleet.spawn(url, namespace, lease_s=0.5, max_losses=50) for _ in range(2)
    ]
    async with Client(url, namespace=namespace) as client:
        jobs: list[str] = []
        transcripts: list[Transcript] = []
        listeners: list[asyncio.Task[None]] = []

        async def produce() -> None:
            for order in orders:
                job = await client.submit(**order.request())
                jobs.append(job.id)
                transcripts.append(Transcript(job.id))
                listeners.append(asyncio.create_task(transcripts[-1].listen(client)))
                await asyncio.sleep(rng.random() * 2 * num_kills / len(orders) * 0.5)

        producing = asyncio.create_task(produce())
        for _ in range(num_kills):
            await asyncio.sleep(rng.random() * 0.8)
            victim = rng.randrange(2)
            await workers[victim].kill()
            workers[victim] = await fleet.spawn(url, namespace, lease_s=0.5, max_losses=50)
        await producing
        results = [await client.result(job_id, timeout=60) for job_id in jobs]
        await asyncio.gather(*listeners)
        for transcript, result in zip(transcripts, results, strict=True):
            transcript.check(result)
        resumed = sum(result.attempts > 1 for result in results)
        print(f"{len(jobs)} jobs, {num_kills} kills, {resumed} jobs resumed")
        assert resumed > 0, "the kills hit nothing"
    for worker in workers:
        await worker.kill()
    return results


async def _check_kills(
    fleet: Fleet, url: str, namespace: str, num_jobs: int, num_kills: int, seed: int
) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    orders = draw_orders(seed, num_jobs, max_tokens=200)
    disturbed = await _kill_in_a_loop(fleet, url, namespace, orders, num_kills, rng)
    worker = await fleet.spawn(url, f"{namespace}-calm")
    async with Client(url, namespace=f"{namespace}-calm") as client:
        calm = await run_all(client, orders)
    await worker.kill()
    differing = [
        index
        for index, (one, other) in enumerate(zip(disturbed, calm, strict=True))
        if one.choices[0].token_ids != other.choices[0].token_ids or one.text != other.text
    ]
    assert not differing, [(orders[index], disturbed[index], calm[index]) for index in differing[:3]]


async def test_kill_9_loses_and_doubles_nothing(fleet: Fleet, redis_url: str, namespace: str) -> None:
    await _check_kills(fleet, redis_url, namespace, num_jobs=60, num_kills=6, seed=11)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_kill_9_fifty_times(fleet: Fleet, redis_url: str, namespace: str) -> None:
    await _check_kills(fleet, redis_url, namespace, num_jobs=400, num_kills=50, seed=50)


async def test_sigterm_hands_back_unspent(fleet: Fleet, redis_url: str, namespace: str) -> None:
    first = await fleet.spawn(redis_url, namespace, grace_s=0.0)
    async with Client(redis_url, namespace=namespace) as client:
        orders = [order._replace(sampling=_long(order)) for order in draw_orders(3, 8)]
        jobs = [await client.submit(**order.request()) for order in orders]
        transcripts = [Transcript(job.id) for job in jobs]
        listening = asyncio.gather(*(transcript.listen(client) for transcript in transcripts))
        async with asyncio.timeout(30):
            await asyncio.gather(*(transcript.has_tokens.wait() for transcript in transcripts))
        first.signal(signal.SIGTERM)
        assert await first.wait() == 0
        for job in jobs:
            status = await job.status()
            assert status.state in ("waiting", "finished")
            assert status.losses == 0
            assert status.failures == 0
        second = await fleet.spawn(redis_url, namespace)
        await listening
        for transcript in transcripts:
            transcript.check(await client.result(transcript.job_id, timeout=30))
        results = [await job.result() for job in jobs]
        assert any(result.attempts == 2 for result in results)
    await second.kill()


def _long(order: Order) -> SamplingParams:
    return msgspec.structs.replace(order.sampling, max_tokens=400, stop=(), ignore_eos=True)
