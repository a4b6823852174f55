"""One JSON line per step: who rode, what was computed, how full the pool was."""

from __future__ import annotations

import logging
from io import FileIO

import msgspec

from chairlift_client.errors import ConfigError
from chairlift_worker.engine.request import StepStats

log = logging.getLogger(__name__)


class StepRecord(msgspec.Struct, frozen=True):
    """A line of the step log. `jobs` are job ids; times in ms, `started_ms` by the server's clock."""

    step: int
    started_ms: int
    jobs: tuple[str, ...]
    prefill_tokens: int
    decode_tokens: int
    waiting: int
    preemptions: int
    used_blocks: int
    num_blocks: int
    schedule_ms: float
    forward_ms: float
    sample_ms: float
    context_tokens: int = 0
    """Tokens that the step's sequences attend to, together."""
    cached_blocks: int = 0
    boarded_tokens: int = 0
    cached_tokens: int = 0
    """Tokens of jobs when they boarded, and those of them that the prefix cache had; since the start."""


class StepLog:
    """Appends to a file, or to nothing where the path is empty.

    ConfigError where the file cannot be opened. A disk that is full later costs lines of the log, no job.
    """

    def __init__(self, path: str) -> None:
        self._file = _open(path) if path else None
        self._encoder = msgspec.json.Encoder()
        self._beginning = b""

    def write(self, stats: StepStats, started_ms: int) -> None:
        """Append one step."""
        if self._file is None:
            return
        record = StepRecord(
            step=stats.step,
            started_ms=started_ms,
            jobs=tuple(key.partition(" ")[0] for key in stats.job_ids),
            prefill_tokens=stats.num_prefill_tokens,
            decode_tokens=stats.num_decode_tokens,
            waiting=stats.num_waiting,
            preemptions=stats.num_preemptions,
            used_blocks=stats.num_owned_blocks,
            num_blocks=stats.num_blocks,
            schedule_ms=round(stats.schedule_s * 1000, 3),
            forward_ms=round(stats.forward_s * 1000, 3),
            sample_ms=round(stats.sample_s * 1000, 3),
            context_tokens=stats.num_context_tokens,
            cached_blocks=stats.num_cached_blocks,
            boarded_tokens=stats.num_boarded_tokens,
            cached_tokens=stats.num_cached_tokens,
        )
        self._append(self._file, self._beginning + self._encoder.encode(record) + b"\n")

    def _append(self, file: FileIO, line: bytes) -> None:
        try:
            written = file.write(line)
        except OSError as error:
            if not self._beginning:
                log.warning("step log: %s; steps are missing there until it can be written again", error)
            written = 0
        # What was cut off ends here, so that the next record has a line to itself.
        self._beginning = b"" if written == len(line) else b"\n"

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _open(path: str) -> FileIO:
    try:
        return FileIO(path, "ab")
    except OSError as error:
        raise ConfigError(f"step_log {path!r} cannot be written: {error.strerror}") from error
