"""The commands of producers, subscribers and operators. Worker commands join by entry point (plugins.py)."""

from __future__ import annotations

import sys
from typing import Annotated, cast

import typer

from chairlift_client import cli_dead
from chairlift_client.cli_connection import Config, Json, Namespace, RedisUrl, run_connected
from chairlift_client.cli_output import (
    show_fields,
    show_jobs,
    show_overview,
    write_event,
    write_json,
    write_note,
)
from chairlift_client.client import Client, Job
from chairlift_client.errors import InvalidJob, JobCancelled, JobFailed
from chairlift_client.plugins import add_plugins
from chairlift_client.protocol import Cancelled, Failed, JobClass, JobState

app = typer.Typer(
    help="LLM inference as a message queue: jobs in through Redis, tokens out as they come.",
    epilog="Every option of connection is also a setting: CHAIRLIFT_REDIS_URL and CHAIRLIFT_NAMESPACE in the "
    "environment, redis_url and namespace in chairlift.toml. Exit codes: 0 done, 1 the job or the server "
    "failed, 2 wrong use.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


JobIdArgument = Annotated[str, typer.Argument(help="What submit printed.", show_default=False)]


@app.command()
def submit(
    text: Annotated[
        str, typer.Argument(help="What to ask, as one user message; - reads stdin.", show_default=False)
    ],
    model: Annotated[
        str, typer.Option("--model", "-m", help="The name its workers announce.", show_default=False)
    ],
    system: Annotated[str | None, typer.Option(help="A system message before it.")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Take the text as the prompt itself, without chat template.")
    ] = False,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Stay and print the answer as it comes.")
    ] = False,
    max_tokens: Annotated[int | None, typer.Option(help="Most output tokens.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.  [default: 1]")] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample among the k likeliest tokens.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Sample among the likeliest with this much in sum.")
    ] = None,
    min_p: Annotated[float | None, typer.Option(help="Leave out what is this much less likely.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same answer.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="A text that ends the answer; may be repeated.")
    ] = None,
    adapter: Annotated[str | None, typer.Option(help="A LoRA adapter that the workers have.")] = None,
    job_class: Annotated[str, typer.Option("--class", help="high, normal, low or batch.")] = "normal",
    tenant: Annotated[str, typer.Option(help="On whose account.")] = "default",
    deadline: Annotated[float | None, typer.Option(help="Seconds after which the job fails.")] = None,
    delay: Annotated[float | None, typer.Option(help="Seconds before which it does not begin.")] = None,
    key: Annotated[str | None, typer.Option(help="Idempotency key: the same key is the same job.")] = None,
    allow_unknown_model: Annotated[
        bool, typer.Option("--allow-unknown-model", help="Submit before any worker announced it.")
    ] = False,
    redis_url: RedisUrl = None,
    namespace: Namespace = None,
    config: Config = None,
) -> None:
    """Put a job in line and print its id."""
    text = sys.stdin.read() if text == "-" else text
    messages = [{"role": "system", "content": system}] if system is not None else []
    messages.append({"role": "user", "content": text})
    if raw and system is not None:
        raise InvalidJob("--system and --raw exclude each other")
    sampling = {
        "max_tokens": max_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
        "seed": seed, "stop": tuple(stop or ()),
    }  # fmt: skip

    async def act(client: Client) -> None:
        job = await client.submit(
            model=model,
            messages=None if raw else messages,
            prompt=text if raw else None,
            sampling={name: value for name, value in sampling.items() if value is not None},
            adapter=adapter,
            job_class=cast(JobClass, job_class),  # submit checks it
            tenant=tenant,
            deadline_s=deadline,
            delay_s=delay,
            idempotency_key=key,
            allow_unknown_model=allow_unknown_model,
        )
        if follow:
            write_note(job.id)
            await _print_stream(job, 0, as_json=False)
        else:
            print(job.id)

    run_connected(act, redis_url, namespace, config)


@app.command()
def stream(
    job_id: JobIdArgument,
    after: Annotated[int, typer.Option(help="Only events after this number.")] = 0,
    json: Json = False,
    redis_url: RedisUrl = None,
    namespace: Namespace = None,
    config: Config = None,
) -> None:
    """Print a job's answer as it comes."""
    run_connected(
        lambda client: _print_stream(client.job(job_id), after, as_json=json), redis_url, namespace, config
    )


@app.command()
def status(
    job_id: Annotated[str | None, typer.Argument(help="A job; all queues and workers without it.")] = None,
    json: Json = False,
    redis_url: RedisUrl = None,
    namespace: Namespace = None,
    config: Config = None,
) -> None:
    """Where a job stands, or all queues and workers."""

    async def act(client: Client) -> None:
        if job_id is not None:
            found = await client.status(job_id)
            write_json(found) if json else show_fields(found)
            return
        models = [await client.model_status(model) for model in await client.models()]
        workers = await client.workers()
        if json:
            write_json({"models": [*models], "workers": [*workers]})
        else:
            show_overview(models, workers)

    run_connected(act, redis_url, namespace, config)


@app.command()
def cancel(
    job_id: JobIdArgument, redis_url: RedisUrl = None, namespace: Namespace = None, config: Config = None
) -> None:
    """End a job, waiting or running."""

    async def act(client: Client) -> None:
        write_note("cancelled" if await client.cancel(job_id) else "it had ended already")

    run_connected(act, redis_url, namespace, config)


@app.command()
def forget(
    job_id: JobIdArgument, redis_url: RedisUrl = None, namespace: Namespace = None, config: Config = None
) -> None:
    """Erase a job's prompt, events and result.

    One that still runs is cancelled first.
    """

    async def act(client: Client) -> None:
        write_note("erased" if await client.forget(job_id) else "erased as soon as its worker lets go")

    run_connected(act, redis_url, namespace, config)


@app.command()
def jobs(
    model: Annotated[str, typer.Option("--model", "-m", help="Of which model.", show_default=False)],
    state: Annotated[
        str | None, typer.Option(help="waiting, delayed, running, finished, failed or cancelled.")
    ] = None,
    tenant: Annotated[str | None, typer.Option(help="Of one tenant only.")] = None,
    limit: Annotated[int, typer.Option(help="At most so many.")] = 50,
    json: Json = False,
    redis_url: RedisUrl = None,
    namespace: Namespace = None,
    config: Config = None,
) -> None:
    """List the jobs of a model, newest first.

    That is all live ones, and the ended ones whose results are still kept.
    """

    async def act(client: Client) -> None:
        chosen = cast(JobState | None, state)
        found = [job async for job in client.jobs(model, state=chosen, tenant=tenant, limit=limit)]
        if json:
            for job in found:
                write_json(job)
        else:
            show_jobs(found)

    run_connected(act, redis_url, namespace, config)


app.add_typer(cli_dead.app, name="dead")
add_plugins(app)


async def _print_stream(job: Job, after: int, *, as_json: bool) -> None:
    """Prints events to the end; a job that failed or was cancelled is an error of the command."""
    async for event in job.stream(after):
        write_json(event) if as_json else write_event(event)
        if isinstance(event, Failed):
            raise JobFailed(
                f"{job.id} failed ({event.code}): {event.message}", job_id=job.id, code=event.code
            )
        if isinstance(event, Cancelled):
            raise JobCancelled(f"{job.id} was cancelled", job_id=job.id)
