"""Makes the faults of a schedule happen."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

from chaos.faults import Fault, Kind
from chaos.proxy import Proxy
from chaos.world import NAMESPACE, Seat, World

T = TypeVar("T")
TAIL_BYTES = 20_000
"""About what a busy second writes."""


class Injector:
    """Carries faults out, each when its time has come; several may last at once."""

    def __init__(self, world: World, on_kill: Callable[[str, int], None]) -> None:
        self._world = world
        self._on_kill = on_kill
        self.done: Counter[Kind] = Counter()
        self.bytes_lost = 0

    async def run(self, schedule: Sequence[Fault]) -> None:
        """All of them."""
        started_at = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for fault in schedule:
                await asyncio.sleep(max(0.0, fault.at_s - (time.monotonic() - started_at)))
                tasks.create_task(self._inflict(fault))

    async def _inflict(self, fault: Fault) -> None:
        await getattr(self, f"_{fault.kind}")(fault)
        self.done[fault.kind] += 1

    # Workers.

    async def _worker_kill(self, fault: Fault) -> None:
        seat = self._seat(fault)
        async with seat.lock:
            self._on_kill(seat.worker.worker_id, round(time.time() * 1000))
            await seat.worker.kill()
            await self._world.fill(seat)

    async def _worker_pause(self, fault: Fault) -> None:
        seat = self._seat(fault)
        async with seat.lock:
            seat.worker.signal(signal.SIGSTOP)
            await asyncio.sleep(fault.length_s)
            seat.worker.signal(signal.SIGCONT)

    async def _worker_drain(self, fault: Fault) -> None:
        seat = self._seat(fault)
        async with seat.lock:
            seat.worker.signal(signal.SIGTERM)
            if fault.length_s > 1.0:
                seat.worker.signal(signal.SIGTERM)
            status = await seat.worker.ended()
            if status not in (0, -signal.SIGTERM):  # the latter: it had not come up yet
                self._world.note_death(seat, status)
            await self._world.fill(seat)

    async def _worker_clock(self, fault: Fault) -> None:
        seat = self._seat(fault)
        async with seat.lock:
            seat.worker.signal(signal.SIGUSR1)

    # The server.

    async def _server_kill(self, fault: Fault) -> None:
        async with self._world.server_lock:
            self._world.server.kill()
            await asyncio.sleep(fault.length_s / 2)
            await self._world.restart_server()

    async def _power_cut(self, fault: Fault) -> None:
        async with self._world.server_lock:
            self._world.server.kill()
            self.bytes_lost += self._world.server.lose_tail(int(fault.target * TAIL_BYTES))
            await asyncio.sleep(fault.length_s / 2)
            await self._world.restart_server()

    async def _server_pause(self, fault: Fault) -> None:
        async with self._world.server_lock:
            self._world.server.pause()
            await asyncio.sleep(fault.length_s)
            self._world.server.resume()

    async def _disk_full(self, fault: Fault) -> None:
        """With fsync at every write a server gives up at once; with everysec it refuses writes, by name."""
        world = self._world
        async with world.server_lock:
            gives_up = fault.target < 0.2
            if not gives_up:
                await self._command("CONFIG", "SET", "appendfsync", "everysec")
            world.server.fill_disk()
            await asyncio.sleep(fault.length_s)
            if world.server.is_running:
                world.server.free_disk()
                await self._wait_until_written()
            if not world.server.is_running:
                world.counts["server gave up on a full disk"] += 1
                world.server.kill()
                await world.restart_server()
            await self._command("CONFIG", "SET", "appendfsync", world.fsync)

    async def _wait_until_written(self) -> None:
        while self._world.server.is_running:
            reply = await self._command("INFO", "persistence")
            fields = reply if isinstance(reply, dict) else {}
            if fields.get("aof_last_write_status") == "ok":
                return
            await asyncio.sleep(0.05)

    async def _memory_full(self, fault: Fault) -> None:
        async with self._world.server_lock:
            await self._command("CONFIG", "SET", "maxmemory", "1mb")
            await asyncio.sleep(fault.length_s)
            await self._command("CONFIG", "SET", "maxmemory", "0")

    async def _client_kill(self, fault: Fault) -> None:
        async with self._world.server_lock:
            if fault.target < 0.4:
                await self._command("CLIENT", "KILL", "TYPE", "normal")
            elif fault.target < 0.7:
                await self._command("CLIENT", "KILL", "TYPE", "pubsub")
            else:
                every = 2 if fault.target < 0.85 else 3
                for number in _client_ids(await self._command("CLIENT", "LIST"))[::every]:
                    await self._command("CLIENT", "KILL", "ID", number)

    async def _functions_lost(self, fault: Fault) -> None:
        async with self._world.server_lock:
            await self._command("FUNCTION", "FLUSH")

    async def _stream_deleted(self, fault: Fault) -> None:
        async with self._world.server_lock:
            found = await self._command("KEYS", f"cl:{{{NAMESPACE}/*:q:*")
            if isinstance(found, list) and found:
                await self._command("DEL", _pick(fault, sorted(found)))

    # The network.

    async def _cut(self, fault: Fault) -> None:
        self._proxy(fault).cut()

    async def _refuse(self, fault: Fault) -> None:
        proxy = self._proxy(fault)
        proxy.is_refusing = True
        proxy.cut()
        await asyncio.sleep(fault.length_s)
        proxy.is_refusing = False

    async def _delay(self, fault: Fault) -> None:
        proxy = self._proxy(fault)
        proxy.delay_s = 0.01 + 0.1 * fault.length_s
        await asyncio.sleep(fault.length_s)
        proxy.delay_s = 0.0

    async def _freeze(self, fault: Fault) -> None:
        proxy = self._proxy(fault)
        proxy.freeze()
        await asyncio.sleep(fault.length_s)
        proxy.thaw()

    async def _half_open(self, fault: Fault) -> None:
        self._proxy(fault).half_open()

    async def _command(self, *words: str | int) -> object:
        return await asyncio.to_thread(self._world.command, *words)

    def _seat(self, fault: Fault) -> Seat:
        return _pick(fault, self._world.seats)

    def _proxy(self, fault: Fault) -> Proxy:
        return _pick(fault, self._world.proxies)


def _client_ids(reply: object) -> list[str]:
    """Of the lines `id=12 addr=…`."""
    lines = reply.decode().splitlines() if isinstance(reply, bytes) else []
    return [line.split(" ", 1)[0].removeprefix("id=") for line in lines]


def _pick(fault: Fault, choices: Sequence[T]) -> T:
    return choices[int(fault.target * len(choices))]
