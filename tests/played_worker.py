"""A worker without an engine, for tests of the other side: it makes the very calls that a worker makes."""

from __future__ import annotations

from typing import Self

from chairlift_client import keys
from chairlift_client import worker_operations as operations
from chairlift_client.connection import Shards
from chairlift_client.protocol import (
    Choice,
    ChoiceDelta,
    Event,
    Finished,
    JobResult,
    LoggedEvent,
    Timings,
    Tokens,
    Usage,
    decode_event,
    encode,
)
from chairlift_client.worker_operations import ClaimedJob, Emission, RetryPolicy

LEASE_MS = 60_000


class PlayedWorker:
    """Announces a model, claims jobs, and emits the pieces of text it is told to."""

    def __init__(self, shards: Shards, namespace: str, model: str, partitions: int) -> None:
        self.shards = shards
        self.namespace = namespace
        self.model = model
        self.partitions = partitions
        # A name of its own: a claim of the same name and number is answered as the first one was.
        self.name = f"played-{keys.random_base62(8)}"
        self._number = 0

    @classmethod
    async def open(
        cls, url: str, namespace: str, *, model: str = "m", partitions: int = 1, max_waiting: int = 0
    ) -> Self:
        """Connects, and announces the model with room for 100 tokens."""
        worker = cls(await Shards.open(url), namespace, model, partitions)
        await worker.announce(max_waiting)
        return worker

    async def announce(self, max_waiting: int = 0, *, adapters: bool = False) -> None:
        """Heartbeat, and the limits of every partition."""
        call = operations.announce(
            keys.shared(self.namespace), self.name, LEASE_MS, self.model, "fp",
            partitions=self.partitions, context_tokens=100, pool_tokens=1000, adapters=adapters,
            heartbeat={"pid": 7},
        )  # fmt: skip
        assert (await self.shards.run(call)).fingerprint is None
        for partition in range(self.partitions):
            call_open = operations.open_partition(
                self.prefix(partition), context_tokens=100, pool_tokens=1000, max_waiting=max_waiting,
                max_bytes=0, max_tenant_jobs=0,
            )  # fmt: skip
            await self.shards.run(call_open)

    def prefix(self, partition: int) -> str:
        """The keys of a partition."""
        return keys.prefix(self.namespace, self.model, partition)

    async def claim(self, capacity: int = 100) -> list[Ride]:
        """Takes what waits, on all partitions."""
        rides: list[Ride] = []
        for partition in range(self.partitions):
            self._number += 1
            call = operations.claim(
                self.prefix(partition), self.name, self._number, capacity,
                lease_ms=LEASE_MS, version=1, on_board=0, carries_suspect=False,
            )  # fmt: skip
            rides += [Ride(self, self.prefix(partition), job) for job in (await self.shards.run(call)).jobs]
        return rides

    async def claim_one(self) -> Ride:
        """The one job that waits."""
        (ride,) = await self.claim()
        return ride

    async def aclose(self) -> None:
        """Closes its connections."""
        await self.shards.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class Ride:
    """One attempt of one job. Token number n has the id n."""

    def __init__(self, worker: PlayedWorker, prefix: str, job: ClaimedJob) -> None:
        self.job = job
        self.prefix = prefix
        self._worker = worker
        self.seq = job.seq
        logged = [decode_event(data) for data in job.log]
        deltas = [delta for event in logged if isinstance(event, Tokens) for delta in event.choices]
        self.text = "".join(delta.text for delta in deltas)
        self.num_tokens = sum(len(delta.token_ids) for delta in deltas)

    def next_event(self, text: str) -> Tokens:
        """One token for the text."""
        self.seq += 1
        delta = ChoiceDelta(0, self.num_tokens, (self.num_tokens,), text)
        self.text += text
        self.num_tokens += 1
        return Tokens(self.seq, self.job.epoch, 1, (delta,))

    async def say(self, *texts: str) -> None:
        """Emits one event for each text, all in one call."""
        emissions = [self._emission(self.next_event(text)) for text in texts]
        answers = await self._worker.shards.run(operations.emit(self.prefix, self._worker.name, emissions))
        assert set(answers) <= {"ok"}, answers

    async def finish(self) -> None:
        """Ends the job with a result that holds all of its text."""
        self.seq += 1
        usage = Usage(3, self.num_tokens)
        choice = Choice(
            index=0, text=self.text, token_ids=tuple(range(self.num_tokens)), finish_reason="stop"
        )
        result = JobResult(
            job_id=self.job.job_id, choices=(choice,), usage=usage, timings=Timings(submitted_ms=1)
        )
        call = operations.finish(
            self.prefix, self._worker.name, self.job.job_id, self.job.epoch, seq=self.seq, state="finished",
            event=encode(Finished(self.seq, self.job.epoch, 1, usage)), result=encode(result),
            tokens=self.num_tokens,
        )  # fmt: skip
        assert await self._worker.shards.run(call) == "ok"

    async def run(self, *texts: str) -> None:
        """Say and finish."""
        await self.say(*texts)
        await self.finish()

    async def fail(self, reason: str, *, max_failures: int = 1) -> None:
        """One failed attempt; by default it is the last permitted one."""
        policy = RetryPolicy(max_failures=max_failures, first_backoff_ms=1)
        call = operations.fail(
            self.prefix, self._worker.name, self.job.job_id, self.job.epoch,
            reason=reason, jitter=0.5, policy=policy,
        )  # fmt: skip
        await self._worker.shards.run(call)

    async def hand_back(self) -> None:
        """Gives the attempt up, unspent."""
        attempt = (self.job.job_id, self.job.epoch)
        call = operations.hand_back(self.prefix, self._worker.name, [attempt], policy=RetryPolicy())
        assert await self._worker.shards.run(call) == ("ok",)

    async def log_without_publishing(self, event: LoggedEvent, state: str = "running") -> None:
        """What is there when the server's publish did not reach anybody."""
        redis = self._worker.shards.shard_of(self.prefix).redis
        data = encode(event)
        await redis.execute_command(
            "XADD", keys.events(self.prefix, self.job.job_id), f"{event.seq}-0", "e", data
        )
        await redis.execute_command(
            "HSET", keys.job(self.prefix, self.job.job_id), "seq", event.seq, "state", state
        )

    def _emission(self, event: Tokens) -> Emission:
        return Emission(self.job.job_id, self.job.epoch, event.seq, 1, encode(event))


def text_of(events: list[Event]) -> str:
    """The joined text deltas of choice 0."""
    return "".join(delta.text for event in events if isinstance(event, Tokens) for delta in event.choices)
