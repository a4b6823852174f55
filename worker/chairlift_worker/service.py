"""The worker: intake, engine thread, publisher, leases and drain in one task group.

Redis ⇄ Exchange ─ claimed ─→ admission ─→ EngineThread ─ reports ─→ Publisher ─→ Outbox ─→ Exchange
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from redis.exceptions import RedisError

from chairlift_client import calls, keys
from chairlift_client.connection import Shards
from chairlift_client.errors import InvalidJob, ServerUnavailable
from chairlift_client.worker_operations import ClaimReply, depart, fail, hand_back
from chairlift_worker.config import WorkerConfig
from chairlift_worker.engine.engine import Engine
from chairlift_worker.engine.request import Failure, StepReport
from chairlift_worker.engine_thread import Add, Cancel, EngineThread
from chairlift_worker.heartbeat import Heartbeat, open_partitions
from chairlift_worker.models.loading import LoadedModel
from chairlift_worker.queue import wake
from chairlift_worker.queue.admission import admit
from chairlift_worker.queue.attempts import Attempt, Board
from chairlift_worker.queue.clock import ServerClock
from chairlift_worker.queue.exchange import Exchange
from chairlift_worker.queue.leases import LeaseKeeper
from chairlift_worker.queue.outbox import Outbox, Parcel
from chairlift_worker.queue.publisher import Publisher
from chairlift_worker.step_log import StepLog

log = logging.getLogger(__name__)


class Worker:
    """One model, one engine, one place in the queue. `run` until `drain` or `stop_now`."""

    def __init__(
        self, config: WorkerConfig, model: LoadedModel, engine: Engine, shards: Shards, worker_id: str
    ) -> None:
        self.id = worker_id
        self._config = config
        self._model = model
        self._shards = shards
        self._clock = ServerClock()
        self._board = Board(config.max_num_seqs, config.lookahead)
        self._outbox = Outbox(worker_id)
        self._publisher = Publisher(worker_id, self._outbox)
        self._step_log = StepLog(config.step_log)
        self._heartbeat = Heartbeat(
            config, model.runner.spec, model.fingerprint, shards, worker_id, self._board
        )
        self._thread = EngineThread(engine, self._clock, self)
        self._admissions = ThreadPoolExecutor(1, thread_name_prefix="admission")
        self._exchanges: list[Exchange] = []
        self._prefixes: list[str] = []
        self._num_boarded = 0
        self._draining = asyncio.Event()
        self._stopping = asyncio.Event()
        self._emptied = asyncio.Event()
        self._death: BaseException | None = None

    async def run(self) -> None:
        """Announce, work until told otherwise, and leave nothing behind."""
        partitions = await self._heartbeat.announce()
        name, namespace = self._config.model_name, self._config.namespace
        self._prefixes = [keys.prefix(namespace, name, index) for index in range(partitions)]
        await open_partitions(self._config, self._model.runner.spec, self._shards, self._prefixes)
        self._exchanges = self._make_exchanges()
        leases = self._make_leases()
        self._thread.start()
        log.info("worker %s serves %s on %d partitions", self.id, name, partitions)
        try:
            async with asyncio.TaskGroup() as tasks:
                background = [
                    tasks.create_task(work)
                    for work in (
                        *(exchange.run() for exchange in self._exchanges),
                        *(self._listen(exchange) for exchange in self._exchanges),
                        leases.keep(),
                        leases.sweep(),
                        self._heartbeat.run(),
                    )
                ]
                await self._draining.wait()
                await self._finish_within_grace()
                for task in background:
                    task.cancel()
            await self._leave()
        finally:
            await self._thread.stop()
            self._admissions.shutdown()
            self._step_log.close()
        if self._death is not None:
            raise self._death

    def drain(self) -> None:
        """Board no more, finish what rides within the grace period, hand the rest back. Twice: at once."""
        if self._draining.is_set():
            self.stop_now()
        self._board.closed = True
        self._draining.set()
        log.info("worker %s drains: %d jobs on board", self.id, len(self._board))
        self._note_if_empty()

    def stop_now(self) -> None:
        """Hand everything back now."""
        self._board.closed = True
        self._stopping.set()
        self._draining.set()

    # What the exchange tells.

    def claimed(self, prefix: str, reply: ClaimReply) -> None:
        """New jobs go to admission; cancelled ones leave the engine."""
        for job_id, epoch in reply.cancels:
            attempt = self._board.get(f"{job_id} {epoch}")
            if attempt is not None:
                self._cancel(attempt)
        for job in reply.jobs:
            former = self._board.find(job.job_id)
            if former is not None and former.job.epoch != job.epoch:
                self._lose(former)
            attempt = Attempt(prefix, job)
            if self._board.get(attempt.key) is None:
                self._board.add(attempt)
                log.info("job %s boarded: attempt %d", job.job_id, job.epoch)
                self._admit(attempt)

    def answered(self, parcel: Parcel, answers: Sequence[str]) -> None:
        """A refused event or ending means that the attempt is no longer ours."""
        for key, answer in zip(parcel.keys, answers, strict=True):
            attempt = self._board.get(key)
            if attempt is not None and answer in ("lost", "gap"):
                log.warning("job %s: %s refused: %s", attempt.job.job_id, parcel.kind, answer)
                self._lose(attempt)
                if answer == "gap":
                    self._hand_back([attempt])

    # What the engine tells.

    def stepped(self, report: StepReport) -> None:
        """Publish a step's outcome."""
        now_ms = self._clock.now_ms()
        for delta in report.deltas:
            attempt = self._board.get(delta.job_id)
            if attempt is None:
                continue
            if delta.token_ids or delta.text:
                self._publisher.tokens(attempt, delta, now_ms)
            if delta.finish_reason is not None:
                self._publisher.finished(attempt, delta, now_ms)
                self._let_go(attempt)
        for failure in report.failures:
            self.refused(failure)
        self._board.num_stalled = report.stats.num_waiting
        self._heartbeat.last_step = report.stats
        self._heartbeat.num_tokens += sum(len(delta.token_ids) for delta in report.deltas)
        self._step_log.write(report.stats, now_ms)
        self._ring()

    def refused(self, failure: Failure) -> None:
        """A job that cannot run, or no further."""
        attempt = self._board.get(failure.job_id)
        if attempt is not None:
            log.info("job %s failed: %s", attempt.job.job_id, failure.code)
            self._publisher.failed(attempt, failure.code, failure.message, self._clock.now_ms())
            self._let_go(attempt)
            self._ring()

    def broke_down(self, job_ids: tuple[str, ...], reason: str) -> None:
        """Alone on board, a job has failed; in company each is a suspect and goes on apart."""
        attempts = [attempt for key in job_ids if (attempt := self._board.get(key)) is not None]
        if len(attempts) == 1:
            self._fail(attempts[0], reason)
        else:
            self._hand_back(attempts, spent=True)
        for attempt in attempts:
            self._let_go(attempt)
        self._ring()

    def died(self, error: BaseException) -> None:
        """The engine's books are broken; nothing can run here any more."""
        self._death = error
        self._hand_back(list(self._board), spent=True)
        for attempt in self._board:
            self._let_go(attempt)
        self.stop_now()

    # Steps of a job's way.

    def _admit(self, attempt: Attempt) -> None:
        order, self._num_boarded = self._num_boarded, self._num_boarded + 1
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self._admissions, admit, attempt, self._model.tokenizer, order)
        future.add_done_callback(lambda done: self._admitted(attempt, done))

    def _admitted(self, attempt: Attempt, done: asyncio.Future) -> None:  # type: ignore[type-arg]
        if self._board.get(attempt.key) is None or done.cancelled():
            return
        error = done.exception()
        if isinstance(error, InvalidJob):
            self.refused(Failure(attempt.key, "invalid", str(error)))
        elif error is not None:
            log.error("job %s: admission broke down", attempt.job.job_id, exc_info=error)
            self._fail(attempt, f"admission: {type(error).__name__}")
            self._let_go(attempt)
            self._ring()
        else:
            self._thread.tell(Add(done.result()))

    def _cancel(self, attempt: Attempt) -> None:
        self._thread.tell(Cancel(attempt.key))
        self._publisher.cancelled(attempt, self._clock.now_ms())
        self._let_go(attempt)
        self._ring()

    def _lose(self, attempt: Attempt) -> None:
        self._thread.tell(Cancel(attempt.key))
        self._let_go(attempt)

    def _fail(self, attempt: Attempt, reason: str) -> None:
        call = fail(
            attempt.prefix,
            self.id,
            attempt.job.job_id,
            attempt.job.epoch,
            reason=reason,
            jitter=random.random(),
            policy=self._config.retry_policy,
        )
        self._outbox.end(attempt.prefix, Parcel("fail", (attempt.key,), call))

    def _hand_back(self, attempts: Sequence[Attempt], *, spent: bool = False) -> None:
        groups: dict[str, list[Attempt]] = defaultdict(list)
        for attempt in attempts:
            groups[attempt.prefix].append(attempt)
        for prefix, group in groups.items():
            pairs = [(attempt.job.job_id, attempt.job.epoch) for attempt in group]
            call = hand_back(prefix, self.id, pairs, policy=self._config.retry_policy, spent=spent)
            self._outbox.end(prefix, Parcel("hand_back", tuple(a.key for a in group), call))

    def _let_go(self, attempt: Attempt) -> None:
        self._board.drop(attempt.key)
        self._note_if_empty()

    # Drain.

    def _note_if_empty(self) -> None:
        if self._draining.is_set() and not len(self._board):
            self._emptied.set()

    async def _finish_within_grace(self) -> None:
        waits = [asyncio.ensure_future(event.wait()) for event in (self._emptied, self._stopping)]
        await asyncio.wait(waits, timeout=self._config.grace_s, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    async def _leave(self) -> None:
        """Hand back what is left and sign off; within a lease, or the leases lapse by themselves."""
        try:
            async with asyncio.timeout(self._config.lease_s):
                await self._hand_over()
        except (TimeoutError, RedisError, ServerUnavailable) as error:
            log.warning("left without a word: %s: %s", type(error).__name__, error)

    async def _hand_over(self) -> None:
        for exchange in self._exchanges:
            await exchange.flush()
        left = list(self._board)
        for attempt in left:
            self._thread.tell(Cancel(attempt.key))
        self._hand_back(left)
        for attempt in left:
            self._let_go(attempt)
        for exchange in self._exchanges:
            await exchange.flush()
        shared = keys.shared(self._config.namespace)
        await calls.run(self._shards.shard_of(shared).redis, depart(shared, self.id))
        log.info("worker %s left: %d jobs handed back", self.id, len(left))

    # Wiring.

    def _ring(self) -> None:
        for exchange in self._exchanges:
            exchange.ring()

    def _make_exchanges(self) -> list[Exchange]:
        groups: dict[str, list[str]] = defaultdict(list)
        for prefix in self._prefixes:
            groups[str(self._shards.shard_of(prefix).address)].append(prefix)
        return [
            Exchange(
                self._shards,
                prefixes,
                self.id,
                lease_ms=self._config.lease_ms,
                board=self._board,
                outbox=self._outbox,
                clock=self._clock,
                answers=self,
            )
            for prefixes in groups.values()
        ]

    def _make_leases(self) -> LeaseKeeper:
        return LeaseKeeper(
            self._shards,
            self._prefixes,
            self.id,
            lease_ms=self._config.lease_ms,
            policy=self._config.retry_policy,
            board=self._board,
            on_lost=self._lose,
            on_cancelled=self._cancel,
        )

    async def _listen(self, exchange: Exchange) -> None:
        def on_wake() -> None:
            if self._board.has_room:
                exchange.ring()

        await wake.listen(self._shards, await exchange.first_wakes, on_wake)
