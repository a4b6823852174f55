"""From a claimed job to a request that the engine can run: decode, check, render, tokenize, replay.

Runs in a thread of its own, off the event loop and off the engine's thread.
"""

from __future__ import annotations

import msgspec

from chairlift_client.body_checks import check_body
from chairlift_client.errors import InvalidJob
from chairlift_client.protocol import Limits, decode_body
from chairlift_worker.engine.request import EngineRequest
from chairlift_worker.models.tokenizer import ChatTokenizer
from chairlift_worker.queue.attempts import Attempt


def admit(attempt: Attempt, tokenizer: ChatTokenizer, order: int) -> EngineRequest:
    """The request of an attempt, whose body is set on it. Raises InvalidJob for what can never run."""
    try:
        body = check_body(decode_body(attempt.job.body), Limits())
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidJob(f"the job's body does not follow the schema: {error}") from error
    attempt.body = body
    return EngineRequest(
        job_id=attempt.key,
        prompt_token_ids=tuple(tokenizer.prompt_ids(body, attempt.job.submitted_ms)),
        sampling=body.sampling,
        seed=attempt.job.seed,
        logged_token_ids=attempt.logged_token_ids,
        deadline_ms=attempt.job.deadline_ms or None,
        order=order,
        cache=body.cache,
        cache_salt=attempt.job.tenant,
    )
