"""A TCP proxy that behaves as bad networks do: it cuts, delays, freezes and goes half-open."""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import suppress
from typing import Self


class Proxy:
    """Listens on a port of its own and passes everything on to `target_port` of this machine."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._links: set[_Link] = set()
        self._server: asyncio.Server | None = None
        self._is_thawed = asyncio.Event()
        self._is_thawed.set()
        self.delay_s = 0.0
        """Every piece that comes by, in either direction, waits for this long."""
        self.is_refusing = False
        """New connections are closed at once."""

    @property
    def url(self) -> str:
        """What clients connect to."""
        assert self._server is not None
        return f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def cut(self) -> None:
        """Reset all connections."""
        for link in tuple(self._links):
            link.abort()

    def freeze(self) -> None:
        """Nothing comes through, no connection ends: not until `thaw`."""
        self._is_thawed.clear()

    def thaw(self) -> None:
        """What was held back goes on its way."""
        self._is_thawed.set()

    def half_open(self) -> None:
        """From now on all present connections swallow what is sent and never answer; new ones work."""
        for link in self._links:
            link.is_dead = True

    async def wait_thawed(self) -> None:
        """Returns when nothing is frozen."""
        await self._is_thawed.wait()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.is_refusing:
            writer.transport.abort()
            return
        try:
            upstream = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            writer.transport.abort()
            return
        link = _Link(self, (writer, upstream[1]))
        self._links.add(link)
        try:
            with suppress(OSError, asyncio.CancelledError):
                await asyncio.gather(link.pump(reader, upstream[1]), link.pump(upstream[0], writer))
        finally:
            link.abort()
            self._links.discard(link)


class _Link:
    """One connection through the proxy."""

    def __init__(self, proxy: Proxy, writers: tuple[asyncio.StreamWriter, asyncio.StreamWriter]) -> None:
        self._proxy = proxy
        self._writers = writers
        self.is_dead = False

    async def pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass on until one side ends."""
        while data := await reader.read(1 << 16):
            if self._proxy.delay_s:
                await asyncio.sleep(self._proxy.delay_s)
            await self._proxy.wait_thawed()
            if not self.is_dead:
                writer.write(data)
                await writer.drain()
        self.abort()

    def abort(self) -> None:
        """Both sides see a reset."""
        for writer in self._writers:
            sock = writer.get_extra_info("socket")
            if sock is not None and sock.fileno() >= 0:
                with suppress(OSError):
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
