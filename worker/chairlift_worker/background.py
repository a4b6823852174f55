"""Tasks that run until something is over, and are really gone then.

A task group cancels its tasks once. That is not enough here: on Python 3.11 `asyncio.wait_for`, through which
redis-py sends every command, drops a cancellation that arrives in the moment in which it completes. The task
then goes on as if nothing had been, and whoever waits for its end waits for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine, Iterable
from typing import Any

AGAIN_S = 0.1


async def run_until(end: Coroutine[Any, Any, None], works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Runs the works, which never end by themselves, until `end` returns.

    If one of them fails, everything is cancelled and its error raised. On return nothing runs any more.
    """
    tasks = [asyncio.create_task(work) for work in (end, *works)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancel_all(tasks)
    for task in done:
        task.result()


async def cancel_all(tasks: Collection[asyncio.Task[None]]) -> None:
    """Returns when all of them have ended; cancels again those that go on."""
    while pending := [task for task in tasks if not task.done()]:
        for task in pending:
            task.cancel()
        await asyncio.wait(pending, timeout=AGAIN_S)
