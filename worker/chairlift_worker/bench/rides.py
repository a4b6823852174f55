"""What became of the jobs of a bench, and how many were served as promised."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple


@dataclass(slots=True)
class Ride:
    """One job: when it came, and when each of its tokens did, in seconds."""

    at_s: float
    tokens_s: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.tokens_s[0] - self.at_s

    @property
    def gaps_s(self) -> list[float]:
        """Inter-token latencies."""
        return [after - before for before, after in pairwise(self.tokens_s)]


class Objective(NamedTuple):
    """A job is within it if its first token came in time, and 95 % of the others within `itl_s` each."""

    ttft_s: float
    itl_s: float

    def is_met(self, ride: Ride) -> bool:
        """Whether the job was served as promised."""
        num_late = sum(gap > self.itl_s for gap in ride.gaps_s)
        return ride.ttft_s <= self.ttft_s and num_late <= 0.05 * len(ride.gaps_s)


def figures(rides: Seq[Ride], objective: Objective) -> dict[str, float]:
    """Goodput, and how the latencies are spread; times in ms."""
    gaps = sorted(gap for ride in rides for gap in ride.gaps_s) or [0.0]
    ttfts = sorted(ride.ttft_s for ride in rides)
    num_good = sum(objective.is_met(ride) for ride in rides)
    seconds = max(ride.tokens_s[-1] for ride in rides) - min(ride.at_s for ride in rides)
    return {
        "good jobs/s": num_good / seconds,
        "good %": 100 * num_good / len(rides),
        "jobs/s": len(rides) / seconds,
        "ttft p50": 1000 * quantile(ttfts, 0.5),
        "ttft p95": 1000 * quantile(ttfts, 0.95),
        "itl p50": 1000 * quantile(gaps, 0.5),
        "itl p99": 1000 * quantile(gaps, 0.99),
        "itl max": 1000 * gaps[-1],
    }


def quantile(ordered: Seq[float], part: float) -> float:
    """Of values in ascending order."""
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]
