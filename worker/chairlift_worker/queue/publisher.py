"""From what the engine says to what the protocol sends: events, terminal events, results."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence as Seq
from typing import Literal, TypeAlias

from chairlift_client.protocol import (
    Cancelled,
    ChoiceDelta,
    Failed,
    FailureCode,
    Finished,
    JobResult,
    SamplingParams,
    Timings,
    Tokens,
    Usage,
    encode,
)
from chairlift_client.worker_operations import (
    Emission,
    RetryPolicy,
    UnreadableJob,
    fail,
    finish,
    hand_back,
)
from chairlift_worker.engine.request import TokenDelta
from chairlift_worker.queue.attempts import Attempt
from chairlift_worker.queue.outbox import Outbox, Parcel

Ending: TypeAlias = Literal["finished", "failed", "cancelled"]


class Publisher:
    """Puts the outcome of steps and every ending into the outbox, with the next seq of each attempt."""

    def __init__(self, worker: str, outbox: Outbox, policy: RetryPolicy) -> None:
        self._worker = worker
        self._outbox = outbox
        self._policy = policy

    def tokens(self, attempt: Attempt, deltas: Seq[TokenDelta], at_ms: int) -> None:
        """Log and publish what a step added to the choices of a job, in one event.

        The first one of a job also tells what is known of its prompt. Deltas that say nothing new are left
        out: a resumed job may hear of choices that its log has the end of.
        """
        assert attempt.body is not None
        sampling = attempt.body.sampling
        news = tuple(delta for given in deltas if attempt.choices.has_news(delta := _choice_delta(given)))
        for delta in news:
            attempt.choices.hear(delta)
        is_best_of = sampling.best_of is not None
        best = self._best(attempt, sampling) if is_best_of else ()
        if not news and not best:
            return
        prompt, prompt_logprobs, adapter = None, None, ""
        if attempt.prompt is None:
            first = deltas[0]
            prompt = attempt.prompt = Usage(first.prompt_tokens, 0, first.cached_tokens)
            prompt_logprobs = attempt.prompt_logprobs = first.prompt_logprobs
            attempt.first_token_ms = at_ms
            adapter = attempt.adapter
        choices, candidates = (best, news) if is_best_of else (news, ())
        seq = attempt.next_seq()
        event = Tokens(seq, attempt.job.epoch, at_ms, choices, prompt, prompt_logprobs, candidates, adapter)
        num_tokens = sum(len(delta.token_ids) for delta in news)
        attempt.proven = attempt.proven or num_tokens > 0
        emission = Emission(attempt.job.job_id, attempt.job.epoch, seq, num_tokens, encode(event))
        self._outbox.emit(attempt.prefix, attempt.key, emission)

    def _best(self, attempt: Attempt, sampling: SamplingParams) -> tuple[ChoiceDelta, ...]:
        """The kept choices of a `best_of` job, whole, once all have ended; told once."""
        if attempt.choices.best_is_told or not attempt.choices.are_complete(sampling):
            return ()
        attempt.choices.best_is_told = True
        return tuple(
            ChoiceDelta(
                index=choice.index,
                offset=0,
                token_ids=choice.token_ids,
                text=choice.text,
                finish_reason=choice.finish_reason,
                stop_reason=choice.stop_reason,
                logprobs=choice.logprobs or (),
            )
            for choice in attempt.choices.kept(sampling)
        )

    def finished(self, attempt: Attempt, at_ms: int) -> None:
        """Terminal event and result; every choice has ended."""
        assert attempt.body is not None
        assert attempt.prompt is not None
        usage = Usage(attempt.prompt.prompt_tokens, attempt.choices.num_tokens, attempt.prompt.cached_tokens)
        result = JobResult(
            job_id=attempt.job.job_id,
            choices=attempt.choices.kept(attempt.body.sampling),
            usage=usage,
            timings=Timings(
                submitted_ms=attempt.job.submitted_ms,
                boarded_ms=attempt.job.boarded_ms,
                first_token_ms=attempt.first_token_ms,
                finished_ms=at_ms,
            ),
            attempts=attempt.job.epoch,
            metadata=attempt.body.metadata,
            prompt_logprobs=attempt.prompt_logprobs,
        )
        seq = attempt.next_seq()
        event = encode(Finished(seq, attempt.job.epoch, at_ms, usage))
        self._end(attempt, seq, "finished", event, encode(result), usage.prompt_tokens + usage.output_tokens)

    def failed(self, attempt: Attempt, code: FailureCode, message: str, at_ms: int) -> None:
        """A failure that another try cannot mend."""
        seq = attempt.next_seq()
        self._end(attempt, seq, "failed", encode(Failed(seq, attempt.job.epoch, at_ms, code, message)))

    def cancelled(self, attempt: Attempt, at_ms: int) -> None:
        """Its user wanted it so."""
        seq = attempt.next_seq()
        self._end(attempt, seq, "cancelled", encode(Cancelled(seq, attempt.job.epoch, at_ms)))

    def unreadable(self, prefix: str, job: UnreadableJob, at_ms: int) -> None:
        """A job whose fields or log do not follow the protocol."""
        seq = job.seq + 1
        event = encode(Failed(seq, job.epoch, at_ms, "invalid", job.reason))
        self._finish(prefix, job.job_id, job.epoch, seq, "failed", event)

    def attempt_failed(self, attempt: Attempt, reason: str) -> None:
        """An attempt went wrong in a living process: later again, or a dead letter."""
        call = fail(
            attempt.prefix,
            self._worker,
            attempt.job.job_id,
            attempt.job.epoch,
            reason=reason,
            jitter=random.random(),
            policy=self._policy,
        )
        self._outbox.end(attempt.prefix, Parcel("fail", (attempt.key,), call))

    def handed_back(self, attempts: Seq[Attempt], *, spent: bool = False) -> None:
        """Another worker goes on with these."""
        groups: dict[str, list[Attempt]] = defaultdict(list)
        for attempt in attempts:
            groups[attempt.prefix].append(attempt)
        for prefix, group in groups.items():
            pairs = [(attempt.job.job_id, attempt.job.epoch) for attempt in group]
            call = hand_back(prefix, self._worker, pairs, policy=self._policy, spent=spent)
            self._outbox.end(prefix, Parcel("hand_back", tuple(attempt.key for attempt in group), call))

    def _end(
        self,
        attempt: Attempt,
        seq: int,
        state: Ending,
        event: bytes,
        result: bytes = b"",
        tokens: int = 0,
    ) -> None:
        job = attempt.job
        self._finish(attempt.prefix, job.job_id, job.epoch, seq, state, event, result, tokens)

    def _finish(
        self,
        prefix: str,
        job_id: str,
        epoch: int,
        seq: int,
        state: Ending,
        event: bytes,
        result: bytes = b"",
        tokens: int = 0,
    ) -> None:
        call = finish(
            prefix,
            self._worker,
            job_id,
            epoch,
            seq=seq,
            state=state,
            event=event,
            result=result,
            tokens=tokens,
        )
        self._outbox.end(prefix, Parcel("finish", (f"{job_id} {epoch}",), call))


def _choice_delta(delta: TokenDelta) -> ChoiceDelta:
    return ChoiceDelta(
        index=delta.choice,
        offset=delta.offset,
        token_ids=delta.token_ids,
        text=delta.text,
        finish_reason=delta.finish_reason,
        stop_reason=delta.stop_reason,
        logprobs=delta.logprobs,
    )
