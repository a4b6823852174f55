"""Sharded pub/sub over one plain connection per shard and client.

redis-py 5 has no `ssubscribe` in its asyncio client, so this module speaks it itself, in RESP2. One task
owns the connection: it alone reads and writes, so that a subscriber who is cancelled in the middle of a
command cannot hurt the others.

The server answers commands in the order they were sent, and messages come in between; so the commands
that wait for their answer stand in one queue, and an answer always belongs to its head.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Any, Literal, NamedTuple

from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError, RedisError, ResponseError

from chairlift_client.errors import ServerUnavailable
from chairlift_client.retry import Backoff
from chairlift_client.subscription import Subscription, Topic

log = logging.getLogger(__name__)

CLOSED = "the client is closed"
BUFFER_MESSAGES = 512
PING_S = 5.0
"""A connection that owes an answer and has been silent for this long is given up."""


class _Command(NamedTuple):
    verb: Literal["SSUBSCRIBE", "SUNSUBSCRIBE", "PING"]
    topic: Topic | None = None

    def words(self) -> tuple[str | bytes, ...]:
        return (self.verb,) if self.topic is None else (self.verb, self.topic.name)


class ShardChannel:
    """The live channel to one shard: any number of subscriptions over one connection.

    Connects with the first subscription, and again after every loss, with backoff. `last_error` is why the
    connection was last lost.
    """

    def __init__(
        self,
        new_connection: Callable[[], AbstractConnection],
        *,
        server: str,
        buffer_messages: int = BUFFER_MESSAGES,
        ping_s: float = PING_S,
    ) -> None:
        self._new_connection = new_connection
        self._server = server
        self._buffer_messages = buffer_messages
        self._ping_s = ping_s
        self._topics: dict[bytes, Topic] = {}
        self._outbox: asyncio.Queue[_Command] = asyncio.Queue()
        self._unanswered: deque[_Command] = deque()
        self._waiting_since = 0.0  # when the head of `_unanswered` was sent, or the last thing received
        self._connected = False
        self.last_error: Exception | None = None
        self._backoff = Backoff()
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    async def subscribe(self, channel: str, *, timeout_s: float = 10.0) -> Subscription:
        """Listens to a channel; once this returns, whatever is published arrives: the server has confirmed.

        Raises ServerUnavailable without a confirmation within `timeout_s`, and redis.exceptions.ResponseError
        where the server refuses (MOVED: the channel's slot lives elsewhere now).
        """
        if self._closed:
            raise RuntimeError(CLOSED)
        subscription = self._join(channel.encode())
        topic = subscription.topic
        try:
            async with asyncio.timeout(timeout_s):
                await topic.settled.wait()
            if topic.error is not None:
                raise topic.error
            subscription.is_live = True
        except TimeoutError:
            subscription.close()
            reason = self.last_error or "no answer"
            raise ServerUnavailable(
                f"{self._server} did not confirm a subscription within {timeout_s:g} s: {reason}"
            ) from self.last_error
        except BaseException:
            subscription.close()
            raise
        return subscription

    async def aclose(self) -> None:
        """Closes the connection; every reader gets a RuntimeError."""
        self._closed = True
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait((task,))
        for topic in self._topics.values():
            topic.fail(RuntimeError(CLOSED))
        self._topics.clear()

    def _join(self, name: bytes) -> Subscription:
        topic = self._topics.get(name)
        if topic is None:
            topic = self._topics[name] = Topic(name)
            self._send(_Command("SSUBSCRIBE", topic))
        subscription = Subscription(topic, self._leave, self._buffer_messages)
        topic.subscriptions.append(subscription)
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=f"chairlift live channel to {self._server}")
        return subscription

    def _leave(self, subscription: Subscription) -> None:
        topic = subscription.topic
        if subscription in topic.subscriptions:
            topic.subscriptions.remove(subscription)
        if not topic.subscriptions and self._topics.get(topic.name) is topic:
            del self._topics[topic.name]
            self._send(_Command("SUNSUBSCRIBE", topic))

    def _send(self, command: _Command) -> None:
        """Without a connection there is nothing to send: a new one begins by subscribing to all topics."""
        if self._connected:
            self._outbox.put_nowait(command)

    async def _run(self) -> None:
        while True:
            connection = self._new_connection()
            try:
                await connection.connect()
                self._begin()
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._read(connection))
                    tasks.create_task(self._write(connection))
            except* (RedisError, OSError) as errors:
                self._lose(errors.exceptions[0])
            finally:
                self._connected = False
                await connection.disconnect(nowait=True)
            await asyncio.sleep(self._backoff.next_s())

    def _begin(self) -> None:
        self._outbox = asyncio.Queue()
        self._unanswered.clear()
        self._connected = True
        for topic in self._topics.values():
            topic.settled.clear()
            self._send(_Command("SSUBSCRIBE", topic))

    def _lose(self, error: BaseException) -> None:
        # Readers are told when the channel is back; until then they time out and read the log.
        self.last_error = error if isinstance(error, Exception) else None
        log.warning("live channel to %s lost: %s", self._server, error)

    async def _write(self, connection: AbstractConnection) -> None:
        while True:
            try:
                async with asyncio.timeout(self._ping_s):
                    command = await self._outbox.get()
            except TimeoutError:
                command = _Command("PING")
            self._check_alive()
            if not self._unanswered:
                self._waiting_since = monotonic()
            self._unanswered.append(command)
            async with asyncio.timeout(self._ping_s):
                await connection.send_command(*command.words(), check_health=False)

    def _check_alive(self) -> None:
        if self._unanswered and monotonic() - self._waiting_since > self._ping_s:
            raise ConnectionError(f"no answer for {self._ping_s:g} s")

    async def _read(self, connection: AbstractConnection) -> None:
        while True:
            try:
                reply: Any = await connection.read_response()
            except ResponseError as error:
                self._waiting_since = monotonic()
                self._refused(error)
                continue
            self._waiting_since = monotonic()
            self._receive(reply)

    def _refused(self, error: ResponseError) -> None:
        command = self._unanswered.popleft()
        topic = command.topic
        if command.verb == "SSUBSCRIBE" and topic is not None:
            if self._topics.get(topic.name) is topic:
                del self._topics[topic.name]
            topic.fail(error)

    def _receive(self, reply: Any) -> None:
        kind = reply[0] if isinstance(reply, list) else b"pong"
        if kind == b"smessage":
            self._deliver(reply[1], reply[2])
        elif kind == b"sunsubscribe" and not self._is_answer(reply[1]):
            self._evicted(reply[1])
        else:
            command = self._unanswered.popleft()
            self._backoff.reset()
            if command.verb == "SSUBSCRIBE" and command.topic is not None:
                command.topic.confirm()

    def _deliver(self, name: bytes, message: bytes) -> None:
        topic = self._topics.get(name)
        for subscription in topic.subscriptions if topic is not None else ():
            subscription.put(message)

    def _is_answer(self, name: bytes) -> bool:
        head = self._unanswered[0] if self._unanswered else None
        return (
            head is not None
            and head.verb == "SUNSUBSCRIBE"
            and head.topic is not None
            and head.topic.name == name
        )

    def _evicted(self, name: bytes) -> None:
        """The server ended a subscription by itself: its slot moves. Asking again says where to."""
        topic = self._topics.get(name)
        if topic is not None:
            self._send(_Command("SSUBSCRIBE", topic))
