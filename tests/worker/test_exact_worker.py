"""A worker with `exact`: a job's logprobs are the same bits alone and in any company."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from chairlift_client import Client, JobResult, SamplingParams
from chairlift_client.errors import ConfigError
from chairlift_client.settings import load_settings
from chairlift_worker.bootstrap import load
from chairlift_worker.config import WorkerConfig
from random_models import FAMILIES, save_random_model
from running_worker import running_worker
from tiny_model import TINY_MODEL


def make_requests(rng: random.Random) -> list[dict[str, Any]]:
    """Of all lengths, the longest in many chunks, all with the logprobs of everything."""
    return [
        {
            "model": "tiny",
            "allow_unknown_model": True,
            "token_ids": [rng.randrange(3, 640) for _ in range(length)],
            "sampling": SamplingParams(
                max_tokens=16, ignore_eos=True, logprobs=5, prompt_logprobs=2, temperature=temperature, seed=7
            ),
        }
        for length in (1, 5, 17, 40, 130, 260)
        for temperature in (0.0, 0.9)
    ]


def told(result: JobResult) -> tuple[Any, ...]:
    choice = result.choices[0]
    return choice.token_ids, choice.logprobs, result.prompt_logprobs


async def test_company_changes_no_bit_of_a_job(redis_url: str, namespace: str) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    requests = make_requests(random.Random(seed))
    async with Client(redis_url, namespace=namespace) as client:
        async with running_worker(
            redis_url, namespace, exact=True, lease_s=20, max_num_seqs=1, prefix_cache=False
        ):
            alone = [await (await client.submit(**request)).result(timeout=60) for request in requests]
        async with running_worker(
            redis_url, namespace, exact=True, lease_s=20, max_step_tokens=64, max_prefill_tokens=33
        ):
            jobs = [await client.submit(**request) for request in requests]
            together = [await job.result(timeout=60) for job in jobs]
    for request, one, other in zip(requests, alone, together, strict=True):
        assert told(one) == told(other), len(request["token_ids"])


@pytest.mark.parametrize("layer", ["flag", "variable", "file"])
def test_exact_is_a_setting_like_any_other(layer: str, tmp_path: Path) -> None:
    file = tmp_path / "chairlift.toml"
    file.write_text("[worker]\nexact = true\n" if layer == "file" else "")
    flags = {"model": str(TINY_MODEL), "kv_tokens": 64, "exact": True if layer == "flag" else None}
    environ = {"CHAIRLIFT_EXACT": "true"} if layer == "variable" else {}
    settings = load_settings(WorkerConfig, flags, environ, file, section="worker")
    plain = load_settings(WorkerConfig, flags | {"exact": False}, {}, None)
    assert load(settings).fingerprint != load(plain).fingerprint


def test_where_it_cannot_hold_the_worker_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"exact needs a CPU and float32, not cpu and torch\.bfloat16"):
        load(WorkerConfig(model=str(TINY_MODEL), kv_tokens=64, dtype="bfloat16", exact=True))
    save_random_model(FAMILIES["gpt2"](), tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY_MODEL / name, tmp_path / name)
    with pytest.raises(ConfigError, match="exact needs the decoder: GPT2LMHeadModel"):
        load(WorkerConfig(model=str(tmp_path), kv_tokens=64, exact=True))
