"""Redis goes away, comes back, loses connections, keys or room; the lift goes on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest
from redis.asyncio import Redis

from chairlift_client import Client, SamplingParams, keys
from chairlift_client.errors import JobExpired, QueueFull, ServerUnavailable
from chairlift_client.protocol import Queued, Resumed
from fleet import Fleet, WorkerHandle
from hooked_runner import Hooks
from servers import Flavour, Server, until
from transcript import Transcript

LONG = SamplingParams(max_tokens=120, temperature=0.0, ignore_eos=True)
PACE = Hooks(step_s=0.01)
LEASE_S = 2.0


@pytest.fixture
def own_server(flavour: Flavour) -> Iterator[Server]:
    with Server(flavour, appendonly=True) as running:
        yield running


async def ride(client: Client, count: int = 3) -> list[Transcript]:
    """Jobs that have made their first tokens, and somebody who listens to each."""
    jobs = [await client.submit(model="tiny", prompt=f"{n}", sampling=LONG) for n in range(count)]
    transcripts = [Transcript(job.id) for job in jobs]
    for transcript in transcripts:
        transcript.start(client)
    async with asyncio.timeout(20):
        await asyncio.gather(*(transcript.has_tokens.wait() for transcript in transcripts))
    return transcripts


async def check_all(client: Client, transcripts: list[Transcript], attempts: int | None = None) -> None:
    for transcript in transcripts:
        result = await client.result(transcript.job_id, timeout=60)
        await transcript.finish()
        transcript.check(result)
        assert len(result.choices[0].token_ids) == LONG.max_tokens
        assert attempts is None or result.attempts == attempts


async def test_an_outage_shorter_than_the_lease(fleet: Fleet, own_server: Server) -> None:
    """The batch goes on; what is owed comes when the server is back; nobody is resumed."""
    worker = await fleet.spawn(own_server.url, "drill", hooks=PACE, lease_s=30.0)
    async with Client(own_server.url, namespace="drill") as client:
        transcripts = await ride(client)
        own_server.kill()
        await worker.wait_for_log("redis: ")
        num_heard = [len(transcript.events) for transcript in transcripts]
        await asyncio.sleep(1.0)
        own_server.start()
        restarted_ms = time.time() * 1000
        await check_all(client, transcripts, attempts=1)
        for transcript, count in zip(transcripts, num_heard, strict=True):
            heard = [event for event in transcript.events[count:] if not isinstance(event, Queued)]
            owed = [event for event in heard if event.at_ms < restarted_ms]
            assert len(owed) > 10, "it made tokens while the server was away"
    await worker.kill()


async def test_an_outage_longer_than_the_lease(fleet: Fleet, own_server: Server) -> None:
    """The worker stops work it may not own any more; afterwards it goes on where the log ends."""
    worker = await fleet.spawn(own_server.url, "drill", hooks=PACE, lease_s=0.5)
    async with Client(own_server.url, namespace="drill") as client:
        transcripts = await ride(client)
        own_server.kill()
        await worker.wait_for_log("lapsed")
        own_server.start()
        await check_all(client, transcripts)
        for transcript in transcripts:
            assert any(isinstance(event, Resumed) for event in transcript.events)
            status = await client.status(transcript.job_id)
            assert (status.losses, status.failures) == (0, 0), "an outage makes no suspects"
    await worker.kill()


async def test_a_server_that_stands_still(fleet: Fleet, own_server: Server) -> None:
    """Connections stay open and nothing answers: for longer than a lease."""
    worker = await fleet.spawn(own_server.url, "drill", hooks=PACE, lease_s=0.5)
    async with Client(own_server.url, namespace="drill") as client:
        transcripts = await ride(client)
        own_server.pause()
        await worker.wait_for_log("lapsed")
        own_server.resume()
        await check_all(client, transcripts)
    await worker.kill()


async def test_every_connection_is_closed_again_and_again(fleet: Fleet, own_server: Server) -> None:
    worker = await fleet.spawn(own_server.url, "drill", hooks=PACE, lease_s=LEASE_S)
    async with Client(own_server.url, namespace="drill") as client:
        transcripts = await ride(client)
        with own_server.client() as admin:
            for kind in ("normal", "pubsub") * 5:
                admin.execute_command("CLIENT", "KILL", "TYPE", kind)
                await asyncio.sleep(0.1)
        await check_all(client, transcripts, attempts=1)
    await worker.kill()


async def test_an_idle_worker_outlasts_its_socket_timeout(fleet: Fleet, own_server: Server) -> None:
    """Its blocking read ends before the socket's patience does: no connection is lost."""
    url = f"{own_server.url}?socket_timeout=0.6"
    worker = await fleet.spawn(url, "drill", lease_s=30.0)
    with own_server.client() as admin:

        def num_connections() -> int:
            reply = admin.info("stats")
            assert isinstance(reply, dict)
            return int(reply["total_connections_received"])

        async with Client(own_server.url, namespace="drill") as client:
            await client.generate(model="tiny", prompt="a", sampling=SamplingParams(max_tokens=1))
            before = num_connections()
            await asyncio.sleep(2.0)
            assert num_connections() == before
            started_at = time.monotonic()
            await client.generate(model="tiny", prompt="a", sampling=SamplingParams(max_tokens=1))
            assert time.monotonic() - started_at < 1.0
    assert "redis: " not in worker.log.read_text()
    await worker.kill()


async def _calls(url: str) -> int:
    async with Redis.from_url(url) as redis:
        return int((await redis.info("stats"))["total_commands_processed"])


async def test_everything_is_flushed_under_a_worker(fleet: Fleet, own_server: Server) -> None:
    """It says so, does not run hot, and serves whatever comes next."""
    worker = await fleet.spawn(own_server.url, "drill", hooks=PACE, lease_s=0.5)
    async with Client(own_server.url, namespace="drill") as client:
        transcripts = await ride(client)
        with own_server.client() as admin:
            admin.flushall()
        await worker.wait_for_log("lost")
        for transcript in transcripts:
            with pytest.raises(JobExpired):
                await transcript.finish()
        before, started_at = await _calls(own_server.url), time.monotonic()
        await asyncio.sleep(1.0)
        rate = (await _calls(own_server.url) - before) / (time.monotonic() - started_at)
        assert rate < 300, "commands per second of an idle worker, those inside of functions included"

        async def is_known() -> bool:
            with own_server.client() as admin:
                limits = keys.prefix("drill", "tiny", 0) + ":limits"
                return bool(admin.exists(keys.models("drill"))) and bool(admin.exists(limits))

        await until(is_known)
        await check_all(client, await ride(client), attempts=1)
    await worker.kill()


async def test_a_slow_subscriber_overflows(fleet: Fleet, own_server: Server) -> None:
    """The server cuts off who does not read; the log has the rest."""
    with own_server.client() as admin:
        admin.config_set("client-output-buffer-limit", "pubsub 4096 2048 1")
    worker = await fleet.spawn(own_server.url, "drill", max_num_seqs=32, lease_s=LEASE_S)
    async with Client(own_server.url, namespace="drill") as client:
        transcripts = await ride(client, 20)
        deadline = time.monotonic() + 0.5
        while time.monotonic() < deadline:
            pass  # this process is busy: it reads nothing
        await check_all(client, transcripts, attempts=1)
    await worker.kill()


async def _refuses_to_submit(client: Client, kind: type[Exception], match: str) -> None:
    with pytest.raises(kind, match=match):
        await client.submit(model="tiny", prompt="a", sampling=LONG)


async def _ride_through(server: Server, worker: WorkerHandle, kind: type[Exception], match: str) -> None:
    async with (
        Client(server.url, namespace="drill") as client,
        Client(server.url, namespace="drill", retry_s=0.3) as hasty,
    ):
        transcripts = await ride(client)
        with server.client() as admin:
            if kind is QueueFull:
                admin.config_set("maxmemory", "1mb")
            else:
                admin.config_set("appendfsync", "everysec")
                server.fill_disk()

        async def is_refusing() -> bool:
            try:
                await hasty.submit(model="tiny", prompt="a", sampling=SamplingParams(max_tokens=1))
            except kind:
                return True
            return False

        await until(is_refusing)
        await _refuses_to_submit(hasty, kind, match)
        if kind is not QueueFull:
            await worker.wait_for_log("MISCONF")
            server.free_disk()
        with server.client() as admin:
            admin.config_set("maxmemory", "0")
        await check_all(client, transcripts, attempts=1)
        await check_all(client, await ride(client))


async def test_the_disk_is_full(fleet: Fleet, own_server: Server) -> None:
    """Producers are told why; jobs on board wait and are not lost."""
    worker = await fleet.spawn(own_server.url, "drill", hooks=PACE, lease_s=30.0)
    await _ride_through(own_server, worker, ServerUnavailable, "MISCONF")
    await worker.kill()


async def test_the_memory_is_full(fleet: Fleet, own_server: Server) -> None:
    """Nothing new comes in; what is in goes on and ends."""
    worker = await fleet.spawn(own_server.url, "drill", hooks=PACE, lease_s=LEASE_S)
    await _ride_through(own_server, worker, QueueFull, "memory")
    await worker.kill()
