"""A model gets more partitions while workers run: those that were there before serve the new ones too."""

from __future__ import annotations

import asyncio

from chairlift_client import Client, keys
from fleet import Fleet
from loads import draw_orders
from transcript import Transcript


async def test_a_worker_takes_up_the_partitions_that_another_one_brought(
    fleet: Fleet, redis_url: str, namespace: str
) -> None:
    first = await fleet.spawn(redis_url, namespace, lease_s=0.5)
    orders = draw_orders(1, 40)
    async with Client(redis_url, namespace=namespace) as client:
        jobs = [await client.submit(**order.request()) for order in orders[:10]]
        grown = await fleet.spawn(redis_url, namespace, lease_s=0.5, partitions=4)
    async with Client(redis_url, namespace=namespace) as client:  # one that knows of the growth
        jobs += [await client.submit(**order.request()) for order in orders[10:25]]
        await grown.kill()
        jobs += [await client.submit(**order.request()) for order in orders[25:]]
        assert {keys.parse_job_id(job.id).partition for job in jobs[10:]} == {0, 1, 2, 3}
        transcripts = [Transcript(job.id) for job in jobs]
        await asyncio.gather(*(transcript.listen(client) for transcript in transcripts))
        for transcript in transcripts:
            transcript.check(await client.result(transcript.job_id, timeout=20))
    assert await first.poll() is None
