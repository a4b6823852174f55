"""Settings of the server that would lose jobs in silence."""

from __future__ import annotations

import logging

from redis.exceptions import ResponseError

from chairlift_client.connection import Shards
from chairlift_client.errors import ServerUnsupported

log = logging.getLogger(__name__)


async def check_server(url: str) -> None:
    """Whether a worker could serve from there; what is wrong is one of our errors."""
    async with await Shards.open(url) as shards:
        await check_policy(shards)


async def check_policy(shards: Shards) -> None:
    """ServerUnsupported where memory pressure would evict keys: every key of ours has an expiry, and any
    of them may be a live job."""
    for shard in shards.all:
        try:
            info = await shard.redis.execute_command("INFO", "memory")
        except ResponseError as error:
            log.warning("%s: maxmemory-policy unknown: %s", shard.address, error)
            continue
        policy = _policy(info)
        if policy not in ("noeviction", ""):
            raise ServerUnsupported(
                f"{shard.address} has maxmemory-policy {policy}, which throws jobs away; set it to noeviction"
            )


def _policy(info: object) -> str:
    """redis-py gives INFO as a dict, or raw on a plain command."""
    if isinstance(info, dict):
        return str(info.get("maxmemory_policy", ""))
    text = info.decode() if isinstance(info, bytes) else str(info)
    return next(
        (
            line.partition(":")[2].strip()
            for line in text.splitlines()
            if line.startswith("maxmemory_policy:")
        ),
        "",
    )
