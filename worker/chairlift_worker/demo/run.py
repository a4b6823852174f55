"""The demo itself: a server, a worker process, a producer process, and a subscriber that watches."""

from __future__ import annotations

import asyncio
import secrets
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec

from chairlift_client import Client
from chairlift_client.connection import Shards
from chairlift_client.errors import JobError
from chairlift_worker.demo.display import Display
from chairlift_worker.demo.processes import ChildError, child
from chairlift_worker.demo.producer import Submitted
from chairlift_worker.demo.prompts import load_prompts
from chairlift_worker.demo.rides import Lift, Ride
from chairlift_worker.step_log import StepRecord

MODEL_NAME = "demo"
SEATS = 8
"""Fewer than jobs, so that some wait and take the seat of whoever leaves."""
KV_TOKENS = 4096
READY_LIMIT_S = 300.0
_POLL_S = 0.05


class Demo:
    """One run. `url` and `model` are there already; everything else begins and ends in `run`."""

    def __init__(self, url: str, model: Path | str, lift: Lift) -> None:
        self._url = url
        # Through the environment: arguments of processes can be read by everybody on the machine.
        self._settings = {"CHAIRLIFT_REDIS_URL": url}
        self._model = model
        self._lift = lift
        self._namespace = f"demo-{secrets.token_hex(4)}"
        self._prompts = {prompt.name: prompt for prompt in load_prompts()}

    async def run(self, display: Display) -> None:
        """Serve all prompts and return; ChildError when a process dies or the worker does not come up."""
        with tempfile.TemporaryDirectory(prefix="chairlift-demo-") as name:
            folder = Path(name)
            log, command = folder / "worker.log", self._worker_command(folder)
            async with (
                emptied(self._url, self._namespace),
                Client(self._url, namespace=self._namespace) as client,
                child(command, folder=folder, log=log, settings=self._settings) as worker,
            ):
                await self._until_ready(client, worker, folder)
                with display:
                    await self._watch(client, display, worker, folder)

    def _worker_command(self, folder: Path) -> list[str]:
        options = {
            "model": str(self._model),
            "name": MODEL_NAME,
            "namespace": self._namespace,
            "max-num-seqs": str(SEATS),
            "kv-tokens": str(KV_TOKENS),
            "grace-s": "0",
            "step-log": str(folder / "steps.jsonl"),
        }
        flags = [part for name, value in options.items() for part in (f"--{name}", value)]
        return [sys.executable, "-m", "chairlift_client", "worker", *flags]

    def _producer_command(self) -> list[str]:
        return [sys.executable, "-m", "chairlift_worker.demo.producer", self._namespace, MODEL_NAME]

    async def _until_ready(self, client: Client, worker: asyncio.subprocess.Process, folder: Path) -> None:
        deadline = time.monotonic() + READY_LIMIT_S
        while MODEL_NAME not in await client.models():
            if worker.returncode is not None:
                raise ChildError(f"the worker ended with {worker.returncode}", folder / "worker.log")
            if time.monotonic() > deadline:
                raise ChildError(
                    f"the worker was not ready within {READY_LIMIT_S:g} s", folder / "worker.log"
                )
            await asyncio.sleep(_POLL_S)

    async def _watch(
        self, client: Client, display: Display, worker: asyncio.subprocess.Process, folder: Path
    ) -> None:
        steps = asyncio.create_task(self._follow_steps(folder / "steps.jsonl", display))
        guard = asyncio.create_task(worker.wait())
        jobs = asyncio.create_task(self._follow_jobs(client, display, folder))
        try:
            done, _ = await asyncio.wait((jobs, guard, steps), return_when=asyncio.FIRST_COMPLETED)
            if guard in done and jobs not in done:
                raise ChildError(f"the worker ended with {worker.returncode}", folder / "worker.log")
            for task in done:
                await task
        finally:
            for task in (steps, guard, jobs):
                task.cancel()
            await asyncio.gather(steps, guard, jobs, return_exceptions=True)
        self._read_steps(folder / "steps.jsonl", display)

    async def _follow_jobs(self, client: Client, display: Display, folder: Path) -> None:
        log = folder / "producer.log"
        command, settings = self._producer_command(), self._settings
        async with child(command, folder=folder, log=log, settings=settings, read_output=True) as producer:
            assert producer.stdout is not None
            try:
                async with asyncio.TaskGroup() as subscribers:
                    async for line in producer.stdout:
                        subscribers.create_task(self._follow(client, self._submitted(line, display), display))
            except ExceptionGroup as group:
                raise group.exceptions[0] from None
            if await producer.wait() != 0:
                raise ChildError(f"the producer ended with {producer.returncode}", log)

    def _submitted(self, line: bytes, display: Display) -> Ride:
        submitted = msgspec.json.decode(line, type=Submitted)
        ride = self._lift.submitted(self._prompts[submitted.name], submitted.job_id)
        display.submitted(ride)
        return ride

    async def _follow(self, client: Client, ride: Ride, display: Display) -> None:
        async for event in client.stream(ride.job_id):
            ride.hear(event)
            display.heard(ride)
        with suppress(JobError):  # it has failed, which the ride knows
            ride.result = await client.result(ride.job_id)

    async def _follow_steps(self, path: Path, display: Display) -> None:
        while True:
            self._read_steps(path, display)
            await asyncio.sleep(_POLL_S)

    def _read_steps(self, path: Path, display: Display) -> None:
        """Tell of the steps that were written since the last look; a line may be only half there."""
        if not path.exists():
            return
        whole = path.read_bytes().split(b"\n")[:-1]
        for line in whole[len(self._lift.steps) :]:
            record = msgspec.json.decode(line, type=StepRecord)
            if not self._lift.rides.keys() >= set(record.jobs):
                return  # the producer's line about a job is still on its way
            display.stepped(self._lift.stepped(record))


@asynccontextmanager
async def emptied(url: str, namespace: str) -> AsyncIterator[None]:
    """Leaves nothing of the namespace on the server, which may be somebody else's."""
    try:
        yield
    finally:
        async with await Shards.open(url) as shards:
            for shard in shards.all:
                async for key in shard.redis.scan_iter(f"cl:{{{namespace}*", count=1000):
                    await shard.redis.unlink(key)
