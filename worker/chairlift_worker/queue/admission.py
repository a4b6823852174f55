"""From a claimed job to a request that the engine can run: decode, check, render, tokenize, replay.

Runs in a thread of its own, off the event loop and off the engine's thread.
"""

from __future__ import annotations

import msgspec

from chairlift_client import checks
from chairlift_client.errors import InvalidJob
from chairlift_client.protocol import JobBody, Limits, decode_body
from chairlift_worker.engine.request import EngineRequest
from chairlift_worker.models.tokenizer import ChatTokenizer
from chairlift_worker.queue.attempts import Attempt


def admit(attempt: Attempt, tokenizer: ChatTokenizer, order: int) -> EngineRequest:
    """The request of an attempt, whose body is set on it. Raises InvalidJob for what can never run."""
    try:
        body = decode_body(attempt.job.body)
    except msgspec.MsgspecError as error:
        raise InvalidJob(f"the job's body does not follow the schema: {error}") from error
    attempt.body = body
    _check(body)
    return EngineRequest(
        job_id=attempt.key,
        prompt_token_ids=tuple(tokenizer.prompt_ids(body, attempt.job.submitted_ms)),
        sampling=body.sampling,
        seed=attempt.job.seed,
        logged_token_ids=attempt.logged_token_ids,
        deadline_ms=attempt.job.deadline_ms or None,
        order=order,
    )


def _check(body: JobBody) -> None:
    """What the client checked is checked again: other clients may not have, or not the same."""
    limits = Limits()
    checks.check_sampling(body.sampling, limits)
    checks.check_metadata(body.metadata, limits)
    inputs = (body.messages, body.prompt, body.token_ids)
    if sum(given is not None for given in inputs) != 1:
        raise InvalidJob("exactly one of messages, prompt and token_ids has to be given")
    if body.messages is not None:
        checks.check_messages(body.messages, limits)
    elif body.prompt is not None:
        checks.check_text("prompt", body.prompt)
    else:
        checks.check_token_ids("token_ids", body.token_ids, limits.prompt_tokens)
