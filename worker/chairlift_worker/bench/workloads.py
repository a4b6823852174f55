"""What a bench is fed with: arrivals from traces, prompts from files. Nothing is downloaded.

Files are found by their path, or below the folder that CHAIRLIFT_DATA names.
"""

from __future__ import annotations

import csv
import gzip
import json
import os
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from chairlift_client.errors import ConfigError


class Arrival(NamedTuple):
    """A job of a trace. `at_s` counts from the first one."""

    at_s: float
    num_prompt: int
    num_output: int


def find(name: str) -> Path:
    """A file by path, or below CHAIRLIFT_DATA. ConfigError if there is none."""
    folder = os.environ.get("CHAIRLIFT_DATA", "")
    for path in (Path(name), Path(folder) / name if folder else None):
        if path is not None and path.is_file():
            return path
    where = f"nor below CHAIRLIFT_DATA ({folder})" if folder else "and CHAIRLIFT_DATA names no folder"
    raise ConfigError(f"there is no file {name!r} here, {where}")


def read_arrivals(
    path: Path, *, max_jobs: int, max_prompt: int, max_output: int, speedup: float = 1.0
) -> tuple[Arrival, ...]:
    """The first jobs of a CSV trace with TIMESTAMP, ContextTokens and GeneratedTokens (the Azure format).

    Lengths are clipped, and at least 1; `speedup` divides the times between arrivals.
    """
    arrivals: list[Arrival] = []
    first: datetime | None = None
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            at = datetime.fromisoformat(row["TIMESTAMP"][:26])
            first = first or at
            arrivals.append(
                Arrival(
                    (at - first).total_seconds() / speedup,
                    min(max_prompt, max(1, int(row["ContextTokens"]))),
                    min(max_output, max(1, int(row["GeneratedTokens"]))),
                )
            )
            if len(arrivals) == max_jobs:
                break
    return tuple(arrivals)


def read_block_trace(path: Path) -> tuple[tuple[int, ...], ...]:
    """The hash ids of each request's blocks (the Mooncake format), in order of arrival."""
    return tuple(tuple(row["hash_ids"]) for row in _rows(path))


def read_prompts(path: Path) -> tuple[str, ...]:
    """The first prompt of each line: its `prompt`, or the first of its `turns`."""
    return tuple(row["prompt"] if "prompt" in row else row["turns"][0] for row in _rows(path))


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    with _open(path) as file:
        yield from (json.loads(line) for line in file if line.strip())


def _open(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return cast("IO[str]", gzip.open(path, "rt", encoding="utf-8"))
    return path.open(encoding="utf-8")
