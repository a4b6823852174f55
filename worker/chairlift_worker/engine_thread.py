"""The engine steps in a thread of its own; requests go in and reports come out as plain data."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from typing import NamedTuple, Protocol, TypeAlias

from chairlift_client.errors import InvalidJob
from chairlift_worker.engine.engine import Engine
from chairlift_worker.engine.request import EngineRequest, Failure, StepReport
from chairlift_worker.queue.clock import ServerClock

log = logging.getLogger(__name__)


class Add(NamedTuple):
    """Run this."""

    request: EngineRequest


class Cancel(NamedTuple):
    """Stop that, whatever its state."""

    job_id: str


class Stop(NamedTuple):
    """End the thread."""


Command: TypeAlias = Add | Cancel | Stop


class Listener(Protocol):
    """Hears of the engine's doings, in the event loop's thread."""

    def stepped(self, report: StepReport, started_ms: int) -> None:
        """A step is done; it began at `started_ms` of the server's clock."""
        ...

    def refused(self, failure: Failure) -> None:
        """A request cannot run."""
        ...

    def broke_down(self, job_ids: tuple[str, ...], reason: str) -> None:
        """A step raised; the engine has dropped everything it had on board."""
        ...

    def died(self, error: BaseException) -> None:
        """The thread is at its end, and not because it was stopped."""
        ...


class EngineThread:
    """Owns the engine from `start` to `stop`."""

    def __init__(self, engine: Engine, clock: ServerClock, listener: Listener) -> None:
        self._engine = engine
        self._clock = clock
        self._listener = listener
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._on_board: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def num_used_blocks(self) -> int:
        """Blocks that are owned just now; between steps this is not what the last step's report said."""
        return self._engine.num_blocks - self._engine.num_free_blocks

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def tell(self, command: Command) -> None:
        """From the event loop: taken up before the next step."""
        self._inbox.put(command)

    async def stop(self) -> None:
        """Ends after the step under way."""
        self._inbox.put(Stop())
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            log.critical("the engine's thread dies", exc_info=error)
            self._call(self._listener.died, error)

    def _work(self) -> None:
        while self._obey():
            started_ms = self._clock.now_ms()
            try:
                report = self._engine.step(started_ms)
            except Exception as error:
                log.exception("the engine broke down in a step")
                self._drop_everything(f"{type(error).__name__}: {error}")
                continue
            if report is not None:
                self._forget_ended(report)
                self._call(self._listener.stepped, report, started_ms)

    def _obey(self) -> bool:
        """Take all commands; wait for one where there is nothing to step."""
        while True:
            try:
                command = self._inbox.get(block=not self._engine.has_work)
            except queue.Empty:
                return True
            if isinstance(command, Stop):
                return False
            if isinstance(command, Add):
                self._add(command.request)
            else:
                self._engine.cancel(command.job_id)
                self._on_board.discard(command.job_id)

    def _add(self, request: EngineRequest) -> None:
        try:
            self._engine.add(request)
        except InvalidJob as error:
            self._call(self._listener.refused, Failure(request.job_id, "invalid", str(error)))
        else:
            self._on_board.add(request.job_id)

    def _forget_ended(self, report: StepReport) -> None:
        for failure in report.failures:
            self._on_board.discard(failure.job_id)
        self._on_board.difference_update(report.ended)

    def _drop_everything(self, reason: str) -> None:
        job_ids = tuple(sorted(self._on_board))
        for job_id in job_ids:
            self._engine.cancel(job_id)
        self._on_board.clear()
        self._call(self._listener.broke_down, job_ids, reason)

    def _call(self, callback: object, *arguments: object) -> None:
        self._loop.call_soon_threadsafe(callback, *arguments)  # type: ignore[arg-type]
