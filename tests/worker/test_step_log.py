"""The step log: a line for each step, and no harm to jobs where it cannot be written."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from chairlift_client import Client, ConfigError, SamplingParams
from chairlift_worker.step_log import StepLog
from running_worker import running_worker

SAMPLING = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)


async def test_a_line_for_each_step(redis_url: str, namespace: str, tmp_path: Path) -> None:
    path = tmp_path / "steps"
    async with (
        running_worker(redis_url, namespace, step_log=str(path)),
        Client(redis_url, namespace=namespace) as client,
    ):
        result = await client.generate(
            model="tiny", prompt="Once", sampling=SAMPLING, allow_unknown_model=True
        )
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    assert {job for record in records for job in record["jobs"]} == {result.job_id}


async def test_a_full_disk_costs_no_job(
    redis_url: str, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        running_worker(redis_url, namespace, step_log="/dev/full"),
        Client(redis_url, namespace=namespace) as client,
    ):
        result = await client.generate(
            model="tiny", prompt="Once", sampling=SAMPLING, allow_unknown_model=True
        )
    assert result.usage.output_tokens == 20
    troubles = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(troubles) == 1, troubles
    assert "No space left" in troubles[0]


def test_a_file_that_cannot_be_written_is_a_wrong_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"step_log .*No such file or directory"):
        StepLog(str(tmp_path / "missing" / "steps"))
