"""What is there: jobs, models, workers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator

from chairlift_client import keys, operations
from chairlift_client.connection import Shards
from chairlift_client.operations import ListedJob
from chairlift_client.protocol import JobState, ModelInfo, decode_model
from chairlift_client.status import ModelStatus, WorkerStatus, model_status, worker_status

PAGE_JOBS = 200


class Listing:
    """Reads lists of one namespace."""

    def __init__(self, shards: Shards, namespace: str) -> None:
        self._shards = shards
        self._namespace = namespace

    async def models(self) -> dict[str, ModelInfo]:
        """Every announced model by name."""
        key = keys.models(self._namespace)
        packed = await self._shards.call(key, lambda shard: shard.redis.execute_command("HGETALL", key))
        return {name.decode(): decode_model(info) for name, info in sorted(packed.items())}

    async def model_status(self, model: str, info: ModelInfo) -> ModelStatus:
        """The counters of all partitions, added up."""
        prefixes = [keys.prefix(self._namespace, model, number) for number in range(info.partitions)]
        counts = await asyncio.gather(*(self._shards.run(operations.counts(prefix)) for prefix in prefixes))
        return model_status(model, info, counts)

    async def workers(self) -> list[WorkerStatus]:
        """Every worker with a heartbeat."""
        index = keys.workers(self._namespace)
        ids = await self._shards.call(index, lambda shard: shard.redis.zrange(index, 0, -1))
        found = await asyncio.gather(*(self._worker(worker_id.decode()) for worker_id in ids))
        return [worker for worker in found if worker is not None]

    async def jobs(
        self, model: str, state: JobState | None, tenant: str | None, limit: int | None
    ) -> AsyncGenerator[ListedJob, None]:
        """Jobs of all partitions, newest first."""
        num_found = 0
        async for job in self._merged(model):
            if limit is not None and num_found >= limit:
                return
            if state in (None, job.state) and tenant in (None, job.tenant):
                num_found += 1
                yield job

    async def _worker(self, worker_id: str) -> WorkerStatus | None:
        key = keys.worker(self._namespace, worker_id)
        fields = await self._shards.call(key, lambda shard: shard.redis.execute_command("HGETALL", key))
        return worker_status(worker_id, fields) if fields else None

    async def _merged(self, model: str) -> AsyncGenerator[ListedJob, None]:
        """The partitions' lists, each newest first, merged; the newest of their heads is next."""
        info = (await self.models()).get(model) or ModelInfo(fingerprint="")
        lines = [_Line(self._shards, keys.prefix(self._namespace, model, n)) for n in range(info.partitions)]
        await asyncio.gather(*(line.fill() for line in lines))
        seen: set[str] = set()  # a job that is submitted while pages are read moves the others down
        while fullest := [line for line in lines if line.jobs]:
            newest = max(fullest, key=lambda line: line.jobs[0].submitted_ms)
            job = newest.jobs.popleft()
            await newest.fill()
            if job.job_id not in seen:
                seen.add(job.job_id)
                yield job


class _Line:
    """The jobs of one partition, a page at a time."""

    def __init__(self, shards: Shards, prefix: str) -> None:
        self.jobs: deque[ListedJob] = deque()
        self._shards = shards
        self._prefix = prefix
        self._offset = 0
        self._is_over = False

    async def fill(self) -> None:
        """Reads the next page when this one is used up."""
        while not self.jobs and not self._is_over:
            page = await self._shards.run(operations.jobs(self._prefix, self._offset, PAGE_JOBS))
            self.jobs.extend(page)
            self._offset += PAGE_JOBS
            self._is_over = not page
