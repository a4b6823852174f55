"""Repeating a call to Redis while the trouble is of the kind that passes.

Every operation of Chairlift may be sent twice, so a call whose answer was lost is simply sent again.
"""

from __future__ import annotations

import asyncio
import random
import ssl
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import TypeVar

from redis.exceptions import (
    AskError,
    AuthenticationError,
    AuthorizationError,
    ClusterDownError,
    ConnectionError,
    MasterDownError,
    MovedError,
    NoPermissionError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TimeoutError,
    TryAgainError,
)

from chairlift_client.errors import ServerUnavailable, ServerUnsupported

T = TypeVar("T")

_REFUSED = (AuthenticationError, AuthorizationError)
_LOST = (ConnectionError, TimeoutError)
_ELSEWHERE = (MovedError, AskError, ClusterDownError, MasterDownError, TryAgainError, ReadOnlyError)
# redis-py before 6 leaves these as plain ResponseErrors outside of its own cluster client.
_ELSEWHERE_WORDS = ("MOVED", "ASK", "CLUSTERDOWN", "MASTERDOWN", "TRYAGAIN", "READONLY")
_LATER_WORDS = ("MISCONF", "BUSY")  # the server cannot write to its disk, or runs a long script


class Backoff:
    """Growing pauses with jitter, so that many clients do not come back in step."""

    def __init__(self, first_s: float = 0.02, last_s: float = 2.0) -> None:
        self._first_s = first_s
        self._last_s = last_s
        self._ceiling_s = first_s

    def next_s(self) -> float:
        """The next pause, between half of the current ceiling and all of it."""
        ceiling_s = self._ceiling_s
        self._ceiling_s = min(ceiling_s * 2, self._last_s)
        return ceiling_s * random.uniform(0.5, 1.0)

    def reset(self) -> None:
        """After a success: the next pause is short again."""
        self._ceiling_s = self._first_s


def is_elsewhere(error: RedisError) -> bool:
    """The key is served by another node now, or this node is no primary any more."""
    if isinstance(error, _ELSEWHERE):
        return True
    return isinstance(error, ResponseError) and str(error).split(" ", 1)[0] in _ELSEWHERE_WORDS


def moved_to(error: RedisError) -> tuple[str, int] | None:
    """Host and port that a MOVED answer names; the host is "" where it is that of the node that answered."""
    words = str(error).removeprefix("MOVED ").split()
    if not is_elsewhere(error) or len(words) != 2 or not words[0].isdigit():
        return None
    host, _, port = words[1].rpartition(":")
    return (host, int(port)) if port.isdigit() else None


def passes(error: RedisError) -> bool:
    """Whether the same call may succeed a little later."""
    if isinstance(error, _REFUSED) or _is_untrusted(error):
        return False
    return isinstance(error, _LOST) or is_elsewhere(error) or str(error).split(" ", 1)[0] in _LATER_WORDS


async def call_with_retry(
    operation: Callable[[], Awaitable[T]],
    *,
    server: str,
    retry_s: float,
    on_error: Callable[[RedisError], Awaitable[None]] | None = None,
) -> T:
    """What `operation` returns, repeated with backoff while its errors are of the passing kind.

    `server` names the server in messages and must hold no secret. `on_error` runs before each repeat.
    Raises ServerUnavailable when no call succeeded within `retry_s` seconds, or the credentials are refused,
    and ServerUnsupported where the server does not permit the command.
    """
    deadline = monotonic() + retry_s
    backoff = Backoff()
    while True:
        try:
            return await operation()
        except RedisError as error:
            if isinstance(error, _REFUSED):
                raise ServerUnavailable(f"{server} refuses this user or password: {error}") from error
            if isinstance(error, NoPermissionError):
                raise ServerUnsupported(f"{server} does not permit this user: {error}") from error
            if _is_untrusted(error):
                raise ServerUnavailable(
                    f"{server} shows a certificate that is not trusted: {error}"
                ) from error
            if not passes(error):
                raise
            pause_s = backoff.next_s()
            if monotonic() + pause_s >= deadline:
                raise ServerUnavailable(f"{server} did not answer within {retry_s:g} s: {error}") from error
            if on_error is not None:
                await on_error(error)
        await asyncio.sleep(pause_s)


def _is_untrusted(error: RedisError) -> bool:
    """The server's certificate was refused: asking again cannot help."""
    causes = (error.__cause__, error.__context__)
    return any(isinstance(cause, ssl.SSLCertVerificationError) for cause in causes)
