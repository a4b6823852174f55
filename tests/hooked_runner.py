"""A runner that does something bad when it meets certain tokens, or keeps a slow pace; the rest is real."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence as Seq
from typing import Literal, NamedTuple

from torch import Tensor

from chairlift_worker.engine.batch import Chunk
from chairlift_worker.engine.runner import Runner, RunnerSpec

Deed = Literal["exit", "raise", "sleep"]


class Hooks(NamedTuple):
    """`trigger` is a run of token ids; a chunk that has it in it causes the `deed`."""

    trigger: tuple[int, ...] = ()
    deed: Deed = "exit"
    sleep_s: float = 0.0
    step_s: float = 0.0
    """Every step takes at least this long."""
    clock_skew_s: float = 0.0
    """How far the process' wall clock is off; SIGUSR1 turns it the other way."""


class HookedRunner:
    """Wraps a runner."""

    def __init__(self, runner: Runner, hooks: Hooks) -> None:
        self._runner = runner
        self._hooks = hooks

    @property
    def spec(self) -> RunnerSpec:
        return self._runner.spec

    def forward(self, chunks: Seq[Chunk]) -> Tensor:
        if self._hooks.trigger and any(self._has_trigger(chunk.token_ids) for chunk in chunks):
            self._do()
        if self._hooks.step_s:
            time.sleep(self._hooks.step_s)
        return self._runner.forward(chunks)

    def _has_trigger(self, token_ids: tuple[int, ...]) -> bool:
        trigger = self._hooks.trigger
        starts = range(len(token_ids) - len(trigger) + 1)
        return any(token_ids[start : start + len(trigger)] == trigger for start in starts)

    def _do(self) -> None:
        match self._hooks.deed:
            case "exit":
                os._exit(137)
            case "raise":
                raise RuntimeError("the model broke down, as it was told to")
            case "sleep":
                time.sleep(self._hooks.sleep_s)
