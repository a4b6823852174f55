"""Connections to Redis: which node serves a key, and a client for it. One node, or a Redis Cluster.

redis-py's own cluster client is left aside: all keys of a partition share a slot, so that choosing the
node is all there is to do, and pipelines and pub/sub stay those of a plain client.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, Self, TypeVar

from redis.asyncio import BlockingConnectionPool, Redis
from redis.crc import key_slot
from redis.exceptions import RedisError, ResponseError

from chairlift_client import calls
from chairlift_client.address import CONNECT_TIMEOUT_S, Address, Target, parse_target
from chairlift_client.calls import Call
from chairlift_client.errors import ServerUnavailable, ServerUnsupported
from chairlift_client.pubsub import CLOSED, ShardChannel
from chairlift_client.retry import call_with_retry, is_elsewhere, moved_to

log = logging.getLogger(__name__)
T = TypeVar("T")

RETRY_S = 20.0
MAX_CONNECTIONS = 32
NUM_SLOTS = 16384

MIN_REDIS = (7, 0)
MIN_VALKEY = (8, 0)


class ServerInfo(NamedTuple):
    """What a node says of itself. `version` is that of `kind` ("redis" or "valkey")."""

    kind: str
    version: str
    is_cluster: bool


class Shard:
    """One primary: `redis` for commands (bytes in, bytes out), `live` for sharded pub/sub."""

    def __init__(self, target: Target, address: Address, max_connections: int) -> None:
        self.address = address
        self._pool = BlockingConnectionPool(
            max_connections=max_connections,
            connection_class=target.connection_class,
            **target.connection_arguments(address),
        )
        self.redis: Redis = Redis.from_pool(self._pool)
        self.live = ShardChannel(lambda: target.new_connection(address), server=str(address))

    async def info(self) -> ServerInfo:
        """Asks the node; ServerUnsupported where it is too old to answer."""
        try:
            reply = await self.redis.execute_command("HELLO")
        except ResponseError as error:
            raise ServerUnsupported(f"{self.address} is no Redis >= 7.0 or Valkey >= 8: {error}") from error
        fields = dict(zip(map(_text, reply[::2]), reply[1::2], strict=True))
        return ServerInfo(
            _text(fields["server"]), _text(fields["version"]), _text(fields["mode"]) == "cluster"
        )

    async def drop_idle(self) -> None:
        """Closes connections that nobody uses: after a failover they may lead to a former primary."""
        await self._pool.disconnect(inuse_connections=False)

    async def aclose(self) -> None:
        """Closes all connections."""
        await self.live.aclose()
        await self.redis.aclose()


class Shards:
    """All primaries behind one URL. `async with await Shards.open(url) as shards: ...`"""

    def __init__(self, target: Target, *, retry_s: float, max_connections: int) -> None:
        """Use `Shards.open`."""
        self.retry_s = retry_s
        self._target = target
        self._max_connections = max_connections
        self._by_address: dict[Address, Shard] = {}
        self._by_slot: list[Shard | None] = []  # empty: not a cluster, the first shard has every key
        self._refreshing = asyncio.Lock()
        self._generation = 0
        self._closed = False

    @classmethod
    async def open(
        cls, url: str, *, retry_s: float = RETRY_S, max_connections: int = MAX_CONNECTIONS
    ) -> Shards:
        """Connects to `redis://`, `rediss://`, `unix://` or `redis+cluster://host,host`; checks the server.

        A server in cluster mode is used as a cluster under every scheme. `retry_s` bounds how long any call
        is repeated while the server cannot be reached; `max_connections` is per node.
        Raises ConfigError, ServerUnavailable, ServerUnsupported.
        """
        shards = cls(parse_target(url), retry_s=retry_s, max_connections=max_connections)
        try:
            await shards._look()
        except BaseException:
            await shards.aclose()
            raise
        return shards

    @property
    def all(self) -> Sequence[Shard]:
        """Every primary."""
        return tuple(self._by_address.values())

    def shard_of(self, key: str) -> Shard:
        """The primary that serves a key, or all keys that begin with a partition's prefix."""
        if self._closed:
            raise RuntimeError(CLOSED)
        if not self._by_slot:
            return next(iter(self._by_address.values()))
        slot = key_slot(key.encode())
        shard = self._by_slot[slot]
        if shard is None:
            raise ServerUnavailable(f"slot {slot} of the cluster is served by no node")
        return shard

    async def call(self, key: str, operation: Callable[[Shard], Awaitable[T]]) -> T:
        """Runs `operation` on the primary of `key`, and again while the trouble passes (see retry.py).

        The operation must be one that may run twice. Raises ServerUnavailable after `retry_s`.
        """
        shard = self.shard_of(key)

        async def once() -> T:
            nonlocal shard
            shard = self.shard_of(key)
            return await operation(shard)

        async def look_again(error: RedisError) -> None:
            log.info("%s: %s: %s", shard.address, type(error).__name__, error)
            if self._by_slot:
                await self.refresh(_named_by(error, shard.address))
            elif is_elsewhere(error):
                await shard.drop_idle()

        server = str(shard.address)
        return await call_with_retry(once, server=server, retry_s=self.retry_s, on_error=look_again)

    async def run(self, call: Call[T]) -> T:
        """Runs one operation of the protocol where its partition lives."""
        return await self.call(call.prefix, lambda shard: calls.run(shard.redis, call))

    async def refresh(self, ask_first: Address | None = None) -> None:
        """Reads the cluster's slot map again from any node that answers; nothing to do without a cluster.

        The node that a MOVED answer named knows best: the others may learn of it only seconds later.
        """
        generation = self._generation
        async with self._refreshing:
            if self._by_slot and generation == self._generation:  # nobody did it while this call waited
                await self._read_slots(ask_first)

    async def aclose(self) -> None:
        """Closes all connections; using them afterwards is a RuntimeError."""
        self._closed = True
        for shard in self.all:
            await shard.aclose()
        self._by_address.clear()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _look(self) -> None:
        seeds = [self._shard_at(address) for address in self._target.seeds]
        info = await self._first_info(seeds)
        if info.is_cluster:
            await self._read_slots()
        elif self._target.wants_cluster:
            raise ServerUnsupported(f"{seeds[0].address} is not in cluster mode; use redis://")
        for shard in self.all:
            await self._check(shard)

    async def _first_info(self, seeds: list[Shard]) -> ServerInfo:
        """Asks the seeds in turn until one answers."""
        turns = 0

        async def ask_next() -> ServerInfo:
            nonlocal turns
            turns += 1
            return await seeds[(turns - 1) % len(seeds)].info()

        names = ", ".join(str(shard.address) for shard in seeds)
        return await call_with_retry(ask_next, server=names, retry_s=self.retry_s)

    async def _check(self, shard: Shard) -> None:
        info = await call_with_retry(shard.info, server=str(shard.address), retry_s=self.retry_s)
        _check_version(str(shard.address), info.kind, info.version)

    def _shard_at(self, address: Address) -> Shard:
        shard = self._by_address.get(address)
        if shard is None:
            shard = self._by_address[address] = Shard(self._target, address, self._max_connections)
        return shard

    async def _read_slots(self, ask_first: Address | None = None) -> None:
        ranges = await self._ask_for_slots(ask_first)
        by_slot: list[Shard | None] = [None] * NUM_SLOTS
        for first, last, address in ranges:
            by_slot[first : last + 1] = [self._shard_at(address)] * (last + 1 - first)
        self._by_slot = by_slot
        self._generation += 1
        await self._close_all_but({address for _, _, address in ranges})

    async def _ask_for_slots(self, ask_first: Address | None) -> list[tuple[int, int, Address]]:
        """From the first node that answers: known ones, then those of the URL."""
        first = [] if ask_first is None else [ask_first]
        known = list(dict.fromkeys((*first, *self._by_address, *self._target.seeds)))
        last_error: Exception | None = None
        for address in known:
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    reply = await self._shard_at(address).redis.execute_command("CLUSTER", "SLOTS")
                return [_slot_range(entry, address) for entry in reply]
            except (RedisError, TimeoutError) as error:
                last_error = error
        names = ", ".join(map(str, known))
        raise ServerUnavailable(f"no node of the cluster answers ({names}): {last_error}") from last_error

    async def _close_all_but(self, serving: set[Address]) -> None:
        for address in set(self._by_address) - serving:
            await self._by_address.pop(address).aclose()


def _slot_range(entry: list[Any], asked: Address) -> tuple[int, int, Address]:
    """First and last slot, and the primary: the asked one where it does not know its own name."""
    host = _text(entry[2][0] or b"")
    return (
        int(entry[0]),
        int(entry[1]),
        Address(host if host not in ("", "?") else asked.host, int(entry[2][1])),
    )


def _named_by(error: RedisError, asked: Address) -> Address | None:
    named = moved_to(error)
    return None if named is None else Address(named[0] or asked.host, named[1])


def _check_version(address: str, kind: str, version: str) -> None:
    least = MIN_VALKEY if kind == "valkey" else MIN_REDIS
    if tuple(int(part) for part in version.split(".")[:2]) < least:
        raise ServerUnsupported(f"{address} is {kind} {version}; Redis >= 7.0 or Valkey >= 8.0 is needed")


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
