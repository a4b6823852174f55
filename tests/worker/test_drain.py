"""How a worker goes when it is asked to: nothing is lost, nothing is spent."""

from __future__ import annotations

import asyncio
import signal
import time

from chairlift_client import Client, SamplingParams
from chairlift_client.client import Job
from fleet import Fleet
from hooked_runner import Hooks
from loads import draw_orders
from transcript import Transcript

SHORT = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
LONG = SamplingParams(max_tokens=1000, temperature=0.0, ignore_eos=True)
PACE = Hooks(step_s=0.01)


async def begun(client: Client, sampling: SamplingParams, count: int) -> tuple[list[Job], list[Transcript]]:
    """Jobs that have made their first tokens."""
    jobs = [await client.submit(model="tiny", prompt=f"{n}", sampling=sampling) for n in range(count)]
    transcripts = [Transcript(job.id) for job in jobs]
    for transcript in transcripts:
        transcript.start(client)
    async with asyncio.timeout(20):
        await asyncio.gather(*(transcript.has_tokens.wait() for transcript in transcripts))
    return jobs, transcripts


async def check_unspent(jobs: list[Job]) -> None:
    for job in jobs:
        status = await job.status()
        assert status.state == "waiting"
        assert (status.losses, status.failures) == (0, 0)
        assert status.output_tokens > 0


async def test_running_jobs_finish_within_the_grace(fleet: Fleet, redis_url: str, namespace: str) -> None:
    """And what waits is left to others."""
    worker = await fleet.spawn(redis_url, namespace, hooks=PACE, grace_s=30.0, max_num_seqs=2, lookahead=0)
    async with Client(redis_url, namespace=namespace) as client:
        jobs, transcripts = await begun(client, SHORT, 2)
        waiting = await client.submit(model="tiny", prompt="later", sampling=SHORT)
        worker.signal(signal.SIGTERM)
        assert await worker.ended() == 0
        for job, transcript in zip(jobs, transcripts, strict=True):
            result = await job.result(timeout=5)
            assert result.attempts == 1
            await transcript.finish()
            transcript.check(result)
        assert (await waiting.status()).state == "waiting"
        assert (await waiting.status()).attempts == 0


async def test_a_second_sigterm_ends_the_grace(fleet: Fleet, redis_url: str, namespace: str) -> None:
    worker = await fleet.spawn(redis_url, namespace, hooks=PACE, grace_s=600.0)
    async with Client(redis_url, namespace=namespace) as client:
        jobs, transcripts = await begun(client, LONG, 3)
        worker.signal(signal.SIGTERM)
        await worker.wait_for_log("drains")
        worker.signal(signal.SIGTERM)
        assert await worker.ended() == 0
        await check_unspent(jobs)
        for transcript in transcripts:
            await transcript.stop()


async def test_sigint_is_at_once(fleet: Fleet, redis_url: str, namespace: str) -> None:
    worker = await fleet.spawn(redis_url, namespace, hooks=PACE, grace_s=600.0)
    async with Client(redis_url, namespace=namespace) as client:
        jobs, transcripts = await begun(client, LONG, 3)
        worker.signal(signal.SIGINT)
        assert await worker.ended() == 0
        await check_unspent(jobs)
        for transcript in transcripts:
            await transcript.stop()


async def test_a_rolling_restart_spends_nothing(fleet: Fleet, redis_url: str, namespace: str) -> None:
    """Three workers under load, one after the other replaced: nothing is lost or failed, texts stay whole."""
    workers = [await fleet.spawn(redis_url, namespace, hooks=PACE, grace_s=0.1) for _ in range(3)]
    gaps_ms: list[int] = []
    async with Client(redis_url, namespace=namespace) as client:
        transcripts: list[Transcript] = []

        async def produce() -> None:
            for order in draw_orders(8, 30, max_tokens=100):
                job = await client.submit(**order.request())
                transcripts.append(Transcript(job.id))
                transcripts[-1].start(client)
                await asyncio.sleep(0.08)

        producing = asyncio.create_task(produce())
        for index in range(3):
            started_at = time.monotonic()
            workers[index].signal(signal.SIGTERM)
            assert await workers[index].ended() == 0
            print(f"drained in {time.monotonic() - started_at:.2f} s")
            workers[index] = await fleet.spawn(redis_url, namespace, hooks=PACE)
        await producing
        for transcript in transcripts:
            transcript.check(await client.result(transcript.job_id, timeout=60))
            await transcript.finish()
            gaps_ms += transcript.resume_gaps_ms()
            status = await client.status(transcript.job_id)
            assert (status.losses, status.failures) == (0, 0)
    assert gaps_ms, "no job was running on a worker that went"
    print(f"{len(gaps_ms)} resumed, longest gap {max(gaps_ms)} ms")
    for worker in workers:
        await worker.kill()
