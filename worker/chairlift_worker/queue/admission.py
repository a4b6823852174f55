"""From a claimed job to a request that the engine can run: decode, check, render, tokenize, replay.

Runs in threads of its own, off the event loop and off the engine's thread. What a user can make slow (a
structure to compile, a template of the user's own, a long text) is put off to another thread, so that the
jobs behind it do not wait.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from chairlift_client.body_checks import check_body
from chairlift_client.checks import check_size
from chairlift_client.errors import InvalidJob
from chairlift_client.protocol import JobBody, Limits, decode_body
from chairlift_worker.engine.request import EngineRequest
from chairlift_worker.models.adapter_shelf import AdapterShelf, Loan
from chairlift_worker.models.tokenizer import ChatTokenizer
from chairlift_worker.queue.attempts import Attempt
from chairlift_worker.structured.compiler import StructureCompiler

LONG_BODY_BYTES = 128 * 1024
"""Reading and tokenizing more than this takes a tenth of a second and longer."""


class TakesLong(Exception):
    """Come again with `may_take_long`, in a thread for which nobody waits."""


class OtherWeights(Exception):
    """The job began with an adapter that this worker does not have; another one may."""


class Admitted(NamedTuple):
    """What the engine is told, and the adapter that is in use from now on."""

    request: EngineRequest
    loan: Loan | None


def admit(
    attempt: Attempt,
    tokenizer: ChatTokenizer,
    structures: StructureCompiler,
    adapters: AdapterShelf | None,
    order: int,
    *,
    may_take_long: bool = False,
) -> Admitted:
    """The request of an attempt, whose body is set on it.

    Raises InvalidJob for what can never run, OtherWeights for what cannot go on here, NoRoom for what has to
    wait for an adapter in use to be given back.
    """
    if not may_take_long and len(attempt.job.body) > LONG_BODY_BYTES:
        raise TakesLong
    body = attempt.body = attempt.body or _read_body(attempt.job.body)
    if not may_take_long and (body.structured is not None or body.chat_template is not None):
        raise TakesLong
    if body.adapter is None:
        return Admitted(_request(attempt, body, tokenizer, structures, order), None)
    loan = _borrow(attempt, body.adapter, adapters, order, may_take_long=may_take_long)
    try:
        request = _request(attempt, body, tokenizer, structures, order)
    except BaseException:
        loan.give_back()
        raise
    return Admitted(request._replace(adapter=loan.adapter), loan)


def _request(
    attempt: Attempt,
    body: JobBody,
    tokenizer: ChatTokenizer,
    structures: StructureCompiler,
    order: int,
) -> EngineRequest:
    prompt_ids = tuple(tokenizer.prompt_ids(body, attempt.job.submitted_ms))
    if body.sampling.truncate_prompt is not None:
        prompt_ids = prompt_ids[-body.sampling.truncate_prompt :]
    first, *more = attempt.choices.token_ids or ((),)
    return EngineRequest(
        job_id=attempt.key,
        prompt_token_ids=prompt_ids,
        sampling=body.sampling,
        seed=attempt.job.seed,
        logged_token_ids=first,
        deadline_ms=attempt.job.deadline_ms or None,
        order=order,
        job_class=attempt.job.job_class,
        submitted_ms=attempt.job.submitted_ms,
        cache=body.cache,
        cache_salt=attempt.job.tenant,
        more_logged_token_ids=tuple(more),
        prompt_is_told=attempt.prompt is not None,
        bad_words=tokenizer.bad_words(body.sampling.bad_words),
        grammar=None if body.structured is None else structures.compile(body.structured),
    )


def _borrow(
    attempt: Attempt, name: str, adapters: AdapterShelf | None, order: int, *, may_take_long: bool
) -> Loan:
    """The adapter of a job. A text that one has begun is ended by no other."""
    try:
        if adapters is None:
            raise InvalidJob(f"this worker has no adapters; the job asks for {name!r}")
        if not may_take_long and not adapters.holds(name):
            raise TakesLong
        loan = adapters.borrow(name, order)
    except InvalidJob as error:
        if attempt.adapter:
            raise OtherWeights(str(error)) from error
        raise
    if attempt.adapter not in ("", loan.adapter.digest):
        loan.give_back()
        raise OtherWeights(
            f"the text was begun with weights {attempt.adapter} of adapter {name!r}; "
            f"this worker has {loan.adapter.digest}"
        )
    return loan


def _read_body(packed: bytes) -> JobBody:
    """What the client checked is checked again: other clients may not have, or not the same."""
    try:
        return check_body(decode_body(check_size(packed, Limits())), Limits())
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidJob(f"the job's body does not follow the schema: {error}") from error
