"""A device that is gone: the worker goes too, and the jobs stay."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import pytest
from torch import Tensor

from chairlift_client import Client, SamplingParams
from chairlift_worker.engine.batch import Chunk
from chairlift_worker.engine.runner import Runner, RunnerSpec
from chairlift_worker.engine_thread import EngineBroken
from running_worker import running_worker
from servers import until


class BrokenRunner:
    """Raises, whatever it is to compute."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    @property
    def spec(self) -> RunnerSpec:
        return self._runner.spec

    def forward(self, chunks: Seq[Chunk]) -> Tensor:
        raise RuntimeError("the device is gone")


async def test_a_worker_without_a_device_ends(redis_url: str, namespace: str) -> None:
    """Before any job has used up its tries; another worker then runs them all."""
    async with Client(redis_url, namespace=namespace) as client:
        jobs = [
            await client.submit(
                model="tiny",
                prompt=f"{n}",
                sampling=SamplingParams(max_tokens=3, ignore_eos=True),
                allow_unknown_model=True,
            )
            for n in range(12)
        ]

        async def is_gone() -> bool:
            return not await client.workers()

        async def live() -> None:
            fields: dict[str, Any] = {"max_num_seqs": 2, "lookahead": 0}
            async with running_worker(redis_url, namespace, wrap=BrokenRunner, **fields) as worker:

                async def has_begun() -> bool:
                    return worker.num_turns > 0  # and stays so: it may be gone before anybody sees it

                await until(has_begun)
                await until(is_gone)
                assert worker.num_used_blocks == 0

        with pytest.raises(EngineBroken, match="the device is gone"):
            await live()
        states = [(await job.status()).state for job in jobs]
        assert set(states) <= {"waiting", "delayed"}, states
        async with running_worker(redis_url, namespace):
            results = [await job.result(timeout=30) for job in jobs]
        assert len(results) == 12
