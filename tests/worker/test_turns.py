"""One conversation with a shard per step, whatever the batch size and the number of partitions."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from redis.asyncio import Redis

from chairlift_client import Client, SamplingParams
from chairlift_worker.step_log import StepRecord
from running_worker import running_worker
from servers import Flavour, Server

NUM_TOKENS = 300
LONG = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)


async def _reads(url: str) -> int:
    """How many times the server has read from a socket: a pipeline is one read."""
    async with Redis.from_url(url) as redis:
        return int((await redis.info("stats"))["total_reads_processed"])


@pytest.mark.parametrize("partitions", [1, 4])
@pytest.mark.parametrize("batch", [1, 8])
async def test_one_pipeline_per_step(flavour: Flavour, tmp_path: Path, batch: int, partitions: int) -> None:
    log = tmp_path / "steps.jsonl"
    fields: dict[str, Any] = {
        "max_num_seqs": 8,
        "partitions": partitions,
        "step_log": str(log),
        "lease_s": 30.0,
    }
    with Server(flavour) as server:
        async with (
            running_worker(server.url, "turns", **fields) as worker,
            Client(server.url, namespace="turns") as client,
        ):
            await client.generate(model="tiny", prompt="a", sampling=LONG, allow_unknown_model=True)
            before, turns_before, steps_before = await _reads(server.url), worker.num_turns, _steps(log)
            jobs = [await client.submit(model="tiny", prompt=f"{i}", sampling=LONG) for i in range(batch)]
            await asyncio.gather(*(_listen(client, job.id) for job in jobs))
            reads = await _reads(server.url) - before
            turns = worker.num_turns - turns_before
            steps = _steps(log) - steps_before
    assert steps >= NUM_TOKENS
    # Beside the steps: a claim for each wake-up, and what the client itself sends (submits, subscriptions).
    assert turns <= steps + 3 * batch
    assert reads <= steps + 30 + 16 * batch


async def _listen(client: Client, job_id: str) -> None:
    async for _ in client.stream(job_id):
        pass


def _steps(log: Path) -> int:
    lines = log.read_bytes().splitlines()
    return msgspec.json.decode(lines[-1], type=StepRecord).step
