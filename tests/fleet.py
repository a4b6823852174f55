"""Worker processes for tests: started in milliseconds, killed at will, gone when the test ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from redis.asyncio import Redis

from chairlift_client import keys
from hooked_runner import Hooks
from servers import until
from tiny_model import TINY_MODEL


class WorkerHandle:
    """One worker process."""

    def __init__(self, fleet: Fleet, pid: int, worker_id: str, log: Path) -> None:
        self.pid = pid
        self.worker_id = worker_id
        self.log = log
        self.is_running = True
        self.status = 0
        """As it ended."""
        self._fleet = fleet

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process."""
        os.kill(self.pid, number)

    async def wait(self) -> int:
        """The exit status; negative for a signal."""
        status = await asyncio.to_thread(self._fleet._ask, {"wait": self.pid})
        self.is_running = False
        return int(status["status"])

    async def poll(self) -> int | None:
        """The exit status, None while it runs."""
        status = (await asyncio.to_thread(self._fleet._ask, {"poll": self.pid}))["status"]
        if status is not None:
            self.is_running, self.status = False, int(status)
        return None if status is None else int(status)

    async def ended(self, limit_s: float = 20.0) -> int:
        """The exit status, once it has ended; others may use the fleet meanwhile.

        After `limit_s` it is told to log what it is doing, and killed: -9.
        """
        try:
            await until(self._has_ended, limit_s)
        except TimeoutError:
            self.signal(signal.SIGUSR2)
            with suppress(TimeoutError):
                await until(self._has_ended, 1.0)
            self.signal(signal.SIGKILL)
            await until(self._has_ended)
        return self.status

    async def _has_ended(self) -> bool:
        return await self.poll() is not None

    async def wait_for_log(self, words: str) -> None:
        """Until its log has these words in it."""

        async def has_words() -> bool:
            return words in self.log.read_text(errors="replace")

        await until(has_words)

    async def kill(self) -> None:
        """kill -9, and wait for it."""
        self.signal(signal.SIGKILL)
        await self.wait()


class Fleet:
    """Forks workers from a process that has the tiny model loaded already."""

    def __init__(self, folder: Path, *, model: Path = TINY_MODEL, kv_tokens: int = 8192) -> None:
        self._folder = folder
        self._handles: list[WorkerHandle] = []
        self._asking = threading.Lock()
        environ = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        self._zygote = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("zygote.py")), str(model), str(kv_tokens)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environ,
        )
        assert "ready" in self._read()

    async def spawn(
        self, url: str, namespace: str, *, hooks: Hooks | None = None, **fields: Any
    ) -> WorkerHandle:
        """A worker that has announced itself."""
        handle = await self.start(url, namespace, hooks=hooks, **fields)
        handle.worker_id = await self._announced(url, namespace, handle)
        return handle

    async def start(
        self, url: str, namespace: str, *, hooks: Hooks | None = None, **fields: Any
    ) -> WorkerHandle:
        """A worker that may come up or not: whoever waits for it has to know. Its id is not known yet."""
        name = f"w{len(self._handles)}"
        log = self._folder / f"{name}.log"
        config = {
            "model": str(TINY_MODEL),
            "name": "tiny",
            "redis_url": url,
            "namespace": namespace,
            "worker_id": name,
            "max_num_seqs": 8,
            "lease_s": 1.0,
            **fields,
        }
        wanted = {"spawn": config, "log": str(log), "hooks": (hooks or Hooks())._asdict()}
        handle = WorkerHandle(self, 0, name, log)
        self._handles.append(handle)
        handle.pid = (await asyncio.to_thread(self._ask, wanted))["pid"]
        return handle

    async def _announced(self, url: str, namespace: str, handle: WorkerHandle) -> str:
        redis = Redis.from_url(url)
        try:
            async with asyncio.timeout(30):
                while True:
                    for worker in await redis.zrange(keys.workers(namespace), 0, -1):
                        if worker.decode().startswith(f"{handle.worker_id}-"):
                            return str(worker.decode())
                    os.kill(handle.pid, 0)
                    await asyncio.sleep(0.005)
        except TimeoutError:
            raise AssertionError(f"worker {handle.worker_id} did not come up; see {handle.log}") from None
        finally:
            await redis.aclose()

    def close(self) -> None:
        """Kill what still runs."""
        for handle in self._handles:
            if handle.is_running and handle.pid:
                handle.signal(signal.SIGCONT)
                handle.signal(signal.SIGKILL)
        self._zygote.kill()  # its own way out takes seconds, for nothing
        self._zygote.communicate()

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        with self._asking:
            assert self._zygote.stdin is not None
            self._zygote.stdin.write(json.dumps(message) + "\n")
            self._zygote.stdin.flush()
            return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._zygote.stdout is not None
        line = self._zygote.stdout.readline()
        assert line, f"the zygote died with status {self._zygote.poll()}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
