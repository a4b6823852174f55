"""`chairlift dead`: what to do about jobs that were given up."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from typing import Annotated

import typer

from chairlift_client.cli_connection import Config, Json, Namespace, RedisUrl, run_connected
from chairlift_client.cli_output import show_fields, show_letters, write_json, write_note
from chairlift_client.client import Client
from chairlift_client.dead_letters import DeadLetter
from chairlift_client.errors import InvalidJob

app = typer.Typer(
    help="Jobs that were given up: list, show, retry, drop.", no_args_is_help=True, rich_markup_mode=None
)

Letters = Annotated[
    list[str] | None, typer.Argument(help="What list printed; one or more.", show_default=False)
]
OfModel = Annotated[str | None, typer.Option("--model", "-m", help="With --all: of which model.")]
All = Annotated[bool, typer.Option("--all", help="Every dead letter of the model.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


@app.command("list")
def list_letters(
    model: Annotated[str, typer.Option("--model", "-m", help="Of which model.", show_default=False)],
    limit: Annotated[int, typer.Option(help="At most so many.")] = 50,
    json: Json = False,
    redis_url: RedisUrl = None,
    namespace: Namespace = None,
    config: Config = None,
) -> None:
    """List a model's dead letters, oldest first.

    What the jobs were asked stands in show alone.
    """

    async def act(client: Client) -> None:
        found: list[DeadLetter] = []
        async for letter in client.dead_letters(model):
            if len(found) == limit:
                write_note(f"there are more than {limit}: see --limit")
                break
            found.append(letter)
        if json:
            for letter in found:
                write_json(letter)
        else:
            show_letters(found)

    run_connected(act, redis_url, namespace, config)


@app.command()
def show(
    letter: Annotated[str, typer.Argument(help="What list printed.", show_default=False)],
    json: Json = False,
    redis_url: RedisUrl = None,
    namespace: Namespace = None,
    config: Config = None,
) -> None:
    """Show one dead letter and what its job was asked."""

    async def act(client: Client) -> None:
        found = await client.dead_letter(letter)
        write_json(found) if json else show_fields(found)

    run_connected(act, redis_url, namespace, config)


@app.command()
def retry(
    letters: Letters = None,
    model: OfModel = None,
    all_: All = False,
    yes: Yes = False,
    redis_url: RedisUrl = None,
    namespace: Namespace = None,
    config: Config = None,
) -> None:
    """Give jobs a new life under their ids, from the beginning."""

    async def act(client: Client) -> None:
        async def one(letter: str) -> bool:
            done = await client.retry_dead(letter)
            write_note(f"{letter}: {'waits in line again' if done else 'its job lives already'}")
            return done

        await _each(client, letters or [], model if all_ else None, one, "retry", is_sure=yes)

    _check_choice(letters, model, is_all=all_)
    run_connected(act, redis_url, namespace, config)


@app.command()
def drop(
    letters: Letters = None,
    model: OfModel = None,
    all_: All = False,
    yes: Yes = False,
    redis_url: RedisUrl = None,
    namespace: Namespace = None,
    config: Config = None,
) -> None:
    """Remove dead letters and what their jobs were asked, for good."""

    async def act(client: Client) -> None:
        async def one(letter: str) -> bool:
            done = await client.drop_dead(letter)
            write_note(f"{letter}: {'dropped' if done else 'was not there'}")
            return done

        await _each(client, letters or [], model if all_ else None, one, "drop", is_sure=yes)

    _check_choice(letters, model, is_all=all_)
    run_connected(act, redis_url, namespace, config)


def _check_choice(letters: list[str] | None, model: str | None, *, is_all: bool) -> None:
    if is_all == bool(letters) or is_all != (model is not None):
        raise InvalidJob("name letters, or all of a model: --all --model NAME")


async def _each(
    client: Client,
    letters: list[str],
    model: str | None,
    act: Callable[[str], Awaitable[bool]],
    verb: str,
    *,
    is_sure: bool,
) -> None:
    """Does it to the named letters, or after a question to all that the model has now."""
    if model is not None:
        # Read to the end first: a retried job may be given up again while this runs.
        letters = [letter.letter_id async for letter in client.dead_letters(model)]
        if letters and not is_sure and not _confirm(f"{verb} {len(letters)} dead letters of {model}?"):
            raise typer.Exit(1)
    num_done = sum([await act(letter) for letter in letters])
    write_note(f"{num_done} of {len(letters)} done")


def _confirm(question: str) -> bool:
    """Asks on stderr; without a person to ask, the answer is no."""
    if not sys.stdin.isatty():
        write_note(f"{question} Say --yes where nobody can answer.")
        return False
    return typer.confirm(question, err=True)
