"""The synchronous client is the asynchronous one, seen from another thread."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from chairlift_client import (
    Client,
    Finished,
    InvalidJob,
    JobCancelled,
    JobOptions,
    Queued,
    ServerUnavailable,
    SyncClient,
    SyncJob,
    Tokens,
)
from played_worker import PlayedWorker
from servers import free_port


@pytest.fixture
def client(redis_url: str, namespace: str) -> Iterator[SyncClient]:
    with SyncClient(redis_url, namespace=namespace) as client:
        yield client


def play(redis_url: str, namespace: str, *texts: str) -> None:
    async def once() -> None:
        async with await PlayedWorker.open(redis_url, namespace) as worker:
            for ride in await worker.claim():
                await ride.run(*texts)

    asyncio.run(once())


def test_from_submit_to_result(client: SyncClient, redis_url: str, namespace: str) -> None:
    job = client.submit(model="m", prompt="x", allow_unknown_model=True)
    assert job.status().state == "waiting"
    events = job.stream()
    assert isinstance(next(events), Queued)
    play(redis_url, namespace, "a", "b")
    assert [type(event) for event in events][-3:] == [Tokens, Tokens, Finished]
    assert job.result(timeout=5).text == "ab"
    assert client.job(job.id).result().text == "ab"
    assert [listed.job_id for listed in client.jobs("m")] == [job.id]
    assert list(client.models()) == ["m"]
    assert client.model_status("m").finished == 1
    assert len(client.workers()) == 1
    assert job.forget()


def test_submit_many_and_cancel(client: SyncClient) -> None:
    asked: list[JobOptions] = [
        {"model": "m", "prompt": "x", "allow_unknown_model": True},
        {"model": "m", "prompt": ""},
    ]
    job, refused = client.submit_many(asked)
    assert isinstance(job, SyncJob)
    assert isinstance(refused, InvalidJob)
    assert job.cancel()
    with pytest.raises(JobCancelled):
        job.result()


def test_an_iteration_may_be_left(client: SyncClient) -> None:
    job = client.submit(model="m", prompt="x", allow_unknown_model=True)
    for _ in range(3):
        for event in job.stream():
            assert isinstance(event, Queued)
            break
    left_open = job.stream()
    next(left_open)


def test_several_threads_may_use_it(client: SyncClient) -> None:
    def one(number: int) -> str:
        job = client.submit(model="m", prompt=f"{number}", allow_unknown_model=True)
        assert isinstance(next(job.stream()), Queued)
        job.cancel()
        return job.id

    with ThreadPoolExecutor(8) as threads:
        ids = list(threads.map(one, range(40)))
    assert len(set(ids)) == 40


def test_it_leaves_no_thread_behind(redis_url: str) -> None:
    before = threading.active_count()
    client = SyncClient(redis_url)
    with client:
        assert threading.active_count() == before + 1
        iterator = client.stream(client.submit(model="m", prompt="x", allow_unknown_model=True).id)
        next(iterator)
    assert threading.active_count() == before
    client.close()
    with pytest.raises(RuntimeError, match="not open"):
        client.models()
    with pytest.raises(ServerUnavailable), SyncClient(f"redis://127.0.0.1:{free_port()}", retry_s=0.1):
        pass
    assert threading.active_count() == before


def test_a_script_that_closes_nothing_ends(redis_url: str, namespace: str) -> None:
    script = (
        "from chairlift_client import SyncClient\n"
        f"client = SyncClient({redis_url!r}, namespace={namespace!r})\n"
        "client.open()\n"
        "events = client.submit(model='m', prompt='x', allow_unknown_model=True).stream()\n"
        "next(events)\n"
    )
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-c", script], capture_output=True, text=True, timeout=20, check=True
    )
    assert done.stdout + done.stderr == ""


def test_every_method_is_there_with_the_same_signature() -> None:
    for name, method in inspect.getmembers(Client, inspect.isfunction):
        if name.startswith("_") or name in ("open", "aclose", "job"):
            continue
        twin = getattr(SyncClient, name)
        assert inspect.signature(twin).parameters.keys() == inspect.signature(method).parameters.keys(), name
        assert twin.__doc__ == method.__doc__
