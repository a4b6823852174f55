"""A job that kills its process, or its engine's step, among many that do not."""

from __future__ import annotations

import asyncio

import pytest

from chairlift_client import Client, SamplingParams
from chairlift_client.errors import JobFailed
from fleet import Fleet, WorkerHandle
from hooked_runner import Deed, Hooks
from loads import draw_orders

TRIGGER = (17, 19, 23, 29)
NUM_WORKERS = 3
NUM_GOOD = 200


class Crew:
    """Workers that are replaced when they die."""

    def __init__(self, fleet: Fleet, url: str, namespace: str, deed: Deed) -> None:
        self._fleet = fleet
        self._where = (url, namespace)
        self._hooks = Hooks(trigger=TRIGGER, deed=deed)
        self._workers: list[WorkerHandle] = []
        self.num_deaths = 0

    async def __aenter__(self) -> Crew:
        self._workers = [await self._spawn() for _ in range(NUM_WORKERS)]
        self._watching = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._watching.cancel()
        await asyncio.wait([self._watching])
        for worker in self._workers:
            if worker.is_running:
                await worker.kill()

    async def _spawn(self) -> WorkerHandle:
        return await self._fleet.spawn(*self._where, hooks=self._hooks, max_num_seqs=32, lease_s=1.0)

    async def _watch(self) -> None:
        while True:
            for index, worker in enumerate(self._workers):
                if worker.is_running and await worker.poll() is not None:
                    self.num_deaths += 1
                    self._workers[index] = await self._spawn()
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("deed", ["exit", "raise"])
async def test_one_poison_among_200_good_jobs(
    fleet: Fleet, redis_url: str, namespace: str, deed: Deed
) -> None:
    async with Crew(fleet, redis_url, namespace, deed) as crew:
        async with Client(redis_url, namespace=namespace) as client:
            orders = draw_orders(5, NUM_GOOD, max_tokens=30)
            half = [await client.submit(**order.request()) for order in orders[: NUM_GOOD // 2]]
            poison = await client.submit(
                model="tiny", token_ids=TRIGGER, sampling=SamplingParams(max_tokens=5)
            )
            half += [await client.submit(**order.request()) for order in orders[NUM_GOOD // 2 :]]
            results = [await job.result(timeout=60) for job in half]
            with pytest.raises(JobFailed) as caught:
                await poison.result(timeout=60)
            status = await poison.status()
        assert len(results) == NUM_GOOD
        assert caught.value.code == "dead_letter"
        print(f"{crew.num_deaths} deaths, {sum(result.attempts > 1 for result in results)} good jobs resumed")
        if deed == "exit":
            assert crew.num_deaths == 3
            assert status.attempts == 3
        else:
            assert crew.num_deaths == 0
