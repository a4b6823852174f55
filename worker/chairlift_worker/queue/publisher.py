"""From what the engine says to what the protocol sends: events, terminal events, results."""

from __future__ import annotations

from typing import Literal

from chairlift_client.protocol import (
    Cancelled,
    Choice,
    ChoiceDelta,
    Failed,
    FailureCode,
    Finished,
    JobResult,
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

    def tokens(self, attempt: Attempt, delta: TokenDelta, at_ms: int) -> None:
        """Log and publish new tokens; the first of a job also tells what is known of its prompt."""
        prompt = None
        if attempt.prompt is None:
            prompt = Usage(prompt_tokens=delta.prompt_tokens, cached_tokens=delta.cached_tokens)
            attempt.prompt = prompt
            attempt.first_token_ms = at_ms
        choice = ChoiceDelta(
            index=0,
            offset=delta.offset,
            token_ids=delta.token_ids,
            text=delta.text,
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
        )
        seq = attempt.next_seq()
        event = encode(Tokens(seq, attempt.job.epoch, at_ms, (choice,), prompt))
        attempt.proven = attempt.proven or bool(delta.token_ids)
        emission = Emission(attempt.job.job_id, attempt.job.epoch, seq, len(delta.token_ids), event)
        self._outbox.emit(attempt.prefix, attempt.key, emission)

    def finished(self, attempt: Attempt, delta: TokenDelta, at_ms: int) -> None:
        """Terminal event and result; `delta` is the one with the finish reason."""
        assert delta.finish_reason is not None
        assert delta.full_text is not None
        assert delta.full_token_ids is not None
        # What the cache had is the first attempt's, as the job's first event has told it.
        cached_tokens = attempt.prompt.cached_tokens if attempt.prompt else delta.cached_tokens
        usage = Usage(delta.prompt_tokens, delta.output_tokens, cached_tokens)
        result = JobResult(
            job_id=attempt.job.job_id,
            choices=(
                Choice(
                    index=0,
                    text=delta.full_text,
                    token_ids=delta.full_token_ids,
                    finish_reason=delta.finish_reason,
                    stop_reason=delta.stop_reason,
                ),
            ),
            usage=usage,
            timings=Timings(
                submitted_ms=attempt.job.submitted_ms,
                boarded_ms=attempt.job.boarded_ms,
                first_token_ms=attempt.first_token_ms,
                finished_ms=at_ms,
            ),
            attempts=attempt.job.epoch,
            metadata=attempt.body.metadata if attempt.body else {},
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
