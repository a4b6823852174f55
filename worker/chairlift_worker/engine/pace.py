"""How many prompt tokens a step may compute beside its decodes, so that running jobs keep their pace.

The time of a step is learnt while it runs, as a linear function of what is in it:

    seconds = w0 + w1 · sequences + w2 · tokens + w3 · tokens of context

by recursive least squares with forgetting (Haykin, Adaptive Filter Theory): old steps count less and
less, so that the weights follow a machine that becomes slower or faster.
"""

from __future__ import annotations

import math
from typing import NamedTuple

_FORGETTING = 0.995
_UNSURE = 1e3
_MAX_TRACE = 1e6
_NUM_STEPS_TO_LEARN = 20
_MARGIN = 0.95
"""Part of the target that is planned for, where steps take exactly as long as their like."""
_NUM_DEVIATIONS = 1.5
"""How much slower than its like a step may be and still hold the target, in standard deviations."""
_MOST_DEVIATIONS = 2.0
"""What is farther away from its like is counted as that far."""
_LEAST_DEVIATION, _MOST_DEVIATION = 0.02, 0.5
LEAST_PREFILL = 16
"""Prompt tokens of a step where the decodes alone take all the time there is: prompts must not starve."""


class StepLoad(NamedTuple):
    """What a step computes. `num_context` counts the tokens that its sequences attend to."""

    num_sequences: int
    num_tokens: int
    num_context: int

    def features(self) -> tuple[float, float, float, float]:
        """In like sizes, which keeps the squares well conditioned."""
        return (1.0, self.num_sequences / 16, self.num_tokens / 64, self.num_context / 4096)


class StepTimes:
    """Learns seconds per step."""

    def __init__(self) -> None:
        size = range(4)
        self.weights = [0.0] * 4
        self.num_observed = 0
        self._variance = 0.0  # of single steps around the prediction, relative
        self._spread = [[_UNSURE if row == column else 0.0 for column in size] for row in size]

    def observe(self, load: StepLoad, seconds: float) -> None:
        """One step took so long."""
        x = load.features()
        spread = self._spread
        px = [sum(p * f for p, f in zip(row, x, strict=True)) for row in spread]
        scale = _FORGETTING + sum(f * p for f, p in zip(x, px, strict=True))
        error = seconds - self.predict(load)
        if self.num_observed >= _NUM_STEPS_TO_LEARN:
            self._variance += (1 - _FORGETTING) * ((error / seconds) ** 2 - self._variance)
            # A step that the machine was away in says little of its like (Huber, 1964).
            most = _MOST_DEVIATIONS * max(_LEAST_DEVIATION, self.deviation) * seconds
            error = max(-most, min(most, error))
        self.weights = [w + p / scale * error for w, p in zip(self.weights, px, strict=True)]
        # Without new kinds of steps, forgetting would let the spread grow without bound.
        forgetting = _FORGETTING if sum(spread[i][i] for i in range(4)) < _MAX_TRACE else 1.0
        self._spread = [
            [(spread[row][column] - px[row] * px[column] / scale) / forgetting for column in range(4)]
            for row in range(4)
        ]
        self.num_observed += 1

    @property
    def deviation(self) -> float:
        """How far single steps are from what is predicted, as a part of it; one standard deviation."""
        return min(_MOST_DEVIATION, math.sqrt(self._variance))

    def predict(self, load: StepLoad) -> float:
        """Seconds that such a step is expected to take."""
        return sum(w * f for w, f in zip(self.weights, load.features(), strict=True))


class Pace:
    """The prefill budget of each step: a fixed one, or one that holds a target.

    The budget counts where others decode. Then a step has at most max_num_seqs decodes and the budget's
    prompt tokens, and the time of such a step is the most that a running job waits for its next token.
    """

    def __init__(self, max_prefill_tokens: int, max_step_tokens: int, target_itl_s: float) -> None:
        self._fixed = max_prefill_tokens
        self._most = max_step_tokens
        self._target_s = target_itl_s
        self.times = StepTimes()

    def observe(self, load: StepLoad, seconds: float) -> None:
        """A step is done."""
        if self._target_s and load.num_tokens:
            self.times.observe(load, seconds)

    def prefill_budget(self, decodes: StepLoad) -> int:
        """Prompt tokens for a step that has these decodes in it."""
        if decodes.num_sequences == 0:
            return self._most
        if not self._target_s or self.times.num_observed < _NUM_STEPS_TO_LEARN:
            return self._fixed
        least = min(LEAST_PREFILL, self._most)
        return max(least, min(self._most, self._affordable(decodes)))

    def _affordable(self, decodes: StepLoad) -> int:
        """Tokens of one more sequence that the rest of the target's time is enough for."""
        base = decodes._replace(num_sequences=decodes.num_sequences + 1)
        per_token = self.times.predict(base._replace(num_tokens=base.num_tokens + 1))
        start = self.times.predict(base)
        slope = per_token - start
        planned_s = _MARGIN * self._target_s / (1 + _NUM_DEVIATIONS * self.times.deviation)
        spare = planned_s - start
        if slope <= 0:
            return self._fixed if spare > 0 else LEAST_PREFILL
        return int(spare / slope)
