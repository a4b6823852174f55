"""The engine steps in a thread of its own; requests go in and reports come out as plain data."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from typing import NamedTuple, Protocol, TypeAlias

from chairlift_client.errors import InvalidJob
from chairlift_worker.engine.engine import Engine
from chairlift_worker.engine.request import EngineRequest, Failure, StepReport
from chairlift_worker.queue.clock import ServerClock

log = logging.getLogger(__name__)

LONGEST_STEP_S = 300.0
"""A step that takes longer than this, compilation and all, will not end."""
MAX_BREAKDOWNS = 3
"""So many steps in a row that raise, with no job in common, are not the jobs' fault."""


class EngineBroken(Exception):
    """Steps raise whatever rides in them."""


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
        self._step_began_at: float | None = None
        self._num_breakdowns = 0
        self._suspects: set[str] = set()
        """Jobs, by id, that were on board in every one of the last breakdowns."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def num_used_blocks(self) -> int:
        """Blocks that are owned just now; between steps this is not what the last step's report said."""
        return self._engine.num_blocks - self._engine.num_free_blocks

    @property
    def is_well(self) -> bool:
        """The thread lives, and its step is not taking for ever."""
        began_at = self._step_began_at
        return self._thread.is_alive() and (began_at is None or time.monotonic() - began_at < LONGEST_STEP_S)

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
            started_ms, self._step_began_at = self._clock.now_ms(), time.monotonic()
            try:
                report = self._engine.step(started_ms)
            except Exception as error:
                log.exception("the engine broke down in a step")
                self._drop_everything(f"{type(error).__name__}: {error}")
                continue
            finally:
                self._step_began_at = None
            if report is not None:
                self._num_breakdowns = 0
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
        except Exception as error:
            log.exception("job %s cannot be added", request.job_id)
            self._engine.cancel(request.job_id)
            self._call(self._listener.broke_down, (request.job_id,), f"{type(error).__name__}: {error}")
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
        self._judge_breakdown({job_id.partition(" ")[0] for job_id in job_ids}, reason)

    def _judge_breakdown(self, riders: set[str], reason: str) -> None:
        """A device that is gone must not make dead letters of all the jobs that it is given."""
        self._suspects = self._suspects & riders if self._num_breakdowns else riders
        self._num_breakdowns += 1
        if self._num_breakdowns >= MAX_BREAKDOWNS and not self._suspects:
            raise EngineBroken(f"{self._num_breakdowns} steps in a row with no job in common: {reason}")

    def _call(self, callback: object, *arguments: object) -> None:
        self._loop.call_soon_threadsafe(callback, *arguments)  # type: ignore[arg-type]
