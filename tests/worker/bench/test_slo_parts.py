from __future__ import annotations

import random

import pytest

from chairlift_worker.bench.rides import Objective, Ride, figures
from chairlift_worker.bench.slo import noisy, run_live, scaled, simulate
from chairlift_worker.bench.step_model import StepModel, fit, measure_steps
from chairlift_worker.bench.workloads import Arrival
from chairlift_worker.engine.pace import StepLoad
from chairlift_worker.engine.request import EngineConfig
from context_runner import ContextRunner
from tokenizer_kinds import byte_level

MODEL = StepModel(0.004, 0.0001, 0.00005, 1e-7, spread=0.03)


def some_arrivals(num_jobs: int, per_second: float, seed: int) -> tuple[Arrival, ...]:
    chance, at_s = random.Random(seed), 0.0
    arrivals = []
    for _ in range(num_jobs):
        at_s += chance.expovariate(per_second)
        arrivals.append(Arrival(at_s, chance.choice([20, 100, 700]), chance.randint(1, 60)))
    return tuple(arrivals)


def test_a_step_model_is_fitted_through_disturbances() -> None:
    chance = random.Random(1)
    steps = []
    for _ in range(600):
        num_sequences = chance.randint(1, 32)
        tokens = num_sequences + chance.choice([0, chance.randint(0, 400)])
        load = StepLoad(num_sequences, tokens, chance.randint(1, 20_000))
        disturbed = 5.0 if chance.random() < 0.1 else 1.0
        steps.append((load, MODEL.predict(load) * chance.uniform(0.97, 1.03) * disturbed))
    found = fit(steps)
    for load, _ in steps[:50]:
        assert found.predict(load) == pytest.approx(MODEL.predict(load), rel=0.05)


def test_a_simulation_gives_every_job_its_tokens_and_no_time_goes_backwards() -> None:
    arrivals = some_arrivals(60, per_second=4.0, seed=2)
    rides = simulate(
        arrivals, EngineConfig(8, 256, 256), num_blocks=200, block_size=16, step_s=noisy(MODEL, seed=2)
    )
    assert [len(ride.tokens_s) for ride in rides] == [arrival.num_output for arrival in arrivals]
    assert all(ride.ttft_s > 0 and min(ride.gaps_s, default=1) > 0 for ride in rides)


def test_a_target_serves_more_jobs_as_promised_than_a_large_or_a_small_budget() -> None:
    arrivals = scaled(some_arrivals(400, per_second=1.0, seed=3), capacity=20.0, load=0.7)
    objective = Objective(ttft_s=0.6, itl_s=0.02)
    good = {}
    for name, budget, target_s in (("small", 16, 0.0), ("large", 512, 0.0), ("target", 128, 0.02)):
        config = EngineConfig(32, 512, 512, max_prefill_tokens=budget, target_itl_s=target_s)
        rides = simulate(arrivals, config, num_blocks=1000, block_size=16, step_s=noisy(MODEL, seed=3))
        good[name] = figures(rides, objective)["good %"]
    assert good["target"] > max(good["small"], good["large"]) + 5, good


def test_live_jobs_come_when_they_are_due() -> None:
    arrivals = tuple(arrival._replace(num_prompt=9) for arrival in some_arrivals(6, per_second=30.0, seed=4))
    runner = ContextRunner(vocab_size=640, num_blocks=200)
    rides = run_live(runner, byte_level(), arrivals, EngineConfig(4, 64, 64), seed=4)
    assert [len(ride.tokens_s) for ride in rides] == [arrival.num_output for arrival in arrivals]
    assert all(ride.ttft_s > 0 for ride in rides)


def test_steps_of_all_kinds_are_measured() -> None:
    runner = ContextRunner(vocab_size=640, num_blocks=600)
    steps = measure_steps(runner, byte_level(), EngineConfig(4, 64, 64), seed=5)
    assert len({load.num_sequences for load, _ in steps}) == 4
    assert any(load.num_tokens > load.num_sequences for load, _ in steps)
    assert all(seconds > 0 for _, seconds in steps)


def test_goodput_counts_what_was_promised() -> None:
    good, late, slow = Ride(0.0, [0.5, 0.6, 0.7]), Ride(1.0, [3.0, 3.1]), Ride(2.0, [2.1, 2.2, 4.0])
    told = figures([good, late, slow], Objective(ttft_s=1.0, itl_s=0.2))
    assert told["good jobs/s"] == pytest.approx(1 / 4.0)
    assert told["itl max"] == pytest.approx(1800)
