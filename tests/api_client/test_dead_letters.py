"""Dead letters through the client: listed over all partitions, read, begun anew, dropped."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from chairlift_client import Client, InvalidJob, JobExpired, JobFailed, JobOptions, QueueFull, keys
from chairlift_client.client import Job
from chairlift_client.dead_letters import PAGE_LETTERS, DeadLetter
from played_worker import PlayedWorker, text_of
from servers import Flavour, Server

PARTITIONS = 3


@pytest.fixture
async def worker(redis_url: str, namespace: str) -> AsyncIterator[PlayedWorker]:
    async with await PlayedWorker.open(redis_url, namespace, partitions=PARTITIONS) as played:
        yield played


@pytest.fixture
async def client(redis_url: str, namespace: str, worker: PlayedWorker) -> AsyncIterator[Client]:
    async with Client(redis_url, namespace=namespace) as opened:
        yield opened


async def give_up(client: Client, worker: PlayedWorker, count: int = 1) -> list[Job]:
    """Jobs whose only attempt failed, one after the other."""
    orders: list[JobOptions] = [{"model": "m", "prompt": f"number {n}", "tenant": "t"} for n in range(count)]
    jobs = [job for job in await client.submit_many(orders) if isinstance(job, Job)]
    assert len(jobs) == count
    for ride in await worker.claim(count):
        await ride.say("half of ")
        await ride.fail("no luck")
    return jobs


async def letters_of(client: Client) -> list[DeadLetter]:
    return [letter async for letter in client.dead_letters("m")]


async def test_all_partitions_are_listed_oldest_first(client: Client, worker: PlayedWorker) -> None:
    jobs = await give_up(client, worker, PAGE_LETTERS * 4)
    letters = await letters_of(client)
    assert {letter.job_id for letter in letters} == {job.id for job in jobs}
    assert len(letters) == len(jobs)
    assert {keys.parse_job_id(letter.job_id).partition for letter in letters} == set(range(PARTITIONS))
    assert [letter.died_ms for letter in letters] == sorted(letter.died_ms for letter in letters)
    assert all(letter.body is None for letter in letters)


async def test_a_letter_says_what_happened(client: Client, worker: PlayedWorker) -> None:
    (job,) = await give_up(client, worker)
    (listed,) = await letters_of(client)
    letter = await client.dead_letter(listed.letter_id)
    assert letter.body is not None
    assert letter.body.prompt == "number 0"
    assert (letter.job_id, letter.job_class, letter.tenant) == (job.id, "normal", "t")
    assert (letter.losses, letter.failures, letter.attempts) == (0, 1, 1)
    assert letter.worker == worker.name
    assert "no luck" in letter.reason
    status = await job.status()
    assert letter.submitted_ms == status.submitted_ms
    assert letter.died_ms >= letter.submitted_ms


async def test_a_retried_job_begins_anew_under_its_id(client: Client, worker: PlayedWorker) -> None:
    (job,) = await give_up(client, worker)
    (letter,) = await letters_of(client)
    assert await client.retry_dead(letter.letter_id)
    assert await client.retry_dead(letter.letter_id), "a repeat is no error"
    assert await letters_of(client) == []
    await (await worker.claim_one()).run("a whole", " text")
    assert (await job.result(timeout=5)).text == "a whole text"
    assert text_of([event async for event in job.stream()]) == "a whole text"
    with pytest.raises(JobExpired, match="no such dead letter"):
        await client.dead_letter(letter.letter_id)


async def test_a_dropped_letter_is_gone_and_its_job_stays_failed(
    client: Client, worker: PlayedWorker
) -> None:
    (job,) = await give_up(client, worker)
    (letter,) = await letters_of(client)
    assert await client.drop_dead(letter.letter_id)
    assert not await client.drop_dead(letter.letter_id)
    with pytest.raises(JobExpired):
        await client.retry_dead(letter.letter_id)
    with pytest.raises(JobFailed):
        await job.result(timeout=5)


@pytest.mark.parametrize("letter_id", ["", "m.0", "m.0.1-", "m.0.1-1.x", "m.x.1-1", "m.00000.1-1"])
async def test_what_is_no_letter_id_is_refused(client: Client, letter_id: str) -> None:
    for act in (client.dead_letter, client.retry_dead, client.drop_dead):
        with pytest.raises(InvalidJob, match="no dead letter's id"):
            await act(letter_id)


async def test_a_server_without_memory_takes_no_job_back(flavour: Flavour) -> None:
    with Server(flavour) as server:
        async with (
            await PlayedWorker.open(server.url, "n") as worker,
            Client(server.url, namespace="n") as client,
        ):
            await give_up(client, worker)
            (letter,) = await letters_of(client)
            await worker.shards.all[0].redis.config_set("maxmemory", "1")
            with pytest.raises(QueueFull, match="memory of the server"):
                await client.retry_dead(letter.letter_id)
            assert await client.drop_dead(letter.letter_id)
