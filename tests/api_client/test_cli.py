"""The command line: what it prints, where, and with which exit code."""

from __future__ import annotations

import asyncio
import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from chairlift_client.__main__ import main
from chairlift_client.cli_output import printable
from played_worker import PlayedWorker
from servers import free_port


class Done(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Done]


@pytest.fixture
def run(
    redis_url: str,
    namespace: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> Run:
    """Runs a command line in this process, with the test's server as a setting of the environment."""
    monkeypatch.setenv("CHAIRLIFT_REDIS_URL", redis_url)
    monkeypatch.setenv("CHAIRLIFT_NAMESPACE", namespace)
    monkeypatch.chdir(tmp_path)

    def run_main(*arguments: str) -> Done:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        code = ended.value.code
        assert isinstance(code, int)
        return Done(code, *capsys.readouterr())

    return run_main


def play(redis_url: str, namespace: str, *texts: str, fail: str = "") -> None:
    """A worker takes whatever waits and answers it."""

    async def once() -> None:
        async with await PlayedWorker.open(redis_url, namespace) as worker:
            for ride in await worker.claim():
                if fail:
                    await ride.fail(fail)
                else:
                    await ride.run(*texts)

    asyncio.run(once())


def test_submit_then_stream(run: Run, redis_url: str, namespace: str) -> None:
    play(redis_url, namespace)
    done = run(
        "submit", "-m", "m", "Why?", "--max-tokens", "5", "--temperature", "0", "--stop", "x", "--stop", "y"
    )
    assert (done.code, done.err) == (0, "")
    job_id = done.out.strip()
    waiting = run("status", job_id)
    assert "waiting" in waiting.out
    play(redis_url, namespace, "Be", "cause.")
    done = run("stream", job_id)
    assert (done.code, done.out) == (0, "Because.\n")
    assert "finished: 3 prompt and 2 output tokens" in done.err

    lines = [json.loads(line) for line in run("stream", job_id, "--json", "--after", "1").out.splitlines()]
    assert [line["event"] for line in lines] == ["tokens", "tokens", "finished"]
    assert lines[0]["choices"][0]["text"] == "Be"
    status = json.loads(run("status", job_id, "--json").out)
    assert (status["state"], status["attempts"]) == ("finished", 1)


def test_the_prompt_may_come_from_stdin(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("long text"))
    assert run("submit", "-m", "m", "--raw", "-", "--allow-unknown-model").code == 0
    assert run("submit", "-m", "m", "--raw", "--system", "s", "x").code == 2


def test_the_overview_and_the_list(run: Run, redis_url: str, namespace: str) -> None:
    play(redis_url, namespace)
    ids = [run("submit", "-m", "m", "x").out.strip() for _ in range(3)]
    listed = run("jobs", "-m", "m", "--limit", "2").out
    assert ids[2] in listed
    assert ids[0] not in listed
    rows = [json.loads(line) for line in run("jobs", "-m", "m", "--json").out.splitlines()]
    assert [row["job_id"] for row in rows] == ids[::-1]
    overview = run("status").out
    assert "played-" in overview
    whole = json.loads(run("status", "--json").out)
    assert (whole["models"][0]["waiting"], whole["workers"][0]["model"]) == (3, "m")


def test_cancel_and_forget(run: Run) -> None:
    job_id = run("submit", "-m", "m", "x", "--allow-unknown-model").out.strip()
    assert run("cancel", job_id).err == "cancelled\n"
    assert run("cancel", job_id).err == "it had ended already\n"
    done = run("stream", job_id)
    assert (done.code, done.err) == (1, f"cancelled\nchairlift: {job_id} was cancelled\n")
    assert run("forget", job_id) == (0, "", "erased\n")
    assert run("status", job_id) == (1, "", f"chairlift: no such job (any more): {job_id}\n")


def test_a_failed_job_is_exit_code_1(run: Run, redis_url: str, namespace: str) -> None:
    job_id = run("submit", "-m", "m", "x", "--allow-unknown-model").out.strip()
    play(redis_url, namespace, fail="the engine\nis broken")
    done = run("stream", job_id)
    assert done.code == 1
    assert done.err.splitlines()[-1].startswith(f"chairlift: {job_id} failed (dead_letter)")


def give_up(run: Run, redis_url: str, namespace: str, *texts: str) -> list[str]:
    """Jobs that fail for good; the ids of their letters."""
    for text in texts:
        run("submit", "-m", "m", text, "--allow-unknown-model")
    play(redis_url, namespace, fail="bad luck")
    return [
        json.loads(line)["letter_id"] for line in run("dead", "list", "-m", "m", "--json").out.splitlines()
    ]


def test_dead_letters_are_listed_and_shown(run: Run, redis_url: str, namespace: str) -> None:
    first, second = give_up(run, redis_url, namespace, "a secret", "another secret")
    listed = run("dead", "list", "-m", "m")
    assert first in listed.out
    assert second in listed.out
    assert "bad luck" in listed.out
    assert "secret" not in listed.out + run("dead", "list", "-m", "m", "--json").out
    short = run("dead", "list", "-m", "m", "--limit", "1")
    assert second not in short.out
    assert short.err == "there are more than 1: see --limit\n"
    assert "a secret" in run("dead", "show", first).out
    shown = json.loads(run("dead", "show", first, "--json").out)
    assert shown["body"]["messages"][0]["content"] == "a secret"
    assert (shown["failures"], shown["attempts"]) == (1, 1)


def test_dead_letters_are_retried_and_dropped(run: Run, redis_url: str, namespace: str) -> None:
    first, second, third = give_up(run, redis_url, namespace, "a", "b", "c")
    assert run("dead", "retry", first).err == f"{first}: waits in line again\n1 of 1 done\n"
    assert run("dead", "drop", second).err == f"{second}: dropped\n1 of 1 done\n"
    assert run("dead", "drop", second).err == f"{second}: was not there\n0 of 1 done\n"
    gone = (1, "", f"chairlift: no such dead letter (any more): {second}\n")
    assert run("dead", "show", second) == gone
    assert run("dead", "retry", second) == gone
    unsure = run("dead", "drop", "--all", "-m", "m")
    assert (unsure.code, unsure.err) == (1, "drop 1 dead letters of m? Say --yes where nobody can answer.\n")
    assert third in run("dead", "list", "-m", "m").out
    assert run("dead", "drop", "--all", "-m", "m", "--yes").err == f"{third}: dropped\n1 of 1 done\n"
    assert third not in run("dead", "list", "-m", "m").out
    play(redis_url, namespace, "again")
    assert run("status", "--json").out.count('"finished":1') == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["submit", "-m", "nobody", "x"], "no worker has announced 'nobody'"),
        (["submit", "-m", "m", "x", "--adapter", "a" * 97], "adapter has 97 characters"),
        (["submit", "-m", "m", "x", "--top-p", "7"], "top_p = 7 is outside more than 0 … 1"),
        (["submit", "-m", "m", "x", "--class", "urgent"], "job_class = 'urgent' is none of"),
        (["submit", "-m", "m", "--raw", ""], "prompt is empty"),
        (["stream", "nonsense"], "not a job id: 'nonsense'"),
        (["jobs", "-m", "m", "--redis-url", "http://x"], "a Redis URL begins with one of redis://"),
        (["jobs", "-m", "m", "--state", "flying"], "no state 'flying': there are waiting, delayed, running"),
        (["jobs", "-m", "m", "--config", "none.toml"], "cannot read the configuration file none.toml"),
        (["dead", "show", "nonsense"], "no dead letter's id: 'nonsense'"),
        (["dead", "drop"], "name letters, or all of a model: --all --model NAME"),
        (["dead", "retry", "--all"], "name letters, or all of a model"),
        (["dead", "retry", "m.0.1-1", "--all", "-m", "m"], "name letters, or all of a model"),
        (["submit", "x"], "--model"),
        (["nonsense"], "nonsense"),
    ],
)
def test_wrong_use_is_exit_code_2(run: Run, arguments: list[str], message: str) -> None:
    done = run(*arguments)
    assert done.code == 2
    assert message in done.err
    assert "Traceback" not in done.err


def test_a_misspelled_setting_is_refused(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "chairlift.toml").write_text('namespac = "x"\nmodel = "a worker setting"\n')
    done = run("status")
    assert done.code == 2
    assert "unknown setting `namespac` in chairlift.toml; did you mean `namespace`?" in done.err
    (tmp_path / "chairlift.toml").unlink()
    monkeypatch.setenv("CHAIRLIFT_REDIS_URI", "x")
    assert "did you mean `CHAIRLIFT_REDIS_URL`?" in run("status").err


def test_no_server_is_one_line_without_the_password(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chairlift_client.cli_connection.RETRY_S", 0.1)
    port = free_port()
    done = run("status", "--redis-url", f"redis://:hunter2@127.0.0.1:{port}")
    assert done.code == 1
    assert done.err.startswith(f"chairlift: 127.0.0.1:{port} did not answer within 0.1 s")
    assert len(done.err.splitlines()) == 1
    assert "hunter2" not in done.err


def test_help_names_every_command(run: Run) -> None:
    done = run("--help")
    assert done.code == 0
    for command in (
        "submit",
        "stream",
        "status",
        "cancel",
        "jobs",
        "forget",
        "dead",
        "worker",
        "demo",
        "bench",
    ):
        assert command in done.out
    assert "CHAIRLIFT_REDIS_URL" in done.out
    assert "..." not in done.out.replace("[ARGS]...", "")
    for command in ("submit", "stream", "status", "cancel", "jobs", "forget"):
        assert "--redis-url" in run(command, "--help").out


def test_terminals_are_safe_from_texts() -> None:
    assert printable("a\x1b[31mb\x07\n\tc\u202e漢😊") == "a[31mb\n\tc漢😊"


def without(modules: list[str], *arguments: str) -> Done:
    """A process in which some modules are not installed."""
    code = (
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({modules!r}))\n"
        "from chairlift_client.__main__ import main\n"
        f"main({list(arguments)!r})\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return Done(done.returncode, done.stdout, done.stderr)


def test_a_missing_extra_is_named() -> None:
    for module in ("typer", "rich"):
        done = without([module], "status")
        assert done.code == 2
        assert done.err == "chairlift: the command line needs the extra [cli]: pip install 'chairlift[cli]'\n"


@pytest.mark.parametrize("module", ["torch", "typer", "rich"])
def test_a_command_of_another_part_names_its_own_extra(module: str) -> None:
    done = without([module], "worker", "--model", "x", "--redis-url", "redis://localhost")
    assert done.code == 2
    assert done.err.startswith(f"chairlift: `worker` needs the extra [worker] ({module} is not installed)")
    assert done.err.endswith("pip install 'chairlift[worker]'\n")
    assert done.err.count("\n") == 1


def test_the_clients_commands_load_nothing_of_the_worker() -> None:
    code = (
        "import sys\n"
        "from chairlift_client.__main__ import main\n"
        "try:\n"
        "    main(['--help'])\n"
        "except SystemExit:\n"
        "    heavy = {'torch', 'transformers', 'numpy', 'chairlift_worker'} & set(sys.modules)\n"
        "    print(*heavy, file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""
