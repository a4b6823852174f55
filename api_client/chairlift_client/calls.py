"""Calling the Lua functions: run one, or many in one pipeline.

A `Call` is plain data: which function, on which partition, with what arguments, and how to read the
answer. `operations.py` makes them. Every operation may be sent twice, so a caller may repeat any of them
after a lost connection.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from chairlift_client import functions

T = TypeVar("T")

Argument: TypeAlias = str | bytes | int | float


class Call(NamedTuple, Generic[T]):
    """One function call on the partition (or namespace) whose keys begin with `prefix`."""

    name: str
    prefix: str
    arguments: tuple[Argument, ...]
    parse: Callable[[Any], T]

    def command(self) -> tuple[Argument, ...]:
        """As Redis takes it."""
        return ("FCALL", f"cl_{functions.version()}_{self.name}", 1, self.prefix, *self.arguments)


async def run(redis: Redis, call: Call[T]) -> T:
    """Run one call; loads the library where the server does not have it yet."""
    try:
        reply = await redis.execute_command(*call.command())
    except ResponseError as error:
        if not _is_missing(error):
            raise
        await load(redis)
        reply = await redis.execute_command(*call.command())
    return call.parse(reply)


async def run_many(redis: Redis, calls: Sequence[Call[Any]]) -> list[Any]:
    """Run calls in one pipeline: one round trip. A call that failed has its RedisError as its answer."""
    replies = await _pipeline(redis, calls)
    missing = [index for index, reply in enumerate(replies) if _is_missing(reply)]
    if missing:
        await load(redis)
        again = await _pipeline(redis, [calls[index] for index in missing])
        for index, reply in zip(missing, again, strict=True):
            replies[index] = reply
    return [
        reply if isinstance(reply, RedisError) else call.parse(reply)
        for call, reply in zip(calls, replies, strict=True)
    ]


async def load(redis: Redis) -> None:
    """Load the library; another that loaded it in the meantime is fine."""
    try:
        await redis.execute_command("FUNCTION", "LOAD", functions.source())
    except ResponseError as error:
        if "already exists" not in str(error):
            raise


async def _pipeline(redis: Redis, calls: Sequence[Call[Any]]) -> list[Any]:
    async with redis.pipeline(transaction=False) as pipeline:
        for call in calls:
            pipeline.execute_command(*call.command())
        replies: list[Any] = await pipeline.execute(raise_on_error=False)
    return replies


def word(reply: bytes) -> Any:
    """An answer that is one word."""
    return reply.decode()


def words(reply: Sequence[bytes]) -> Any:
    """An answer that is a list of words."""
    return tuple(item.decode() for item in reply)


def _is_missing(reply: object) -> bool:
    return isinstance(reply, ResponseError) and "function not found" in str(reply).lower()
