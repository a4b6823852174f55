"""Commands that other parts of Chairlift bring: found by entry point, loaded only when they run.

The client's own commands must not wait for torch, and `--help` has to name commands whose extra is not
installed. So each one stands in the list as a proxy that knows nothing but its name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint
from typing import Any

import typer

from chairlift_client.extras import commands, extra_of, needs_extra

SUMMARIES: Mapping[str, str] = {
    "worker": "Serve a model: board jobs, stream tokens back.",
    "demo": "See it run: a worker and a dozen chats, live.",
    "bench": "Measure what the service costs and how fast it is.",
}
# Everything after the command's name is the command's own affair, its --help too.
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def add_plugins(app: typer.Typer) -> None:
    """A proxy for each command of the group, in name order."""
    for entry in commands():
        summary = SUMMARIES.get(entry.name, f"Comes with chairlift[{extra_of(entry)}].")
        register = app.command(
            entry.name, help=summary, context_settings=dict(_PASS_ON), add_help_option=False
        )
        register(_proxy(entry))


def _proxy(entry: EntryPoint) -> Callable[[typer.Context], None]:
    """Loads the command and runs it; what it needs may be found missing on either occasion."""

    def run(context: typer.Context) -> None:
        try:
            _as_app(entry.load())(args=list(context.args), prog_name=f"chairlift {entry.name}")
        except ModuleNotFoundError as error:
            missing = (error.name or "").partition(".")[0]
            if missing.startswith("chairlift_"):
                raise  # our own packages come with every installation
            print(f"chairlift: {needs_extra(entry, missing)}", file=sys.stderr)
            raise typer.Exit(2) from None

    return run


def _as_app(command: Any) -> typer.Typer:
    """An entry point names a Typer app, or a function that is a command."""
    if isinstance(command, typer.Typer):
        return command
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(command)
    return app
