"""One chaos run: load, faults, and the verdict. `python -m chaos.run --minutes 30 --seed 1`"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, get_args

from chairlift_client import Client
from chairlift_client.errors import ChairliftError
from chaos.cases import Case, draw_ask
from chaos.checker import Checker, Verdict
from chaos.faults import LOSSY_WEIGHTS, WEIGHTS, draw_schedule
from chaos.injector import Injector
from chaos.oracle import Oracle
from chaos.report import Report
from chaos.world import LEASE_S, NAMESPACE, World
from loads import Order, draw_orders
from servers import Flavour, available_flavours, until

RESULT_TTL_S = 120.0
PATIENCE_S = 60.0
"""Within this after the last fault everything must have ended."""


class Plan(NamedTuple):
    """What to run."""

    seed: int
    duration_s: float
    flavour: Flavour = "valkey"
    mean_gap_s: float = 1.2
    jobs_per_s: float = 4.0
    num_orders: int = 200
    is_lossy: bool = False
    limit: int = 10**9
    """At most so many jobs."""


class Chaos:
    """A run in the making."""

    def __init__(self, plan: Plan, world: World, orders: list[Order], checker: Checker) -> None:
        self._plan = plan
        self._world = world
        self._orders = orders
        self._checker = checker
        self._rng = random.Random(plan.seed + 1)
        self._cases: set[Case] = set()
        self._following: set[asyncio.Task[None]] = set()
        self.report = Report(plan.seed)

    async def run(self) -> Report:
        """Everything, to the verdict."""
        plan, report = self._plan, self.report
        weights = LOSSY_WEIGHTS if plan.is_lossy else WEIGHTS
        schedule = draw_schedule(
            plan.seed, plan.duration_s, mean_gap_s=plan.mean_gap_s, lease_s=LEASE_S, weights=weights
        )
        injector = Injector(self._world, self._note_kill)
        async with (
            Client(self._world.subscribers.url, namespace=NAMESPACE) as subscriber,
            Client(self._world.producers.url, namespace=NAMESPACE) as producer,
        ):
            supervising = asyncio.create_task(self._world.supervise())
            producing = asyncio.create_task(self._produce(producer, subscriber))
            await injector.run(schedule)
            await self._world.heal()
            await self._end(producing)
        await self._look_around()
        supervising.cancel()
        await self._world.stop_workers()
        report.faults = injector.done
        report.bytes_lost = injector.bytes_lost
        report.problems += [f"died: {death}" for death in self._world.died]
        report.counts.update(self._world.counts)
        return report

    async def _produce(self, producer: Client, subscriber: Client) -> None:
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + self._plan.duration_s
        serial = 0
        async with asyncio.TaskGroup() as tasks:
            while loop.time() < ends_at and serial < self._plan.limit:
                tasks.create_task(self._submit(producer, subscriber, serial))
                serial += 1
                await asyncio.sleep(self._rng.expovariate(self._plan.jobs_per_s))

    async def _submit(self, producer: Client, subscriber: Client, serial: int) -> None:
        """Until it is in line; its key makes one job of however many tries."""
        ask = draw_ask(self._rng, len(self._orders), serial)
        request = {**self._orders[ask.order].request(), **ask.options, "result_ttl_s": RESULT_TTL_S}
        while True:
            try:
                job = await producer.submit(allow_unknown_model=True, **request)
                break
            except ChairliftError as error:
                self.report.errors[f"submit: {type(error).__name__}"] += 1
                await asyncio.sleep(0.2)
        case = Case(job.id, ask)
        self._cases.add(case)
        self.report.num_jobs += 1
        task = asyncio.create_task(self._follow(case, subscriber))
        self._following.add(task)
        task.add_done_callback(self._following.discard)

    async def _follow(self, case: Case, subscriber: Client) -> None:
        await case.follow(subscriber, self._rng)
        await self._judge(case)

    async def _judge(self, case: Case) -> None:
        """Soon after its end, and before its keys are gone."""
        if self._plan.is_lossy:
            with suppress(TimeoutError):
                await until(lambda: self._judge_ended(case), PATIENCE_S)
        if case in self._cases:
            async with self._world.server_lock:
                verdict = await asyncio.to_thread(self._checker.judge, case)
            self._take(case, verdict)

    async def _judge_ended(self, case: Case) -> bool:
        """Whether it has ended and been judged. A server may lose the end that was heard: the job runs again.

        A power cut may come between a look and a verdict, so that both are under one lock.
        """
        async with self._world.server_lock:
            if not self._checker.has_ended(case):
                return False
            verdict = await asyncio.to_thread(self._checker.judge, case)
        self._take(case, verdict)
        return True

    def _take(self, case: Case, verdict: Verdict) -> None:
        self._cases.discard(case)
        self.report.take(case, verdict, is_lossy=self._plan.is_lossy)

    async def _end(self, producing: asyncio.Task[None]) -> None:
        """Everybody has heard everything; who has not is judged as it is."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                await producing
                while self._following:
                    await asyncio.wait(self._following)
        except TimeoutError:
            pass
        for task in tuple(self._following):
            task.cancel()
        await asyncio.gather(*self._following, return_exceptions=True)
        for case in tuple(self._cases):
            await self._judge(case)

    async def _look_around(self) -> None:
        """Nothing may be left; heartbeats may take a moment to say so."""

        async def is_quiet() -> bool:
            return not self._checker.busy_workers() and not self._checker.leaks()

        try:
            await until(is_quiet, 5 * LEASE_S)
        except TimeoutError:
            self.report.problems += self._checker.busy_workers() + self._checker.leaks()

    def _note_kill(self, worker: str, at_ms: int) -> None:
        for case in self._cases:
            if case.worker.startswith(f"{worker}-") and not case.is_over and not case.killed_ms:
                case.killed_ms = at_ms


async def run_chaos(plan: Plan, folder: Path) -> Report:
    """Raises nothing for what the faults did: the report has it."""
    orders = draw_orders(plan.seed, plan.num_orders, max_tokens=120)
    oracle = Oracle(orders)
    async with World(plan.flavour, folder, is_lossy=plan.is_lossy) as world:
        with world.server.client() as client:
            checker = Checker(client, NAMESPACE, oracle, is_lossy=plan.is_lossy)
            return await Chaos(plan, world, orders, checker).run()


def main() -> int:
    """0 when nothing was lost, doubled, wrong or leaked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    parser.add_argument("--flavour", choices=get_args(Flavour), default=available_flavours()[0])
    parser.add_argument("--lossy", action="store_true", help="appendfsync everysec and power cuts")
    parser.add_argument("--gap", type=float, default=1.2, help="mean seconds between faults")
    options = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    plan = Plan(
        options.seed,
        options.minutes * 60,
        options.flavour,
        mean_gap_s=options.gap,
        is_lossy=options.lossy,
    )
    folder = Path(tempfile.mkdtemp(prefix="chairlift-chaos-"))
    print(f"{plan}\nworkers' logs: {folder}", flush=True)
    report = asyncio.run(run_chaos(plan, folder))
    print(report.table())
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
