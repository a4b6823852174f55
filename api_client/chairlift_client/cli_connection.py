"""What every command has in common: where the queues are, and a client that is connected to them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import typer
from msgspec import Struct

from chairlift_client import keys
from chairlift_client.client import Client
from chairlift_client.settings import find_file, load_settings

RETRY_S = 5.0
"""A person waits for the answer: sooner than the client of a service would give up."""


class ConnectionSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the queues are."""

    redis_url: str = "redis://localhost:6379"
    namespace: str = keys.DEFAULT_NAMESPACE


RedisUrl = Annotated[
    str | None,
    typer.Option(
        help="redis://, rediss://, unix://, redis+cluster:// or redis+sentinel://.  "
        "[default: redis://localhost:6379]"
    ),
]
Namespace = Annotated[str | None, typer.Option(help="Which installation on that server.  [default: default]")]
Config = Annotated[str | None, typer.Option(help="A TOML file.  [default: chairlift.toml if it is there]")]
Json = Annotated[bool, typer.Option("--json", help="JSON, one object a line.")]


def run_connected(
    act: Callable[[Client], Awaitable[Any]], redis_url: str | None, namespace: str | None, config: str | None
) -> None:
    """Runs a command's work with a client, connected as flags, environment and file say."""
    flags = {"redis_url": redis_url, "namespace": namespace}
    path = find_file(config, os.environ)
    settings = load_settings(ConnectionSettings, flags, os.environ, path, section="client", shared=True)
    asyncio.run(_connected(act, settings))


async def _connected(act: Callable[[Client], Awaitable[Any]], settings: ConnectionSettings) -> None:
    async with Client(settings.redis_url, namespace=settings.namespace, retry_s=RETRY_S) as client:
        await act(client)
