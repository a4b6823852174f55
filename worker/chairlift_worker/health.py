"""Whether a worker on this host is alive, for container health checks: `python -m chairlift_worker.health`.

Alive means: its heartbeat in Redis has not run out. Reads the environment and the configuration file as the
worker does, but sees none of its flags; loads no torch.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys

from chairlift_client.client import Client
from chairlift_client.errors import ChairliftError
from chairlift_client.settings import find_file, load_settings
from chairlift_worker.config import WorkerConfig

PATIENCE_S = 3.0


async def live_workers(config: WorkerConfig, host: str) -> list[str]:
    """The ids of the workers with a live heartbeat from `host`."""
    async with Client(config.redis_url, namespace=config.namespace, retry_s=PATIENCE_S) as client:
        return [worker.worker_id for worker in await client.workers() if worker.fields.get("host") == host]


def main() -> int:
    """0 with a live worker, 1 without."""
    host = socket.gethostname()
    try:
        path = find_file(None, os.environ)
        flags = {"model": "any"}  # which one it serves may stand among the worker's flags alone
        config = load_settings(WorkerConfig, flags, os.environ, path, section="worker")
        workers = asyncio.run(live_workers(config, host))
    except ChairliftError as error:
        print(error)
        return 1
    print("\n".join(workers) or f"no live worker on {host}")
    return 0 if workers else 1


if __name__ == "__main__":
    sys.exit(main())
