"""`chairlift demo`: everything on this machine, in one command."""

from __future__ import annotations

import asyncio
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from chairlift_worker.demo.display import Display, LiveDisplay, PlainDisplay
from chairlift_worker.demo.model import cache_folder, demo_model
from chairlift_worker.demo.prompts import load_prompts
from chairlift_worker.demo.report import figures_table, totals, totals_lines
from chairlift_worker.demo.rides import Lift
from chairlift_worker.demo.run import Demo
from chairlift_worker.demo.server import EmbeddedServer

_ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
INTERRUPTED = 130


def demo(
    redis_url: Annotated[
        str, typer.Option(envvar="REDIS_URL", help="A server to use instead of an embedded Valkey.")
    ] = "",
    model: Annotated[
        str, typer.Option(help="A hub id, folder or GGUF file instead of SmolLM2-135M-Instruct.")
    ] = "",
    plain: Annotated[bool, typer.Option("--plain", help="Lines instead of a live screen.")] = False,
) -> None:
    """Watch a small chat model serve a dozen jobs: who rides in which step, and every token as it comes.

    Starts a server (embedded Valkey), a worker and a producer, each a process of its own, and ends them.
    The model is fetched the first time (93 MB) and kept in the user's cache.
    """
    console = Console()
    for ending in _ENDINGS:
        signal.signal(ending, _interrupt)
    try:
        _run(console, redis_url, model, plain or not console.is_terminal)
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print("interrupted; everything has been stopped")
        raise typer.Exit(INTERRUPTED) from None


def _run(console: Console, redis_url: str, model: str, plain: bool) -> None:
    source = _absolute(model) if model else _fetched(console)
    lift = Lift()
    display: Display = PlainDisplay(console, lift)
    if not plain:
        display = LiveDisplay(console, lift, len(load_prompts()))
    with ExitStack() as stack:
        url = redis_url or stack.enter_context(EmbeddedServer()).url
        for line in (f"model {source}", f"server {'as given' if redis_url else 'embedded Valkey'}"):
            console.print(line, highlight=False, soft_wrap=True)
        console.print("starting the worker")
        asyncio.run(_until_signal(Demo(url, source, lift), display))
    _report(console, lift)


async def _until_signal(run: Demo, display: Display) -> None:
    """The first signal cancels the run, which then ends its processes; more signals do not hurry it."""
    task = asyncio.ensure_future(run.run(display))
    first = asyncio.Event()

    def cancel_once() -> None:
        if not first.is_set():
            first.set()
            task.cancel()

    for ending in _ENDINGS:
        asyncio.get_running_loop().add_signal_handler(ending, cancel_once)
    await task


def _interrupt(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt


def _absolute(model: str) -> str:
    """A path is meant from here; the worker runs elsewhere."""
    path = Path(model).expanduser()
    return str(path.resolve()) if path.exists() else model


def _fetched(console: Console) -> Path:
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=not console.is_terminal) as bar:
        task = bar.add_task("model", total=1.0)
        return demo_model(
            cache_folder(), lambda part, what: bar.update(task, completed=part, description=f"model: {what}")
        )


def _report(console: Console, lift: Lift) -> None:
    console.print()
    console.print(figures_table(lift))
    found = totals(list(lift.rides.values()), lift.steps)
    if found is not None:
        console.print()
        for line in totals_lines(found):
            console.print(line, highlight=False)
