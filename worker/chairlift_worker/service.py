"""The worker: intake, engine thread, publisher, leases and drain.

Redis ⇄ Exchange ─ claimed ─→ JobFlow ─→ EngineThread ─ reports ─→ JobFlow ─→ Outbox ─→ Exchange
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any

from redis.exceptions import RedisError

from chairlift_client import calls, keys
from chairlift_client.connection import Shards
from chairlift_client.errors import ServerUnavailable
from chairlift_client.worker_operations import depart
from chairlift_worker.background import run_until
from chairlift_worker.config import WorkerConfig
from chairlift_worker.engine.engine import Engine
from chairlift_worker.engine.request import StepReport
from chairlift_worker.flow import JobFlow
from chairlift_worker.heartbeat import Heartbeat
from chairlift_worker.models.adapter_shelf import AdapterShelf
from chairlift_worker.models.loading import LoadedModel
from chairlift_worker.probes import Probes
from chairlift_worker.queue import wake
from chairlift_worker.queue.attempts import Board
from chairlift_worker.queue.clock import ServerClock
from chairlift_worker.queue.exchange import Exchange
from chairlift_worker.queue.leases import LeaseKeeper
from chairlift_worker.queue.outbox import Outbox
from chairlift_worker.step_log import StepLog
from chairlift_worker.structured.compiler import StructureCompiler

log = logging.getLogger(__name__)


class Worker:
    """One model, one engine, one place in the queue. `run` until `drain` or `stop_now`."""

    def __init__(
        self,
        config: WorkerConfig,
        model: LoadedModel,
        engine: Engine,
        shards: Shards,
        worker_id: str,
        *,
        adapters: AdapterShelf | None = None,
    ) -> None:
        self.id = worker_id
        self._config = config
        self._shards = shards
        self._spec = model.runner.spec
        self._clock = ServerClock()
        self._board = Board(config.max_num_seqs, config.lookahead)
        self._outbox = Outbox(worker_id)
        self._step_log = StepLog(config.step_log)
        self._flow = JobFlow(
            worker_id,
            engine,
            model.tokenizer,
            config.retry_policy,
            owner=self,
            board=self._board,
            outbox=self._outbox,
            clock=self._clock,
            adapters=adapters,
            structures=StructureCompiler(
                model.tokenizer.backend, vocab_size=self._spec.vocab_size, endings=self._spec.eos_token_ids
            ),
        )
        self._heartbeat = Heartbeat(
            config,
            self._spec,
            model.fingerprint,
            shards,
            worker_id,
            self._board,
            lambda: self.num_used_blocks,
            adapters,
        )
        self._probes = Probes(
            config.ready_file,
            config.alive_file,
            is_ready=self._is_ready,
            is_alive=lambda: self._flow.thread.is_well,
        )
        self._heartbeat.on_growth = self._note_growth
        self._exchanges: dict[str, Exchange] = {}
        self._num_partitions = 0
        self._grown = asyncio.Event()
        self._draining = asyncio.Event()
        self._stopping = asyncio.Event()
        self._emptied = asyncio.Event()
        self._death: BaseException | None = None

    @property
    def num_turns(self) -> int:
        """Pipelines sent so far, over all shards."""
        return sum(exchange.num_turns for exchange in self._exchanges.values())

    @property
    def num_used_blocks(self) -> int:
        """Blocks of the KV pool that jobs hold just now."""
        return self._flow.thread.num_used_blocks

    async def run(self) -> None:
        """Announce, work until told otherwise, and leave nothing behind."""
        self._serve(await self._heartbeat.announce())
        await self._heartbeat.open_partitions()
        self._flow.start()
        try:
            await self._work()
            await self._leave()
        finally:
            await self._flow.stop()
            self._probes.remove()
            self._step_log.close()
        if self._death is not None:
            raise self._death

    def drain(self) -> None:
        """Board no more, finish what rides within the grace period, hand the rest back. Twice: at once."""
        if self._draining.is_set():
            self.stop_now()
        self._board.closed = True
        self._draining.set()
        self._probes.update()
        log.info("worker %s drains: %d jobs on board", self.id, len(self._board))
        self.let_go()

    def stop_now(self) -> None:
        """Hand everything back now."""
        self._board.closed = True
        self._stopping.set()
        self._draining.set()

    # What the flow tells its owner.

    def has_outgoing(self) -> None:
        """The outbox has something new."""
        for exchange in self._exchanges.values():
            exchange.ring()

    def stepped(self, report: StepReport, started_ms: int) -> None:
        """Note a step for the claims to come, the heartbeat and the step log."""
        self._board.num_stalled = report.stats.num_waiting
        self._heartbeat.last_step = report.stats
        self._heartbeat.num_tokens += sum(len(delta.token_ids) for delta in report.deltas)
        self._step_log.write(report.stats, started_ms)

    def engine_died(self, error: BaseException) -> None:
        """Stop; the error comes out of `run`."""
        self._death = error
        self.stop_now()

    def let_go(self) -> None:
        """In a drain, the last attempt that leaves ends the wait."""
        if self._draining.is_set() and not len(self._board):
            self._emptied.set()

    def _serve(self, partitions: int) -> None:
        """All partitions of the model, of which some may be served already. Not while exchanges run."""
        name, namespace = self._config.model_name, self._config.namespace
        prefixes = [keys.prefix(namespace, name, index) for index in range(partitions)]
        groups: dict[str, list[str]] = {address: [] for address in self._exchanges}
        for prefix in prefixes[len(self._heartbeat.prefixes) :]:
            groups.setdefault(str(self._shards.shard_of(prefix).address), []).append(prefix)
        for address, group in groups.items():
            if address in self._exchanges:
                self._exchanges[address].serve(group)
            else:
                self._exchanges[address] = self._make_exchange(group)
        self._heartbeat.prefixes = prefixes
        log.info("worker %s serves %s on %d partitions", self.id, name, partitions)

    async def _work(self) -> None:
        """Until drained; anew, with the new partitions, when another worker has made them more.

        If those were left to that worker alone, their jobs would wait for ever once it is gone.
        """
        await run_until(self._drained_or_grown(), self._works())
        while self._grown.is_set():
            self._grown.clear()
            self._serve(self._num_partitions)
            await run_until(self._drained_or_grown(), self._works())

    def _works(self) -> Iterator[Coroutine[Any, Any, None]]:
        leases = self._make_leases(self._heartbeat.prefixes)
        for exchange in self._exchanges.values():
            yield exchange.run()
            yield self._listen(exchange)
        yield leases.keep()
        yield leases.sweep()
        yield self._heartbeat.run()
        yield self._probes.run()

    async def _drained_or_grown(self) -> None:
        ends = [asyncio.ensure_future(end) for end in (self._drained(), self._grown.wait())]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()

    async def _drained(self) -> None:
        """Returns when a drain has done, within its grace, what it could."""
        await self._draining.wait()
        waits = [asyncio.ensure_future(event.wait()) for event in (self._emptied, self._stopping)]
        await asyncio.wait(waits, timeout=self._config.grace_s, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    async def _leave(self) -> None:
        """Hand back what is left and sign off; within a lease, or the leases lapse by themselves."""
        try:
            async with asyncio.timeout(self._config.lease_s):
                await self._flush()
                left = list(self._board)
                self._flow.hand_back(left)
                await self._flush()
                shared = keys.shared(self._config.namespace)
                await calls.run(self._shards.shard_of(shared).redis, depart(shared, self.id))
        except (TimeoutError, RedisError, ServerUnavailable) as error:
            log.warning("left without a word: %s: %s", type(error).__name__, error)
        else:
            log.info("worker %s left: %d jobs handed back", self.id, len(left))

    async def _flush(self) -> None:
        for exchange in self._exchanges.values():
            await exchange.flush()

    async def _listen(self, exchange: Exchange) -> None:
        def on_wake() -> None:
            if self._board.has_room:
                exchange.ring()

        await wake.listen(self._shards, await exchange.first_wakes, on_wake)

    def _is_ready(self) -> bool:
        """Redis has answered, and nobody has told it to go."""
        return not self._draining.is_set() and all(e.first_wakes.done() for e in self._exchanges.values())

    def _note_growth(self, partitions: int) -> None:
        if not self._draining.is_set():
            self._num_partitions = partitions
            self._grown.set()

    def _make_exchange(self, prefixes: Sequence[str]) -> Exchange:
        return Exchange(
            self._shards,
            prefixes,
            self.id,
            lease_ms=self._config.lease_ms,
            board=self._board,
            outbox=self._outbox,
            clock=self._clock,
            answers=self._flow,
        )

    def _make_leases(self, prefixes: Sequence[str]) -> LeaseKeeper:
        return LeaseKeeper(
            self._shards,
            prefixes,
            self.id,
            lease_ms=self._config.lease_ms,
            policy=self._config.retry_policy,
            board=self._board,
            on_lost=self._flow.lost,
            on_lapsed=self._flow.hand_back,
            on_cancelled=self._flow.cancelled,
        )
