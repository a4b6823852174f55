"""`chairlift bench …`: each subcommand prints what it measured."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

bench = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
)


@bench.callback()
def measures() -> None:
    """Measure what the service costs and how fast it is."""


@bench.command()
def lift(
    model: Annotated[str, typer.Option(help="A folder, a GGUF file or a hub id.")],
    redis_url: Annotated[
        str, typer.Option(envvar="CHAIRLIFT_REDIS_URL", help="A server to measure with.")
    ] = "redis://localhost:6379",
) -> None:
    """Idle CPU, submit to boarding, boarding under load, and the client's import time."""
    from chairlift_worker.bench.lift import measure, time_imports

    figures = asyncio.run(measure(redis_url, model))
    redis_ms, client_ms = time_imports()
    table = Table("figure", "measured", title="lift")
    table.add_row("idle worker, % of one core", f"{figures.idle_cpu_percent:.2f}")
    table.add_row("submit → boarded, idle, p50 ms", f"{figures.boarding_idle_p50_ms:.0f}")
    table.add_row("submit → boarded, idle, p95 ms", f"{figures.boarding_idle_p95_ms:.0f}")
    ratio = f"{figures.boarded_in_first_step} of {figures.boarded_under_load}"
    table.add_row("boarded in the first step ≥ 5 ms after submit", ratio)
    table.add_row("import redis.asyncio, ms", f"{redis_ms:.0f}")
    table.add_row("import chairlift_client, ms", f"{client_ms:.0f} (+{client_ms - redis_ms:.0f})")
    Console().print(table)
