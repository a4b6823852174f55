from __future__ import annotations

import random

import pytest

from chairlift_worker.engine.pace import LEAST_PREFILL, Pace, StepLoad, StepTimes


def seconds(load: StepLoad) -> float:
    return 0.004 + 0.0002 * load.num_sequences + 0.00005 * load.num_tokens + 1e-7 * load.num_context


def some_load(chance: random.Random) -> StepLoad:
    num_sequences = chance.randint(1, 64)
    num_tokens = num_sequences + chance.choice([0, 0, chance.randint(1, 500)])
    return StepLoad(num_sequences, num_tokens, num_sequences * chance.randint(50, 2000))


def test_the_time_of_a_step_is_learnt() -> None:
    chance, times = random.Random(1), StepTimes()
    for _ in range(300):
        load = some_load(chance)
        times.observe(load, seconds(load) * chance.uniform(0.95, 1.05))
    for _ in range(50):
        load = some_load(chance)
        assert times.predict(load) == pytest.approx(seconds(load), rel=0.1)


def test_a_machine_that_becomes_slower_is_followed() -> None:
    chance, times = random.Random(2), StepTimes()
    for step in range(2000):
        load = some_load(chance)
        times.observe(load, seconds(load) * (1 if step < 1000 else 3))
    load = StepLoad(32, 132, 32_000)
    assert times.predict(load) == pytest.approx(3 * seconds(load), rel=0.1)


def test_steps_that_are_all_alike_blow_nothing_up() -> None:
    times = StepTimes()
    load = StepLoad(8, 8, 4000)
    for _ in range(50_000):
        times.observe(load, seconds(load))
    assert times.predict(load) == pytest.approx(seconds(load), rel=0.01)
    assert all(abs(weight) < 10 for weight in times.weights)


def test_the_budget_holds_the_target() -> None:
    chance, pace = random.Random(3), Pace(256, 512, target_itl_s=0.02)
    for _ in range(300):
        load = some_load(chance)
        pace.observe(load, seconds(load))
    for num_decodes in (1, 8, 32):
        decodes = StepLoad(num_decodes, num_decodes, num_decodes * 500)
        budget = pace.prefill_budget(decodes)
        step = StepLoad(num_decodes + 1, num_decodes + budget, decodes.num_context)
        assert 0.016 < seconds(step) <= 0.02
    crowd = StepLoad(200, 200, 100_000)
    assert pace.prefill_budget(crowd) == LEAST_PREFILL, "prompts do not starve"
    assert pace.prefill_budget(StepLoad(0, 0, 0)) == 512, "nobody waits for a token"


def test_before_anything_is_known_the_fixed_budget_rules() -> None:
    pace = Pace(100, 512, target_itl_s=0.02)
    assert pace.prefill_budget(StepLoad(3, 3, 30)) == 100
    assert Pace(100, 512, target_itl_s=0.0).prefill_budget(StepLoad(3, 3, 30)) == 100
