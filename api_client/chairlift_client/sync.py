"""The client for scripts without asyncio. Not a second client: it runs the one there is, in a thread.

Every method below is made from the method of `Client` with the same name and has its signature.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from chairlift_client import keys
from chairlift_client.client import Client, Job
from chairlift_client.connection import RETRY_S
from chairlift_client.errors import ChairliftError
from chairlift_client.protocol import Event, JobResult, Limits
from chairlift_client.status import JobStatus

P = ParamSpec("P")
T = TypeVar("T")


def _waiting(
    method: Callable[Concatenate[Client, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[SyncClient, P], T]:
    """A method that waits for the answer of `method`."""

    @functools.wraps(method)
    def wait(self: SyncClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._wait(method(self._client, *args, **kwargs))

    return wait


def _iterating(
    method: Callable[Concatenate[Client, P], AsyncGenerator[T, None]],
) -> Callable[Concatenate[SyncClient, P], Iterator[T]]:
    """A method that iterates over what `method` yields."""

    @functools.wraps(method)
    def iterate(self: SyncClient, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        return self._iterate(method(self._client, *args, **kwargs))

    return iterate


class SyncJob:
    """A submitted job; see Job."""

    __slots__ = ("_client", "id")

    def __init__(self, client: SyncClient, job_id: str) -> None:
        self._client = client
        self.id = job_id

    def stream(self, after_seq: int = 0) -> Iterator[Event]:
        """See Client.stream."""
        return self._client.stream(self.id, after_seq)

    def result(self, timeout: float | None = None) -> JobResult:
        """See Client.result."""
        return self._client.result(self.id, timeout)

    def status(self) -> JobStatus:
        """See Client.status."""
        return self._client.status(self.id)

    def cancel(self) -> bool:
        """See Client.cancel."""
        return self._client.cancel(self.id)

    def forget(self) -> bool:
        """See Client.forget."""
        return self._client.forget(self.id)

    def __repr__(self) -> str:
        return f"SyncJob({self.id!r})"


def _own(
    method: Callable[Concatenate[Client, P], Coroutine[Any, Any, Job]],
) -> Callable[Concatenate[SyncClient, P], SyncJob]:
    """A waiting method that gives a SyncJob for a Job."""

    @functools.wraps(method)
    def wait(self: SyncClient, /, *args: P.args, **kwargs: P.kwargs) -> SyncJob:
        return SyncJob(self, self._wait(method(self._client, *args, **kwargs)).id)

    return wait


def _own_many(
    method: Callable[Concatenate[Client, P], Coroutine[Any, Any, list[Job | ChairliftError]]],
) -> Callable[Concatenate[SyncClient, P], list[SyncJob | ChairliftError]]:
    """The same for a list."""

    @functools.wraps(method)
    def wait(self: SyncClient, /, *args: P.args, **kwargs: P.kwargs) -> list[SyncJob | ChairliftError]:
        outcomes = self._wait(method(self._client, *args, **kwargs))
        return [SyncJob(self, item.id) if isinstance(item, Job) else item for item in outcomes]

    return wait


class SyncClient:
    """`with SyncClient(url) as client: ...`; may be used by several threads at once. See Client."""

    def __init__(
        self,
        url: str,
        *,
        namespace: str = keys.DEFAULT_NAMESPACE,
        limits: Limits | None = None,
        retry_s: float = RETRY_S,
    ) -> None:
        self._client = Client(url, namespace=namespace, limits=limits, retry_s=retry_s)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    submit = _own(Client.submit)
    submit_many = _own_many(Client.submit_many)
    stream = _iterating(Client.stream)
    result = _waiting(Client.result)
    generate = _waiting(Client.generate)
    status = _waiting(Client.status)
    cancel = _waiting(Client.cancel)
    forget = _waiting(Client.forget)
    jobs = _iterating(Client.jobs)
    models = _waiting(Client.models)
    model_status = _waiting(Client.model_status)
    workers = _waiting(Client.workers)
    dead_letters = _iterating(Client.dead_letters)
    dead_letter = _waiting(Client.dead_letter)
    retry_dead = _waiting(Client.retry_dead)
    drop_dead = _waiting(Client.drop_dead)

    def job(self, job_id: str) -> SyncJob:
        """See Client.job."""
        return SyncJob(self, str(keys.parse_job_id(job_id)))

    def open(self) -> None:
        """Starts the thread and connects. `with` does it."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(
                target=self._loop.run_forever, name="chairlift client", daemon=True
            )
            self._thread.start()
            # At exit threads like this one stand still, and whoever then waits for it waits for ever: so does
            # an iterator that nobody has closed.
            atexit.register(self.close)
            try:
                self._wait(self._client.open())
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """Closes all connections and ends the thread. `with` does it."""
        atexit.unregister(self.close)
        loop, thread = self._loop, self._thread
        if loop is not None and thread is not None:
            self._wait(self._end())
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()
        self._loop = self._thread = None

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _end(self) -> None:
        await self._client.aclose()
        await asyncio.get_running_loop().shutdown_asyncgens()

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Its result. An interrupt (Ctrl-C) while waiting cancels it over there."""
        if self._loop is None:
            coroutine.close()
            raise RuntimeError("the client is not open: use `with SyncClient(...) as client`")
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _iterate(self, items: AsyncGenerator[T, None]) -> Iterator[T]:
        async def next_item() -> T | _End:
            return await anext(items, _END)

        try:
            while not isinstance(item := self._wait(next_item()), _End):
                yield item
        finally:
            # Closed already with the client; or this is the garbage collector, in the loop's own thread.
            if self._loop is not None and threading.current_thread() is not self._thread:
                self._wait(items.aclose())


class _End:
    """Stands for the end of an iteration, where None may be an item."""


_END = _End()
