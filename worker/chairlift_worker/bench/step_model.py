"""The time of a step on this machine, fitted to steps that were run: what simulations take for time."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from chairlift_client.protocol import SamplingParams
from chairlift_worker.engine.detokenizer import TokenDecoder
from chairlift_worker.engine.engine import Engine
from chairlift_worker.engine.pace import StepLoad
from chairlift_worker.engine.request import EngineConfig, EngineRequest, StepStats
from chairlift_worker.engine.runner import Runner

_TRIMMED = 0.2
"""Part of the steps that are left out as disturbed: those that are slowest against their like."""


class StepModel(NamedTuple):
    """Seconds of a step; none of the weights is negative."""

    base_s: float
    sequence_s: float
    token_s: float
    context_token_s: float
    spread: float = 0.0
    """Standard deviation of single steps, as a part of what is predicted."""

    def __str__(self) -> str:
        terms = (self.sequence_s, self.token_s, self.context_token_s)
        names = ("sequence", "token", "token of context")
        parts = [f"{1e6 * term:.2f} µs a {name}" for term, name in zip(terms, names, strict=True) if term]
        return f"a step takes {1000 * self.base_s:.2f} ms + " + " + ".join(parts)

    def predict(self, load: StepLoad) -> float:
        """Seconds that such a step takes on average."""
        return (
            self.base_s
            + self.sequence_s * load.num_sequences
            + self.token_s * load.num_tokens
            + self.context_token_s * load.num_context
        )


def measure_steps(
    runner: Runner, decoder: TokenDecoder, config: EngineConfig, seed: int
) -> list[tuple[StepLoad, float]]:
    """Steps of all kinds, run on this machine: bursts of prompts over decodes of every number."""
    chance = random.Random(seed)
    engine = Engine(runner, decoder, config._replace(prefix_cache=False))
    steps = []
    for burst in range(16):
        for index in range(chance.randint(1, config.max_num_seqs)):
            length = chance.randint(1, min(600, runner.spec.context_tokens // 2))
            prompt = tuple(chance.randrange(runner.spec.vocab_size) for _ in range(length))
            sampling = SamplingParams(temperature=0.0, max_tokens=chance.randint(4, 60), ignore_eos=True)
            engine.add(EngineRequest(f"{burst}-{index}", prompt, sampling, seed=0))
        while engine.has_work and (burst == 15 or engine.num_free_seats < config.max_num_seqs // 2):
            report = engine.step(now_ms=0)
            assert report is not None
            steps.append((step_load(report.stats), step_seconds(report.stats)))
    return steps


def fit(steps: Seq[tuple[StepLoad, float]]) -> StepModel:
    """Least squares of the relative error, without the slowest steps, and without negative weights."""
    loads = np.array([(1.0, *load) for load, _ in steps])
    seconds = np.array([seconds for _, seconds in steps])
    kept = np.arange(len(steps))
    weights = _non_negative(loads, seconds)
    for _ in range(3):
        ratio = seconds / np.maximum(loads @ weights, 1e-9)
        kept = np.argsort(ratio)[: int(len(steps) * (1 - _TRIMMED))]
        weights = _non_negative(loads[kept], seconds[kept])
    spread = float(np.std(seconds[kept] / np.maximum(loads[kept] @ weights, 1e-9)))
    base_s, sequence_s, token_s, context_token_s = map(float, weights)
    return StepModel(base_s, sequence_s, token_s, context_token_s, spread)


def step_load(stats: StepStats) -> StepLoad:
    """What was in a step."""
    num_tokens = stats.num_prefill_tokens + stats.num_decode_tokens
    return StepLoad(stats.num_sequences, num_tokens, stats.num_context_tokens)


def step_seconds(stats: StepStats) -> float:
    """How long the step took."""
    return stats.schedule_s + stats.forward_s + stats.sample_s


def _non_negative(loads: NDArray[np.float64], seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Features whose weight would be negative are left out, one after the other."""
    scaled, ones = loads / seconds[:, None], np.ones(len(seconds))
    used = list(range(loads.shape[1]))
    while True:
        found = np.linalg.lstsq(scaled[:, used], ones, rcond=None)[0]
        if found.min() >= 0:
            break
        used.pop(int(found.argmin()))
    weights = np.zeros(loads.shape[1])
    weights[used] = found
    return weights
