"""The client of producers and subscribers.

async with Client("redis://localhost") as client:
    job = await client.submit(model="smollm2", messages=[{"role": "user", "content": "Hello"}])
    async for event in job.stream():
        ...
    result = await job.result()
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import suppress
from typing import Self, Unpack, get_args

from chairlift_client import keys, operations
from chairlift_client.checks import check_float, check_int
from chairlift_client.connection import RETRY_S, Shards
from chairlift_client.dead_letters import DeadLetter, DeadLetters
from chairlift_client.door import Door
from chairlift_client.errors import (
    ChairliftError,
    InvalidJob,
    JobCancelled,
    JobExpired,
    JobFailed,
    ResultTimeout,
    UnknownModel,
)
from chairlift_client.listing import Listing
from chairlift_client.operations import ListedJob, StatusReply
from chairlift_client.protocol import (
    Event,
    Failed,
    JobResult,
    JobState,
    Limits,
    ModelInfo,
    decode_event,
    decode_result,
)
from chairlift_client.request import CheckedJob, JobOptions, check_options
from chairlift_client.status import JobStatus, ModelStatus, WorkerStatus, job_status
from chairlift_client.stream import Feed, Follower, wait_for_end

MAX_SEQ = 2**53
MAX_TIMEOUT_S = 366 * 86_400.0


class Job:
    """A submitted job. Its `id` is all there is to it: keep it, and any client can go on from there."""

    __slots__ = ("_client", "id")

    def __init__(self, client: Client, job_id: str) -> None:
        self._client = client
        self.id = job_id

    def stream(self, after_seq: int = 0) -> AsyncGenerator[Event, None]:
        """See Client.stream."""
        return self._client.stream(self.id, after_seq)

    async def result(self, timeout: float | None = None) -> JobResult:  # noqa: ASYNC109 - as httpx has it
        """See Client.result."""
        return await self._client.result(self.id, timeout)

    async def status(self) -> JobStatus:
        """See Client.status."""
        return await self._client.status(self.id)

    async def cancel(self) -> bool:
        """See Client.cancel."""
        return await self._client.cancel(self.id)

    async def forget(self) -> bool:
        """See Client.forget."""
        return await self._client.forget(self.id)

    def __repr__(self) -> str:
        return f"Job({self.id!r})"


class Client:
    """Jobs in, tokens out. To be used with `async with`, in one event loop.

    `url` is `redis://`, `rediss://`, `unix://`, `redis+cluster://host,host` or
    `redis+sentinel://sentinel,sentinel/name-of-the-primary`. `retry_s` bounds how long a call is repeated
    while Redis cannot be reached. Every call may raise ServerUnavailable.
    """

    def __init__(
        self,
        url: str,
        *,
        namespace: str = keys.DEFAULT_NAMESPACE,
        limits: Limits | None = None,
        retry_s: float = RETRY_S,
    ) -> None:
        self.namespace = keys.check_namespace(namespace)
        self.limits = limits or Limits()
        self._url = url
        self._retry_s = retry_s
        self._opened: tuple[Shards, Door] | None = None

    async def open(self) -> None:
        """Connects. Raises ConfigError, ServerUnavailable, ServerUnsupported. `async with` does it."""
        if self._opened is None:
            shards = await Shards.open(self._url, retry_s=self._retry_s)
            self._opened = (shards, Door(shards, self.namespace))

    async def aclose(self) -> None:
        """Closes all connections. `async with` does it."""
        opened, self._opened = self._opened, None
        if opened is not None:
            await opened[0].aclose()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def submit(self, **job: Unpack[JobOptions]) -> Job:
        """Puts a job in line; see JobOptions for what can be said of it. Returns as soon as Redis has it.

        A call whose answer was lost is repeated without making a second job.
        Raises InvalidJob, JobTooLarge, UnknownModel, QueueFull, IdempotencyConflict.
        """
        outcome = (await self.submit_many([job]))[0]
        if isinstance(outcome, ChairliftError):
            raise outcome
        return outcome

    async def submit_many(self, jobs: Iterable[JobOptions]) -> list[Job | ChairliftError]:
        """Many jobs in a few round trips. In each job's place stands its Job, or why it was refused."""
        checked = [self._check(job) for job in jobs]
        submitted = iter(await self._door.submit([job for job in checked if isinstance(job, CheckedJob)]))
        return [job if isinstance(job, ChairliftError) else self._job(next(submitted)) for job in checked]

    def job(self, job_id: str) -> Job:
        """The handle of a job that was submitted somewhere, some time. Raises InvalidJob if it is no id."""
        return Job(self, str(keys.parse_job_id(job_id)))

    def stream(self, job_id: str, after_seq: int = 0) -> AsyncGenerator[Event, None]:
        """Every event of the job after `after_seq`, once and in order, up to the terminal one, come what may.

        Join late or again with the `seq` of the last event you have. Queued (seq 0) is told while the job
        waits; failing and being cancelled are events here, not errors.
        Raises JobExpired where there is no such job (any more), LogRewound after a loss on the server.
        """
        check_int("after_seq", after_seq, 0, MAX_SEQ)
        return Follower(self._feed(job_id), after_seq).events()

    async def result(self, job_id: str, timeout: float | None = None) -> JobResult:  # noqa: ASYNC109
        """Waits for the end of the job. After `timeout` seconds ResultTimeout; the job goes on.

        Raises JobFailed, JobCancelled, JobExpired, ResultTimeout.
        """
        if timeout is not None:
            check_float("timeout", timeout, 0, MAX_TIMEOUT_S)
        feed = self._feed(job_id)
        try:
            async with asyncio.timeout(timeout) as limit:
                await wait_for_end(feed)
                return await self._result_of(job_id)
        except TimeoutError:
            if not limit.expired():
                raise
            raise ResultTimeout(f"{job_id} did not end within {timeout:g} s", job_id=job_id) from None

    async def generate(self, timeout: float | None = None, **job: Unpack[JobOptions]) -> JobResult:  # noqa: ASYNC109
        """Submits a job and waits for its result. Nobody else has its id: giving up waiting cancels it.

        Raises what submit and result raise.
        """
        submitted = await self.submit(**job)
        try:
            return await submitted.result(timeout)
        except (ResultTimeout, asyncio.CancelledError):
            with suppress(ChairliftError):
                await asyncio.shield(submitted.cancel())
            raise

    async def status(self, job_id: str) -> JobStatus:
        """Where the job stands, with its place in line and an ETA. Raises JobExpired."""
        return job_status(job_id, await self._status(job_id))

    async def cancel(self, job_id: str) -> bool:
        """Ends a job: at once while it waits, within a step or so where it runs. Raises JobExpired.

        False says that it had ended before.
        """
        answer = await self._shards.run(operations.cancel(self._prefix(job_id), job_id))
        if answer == "absent":
            raise _expired(job_id)
        return answer != "ended"

    async def forget(self, job_id: str) -> bool:
        """Erases prompt, events and result; a live job is cancelled first. Forgetting twice is no error.

        False says that a worker still has it; it is gone as soon as that one lets go.
        """
        return await self._shards.run(operations.forget(self._prefix(job_id), job_id)) != "asked"

    def jobs(
        self,
        model: str,
        *,
        state: JobState | None = None,
        tenant: str | None = None,
        limit: int | None = None,
    ) -> AsyncGenerator[ListedJob, None]:
        """The jobs of a model, newest first: live ones, and ended ones whose results are still kept.

        InvalidJob for a state that there is not.
        """
        if state is not None and state not in get_args(JobState):
            raise InvalidJob(f"no state {state!r:.40}: there are {', '.join(get_args(JobState))}")
        return self._listing.jobs(keys.check_model(model), state, tenant, limit)

    async def models(self) -> dict[str, ModelInfo]:
        """Every model that a worker has announced within the last week."""
        return await self._listing.models()

    async def model_status(self, model: str) -> ModelStatus:
        """The queue of a model. Raises UnknownModel."""
        info = await self._door.model(keys.check_model(model), fresh=True)
        if info is None:
            raise UnknownModel(f"no worker has announced {model!r}")
        return await self._listing.model_status(model, info)

    async def workers(self) -> list[WorkerStatus]:
        """The workers that are alive."""
        return await self._listing.workers()

    def dead_letters(self, model: str) -> AsyncGenerator[DeadLetter, None]:
        """The jobs of a model that were given up, oldest first; without their bodies."""
        return self._dead_letters.all(keys.check_model(model))

    async def dead_letter(self, letter_id: str) -> DeadLetter:
        """One dead letter with the job's body. Raises InvalidJob for what is no letter id, JobExpired."""
        return await self._dead_letters.read(letter_id)

    async def retry_dead(self, letter_id: str) -> bool:
        """Gives a job that was given up a new life under its id, with its seed, from the beginning.

        True also where this was done before; False says that its job lives already, some other way.
        Raises InvalidJob, JobExpired, QueueFull (where the server's memory is full).
        """
        return await self._dead_letters.retry(letter_id)

    async def drop_dead(self, letter_id: str) -> bool:
        """Removes a dead letter, and the job's body with it. False says that it was not there (any more)."""
        return await self._dead_letters.drop(letter_id)

    async def _result_of(self, job_id: str) -> JobResult:
        """The result of a job that has ended, or the error that stands for it."""
        status = await self._status(job_id)
        if status.state == "cancelled":
            raise JobCancelled(f"{job_id} was cancelled", job_id=job_id)
        if status.state == "failed":
            raise await self._failure(job_id)
        if not status.result:
            raise _expired(job_id)
        return decode_result(status.result)

    async def _failure(self, job_id: str) -> ChairliftError:
        key = keys.events(self._prefix(job_id), job_id)
        last = await self._shards.call(key, lambda shard: shard.redis.xrevrange(key, count=1))
        event = decode_event(last[0][1][b"e"]) if last else None
        if not isinstance(event, Failed):
            return _expired(job_id)
        return JobFailed(f"{job_id}: {event.message or event.code}", job_id=job_id, code=event.code)

    async def _status(self, job_id: str) -> StatusReply:
        reply = await self._shards.run(operations.status(self._prefix(job_id), job_id))
        if reply is None:
            raise _expired(job_id)
        return reply

    def _feed(self, job_id: str) -> Feed:
        return Feed(self._shards, self._prefix(job_id), job_id)

    def _check(self, job: JobOptions) -> CheckedJob | ChairliftError:
        try:
            return check_options(job, self.limits)
        except ChairliftError as error:
            return error

    def _job(self, outcome: str | ChairliftError) -> Job | ChairliftError:
        return outcome if isinstance(outcome, ChairliftError) else Job(self, outcome)

    def _prefix(self, job_id: str) -> str:
        parts = keys.parse_job_id(job_id)
        return keys.prefix(self.namespace, parts.model, parts.partition)

    @property
    def _shards(self) -> Shards:
        return self._open()[0]

    @property
    def _door(self) -> Door:
        return self._open()[1]

    @property
    def _listing(self) -> Listing:
        return Listing(self._shards, self.namespace)

    @property
    def _dead_letters(self) -> DeadLetters:
        return DeadLetters(self._shards, self.namespace)

    def _open(self) -> tuple[Shards, Door]:
        if self._opened is None:
            raise RuntimeError("the client is not open: use `async with Client(...) as client`")
        return self._opened


def _expired(job_id: str) -> JobExpired:
    return JobExpired(f"no such job (any more): {job_id}", job_id=job_id)
