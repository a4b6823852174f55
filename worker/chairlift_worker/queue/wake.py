"""Waiting for work without asking: a plain blocking XREAD on the wake streams of one shard."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from redis.asyncio import Redis
from redis.exceptions import RedisError

from chairlift_client import keys
from chairlift_client.connection import Shards
from chairlift_client.errors import ServerUnavailable
from chairlift_client.retry import Backoff

log = logging.getLogger(__name__)

BLOCK_MS = 5000
"""At most; and half of the sockets' timeout, so that waiting is never mistaken for a dead connection."""


async def listen(shards: Shards, last_seen: dict[str, str], on_wake: Callable[[], None]) -> None:
    """Call `on_wake` whenever something was put in line; `last_seen` is where each prefix' stream stood.

    Ids are explicit, never `$`: what comes between two reads is seen by the second.
    """
    cursors = {keys.wake(prefix): entry for prefix, entry in last_seen.items()}
    any_key = next(iter(cursors))
    backoff = Backoff()
    while True:
        try:
            redis = shards.shard_of(any_key).redis
            reply = await redis.execute_command(
                "XREAD", "BLOCK", _block_ms(redis), "STREAMS", *cursors, *cursors.values()
            )
        except (RedisError, ServerUnavailable) as error:
            log.debug("wake: %s: %s", type(error).__name__, error)
            await asyncio.sleep(backoff.next_s())
            on_wake()
            continue
        backoff.reset()
        if reply:
            for name, entries in _streams(reply):
                cursors[name] = entries
            on_wake()


def _block_ms(redis: Redis) -> int:
    timeout_s = redis.connection_pool.connection_kwargs.get("socket_timeout")
    return BLOCK_MS if not timeout_s else max(1, min(BLOCK_MS, round(timeout_s * 500)))


def _streams(reply: object) -> list[tuple[str, str]]:
    """(stream, last entry id) of an XREAD reply, which redis-py gives as pairs or as a dict."""
    pairs = reply.items() if isinstance(reply, dict) else reply
    found: list[tuple[str, str]] = []
    for name, entries in pairs:  # type: ignore[attr-defined]
        rows = entries[0] if entries and isinstance(entries[0], list) else entries
        found.append((name.decode(), rows[-1][0].decode()))
    return found
