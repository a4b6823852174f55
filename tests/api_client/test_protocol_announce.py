"""How workers make themselves and their model known."""

from __future__ import annotations

from typing import Any

from chairlift_client import keys
from chairlift_client.operations import find
from chairlift_client.protocol import ModelInfo, decode_model
from chairlift_client.worker_operations import Announcement, announce, depart, open_partition
from protocol_driver import Driver, job_number

TTL_MS = 30_000


def beat(driver: Driver, worker: str, **options: Any) -> Announcement:
    chosen: dict[str, Any] = {
        "ttl_ms": TTL_MS, "model": "m", "fingerprint": "f1", "partitions": 1, "context_tokens": 2048,
        "pool_tokens": 4096, "heartbeat": {"pid": 1, "state": "ready"},
    }  # fmt: skip
    return driver.run(announce(driver.shared, worker, **(chosen | options)))


def info(driver: Driver, model: str = "m") -> ModelInfo:
    return decode_model(driver.redis.hget(f"{driver.shared}:models", model))


def age_beat(driver: Driver, worker: str) -> None:
    """The worker's last beat counts no longer."""
    driver.redis.zadd(f"{driver.shared}:workers", {worker: driver.now_ms() - 1}, xx=True)
    driver.redis.delete(f"{driver.shared}:worker:{worker}")


def test_what_is_announced_is_what_clients_read(driver: Driver) -> None:
    assert beat(driver, "w1", partitions=3) == (None, 3)
    assert info(driver) == ModelInfo(
        fingerprint="f1", partitions=3, previous_partitions=0, context_tokens=2048, pool_tokens=4096
    )
    fields = driver.redis.hgetall(f"{driver.shared}:worker:w1")
    assert fields == {b"model": b"m", b"fingerprint": b"f1", b"pid": b"1", b"state": b"ready"}


def test_a_beat_may_be_sent_twice(driver: Driver) -> None:
    assert beat(driver, "w1", partitions=3) == beat(driver, "w1", partitions=3) == (None, 3)
    assert info(driver).previous_partitions == 0


def test_another_fingerprint_is_refused_while_one_is_alive(driver: Driver) -> None:
    beat(driver, "w1")
    assert beat(driver, "w2", fingerprint="f2") == ("f1", 0)
    assert info(driver).fingerprint == "f1"
    assert driver.redis.exists(f"{driver.shared}:worker:w2") == 0
    assert beat(driver, "w3") == (None, 1)
    assert beat(driver, "w4", model="other", fingerprint="f2") == (None, 1)


def test_another_fingerprint_may_come_after_the_last_has_gone(driver: Driver) -> None:
    beat(driver, "w1")
    beat(driver, "w2")
    age_beat(driver, "w1")
    assert beat(driver, "w3", fingerprint="f2") == ("f1", 0)
    assert driver.run(depart(driver.shared, "w2")) == 1
    assert driver.run(depart(driver.shared, "w2")) == 0
    assert beat(driver, "w3", fingerprint="f2") == (None, 1)
    assert info(driver).fingerprint == "f2"


def test_partitions_only_grow_and_the_number_before_is_kept(driver: Driver) -> None:
    assert beat(driver, "w1", partitions=2) == (None, 2)
    assert beat(driver, "w2", partitions=4) == (None, 4)
    assert beat(driver, "w1", partitions=2) == (None, 4), "who came with fewer hears of the growth"
    assert (info(driver).partitions, info(driver).previous_partitions) == (4, 2)
    assert beat(driver, "w3", partitions=1) == (None, 4)
    assert (info(driver).partitions, info(driver).previous_partitions) == (4, 2)


def test_a_beat_without_fields(driver: Driver) -> None:
    assert beat(driver, "w1", heartbeat={}) == (None, 1)


def test_every_key_ends_and_a_dead_worker_leaves_nothing(driver: Driver) -> None:
    beat(driver, "w1")
    driver.run(
        open_partition(
            driver.prefix, context_tokens=1, pool_tokens=1, max_waiting=1, max_bytes=1, max_tenant_jobs=1
        )
    )
    assert driver.without_expiry() == []
    assert 0 < driver.redis.pttl(f"{driver.shared}:worker:w1") <= TTL_MS
    for name in ("models", "workers"):
        assert driver.redis.pttl(f"{driver.shared}:{name}") > 0
    driver.redis.zadd(f"{driver.shared}:workers", {"w1": driver.now_ms() - 2 * 86_400_000})
    beat(driver, "w2")
    assert driver.redis.zrange(f"{driver.shared}:workers", 0, -1) == [b"w2"]


def test_an_idempotency_key_is_found_under_the_partitions_of_before(driver: Driver) -> None:
    """What clients do after a growth: the key's partition among 2, then among 1."""

    first = keys.draw_job_id("m", 1, tenant="t", idempotency_key="k")
    assert first.partition == 0
    driver.submit(job_number(1), idempotency="k", body_hash="h")
    found = driver.run(find(driver.prefix, "k", "h"))
    assert found is not None
    assert found.job_id == job_number(1)


def test_every_worker_may_open_a_partition_again(driver: Driver) -> None:
    for limit in (5, 7):
        call = open_partition(
            driver.prefix, context_tokens=0, pool_tokens=0, max_waiting=limit, max_bytes=0, max_tenant_jobs=0
        )
        assert driver.run(call) == "ok"
    assert driver.redis.hget(f"{driver.prefix}:limits", "waiting") == b"7"
    assert driver.redis.pttl(f"{driver.prefix}:limits") > 6 * 86_400_000
