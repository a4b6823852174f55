"""From what the engine says to what the protocol sends: events, terminal events, results."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Literal

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
from chairlift_client.worker_operations import Emission, finish
from chairlift_worker.engine.request import TokenDelta
from chairlift_worker.queue.attempts import Attempt
from chairlift_worker.queue.outbox import Outbox, Parcel


class Publisher:
    """Puts the outcome of steps into the outbox, with the next seq of each attempt."""

    def __init__(self, worker: str, outbox: Outbox) -> None:
        self._worker = worker
        self._outbox = outbox

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
        prompt, prompt_logprobs = None, None
        if attempt.prompt is None:
            first = deltas[0]
            prompt = attempt.prompt = Usage(first.prompt_tokens, 0, first.cached_tokens)
            prompt_logprobs = attempt.prompt_logprobs = first.prompt_logprobs
            attempt.first_token_ms = at_ms
        choices, candidates = (best, news) if is_best_of else (news, ())
        seq = attempt.next_seq()
        event = Tokens(seq, attempt.job.epoch, at_ms, choices, prompt, prompt_logprobs, candidates)
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

    def _end(
        self,
        attempt: Attempt,
        seq: int,
        state: Literal["finished", "failed", "cancelled"],
        event: bytes,
        result: bytes = b"",
        tokens: int = 0,
    ) -> None:
        call = finish(
            attempt.prefix,
            self._worker,
            attempt.job.job_id,
            attempt.job.epoch,
            seq=seq,
            state=state,
            event=event,
            result=result,
            tokens=tokens,
        )
        self._outbox.end(attempt.prefix, Parcel("finish", (attempt.key,), call))


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
