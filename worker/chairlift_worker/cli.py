"""`chairlift worker`: its flags are the fields of WorkerConfig."""

from __future__ import annotations

import inspect
import logging
import os
from typing import Annotated, Any, get_args, get_type_hints

import msgspec
import typer

from chairlift_client.settings import find_file, load_settings
from chairlift_worker.config import WorkerConfig


def worker(**flags: Any) -> None:
    """Serve a model: board jobs from Redis at every step, stream their tokens back.

    Every flag is also a setting: CHAIRLIFT_<NAME> in the environment, or a key of chairlift.toml. SIGTERM
    drains: running jobs finish within the grace period, the others are handed back; twice stops at once.
    """
    path = find_file(flags.pop("config"), os.environ)
    config = load_settings(WorkerConfig, flags, os.environ, path, section="worker")
    logging.basicConfig(
        level=config.log_level.upper(),
        format="%(asctime)s.%(msecs)03d %(levelname)-7s %(name)s %(message)s",
        datefmt="%Y-%m-%dT%H:%M:%S",
    )
    from chairlift_worker.bootstrap import run_worker  # torch takes seconds to load: not for --help

    run_worker(config)


def _signature() -> inspect.Signature:
    """One option for each setting; None stands for a flag that was not given."""
    hints = get_type_hints(WorkerConfig, include_extras=True)
    parameters = [_parameter("config", str, "A TOML file; chairlift.toml where there is one.", "")]
    for field in msgspec.structs.fields(WorkerConfig):
        plain, meta = get_args(hints[field.name])
        default = "" if field.default in (msgspec.NODEFAULT, "") else f"{field.default}"
        parameters.append(_parameter(field.name, plain, meta.description, default))
    return inspect.Signature(parameters)


def _parameter(name: str, plain: Any, description: str, default: str) -> inspect.Parameter:
    shown = f"{description} [default: {default}]" if default else description
    flag = name.replace("_", "-")
    flags = f"--{flag}/--no-{flag}" if plain is bool else f"--{flag}"
    option = typer.Option(flags, help=shown, show_default=False)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[plain | None, option]
    )


worker.__signature__ = _signature()  # type: ignore[attr-defined]
