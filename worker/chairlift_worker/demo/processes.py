"""Child processes of the demo: a session of their own, an end under all circumstances."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from chairlift_client.errors import ChairliftError

END_LIMIT_S = 10.0
_TAIL_LINES = 5


@asynccontextmanager
async def child(
    command: Sequence[str],
    *,
    folder: Path,
    log: Path,
    settings: Mapping[str, str] | None = None,
    read_output: bool = False,
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Runs `command` in `folder`, its output into `log`; with `read_output`, standard output can be read.

    On leaving it is asked to end (SIGTERM) and killed if it does not. Settings of this shell
    (CHAIRLIFT_*) and signals of this terminal do not reach it; `settings` are put into its environment.
    """
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=folder,
            env={**clean_environment(), **(settings or {})},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE if read_output else errors,
            stderr=errors,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        await end(process)


async def end(process: asyncio.subprocess.Process, limit_s: float = END_LIMIT_S) -> None:
    """SIGTERM, some patience, SIGKILL."""
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    try:
        await asyncio.wait_for(process.wait(), limit_s)
    except TimeoutError:
        process.kill()
        await process.wait()


def clean_environment() -> dict[str, str]:
    """This process's environment without Chairlift's settings: the demo has its own."""
    return {name: value for name, value in os.environ.items() if not name.startswith("CHAIRLIFT_")}


class ChildError(ChairliftError):
    """What went wrong with a process of the demo; the message holds the end of its log."""

    def __init__(self, what: str, log: Path) -> None:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
        super().__init__(f"{what}:\n{tail}")
