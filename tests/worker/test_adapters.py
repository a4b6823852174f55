"""Jobs that name a LoRA adapter, on a real worker: each is given what it would be given alone."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from chairlift_client import Client, InvalidJob, Job, JobFailed, JobResult, SamplingParams
from chairlift_client.errors import ConfigError
from chairlift_worker.bootstrap import load
from chairlift_worker.config import WorkerConfig
from chairlift_worker.engine.runner import Runner
from fleet import Fleet
from hooked_runner import HookedRunner, Hooks
from lora_adapters import edit_config, edit_tensors, save_random_adapter
from random_models import FAMILIES, save_random_model
from running_worker import running_worker
from servers import until
from tiny_model import TINY_MODEL

NAMES = ("north", "south", "west")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "adapters"
    for seed, name in enumerate(NAMES):
        save_random_adapter(
            TINY_MODEL, path / name, seed=seed, rank=(1, 4, 12)[seed], alpha=12, strength=0.05
        )
    return path


def order(adapter: str | None, **fields: Any) -> dict[str, Any]:
    sampling = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True, "logprobs": 2} | fields
    return {
        "model": "tiny",
        "prompt": "Once upon a time there was a fox",
        "adapter": adapter,
        "sampling": SamplingParams(**sampling),
        "allow_unknown_model": True,
    }


async def ride(client: Client, requests: list[dict[str, Any]]) -> list[JobResult]:
    jobs = [await client.submit(**request) for request in requests]
    return [await job.result(timeout=60) for job in jobs]


async def ready(client: Client) -> None:
    async def is_announced() -> bool:
        return "tiny" in await client.models()

    await until(is_announced)


async def test_any_mix_is_each_alone(redis_url: str, namespace: str, folder: Path) -> None:
    requests = [
        order(adapter, temperature=temperature, seed=5, n=n)
        for temperature, n in ((0.0, 1), (0.9, 2))
        for adapter in (None, *NAMES)
    ]
    fields: dict[str, Any] = {"exact": True, "adapters": str(folder), "lease_s": 20}
    async with Client(redis_url, namespace=namespace) as client:
        async with running_worker(redis_url, namespace, max_num_seqs=1, prefix_cache=False, **fields):
            alone = [(await ride(client, [request]))[0] for request in requests]
        for max_adapters in (8, 1):
            async with running_worker(
                redis_url, namespace, max_step_tokens=64, max_adapters=max_adapters, **fields
            ):
                together = await ride(client, requests)
            for request, one, other in zip(requests, alone, together, strict=True):
                assert one.choices == other.choices, (request["adapter"], max_adapters)
    assert len({result.text for result in alone[:4]}) == 4, "the adapters change nothing"


async def test_a_bad_adapter_costs_nobody_but_its_job(redis_url: str, namespace: str, folder: Path) -> None:
    edit_config(save_random_adapter(TINY_MODEL, folder / "dora", seed=0), use_dora=True)
    edit_config(save_random_adapter(TINY_MODEL, folder / "large", seed=0, rank=33))
    endless = save_random_adapter(TINY_MODEL, folder / "endless", seed=0)
    edit_tensors(endless, lambda tensors: {name: tensor * 1e30 for name, tensor in tensors.items()})
    bad = {
        "nobody": "there is no adapter 'nobody'; this worker knows 6",
        "../adapters/north": "there is no adapter '../adapters/north'",
        "dora": "adapter 'dora' cannot be used: adapter_config.json: use_dora = True is not supported",
        "large": "adapter 'large' cannot be used: its rank is 33; this worker takes at most 16",
        "endless": "logits of output token 0 are not finite",
    }
    good = [order(None), order("north"), order("west", temperature=0.7, seed=3)]
    async with (
        Client(redis_url, namespace=namespace) as client,
        running_worker(
            redis_url, namespace, exact=True, adapters=str(folder), max_adapter_rank=16, lease_s=20
        ),
    ):
        undisturbed = await ride(client, good)
        for name, message in bad.items():
            failing = await client.submit(**order(name))
            beside = await ride(client, good)
            with pytest.raises(JobFailed) as failed:
                await failing.result(timeout=30)
            assert message in str(failed.value)
            assert [x.choices for x in beside] == [x.choices for x in undisturbed]


async def test_an_adapter_that_comes_while_the_worker_runs(
    redis_url: str, namespace: str, folder: Path
) -> None:
    async with (
        Client(redis_url, namespace=namespace) as client,
        running_worker(redis_url, namespace, adapters=str(folder), exact=True),
    ):
        with pytest.raises(JobFailed, match="there is no adapter 'east'; this worker knows 3"):
            await (await client.submit(**order("east"))).result(timeout=30)
        shutil.copytree(folder / "south", folder / "new")
        (folder / "new").rename(folder / "east")
        east, south = await ride(client, [order("east"), order("south")])
        assert east.choices == south.choices
        # Other weights under the same name: from now on, and from no cached block of the old ones.
        shutil.rmtree(folder / "east")
        shutil.copytree(folder / "north", folder / "east")
        east, north = await ride(client, [order("east"), order("north")])
        assert east.choices == north.choices != south.choices


async def test_workers_say_which_adapters_they_have(redis_url: str, namespace: str, folder: Path) -> None:
    async with (
        Client(redis_url, namespace=namespace) as client,
        running_worker(redis_url, namespace, adapters=str(folder), lease_s=0.5, max_adapters=2),
    ):
        await ready(client)
        assert (await client.models())["tiny"].adapters
        await ride(client, [order(name) for name in NAMES])

        async def has_told() -> bool:
            (worker,) = await client.workers()
            said = {name: worker.fields[name] for name in worker.fields if name.startswith("adapter")}
            return said == {
                "adapters": "3",
                "adapters_held": "2",
                "adapter_names": "north,south,west",
            }

        await until(has_told)


async def test_a_worker_without_adapters_takes_no_job_that_names_one(redis_url: str, namespace: str) -> None:
    async with Client(redis_url, namespace=namespace) as client:
        before = await client.submit(**order("north"))
        async with running_worker(redis_url, namespace):
            with pytest.raises(JobFailed, match="this worker has no adapters; the job asks for 'north'"):
                await before.result(timeout=30)
            await ready(client)
            client._door._models.clear()
            with pytest.raises(InvalidJob, match="'tiny' is served without adapters; asked for 'north'"):
                await client.submit(**order("north"))


def test_models_that_take_no_adapters_are_refused_by_name(tmp_path: Path) -> None:
    save_random_model(FAMILIES["gpt2"](), tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY_MODEL / name, tmp_path / name)
    with pytest.raises(ConfigError, match="adapters needs the decoder: GPT2LMHeadModel"):
        load(WorkerConfig(model=str(tmp_path), kv_tokens=64, adapters=str(tmp_path)))


def slow_steps(runner: Runner) -> Runner:
    return HookedRunner(runner, Hooks(step_s=0.01))


async def test_jobs_that_wait_for_room_can_be_cancelled(redis_url: str, namespace: str, folder: Path) -> None:
    """With one place for three adapters, and a long job in it: who gives up holds up nobody."""
    async with (
        Client(redis_url, namespace=namespace) as client,
        running_worker(redis_url, namespace, adapters=str(folder), max_adapters=1, wrap=slow_steps) as worker,
    ):
        long = await client.submit(**order("north", max_tokens=900))
        await _begun(client, long.id)
        waiting: list[Job] = []
        for name in ("south", "west", "north", "west"):
            waiting.append(await client.submit(**order(name)))

            async def all_wait() -> bool:
                return len(worker._flow._loans._waiting) == len(waiting)

            await until(all_wait)
        assert await waiting[0].cancel()
        assert await waiting[1].cancel()
        await waiting[2].result(timeout=30)  # shares the place of the long one, now that it is first
        assert (await long.status()).state == "running"
        assert await long.cancel()
        await waiting[3].result(timeout=30)


async def _begun(client: Client, job_id: str) -> None:
    async for event in client.stream(job_id):
        if event.seq > 1:
            return


@pytest.mark.parametrize("is_last_try", [True, False])
async def test_a_text_is_ended_by_the_weights_that_began_it(
    fleet: Fleet, redis_url: str, namespace: str, folder: Path, is_last_try: bool
) -> None:
    fields: dict[str, Any] = {"adapters": str(folder), "lease_s": 0.5}
    async with Client(redis_url, namespace=namespace) as client:
        victim = await fleet.spawn(redis_url, namespace, hooks=Hooks(step_s=0.02), **fields)
        calm = await (await client.submit(**order("north", max_tokens=60))).result(timeout=30)
        job = await client.submit(**order("north", max_tokens=60))
        await _begun(client, job.id)
        await victim.kill()
        (folder / "north").rename(folder / "away")
        shutil.copytree(folder / "south", folder / "north")
        heir = await fleet.spawn(redis_url, namespace, max_failures=1 if is_last_try else 9, **fields)
        if is_last_try:
            with pytest.raises(JobFailed, match=r"text was begun with weights \w{32} of adapter 'north'"):
                await job.result(timeout=30)
        else:
            await heir.wait_for_log("cannot go on here")
            shutil.rmtree(folder / "north")
            (folder / "away").rename(folder / "north")
            result = await job.result(timeout=60)
            assert [x.token_ids for x in result.choices] == [x.token_ids for x in calm.choices]
            assert result.attempts > 2
        await heir.kill()
