"""The whole demo, with the tiny model: it runs to its end, and a signal ends all of its processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest
import redis

from chairlift_worker.demo.prompts import load_prompts
from tiny_model import TINY_MODEL

LETTERS = {prompt.name for prompt in load_prompts()}
COMMAND = [sys.executable, "-m", "chairlift_client", "demo", "--plain", "--model", str(TINY_MODEL)]


@contextmanager
def started(*options: str) -> Iterator[subprocess.Popen[str]]:
    environment = {name: value for name, value in os.environ.items() if name != "REDIS_URL"}
    demo = subprocess.Popen(
        [*COMMAND, *options],
        env=environment,
        text=True,
        bufsize=1,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        yield demo
    finally:
        demo.kill()
        demo.communicate()


def test_it_serves_every_prompt_on_a_server_of_its_own() -> None:
    with started() as demo:
        output, _ = demo.communicate(timeout=100)
    assert demo.returncode == 0, output
    assert "server embedded Valkey" in output
    rows = re.findall(r"^([A-Z]) +\w\w +\d+ +\d+ +\d+ +[\d.–]+ +\d+ +(\w+)", output, re.MULTILINE)
    assert {letter for letter, _ in rows} == LETTERS
    assert {finish for _, finish in rows} <= {"stop", "length"}
    joins = re.findall(r"step +(\d+) .*\+[A-Z]", output)
    assert len(set(joins)) >= 4, "jobs should join at different steps"
    assert re.search(r"\d+ tokens at [\d.]+ tokens/s", output)
    assert re.search(r"mean batch [\d.]+ jobs", output)
    assert re.search(r"KV blocks used: \d+ of \d+", output)


@pytest.mark.slow
def test_it_leaves_nothing_on_a_server_that_it_was_given(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as client:
        before = set(client.scan_iter("cl:{demo-*"))
        with started("--redis-url", redis_url) as demo:
            output, _ = demo.communicate(timeout=100)
        assert demo.returncode == 0, output
        assert "server embedded Valkey" not in output
        assert set(client.scan_iter("cl:{demo-*")) == before


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_of_its_processes(number: signal.Signals) -> None:
    with started() as demo:
        assert demo.stdout is not None
        for line in demo.stdout:
            if "+A" in line:
                break
        children = psutil.Process(demo.pid).children(recursive=True)
        demo.send_signal(number)
        output, _ = demo.communicate(timeout=30)
    assert len(children) >= 2, "a server and a worker at least"
    assert demo.returncode == 130, output
    assert "interrupted" in output
    assert [child for child in children if child.is_running()] == []


@pytest.mark.slow
def test_a_model_that_is_not_there_is_named_in_one_line() -> None:
    with started("--model", "/nowhere/model") as demo:
        output, _ = demo.communicate(timeout=60)
    assert demo.returncode == 1
    assert output.splitlines()[-1].startswith("chairlift: the worker ended with 1: ")
    assert "/nowhere/model: no such folder" in output.splitlines()[-1]
    assert "Traceback" not in output
