"""The demo's prompts, server, child processes, bookkeeping and figures, each by itself."""

from __future__ import annotations

import asyncio
import io
import sys
from collections import Counter
from pathlib import Path

import psutil
import pytest
import redis
from rich.cells import cell_len
from rich.console import Console

from chairlift_client.errors import ServerUnavailable
from chairlift_client.protocol import (
    Choice,
    ChoiceDelta,
    Event,
    Failed,
    Finished,
    JobResult,
    Started,
    Timings,
    Tokens,
    Usage,
)
from chairlift_worker.demo import server
from chairlift_worker.demo.display import LiveDisplay, PlainDisplay, last_cells, step_line
from chairlift_worker.demo.processes import ChildError, child, clean_environment, end
from chairlift_worker.demo.producer import sampling
from chairlift_worker.demo.prompts import DemoPrompt, load_prompts
from chairlift_worker.demo.report import figures_table, ride_figures, totals
from chairlift_worker.demo.rides import Lift, Ride
from chairlift_worker.step_log import StepRecord


def record(step: int, *jobs: str, used_blocks: int = 1) -> StepRecord:
    return StepRecord(
        step=step,
        started_ms=1000 + step,
        jobs=jobs,
        prefill_tokens=3,
        decode_tokens=len(jobs),
        waiting=0,
        preemptions=0,
        used_blocks=used_blocks,
        num_blocks=64,
        schedule_ms=0.1,
        forward_ms=5.0,
        sample_ms=0.2,
    )


def prompt(name: str, text: str = "Why?") -> DemoPrompt:
    return DemoPrompt(name=name, lang="en", after_s=0.0, max_tokens=8, temperature=0.0, prompt=text)


def result(job_id: str, *, submitted: int, first: int, finished: int, tokens: int) -> JobResult:
    choice = Choice(index=0, text="Because.", token_ids=tuple(range(tokens)), finish_reason="stop")
    timings = Timings(
        submitted_ms=submitted, boarded_ms=submitted + 2, first_token_ms=first, finished_ms=finished
    )
    usage = Usage(prompt_tokens=7, output_tokens=tokens)
    return JobResult(job_id=job_id, choices=(choice,), usage=usage, timings=timings)


def finished_ride(lift: Lift) -> Ride:
    """Five tokens: the first after 30 ms, the last 80 ms later."""
    ride = lift.submitted(prompt("A"), "m.0.a")
    events: list[Event] = [
        Started(1, 1, 1002),
        Tokens(2, 1, 1030, (ChoiceDelta(0, 0, (5, 6), "Be"),)),
        Tokens(3, 1, 1110, (ChoiceDelta(0, 2, (7, 8, 9), "cause.", "stop"),)),
        Finished(4, 1, 1111),
    ]
    for event in events:
        ride.hear(event)
    ride.result = result("m.0.a", submitted=1000, first=1030, finished=1111, tokens=5)
    return ride


def test_prompts_are_a_dozen_and_more_of_mixed_length_language_and_time() -> None:
    prompts = load_prompts()
    languages = Counter(prompt.lang for prompt in prompts)
    lengths = sorted(len(prompt.prompt) for prompt in prompts)
    assert len(prompts) >= 12
    assert len({prompt.name for prompt in prompts}) == len(prompts)
    assert set(languages) == {"en", "tr", "zh", "ar"}
    assert min(languages.values()) >= 2
    assert lengths[-1] > 20 * lengths[0]
    assert prompts[0].after_s == 0.0
    assert len({prompt.after_s for prompt in prompts}) > 8
    assert sampling(prompts[0]) == sampling(load_prompts()[0])


def test_server_answers_and_is_gone_afterwards() -> None:
    with server.EmbeddedServer() as running:
        folder = Path(running.url.removeprefix("unix://")).parent
        with redis.Redis.from_url(running.url) as client:
            assert client.ping()
            pid = int(client.info("server")["process_id"])
    assert not folder.exists()
    assert not psutil.pid_exists(pid)


def test_server_that_does_not_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "find_server", lambda: "/bin/false")
    with pytest.raises(ServerUnavailable, match="did not start"), server.EmbeddedServer():
        pass


async def test_child_is_ended_when_its_owner_fails(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    with pytest.raises(RuntimeError, match="owner"):
        async with child(command, folder=tmp_path, log=tmp_path / "log") as process:
            raise RuntimeError("owner")
    assert process.returncode == -15


async def test_child_that_does_not_listen_is_killed(tmp_path: Path) -> None:
    script = (
        "import signal, time; signal.signal(15, signal.SIG_IGN); print('on', flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", script]
    async with child(command, folder=tmp_path, log=tmp_path / "log", read_output=True) as process:
        assert process.stdout is not None
        assert await process.stdout.readline() == b"on\n"
        await end(process, limit_s=0.05)
        assert process.returncode == -9


async def test_what_a_child_said_last_is_in_the_error(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; print('out'); sys.exit('no such model')"]
    async with child(command, folder=tmp_path, log=tmp_path / "log") as process:
        code = await asyncio.wait_for(process.wait(), 10)
    assert (
        str(ChildError(f"it ended with {code}", tmp_path / "log")) == "it ended with 1:\nout\nno such model"
    )


def test_children_do_not_inherit_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHAIRLIFT_NAME", "other")
    monkeypatch.setenv("KEPT", "1")
    environment = clean_environment()
    assert "CHAIRLIFT_NAME" not in environment
    assert environment["KEPT"] == "1"


def test_ride_follows_its_events() -> None:
    ride = finished_ride(Lift())
    assert (ride.state, ride.text, ride.num_tokens, ride.ending) == ("left", "Because.", 5, "stop")


def test_ride_that_failed_says_so() -> None:
    ride = Lift().submitted(prompt("A"), "m.0.a")
    ride.hear(Failed(1, 1, 1001, "numerics", "not finite"))
    assert (ride.state, ride.ending) == ("left", "failed: not finite")


def test_steps_tell_who_joined_and_who_left() -> None:
    lift = Lift()
    for letter in "ABC":
        lift.submitted(prompt(letter), letter.lower())
    changes = [lift.stepped(record(n, *jobs)) for n, jobs in enumerate(["a", "ab", "ab", "bc", ""], 1)]
    assert [(news.joined, news.left) for news in changes] == [
        (("A",), ()),
        (("B",), ()),
        ((), ()),
        (("C",), ("A",)),
        ((), ("B", "C")),
    ]
    assert lift.rides["c"].state == "riding"


def test_figures_of_a_ride() -> None:
    figures = ride_figures(finished_ride(Lift()))
    assert figures is not None
    assert (figures.prompt_tokens, figures.output_tokens) == (7, 5)
    assert (figures.queue_ms, figures.ttft_ms, figures.itl_ms) == (2, 30, 20.0)


def test_totals_over_rides_and_steps() -> None:
    lift = Lift()
    finished_ride(lift)
    lift.submitted(prompt("B"), "b")
    for number, jobs in enumerate([("m.0.a",), ("m.0.a", "b"), ("b",)], 1):
        lift.stepped(record(number, *jobs, used_blocks=10 * number % 25))
    found = totals(list(lift.rides.values()), lift.steps)
    assert found is not None
    assert found.tokens_per_s == pytest.approx(5 / 0.111)
    assert found.mean_batch == pytest.approx(4 / 3)
    assert (found.largest_batch, found.num_steps) == (2, 3)
    assert (found.peak_blocks, found.num_blocks) == (20, 64)


def test_table_has_a_row_for_every_job_finished_or_not() -> None:
    lift = Lift()
    finished_ride(lift)
    lift.submitted(prompt("B"), "b")
    console = Console(file=io.StringIO(), width=100, record=True)
    console.print(figures_table(lift))
    rows = [line.split() for line in console.export_text().splitlines()[2:]]
    assert rows == [["A", "en", "7", "2", "30", "20.0", "5", "stop"], ["B", "en", *"–––––", "waiting"]]


def test_plain_lines_tell_the_whole_story() -> None:
    lift = Lift()
    out = io.StringIO()
    with PlainDisplay(Console(file=out, width=80), lift) as display:
        ride = finished_ride(lift)
        display.submitted(ride)
        display.stepped(lift.stepped(record(1, "m.0.a")))
        display.stepped(lift.stepped(record(2, "m.0.a")))
        display.heard(ride)
        display.stepped(lift.stepped(record(3)))
    lines = [line[8:] for line in out.getvalue().splitlines()]
    assert lines == [
        "A submitted [en] Why?",
        "step    1  A   1 jobs,   4 tokens,   1/64 blocks  +A",
        "A ended (stop, 5 tokens): Because.",
        "step    3  ·   0 jobs,   3 tokens,   1/64 blocks  -A",
    ]


@pytest.mark.parametrize("width", [60, 110])
def test_screen_fits_and_shows_jobs_and_steps(width: int) -> None:
    lift = Lift()
    ride = finished_ride(lift)
    ride.text = "长城" * 100 + "\n[bold]end"
    lift.stepped(record(1, "m.0.a"))
    console = Console(file=io.StringIO(), width=width, height=24, force_terminal=True, record=True)
    console.print(LiveDisplay(console, lift, 14))
    shown = console.export_text()
    assert "[bold]end" in shown
    assert "step    1  A" in shown
    assert max(cell_len(line) for line in shown.splitlines()) <= width


def test_only_the_end_of_a_text_that_fits_is_shown() -> None:
    assert last_cells("abcdef", 4) == "cdef"
    assert last_cells("ab长城", 4) == "长城"
    assert last_cells("ab长城", 5) == "b长城"
    assert last_cells("", 4) == ""


def test_columns_of_a_step_are_the_jobs() -> None:
    lift = Lift()
    for letter in "ABC":
        lift.submitted(prompt(letter), letter.lower())
    assert step_line(lift.stepped(record(9, "a", "c")), list("ABC")).plain.startswith("step    9  A·C ")
