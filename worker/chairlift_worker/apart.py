"""Work that a user's input can make endless, done in a process of its own that can be killed.

A thread cannot be stopped from outside; a schema or a template that takes for ever would take its thread,
or the whole interpreter, along.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable

MAX_MEMORY_BYTES = 2 << 30
_NICENESS = 10
_PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "PYTHONPATH")
"""All that the process sees of the environment, which holds passwords and tokens."""


_WALL_FACTOR = 15
"""Seconds by the clock for each second of computing: more than a busy machine takes."""


class ApartError(Exception):
    """The work used up its time, or its process died (of its memory limit, say): the input is at fault."""


class ApartBusyError(Exception):
    """The machine gave the process too little time to tell; the input may be all right."""


def run_apart(module: str, data: bytes, cpu_s: float) -> bytes:
    """What `python -m module`, which calls `serve_apart`, makes of `data` within `cpu_s` of computing.

    Computing is counted, and not the clock: on a busy machine the same input has the same answer. Raises
    ApartError and ApartBusyError.
    """
    # -P: nothing is imported from the current folder
    command = [sys.executable, "-P", "-m", module, str(cpu_s)]
    environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    wall_s = cpu_s * _WALL_FACTOR
    try:
        done = subprocess.run(
            command, input=data, capture_output=True, timeout=wall_s, env=environment, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ApartBusyError(f"{module} had no {cpu_s:g} s of computing within {wall_s:g} s") from error
    if done.returncode == -signal.SIGPROF:
        raise ApartError(f"it is not done after {cpu_s:g} s of computing")
    if done.returncode != 0:
        raise ApartError(f"it ended with status {done.returncode}")
    return done.stdout


def serve_apart(work: Callable[[bytes], bytes]) -> None:
    """The other side of `run_apart`: answers once, with little memory and time, and behind everybody else."""
    os.nice(_NICENESS)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    signal.setitimer(signal.ITIMER_PROF, float(sys.argv[1]))  # ends the process when that is computed
    sys.stdout.buffer.write(work(sys.stdin.buffer.read()))
