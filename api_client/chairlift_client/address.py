"""From a URL to the arguments of redis-py connections, with our timeouts."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from redis.asyncio.connection import (
    AbstractConnection,
    Connection,
    UnixDomainSocketConnection,
    parse_url,
)
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from chairlift_client.errors import ConfigError

CONNECT_TIMEOUT_S = 5.0
SOCKET_TIMEOUT_S = 15.0
"""How long one answer may take. A blocking command must block for clearly less."""

_SCHEMES = ("redis", "rediss", "unix", "redis+cluster", "rediss+cluster")
# Seconds idle, seconds between probes, probes: a dead peer is noticed within half a minute.
_KEEPALIVE = (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))


class Address(NamedTuple):
    """Where one node listens; `str` of it is fit for messages. With port 0, `host` is a unix socket."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}" if self.port else self.host


class Target(NamedTuple):
    """What a URL says: the nodes to ask first, and how to connect to any of them."""

    seeds: tuple[Address, ...]
    wants_cluster: bool
    connection_class: type[AbstractConnection]
    arguments: Mapping[str, Any]
    """Everything but the address. Holds the password: never log it."""

    def connection_arguments(self, address: Address) -> dict[str, Any]:
        """Keyword arguments of `connection_class` for one node."""
        if not address.port:
            return {**self.arguments, "path": address.host}
        return {**self.arguments, "host": address.host, "port": address.port}

    def new_connection(self, address: Address) -> AbstractConnection:
        """A connection of its own, not yet connected, whose reads wait for ever: for pub/sub."""
        arguments = self.connection_arguments(address)
        return self.connection_class(**{**arguments, "socket_timeout": None, "client_name": "chairlift-live"})


def parse_target(url: str) -> Target:
    """Understands `redis://`, `rediss://`, `unix://` and, with several hosts, `redis[s]+cluster://`.

    Raises ConfigError; its message never holds the URL's password.
    """
    scheme = url.partition("://")[0]
    if scheme not in _SCHEMES:
        raise ConfigError(f"a Redis URL begins with one of {', '.join(s + '://' for s in _SCHEMES)}")
    try:
        hosts = _hosts(url, scheme)
        arguments = dict(parse_url(_single_url(url, scheme, hosts[0])))
        return _target(scheme, hosts, arguments)
    except (ValueError, TypeError) as error:
        # `from None`: the traceback of the cause would show the URL.
        raise ConfigError(f"the Redis URL {redact(url)} cannot be used: {type(error).__name__}") from None


def redact(url: str) -> str:
    """The URL without user, password and query, fit for messages."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.partition('?')[0].rpartition('@')[2]}"


def _hosts(url: str, scheme: str) -> list[str]:
    if scheme == "unix":
        return [""]
    hosts = urlsplit(url).netloc.rpartition("@")[2].split(",")
    return hosts if all(hosts) else ["localhost"]


def _single_url(url: str, scheme: str, host: str) -> str:
    """The same URL with one host and a scheme that redis-py knows."""
    if scheme == "unix":
        return url
    parts = urlsplit(url)
    secret, at, _ = parts.netloc.rpartition("@")
    return parts._replace(scheme=scheme.partition("+")[0], netloc=f"{secret}{at}{host}").geturl()


def _target(scheme: str, hosts: list[str], arguments: dict[str, Any]) -> Target:
    connection_class = arguments.pop("connection_class", Connection)
    if scheme == "unix":
        seeds = [Address(arguments.pop("path", ""), 0)]
        if not seeds[0].host:
            raise ValueError("no path")
    else:
        seeds = [_address(host) for host in hosts]
        arguments.pop("host", None)
        arguments.pop("port", None)
    arguments = {**_defaults(connection_class), **arguments, **_fixed()}
    target = Target(tuple(seeds), scheme.endswith("+cluster"), connection_class, arguments)
    target.new_connection(seeds[0])  # an unknown argument in the query shows itself here
    return target


def _address(host: str) -> Address:
    parts = urlsplit(f"//{host}")
    return Address(parts.hostname or "localhost", 6379 if parts.port is None else parts.port)


def _defaults(connection_class: type[AbstractConnection]) -> dict[str, Any]:
    """What the URL's query may change."""
    defaults: dict[str, Any] = {
        "socket_timeout": SOCKET_TIMEOUT_S,
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
    }
    if not issubclass(connection_class, UnixDomainSocketConnection):
        options = {getattr(socket, name): value for name, value in _KEEPALIVE if hasattr(socket, name)}
        defaults |= {"socket_keepalive": True, "socket_keepalive_options": options}
    return defaults


def _fixed() -> dict[str, Any]:
    """What our code relies on, whatever the URL or the version of redis-py says."""
    return {
        "decode_responses": False,
        "protocol": 2,
        "client_name": "chairlift",
        "retry": Retry(NoBackoff(), 0),
    }
