"""The client against real servers, with the worker's part played by the calls that a worker makes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import pytest

from chairlift_client import (
    Cancelled,
    Client,
    Event,
    Failed,
    Finished,
    IdempotencyConflict,
    InvalidJob,
    Job,
    JobCancelled,
    JobExpired,
    JobFailed,
    JobOptions,
    JobTooLarge,
    Message,
    Queued,
    QueueFull,
    ResultTimeout,
    SamplingParams,
    Started,
    Tokens,
    UnknownModel,
)
from chairlift_client.protocol import decode_body
from played_worker import PlayedWorker, text_of
from servers import ClusterServers, Flavour, Server


@pytest.fixture
async def client(redis_url: str, namespace: str) -> AsyncIterator[Client]:
    async with Client(redis_url, namespace=namespace, retry_s=10) as client:
        yield client


@pytest.fixture
async def worker(redis_url: str, namespace: str) -> AsyncIterator[PlayedWorker]:
    async with await PlayedWorker.open(redis_url, namespace, partitions=3) as worker:
        yield worker


async def test_from_submit_to_result(client: Client, worker: PlayedWorker) -> None:
    job = await client.submit(
        model="m",
        messages=[{"role": "system", "content": ""}, Message(role="user", content="héllo")],
        sampling=SamplingParams(max_tokens=5, temperature=0, stop=("x",)),
        job_class="high",
        tenant="alice",
        metadata={"k": "v"},
    )
    status = await job.status()
    assert (status.state, status.job_class, status.tenant, status.position) == ("waiting", "high", "alice", 1)

    ride = await worker.claim_one()
    body = decode_body(ride.job.body)
    assert body.messages == (Message(role="system", content=""), Message(role="user", content="héllo"))
    assert body.sampling == SamplingParams(max_tokens=5, temperature=0.0, stop=("x",))
    assert body.metadata == {"k": "v"}

    events = asyncio.create_task(_collect(job))
    await ride.run("Hel", "lo", "!")
    assert [type(event) for event in await events] == [Started, Tokens, Tokens, Tokens, Finished]
    assert [event.seq for event in await events] == [1, 2, 3, 4, 5]
    result = await job.result(timeout=5)
    assert result.text == text_of(await events) == "Hello!"
    assert result.usage.output_tokens == 3
    status = await job.status()
    assert (status.state, status.position, status.attempts, status.output_tokens) == ("finished", 0, 1, 3)
    assert status.finished_ms >= status.boarded_ms >= status.submitted_ms > 0


async def _collect(job: Job, after_seq: int = 0) -> list[Event]:
    return [event async for event in job.stream(after_seq)]


async def test_the_stream_tells_the_place_in_line(client: Client, worker: PlayedWorker) -> None:
    first = await client.submit(model="m", prompt="a", idempotency_key="same partition")
    stream = client.stream(first.id)
    queued = await anext(stream)
    assert isinstance(queued, Queued)
    assert (queued.seq, queued.position) == (0, 1)
    ride = await worker.claim_one()
    await ride.run("x")
    assert [event.seq async for event in stream] == [1, 2, 3]


async def test_result_waits(client: Client, worker: PlayedWorker) -> None:
    job = await client.submit(model="m", token_ids=[1, 2, 3])
    waiting = asyncio.create_task(job.result())
    await (await worker.claim_one()).run("done")
    assert (await waiting).text == "done"


async def test_result_gives_up_after_its_timeout(client: Client, worker: PlayedWorker) -> None:
    job = await client.submit(model="m", prompt="x")
    with pytest.raises(ResultTimeout, match=r"did not end within 0.05 s"):
        await job.result(timeout=0.05)
    await (await worker.claim_one()).run("later")
    assert (await job.result(timeout=5)).text == "later"


async def test_generate_is_submit_and_result(client: Client, worker: PlayedWorker) -> None:
    answer = asyncio.create_task(client.generate(model="m", prompt="x"))
    await _play_until(worker, answer, "yes")
    assert (await answer).text == "yes"


async def _play_until(worker: PlayedWorker, task: asyncio.Task[object], text: str) -> None:
    while not task.done():
        for ride in await worker.claim():
            await ride.run(text)
        await asyncio.sleep(0)


async def test_generate_that_is_given_up_cancels_its_job(client: Client, worker: PlayedWorker) -> None:
    with pytest.raises(ResultTimeout) as caught:
        await client.generate(model="m", prompt="x", timeout=0.05)
    assert (await client.status(caught.value.job_id)).state == "cancelled"


async def test_a_failed_job(client: Client, worker: PlayedWorker) -> None:
    job = await client.submit(model="m", prompt="x")
    await (await worker.claim_one()).fail("the engine is broken")
    with pytest.raises(JobFailed, match="the engine is broken") as caught:
        await job.result(timeout=5)
    assert caught.value.code == "dead_letter"
    assert caught.value.job_id == job.id
    assert isinstance((await _collect(job))[-1], Failed)


async def test_cancel_while_waiting_and_after_the_end(client: Client, worker: PlayedWorker) -> None:
    job = await client.submit(model="m", prompt="x")
    assert await job.cancel() is True
    assert await job.cancel() is False
    with pytest.raises(JobCancelled):
        await job.result(timeout=5)
    assert isinstance((await _collect(job))[-1], Cancelled)


async def test_an_absent_job_is_an_error_everywhere(client: Client) -> None:
    absent = "m.0.0123456789012345678901"
    with pytest.raises(JobExpired, match=absent):
        await client.result(absent)
    with pytest.raises(JobExpired):
        await client.status(absent)
    with pytest.raises(JobExpired):
        await client.cancel(absent)
    with pytest.raises(JobExpired):
        await anext(client.stream(absent))
    assert await client.forget(absent) is True
    for no_id in ("m.0.short", f"{absent}\n", "", None, 5, absent.encode(), client.job(absent)):
        with pytest.raises(InvalidJob, match="not a job id"):
            client.stream(no_id)  # type: ignore[arg-type]


async def test_forget_erases_and_a_reader_learns_of_it(client: Client, worker: PlayedWorker) -> None:
    job = await client.submit(model="m", prompt="secret prompt")
    stream = client.stream(job.id)
    await anext(stream)
    assert await job.forget() is True
    assert [type(event) async for event in stream] == [Cancelled]
    with pytest.raises(JobExpired):
        await job.status()
    shard = worker.shards.all[0]
    left = [key async for key in shard.redis.scan_iter(f"*{job.id}*")]
    assert left == []


async def test_a_job_that_is_erased_unheard_of_does_not_wait_for_ever(
    client: Client, worker: PlayedWorker
) -> None:
    job = await client.submit(model="m", prompt="x")
    ride = await worker.claim_one()
    stream = client.stream(job.id)
    assert isinstance(await anext(stream), Started)
    redis = worker.shards.all[0].redis
    await redis.delete(f"{ride.prefix}:job:{job.id}", f"{ride.prefix}:ev:{job.id}")
    with pytest.raises(JobExpired):
        await anext(stream)


async def test_the_same_key_is_the_same_job(client: Client, worker: PlayedWorker) -> None:
    first = await client.submit(model="m", prompt="x", tenant="t", idempotency_key="k")
    again = await client.submit(
        model="m", prompt="x", tenant="t", idempotency_key="k", traceparent=f"00-{'a' * 32}-{'b' * 16}-01"
    )
    other_tenant = await client.submit(model="m", prompt="x", tenant="u", idempotency_key="k")
    no_key = await client.submit(model="m", prompt="x", tenant="t")
    assert again.id == first.id
    assert len({first.id, other_tenant.id, no_key.id}) == 3
    with pytest.raises(IdempotencyConflict) as caught:
        await client.submit(model="m", prompt="y", tenant="t", idempotency_key="k")
    assert caught.value.job_id == first.id


async def test_keys_are_found_again_after_the_partitions_grew(client: Client, worker: PlayedWorker) -> None:
    before = [await client.submit(model="m", prompt="x", idempotency_key=f"k{n}") for n in range(20)]
    worker.partitions = 8
    await worker.announce()
    after = [await client.submit(model="m", prompt="x", idempotency_key=f"k{n}") for n in range(20)]
    assert [job.id for job in before] == [job.id for job in after]
    with pytest.raises(IdempotencyConflict):
        await client.submit(model="m", prompt="y", idempotency_key="k0")
    new = [await client.submit(model="m", prompt="x", idempotency_key=f"n{n}") for n in range(30)]
    assert max(int(job.id.split(".")[1]) for job in new) > 3


async def test_an_adapter_is_asked_for_only_where_there_are_some(
    client: Client, worker: PlayedWorker
) -> None:
    with pytest.raises(InvalidJob, match="'m' is served without adapters; asked for 'polite'"):
        await client.submit(model="m", prompt="x", adapter="polite")
    await client.submit(model="new", prompt="x", adapter="polite", allow_unknown_model=True)
    await worker.announce(adapters=True)  # what the client has heard is out of date now
    await client.submit(model="m", prompt="x", adapter="polite")
    (ride,) = await worker.claim()
    assert decode_body(ride.job.body).adapter == "polite"


async def test_submit_many_answers_for_each(client: Client, worker: PlayedWorker) -> None:
    jobs: list[JobOptions] = [
        {"model": "m", "prompt": "a"},
        {"model": "m", "prompt": ""},
        {"model": "nobody", "prompt": "b"},
        *(JobOptions(model="m", prompt=f"{n}") for n in range(600)),
        {"model": "m", "token_ids": list(range(200))},
    ]
    outcomes = await client.submit_many(jobs)
    assert [type(outcome) for outcome in outcomes[:3]] == [Job, InvalidJob, UnknownModel]
    assert isinstance(outcomes[-1], JobTooLarge)
    assert str(outcomes[-1]) == "prompt and output need 201 tokens; the context of m has 100"
    ids = [outcome.id for outcome in outcomes if isinstance(outcome, Job)]
    assert len(set(ids)) == 601
    status = await client.model_status("m")
    assert status.waiting == 601
    listed = [job.job_id async for job in client.jobs("m")]
    assert sorted(listed) == sorted(ids)
    assert [job.job_id async for job in client.jobs("m", limit=10)] == listed[:10]
    assert [job async for job in client.jobs("m", state="running")] == []
    assert [job async for job in client.jobs("m", tenant="other")] == []
    assert await client.submit_many([]) == []


async def test_a_full_queue_says_when_to_come_again(redis_url: str, namespace: str) -> None:
    async with (
        await PlayedWorker.open(redis_url, namespace, max_waiting=2),
        Client(redis_url, namespace=namespace) as client,
    ):
        for _ in range(2):
            await client.submit(model="m", prompt="x")
        with pytest.raises(QueueFull, match="jobs waiting: 3 with this one, at most 2") as caught:
            await client.submit(model="m", prompt="x")
        assert caught.value.retry_after_s > 0


async def test_a_server_without_memory_is_a_full_queue(flavour: Flavour) -> None:
    with Server(flavour) as server:
        async with Client(server.url) as client:
            await client.submit(model="m", prompt="x", allow_unknown_model=True)
            with server.client() as redis:
                redis.execute_command("CONFIG", "SET", "maxmemory", "1")
            for jobs in (1, 3):
                outcomes = await client.submit_many(
                    [{"model": "m", "prompt": "x", "allow_unknown_model": True}] * jobs
                )
                assert all(isinstance(outcome, QueueFull) for outcome in outcomes)
                assert "memory of the server" in str(outcomes[0])


async def test_an_unknown_model(client: Client) -> None:
    with pytest.raises(UnknownModel, match="'nobody'"):
        await client.submit(model="nobody", prompt="x")
    job = await client.submit(model="nobody", prompt="x", allow_unknown_model=True)
    assert (await job.status()).state == "waiting"
    with pytest.raises(UnknownModel):
        await client.model_status("nobody")


async def test_delayed_jobs(client: Client, worker: PlayedWorker) -> None:
    later = await client.submit(model="m", prompt="x", delay_s=60)
    at = await client.submit(model="m", prompt="x", run_at=datetime.now(UTC) + timedelta(minutes=1))
    past = await client.submit(model="m", prompt="x", run_at=datetime(2020, 1, 1, tzinfo=UTC))
    states = [(await job.status()).state for job in (later, at, past)]
    assert states == ["delayed", "delayed", "waiting"]
    queued = await anext(later.stream())
    assert isinstance(queued, Queued)
    assert queued.eta_s is not None
    assert 50 < queued.eta_s <= 60


async def test_models_and_workers(client: Client, worker: PlayedWorker) -> None:
    models = await client.models()
    assert list(models) == ["m"]
    assert models["m"].partitions == 3
    (seen,) = await client.workers()
    assert (seen.worker_id, seen.model, seen.fields["pid"]) == (worker.name, "m", "7")


async def test_any_client_goes_on_from_an_id(client: Client, worker: PlayedWorker, redis_url: str) -> None:
    job = await client.submit(model="m", prompt="x")
    await (await worker.claim_one()).run("y")
    async with Client(redis_url, namespace=client.namespace) as other:
        assert (await other.job(job.id).result(timeout=5)).text == "y"
    async with Client(redis_url, namespace="elsewhere") as stranger:
        with pytest.raises(JobExpired):
            await stranger.result(job.id)


async def test_a_client_that_is_not_open_says_so(redis_url: str) -> None:
    client = Client(redis_url)
    with pytest.raises(RuntimeError, match="async with"):
        await client.submit(model="m", prompt="x")
    await client.open()
    await client.open()
    await client.aclose()
    await client.aclose()
    with pytest.raises(RuntimeError, match="async with"):
        client.stream("m.0.0123456789012345678901")


async def test_unknown_options_are_refused_by_name(client: Client) -> None:
    with pytest.raises(TypeError, match="unknown: max_tokens; a job takes model, messages"):
        await client.submit(model="m", prompt="x", max_tokens=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="model is missing"):
        await client.submit(prompt="x")  # type: ignore[call-arg]


async def test_on_a_cluster(cluster: ClusterServers, namespace: str) -> None:
    async with (
        await PlayedWorker.open(cluster.url, namespace, partitions=24) as worker,
        Client(cluster.url, namespace=namespace) as client,
    ):
        assert len({worker.shards.shard_of(worker.prefix(n)) for n in range(24)}) == 3
        outcomes = await client.submit_many([{"model": "m", "prompt": "x"} for _ in range(50)])
        jobs = [outcome for outcome in outcomes if isinstance(outcome, Job)]
        assert len(jobs) == 50
        streams = [asyncio.create_task(_collect(job)) for job in jobs]
        for ride in await worker.claim():
            await ride.run("some ", "text")
        for events in await asyncio.gather(*streams):
            assert isinstance(events[-1], Finished)
        assert (await client.model_status("m")).finished == 50
        assert len([job async for job in client.jobs("m")]) == 50


def test_importing_the_client_loads_nothing_heavy() -> None:
    code = (
        "import sys, chairlift_client\n"
        "heavy = {'torch', 'transformers', 'numpy', 'typer', 'rich', 'tokenizers'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
