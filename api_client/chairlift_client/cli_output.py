"""How the command line shows things: plain text for pipes, tables for people, JSON lines for programs."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from msgspec import Struct
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from chairlift_client.dead_letters import DeadLetter
from chairlift_client.protocol import Event, Failed, Finished, Queued, Resumed, Started, Tokens
from chairlift_client.status import ModelStatus, WorkerStatus


def printable(text: str) -> str:
    """Text of a model or a user without control characters, which could take over a terminal."""
    return "".join(char for char in text if char in "\n\t" or char.isprintable())


def write_text(text: str) -> None:
    """To stdout at once; harmless where that is a terminal, byte for byte where it is a pipe."""
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def write_note(text: str) -> None:
    """A line beside the output, on stderr."""
    print(printable(text), file=sys.stderr)


def write_json(value: object) -> None:
    """One line of JSON."""
    sys.stdout.write(msgspec.json.encode(plain(value)).decode() + "\n")
    sys.stdout.flush()


def plain(value: object) -> Any:
    """Structs and named tuples as dicts with their field names; an event also names its kind."""
    if isinstance(value, Struct):
        fields = {name: plain(getattr(value, name)) for name in value.__struct_fields__}
        kind = value.__struct_config__.tag
        return {"event": kind, **fields} if kind else fields
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: plain(item) for name, item in value._asdict().items()}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return value


def write_event(event: Event) -> None:
    """The text of the first choice to stdout, everything else as notes."""
    match event:
        case Tokens():
            write_text("".join(delta.text for delta in event.choices if delta.index == 0))
        case Queued(position=position, eta_s=eta_s):
            eta = "" if eta_s is None else f", about {eta_s:.1f} s to go"
            write_note(f"waiting: number {position} in line{eta}" if position else f"waiting{eta}")
        case Started() | Resumed():
            write_note(f"{'started' if isinstance(event, Started) else 'resumed'} by {event.worker}")
        case Finished(usage=usage):
            write_text("\n")
            write_note(f"finished: {usage.prompt_tokens} prompt and {usage.output_tokens} output tokens")
        case Failed(code=code, message=message):
            write_note(f"failed ({code}): {message}")
        case _:
            write_note("cancelled")


def show_fields(record: Struct) -> None:
    """A job or a dead letter, a field a line; times are in UTC, parts of a field as JSON."""
    table = Table(show_header=False, box=None)
    for name, value in plain(record).items():
        if name.endswith("_ms"):
            name, value = name.removesuffix("_ms"), _time(value)
        table.add_row(escape(name), escape(printable(_in_words(value))))
    _console().print(table)


def _in_words(value: object) -> str:
    if value is None:
        return "-"
    return msgspec.json.encode(value).decode() if isinstance(value, dict | list) else str(value)


def show_overview(models: Iterable[ModelStatus], workers: Iterable[WorkerStatus]) -> None:
    """All queues and all workers."""
    _table(
        ("model", "partitions", "waiting", "oldest", "delayed", "running", "finished", "failed", "cancelled"),
        [
            (
                *(m.model, m.info.partitions, m.waiting, f"{m.oldest_waiting_s:.1f} s", m.delayed, m.running),
                *(m.finished, m.failed, m.cancelled),
            )
            for m in models
        ],
    )
    _table(
        ("worker", "model", "says"),
        [
            (w.worker_id, w.model, ", ".join(f"{name} {text}" for name, text in w.fields.items()))
            for w in workers
        ],
    )


def show_jobs(rows: Iterable[tuple[str, str, str, str, int]]) -> None:
    """A list of jobs."""
    _table(
        ("job", "state", "class", "tenant", "submitted"),
        [(*row[:4], _time(row[4])) for row in rows],
    )


def show_letters(letters: Iterable[DeadLetter]) -> None:
    """A list of dead letters."""
    _table(
        ("letter", "job", "died", "tenant", "attempts", "reason"),
        [(x.letter_id, x.job_id, _time(x.died_ms), x.tenant, x.attempts, x.reason) for x in letters],
    )


def _table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    table = Table(*columns)
    for row in rows:
        table.add_row(*(escape(printable(str(cell))) for cell in row))
    _console().print(table)


def _console() -> Console:
    """Ids are for copying: outside a terminal nothing may be cut or wrapped."""
    return Console(width=None if sys.stdout.isatty() else 10_000)


def _time(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S") if ms else "-"
