"""Random loads of the tiny model's prompts, and what an undisturbed run makes of them."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

from chairlift_client import Client, SamplingParams
from chairlift_client.protocol import JobResult, Message
from tiny_model import TinyPrompt, load_prompts

STOPS = (".", " the", "and then", "!", "你", "\n")


class Order(NamedTuple):
    """What one job asks for."""

    messages: tuple[Message, ...] | None
    prompt: str | None
    sampling: SamplingParams

    def request(self) -> dict[str, Any]:
        """Keyword arguments of `Client.submit`."""
        given = {"messages": self.messages, "prompt": self.prompt, "sampling": self.sampling}
        return {"model": "tiny", **{name: value for name, value in given.items() if value is not None}}


def draw_orders(seed: int, count: int, *, max_tokens: int = 60) -> list[Order]:
    """Greedy and seeded jobs, some with stop strings; the seed says which."""
    rng = random.Random(seed)
    prompts = load_prompts()
    return [_order(rng, rng.choice(prompts), max_tokens) for _ in range(count)]


def _order(rng: random.Random, prompt: TinyPrompt, max_tokens: int) -> Order:
    sampling = SamplingParams(
        max_tokens=rng.randint(1, max_tokens),
        temperature=rng.choice((0.0, 0.0, 0.7, 1.0)),
        top_k=rng.choice((0, 20)),
        top_p=rng.choice((1.0, 0.9)),
        seed=rng.randrange(2**63),
        stop=(rng.choice(STOPS),) if rng.random() < 0.3 else (),
    )
    if prompt.messages is None:
        return Order(None, prompt.prompt, sampling)
    messages = tuple(Message(role=turn.role, content=turn.content) for turn in prompt.messages)
    return Order(messages, None, sampling)


async def run_all(client: Client, orders: list[Order]) -> list[JobResult]:
    """Submit them together; the results in their order."""
    jobs = [await client.submit(**order.request()) for order in orders]
    return [await job.result(timeout=60) for job in jobs]
