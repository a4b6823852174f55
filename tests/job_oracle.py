"""What a job must be given, computed one sequence at a time, from the whole context, without any cache.

No batch, no blocks, no chunks, no state: every token is found from the tokens before it, every text by
decoding all tokens at once.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import partial

from chairlift_client.protocol import FinishReason, SamplingParams, TokenLogprobs
from chairlift_worker.engine.request import EngineRequest
from chairlift_worker.engine.runner import RunnerSpec
from sampling_oracle import adjusted, draw, judge, lead

LogitsOf = Callable[[list[int]], list[float]]
"""The logits of the next token after a context."""
Decode = Callable[[list[int], bool], str]
"""The text of tokens, with special tokens skipped or not."""


@dataclass
class ExpectedChoice:
    """One output."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    leads: list[Callable[[], float]] = field(default_factory=list)
    """For each token: tells how far it was ahead of the second best."""


def expected_choice(
    request: EngineRequest, index: int, spec: RunnerSpec, logits_of: LogitsOf, decode: Decode
) -> ExpectedChoice:
    """The choice of an undisturbed job; logged tokens are not looked at."""
    sampling, prompt = request.sampling, list(request.prompt_token_ids)
    room = min(spec.context_tokens, spec.num_blocks * spec.block_size + 1) - len(prompt)
    most = room if sampling.max_tokens is None else sampling.max_tokens
    endings = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else spec.eos_token_ids)
    choice = ExpectedChoice()
    output = choice.token_ids
    while len(output) < most:
        may_end = len(output) + 1 > sampling.min_tokens
        banned = (set() if may_end else endings) | _last_tokens_of_bad_words(request.bad_words, output)
        logits = logits_of(prompt + output)
        row = adjusted(logits, sampling, prompt, output, banned)
        token_id = draw(row, sampling, request.seed, index, len(output))
        choice.leads.append(partial(lead, row, sampling, request.seed, index, len(output)))
        output.append(token_id)
        if sampling.logprobs is not None:
            choice.logprobs.append(judge(logits, token_id, sampling.logprobs))
        if may_end and token_id in endings:
            choice.finish_reason = "stop"
            choice.stop_reason = token_id if token_id in sampling.stop_token_ids else None
            choice.text = decode(output[:-1], sampling.skip_special_tokens)
            return choice
        if _stop_in_text(choice, sampling, decode, is_last=len(output) == most):
            return choice
    choice.finish_reason = "length"
    choice.text = decode(output, sampling.skip_special_tokens)
    return choice


def expected_prompt_logprobs(
    request: EngineRequest, logits_of: LogitsOf
) -> tuple[TokenLogprobs | None, ...] | None:
    """Each prompt token judged from those before it."""
    num_top, prompt = request.sampling.prompt_logprobs, list(request.prompt_token_ids)
    if num_top is None:
        return None
    judged = (judge(logits_of(prompt[:i]), prompt[i], num_top) for i in range(1, len(prompt)))
    return (None, *judged)


def _last_tokens_of_bad_words(bad_words: Seq[tuple[int, ...]], output: Seq[int]) -> set[int]:
    ends = [output[len(output) - len(word) + 1 :] if len(word) > 1 else [] for word in bad_words]
    return {
        word[-1]
        for word, end in zip(bad_words, ends, strict=True)
        if len(output) >= len(word) - 1 and tuple(end) == word[:-1]
    }


def _stop_in_text(choice: ExpectedChoice, sampling: SamplingParams, decode: Decode, *, is_last: bool) -> bool:
    """Whether the newest token completes a stop string; then the text is cut."""
    if not sampling.stop or len(choice.token_ids) <= sampling.min_tokens:
        return False
    text = decode(choice.token_ids, sampling.skip_special_tokens)
    before = _certain(decode(choice.token_ids[:-1], sampling.skip_special_tokens))
    text = text if is_last else _certain(text)
    matches = [
        (start + len(stop), start, stop)
        for stop in sampling.stop
        for start in [text.find(stop, max(0, len(before) - len(stop) + 1))]
        if start >= 0 and start + len(stop) > len(before)
    ]
    if not matches:
        return False
    end, start, stop = min(matches)
    choice.text = text[: end if sampling.include_stop else start]
    choice.finish_reason, choice.stop_reason = "stop", stop
    return True


def _certain(text: str) -> str:
    """Without an incomplete character at its end."""
    return text.rstrip("\ufffd")
