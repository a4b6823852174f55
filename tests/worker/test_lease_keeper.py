"""What keeps a lease and what does not: slow servers, dead connections, and attempts that have just begun."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from chairlift_client import Client, calls, keys
from chairlift_client.connection import Shards
from chairlift_client.protocol import SCHEMA_VERSION
from chairlift_client.worker_operations import RetryPolicy, claim
from chairlift_worker.background import cancel_all
from chairlift_worker.queue.attempts import Attempt, Board
from chairlift_worker.queue.leases import LeaseKeeper
from chaos.proxy import Proxy
from servers import Server, available_flavours

LEASE_MS = 2000


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Of one flavour: nothing here is the server's doing."""
    with Server(available_flavours()[0]) as running:
        yield running


class Keeping:
    """A lease keeper behind a proxy, and what it says of the attempts on its board."""

    def __init__(self, proxy: Proxy, shards: Shards, namespace: str) -> None:
        self.proxy = proxy
        self.shards = shards
        self.prefix = keys.prefix(namespace, "m", 0)
        self.board = Board(8, 0)
        self.lost: list[str] = []
        self.lapsed: list[str] = []
        self._num_claims = 0
        self.keeper = LeaseKeeper(
            shards,
            [self.prefix],
            "w",
            lease_ms=LEASE_MS,
            policy=RetryPolicy(),
            board=self.board,
            on_lost=lambda attempt: self._drop([attempt], self.lost),
            on_lapsed=lambda attempts: self._drop(attempts, self.lapsed),
            on_cancelled=lambda attempt: self._drop([attempt], self.lost),
        )

    async def board_one(self) -> Attempt:
        """Claim the next job."""
        call = claim(
            self.prefix,
            "w",
            self._num_claims,
            1,
            lease_ms=LEASE_MS,
            version=SCHEMA_VERSION,
            on_board=0,
            carries_suspect=False,
        )
        self._num_claims += 1
        reply = await calls.run(self.shards.shard_of(self.prefix).redis, call)
        attempt = Attempt(self.prefix, reply.jobs[0])
        self.board.add(attempt)
        return attempt

    def _drop(self, attempts: list[Attempt], why: list[str]) -> None:
        for attempt in attempts:
            self.board.drop(attempt.key)
            why.append(attempt.job.job_id)


@asynccontextmanager
async def keeping(server: Server, namespace: str, num_jobs: int = 1) -> AsyncIterator[Keeping]:
    """A keeper at work, and jobs in line."""
    async with Client(server.url, namespace=namespace) as client:
        for _ in range(num_jobs):
            await client.submit(model="m", prompt="a", allow_unknown_model=True)
    async with Proxy(server.port) as proxy, await Shards.open(proxy.url) as shards:
        redis = shards.shard_of("").redis
        await asyncio.gather(*(redis.execute_command("PING") for _ in range(6)))  # open some connections
        kept = Keeping(proxy, shards, namespace)
        await kept.board_one()
        task = asyncio.create_task(kept.keeper.keep())
        try:
            yield kept
        finally:
            await cancel_all([task])


async def test_a_slow_server_costs_no_lease(server: Server, namespace: str) -> None:
    """Each answer takes longer than the pause between two renewals, and less than half the lease."""
    async with keeping(server, namespace) as kept:
        kept.proxy.delay_s = 0.175 * LEASE_MS / 1000
        await asyncio.sleep(2 * LEASE_MS / 1000)
        assert (kept.lapsed, kept.lost) == ([], [])
        kept.proxy.delay_s = 0.0


async def test_dead_connections_cost_no_lease(server: Server, namespace: str) -> None:
    async with keeping(server, namespace) as kept:
        kept.proxy.half_open()
        await asyncio.sleep(1.5 * LEASE_MS / 1000)
        assert (kept.lapsed, kept.lost) == ([], [])


async def test_only_what_was_not_renewed_lapses(server: Server, namespace: str) -> None:
    """A claim begins a lease of its own, also while renewals fail."""
    async with keeping(server, namespace, num_jobs=2) as kept:
        (old,) = kept.board
        redis = kept.shards.shard_of(kept.prefix).redis
        kept.proxy.is_refusing = True
        await asyncio.sleep(0.8 * LEASE_MS / 1000)
        assert not kept.lapsed
        kept.proxy.is_refusing = False
        new = await kept.board_one()
        await redis.connection_pool.disconnect()
        kept.proxy.is_refusing = True
        old.leased_at -= LEASE_MS / 1000
        await asyncio.sleep(0.5 * LEASE_MS / 1000)
        assert kept.lapsed == [old.job.job_id]
        assert new in list(kept.board)
        await asyncio.sleep(LEASE_MS / 1000)
        assert kept.lapsed == [old.job.job_id, new.job.job_id]
        kept.proxy.is_refusing = False
