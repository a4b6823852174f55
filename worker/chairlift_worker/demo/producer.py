"""The demo's producer, a process of its own: submits each prompt at its time, prints which job it became.

One JSON line per job on standard output: {"name": …, "job_id": …}. The server stands in CHAIRLIFT_REDIS_URL.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time

import msgspec

from chairlift_client import ChairliftError, Client, SamplingParams
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


def main(namespace: str, model: str) -> int:
    """Submit the demo's prompts; what goes wrong is one line on standard error."""
    try:
        asyncio.run(produce(os.environ["CHAIRLIFT_REDIS_URL"], namespace, model))
    except ChairliftError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
