"""`chairlift bench …`: each subcommand prints what it measured."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from chairlift_worker.bench.cells import Cell, Value

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


@bench.command()
def prefix(
    trace: Annotated[
        str, typer.Option(help="Requests with the hash ids of their blocks; a path, or below CHAIRLIFT_DATA.")
    ] = "traces/mooncake_conversation.jsonl.gz",
    blocks: Annotated[
        str, typer.Option(help="Sizes of the pool, in blocks of the trace.")
    ] = "1000,2000,5000,10000,20000,30000,40000,50000,100000",
    results: Annotated[Path | None, typer.Option(help="A folder that keeps what is measured.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON in place of a table.")] = False,
) -> None:
    """Hit rate of the prefix cache against the best possible for the size of the pool."""
    from chairlift_worker.bench import cells, prefix, workloads

    requests = workloads.read_block_trace(workloads.find(trace))
    kept = cells.Results("prefix", results)
    rows = []
    for num_blocks in map(int, blocks.split(",")):
        parameters: dict[str, Value] = {"trace": trace, "blocks": num_blocks}
        rows.append(kept.measure(parameters, partial(prefix.compare, requests, num_blocks)))
    _show(rows, as_json, f"prefix cache on {trace}: unlimited {prefix.unlimited_hit_rate(requests):.4f}")


@bench.command()
def slo(
    model: Annotated[str, typer.Option(help="A folder, a GGUF file or a hub id.")],
    trace: Annotated[
        str, typer.Option(help="A CSV trace of arrivals and lengths; a path, or below CHAIRLIFT_DATA.")
    ] = "traces/azure_llm_2023_conv.csv",
    jobs: Annotated[int, typer.Option(help="The first jobs of the trace.")] = 600,
    live_jobs: Annotated[int, typer.Option(help="Of those, how many run live as well; 0 for none.")] = 0,
    load: Annotated[float, typer.Option(help="Part of the time that the machine shall be busy.")] = 0.7,
    target_itl_ms: Annotated[float, typer.Option(help="0: three times a decode of half the seats.")] = 0.0,
    ttft_ms: Annotated[float, typer.Option(help="First token's objective; 0: fifty times the target.")] = 0.0,
    max_num_seqs: Annotated[int, typer.Option(help="Most sequences in a step.")] = 32,
    budgets: Annotated[str, typer.Option(help="Fixed budgets to compare with.")] = "32,128,512",
    seed: Annotated[int, typer.Option(help="Of prompts and noise.")] = 1,
    results: Annotated[Path | None, typer.Option(help="A folder that keeps what is measured.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON in place of a table.")] = False,
) -> None:
    """Goodput under a fixed prefill budget, and under one that holds a target between tokens."""
    import torch

    from chairlift_worker.bench import cells, slo_cells
    from chairlift_worker.bootstrap import default_threads
    from chairlift_worker.models.loading import load_model

    torch.set_num_threads(default_threads())
    settings = slo_cells.SloSettings(
        trace=trace,
        num_jobs=jobs,
        num_live=live_jobs,
        load=load,
        target_itl_s=target_itl_ms / 1000,
        ttft_s=ttft_ms / 1000,
        max_num_seqs=max_num_seqs,
        budgets=tuple(map(int, budgets.split(","))),
        seed=seed,
    )
    measured = slo_cells.SloBench(load_model(model, num_sequences=max_num_seqs), settings)
    rows = list(measured.cells(cells.Results("slo", results)))
    ttft_s, itl_s = measured.objective
    title = (
        f"{measured.step}; objective: first token in {1000 * ttft_s:.0f} ms, others in {1000 * itl_s:.1f} ms"
    )
    _show(rows, as_json, title)


def _show(rows: Sequence[Cell], as_json: bool, title: str) -> None:
    from chairlift_worker.bench import cells

    if as_json:
        print(cells.to_json(rows))
    else:
        Console().print(cells.to_table(rows, title), soft_wrap=True)
