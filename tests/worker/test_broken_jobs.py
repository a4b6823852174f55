"""What another client may put into Redis by mistake costs the job that it was put into, and nobody else."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from chairlift_client import Client, JobFailed, SamplingParams, keys, operations
from chairlift_client.connection import Shards
from chairlift_client.operations import Submission
from running_worker import running_worker
from transcript import Transcript

LONG = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
SHORT = SamplingParams(max_tokens=3, temperature=0.0)
BODY = msgspec.msgpack.encode({"version": 1, "prompt": "Once", "sampling": {"max_tokens": 3}})


def _submission(job_id: str, body: bytes = BODY) -> Submission:
    return Submission(
        job_id=job_id, body=body, version=1, job_class="normal", tenant="default", cost=10, seed=1
    )


@pytest.mark.parametrize("seed", ["abc", "", "1.5"])
async def test_a_seed_that_is_no_number(redis_url: str, namespace: str, seed: str) -> None:
    prefix = keys.prefix(namespace, "tiny", 0)
    job_id = str(keys.draw_job_id("tiny", 1))
    async with await Shards.open(redis_url) as shards, Client(redis_url, namespace=namespace) as client:
        await shards.run(operations.submit(prefix, _submission(job_id)._replace(allow_unknown=True)))
        await shards.all[0].redis.execute_command("HSET", keys.job(prefix, job_id), "seed", seed)
        async with running_worker(redis_url, namespace) as worker:
            with pytest.raises(JobFailed, match="a field of the job cannot be read") as caught:
                await client.result(job_id, timeout=10)
            assert caught.value.code == "invalid"
            result = await client.generate(model="tiny", prompt="Once", sampling=SHORT, timeout=10)
            assert result.usage.output_tokens == 3
            assert worker.num_used_blocks == 0


async def test_a_log_that_cannot_be_read(redis_url: str, namespace: str) -> None:
    prefix = keys.prefix(namespace, "tiny", 0)
    async with await Shards.open(redis_url) as shards, Client(redis_url, namespace=namespace) as client:
        async with running_worker(redis_url, namespace):
            job = await client.submit(model="tiny", prompt="Once", sampling=LONG, allow_unknown_model=True)
            heard = Transcript(job.id)
            listening = asyncio.create_task(heard.listen(client))
            await asyncio.wait_for(heard.has_tokens.wait(), 10)
        assert (await job.status()).state == "waiting"
        listening.cancel()
        redis, at = shards.all[0].redis, keys.job(prefix, job.id)
        seq = 1 + int(await redis.execute_command("HGET", at, "seq"))
        await redis.execute_command("XADD", keys.events(prefix, job.id), f"{seq}-0", "e", b"\xff nonsense")
        await redis.execute_command("HSET", at, "seq", seq)
        async with running_worker(redis_url, namespace):
            with pytest.raises(JobFailed, match="the job's log cannot be read"):
                await client.result(job.id, timeout=10)
            await client.generate(model="tiny", prompt="Once", sampling=SHORT, timeout=10)


async def test_a_body_that_no_client_of_ours_would_send(redis_url: str, namespace: str) -> None:
    body = msgspec.msgpack.encode({"version": 1, "prompt": "x" * (4 << 20)})
    job_id = str(keys.draw_job_id("tiny", 1))
    submission = _submission(job_id, body)._replace(allow_unknown=True)
    async with (
        await Shards.open(redis_url) as shards,
        Client(redis_url, namespace=namespace) as client,
        running_worker(redis_url, namespace),
    ):
        await shards.run(operations.submit(keys.prefix(namespace, "tiny", 0), submission))
        with pytest.raises(JobFailed, match=f"the job has {len(body)} bytes, more than 4194304"):
            await client.result(job_id, timeout=10)


async def test_nobody_waits_for_the_long_prompt_of_another(redis_url: str, namespace: str) -> None:
    async with Client(redis_url, namespace=namespace) as client, running_worker(redis_url, namespace):
        long = await client.submit(model="tiny", prompt="the quick fox " * 100_000, allow_unknown_model=True)
        short = await client.generate(model="tiny", prompt="Once", sampling=SHORT, allow_unknown_model=True)
        with pytest.raises(JobFailed, match="the context of 1024 leaves none"):
            await long.result(timeout=30)
        assert short.timings.finished_ms < (await long.status()).finished_ms
