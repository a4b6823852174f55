"""Work that a user's input can make endless, done in a process of its own that can be killed.

A thread cannot be stopped from outside; a schema or a template that takes for ever would take its thread,
or the whole interpreter, along.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable

MAX_MEMORY_BYTES = 2 << 30
_NICENESS = 10
_PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "PYTHONPATH")
"""All that the process sees of the environment, which holds passwords and tokens."""


class ApartError(Exception):
    """The work came to no end within its time, or its process died (of its memory limit, say)."""


def run_apart(module: str, data: bytes, timeout_s: float) -> bytes:
    """What `python -m module` writes when it is given `data`. Raises ApartError."""
    command = [sys.executable, "-P", "-m", module]  # -P: nothing is imported from the current folder
    environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    try:
        done = subprocess.run(
            command, input=data, capture_output=True, timeout=timeout_s, env=environment, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ApartError(f"it is not done after {timeout_s:g} s") from error
    if done.returncode != 0:
        raise ApartError(f"it ended with status {done.returncode}")
    return done.stdout


def serve_apart(work: Callable[[bytes], bytes]) -> None:
    """The other side of `run_apart`: answers once, with little memory, and behind everybody else."""
    os.nice(_NICENESS)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    sys.stdout.buffer.write(work(sys.stdin.buffer.read()))
