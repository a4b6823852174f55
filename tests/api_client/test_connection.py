"""Opening servers of every kind, choosing shards, and what happens when nobody answers."""

from __future__ import annotations

import pytest
from redis.exceptions import MovedError, RedisError, ResponseError

from chairlift_client.address import parse_target, redact
from chairlift_client.connection import Shards, _check_version
from chairlift_client.errors import ConfigError, ServerUnavailable, ServerUnsupported
from chairlift_client.retry import Backoff, moved_to
from chairlift_client.subscription import Subscription
from servers import ClusterServers, Flavour, Server, free_port


async def test_one_node_serves_every_key(redis_url: str, namespace: str) -> None:
    async with await Shards.open(redis_url) as shards:
        key = f"cl:{namespace}:x"
        await shards.call(key, lambda shard: shard.redis.set(key, b"1", px=60_000))
        assert await shards.call(key, lambda shard: shard.redis.get(key)) == b"1"
        assert len(shards.all) == 1


async def test_unix_socket(server: Server) -> None:
    async with await Shards.open(server.unix_url) as shards:
        assert await shards.all[0].redis.ping()
        with await shards.all[0].live.subscribe("cl:{x}:ch:unix") as subscription:
            await shards.all[0].redis.execute_command("SPUBLISH", "cl:{x}:ch:unix", b"hello")
            assert await subscription.get(5) == b"hello"


async def test_password_works_and_a_wrong_one_is_refused_at_once_and_never_shown(flavour: Flavour) -> None:
    with Server(flavour, password="right-secret") as server:
        async with await Shards.open(server.url) as shards:
            assert await shards.all[0].redis.ping()
        wrong = server.url.replace("right-secret", "wrong-secret")
        with pytest.raises(ServerUnavailable, match="refuses this user or password") as caught:
            await Shards.open(wrong, retry_s=60)
        assert "secret" not in str(caught.value)


async def test_nobody_answers() -> None:
    port = free_port()
    with pytest.raises(ServerUnavailable, match=f"127.0.0.1:{port} did not answer within 0.3 s") as caught:
        await Shards.open(f"redis://user:hidden@127.0.0.1:{port}", retry_s=0.3)
    assert "hidden" not in str(caught.value)


async def test_calls_outlive_a_restart(flavour: Flavour) -> None:
    with Server(flavour, appendonly=True) as server:
        async with await Shards.open(server.url) as shards:
            await shards.call("k", lambda shard: shard.redis.set("k", b"kept"))
            server.restart()
            assert await shards.call("k", lambda shard: shard.redis.get("k")) == b"kept"


@pytest.mark.parametrize(
    ("kind", "version"), [("redis", "6.2.14"), ("valkey", "7.2.8"), ("redis", "5.0"), ("valkey", "0.0.0")]
)
def test_old_servers_are_refused_with_their_version(kind: str, version: str) -> None:
    with pytest.raises(ServerUnsupported, match=f"{kind} {version}"):
        _check_version("host:1", kind, version)


@pytest.mark.parametrize(
    ("kind", "version"), [("redis", "7.0.0"), ("redis", "8.4.0"), ("valkey", "8.0.1"), ("valkey", "9.1.2")]
)
def test_new_servers_are_accepted(kind: str, version: str) -> None:
    _check_version("host:1", kind, version)


@pytest.mark.parametrize(
    "url",
    [
        "http://:secret@host",
        "redis://:secret@host:port",
        "redis://:secret@host/0?no_such_option=1",
        "redis://:secret@host?socket_timeout=soon",
        "unix://",
        "",
        "host:6379",
    ],
)
def test_unusable_urls_are_refused_without_the_password(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_target(url)
    assert "secret" not in str(caught.value)


def test_urls_are_understood() -> None:
    target = parse_target("rediss+cluster://u:p%40ss@a:1,b,[::1]:3/?socket_timeout=7")
    assert [tuple(seed) for seed in target.seeds] == [("a", 1), ("b", 6379), ("::1", 3)]
    assert target.wants_cluster
    assert target.connection_class.__name__ == "SSLConnection"
    assert target.arguments["password"] == "p@ss"
    assert target.arguments["socket_timeout"] == 7
    assert parse_target("redis://").seeds == (("localhost", 6379),)
    assert redact("redis://u:p@h:1/0?password=p") == "redis://h:1/0"


def test_what_the_code_relies_on_cannot_be_changed_by_the_url() -> None:
    arguments = parse_target("redis://h?decode_responses=yes&protocol=3").arguments
    assert arguments["decode_responses"] is False
    assert arguments["protocol"] == 2


@pytest.mark.parametrize(
    ("error", "place"),
    [
        (ResponseError("MOVED 3999 10.0.0.1:6381"), ("10.0.0.1", 6381)),
        (MovedError("3999 10.0.0.1:6381"), ("10.0.0.1", 6381)),
        (MovedError("3999 ::1:6381"), ("::1", 6381)),
        (ResponseError("MOVED 3999 :6381"), ("", 6381)),
        (ResponseError("CLUSTERDOWN Hash slot not served"), None),
        (ResponseError("ERR 3999 10.0.0.1:6381"), None),
    ],
)
def test_where_a_slot_has_moved(error: RedisError, place: tuple[str, int] | None) -> None:
    assert moved_to(error) == place


def test_backoff_grows_to_its_limit_and_starts_again() -> None:
    backoff = Backoff(first_s=0.1, last_s=0.4)
    pauses = [backoff.next_s() for _ in range(5)]
    assert 0.05 <= pauses[0] <= 0.1
    assert all(0.2 <= pause <= 0.4 for pause in pauses[2:])
    backoff.reset()
    assert backoff.next_s() <= 0.1


async def test_every_prefix_reaches_its_node(cluster: ClusterServers, namespace: str) -> None:
    async with await Shards.open(cluster.url) as shards:
        prefixes = [f"cl:{{{namespace}/m/{partition}}}" for partition in range(24)]
        for prefix in prefixes:
            shard = shards.shard_of(prefix)
            assert shard is shards.shard_of(f"{prefix}:job:x")
            await shard.redis.set(f"{prefix}:x", prefix, px=60_000)
            with await shard.live.subscribe(f"{prefix}:ch:x") as subscription:
                await shard.redis.execute_command("SPUBLISH", f"{prefix}:ch:x", b"hi")
                assert await subscription.get(5) == b"hi"
        assert len({shards.shard_of(prefix) for prefix in prefixes}) == 3


async def test_a_cluster_is_recognised_under_every_scheme(cluster: ClusterServers) -> None:
    async with await Shards.open(cluster.servers[1].url) as shards:
        assert len(shards.all) == 3


async def test_a_moved_slot_is_followed(cluster: ClusterServers, namespace: str) -> None:
    async with await Shards.open(cluster.url) as shards:
        await _a_moved_slot_is_followed(cluster, shards, f"cl:{{{namespace}/m/0}}")


async def _a_moved_slot_is_followed(cluster: ClusterServers, shards: Shards, prefix: str) -> None:
    source = next(i for i, s in enumerate(cluster.servers) if s.port == shards.shard_of(prefix).address.port)
    target = (source + 1) % 3
    before = shards.shard_of(prefix)
    subscription = await before.live.subscribe(f"{prefix}:ch:x")
    slot = int(await before.redis.execute_command("CLUSTER", "KEYSLOT", prefix))
    cluster.move_slot(slot, source, target)

    await shards.call(prefix, lambda shard: shard.redis.set(f"{prefix}:y", b"there"))
    assert shards.shard_of(prefix).address.port == cluster.servers[target].port
    with pytest.raises(RedisError, match=r"\d+ 127.0.0.1"):
        await _read_for_ever(subscription)
    after = await shards.call(prefix, lambda shard: shard.live.subscribe(f"{prefix}:ch:x"))
    await shards.call(
        prefix, lambda shard: shard.redis.execute_command("SPUBLISH", f"{prefix}:ch:x", b"again")
    )
    assert await after.get(5) == b"again"
    after.close()


async def _read_for_ever(subscription: Subscription) -> None:
    while True:
        await subscription.get(5)


async def test_a_single_server_is_no_cluster(redis_url: str) -> None:
    with pytest.raises(ServerUnsupported, match="not in cluster mode"):
        await Shards.open(redis_url.replace("redis://", "redis+cluster://"))
