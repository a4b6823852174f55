"""Whether a worker on this host is alive, for container health checks: `python -m chairlift_worker.health`.

Alive means: its heartbeat in Redis has not run out. Reads CHAIRLIFT_REDIS_URL and CHAIRLIFT_NAMESPACE
(or the configuration file), as the worker does; loads no torch.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys

from msgspec import Struct

from chairlift_client.client import Client
from chairlift_client.errors import ChairliftError
from chairlift_client.keys import DEFAULT_NAMESPACE
from chairlift_client.settings import find_file, load_settings

PATIENCE_S = 3.0


class HealthSettings(Struct, frozen=True, kw_only=True):
    """Where the worker's heartbeat lies."""

    redis_url: str = "redis://localhost:6379"
    namespace: str = DEFAULT_NAMESPACE


async def live_workers(settings: HealthSettings, host: str) -> list[str]:
    """The ids of the workers with a live heartbeat from `host`."""
    async with Client(settings.redis_url, namespace=settings.namespace, retry_s=PATIENCE_S) as client:
        return [worker.worker_id for worker in await client.workers() if worker.fields.get("host") == host]


def main() -> int:
    """0 with a live worker, 1 without."""
    host = socket.gethostname()
    try:
        path = find_file(None, os.environ)
        settings = load_settings(HealthSettings, {}, os.environ, path, shared=True)
        workers = asyncio.run(live_workers(settings, host))
    except ChairliftError as error:
        print(error)
        return 1
    print("\n".join(workers) or f"no live worker on {host}")
    return 0 if workers else 1


if __name__ == "__main__":
    sys.exit(main())
