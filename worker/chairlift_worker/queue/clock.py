"""The server's clock, as this process knows it."""

from __future__ import annotations

import time


class ServerClock:
    """Redis' milliseconds since the epoch, carried on between answers by this process' monotonic clock.

    Deadlines and event times are in server time, so that a worker with a wrong clock does no harm.
    """

    def __init__(self) -> None:
        self._offset_ms = time.time() * 1000 - _monotonic_ms()

    def observe(self, server_ms: int) -> None:
        """An answer said that it is now `server_ms`."""
        self._offset_ms = server_ms - _monotonic_ms()

    def now_ms(self) -> int:
        """The server's time. Safe to call from any thread."""
        return int(_monotonic_ms() + self._offset_ms)


def _monotonic_ms() -> float:
    return time.monotonic() * 1000
