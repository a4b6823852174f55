"""What readers hold of a live channel: subscriptions with a bounded buffer that never hide a hole."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Self


class Subscription:
    """The messages of one channel for one reader, as long as they can be had without a hole.

    `num_overflows` and `num_reconnects` count how often messages may have been missed.
    """

    def __init__(self, topic: Topic, leave: Callable[[Subscription], None], buffer_messages: int) -> None:
        self.topic = topic
        self.num_overflows = 0
        self.num_reconnects = 0
        self._leave = leave
        self._buffer_messages = buffer_messages
        self._buffer: deque[bytes] = deque()
        self.is_live = False
        self._missed = False
        self._error: Exception | None = None
        self._wake = asyncio.Event()

    async def get(self, timeout_s: float) -> bytes | None:
        """The next message; None when there was none for `timeout_s`, or when some may have been missed.

        Either way None means: look into the event log. One reader at a time.
        Raises redis.exceptions.RedisError when the subscription has ended.
        """
        if not self._wake.is_set():
            try:
                async with asyncio.timeout(timeout_s):
                    await self._wake.wait()
            except TimeoutError:
                return None
        return self._take()

    def close(self) -> None:
        """Ends the subscription; the last one of a channel unsubscribes. Never waits, may be repeated."""
        self._leave(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take(self) -> bytes | None:
        if self._error is not None:
            raise self._error
        message = None
        if self._missed:
            self._missed = False
        elif self._buffer:
            message = self._buffer.popleft()
        if not self._buffer and not self._missed:
            self._wake.clear()
        return message

    def put(self, message: bytes) -> None:
        """A message has come."""
        if len(self._buffer) >= self._buffer_messages:
            self._buffer.clear()
            self.num_overflows += 1
            self._missed = True
        self._buffer.append(message)
        self._wake.set()

    def confirm(self) -> None:
        """The server has confirmed: for the first time, or again after the connection was lost."""
        if self.is_live:
            self.num_reconnects += 1
            self._missed = True
            self._wake.set()
        self.is_live = True

    def fail(self, error: Exception) -> None:
        """There will be no more messages."""
        self._error = error
        self._wake.set()


class Topic:
    """A channel that somebody listens to."""

    def __init__(self, name: bytes) -> None:
        self.name = name
        self.subscriptions: list[Subscription] = []
        self.settled = asyncio.Event()  # the server has answered: confirmed, or refused with `error`
        self.error: Exception | None = None

    def confirm(self) -> None:
        """The server sends its messages from now on."""
        for subscription in self.subscriptions:
            subscription.confirm()
        self.settled.set()

    def fail(self, error: Exception) -> None:
        """The server refused, or the client is closed."""
        self.error = error
        for subscription in self.subscriptions:
            subscription.fail(error)
        self.settled.set()
