"""A process that has loaded everything a worker needs and forks workers on demand, so that a kill costs
little. Driven by `fleet.Fleet`: one JSON line in, one out.

    {"spawn": {config fields}, "log": path, "hooks": {}}  →  {"pid": 123}
    {"wait": 123}                                         →  {"status": exit code, negative for a signal}
    {"poll": 123}                                         →  the same, null while it runs
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import logging
import os
import signal
import sys
import time
from dataclasses import replace
from types import FrameType
from typing import Any

import torch

from chairlift_worker.bootstrap import serve
from chairlift_worker.config import WorkerConfig
from chairlift_worker.models.loading import LoadedModel, load_model
from chairlift_worker.models.source import default_cache
from hooked_runner import HookedRunner, Hooks


def main() -> None:
    """Serve commands until the input ends."""
    torch.set_num_threads(1)  # a pool of threads would not survive the fork
    model_path, kv_tokens = sys.argv[1], int(sys.argv[2])
    model = load_model(model_path, cache=default_cache(), kv_tokens=kv_tokens, device="cpu")
    _answer({"ready": os.getpid()})
    for line in sys.stdin:
        command = json.loads(line)
        if "spawn" in command:
            hooks = Hooks(**{**command["hooks"], "trigger": tuple(command["hooks"].get("trigger", ()))})
            _answer({"pid": _spawn(command["spawn"], command["log"], model, hooks)})
        elif "poll" in command:
            pid, status = os.waitpid(command["poll"], os.WNOHANG)
            _answer({"status": os.waitstatus_to_exitcode(status) if pid else None})
        else:
            _, status = os.waitpid(command["wait"], 0)
            _answer({"status": os.waitstatus_to_exitcode(status)})


def _spawn(fields: dict[str, Any], log_path: str, model: LoadedModel, hooks: Hooks) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        faulthandler.register(signal.SIGUSR2)  # says in the log what every thread is doing
        config = WorkerConfig(**fields)
        logging.basicConfig(level=config.log_level.upper(), format="%(asctime)s %(name)s %(message)s")
        _skew_clock(hooks.clock_skew_s)
        asyncio.run(serve(config, replace(model, runner=HookedRunner(model.runner, hooks))))
        status = 0
    except BaseException:
        logging.exception("worker ended")
    finally:
        os._exit(status)


def _skew_clock(skew_s: float) -> None:
    """The wall clock of this process alone is wrong from now on, and steps the other way on SIGUSR1."""
    right_time = time.time

    def step(number: int, frame: FrameType | None) -> None:
        nonlocal skew_s
        skew_s = -skew_s

    time.time = lambda: right_time() + skew_s
    signal.signal(signal.SIGUSR1, step)


def _answer(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
