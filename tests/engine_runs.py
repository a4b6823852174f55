"""Drives an engine to the end and joins what it tells, checking the rules of the deltas on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from chairlift_worker.engine.engine import Engine
from chairlift_worker.engine.request import EngineRequest, Failure, StepReport, TokenDelta
from chairlift_worker.engine.sequence import Sequence


@dataclass
class Told:
    """What a subscriber of one job would have."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    end: TokenDelta | None = None
    failure: Failure | None = None

    def hear(self, delta: TokenDelta, num_logged: int = 0) -> None:
        assert self.end is None, "a delta after the end"
        assert delta.offset == num_logged + len(self.token_ids)
        self.token_ids.extend(delta.token_ids)
        self.text += delta.text
        self.texts.append(delta.text)
        assert delta.output_tokens == num_logged + len(self.token_ids)
        if delta.finish_reason is not None:
            self.end = delta
            assert delta.full_token_ids is not None
            assert list(delta.full_token_ids[num_logged:]) == self.token_ids
            assert delta.full_text is not None
            assert delta.full_text.endswith(self.text)
            assert num_logged > 0 or delta.full_text == self.text


def expect_short_outputs(engine: Engine) -> Engine:
    """Let it have seen so many short outputs that it takes everybody on board, and has to preempt."""
    for _ in range(600):
        engine._scheduler.learn_length(Sequence("short", 0, [7] * 2, 3, num_prompt=1))
    return engine


def run(
    engine: Engine,
    requests: Iterable[EngineRequest],
    *,
    on_step: Callable[[StepReport], None] | None = None,
    max_steps: int = 20_000,
    is_checking: bool = True,
) -> dict[str, Told]:
    """Add all requests and step until nothing is left; the books are checked after every step, or not."""
    requests = list(requests)
    told = {request.job_id: Told() for request in requests}
    num_logged = {request.job_id: len(request.logged_token_ids) for request in requests}
    for request in requests:
        engine.add(request)
    for _ in range(max_steps):
        report = engine.step(now_ms=0)
        if is_checking:
            engine.check()
        if report is None:
            assert not engine.has_work
            assert engine.num_free_blocks == engine.num_blocks
            return told
        for delta in report.deltas:
            told[delta.job_id].hear(delta, num_logged[delta.job_id])
        for failure in report.failures:
            told[failure.job_id].failure = failure
        if on_step is not None:
            on_step(report)
    raise AssertionError(f"not done after {max_steps} steps")
