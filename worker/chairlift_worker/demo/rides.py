"""What is known of the running demo: which jobs wait, ride and have left, and what each step carried."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from chairlift_client.protocol import Cancelled, Event, Failed, Finished, JobResult, Tokens
from chairlift_worker.demo.prompts import DemoPrompt
from chairlift_worker.step_log import StepRecord

RideState = Literal["waiting", "riding", "left"]


@dataclass
class Ride:
    """One job as the subscriber sees it."""

    prompt: DemoPrompt
    job_id: str
    state: RideState = "waiting"
    text: str = ""
    num_tokens: int = 0
    token_times_ms: list[int] = field(default_factory=list)
    """One entry for each event that brought tokens, by the server's clock."""
    ending: str = ""
    """The finish reason, or why there is no result."""
    result: JobResult | None = None

    def hear(self, event: Event) -> None:
        """Take in the next event of the job's stream."""
        match event:
            case Tokens(at_ms=at_ms, choices=choices):
                self.text += "".join(choice.text for choice in choices)
                self.num_tokens += sum(len(choice.token_ids) for choice in choices)
                self.token_times_ms.append(at_ms)
                self.ending = next((c.finish_reason for c in choices if c.finish_reason), self.ending)
            case Finished():
                self.state = "left"
            case Failed(message=message):
                self.state, self.ending = "left", f"failed: {message}"
            case Cancelled():
                self.state, self.ending = "left", "cancelled"


class StepNews(NamedTuple):
    """A step, and how its batch differs from the one before. Letters of jobs, in order of the alphabet."""

    record: StepRecord
    riding: tuple[str, ...]
    joined: tuple[str, ...]
    left: tuple[str, ...]


class Lift:
    """All rides and all steps of a demo."""

    def __init__(self) -> None:
        self.rides: dict[str, Ride] = {}
        """By job id."""
        self.steps: list[StepNews] = []

    def submitted(self, prompt: DemoPrompt, job_id: str) -> Ride:
        """A new job stands in line."""
        ride = self.rides[job_id] = Ride(prompt, job_id)
        return ride

    def stepped(self, record: StepRecord) -> StepNews:
        """The worker ran a step; its jobs have all been submitted."""
        before = set(self.steps[-1].riding) if self.steps else set()
        riders = [self.rides[job_id] for job_id in record.jobs]
        for ride in riders:
            ride.state = "riding" if ride.state == "waiting" else ride.state
        riding = {ride.prompt.name for ride in riders}
        news = StepNews(
            record, tuple(sorted(riding)), tuple(sorted(riding - before)), tuple(sorted(before - riding))
        )
        self.steps.append(news)
        return news

    def count(self, state: RideState) -> int:
        """How many jobs are in this state."""
        return sum(ride.state == state for ride in self.rides.values())
