"""The demo's figures: per job and in total."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from statistics import fmean
from typing import NamedTuple

from rich.table import Table

from chairlift_worker.demo.rides import Lift, Ride, StepNews

_UNKNOWN = "–"


class RideFigures(NamedTuple):
    """Of one finished job; times in ms."""

    prompt_tokens: int
    output_tokens: int
    queue_ms: float
    ttft_ms: float
    itl_ms: float | None
    """Mean time between tokens; None with fewer than two."""


class Totals(NamedTuple):
    """Of the whole demo."""

    output_tokens: int
    tokens_per_s: float
    """From the first submit to the last finish."""
    mean_batch: float
    """Jobs in a step, over all steps."""
    largest_batch: int
    num_steps: int
    peak_blocks: int
    num_blocks: int


def ride_figures(ride: Ride) -> RideFigures | None:
    """None for a job without a result."""
    if ride.result is None:
        return None
    timings, usage = ride.result.timings, ride.result.usage
    first, last = timings.first_token_ms, ride.token_times_ms[-1]
    gaps = usage.output_tokens - 1
    return RideFigures(
        prompt_tokens=usage.prompt_tokens,
        output_tokens=usage.output_tokens,
        queue_ms=timings.boarded_ms - timings.submitted_ms,
        ttft_ms=first - timings.submitted_ms,
        itl_ms=(last - first) / gaps if gaps > 0 else None,
    )


def totals(rides: Seq[Ride], steps: Seq[StepNews]) -> Totals | None:
    """None while nothing has finished."""
    results = [ride.result for ride in rides if ride.result is not None]
    if not results or not steps:
        return None
    began = min(result.timings.submitted_ms for result in results)
    ended = max(result.timings.finished_ms for result in results)
    output_tokens = sum(result.usage.output_tokens for result in results)
    return Totals(
        output_tokens=output_tokens,
        tokens_per_s=output_tokens / max((ended - began) / 1000, 0.001),
        mean_batch=fmean(len(news.riding) for news in steps),
        largest_batch=max(len(news.riding) for news in steps),
        num_steps=len(steps),
        peak_blocks=max(news.record.used_blocks for news in steps),
        num_blocks=steps[-1].record.num_blocks,
    )


def figures_table(lift: Lift) -> Table:
    """One row per job, in the order of submission."""
    table = Table(title="Jobs", title_justify="left", box=None, pad_edge=False)
    table.add_column("job")
    table.add_column("lang")
    for heading in ("prompt tokens", "queue ms", "TTFT ms", "ITL ms", "tokens"):
        table.add_column(heading, justify="right")
    table.add_column("finish")
    for ride in lift.rides.values():
        table.add_row(
            ride.prompt.name, ride.prompt.lang, *_cells(ride_figures(ride)), ride.ending or ride.state
        )
    return table


def _cells(figures: RideFigures | None) -> list[str]:
    if figures is None:
        return [_UNKNOWN] * 5
    itl = _UNKNOWN if figures.itl_ms is None else f"{figures.itl_ms:.1f}"
    times = [f"{figures.queue_ms:.0f}", f"{figures.ttft_ms:.0f}", itl]
    return [str(figures.prompt_tokens), *times, str(figures.output_tokens)]


def totals_lines(found: Totals) -> list[str]:
    """The totals in words."""
    return [
        f"{found.output_tokens} tokens at {found.tokens_per_s:.1f} tokens/s, all jobs together",
        f"mean batch {found.mean_batch:.1f} jobs, largest {found.largest_batch}, {found.num_steps} steps",
        f"KV blocks used: {found.peak_blocks} of {found.num_blocks} at the most",
    ]
