"""A lease holds as long as its worker lives, and not a moment longer."""

from __future__ import annotations

import asyncio
import random
import signal

import pytest
from redis.asyncio import Redis

from chairlift_client import Client, SamplingParams, keys
from chairlift_client.protocol import Resumed, Started
from fleet import Fleet, WorkerHandle
from hooked_runner import Hooks
from loads import draw_orders
from servers import until
from transcript import Transcript

LONG = SamplingParams(max_tokens=150, temperature=0.0, ignore_eos=True)
TRIGGER = (17, 19, 23)


def riders(transcript: Transcript) -> list[str]:
    """The workers that had the job, in their order."""
    return [event.worker for event in transcript.events if isinstance(event, Started | Resumed)]


async def test_a_long_job_under_a_short_lease_has_one_worker(
    fleet: Fleet, redis_url: str, namespace: str
) -> None:
    """Four leases long, and another worker that would take it."""
    slow = Hooks(step_s=0.03)
    workers = [await fleet.spawn(redis_url, namespace, lease_s=1.0, hooks=slow) for _ in range(2)]
    async with Client(redis_url, namespace=namespace) as client:
        result = await client.generate(timeout=30, model="tiny", prompt="a", sampling=LONG)
        assert result.attempts == 1
        assert result.timings.finished_ms - result.timings.boarded_ms > 3500
    for worker in workers:
        await worker.kill()


async def test_a_long_step_does_not_lose_the_lease(fleet: Fleet, redis_url: str, namespace: str) -> None:
    """The engine's thread is away for five leases; renewal is not its business."""
    sleepy = Hooks(trigger=TRIGGER, deed="sleep", sleep_s=3.5)
    workers = [await fleet.spawn(redis_url, namespace, lease_s=1.0, hooks=sleepy) for _ in range(2)]
    async with Client(redis_url, namespace=namespace) as client:
        sampling = SamplingParams(max_tokens=3, ignore_eos=True)
        result = await client.generate(timeout=30, model="tiny", token_ids=TRIGGER, sampling=sampling)
        assert result.attempts == 1
        assert result.timings.first_token_ms - result.timings.boarded_ms > 3400
    for worker in workers:
        await worker.kill()


async def heartbeat(url: str, namespace: str, worker: WorkerHandle) -> dict[bytes, bytes]:
    async with Redis.from_url(url) as redis:
        reply: dict[bytes, bytes] = await redis.hgetall(keys.worker(namespace, worker.worker_id))
    return reply


async def test_a_paused_worker_that_wakes_is_refused(fleet: Fleet, redis_url: str, namespace: str) -> None:
    """SIGSTOP, takeover, SIGCONT: nothing of the zombie's comes through, and it lets everything go."""
    slow = Hooks(step_s=0.03)
    zombie = await fleet.spawn(redis_url, namespace, lease_s=0.8, hooks=slow)
    async with Client(redis_url, namespace=namespace) as client:
        jobs = [await client.submit(model="tiny", prompt=f"{n}", sampling=LONG) for n in range(4)]
        transcripts = [Transcript(job.id) for job in jobs]
        listening = asyncio.gather(*(transcript.listen(client) for transcript in transcripts))
        async with asyncio.timeout(20):
            await asyncio.gather(*(transcript.has_tokens.wait() for transcript in transcripts))
        zombie.signal(signal.SIGSTOP)
        heir = await fleet.spawn(redis_url, namespace, lease_s=0.8, hooks=slow)

        async def are_taken_over() -> bool:
            return all(len(riders(transcript)) == 2 for transcript in transcripts)

        await until(are_taken_over)
        zombie.signal(signal.SIGCONT)

        async def is_empty() -> bool:
            beat = await heartbeat(redis_url, namespace, zombie)
            return beat.get(b"on_board") == b"0" and beat.get(b"used_blocks") == b"0"

        await until(is_empty)
        assert not all(isinstance(t.events[-1], Started) for t in transcripts)
        await listening
        for transcript in transcripts:
            transcript.check(await client.result(transcript.job_id, timeout=30))
            assert [worker[:3] for worker in riders(transcript)] == [zombie.worker_id[:3], heir.worker_id[:3]]
    for worker in (zombie, heir):
        await worker.kill()


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_from_kill_9_to_the_next_token(fleet: Fleet, redis_url: str, namespace: str) -> None:
    """Within a lease and a half, and the prefill of what was there, on a survivor with room."""
    lease_s, num_kills, seed = 1.0, 40, 4
    rng = random.Random(seed)
    pace = Hooks(step_s=0.01)
    workers = [await fleet.spawn(redis_url, namespace, lease_s=lease_s, hooks=pace) for _ in range(3)]
    gaps_ms: list[int] = []
    async with Client(redis_url, namespace=namespace) as client:
        for order in draw_orders(seed, num_kills):
            request = {**order.request(), "sampling": LONG}
            job = await client.submit(**request)
            transcript = Transcript(job.id)
            listening = asyncio.create_task(transcript.listen(client))
            await transcript.has_tokens.wait()
            await asyncio.sleep(rng.random() * 0.3)
            victim = next(w for w in workers if w.worker_id == riders(transcript)[-1])
            await victim.kill()
            workers[workers.index(victim)] = await fleet.spawn(
                redis_url, namespace, lease_s=lease_s, hooks=pace
            )
            await listening
            transcript.check(await job.result(timeout=30))
            gaps_ms += transcript.resume_gaps_ms()
    gaps_ms.sort()
    p50, p99 = gaps_ms[len(gaps_ms) // 2], gaps_ms[int(len(gaps_ms) * 0.99)]
    print(
        f"kill -9 to the next token: p50 {p50} ms, p99 {p99} ms, of {len(gaps_ms)}; lease {lease_s * 1000} ms"
    )
    assert len(gaps_ms) >= num_kills * 0.9
    assert p99 <= lease_s * 1500
    for worker in workers:
        await worker.kill()
