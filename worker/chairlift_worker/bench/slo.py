"""The same arrivals under a fixed prefill budget and under one that holds a target ITL.

Simulated: the engine's own scheduler, with a step time as it was measured on this machine. Live: the whole
engine with the model, in real time, without Redis.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq

from chairlift_client.protocol import SamplingParams
from chairlift_worker.bench.rides import Ride
from chairlift_worker.bench.step_model import StepModel
from chairlift_worker.bench.workloads import Arrival
from chairlift_worker.engine.blocks import BlockPool
from chairlift_worker.engine.detokenizer import TokenDecoder
from chairlift_worker.engine.engine import Engine
from chairlift_worker.engine.pace import StepLoad
from chairlift_worker.engine.request import EngineConfig, EngineRequest
from chairlift_worker.engine.runner import Runner
from chairlift_worker.engine.scheduler import Scheduler
from chairlift_worker.engine.sequence import Sequence


def scaled(arrivals: Seq[Arrival], capacity: float, load: float) -> tuple[Arrival, ...]:
    """Arrivals at `load` of the jobs per second that the machine can serve, spread as in the trace."""
    stretch = len(arrivals) / (capacity * load) / arrivals[-1].at_s
    return tuple(arrival._replace(at_s=arrival.at_s * stretch) for arrival in arrivals)


def simulate(
    arrivals: Seq[Arrival],
    config: EngineConfig,
    *,
    num_blocks: int,
    block_size: int,
    step_s: Callable[[StepLoad], float],
) -> list[Ride]:
    """The scheduler's decisions, with time as `step_s` has it."""
    scheduler = Scheduler(BlockPool(num_blocks, block_size), config)
    rides = [Ride(arrival.at_s) for arrival in arrivals]
    most = max(arrival.num_output for arrival in arrivals)
    now_s, num_come = 0.0, 0
    while num_come < len(arrivals) or scheduler.num_running or scheduler.num_waiting:
        while num_come < len(arrivals) and arrivals[num_come].at_s <= now_s:
            num_prompt = arrivals[num_come].num_prompt
            scheduler.add(Sequence(f"{num_come}", num_come, [0] * num_prompt, num_prompt + most))
            num_come += 1
        schedule = scheduler.schedule()
        if not schedule.chunks:
            now_s = arrivals[num_come].at_s
            continue
        seconds = step_s(schedule.load)
        now_s += seconds
        scheduler.commit(schedule)
        scheduler.learn_time(schedule, seconds)
        for sequence, chunk in zip(schedule.sequences, schedule.chunks, strict=True):
            if chunk.num_logits:
                sequence.token_ids.append(0)
                rides[sequence.order].tokens_s.append(now_s)
                if sequence.num_output == arrivals[sequence.order].num_output:
                    scheduler.learn_length(sequence)
                    scheduler.remove(sequence)
    return rides


def run_live(
    runner: Runner, decoder: TokenDecoder, arrivals: Seq[Arrival], config: EngineConfig, seed: int
) -> list[Ride]:
    """The engine in real time."""
    chance = random.Random(seed)
    engine = Engine(runner, decoder, config)
    requests = [
        _request(f"{index}", arrival, runner.spec.vocab_size, chance)._replace(order=index)
        for index, arrival in enumerate(arrivals)
    ]
    rides = [Ride(arrival.at_s) for arrival in arrivals]
    started, num_come = time.perf_counter(), 0
    while num_come < len(arrivals) or engine.has_work:
        now_s = time.perf_counter() - started
        while num_come < len(arrivals) and arrivals[num_come].at_s <= now_s:
            engine.add(requests[num_come])
            num_come += 1
        report = engine.step(now_ms=0)
        if report is None:
            time.sleep(max(0.0, arrivals[num_come].at_s - (time.perf_counter() - started)))
            continue
        now_s = time.perf_counter() - started
        for delta in report.deltas:
            rides[int(delta.job_id)].tokens_s.append(now_s)
    return rides


def noisy(model: StepModel, seed: int) -> Callable[[StepLoad], float]:
    """The measured step time, with single steps that are faster or slower."""
    chance = random.Random(seed)
    return lambda load: model.predict(load) * max(0.5, chance.gauss(1.0, model.spread))


def _request(name: str, arrival: Arrival, vocab_size: int, chance: random.Random) -> EngineRequest:
    sampling = SamplingParams(temperature=0.0, max_tokens=arrival.num_output, ignore_eos=True)
    prompt = tuple(chance.randrange(vocab_size) for _ in range(arrival.num_prompt))
    return EngineRequest(name, prompt, sampling, seed=0)
