"""Sharded pub/sub over one connection: confirmed, without silent holes, and noticed when it dies."""

from __future__ import annotations

import asyncio
import random

import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError

from chairlift_client.address import parse_target
from chairlift_client.connection import Shards
from chairlift_client.errors import ServerUnavailable
from chairlift_client.pubsub import ShardChannel
from chairlift_client.subscription import Subscription
from servers import Flavour, Server, until


def live_channel(url: str, *, ping_s: float = 5.0, buffer_messages: int = 512) -> ShardChannel:
    target = parse_target(url)
    return ShardChannel(
        lambda: target.new_connection(target.seeds[0]),
        server="test",
        ping_s=ping_s,
        buffer_messages=buffer_messages,
    )


async def publish(redis: Redis, channel: str, message: bytes) -> int:
    return int(await redis.execute_command("SPUBLISH", channel, message))


async def kill_live_connections(redis: Redis) -> int:
    """Ends the pub/sub connections of this test, and of no other."""
    killed = 0
    for client in await redis.client_list():
        if client["name"] == "chairlift-live":
            killed += int(await redis.execute_command("CLIENT", "KILL", "ID", client["id"]))
    return killed


async def read_until(subscription: Subscription, last: bytes) -> list[bytes | None]:
    got: list[bytes | None] = []
    while not got or got[-1] != last:
        got.append(await subscription.get(10))
    return got


async def test_messages_arrive_in_order_once_confirmed(redis_url: str, namespace: str) -> None:
    async with await Shards.open(redis_url) as shards:
        shard = shards.all[0]
        with await shard.live.subscribe(namespace) as subscription:
            for number in range(100):
                assert await publish(shard.redis, namespace, b"%d" % number) == 1
            assert [await subscription.get(5) for _ in range(100)] == [b"%d" % n for n in range(100)]
            assert await subscription.get(0.01) is None


async def test_many_streams_share_one_connection(redis_url: str, namespace: str) -> None:
    async with await Shards.open(redis_url) as shards:
        live, redis = shards.all[0].live, shards.all[0].redis
        names = [f"{namespace}-{index}" for index in range(200)]
        subscriptions = await asyncio.gather(*(live.subscribe(name) for name in names))
        twin = await live.subscribe(names[0])
        clients = [client for client in await redis.client_list() if client["name"] == "chairlift-live"]
        assert len(clients) == 1
        for name in names:
            await publish(redis, name, name.encode())
        assert [await s.get(5) for s in subscriptions] == [name.encode() for name in names]
        assert await twin.get(5) == names[0].encode()
        for subscription in subscriptions:
            subscription.close()
        await publish(redis, names[0], b"twin still listens")
        assert await twin.get(5) == b"twin still listens"
        twin.close()


async def test_the_last_reader_unsubscribes(redis_url: str, namespace: str) -> None:
    async with await Shards.open(redis_url) as shards:
        shard = shards.all[0]
        first = await shard.live.subscribe(namespace)
        first.close()
        first.close()
        # The confirmation of a later command shows that the earlier one was carried out.
        with await shard.live.subscribe(f"{namespace}-other"):
            assert await publish(shard.redis, namespace, b"") == 0


async def test_leaving_and_coming_back_in_any_order_never_loses_the_channel(
    redis_url: str, namespace: str
) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    async with await Shards.open(redis_url) as shards:
        shard = shards.all[0]
        for turn in range(150):
            hurried = asyncio.create_task(shard.live.subscribe(namespace))
            for _ in range(rng.randrange(4)):
                await asyncio.sleep(0)
            hurried.cancel()
            with await shard.live.subscribe(namespace) as subscription:
                assert await publish(shard.redis, namespace, b"%d" % turn) == 1
                assert await subscription.get(5) == b"%d" % turn
            for result in await asyncio.gather(hurried, return_exceptions=True):
                if isinstance(result, Subscription):
                    result.close()


async def test_a_cancelled_reader_does_not_hurt_the_others(redis_url: str, namespace: str) -> None:
    async with await Shards.open(redis_url) as shards:
        shard = shards.all[0]
        with await shard.live.subscribe(namespace) as kept:
            waiting = asyncio.create_task(kept.get(60))
            others = [asyncio.create_task(shard.live.subscribe(f"{namespace}-{n}")) for n in range(50)]
            await asyncio.sleep(0)
            for other in others:
                other.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            await publish(shard.redis, namespace, b"still here")
            assert await waiting == b"still here"
            assert kept.num_reconnects == 0


async def test_overflow_drops_and_says_so(redis_url: str, namespace: str) -> None:
    live = live_channel(redis_url, buffer_messages=10)
    async with await Shards.open(redis_url) as shards:
        redis = shards.all[0].redis
        slow = await live.subscribe(namespace)
        marker = await live.subscribe(f"{namespace}-marker")
        for number in range(25):
            await publish(redis, namespace, b"%d" % number)
        await publish(redis, f"{namespace}-marker", b"now")
        assert await marker.get(5) == b"now"
        assert slow.num_overflows == 2
        assert await read_until(slow, b"24") == [None, b"20", b"21", b"22", b"23", b"24"]
    await live.aclose()


async def test_a_killed_connection_comes_back_and_says_so(flavour: Flavour) -> None:
    with Server(flavour) as server:
        async with await Shards.open(server.url) as shards:
            shard = shards.all[0]
            subscriptions = [await shard.live.subscribe(f"c{n}") for n in range(20)]
            for turn in range(3):
                assert await kill_live_connections(shard.redis) == 1
                for n, subscription in enumerate(subscriptions):
                    assert await subscription.get(10) is None
                    assert subscription.num_reconnects == turn + 1
                    await publish(shard.redis, f"c{n}", b"back")
                    assert await subscription.get(5) == b"back"


async def test_after_a_loss_the_log_comes_before_what_was_buffered(flavour: Flavour) -> None:
    with Server(flavour) as server:
        async with await Shards.open(server.url) as shards:
            shard = shards.all[0]
            subscription = await shard.live.subscribe("c")
            marker = await shard.live.subscribe("marker")
            await publish(shard.redis, "c", b"buffered")
            await publish(shard.redis, "marker", b"x")
            assert await marker.get(5) == b"x"
            assert await kill_live_connections(shard.redis) == 1
            assert await marker.get(10) is None
            await publish(shard.redis, "marker", b"y")
            assert await marker.get(5) == b"y"
            assert await subscription.get(5) is None
            assert await subscription.get(5) == b"buffered"


async def test_a_killed_server_comes_back(flavour: Flavour) -> None:
    with Server(flavour) as server:
        async with await Shards.open(server.url) as shards:
            shard = shards.all[0]
            subscription = await shard.live.subscribe("c")
            server.restart()
            while subscription.num_reconnects == 0:
                assert await subscription.get(10) is None
            await shards.call("c", lambda shard: publish(shard.redis, "c", b"back"))
            assert await read_until(subscription, b"back") in ([b"back"], [None, b"back"])


async def test_a_silent_connection_is_noticed(flavour: Flavour) -> None:
    """The server stands still while its connections stay open, as after a network loss without a word."""
    with Server(flavour) as server:
        live = live_channel(server.url, ping_s=0.2)
        subscription = await live.subscribe("c")
        server.pause()
        await until(lambda: _is_lost(live))
        server.resume()
        while subscription.num_reconnects == 0:
            assert await subscription.get(10) is None
        await live.aclose()


async def _is_lost(live: ShardChannel) -> bool:
    return live.last_error is not None


async def test_an_idle_connection_stays(flavour: Flavour) -> None:
    """Pings are answered both with and without subscriptions."""
    with Server(flavour) as server:
        live = live_channel(server.url, ping_s=0.02)
        async with await Shards.open(server.url) as shards:
            redis = shards.all[0].redis
            subscription = await live.subscribe("c")
            await _some_pings(redis)
            subscription.close()
            await _some_pings(redis)
            with await live.subscribe("c") as subscription:
                await publish(redis, "c", b"x")
                assert await subscription.get(5) == b"x"
        assert live.last_error is None
        await live.aclose()


async def _some_pings(redis: Redis) -> None:
    async def num_pings() -> int:
        stats = await redis.info("commandstats")
        return int(stats.get("cmdstat_ping", {}).get("calls", 0))

    enough = await num_pings() + 5

    async def are_enough() -> bool:
        return await num_pings() >= enough

    await until(are_enough)


async def test_no_confirmation_is_an_error_not_a_wait(flavour: Flavour) -> None:
    with Server(flavour) as server:
        live = live_channel(server.url, ping_s=0.1)
        server.kill()
        with pytest.raises(ServerUnavailable, match="did not confirm a subscription"):
            await live.subscribe("c", timeout_s=0.3)
        await live.aclose()


async def test_refused_subscriptions_raise_and_leave_the_others_alone(flavour: Flavour) -> None:
    with Server(flavour) as server:
        with server.client() as client:
            client.execute_command("ACL", "SETUSER", "default", "resetchannels", "&ok*")
        live = live_channel(server.url)
        kept = await live.subscribe("ok")
        with pytest.raises(RedisError, match="permission"):
            await live.subscribe("no")
        with server.client() as client:
            client.execute_command("SPUBLISH", "ok", b"fine")
        assert await kept.get(5) == b"fine"
        await live.aclose()


async def test_closing_wakes_readers(redis_url: str, namespace: str) -> None:
    shards = await Shards.open(redis_url)
    subscription = await shards.all[0].live.subscribe(namespace)
    reader = asyncio.create_task(subscription.get(60))
    await asyncio.sleep(0)
    await shards.aclose()
    with pytest.raises(RuntimeError, match="client is closed"):
        await reader
    with pytest.raises(RuntimeError, match="client is closed"):
        shards.shard_of("x")
