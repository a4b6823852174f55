"""Files that tell a container platform how a worker is, without a network.

The ready file is there while the worker takes jobs: from its first answer of Redis to the beginning of its
drain. The alive file is touched every second while the event loop turns and the engine's thread does not
hang; an outage of Redis does not age it, since restarting a worker mends none. So a liveness probe asks
whether the file is younger than half a minute:

    test $(( $(date +%s) - $(stat -c %Y /tmp/alive) )) -lt 30
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

TOUCH_EVERY_S = 1.0


class Probes:
    """Both files; an empty path stands for none."""

    def __init__(
        self, ready_file: str, alive_file: str, *, is_ready: Callable[[], bool], is_alive: Callable[[], bool]
    ) -> None:
        self._ready_file = Path(ready_file) if ready_file else None
        self._alive_file = Path(alive_file) if alive_file else None
        self._is_ready = is_ready
        self._is_alive = is_alive
        self.remove()  # what an earlier process left behind says nothing of this one

    async def run(self) -> None:
        """Keep them up to date, for ever."""
        while True:
            self.update()
            await asyncio.sleep(TOUCH_EVERY_S)

    def update(self) -> None:
        """Bring both to where they should be now."""
        if self._alive_file is not None and self._is_alive():
            self._alive_file.touch()
        if self._ready_file is None:
            return
        if self._is_ready():
            self._ready_file.touch()
        else:
            self._ready_file.unlink(missing_ok=True)

    def remove(self) -> None:
        """The worker is gone."""
        for file in (self._ready_file, self._alive_file):
            if file is not None:
                file.unlink(missing_ok=True)
