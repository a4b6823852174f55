"""The settings of a worker: checked before anything is loaded, and the flags of its command."""

from __future__ import annotations

import os
from collections.abc import Callable

import msgspec
import pytest

from chairlift_client.__main__ import main
from chairlift_client.errors import ChairliftError, ConfigError, ServerUnsupported
from chairlift_client.keys import check_model
from chairlift_client.settings import load_settings
from chairlift_worker.bootstrap import default_threads, draw_worker_id, run_worker
from chairlift_worker.config import WorkerConfig, default_model_name
from servers import Server


def config(**fields: object) -> WorkerConfig:
    return load_settings(WorkerConfig, {"model": "m", **fields}, {}, None)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lease_s": 0.1}, "lease_s is 0.1; it must lie between 0.2 and 3600"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0; it must lie between 1 and 4096"),
        ({"partitions": 4097}, "partitions is 4097; it must lie between 1 and 4096"),
        ({"dtype": "int8"}, "--dtype: dtype = 'int8'"),
        ({"namespace": "a b"}, "namespace name 'a b'"),
        ({"name": "a b"}, "model name 'a b'"),
    ],
)
def test_a_setting_out_of_range_is_refused_with_its_numbers(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ChairliftError) as refused:
        config(**fields)
    assert message in str(refused.value)


def test_a_model_has_to_be_named() -> None:
    with pytest.raises(ConfigError, match=r"model \(--model or CHAIRLIFT_MODEL\)"):
        load_settings(WorkerConfig, {}, {}, None)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "SmolLM2-135M-Instruct"),
        ("models/My model (4 bit).gguf", "My-model-4-bit-"),
        ("/", "model"),
        ("x" * 200, "x" * 96),
    ],
)
def test_a_model_without_a_name_gets_one_that_jobs_may_use(source: str, name: str) -> None:
    assert default_model_name(source) == name
    assert check_model(name) == name
    assert config(model=source).model_name == name


def test_worker_ids_are_readable_and_never_the_same() -> None:
    first, second = (draw_worker_id(config(worker_id="rack 7/a")) for _ in range(2))
    assert first.startswith("rack-7-a-")
    assert first != second


@pytest.mark.parametrize(("num_cores", "threads"), [(1, 1), (2, 1), (8, 7)])
@pytest.mark.parametrize(
    "forget", [lambda _patch: None, lambda patch: patch.delattr(os, "sched_getaffinity")]
)
def test_one_core_is_left_to_the_event_loop(
    num_cores: int,
    threads: int,
    forget: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(num_cores)), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: num_cores)
    forget(monkeypatch)
    assert default_threads() == threads


def test_the_command_has_a_flag_for_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["worker", "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out.split()
    for field in msgspec.structs.fields(WorkerConfig):
        assert f"--{field.name.replace('_', '-')}" in shown


def test_a_server_that_does_not_serve_is_told_before_the_model_is_loaded() -> None:
    with (
        Server("valkey", "--maxmemory-policy", "allkeys-lru") as server,
        pytest.raises(ServerUnsupported, match="allkeys-lru"),
    ):
        run_worker(config(model="/no/such/model", redis_url=server.url))
    with pytest.raises(ConfigError, match="Redis URL"):
        run_worker(config(model="/no/such/model", redis_url="http://localhost"))
