"""How the lift itself behaves: boarding and idling, and what the client's import costs.

Measured on a worker process of its own with a given model, through the real client and server.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil

from chairlift_client import Client, Job, SamplingParams, keys
from chairlift_client.protocol import TERMINAL_STATES
from chairlift_worker.demo.processes import clean_environment
from chairlift_worker.step_log import StepRecord

BOARDING_MARGIN_MS = 5
READY_LIMIT_S = 300.0


class Figures(NamedTuple):
    """What one run of the bench says."""

    idle_cpu_percent: float
    boarding_idle_p50_ms: float
    boarding_idle_p95_ms: float
    boarded_in_first_step: int
    """Of the jobs submitted under load: those in the first step that began 5 ms after their submit."""
    boarded_under_load: int


class BenchWorker:
    """A worker process with a step log, for as long as the `async with` lasts."""

    def __init__(self, url: str, model: str, *, partitions: int = 1, max_num_seqs: int = 32) -> None:
        self.url = url
        self.namespace = f"bench-{os.getpid()}-{keys.random_base62(4)}"
        self.partitions = partitions
        self._model = model
        self._max_num_seqs = max_num_seqs
        self._folder = tempfile.TemporaryDirectory()
        self.step_log = Path(self._folder.name) / "steps.jsonl"
        self.process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> BenchWorker:
        command = (
            "worker", "--model", self._model, "--name", "bench", "--namespace", self.namespace,
            "--partitions", f"{self.partitions}", "--max-num-seqs", f"{self._max_num_seqs}",
            "--step-log", f"{self.step_log}", "--log-level", "warning",
        )  # fmt: skip
        # The URL may hold a password, and arguments can be read by everybody on the machine.
        environment = {**clean_environment(), "CHAIRLIFT_REDIS_URL": self.url}
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "chairlift_client", *command, env=environment
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self.process is not None
        self.process.terminate()
        await self.process.wait()
        self._folder.cleanup()

    def client(self) -> Client:
        """A client in the worker's namespace."""
        return Client(self.url, namespace=self.namespace)

    def steps(self) -> list[StepRecord]:
        """The steps so far."""
        lines = self.step_log.read_bytes().splitlines() if self.step_log.exists() else []
        return [msgspec.json.decode(line, type=StepRecord) for line in lines]


async def measure(url: str, model: str) -> Figures:
    """All figures, one after the other."""
    async with BenchWorker(url, model) as worker, worker.client() as client:
        await client.generate(
            READY_LIMIT_S, model="bench", prompt="a", allow_unknown_model=True, sampling=_greedy(1)
        )
        idle = await _idle_cpu_percent(worker, seconds=10)
        waits = sorted([await _boarding_ms(client) for _ in range(200)])
        first, probes = await _boarding_under_load(worker, client)
    return Figures(
        idle_cpu_percent=idle,
        boarding_idle_p50_ms=statistics.median(waits),
        boarding_idle_p95_ms=waits[int(len(waits) * 0.95)],
        boarded_in_first_step=first,
        boarded_under_load=probes,
    )


async def _idle_cpu_percent(worker: BenchWorker, seconds: float) -> float:
    assert worker.process is not None
    process = psutil.Process(worker.process.pid)
    before = process.cpu_times()
    await asyncio.sleep(seconds)
    after = process.cpu_times()
    percent: float = 100 * (after.user + after.system - before.user - before.system) / seconds
    return percent


async def _boarding_ms(client: Client) -> float:
    """Submit to an idle worker; both times are the server's."""
    await asyncio.sleep(random.uniform(0.005, 0.03))
    result = await client.generate(model="bench", prompt="Once upon", sampling=_greedy(1))
    return result.timings.boarded_ms - result.timings.submitted_ms


async def _boarding_under_load(worker: BenchWorker, client: Client, num_probes: int = 60) -> tuple[int, int]:
    """Probes beside eight long jobs: did each ride in the first step that began late enough?"""
    load = await _submit_load(client)
    probes = []
    for _ in range(num_probes):
        load = await _keep_up(client, load)
        await asyncio.sleep(random.uniform(0.02, 0.12))
        result = await client.generate(model="bench", prompt="One day", sampling=_greedy(2))
        probes.append((result.job_id, result.timings.submitted_ms))
    steps = worker.steps()
    for job in load:
        await job.cancel()
    return sum(_rode_at_once(steps, job_id, submitted_ms) for job_id, submitted_ms in probes), num_probes


async def _submit_load(client: Client) -> list[Job]:
    """Jobs that go on until the context is full."""
    return [
        await client.submit(model="bench", prompt=f"Once upon {index}", sampling=_greedy(None))
        for index in range(8)
    ]


async def _keep_up(client: Client, load: list[Job]) -> list[Job]:
    """The load itself while it runs, else a new one; a load that failed is an error."""
    if (await load[0].status()).state not in TERMINAL_STATES:
        return load
    await load[0].result()
    return await _submit_load(client)


def _rode_at_once(steps: list[StepRecord], job_id: str, submitted_ms: int) -> bool:
    due = next(step for step in steps if step.started_ms >= submitted_ms + BOARDING_MARGIN_MS)
    first = next(step for step in steps if job_id in step.jobs)
    return first.step <= due.step


def _greedy(max_tokens: int | None) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


def time_imports(repeats: int = 15) -> tuple[float, float]:
    """Median ms to import redis.asyncio and chairlift_client, in fresh interpreters, by turns."""
    modules = ("redis.asyncio", "chairlift_client")
    times: dict[str, list[float]] = {module: [] for module in modules}
    for _ in range(repeats):
        for module in modules:
            times[module].append(_import_ms(module))
    medians = [statistics.median(times[module]) for module in modules]
    return medians[0], medians[1]


def _import_ms(module: str) -> float:
    code = f"import time; t = time.perf_counter(); import {module}; print((time.perf_counter() - t) * 1000)"
    return float(
        subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout
    )
