"""Streams over real servers while connections, publishes and servers are lost."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import pytest

from chairlift_client import Client, Event, Finished, Job, LogRewound, Queued, Resumed, Started, Tokens
from chairlift_client.protocol import encode
from played_worker import PlayedWorker, Ride, text_of
from servers import Flavour, Server, until

TEXTS = [f"{number} " for number in range(300)]


@pytest.fixture
async def server_of_its_own(flavour: Flavour) -> AsyncIterator[Server]:
    with Server(flavour, appendonly=True) as server:
        yield server


async def board(client: Client, worker: PlayedWorker) -> tuple[Job, Ride]:
    job = await client.submit(model="m", prompt="x")
    return job, await worker.claim_one()


async def collect(job: Job, after_seq: int = 0) -> list[Event]:
    return [event async for event in job.stream(after_seq)]


async def started(job: Job) -> tuple[asyncio.Task[list[Event]], asyncio.Event]:
    """A reader that is known to be subscribed, since it has the first event."""
    ready = asyncio.Event()

    async def read() -> list[Event]:
        events: list[Event] = []
        async for event in job.stream():
            events.append(event)
            ready.set()
        return events

    task = asyncio.create_task(read())
    await ready.wait()
    return task, ready


def is_gapless(events: list[Event], first: int = 1) -> bool:
    logged = [event for event in events if not isinstance(event, Queued)]
    return [event.seq for event in logged] == list(range(first, first + len(logged)))


async def test_joining_late_or_again_gives_exactly_the_rest(redis_url: str, namespace: str) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    async with (
        await PlayedWorker.open(redis_url, namespace) as worker,
        Client(redis_url, namespace=namespace) as client,
    ):
        job, ride = await board(client, worker)
        from_start, _ = await started(job)
        late: list[tuple[int, asyncio.Task[list[Event]]]] = []
        for start in range(0, len(TEXTS), 20):
            await ride.say(*TEXTS[start : start + 20])
            after_seq = rng.randint(0, ride.seq)
            late.append((after_seq, asyncio.create_task(collect(job, after_seq))))
            if rng.random() < 0.5:
                await asyncio.sleep(0)
        await ride.finish()
        events = await from_start
        assert is_gapless(events)
        assert text_of(events) == "".join(TEXTS) == (await job.result(5)).text
        for after_seq, task in late:
            assert await task == events[after_seq:]
        for after_seq in range(0, len(events) + 1, 37):
            assert await collect(job, after_seq) == events[after_seq:]
        assert await collect(job, len(events)) == []


async def test_a_reader_that_leaves_at_random_and_comes_back_with_its_seq(
    redis_url: str, namespace: str
) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    async with (
        await PlayedWorker.open(redis_url, namespace) as worker,
        Client(redis_url, namespace=namespace) as client,
    ):
        job, ride = await board(client, worker)

        async def talk() -> None:
            for text in TEXTS:
                await ride.say(text)
            await ride.finish()

        talking = asyncio.create_task(talk())
        events: list[Event] = []
        while not events or not isinstance(events[-1], Finished):
            leave_after = rng.randint(1, 40)
            stream = job.stream(events[-1].seq if events else 0)
            async for event in stream:
                events.append(event)
                leave_after -= 1
                if leave_after == 0:
                    break
            await stream.aclose()
        await talking
        assert is_gapless(events)
        assert text_of(events) == "".join(TEXTS)


async def test_the_last_publish_is_lost(redis_url: str, namespace: str) -> None:
    async with (
        await PlayedWorker.open(redis_url, namespace) as worker,
        Client(redis_url, namespace=namespace) as client,
    ):
        job, ride = await board(client, worker)
        reader, _ = await started(job)
        result = asyncio.create_task(job.result())
        await ride.say("heard ")
        await ride.log_without_publishing(ride.next_event("unheard"))
        await ride.log_without_publishing(Finished(ride.seq + 1, 1, 1), state="cancelled")
        assert text_of(await reader) == "heard unheard"
        with pytest.raises(Exception, match="cancelled"):
            await result


async def test_a_publish_in_the_middle_is_lost(redis_url: str, namespace: str) -> None:
    async with (
        await PlayedWorker.open(redis_url, namespace) as worker,
        Client(redis_url, namespace=namespace) as client,
    ):
        job, ride = await board(client, worker)
        reader, _ = await started(job)
        for text in TEXTS[:30]:
            await ride.log_without_publishing(ride.next_event(text))
            await ride.say("heard ")
        await ride.finish()
        events = await reader
        assert is_gapless(events)
        assert text_of(events) == ride.text


async def test_a_slow_reader_overflows_and_loses_nothing(redis_url: str, namespace: str) -> None:
    async with (
        await PlayedWorker.open(redis_url, namespace) as worker,
        Client(redis_url, namespace=namespace) as client,
    ):
        job, ride = await board(client, worker)
        stream = job.stream()
        events: list[Event] = [await anext(stream)]
        fast, _ = await started(job)
        for start in range(0, 3000, 500):
            await ride.say(*(f"{number} " for number in range(start, start + 500)))
        await ride.finish()
        assert is_gapless(await fast)
        events += [event async for event in stream]
        assert events == await fast
        assert text_of(events) == ride.text


async def test_connections_are_killed_all_the_time(server_of_its_own: Server) -> None:
    url = server_of_its_own.url
    async with await PlayedWorker.open(url, "n") as worker, Client(url, namespace="n") as client:
        job, ride = await board(client, worker)
        readers = [(await started(job))[0] for _ in range(5)]
        with server_of_its_own.client() as admin:
            for number, text in enumerate(TEXTS):
                await ride.say(text)
                if number % 20 == 0:
                    for connection in admin.client_list():
                        if connection["name"] == "chairlift-live":
                            admin.execute_command("CLIENT", "KILL", "ID", connection["id"])
        await ride.finish()
        for reader in readers:
            events = await reader
            assert is_gapless(events)
            assert text_of(events) == ride.text


async def test_the_server_dies_and_comes_back(server_of_its_own: Server) -> None:
    url = server_of_its_own.url
    async with await PlayedWorker.open(url, "n") as worker, Client(url, namespace="n") as client:
        job, ride = await board(client, worker)
        reader, _ = await started(job)
        for number, text in enumerate(TEXTS[:60]):
            await ride.say(text)
            if number % 20 == 10:
                server_of_its_own.restart()
        await ride.finish()
        events = await reader
        assert is_gapless(events)
        assert text_of(events) == ride.text


async def test_another_attempt_goes_on_where_the_first_one_ended(redis_url: str, namespace: str) -> None:
    async with (
        await PlayedWorker.open(redis_url, namespace) as worker,
        Client(redis_url, namespace=namespace) as client,
    ):
        job, ride = await board(client, worker)
        reader, _ = await started(job)
        await ride.say("one ", "two ")
        await ride.hand_back()
        second = await worker.claim_one()
        assert second.text == "one two "
        await second.run("three")
        events = await reader
        assert [type(e) for e in events] == [Started, Tokens, Tokens, Resumed, Tokens, Finished]
        assert text_of(events) == (await job.result(5)).text == "one two three"


async def test_a_failover_that_lost_events(redis_url: str, namespace: str) -> None:
    """Events are taken off the log by hand, as a promoted replica that lagged behind would show it."""
    async with (
        await PlayedWorker.open(redis_url, namespace) as worker,
        Client(redis_url, namespace=namespace) as client,
    ):
        for again, expected in (("b c ", "a b c d"), ("x ", None)):
            job, ride = await board(client, worker)
            reader, _ = await started(job)
            await ride.say("a ", "b ", "c ")
            await until(lambda job=job, seq=ride.seq: _has_read(client, job, seq))  # type: ignore[misc]
            await _lose(worker, ride, keep=2)
            await ride.hand_back()
            second = await worker.claim_one()
            assert second.text == "a "
            if expected is None:
                second.num_tokens = 7  # token ids unlike those that were delivered
                event = second.next_event(again)
                delta = event.choices[0]
                wrong = Tokens(event.seq, event.epoch, 1, (type(delta)(0, 1, delta.token_ids, delta.text),))
                await second.log_without_publishing(wrong)
                with pytest.raises(LogRewound):
                    await reader
            else:
                await second.run(*(f"{text} " for text in again.split()), "d")
                assert text_of(await reader) == expected


async def _has_read(client: Client, job: Job, seq: int) -> bool:
    """A second reader of the same channel has had the event; the first one was served before it."""
    async for event in job.stream(seq - 1):
        return event.seq == seq
    return False


async def _lose(worker: PlayedWorker, ride: Ride, keep: int) -> None:
    redis = worker.shards.shard_of(ride.prefix).redis
    log = f"{ride.prefix}:ev:{ride.job.job_id}"
    kept = await redis.xrange(log, max=f"{keep}-0")
    await redis.delete(log)
    for entry_id, fields in kept:
        await redis.execute_command("XADD", log, entry_id, "e", fields[b"e"])
    await redis.execute_command("HSET", f"{ride.prefix}:job:{ride.job.job_id}", "seq", keep)


async def test_many_streams_over_one_connection(redis_url: str, namespace: str) -> None:
    async with (
        await PlayedWorker.open(redis_url, namespace, partitions=2) as worker,
        Client(redis_url, namespace=namespace) as client,
    ):
        outcomes = await client.submit_many([{"model": "m", "prompt": "x"} for _ in range(200)])
        jobs = [outcome for outcome in outcomes if isinstance(outcome, Job)]
        readers = [asyncio.create_task(collect(job)) for job in jobs]
        rides = await worker.claim(200)
        assert len(rides) == 200
        for ride in rides:
            await ride.run(f"{ride.job.job_id} ", "ends")
        for job, reader in zip(jobs, readers, strict=True):
            assert text_of(await reader) == f"{job.id} ends"


def test_events_that_are_equal_have_equal_bytes() -> None:
    """What recognising a repeated event rests on."""
    assert encode(Started(1, 1, 5, "w")) == encode(Started(1, 1, 5, "w"))
