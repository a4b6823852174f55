"""The demo's producer, a process of its own: submits each prompt at its time, prints which job it became.

One JSON line per job on standard output: {"name": …, "job_id": …, "at_s": …}.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Annotated

import msgspec
import typer

from chairlift_client import Client, SamplingParams
from chairlift_worker.demo.prompts import DemoPrompt, load_prompts

RESULT_TTL_S = 600.0


class Submitted(msgspec.Struct, frozen=True):
    """A line of the output."""

    name: str
    job_id: str


async def produce(url: str, namespace: str, model: str) -> None:
    """Submit all prompts, each `after_s` after the first."""
    began = time.monotonic()
    async with Client(url, namespace=namespace) as client:
        for prompt in load_prompts():
            await asyncio.sleep(began + prompt.after_s - time.monotonic())
            job = await client.submit(
                model=model,
                messages=[{"role": "user", "content": prompt.prompt}],
                sampling=sampling(prompt),
                result_ttl_s=RESULT_TTL_S,
            )
            sys.stdout.buffer.write(msgspec.json.encode(Submitted(prompt.name, job.id)) + b"\n")
            sys.stdout.flush()


def sampling(prompt: DemoPrompt) -> SamplingParams:
    """Seeded, so that every run of the demo says the same."""
    return SamplingParams(
        max_tokens=prompt.max_tokens, temperature=prompt.temperature, top_p=0.9, seed=ord(prompt.name)
    )


def main(
    url: Annotated[str, typer.Option()],
    namespace: Annotated[str, typer.Option()],
    model: Annotated[str, typer.Option()],
) -> None:
    """Submit the demo's prompts."""
    asyncio.run(produce(url, namespace, model))


if __name__ == "__main__":
    typer.run(main)
