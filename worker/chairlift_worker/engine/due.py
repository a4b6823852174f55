"""In which order jobs on board are served: by the time when each one is due.

A job is due when the patience of its class has run out, or at its deadline if that comes first, but never
before it was submitted. The earlier due goes first: it boards first, is read first, and is the last to
give up its blocks. The due time never changes, and no job is due before it was submitted, so a job waits
only for those that were submitted before it is due, and nothing starves.
"""

from __future__ import annotations

from collections.abc import Mapping

from chairlift_client.protocol import JobClass

PATIENCE_MS: Mapping[JobClass, int] = {"high": 0, "normal": 2_000, "low": 10_000, "batch": 60_000}


def due_ms(job_class: JobClass, submitted_ms: int, deadline_ms: int | None) -> int:
    """When the job is due, by the clock that the other times are of."""
    due = submitted_ms + PATIENCE_MS[job_class]
    return due if deadline_ms is None else max(submitted_ms, min(due, deadline_ms))
