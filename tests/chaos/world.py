"""What faults happen to: a server, workers in their seats, and a proxy before each party."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any, Self

import redis

from chaos.proxy import Proxy
from fleet import Fleet, WorkerHandle
from hooked_runner import Hooks
from servers import Flavour, Server

LEASE_S = 1.0
NUM_WORKERS = 3
NAMESPACE = "chaos"
CLOCK_SKEW_S = 600.0
STEP_S = 0.012
"""The tiny model alone is so fast that hardly a fault would meet a running job."""

WORKER_FIELDS: dict[str, Any] = {
    "lease_s": LEASE_S,
    "grace_s": 0.3,
    "partitions": 2,
    # Many innocent leases are lost here; how poison is told from bad luck is not what this is about.
    "max_losses": 100,
    "max_failures": 100,
    "log_level": "info",
}


class Seat:
    """A place for a worker, with its own way to Redis. One fault at a time."""

    def __init__(self, proxy: Proxy, skew_s: float) -> None:
        self.proxy = proxy
        self.lock = asyncio.Lock()
        self.handle: WorkerHandle | None = None
        self.skew_s = skew_s

    @property
    def worker(self) -> WorkerHandle:
        """Who sits here."""
        assert self.handle is not None
        return self.handle


class World:
    """Server, seats and the proxies of producers and subscribers."""

    def __init__(self, flavour: Flavour, folder: Path, *, is_lossy: bool = False) -> None:
        fsync = "everysec" if is_lossy else "always"
        self.fsync = fsync
        self.server = Server(
            flavour, "--appendfsync", fsync, "--auto-aof-rewrite-min-size", "16mb", appendonly=True
        )
        self.fleet = Fleet(folder)
        self.server_lock = asyncio.Lock()
        self.seats: list[Seat] = []
        self.died: list[str] = []
        """Workers that ended although nobody told them to."""
        self.counts: Counter[str] = Counter()
        self._stack = AsyncExitStack()
        self._folder = folder

    async def __aenter__(self) -> Self:
        self._stack.enter_context(self.server)
        self._stack.enter_context(self.fleet)
        for index in range(NUM_WORKERS):
            skew_s = (0.0, CLOCK_SKEW_S, -CLOCK_SKEW_S)[index % 3]
            self.seats.append(Seat(await self._proxy(), skew_s))
        self.producers, self.subscribers = await self._proxy(), await self._proxy()
        await asyncio.gather(*(self.fill(seat) for seat in self.seats))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    @property
    def proxies(self) -> list[Proxy]:
        """Of all parties."""
        return [*(seat.proxy for seat in self.seats), self.producers, self.subscribers]

    async def fill(self, seat: Seat) -> None:
        """A new worker for the seat."""
        hooks = Hooks(clock_skew_s=seat.skew_s, step_s=STEP_S)
        seat.handle = await self.fleet.start(seat.proxy.url, NAMESPACE, hooks=hooks, **WORKER_FIELDS)

    async def supervise(self) -> None:
        """For ever: whoever ended unasked is noted, and replaced."""
        while True:
            for seat in self.seats:
                if not seat.lock.locked():
                    async with seat.lock:
                        await self._look_after(seat)
            await asyncio.sleep(0.2)

    async def restart_server(self) -> None:
        """Start the server again, on the data it has."""
        await asyncio.to_thread(self.server.start)

    async def heal(self) -> None:
        """End whatever is still wrong."""
        for proxy in self.proxies:
            proxy.delay_s, proxy.is_refusing = 0.0, False
            proxy.thaw()
        async with self.server_lock:
            if not self.server.is_running:
                self.server.kill()
                await self.restart_server()
        for seat in self.seats:
            async with seat.lock:
                await self._look_after(seat)

    async def stop_workers(self) -> None:
        """Drain them all."""
        for seat in self.seats:
            async with seat.lock:
                seat.worker.signal(signal.SIGTERM)
                status = await seat.worker.ended()
                if status != 0:
                    self.note_death(seat, status)

    def command(self, *words: str | int) -> Any:
        """Straight to the server; None while it cannot be asked."""
        with self.server.client() as client, suppress(redis.ConnectionError, redis.TimeoutError):
            return client.execute_command(*words)
        return None

    def note_death(self, seat: Seat, status: int) -> None:
        """It ended in a way it should not have."""
        lines = seat.worker.log.read_text(errors="replace").splitlines()
        self.died.append(f"{seat.worker.worker_id} ended with status {status}:\n" + "\n".join(lines[-40:]))

    async def _look_after(self, seat: Seat) -> None:
        status = await seat.worker.poll() if seat.worker.is_running else None
        if status is not None:
            self.note_death(seat, status)
            await self.fill(seat)

    async def _proxy(self) -> Proxy:
        return await self._stack.enter_async_context(Proxy(self.server.port))
