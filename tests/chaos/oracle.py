"""What an undisturbed engine makes of each order, and whether another answer differs at a tie only."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import torch
from torch import Tensor

from chairlift_client.protocol import JobBody, SamplingParams
from chairlift_worker.engine.engine import Engine
from chairlift_worker.engine.noise import Purpose, draw_key, gumbel_noise, random_bits
from chairlift_worker.engine.request import EngineConfig, EngineRequest
from engine_runs import run
from loads import Order
from running_worker import tiny

TIE = 1e-4


class Answer(NamedTuple):
    """All of it."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str


class Oracle:
    """Answers orders by their index."""

    def __init__(self, orders: Seq[Order]) -> None:
        self._orders = orders
        self._model = tiny()
        self.answers = self._answer_all()

    def is_tie(self, index: int, token_ids: Seq[int]) -> bool:
        """Whether `token_ids` and the order's answer part where the model can hardly choose."""
        answer, sampling = self.answers[index], self._orders[index].sampling
        pairs = zip(token_ids, answer.token_ids, strict=False)
        position = next((place for place, (one, other) in enumerate(pairs) if one != other), None)
        if position is None:
            return False
        scores = self._scores(answer, position, sampling)
        mine, right = scores[token_ids[position]], scores[answer.token_ids[position]]
        return bool((mine - right).abs() <= TIE / max(sampling.temperature, 0.1))

    def _answer_all(self) -> list[Answer]:
        engine = Engine(self._model.runner, self._model.tokenizer, EngineConfig(max_num_seqs=32))
        requests = [self._request(index, order) for index, order in enumerate(self._orders)]
        told = run(engine, requests, is_checking=False)
        return [
            Answer(
                request.prompt_token_ids,
                tuple(told[request.job_id].token_ids),
                told[request.job_id].text,
                str(end.finish_reason) if (end := told[request.job_id].end) else "",
            )
            for request in requests
        ]

    def _request(self, index: int, order: Order) -> EngineRequest:
        body = JobBody(messages=order.messages, prompt=order.prompt, sampling=order.sampling)
        assert order.sampling.seed is not None
        prompt = self._model.tokenizer.prompt_ids(body, 0)
        return EngineRequest(str(index), tuple(prompt), order.sampling, order.sampling.seed, order=index)

    def _scores(self, answer: Answer, position: int, sampling: SamplingParams) -> Tensor:
        """What the token at `position` is chosen by, [vocabulary]; filters left aside."""
        prefix = (*answer.prompt_token_ids, *answer.token_ids[:position])
        greedy = SamplingParams(temperature=0.0, max_tokens=1, seed=0)
        seen: list[Tensor] = []
        forward = self._model.runner.forward

        class Peek:
            spec = self._model.runner.spec

            def forward(self, chunks: object) -> Tensor:
                seen.append(forward(chunks))  # type: ignore[arg-type]
                return seen[-1]

        run(Engine(Peek(), self._model.tokenizer, EngineConfig()), [EngineRequest("peek", prefix, greedy, 0)])
        logits = seen[-1][-1]
        if sampling.temperature == 0.0:
            return logits
        assert sampling.seed is not None
        key = draw_key(sampling.seed, 0, position, Purpose.TOKEN)
        noise = gumbel_noise(random_bits(key, torch.arange(len(logits))))
        return logits / sampling.temperature + noise
