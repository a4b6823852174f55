"""A runner that computes a step only when it is let to, so that a test can hold a worker in any state."""

from __future__ import annotations

import threading
from collections.abc import Callable
from collections.abc import Sequence as Seq

from torch import Tensor

from chairlift_worker.engine.batch import Chunk
from chairlift_worker.engine.runner import Runner, RunnerSpec
from servers import until


class GatedRunner:
    """Stands still before every step that is not allowed yet."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._permits = threading.Semaphore(0)
        self._is_open = False
        self.at_gate: tuple[Chunk, ...] | None = None
        """What the step that stands still is to compute; None while none does."""

    @property
    def spec(self) -> RunnerSpec:
        return self._runner.spec

    def forward(self, chunks: Seq[Chunk]) -> Tensor:
        self.at_gate = tuple(chunks)
        if not self._is_open:
            self._permits.acquire()
        self.at_gate = None
        return self._runner.forward(chunks)

    def open(self) -> None:
        """From now on every step is allowed."""
        self._is_open = True
        self._permits.release()

    async def stands(self) -> tuple[Chunk, ...]:
        """What the next step is, once it stands at the gate."""

        async def is_there() -> bool:
            return self.at_gate is not None

        await until(is_there)
        assert self.at_gate is not None
        return self.at_gate

    async def step(self) -> None:
        """Allow one step."""
        before = await self.stands()
        self._permits.release()

        async def is_gone() -> bool:
            return self.at_gate is not before

        await until(is_gone)

    async def step_until(self, wanted: Callable[[tuple[Chunk, ...]], bool]) -> tuple[Chunk, ...]:
        """Step until the next one is as wanted, and hold it there."""
        while not wanted(await self.stands()):
            await self.step()
        return await self.stands()
