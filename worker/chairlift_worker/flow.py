"""The way of a job through this worker, from claim to end; everything here runs in the event loop's thread.

    claimed ─→ admission ─→ engine ─→ tokens … ─→ finished | failed | cancelled
                                └─→ lost, handed back: goes on elsewhere

Whatever happens to an attempt, it leaves the board in `_let_go`, and only there.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol

import msgspec

from chairlift_client.errors import InvalidJob
from chairlift_client.worker_operations import ClaimReply, RetryPolicy, UnreadableJob
from chairlift_worker.engine.engine import Engine
from chairlift_worker.engine.request import Failure, StepReport, TokenDelta
from chairlift_worker.engine_thread import Add, Cancel, EngineBroken, EngineThread
from chairlift_worker.models.adapter_shelf import AdapterShelf, NoRoom
from chairlift_worker.models.tokenizer import ChatTokenizer
from chairlift_worker.queue.admission import Admitted, OtherWeights, TakesLong, admit
from chairlift_worker.queue.attempts import Attempt, Board
from chairlift_worker.queue.clock import ServerClock
from chairlift_worker.queue.loans import Loans
from chairlift_worker.queue.outbox import Outbox, Parcel
from chairlift_worker.queue.publisher import Publisher
from chairlift_worker.structured.compiler import StructureCompiler

log = logging.getLogger(__name__)

NUM_SLOW_ADMISSIONS = 2


class Owner(Protocol):
    """Who is told what the flow has done: the worker."""

    def has_outgoing(self) -> None:
        """The outbox has something new."""
        ...

    def stepped(self, report: StepReport, started_ms: int) -> None:
        """The engine made a step, and its outcome is in the outbox."""
        ...

    def engine_died(self, error: BaseException) -> None:
        """The engine's books are broken, and everything is handed back."""
        ...

    def let_go(self) -> None:
        """An attempt has left the board."""
        ...


class JobFlow:
    """Hears the exchange, the lease keeper and the engine, and moves attempts on."""

    def __init__(
        self,
        worker_id: str,
        engine: Engine,
        tokenizer: ChatTokenizer,
        policy: RetryPolicy,
        *,
        owner: Owner,
        board: Board,
        outbox: Outbox,
        clock: ServerClock,
        structures: StructureCompiler,
        adapters: AdapterShelf | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._board = board
        self._clock = clock
        self._publisher = Publisher(worker_id, outbox, policy)
        self._structures = structures
        self._adapters = adapters
        self._loans = Loans(
            adapters, lambda attempt, order: self._start_admission(attempt, order, self._admissions)
        )
        self._admissions = ThreadPoolExecutor(1, thread_name_prefix="admission")
        # Apart, so that nobody else waits for what takes long; their number bounds the cores it takes.
        self._slow_admissions = ThreadPoolExecutor(NUM_SLOW_ADMISSIONS, thread_name_prefix="slow-admission")
        self._num_boarded = 0
        self._owner = owner
        self.thread = EngineThread(engine, clock, self)

    def start(self) -> None:
        """Begin to step."""
        self.thread.start()

    async def stop(self) -> None:
        """End after the step under way, and with it all admissions."""
        await self.thread.stop()
        self._admissions.shutdown(cancel_futures=True)
        self._slow_admissions.shutdown(wait=False, cancel_futures=True)

    # From Redis.

    def claimed(self, prefix: str, reply: ClaimReply) -> None:
        """New jobs go to admission; cancelled ones leave the engine."""
        for job_id, epoch in reply.cancels:
            attempt = self._board.get(f"{job_id} {epoch}")
            if attempt is not None:
                self.cancelled(attempt)
        for job in reply.jobs:
            former = self._board.find(job.job_id)
            if former is not None and former.job.epoch != job.epoch:
                self.lost(former)
            try:
                attempt = Attempt(prefix, job)
            except msgspec.MsgspecError as error:
                reason = f"the job's log cannot be read: {error}"
                self._cannot_read(prefix, UnreadableJob(job.job_id, job.epoch, job.seq, reason))
                continue
            if self._board.get(attempt.key) is None:
                self._take_aboard(attempt)
        for unreadable in reply.unreadable:
            self._cannot_read(prefix, unreadable)

    def answered(self, parcel: Parcel, answers: Sequence[str]) -> None:
        """A refused event or ending means that the attempt is no longer ours."""
        for key, answer in zip(parcel.keys, answers, strict=True):
            attempt = self._board.get(key)
            if attempt is not None and answer in ("lost", "gap"):
                log.warning("job %s: %s refused: %s", attempt.job.job_id, parcel.kind, answer)
                self.lost(attempt)
                if answer == "gap":
                    self._publisher.handed_back([attempt])

    def lost(self, attempt: Attempt) -> None:
        """The lease is gone: stop work that is another's now."""
        self._tell(Cancel(attempt.key))
        self._let_go(attempt)

    def cancelled(self, attempt: Attempt) -> None:
        """Its user does not want it any more."""
        self._tell(Cancel(attempt.key))
        self._publisher.cancelled(attempt, self._clock.now_ms())
        self._let_go(attempt)
        self._owner.has_outgoing()

    # From the engine.

    def stepped(self, report: StepReport, started_ms: int) -> None:
        """Publish a step's outcome."""
        now_ms = self._clock.now_ms()
        by_job: dict[str, list[TokenDelta]] = defaultdict(list)
        for delta in report.deltas:
            by_job[delta.job_id].append(delta)
        for key, deltas in by_job.items():
            attempt = self._board.get(key)
            if attempt is not None:
                self._publisher.tokens(attempt, deltas, now_ms)
        for key in report.ended:
            attempt = self._board.get(key)
            if attempt is not None:
                self._publisher.finished(attempt, now_ms)
                log.info("job %s finished: %d tokens", attempt.job.job_id, attempt.choices.num_tokens)
                self._let_go(attempt)
        for failure in report.failures:
            self.refused(failure)
        self._owner.stepped(report, started_ms)
        self._owner.has_outgoing()

    def refused(self, failure: Failure) -> None:
        """A job that cannot run, or no further."""
        attempt = self._board.get(failure.job_id)
        if attempt is not None:
            log.info("job %s failed: %s", attempt.job.job_id, failure.code)
            self._publisher.failed(attempt, failure.code, failure.message, self._clock.now_ms())
            self._let_go(attempt)
            self._owner.has_outgoing()

    def broke_down(self, job_ids: tuple[str, ...], reason: str) -> None:
        """Alone on board, a job has failed; in company each is a suspect and goes on apart."""
        attempts = [attempt for key in job_ids if (attempt := self._board.get(key)) is not None]
        if len(attempts) == 1:
            self._fail(attempts[0], reason)
        else:
            self.hand_back(attempts, spent=True)

    def died(self, error: BaseException) -> None:
        """Nothing can run here any more.

        Where it is the device that is gone, those on board now have not met it: nothing is spent, or the last
        try of a job would be lost with it.
        """
        self.hand_back(list(self._board), spent=not isinstance(error, EngineBroken))
        self._owner.engine_died(error)

    def hand_back(self, attempts: Sequence[Attempt], *, spent: bool = False) -> None:
        """Give attempts up, so that another worker goes on with them."""
        for attempt in attempts:
            self._tell(Cancel(attempt.key))
        self._publisher.handed_back(attempts, spent=spent)
        for attempt in attempts:
            self._let_go(attempt)
        self._owner.has_outgoing()

    # The steps between.

    def _cannot_read(self, prefix: str, job: UnreadableJob) -> None:
        """Somebody put into Redis what the protocol does not permit; it must cost nobody but that job."""
        log.warning("job %s failed: it cannot be read", job.job_id)
        log.debug("job %s: %s", job.job_id, job.reason)
        self._publisher.unreadable(prefix, job, self._clock.now_ms())
        self._owner.has_outgoing()

    def _take_aboard(self, attempt: Attempt) -> None:
        """Admit it, unless another partition's claim of the same turn brought what must not ride with it."""
        others = list(self._board)
        self._board.add(attempt)
        if attempt.rides_alone:
            self.hand_back(others)
        elif any(other.rides_alone or (other.is_suspect and attempt.is_suspect) for other in others):
            self.hand_back([attempt])
            return
        log.info("job %s boarded: attempt %d", attempt.job.job_id, attempt.job.epoch)
        self._admit(attempt)

    def _admit(self, attempt: Attempt) -> None:
        order, self._num_boarded = self._num_boarded, self._num_boarded + 1
        self._start_admission(attempt, order, self._admissions)

    def _start_admission(self, attempt: Attempt, order: int, pool: ThreadPoolExecutor) -> None:
        may_take_long = pool is self._slow_admissions
        needed = (self._tokenizer, self._structures, self._adapters)
        work = partial(admit, attempt, *needed, order, may_take_long=may_take_long)
        future = asyncio.get_running_loop().run_in_executor(pool, work)
        future.add_done_callback(lambda done: self._admitted(attempt, order, done))

    def _admitted(self, attempt: Attempt, order: int, done: asyncio.Future[Admitted]) -> None:
        if done.cancelled():
            return
        if self._board.get(attempt.key) is None:
            self._loans.came_too_late(order, done)
            return
        error = done.exception()
        if error is not None and not isinstance(error, TakesLong | NoRoom):
            self._loans.give_up(order)
        if isinstance(error, TakesLong):
            self._start_admission(attempt, order, self._slow_admissions)
        elif isinstance(error, NoRoom):
            self._loans.wait(attempt, order, error)
        elif isinstance(error, OtherWeights):
            log.warning("job %s cannot go on here: %s", attempt.job.job_id, error)
            self._fail(attempt, str(error))
        elif isinstance(error, InvalidJob):
            self.refused(Failure(attempt.key, "invalid", str(error)))
        elif error is not None:
            log.error("job %s: admission broke down: %s", attempt.job.job_id, type(error).__name__)
            log.debug("job %s", attempt.job.job_id, exc_info=error)  # may quote the prompt
            self._fail(attempt, f"admission: {type(error).__name__}")
        else:
            self._board_admitted(attempt, done.result())

    def _board_admitted(self, attempt: Attempt, admitted: Admitted) -> None:
        if admitted.loan is not None:
            attempt.adapter = admitted.loan.adapter.digest
            self._loans.lend(attempt, admitted.loan)
        self._tell(Add(admitted.request))

    def _fail(self, attempt: Attempt, reason: str) -> None:
        self._publisher.attempt_failed(attempt, reason)
        self._let_go(attempt)
        self._owner.has_outgoing()

    def _let_go(self, attempt: Attempt) -> None:
        self._board.drop(attempt.key)
        self._loans.let_go(attempt)
        self._owner.let_go()

    def _tell(self, command: Add | Cancel) -> None:
        self.thread.tell(command)
