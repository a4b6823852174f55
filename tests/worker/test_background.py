"""Background tasks end when they are told to, whatever they do with a cancellation."""

from __future__ import annotations

import asyncio

import pytest

from chairlift_worker.background import run_until


async def for_ever(ended: list[str], name: str) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        ended.append(name)


async def swallow_one_cancellation(ended: list[str]) -> None:
    """As a command does that redis-py sends on Python 3.11, if the moment is unlucky."""
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        ended.append("not yet")
    await for_ever(ended, "now")


async def test_everything_is_over_with_the_end() -> None:
    ended: list[str] = []
    async with asyncio.timeout(5):
        await run_until(asyncio.sleep(0.01), [for_ever(ended, "a"), for_ever(ended, "b")])
    assert sorted(ended) == ["a", "b"]


async def test_a_lost_cancellation_is_sent_again() -> None:
    ended: list[str] = []
    async with asyncio.timeout(5):
        await run_until(asyncio.sleep(0.01), [swallow_one_cancellation(ended)])
    assert ended == ["not yet", "now"]


async def test_who_fails_takes_the_others_along() -> None:
    ended: list[str] = []

    async def fail() -> None:
        await asyncio.sleep(0)
        raise RuntimeError("it broke")

    async with asyncio.timeout(5):
        with pytest.raises(RuntimeError, match="it broke"):
            await run_until(for_ever(ended, "end"), [swallow_one_cancellation(ended), fail()])
    assert sorted(ended) == ["end", "not yet", "now"]
