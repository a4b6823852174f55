"""Classes and deadlines on board: who goes first, and that nobody waits for ever."""

from __future__ import annotations

import pytest

from chairlift_client.protocol import JOB_CLASSES, SamplingParams
from chairlift_worker.engine.due import PATIENCE_MS, due_ms
from chairlift_worker.engine.engine import Engine
from chairlift_worker.engine.request import EngineConfig, EngineRequest
from context_runner import ContextRunner
from tokenizer_kinds import byte_level

SAMPLING = SamplingParams(max_tokens=4, ignore_eos=True)


def test_the_patience_of_a_class_or_the_deadline_whichever_comes_first() -> None:
    assert due_ms("normal", 1000, None) == 1000 + PATIENCE_MS["normal"]
    assert due_ms("normal", 1000, 1500) == 1500
    assert due_ms("high", 1000, 1500) == 1000
    assert due_ms("batch", 1000, 900) == 1000, "never before it was submitted: that would overtake for ever"
    patience = [PATIENCE_MS[job_class] for job_class in JOB_CLASSES]
    assert patience == sorted(patience)


def boarding(*requests: EngineRequest) -> list[str]:
    """The order in which jobs board when there is one seat."""
    lift = Engine(ContextRunner(vocab_size=640), byte_level(), EngineConfig(1, 16, 16))
    for request in requests:
        lift.add(request)
    seen: list[str] = []
    while (report := lift.step(now_ms=1)) is not None:
        seen += [job_id for job_id in report.stats.job_ids if job_id not in seen]
    return seen


def test_higher_classes_and_nearer_deadlines_board_first() -> None:
    jobs = [
        EngineRequest("batch", (5, 6), SAMPLING, 1, order=0, job_class="batch"),
        EngineRequest("low", (5, 7), SAMPLING, 1, order=1, job_class="low"),
        EngineRequest("normal", (5, 8), SAMPLING, 1, order=2),
        EngineRequest("older", (5, 8), SAMPLING, 1, order=3),
        EngineRequest("soon", (5, 9), SAMPLING, 1, order=4, job_class="batch", deadline_ms=500),
        EngineRequest("high", (5, 9), SAMPLING, 1, order=5, job_class="high"),
    ]
    assert boarding(*jobs) == ["high", "soon", "normal", "older", "low", "batch"]


@pytest.mark.parametrize("job_class", ["low", "batch"])
def test_a_low_job_is_overtaken_only_until_it_is_due(job_class: str) -> None:
    """One seat, and a new job of the highest class at every step."""
    lift = Engine(ContextRunner(vocab_size=640), byte_level(), EngineConfig(1, 16, 16))
    lift.add(EngineRequest("patient", (5, 6), SAMPLING, 1, order=0, job_class=job_class))  # type: ignore[arg-type]
    now_ms = order = 0
    while True:
        order += 1
        lift.add(
            EngineRequest(
                f"high-{order}", (7, 8), SAMPLING, 1, order=order, job_class="high", submitted_ms=now_ms
            )
        )
        report = lift.step(now_ms)
        assert report is not None
        if "patient" in report.stats.job_ids:
            break
        now_ms += 1000
    # Four steps of the job that was on board when it became due, and those before it in the line.
    num_before = PATIENCE_MS["low"] // 1000 if job_class == "low" else PATIENCE_MS["batch"] // 1000
    assert num_before <= now_ms // 1000 <= 4 * (num_before + 2)
