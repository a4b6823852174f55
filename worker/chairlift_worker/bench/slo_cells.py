"""The cells of `chairlift bench slo`: each prefill budget, simulated and live."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from chairlift_worker.bench import workloads
from chairlift_worker.bench.cells import Cell, Results, Value
from chairlift_worker.bench.rides import Objective, Ride, figures
from chairlift_worker.bench.slo import noisy, run_live, scaled, simulate
from chairlift_worker.bench.step_model import fit, measure_steps
from chairlift_worker.bench.workloads import Arrival
from chairlift_worker.engine.pace import StepLoad
from chairlift_worker.engine.request import EngineConfig
from chairlift_worker.models.loading import LoadedModel

_MAX_STEP_TOKENS = 512
_MOST_TOKENS = 1024
"""Of a job: longer ones of the trace are clipped, three quarters for the prompt."""
_FIRST_BUDGET = 128
"""Of the mode with a target, until it has learnt."""


class SloSettings(NamedTuple):
    """What is compared, and under which load."""

    trace: str
    num_jobs: int
    num_live: int
    load: float
    target_itl_s: float
    ttft_s: float
    max_num_seqs: int
    budgets: tuple[int, ...]
    seed: int


class SloBench:
    """One model on this machine, and the arrivals of a trace at the load that was asked for."""

    def __init__(self, model: LoadedModel, settings: SloSettings) -> None:
        self._model = model
        self._settings = settings
        self._config = EngineConfig(settings.max_num_seqs, _MAX_STEP_TOKENS, _MAX_STEP_TOKENS)
        self.step = fit(measure_steps(model.runner, model.tokenizer, self._config, settings.seed))
        room = min(model.runner.spec.context_tokens, _MOST_TOKENS)
        self._arrivals = self._read_arrivals(room)
        half = settings.max_num_seqs // 2
        typical_s = self.step.predict(StepLoad(half, half, half * room // 2))
        target_s = settings.target_itl_s or 3 * typical_s
        self.objective = Objective(settings.ttft_s or 50 * target_s, target_s)

    def cells(self, kept: Results) -> Iterator[Cell]:
        """Measure what is not kept yet."""
        ways: tuple[tuple[str, int, Callable[[EngineConfig], list[Ride]]], ...] = (
            ("simulated", self._settings.num_jobs, self._simulate),
            ("live", self._settings.num_live, self._run_live),
        )
        for where, num_jobs, way in ways:
            for name, config in self._configs().items() if num_jobs else ():
                parameters: dict[str, Value] = {
                    "where": where,
                    "budget": name,
                    "jobs": num_jobs,
                    "load": self._settings.load,
                    "seed": self._settings.seed,
                }
                yield kept.measure(parameters, partial(self._figures, way, config))

    def _configs(self) -> dict[str, EngineConfig]:
        fixed = {
            f"{budget}": self._config._replace(max_prefill_tokens=budget) for budget in self._settings.budgets
        }
        target = self._config._replace(max_prefill_tokens=_FIRST_BUDGET, target_itl_s=self.objective.itl_s)
        return {**fixed, "target": target}

    def _figures(self, way: Callable[[EngineConfig], list[Ride]], config: EngineConfig) -> dict[str, float]:
        return figures(way(config), self.objective)

    def _simulate(self, config: EngineConfig) -> list[Ride]:
        return self._simulated(self._arrivals, config)

    def _simulated(self, arrivals: tuple[Arrival, ...], config: EngineConfig) -> list[Ride]:
        spec, step_s = self._model.runner.spec, noisy(self.step, self._settings.seed)
        return simulate(
            arrivals, config, num_blocks=spec.num_blocks, block_size=spec.block_size, step_s=step_s
        )

    def _run_live(self, config: EngineConfig) -> list[Ride]:
        arrivals = self._arrivals[: self._settings.num_live]
        return run_live(self._model.runner, self._model.tokenizer, arrivals, config, self._settings.seed)

    def _read_arrivals(self, room: int) -> tuple[Arrival, ...]:
        """What the machine can serve is found with all jobs there at once."""
        arrivals = workloads.read_arrivals(
            workloads.find(self._settings.trace),
            max_jobs=self._settings.num_jobs,
            max_prompt=room * 3 // 4,
            max_output=room // 4,
        )
        at_once = tuple(arrival._replace(at_s=0.0) for arrival in arrivals)
        seconds = max(ride.tokens_s[-1] for ride in self._simulated(at_once, self._config))
        return scaled(arrivals, len(arrivals) / seconds, self._settings.load)
